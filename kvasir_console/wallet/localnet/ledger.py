"""The ledger's rules around the runtime: what may land, when, and only once.

LiteSVM executes transactions exactly as a validator does but keeps no time, no usable blockhash window and no
lasting memory of what it executed. Those are kept here and in SQLite:

* a signature (and a message, whoever re-signs it) lands at most once, for ever;
* a blockhash is usable for ``BLOCKHASH_MAX_AGE`` slots;
* SQLite is written before a submission is answered, and the runtime is rebuilt from it after a restart, a panic of
  the runtime or a failed write.

Accounts, signatures, history and blockhashes are answered at the commitment asked for, which is an age in slots; only
trial runs always start from the newest state. Address lookup tables and durable nonces are not offered.
Not thread-safe: one thread owns a ledger from ``open`` to ``close``.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from solders.account import Account
from solders.clock import Clock
from solders.hash import Hash
from solders.keypair import Keypair
from solders.litesvm import LiteSVM
from solders.message import MessageV0
from solders.pubkey import Pubkey
from solders.signature import Signature
from solders.system_program import ID as SYSTEM_PROGRAM_ID
from solders.sysvar import CLOCK as CLOCK_SYSVAR
from solders.token.state import Mint
from solders.transaction import SanitizeError, VersionedTransaction
from solders.transaction_metadata import FailedTransactionMetadata, TransactionMetadata

from kvasir_console.errors import LedgerError
from kvasir_console.paths import private_directory
from kvasir_console.wallet.localnet import views
from kvasir_console.wallet.localnet.faucet import LAMPORTS_PER_SOL, FaucetLimits, airdrop_transaction
from kvasir_console.wallet.localnet.slots import SLOT_MS, Blockhashes, SlotClock
from kvasir_console.wallet.localnet.store import AccountWrite, Airdrop, LandedTransaction, Store

LEDGER_FILE = "ledger.sqlite"
SLOTS_PER_EPOCH = 432_000
_LEASE_SLOTS = 16
"""Slots reserved ahead in the file, so that a restart never goes back to a slot that was already shown."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Commitment(IntEnum):
    """Age in slots at which a slot counts as such."""

    PROCESSED = 0
    CONFIRMED = 1
    FINALIZED = 32


class RejectedError(Exception):
    """A transaction that did not land. ``err`` is Solana's JSON form of a transaction error."""

    def __init__(self, err: Any, logs: tuple[str, ...] = (), units: int = 0) -> None:
        super().__init__(json.dumps(err))
        self.err = err
        self.logs = logs
        self.units = units


@dataclass(frozen=True, slots=True)
class Simulation:
    err: Any
    logs: tuple[str, ...]
    units: int
    fee: int
    """Lamports the transaction pays when it lands, whether or not it succeeds."""
    return_data: Any
    inner_instructions: list[dict[str, Any]]
    accounts: Mapping[Pubkey, Account]
    """Accounts after the run; empty when it failed."""


@dataclass(frozen=True, slots=True)
class Block:
    blockhash: Hash
    previous: Hash
    time: int
    """Unix seconds."""
    landed: tuple[LandedTransaction, ...]


class Ledger:
    """One open ledger. ``open`` makes a new one in an empty directory."""

    def __init__(self, store: Store, now_s: Callable[[], float], limits: FaucetLimits) -> None:
        seed = _required(store, "seed")
        self._store = store
        self._limits = limits
        self._faucet = Keypair.from_seed(_required(store, "faucet"))
        self._blockhashes = Blockhashes(seed)
        self._lease = _integer(store, "slot_lease")
        self.slot_ms = _integer(store, "slot_ms")
        self._clock = SlotClock(now_s, _integer(store, "genesis_ms"), self.slot_ms, floor=self._lease)
        self.genesis_hash = str(Hash.hash(b"kvasir localnet genesis" + seed))
        self._svm = self._runtime()
        self._stale = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        now_s: Callable[[], float] = time.time,
        slot_ms: int = SLOT_MS,
        limits: FaucetLimits | None = None,
    ) -> Ledger:
        """Open the ledger in ``directory``, or found a new one there (``slot_ms`` counts only then).

        Raises:
            SystemResourceError: the directory or file is not available, or another process has it.
            LedgerError: the file is damaged or of another version.
        """
        limits = FaucetLimits() if limits is None else limits
        store = Store.open(private_directory(directory) / LEDGER_FILE)
        try:
            if store.get("seed") is None:
                _found(store, int(now_s() * 1000), slot_ms, limits)
            return cls(store, now_s, limits)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Close the file. What was not answered yet is not in it; all else is."""
        self._store.put({"slot_lease": str(self._clock.slot() + 1).encode()})
        self._store.close()

    # -- time ----------------------------------------------------------------------------------------------------

    def slot(self, commitment: Commitment = Commitment.PROCESSED) -> int:
        """The newest slot (also the block height) at a commitment, from 0."""
        newest = self._clock.slot()
        if newest >= self._lease:
            self._lease = newest + _LEASE_SLOTS
            self._store.put({"slot_lease": str(self._lease).encode()})
        return max(0, newest - commitment)

    def latest_blockhash(self, commitment: Commitment = Commitment.PROCESSED) -> tuple[Hash, int]:
        """A blockhash and its slot."""
        slot = self.slot(commitment)
        return self._blockhashes.at(slot), slot

    def blockhash_slot(self, blockhash: Hash, commitment: Commitment = Commitment.PROCESSED) -> int | None:
        """The slot of a usable blockhash that the bank at ``commitment`` knows, else ``None``."""
        slot = self._blockhashes.slot_of(blockhash, self.slot())
        return slot if slot is not None and slot <= self.slot(commitment) else None

    def block(self, slot: int) -> Block:
        """The block of a slot that has begun. Its time is estimated if nothing landed in it."""
        landed = tuple(self._store.in_slot(slot))
        age_ms = (self.slot() - slot) * self.slot_ms
        return Block(
            blockhash=self._blockhashes.at(slot),
            previous=self._blockhashes.at(max(0, slot - 1)),
            time=landed[0].block_time if landed else (self._clock.now_ms() - age_ms) // 1000,
            landed=landed,
        )

    def transaction_count(self, commitment: Commitment) -> int:
        return self._store.count(self.slot(commitment))

    # -- accounts ------------------------------------------------------------------------------------------------

    def account(self, address: Pubkey, commitment: Commitment = Commitment.PROCESSED) -> Account | None:
        """The account at a commitment, or ``None`` when there was none (the runtime keeps some without lamports)."""
        slot = self.slot(commitment)
        if address == CLOCK_SYSVAR:
            self._guarded(lambda: self._svm.set_clock(self._clock_at(slot)))
        changed, raw = self._store.account_after(bytes(address), slot)
        if changed:
            return None if raw is None else Account.from_bytes(raw)
        account = self._guarded(lambda: self._svm.get_account(address))
        return account if account is not None and account.lamports > 0 else None

    def program_accounts(
        self, program: Pubkey, commitment: Commitment = Commitment.PROCESSED
    ) -> list[tuple[Pubkey, Account]]:
        """The accounts a program owned at a commitment, sorted by address."""
        newest: list[tuple[Pubkey, Account]] = self._guarded(lambda: self._svm.get_program_accounts(program))
        accounts = {bytes(address): account for address, account in newest if account.lamports > 0}
        for address, raw in self._store.accounts_after(self.slot(commitment)).items():
            before = None if raw is None else Account.from_bytes(raw)
            if before is not None and before.owner == program:
                accounts[address] = before
            else:
                accounts.pop(address, None)
        return [(Pubkey.from_bytes(address), account) for address, account in sorted(accounts.items())]

    def rent_exempt_lamports(self, data_bytes: int) -> int:
        return int(self._svm.minimum_balance_for_rent_exemption(data_bytes))

    # -- transactions --------------------------------------------------------------------------------------------

    def submit(
        self,
        tx: VersionedTransaction,
        *,
        preflight: Commitment | None = Commitment.FINALIZED,
        airdrop: Airdrop | None = None,
    ) -> Signature:
        """Execute a transaction and record it.

        Args:
            preflight: commitment whose bank must know the blockhash, with a trial run first; ``None`` skips both, and
                then a transaction that fails lands and pays its fee, while one that cannot land is dropped silently,
                as a cluster does.
            airdrop: what the faucet counts when it lands.

        Raises:
            RejectedError: it did not land and, with preflight, why.
        """
        _check_form(tx)
        message_hash = bytes(tx.message.hash())
        signature = tx.signatures[0]
        try:
            if self._store.knows(bytes(signature), message_hash):
                raise RejectedError("AlreadyProcessed")
            newest_known = Commitment.PROCESSED if preflight is None else preflight
            if self.blockhash_slot(tx.message.recent_blockhash, newest_known) is None:
                raise RejectedError("BlockhashNotFound")
            if preflight is not None:
                trial = self._guarded(lambda: self._run_trial(tx))
                if trial.err is not None:
                    raise RejectedError(trial.err, trial.logs, trial.units)
            self._guarded(lambda: self._execute(tx, message_hash, airdrop))
        except RejectedError:
            if preflight is not None:
                raise
        return signature

    def simulate(self, tx: VersionedTransaction, *, verify: bool, any_blockhash: bool, at: Commitment) -> Simulation:
        """A trial run that changes nothing. Without ``verify`` the signatures may be of any value.

        Raises:
            RejectedError: the transaction is malformed, or ``verify`` finds a bad signature.
        """
        _check_form(tx, signatures=verify)
        if not any_blockhash and self.blockhash_slot(tx.message.recent_blockhash, at) is None:
            return Simulation("BlockhashNotFound", (), 0, 0, None, [], {})
        return self._guarded(lambda: self._run_trial(tx, verify=verify))

    def airdrop(self, recipient: Pubkey, lamports: int) -> Signature:
        """Send test SOL from the ledger's own key.

        Raises:
            LedgerError: a limit of the faucet.
            RejectedError: the transfer itself failed (fewer lamports than a new account must hold).
        """
        self._limits.check(lamports, self._store.airdropped(bytes(recipient)), self._store.airdropped())
        blockhash, _ = self.latest_blockhash()
        tx = airdrop_transaction(self._faucet, recipient, lamports, blockhash, os.urandom(8).hex())
        return self.submit(tx, preflight=Commitment.PROCESSED, airdrop=Airdrop(bytes(recipient), lamports))

    def landed(self, signature: Signature) -> LandedTransaction | None:
        return self._store.landed(bytes(signature))

    def history(
        self,
        address: Pubkey,
        *,
        commitment: Commitment,
        limit: int,
        before: Signature | None = None,
        until: Signature | None = None,
    ) -> list[LandedTransaction]:
        """What named ``address``, newest first, between two signatures (both exclusive)."""
        return self._store.history(
            bytes(address),
            up_to_slot=self.slot(commitment),
            limit=limit,
            before=None if before is None else bytes(before),
            until=None if until is None else bytes(until),
        )

    # -- the runtime ---------------------------------------------------------------------------------------------

    def _runtime(self) -> LiteSVM:
        """A fresh runtime with every account of the store. Its own blockhash check and memory of signatures are off:
        the first knows one hash only, the second forgets."""
        svm = LiteSVM().with_blockhash_check(False).with_transaction_history(0)
        for address, raw in self._store.accounts():
            svm.set_account(Pubkey.from_bytes(address), Account.from_bytes(raw))
        return svm

    def _guarded(self, run: Callable[[], _T]) -> _T:
        """Run against the runtime; whatever goes wrong, the next use starts from a runtime rebuilt from the store.

        A panic of the runtime is a ``BaseException`` outside ``Exception``: it becomes a ``LedgerError`` here.
        """
        if self._stale:
            self._svm = self._runtime()
            self._stale = False
        self._stale = True
        try:
            result = run()
        except RejectedError:
            self._stale = False
            raise
        except BaseException as error:
            if not is_panic(error):
                raise
            _log.error("the runtime panicked: %s", error)
            raise LedgerError("runtime_panic", "The runtime of the ledger failed on this transaction.") from error
        self._stale = False
        return result

    def _run_trial(self, tx: VersionedTransaction, *, verify: bool = True) -> Simulation:
        self._svm.set_clock(self._clock_at(self.slot()))
        self._svm.with_sigverify(verify)
        try:
            outcome = self._svm.simulate_transaction(tx)
        finally:
            self._svm.with_sigverify(True)
        result = outcome.meta()
        failed = isinstance(outcome, FailedTransactionMetadata)
        return Simulation(
            err=views.error_json(outcome) if failed else None,
            logs=tuple(result.logs()),
            units=result.compute_units_consumed(),
            fee=result.fee(),
            return_data=views.return_data_json(result),
            inner_instructions=views.inner_instructions_json(result),
            accounts={} if failed else dict(outcome.post_accounts()),
        )

    def _execute(self, tx: VersionedTransaction, message_hash: bytes, airdrop: Airdrop | None) -> None:
        slot = self.slot()
        self._svm.set_clock(self._clock_at(slot))
        keys = tx.message.account_keys
        before = {key: self._svm.get_account(key) for key in keys}
        outcome = self._svm.send_transaction(tx)
        after = {key: self._svm.get_account(key) for key in keys}
        failed = isinstance(outcome, FailedTransactionMetadata)
        result: TransactionMetadata = outcome.meta() if failed else outcome
        err = views.error_json(outcome) if failed else None
        # Everything that lands pays a fee, so a failure that left the payer alone did not land.
        if failed and after[keys[0]] == before[keys[0]]:
            raise RejectedError(err, tuple(result.logs()), result.compute_units_consumed())
        landed = LandedTransaction(
            signature=bytes(tx.signatures[0]),
            message_hash=message_hash,
            slot=slot,
            block_time=self._clock.now_ms() // 1000,
            raw=bytes(tx),
            err=err,
            meta=views.meta_json(keys, before, after, self._mints(before, after), result, err),
            memo=views.memo_of(tx),
        )
        changed = [key for key in keys if after[key] != before[key]]
        self._store.land(
            landed,
            tuple(bytes(key) for key in keys),
            tuple(_write(key, after[key]) for key in changed),
            tuple(_write(key, before[key]) for key in changed),
            airdrop,
        )

    def _mints(self, *states: Mapping[Pubkey, Account | None]) -> dict[Pubkey, Mint]:
        tokens = [token for state in states for each in state.values() if (token := views.token_account(each))]
        found = {token.mint: views.mint(self._svm.get_account(token.mint)) for token in tokens}
        return {address: mint for address, mint in found.items() if mint is not None}

    def _clock_at(self, slot: int) -> Clock:
        epoch = slot // SLOTS_PER_EPOCH
        now = self._clock.now_ms() // 1000
        start = now - (slot % SLOTS_PER_EPOCH) * self.slot_ms // 1000
        return Clock(
            slot=slot, epoch_start_timestamp=start, epoch=epoch, leader_schedule_epoch=epoch + 1, unix_timestamp=now
        )


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic of the Solana bindings: a ``BaseException`` whose class cannot be imported."""
    return type(error).__name__ == "PanicException"


def _found(store: Store, genesis_ms: int, slot_ms: int, limits: FaucetLimits) -> None:
    """Write a new ledger: its secrets, its time, and a faucet with all it may ever give and the fees for that."""
    faucet = os.urandom(32)
    lamports = limits.total + 1_000_000 * LAMPORTS_PER_SOL
    write = _write(Keypair.from_seed(faucet).pubkey(), Account(lamports, b"", SYSTEM_PROGRAM_ID))
    store.put(
        {
            "seed": os.urandom(32),
            "faucet": faucet,
            "genesis_ms": str(genesis_ms).encode(),
            "slot_ms": str(slot_ms).encode(),
            "slot_lease": b"1",
        },
        (write,),
    )


def _write(address: Pubkey, account: Account | None) -> AccountWrite:
    if account is None or account.lamports == 0:
        return AccountWrite(bytes(address), executable=False, raw=None)
    return AccountWrite(bytes(address), executable=account.executable, raw=bytes(account))


def _check_form(tx: VersionedTransaction, *, signatures: bool = True) -> None:
    """Refuse what no bank would look at. Raises ``RejectedError``."""
    try:
        tx.sanitize()
    except SanitizeError as error:
        raise RejectedError("SanitizeFailure") from error
    if isinstance(tx.message, MessageV0) and tx.message.address_table_lookups:
        raise RejectedError("AddressLookupTableNotFound")
    if signatures and not all(tx.verify_with_results()):
        raise RejectedError("SignatureFailure")


def _required(store: Store, key: str) -> bytes:
    value = store.get(key)
    if value is None:
        raise LedgerError(
            "ledger_damaged",
            f"The ledger file has no {key!r}.",
            "Restore it from a backup, or move it away to start a new local network.",
        )
    return value


def _integer(store: Store, key: str) -> int:
    return int(_required(store, key))
