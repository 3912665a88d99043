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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from solana.rpc.async_api import AsyncClient
from solana.rpc.commitment import Commitment
from solana.rpc.models import TxOpts
from solders.account import Account
from solders.hash import Hash
from solders.instruction import Instruction
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.pubkey import Pubkey
from solders.signature import Signature
from solders.token.state import TokenAccount
from solders.transaction import VersionedTransaction
from spl.token.constants import TOKEN_PROGRAM_ID

from kvasir_console.errors import ConfigError, LedgerError, NetworkError, UsageError
from kvasir_console.wallet import token
from kvasir_console.wallet.chain_errors import PreflightError, ask, describe_error
from kvasir_console.wallet.chain_history import (
    HistoryItem,
    KvrMovement,
    TransactionView,
    history_item,
    transaction_view,
)
from kvasir_console.wallet.keys import decode_address

POLL_S = 0.5
RESEND_S = 3.0
OUTCOME_TIMEOUT_S = 180.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class RecentBlockhash:
    hash: Hash
    last_valid_block_height: int


@dataclass(frozen=True, slots=True)
class PreparedTransfer:
    """A signed transaction. Store ``signature`` and ``last_valid_block_height`` before it is submitted."""

    raw: bytes
    signature: str
    last_valid_block_height: int


class OutcomeState(StrEnum):
    CONFIRMED = "confirmed"
    """It landed and did what it says."""
    FAILED = "failed"
    """It landed, paid its fee and changed nothing else."""
    EXPIRED = "expired"
    """It did not land and never will."""


@dataclass(frozen=True, slots=True)
class Outcome:
    state: OutcomeState
    slot: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class SignatureStatus:
    slot: int
    commitment: Commitment
    error: str | None
    """What failed, in words; ``None`` for success."""


@dataclass(frozen=True, slots=True)
class Simulation:
    error: str | None
    logs: tuple[str, ...]
    units: int


class Chain:
    """A connection to one RPC. Addresses and signatures go in and out in base58.

    Every method raises ``NetworkError`` when the RPC does not answer and ``LedgerError`` when it refuses, and
    ``WalletError`` for text that is no address.
    """

    def __init__(
        self,
        rpc_url: str,
        auth: str | None = None,
        *,
        commitment: str = Commitment.CONFIRMED,
        timeout_s: float = 20.0,
        poll_s: float = POLL_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            rpc_url: ``https://``; plain ``http://`` only to this machine.
            auth: value of the ``Authorization`` header, if the RPC wants one.
            commitment: level at which something counts: ``processed``, ``confirmed`` or ``finalized``.
            timeout_s: longest wait for one answer.

        Raises:
            ConfigError: ``rpc_url_insecure``.
        """
        check_rpc_url(rpc_url)
        self.rpc_url = rpc_url
        self.commitment = Commitment(commitment)
        self._poll_s = poll_s
        self._monotonic_s = monotonic_s
        self._client = AsyncClient(
            rpc_url,
            commitment=self.commitment,
            timeout=timeout_s,
            extra_headers=None if auth is None else {"Authorization": auth},
        )
        if urlsplit(rpc_url).hostname in _LOOPBACK:
            _bypass_proxy(self._client, timeout_s)

    async def __aenter__(self) -> Chain:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    # -- reading -------------------------------------------------------------------------------------------------

    async def genesis_hash(self) -> str:
        """Names the cluster: a wallet that remembers it notices when the URL leads to another."""
        return str((await ask("its genesis hash", self._client.get_genesis_hash())).value)

    async def balance_lamports(self, address: str) -> int:
        response = await ask(f"the balance of {address}", self._client.get_balance(_pubkey(address)))
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
        response = await ask(f"the account {address}", self._client.get_account_info(_pubkey(address)))
        account: Account | None = response.value
        return account

    async def rent_exempt_lamports(self, data_bytes: int) -> int:
        """SOL an account of that size must hold."""
        request = self._client.get_minimum_balance_for_rent_exemption(data_bytes)
        return int((await ask("the rent of an account", request)).value)

    async def latest_blockhash(self) -> RecentBlockhash:
        response = await ask("a recent blockhash", self._client.get_latest_blockhash())
        return RecentBlockhash(response.value.blockhash, int(response.value.last_valid_block_height))

    async def status(self, signature: str) -> SignatureStatus | None:
        """What the RPC knows of a transaction, however old; ``None`` when it knows nothing."""
        status, _ = await self._status(_signature(signature))
        return status

    async def transaction(self, signature: str) -> TransactionView | None:
        """A transaction that reached this client's commitment (at least ``confirmed``), or ``None``."""
        wanted = _signature(signature)
        request = self._client.get_transaction(
            wanted, encoding="base64", commitment=self._landed_commitment(), max_supported_transaction_version=0
        )
        response = await ask("a transaction", request)
        return None if response.value is None else transaction_view(signature, response.value)

    async def history(self, address: str, limit: int = 20, before: str | None = None) -> tuple[HistoryItem, ...]:
        """Transactions that name ``address``, newest first; ``before`` is the last signature of the page before."""
        request = self._client.get_signatures_for_address(
            _pubkey(address),
            before=None if before is None else _signature(before),
            limit=limit,
            commitment=self._landed_commitment(),
        )
        response = await ask(f"the history of {address}", request)
        return tuple(history_item(each) for each in response.value)

    async def kvr_history(
        self, owner: str, mint: str, limit: int = 20, before: str | None = None
    ) -> tuple[KvrMovement, ...]:
        """What came into and went out of ``owner``'s KVR account, newest first: one request for each line."""
        account = token.associated_token_address(owner, mint)
        views = [await self.transaction(each.signature) for each in await self.history(account, limit, before)]
        return tuple(KvrMovement.of(view, account, mint) for view in views if view is not None)

    async def simulate(self, raw: bytes) -> Simulation:
        """What a signed transaction would do now; it changes nothing."""
        request = self._client.simulate_transaction(_transaction(raw), sig_verify=True)
        value = (await ask("a trial run", request)).value
        return Simulation(
            error=None if value.err is None else describe_error(value.err),
            logs=tuple(value.logs or ()),
            units=int(value.units_consumed or 0),
        )

    # -- sending -------------------------------------------------------------------------------------------------

    async def airdrop(self, address: str, lamports: int) -> str:
        """Ask a test cluster for SOL; returns the signature of its transfer."""
        response = await ask("an airdrop", self._client.request_airdrop(_pubkey(address), lamports))
        return str(response.value)

    async def prepare(self, instructions: Sequence[Instruction], signers: Sequence[Keypair]) -> PreparedTransfer:
        """Sign ``instructions`` with a fresh blockhash; the first signer pays the fee. Nothing is sent.

        Raises:
            UsageError: ``transaction_too_large``.
        """
        recent = await self.latest_blockhash()
        message = MessageV0.try_compile(signers[0].pubkey(), list(instructions), [], recent.hash)
        return sign(message, signers, recent.last_valid_block_height)

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
            await ask("this transaction", self._client.send_raw_transaction(prepared.raw, options))
        except PreflightError as error:
            if not error.already_processed and not error.blockhash_not_found:
                raise

    async def await_outcome(
        self,
        signature: str,
        last_valid_block_height: int,
        *,
        raw: bytes | None = None,
        timeout_s: float = OUTCOME_TIMEOUT_S,
    ) -> Outcome:
        """Ask until the ledger knows how a transaction ended, through any number of failed requests.

        Args:
            raw: its bytes; if given, they are sent again every few seconds until it lands.
            timeout_s: longest wait; the question can be asked again at any time after.

        Raises:
            NetworkError: ``outcome_unknown``: still undecided, which is no reason to sign another; or
                ``rpc_unauthorised``, at once.
        """
        wanted = _signature(signature)
        deadline = self._monotonic_s() + timeout_s
        resend_at = self._monotonic_s() + RESEND_S
        last_error: NetworkError | LedgerError | None = None
        while True:
            try:
                outcome = await self._decide(wanted, last_valid_block_height)
                if outcome is not None:
                    return outcome
                if raw is not None and self._monotonic_s() >= resend_at:
                    resend_at = self._monotonic_s() + RESEND_S
                    await self._resend(raw)
            except (NetworkError, LedgerError) as error:
                if error.code == "rpc_unauthorised":
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
        return await self.await_outcome(
            prepared.signature, prepared.last_valid_block_height, raw=prepared.raw, timeout_s=timeout_s
        )

    async def _decide(self, signature: Signature, last_valid_block_height: int) -> Outcome | None:
        """The outcome, or ``None`` while the transaction may still land or is not yet deep enough.

        Height is read before status and at ``finalized``, and the status must come from a node at least as far: else
        a node that lags behind would declare dead what another has already executed.
        """
        epoch = (await ask("the block height", self._client.get_epoch_info(Commitment.FINALIZED))).value
        status, seen_slot = await self._status(signature)
        if status is not None:
            if _rank(status.commitment) < _rank(self.commitment):
                return None
            if status.error is not None:
                return Outcome(OutcomeState.FAILED, status.slot, status.error)
            return Outcome(OutcomeState.CONFIRMED, status.slot)
        if int(epoch.block_height) > last_valid_block_height and seen_slot >= int(epoch.absolute_slot):
            return Outcome(OutcomeState.EXPIRED)
        return None

    async def _status(self, signature: Signature) -> tuple[SignatureStatus | None, int]:
        request = self._client.get_signature_statuses([signature], search_transaction_history=True)
        response = await ask("the status of a transaction", request)
        (value,) = response.value
        if value is None:
            return None, int(response.context.slot)
        reached = value.confirmation_status
        level = Commitment.FINALIZED if reached is None else list(Commitment)[int(reached)]
        error = None if value.err is None else describe_error(value.err)
        return SignatureStatus(int(value.slot), level, error), int(response.context.slot)

    async def _resend(self, raw: bytes) -> None:
        """Without a trial run: the first one passed, and a second could only refuse what has just landed."""
        await ask("this transaction", self._client.send_raw_transaction(raw, TxOpts(skip_preflight=True)))

    def _landed_commitment(self) -> Commitment:
        return Commitment.CONFIRMED if self.commitment is Commitment.PROCESSED else self.commitment


def sign(message: MessageV0, signers: Sequence[Keypair], last_valid_block_height: int) -> PreparedTransfer:
    """Sign a compiled message. Raises ``UsageError`` ``transaction_too_large`` above 1232 bytes."""
    tx = VersionedTransaction(message, list(signers))
    raw = bytes(tx)
    if len(raw) > _MAX_TRANSACTION_BYTES:
        raise UsageError(
            "transaction_too_large",
            f"The transaction has {len(raw)} bytes; the network carries at most {_MAX_TRANSACTION_BYTES}.",
            "Shorten the memo, or split it.",
        )
    return PreparedTransfer(raw, str(tx.signatures[0]), last_valid_block_height)


def check_rpc_url(rpc_url: str) -> None:
    """Raises ``ConfigError`` for anything but https, or http to this machine."""
    parts = urlsplit(rpc_url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and parts.hostname in _LOOPBACK:
        return
    raise ConfigError(
        "rpc_url_insecure",
        f"wallet.rpc_url {rpc_url!r} is neither https nor on this machine.",
        "Use an https:// address.",
    )


_MAX_TRANSACTION_BYTES = 1232


def _bypass_proxy(client: Any, timeout_s: float) -> None:
    """Talk to this machine directly: HTTP_PROXY without a NO_PROXY would send the token and the request elsewhere.

    ``AsyncClient`` has no such option, so its session is exchanged before it is used.
    """
    provider = client._provider
    provider.session = type(provider.session)(trust_env=False, timeout=timeout_s)


def _rank(commitment: Commitment) -> int:
    return list(Commitment).index(commitment)


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
