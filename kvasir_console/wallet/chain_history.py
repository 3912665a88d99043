"""What a cluster tells of past transactions, as plain values: who paid what to whom. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from solders.transaction import VersionedTransaction
from spl.memo.constants import MEMO_PROGRAM_ID

from kvasir_console.wallet.chain_errors import describe_error


@dataclass(frozen=True, slots=True)
class TokenChange:
    """How one token account's amount changed."""

    account: str
    owner: str
    mint: str
    before: int
    after: int
    """Both in the mint's smallest unit: micro-KVR for KVR."""

    @property
    def change(self) -> int:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class TransactionView:
    signature: str
    slot: int
    block_time: int | None
    """Unix seconds."""
    error: str | None
    fee_lamports: int
    signers: tuple[str, ...]
    """The first one paid the fee."""
    memos: tuple[str, ...]
    token_changes: tuple[TokenChange, ...]

    def received(self, account: str, mint: str) -> int:
        """Micro-KVR that token account ``account`` gained (below zero: lost); 0 for a failed transaction."""
        if self.error is not None:
            return 0
        return sum(each.change for each in self.token_changes if each.account == account and each.mint == mint)

    def received_by_owner(self, owner: str, mint: str) -> int:
        """As ``received``, over all token accounts of a wallet."""
        if self.error is not None:
            return 0
        return sum(each.change for each in self.token_changes if each.owner == owner and each.mint == mint)


@dataclass(frozen=True, slots=True)
class KvrMovement:
    """One line of a KVR account's history."""

    signature: str
    slot: int
    block_time: int | None
    micro_kvr: int
    """Below zero for what went out; 0 when the transaction failed."""
    memos: tuple[str, ...]
    error: str | None

    @classmethod
    def of(cls, view: TransactionView, account: str, mint: str) -> KvrMovement:
        change = view.received(account, mint)
        return cls(view.signature, view.slot, view.block_time, change, view.memos, view.error)


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """One line of an address's history."""

    signature: str
    slot: int
    block_time: int | None
    error: str | None
    memo: str | None
    """As the RPC gives it: ``[bytes] text``, several joined by ``; ``."""


def history_item(value: Any) -> HistoryItem:
    """From one entry of ``getSignaturesForAddress``."""
    return HistoryItem(
        signature=str(value.signature),
        slot=int(value.slot),
        block_time=value.block_time,
        error=None if value.err is None else describe_error(value.err),
        memo=value.memo,
    )


def transaction_view(signature: str, value: Any) -> TransactionView:
    """From ``getTransaction`` with base64 encoding."""
    tx: VersionedTransaction = value.transaction.transaction
    meta = value.transaction.meta
    keys = [str(key) for key in tx.message.account_keys]
    if meta.loaded_addresses is not None:
        keys += [str(key) for key in (*meta.loaded_addresses.writable, *meta.loaded_addresses.readonly)]
    return TransactionView(
        signature=signature,
        slot=int(value.slot),
        block_time=value.block_time,
        error=None if meta.err is None else describe_error(meta.err),
        fee_lamports=int(meta.fee),
        signers=tuple(keys[: tx.message.header.num_required_signatures]),
        memos=tuple(
            bytes(each.data).decode(errors="replace")
            for each in tx.message.instructions
            if keys[each.program_id_index] == str(MEMO_PROGRAM_ID)
        ),
        token_changes=_token_changes(keys, meta.pre_token_balances or (), meta.post_token_balances or ()),
    )


def _token_changes(keys: list[str], before: Any, after: Any) -> tuple[TokenChange, ...]:
    was, now = ({each.account_index: each for each in balances} for balances in (before, after))
    changes = []
    for index in sorted(was.keys() | now.keys()):
        either = now.get(index) or was[index]
        changes.append(
            TokenChange(
                account=keys[index],
                owner=str(either.owner),
                mint=str(either.mint),
                before=int(was[index].ui_token_amount.amount) if index in was else 0,
                after=int(now[index].ui_token_amount.amount) if index in now else 0,
            )
        )
    return tuple(changes)
