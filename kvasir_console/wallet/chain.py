"""One client for any Solana cluster: the embedded ledger, devnet, or another.

Sending money has three steps, so that no crash or lost reply can pay twice:

1. ``prepare`` signs the transaction; the caller stores its signature and last valid height.
2. ``submit`` sends those bytes. However it ends, the transaction may have landed.
3. ``await_outcome`` asks about that signature until the ledger knows: it landed, it failed, or it can land no more.

Only ``Outcome.EXPIRED`` allows signing again. Sending the same bytes again is always safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from solana.rpc.commitment import Commitment
from solana.rpc.models import TxOpts
from solders.account import Account
from solders.instruction import Instruction
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.pubkey import Pubkey
from solders.signature import Signature
from solders.sysvar import CLOCK as CLOCK_SYSVAR
from solders.token.state import TokenAccount
from solders.transaction import VersionedTransaction
from spl.token.constants import TOKEN_PROGRAM_ID

from kvasir_console.config import WalletConfig
from kvasir_console.errors import LedgerError, NetworkError, UsageError
from kvasir_console.wallet import token
from kvasir_console.wallet.chain_endpoints import Endpoints, Pin, check_rpc_url
from kvasir_console.wallet.chain_errors import PreflightError, describe_error, stale
from kvasir_console.wallet.chain_history import (
    HistoryItem,
    KvrMovement,
    Movement,
    TransactionView,
    history_item,
    transaction_view,
)
from kvasir_console.wallet.chain_outcome import Witness, decide, status_of, witness
from kvasir_console.wallet.chain_signing import PreparedTransfer, RecentBlockhash, assemble, sign
from kvasir_console.wallet.chain_types import Outcome, OutcomeState, Preview, SignatureStatus, Simulation
from kvasir_console.wallet.keys import decode_address
from kvasir_console.wallet.localnet.auth import read_auth_file

__all__ = [
    "Chain",
    "Outcome",
    "OutcomeState",
    "PreparedTransfer",
    "Preview",
    "RecentBlockhash",
    "SignatureStatus",
    "Simulation",
    "assemble",
    "check_rpc_url",
    "open_chain",
    "sign",
]

POLL_S = 0.5
RESEND_S = 3.0
OUTCOME_TIMEOUT_S = 180.0
MAX_CLOCK_LAG_S = 120.0
"""How far the chain's own clock may be behind this machine's before nothing is signed."""


class Chain:
    """A connection to a cluster, by one RPC or several. Addresses and signatures go in and out in base58.

    Every method raises ``NetworkError`` when the RPC does not answer and ``LedgerError`` when it refuses, and
    ``WalletError`` for text that is no address.
    """

    def __init__(
        self,
        rpc_url: str,
        auth: str | None = None,
        *,
        fallbacks: Sequence[str] = (),
        pin: Pin | None = None,
        commitment: str = Commitment.CONFIRMED,
        timeout_s: float = 20.0,
        poll_s: float = POLL_S,
        monotonic_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            rpc_url: ``https://``; plain ``http://`` only to this machine.
            auth: value of the ``Authorization`` header, if that RPC wants one. The fallbacks never get it.
            fallbacks: RPCs of the same cluster to ask when it does not answer or lags behind.
            pin: which cluster it has to be.
            commitment: level at which something counts: ``processed``, ``confirmed`` or ``finalized``.
            timeout_s: longest wait for one answer.

        Raises:
            ConfigError: ``rpc_url_insecure``.
        """
        self.rpc_url = rpc_url
        self.commitment = Commitment(commitment)
        self._poll_s = poll_s
        self._monotonic_s = monotonic_s
        self._now_s = now_s
        self._rpc = Endpoints(
            (rpc_url, *fallbacks),
            auth,
            commitment=self.commitment,
            timeout_s=timeout_s,
            pin=pin,
            monotonic_s=monotonic_s,
        )

    async def __aenter__(self) -> Chain:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._rpc.close()

    # -- reading -------------------------------------------------------------------------------------------------

    async def genesis_hash(self) -> str:
        """Names the cluster: a wallet that remembers it notices when the URL leads to another."""
        return str((await self._rpc.ask("its genesis hash", lambda rpc: rpc.get_genesis_hash())).value)

    async def balance_lamports(self, address: str) -> int:
        key = _pubkey(address)
        response = await self._rpc.ask(f"the balance of {address}", lambda rpc: rpc.get_balance(key))
        return int(response.value)

    async def balance_micro_kvr(self, owner: str, mint: str) -> int:
        """KVR in ``owner``'s associated account; 0 when there is none or someone else controls it."""
        owner_key, mint_key = _pubkey(owner), _pubkey(mint)
        account = await self.account(token.associated_token_address(owner, mint))
        if account is None or account.owner != TOKEN_PROGRAM_ID:
            return 0
        try:
            holding = TokenAccount.from_bytes(bytes(account.data))
        except ValueError:
            return 0
        return int(holding.amount) if holding.owner == owner_key and holding.mint == mint_key else 0

    async def account(self, address: str) -> Account | None:
        key = _pubkey(address)
        response = await self._rpc.ask(f"the account {address}", lambda rpc: rpc.get_account_info(key))
        account: Account | None = response.value
        return account

    async def rent_exempt_lamports(self, data_bytes: int) -> int:
        """SOL an account of that size must hold."""
        response = await self._rpc.ask(
            "the rent of an account", lambda rpc: rpc.get_minimum_balance_for_rent_exemption(data_bytes)
        )
        return int(response.value)

    async def latest_blockhash(self) -> RecentBlockhash:
        response = await self._rpc.ask("a recent blockhash", lambda rpc: rpc.get_latest_blockhash())
        value = response.value
        return RecentBlockhash(value.blockhash, int(value.last_valid_block_height), int(response.context.slot))

    async def check_fresh(self) -> None:
        """Refuse a chain that stands still, by its own clock: what is signed over its blockhash would be lost.

        Raises:
            NetworkError: ``rpc_stale``.
        """
        response = await self._rpc.ask(
            "the time", lambda rpc: rpc.get_account_info(CLOCK_SYSVAR, commitment=Commitment.PROCESSED)
        )
        data = b"" if response.value is None else bytes(response.value.data)
        if len(data) < _CLOCK.size:
            return
        lag_s = self._now_s() - _CLOCK.unpack_from(data)[0]
        if lag_s > MAX_CLOCK_LAG_S:
            raise stale("the time", f"{lag_s:.0f} s, if this machine's clock is right")

    async def status(self, signature: str) -> SignatureStatus | None:
        """What the RPC knows of a transaction, however old; ``None`` when it knows nothing."""
        wanted = _signature(signature)
        status, _ = await self._rpc.ask("the status of a transaction", lambda rpc: status_of(rpc, wanted))
        return status

    async def transaction(self, signature: str) -> TransactionView | None:
        """A transaction that reached this client's commitment (at least ``confirmed``), or ``None``."""
        wanted = _signature(signature)

        async def read(rpc: Any) -> TransactionView | None:
            response = await rpc.get_transaction(
                wanted, encoding="base64", commitment=self._landed_commitment(), max_supported_transaction_version=0
            )
            return None if response.value is None else transaction_view(signature, response.value)

        return await self._rpc.ask("a transaction", read)

    async def history(self, address: str, limit: int = 20, before: str | None = None) -> tuple[HistoryItem, ...]:
        """Transactions that name ``address``, newest first; ``before`` is the last signature of the page before."""
        key, start = _pubkey(address), None if before is None else _signature(before)

        async def read(rpc: Any) -> tuple[HistoryItem, ...]:
            response = await rpc.get_signatures_for_address(
                key, before=start, limit=limit, commitment=self._landed_commitment()
            )
            return tuple(history_item(each) for each in response.value)

        return await self._rpc.ask(f"the history of {address}", read)

    async def kvr_history(
        self, owner: str, mint: str, limit: int = 20, before: str | None = None
    ) -> tuple[KvrMovement, ...]:
        """What came into and went out of ``owner``'s KVR account, newest first: one request for each line."""
        account = token.associated_token_address(owner, mint)
        views = [await self.transaction(each.signature) for each in await self.history(account, limit, before)]
        return tuple(KvrMovement.of(view, account, mint) for view in views if view is not None)

    async def movements(self, owner: str, mint: str, limit: int = 20) -> tuple[Movement, ...]:
        """The last transactions of a wallet, in SOL and in KVR, newest first: one request for each line."""
        pages = [await self.history(address, limit) for address in (owner, token.associated_token_address(owner, mint))]
        found = {each.signature: each for page in pages for each in page}
        newest = sorted(found.values(), key=lambda each: each.slot, reverse=True)[:limit]
        views = [await self.transaction(each.signature) for each in newest]
        return tuple(Movement.of(view, owner, mint) for view in views if view is not None)

    async def simulate(self, raw: bytes) -> Simulation:
        """What a signed transaction would do now; it changes nothing."""
        transaction = _transaction(raw)
        response = await self._rpc.ask(
            "a trial run", lambda rpc: rpc.simulate_transaction(transaction, sig_verify=True)
        )
        return _simulation(response.value)

    async def preview(self, message: MessageV0) -> Preview:
        """What a message would cost and do, before anyone signs it.

        Raises:
            LedgerError: ``blockhash_expired``: it was made too long ago.
        """
        payer = message.account_keys[0]
        unsigned = VersionedTransaction.populate(
            message, [Signature.default()] * message.header.num_required_signatures
        )
        fee = (await self._rpc.ask("the fee", lambda rpc: rpc.get_fee_for_message(message))).value
        if fee is None:
            raise LedgerError("blockhash_expired", "The transaction was made too long ago.", "Make it again.")
        before = await self.balance_lamports(str(payer))
        response = await self._rpc.ask(
            "a trial run", lambda rpc: rpc.simulate_transaction(unsigned, accounts_addresses=[payer])
        )
        simulation = _simulation(response.value)
        accounts = response.value.accounts
        after = None if simulation.error is not None or not accounts or accounts[0] is None else accounts[0].lamports
        return Preview(int(fee), None if after is None else before - int(after), simulation.units, simulation.error)

    # -- sending -------------------------------------------------------------------------------------------------

    async def airdrop(self, address: str, lamports: int) -> str:
        """Ask a test cluster for SOL; returns the signature of its transfer."""
        key = _pubkey(address)
        response = await self._rpc.ask("an airdrop", lambda rpc: rpc.request_airdrop(key, lamports), once=True)
        return str(response.value)

    async def prepare(self, instructions: Sequence[Instruction], signers: Sequence[Keypair]) -> PreparedTransfer:
        """Sign ``instructions`` with a fresh blockhash; the first signer pays the fee. Nothing is sent.

        Raises:
            UsageError: ``transaction_too_large``.
        """
        recent = await self.latest_blockhash()
        message = MessageV0.try_compile(signers[0].pubkey(), list(instructions), [], recent.hash)
        return sign(message, signers, recent)

    async def submit(self, prepared: PreparedTransfer) -> None:
        """Send the bytes once, after the RPC's own trial run.

        Returns when the RPC took it, knows it already, or does not know its blockhash (too old, or too new for this
        RPC: ``await_outcome`` tells).

        Raises:
            PreflightError: it would fail; the RPC did not pass it on this time.
            NetworkError: no answer: it may have landed.
        """
        options = TxOpts(skip_preflight=False, preflight_commitment=self.commitment)
        try:
            await self._rpc.ask("this transaction", lambda rpc: rpc.send_raw_transaction(prepared.raw, options))
        except PreflightError as error:
            if not error.already_processed and not error.blockhash_not_found:
                raise

    async def await_outcome(
        self,
        signature: str,
        last_valid_block_height: int,
        *,
        raw: bytes | None = None,
        resend: bool = True,
        slot: int = 0,
        timeout_s: float = OUTCOME_TIMEOUT_S,
    ) -> Outcome:
        """Ask until the ledger knows how a transaction ended, through any number of failed requests.

        Args:
            slot: it cannot have landed before; an RPC that remembers less far back does not get to say it expired.
            raw: its bytes: by them each RPC is asked whether it knows the blockhash still.
            resend: send them again, too, every few seconds until it lands.
            timeout_s: longest wait; the question can be asked again at any time after.

        Raises:
            NetworkError: ``outcome_unknown``: still undecided, which is no reason to sign another; or, at once,
                ``rpc_unauthorised`` or ``history_too_short``.
            LedgerError: ``cluster_changed``, at once.
        """
        wanted = _signature(signature)
        message = None if raw is None else _transaction(raw).message
        deadline = self._monotonic_s() + timeout_s
        resend_at = self._monotonic_s() + RESEND_S
        last_error: NetworkError | LedgerError | None = None
        while True:
            try:
                outcome = await self._decide(wanted, last_valid_block_height, slot, message)
                if outcome is not None:
                    return outcome
                if raw is not None and resend and self._monotonic_s() >= resend_at:
                    resend_at = self._monotonic_s() + RESEND_S
                    await self._resend(raw)
            except (NetworkError, LedgerError) as error:
                if error.code in _FINAL:
                    raise
                last_error = error
            if self._monotonic_s() >= deadline:
                raise NetworkError(
                    "outcome_unknown",
                    f"After {timeout_s:.0f} s it is not known whether transaction {signature[:8]}… landed.",
                    "Ask for its outcome again later; do not send another in its place.",
                ) from last_error
            await asyncio.sleep(self._poll_s)

    async def transact(self, prepared: PreparedTransfer, *, timeout_s: float = OUTCOME_TIMEOUT_S) -> Outcome:
        """``submit`` and ``await_outcome`` in one. A refused trial run raises; a lost reply does not.

        Raises:
            PreflightError: as ``submit``.
            NetworkError: ``outcome_unknown``, as ``await_outcome``.
        """
        with contextlib.suppress(NetworkError):  # it may have arrived; its signature tells
            await self.submit(prepared)
        return await self.outcome(prepared, timeout_s=timeout_s)

    async def outcome(self, prepared: PreparedTransfer, *, timeout_s: float = OUTCOME_TIMEOUT_S) -> Outcome:
        """``await_outcome`` of a stored transaction, sent again meanwhile. Raises as ``await_outcome``."""
        return await self.await_outcome(
            prepared.signature,
            prepared.last_valid_block_height,
            raw=prepared.raw,
            slot=prepared.slot,
            timeout_s=timeout_s,
        )

    async def _decide(
        self, signature: Signature, last_valid_block_height: int, since_slot: int, message: MessageV0 | None
    ) -> Outcome | None:
        """The outcome, or ``None`` while the transaction may still land or is not yet deep enough.

        One RPC's word is enough for what it shows, but not for what it does not know: before a transaction counts as
        expired, every other RPC that answers has to say so too.
        """
        what = "the outcome of a transaction"

        async def question(rpc: Any) -> Witness:
            return await witness(rpc, signature, last_valid_block_height, since_slot, message)

        first = await self._rpc.ask(what, question)
        if not self._rpc.several or not first.says_expired:
            return decide([first], self.commitment)
        return decide(await self._rpc.ask_each(what, question) or [first], self.commitment)

    async def _resend(self, raw: bytes) -> None:
        """Without a trial run: the first one passed, and a second could only refuse what has just landed."""
        options = TxOpts(skip_preflight=True)
        await self._rpc.ask("this transaction", lambda rpc: rpc.send_raw_transaction(raw, options))

    def _landed_commitment(self) -> Commitment:
        return Commitment.CONFIRMED if self.commitment is Commitment.PROCESSED else self.commitment


def open_chain(config: WalletConfig, *, pin: Pin | None = None) -> Chain:
    """The chain that the configuration names.

    Raises:
        ConfigError: ``rpc_url_insecure``.
        SystemResourceError: the file with the RPC's header cannot be used.
    """
    auth = read_auth_file(Path(config.rpc_auth_file).expanduser()) if config.rpc_auth_file else None
    return Chain(
        config.rpc_url, auth, fallbacks=tuple(config.rpc_fallbacks.split()), pin=pin, commitment=config.commitment
    )


_FINAL = ("rpc_unauthorised", "history_too_short", "cluster_changed")
"""Failures that asking again does not mend."""
_CLOCK = struct.Struct("<32xq")
"""The clock's account: slot, epoch start, epoch, leader schedule epoch, Unix time."""


def _simulation(value: Any) -> Simulation:
    return Simulation(
        error=None if value.err is None else describe_error(value.err),
        logs=tuple(value.logs or ()),
        units=int(value.units_consumed or 0),
    )


def _pubkey(address: str) -> Pubkey:
    return Pubkey.from_bytes(decode_address(address))


def _signature(text: str) -> Signature:
    try:
        return Signature.from_string(text)
    except ValueError as error:
        raise UsageError("signature_malformed", "That is not the signature of a transaction.") from error


def _transaction(raw: bytes) -> VersionedTransaction:
    try:
        return VersionedTransaction.from_bytes(raw)
    except ValueError as error:
        raise UsageError("transaction_malformed", "Those bytes are not a transaction.") from error
