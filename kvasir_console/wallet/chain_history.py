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
class LamportChange:
    """How one account's SOL changed, fee included."""

    account: str
    before: int
    after: int

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
    lamport_changes: tuple[LamportChange, ...] = ()

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

    def received_lamports(self, wallet: str) -> int:
        """Lamports ``wallet`` gained (below zero: lost), fee included."""
        return sum(each.change for each in self.lamport_changes if each.account == wallet)


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
    counterparties: tuple[str, ...] = ()
    """The wallets whose KVR changed the other way."""

    @classmethod
    def of(cls, view: TransactionView, account: str, mint: str) -> KvrMovement:
        change = view.received(account, mint)
        others = {
            each.owner: None
            for each in view.token_changes
            if each.mint == mint and each.account != account
            if each.change * change < 0
        }
        return cls(view.signature, view.slot, view.block_time, change, view.memos, view.error, tuple(others))


@dataclass(frozen=True, slots=True)
class Movement:
    """One transaction as a wallet sees it: what came or went of both, who was on the other side, what it cost."""

    signature: str
    slot: int
    block_time: int | None
    micro_kvr: int
    lamports: int
    """Without the fee and, for one that failed, 0. Rent of an account that was opened is in it."""
    fee_lamports: int
    """0 when someone else paid it."""
    counterparties: tuple[str, ...]
    memos: tuple[str, ...]
    error: str | None

    @classmethod
    def of(cls, view: TransactionView, owner: str, mint: str) -> Movement:
        micro_kvr = view.received_by_owner(owner, mint)
        fee = view.fee_lamports if view.signers[:1] == (owner,) else 0
        lamports = view.received_lamports(owner) + fee
        if micro_kvr:
            others = [
                each.owner
                for each in view.token_changes
                if each.mint == mint and each.owner != owner and each.change * micro_kvr < 0
            ]
        elif lamports > 0:
            others = [each.account for each in view.lamport_changes if _gave(each, view)]
        else:
            others = [each.account for each in view.lamport_changes if each.account != owner and each.change > 0]
        return cls(
            view.signature,
            view.slot,
            view.block_time,
            micro_kvr,
            lamports,
            fee,
            tuple(dict.fromkeys(others)) if view.error is None and (micro_kvr or lamports) else (),
            view.memos,
            view.error,
        )


def _gave(change: LamportChange, view: TransactionView) -> bool:
    """Whether an account lost more than the fee it may have paid."""
    fee = view.fee_lamports if view.signers[:1] == (change.account,) else 0
    return change.change + fee < 0


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
        lamport_changes=tuple(
            LamportChange(key, int(before), int(after))
            for key, before, after in zip(keys, meta.pre_balances, meta.post_balances, strict=False)
            if before != after
        ),
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
