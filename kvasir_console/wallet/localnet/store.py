"""SQLite storage of the embedded ledger: the truth from which the runtime is rebuilt.

WAL with ``synchronous = FULL``: a transaction whose submission was answered survives a killed process and a power
cut. The file is locked for the life of the process, since two ledgers on one file would each pay out.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.errors import LedgerError, SystemResourceError

SCHEMA_VERSION = 2
PAST_SLOTS = 64
"""How far back an account can be read: twice the age of a finalized slot."""
_SCHEMA = """
CREATE TABLE kv (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE account (address BLOB PRIMARY KEY, executable INTEGER NOT NULL, raw BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE tx (
    seq INTEGER PRIMARY KEY,
    signature BLOB NOT NULL UNIQUE,
    message_hash BLOB NOT NULL UNIQUE,
    slot INTEGER NOT NULL,
    block_time INTEGER NOT NULL,
    raw BLOB NOT NULL,
    err TEXT NOT NULL,
    meta TEXT NOT NULL,
    memo TEXT
);
CREATE TABLE address (address BLOB NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (address, seq)) WITHOUT ROWID;
CREATE TABLE airdrop (seq INTEGER PRIMARY KEY, recipient BLOB NOT NULL, lamports INTEGER NOT NULL);
CREATE INDEX airdrop_recipient ON airdrop (recipient);
"""
_SECOND_SCHEMA = """
CREATE TABLE past (address BLOB NOT NULL, slot INTEGER NOT NULL, raw BLOB, PRIMARY KEY (address, slot)) WITHOUT ROWID;
CREATE INDEX past_slot ON past (slot);
CREATE INDEX tx_slot ON tx (slot);
"""
_UPGRADES = (_SCHEMA, _SECOND_SCHEMA)
"""What each version of the file adds to the one before."""
_SELECT_BY_SIGNATURE = """
SELECT signature, message_hash, slot, block_time, raw, err, meta, memo FROM tx WHERE signature = ?
"""
_SELECT_BY_SLOT = """
SELECT signature, message_hash, slot, block_time, raw, err, meta, memo FROM tx WHERE slot = ? ORDER BY seq
"""
_SELECT_BY_ADDRESS = """
SELECT signature, message_hash, slot, block_time, raw, err, meta, memo FROM address JOIN tx USING (seq)
WHERE address.address = ? AND seq > ? AND seq < ? AND slot <= ? ORDER BY seq DESC LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class LandedTransaction:
    """A transaction that took effect: it succeeded, or it failed and paid its fee (``err`` says how, else ``None``)."""

    signature: bytes
    message_hash: bytes
    slot: int
    block_time: int
    raw: bytes
    err: Any
    meta: Mapping[str, Any]
    memo: str | None


@dataclass(frozen=True, slots=True)
class AccountWrite:
    """New content of an account; ``raw`` is ``None`` when it ceased to exist."""

    address: bytes
    executable: bool
    raw: bytes | None


@dataclass(frozen=True, slots=True)
class Airdrop:
    recipient: bytes
    lamports: int


class Store:
    """One open ledger file. Use it from the thread that opened it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    @classmethod
    def open(cls, file: Path) -> Store:
        """Open or create ``file`` (0600).

        Raises:
            SystemResourceError: another process holds it, or the disk refuses.
            LedgerError: it is damaged, or written by a newer version.
        """
        db: sqlite3.Connection | None = None
        try:
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
            db = sqlite3.connect(file, timeout=1.0, isolation_level=None)
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                db.execute(f"PRAGMA {pragma}")
            _prepare(db, file)
        except (OSError, sqlite3.Error, LedgerError) as error:
            if db is not None:
                db.close()
            if isinstance(error, LedgerError):
                raise
            raise _open_error(file, error) from error
        return cls(db)

    def close(self) -> None:
        self._db.close()

    def get(self, key: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM kv WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, values: Mapping[str, bytes], writes: tuple[AccountWrite, ...] = ()) -> None:
        """Set several keys (and accounts) in one SQLite transaction."""
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO kv VALUES (?, ?)", values.items())
            self._write_accounts(writes)

    def accounts(self) -> Iterator[tuple[bytes, bytes]]:
        """Every account as (address, raw); data before programs, since a program is loaded with its data."""
        for address, raw in self._db.execute("SELECT address, raw FROM account ORDER BY executable, address"):
            yield bytes(address), bytes(raw)

    def land(
        self,
        landed: LandedTransaction,
        addresses: tuple[bytes, ...],
        writes: tuple[AccountWrite, ...],
        past: tuple[AccountWrite, ...] = (),
        airdrop: Airdrop | None = None,
    ) -> None:
        """Record one transaction and all it changed, in one SQLite transaction.

        Args:
            past: the accounts in ``writes`` as they were before it.

        Raises:
            sqlite3.IntegrityError: this signature or message landed before; nothing was written.
        """
        with self._transaction():
            cursor = self._db.execute(
                "INSERT INTO tx (signature, message_hash, slot, block_time, raw, err, meta, memo)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    landed.signature,
                    landed.message_hash,
                    landed.slot,
                    landed.block_time,
                    landed.raw,
                    json.dumps(landed.err),
                    json.dumps(landed.meta),
                    landed.memo,
                ),
            )
            seq = cursor.lastrowid
            self._db.executemany("INSERT INTO address VALUES (?, ?)", [(each, seq) for each in set(addresses)])
            self._write_accounts(writes)
            # The first change in a slot counts: what is kept is the account as the slot before left it.
            self._db.executemany(
                "INSERT OR IGNORE INTO past VALUES (?, ?, ?)", [(each.address, landed.slot, each.raw) for each in past]
            )
            self._db.execute("DELETE FROM past WHERE slot < ?", (landed.slot - PAST_SLOTS,))
            if airdrop is not None:
                self._db.execute("INSERT INTO airdrop VALUES (?, ?, ?)", (seq, airdrop.recipient, airdrop.lamports))

    def account_after(self, address: bytes, slot: int) -> tuple[bool, bytes | None]:
        """Whether ``address`` changed after ``slot`` (at most ``PAST_SLOTS`` ago) and, if so, what it was then."""
        query = "SELECT raw FROM past WHERE address = ? AND slot > ? ORDER BY slot LIMIT 1"
        row = self._db.execute(query, (address, slot)).fetchone()
        return row is not None, None if row is None or row[0] is None else bytes(row[0])

    def accounts_after(self, slot: int) -> dict[bytes, bytes | None]:
        """Every account that changed after ``slot``, as ``account_after``."""
        rows = self._db.execute("SELECT address, raw FROM past WHERE slot > ? ORDER BY slot DESC", (slot,))
        return {bytes(address): None if raw is None else bytes(raw) for address, raw in rows}

    def in_slot(self, slot: int) -> list[LandedTransaction]:
        """The transactions of one slot, in order."""
        return [_landed(row) for row in self._db.execute(_SELECT_BY_SLOT, (slot,))]

    def count(self, up_to_slot: int) -> int:
        """Transactions that landed up to a slot."""
        return int(self._db.execute("SELECT COUNT(*) FROM tx WHERE slot <= ?", (up_to_slot,)).fetchone()[0])

    def landed(self, signature: bytes) -> LandedTransaction | None:
        row = self._db.execute(_SELECT_BY_SIGNATURE, (signature,)).fetchone()
        return None if row is None else _landed(row)

    def knows(self, signature: bytes, message_hash: bytes) -> bool:
        """Whether this signature, or this message under any signature, landed before."""
        query = "SELECT 1 FROM tx WHERE signature = ? OR message_hash = ?"
        return self._db.execute(query, (signature, message_hash)).fetchone() is not None

    def history(
        self, address: bytes, *, up_to_slot: int, limit: int, before: bytes | None, until: bytes | None
    ) -> list[LandedTransaction]:
        """Transactions that name ``address``, newest first, between two signatures (both exclusive).

        An unknown ``before`` gives nothing (there is no place to start from); an unknown ``until`` stops nothing.
        """
        above = self._seq(until) if until is not None else None
        below = self._seq(before) if before is not None else None
        if before is not None and below is None:
            return []
        rows = self._db.execute(
            _SELECT_BY_ADDRESS,
            (address, above or 0, below if below is not None else 2**62, up_to_slot, limit),
        )
        return [_landed(row) for row in rows]

    def airdropped(self, recipient: bytes | None = None) -> int:
        """Lamports ever given to ``recipient``, or to everyone."""
        if recipient is None:
            row = self._db.execute("SELECT COALESCE(SUM(lamports), 0) FROM airdrop").fetchone()
        else:
            query = "SELECT COALESCE(SUM(lamports), 0) FROM airdrop WHERE recipient = ?"
            row = self._db.execute(query, (recipient,)).fetchone()
        return int(row[0])

    def _seq(self, signature: bytes) -> int | None:
        row = self._db.execute("SELECT seq FROM tx WHERE signature = ?", (signature,)).fetchone()
        return None if row is None else int(row[0])

    def _write_accounts(self, writes: tuple[AccountWrite, ...]) -> None:
        for write in writes:
            if write.raw is None:
                self._db.execute("DELETE FROM account WHERE address = ?", (write.address,))
            else:
                row = (write.address, int(write.executable), write.raw)
                self._db.execute("INSERT OR REPLACE INTO account VALUES (?, ?, ?)", row)

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK on any error."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._db.execute("ROLLBACK")
            return
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def _landed(row: tuple[Any, ...]) -> LandedTransaction:
    signature, message_hash, slot, block_time, raw, err, meta, memo = row
    return LandedTransaction(
        signature=bytes(signature),
        message_hash=bytes(message_hash),
        slot=int(slot),
        block_time=int(block_time),
        raw=bytes(raw),
        err=json.loads(err),
        meta=json.loads(meta),
        memo=memo,
    )


def _prepare(db: sqlite3.Connection, file: Path) -> None:
    """Create the tables of a new file, or bring those of an older one up to date."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if 0 <= version < SCHEMA_VERSION:
        steps = "".join(_UPGRADES[version:])
        db.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    elif version != SCHEMA_VERSION:
        raise LedgerError(
            "ledger_version",
            f"The ledger file {file} has format {version}; this program knows format {SCHEMA_VERSION}.",
            "Start a newer version of the program, or choose another data directory.",
        )
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)


def _open_error(file: Path, error: Exception) -> LedgerError | SystemResourceError:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return SystemResourceError(
            "ledger_in_use",
            f"The ledger file {file} is in use by another process.",
            "Stop the other ledger process, or choose another data directory.",
        )
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return LedgerError(
            "ledger_damaged",
            f"The ledger file {file} is damaged: {error}.",
            "Restore it from a backup, or move it away to start a new local network.",
        )
    return SystemResourceError(
        "ledger_unavailable",
        f"The ledger file {file} cannot be opened: {error}.",
        "Check the permissions and free space of its directory.",
    )
