"""The wallet's own sends, written down before they leave: whatever dies when, each is paid at most once.

A send is stored with its signed transaction, and only then given to the chain. From there on just those bytes are sent,
any number of times, until the chain says how they ended. Only what can never land any more may be signed anew, and the
new signature takes the old one's place in the same step.

States of a send:

* ``signed``: its transaction is stored; whether it was sent is not known. With an error: an RPC's trial run refused it.
* ``sent``: an RPC took it, or gave no answer.
* ``confirmed``: paid. ``failed``: it landed, paid its fee and changed nothing else.
* ``expired``: it did not land and never will.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvasir_console.errors import LedgerError, SystemResourceError, UsageError
from kvasir_console.paths import private_directory
from kvasir_console.wallet.chain_signing import PreparedTransfer
from kvasir_console.wallet.transfers import KvrTransfer, SolTransfer, Transfer

SCHEMA_VERSION = 1
MAX_REQUEST_ID = 128
_SCHEMA = """
CREATE TABLE send (
    number INTEGER PRIMARY KEY,
    request_id TEXT NOT NULL UNIQUE,
    genesis TEXT NOT NULL,
    payment TEXT NOT NULL,
    memo TEXT NOT NULL,
    state TEXT NOT NULL,
    signature TEXT NOT NULL UNIQUE,
    raw BLOB NOT NULL,
    last_valid_block_height INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    error TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
);
CREATE INDEX send_payment ON send (payment, state);
CREATE TABLE attempt (
    signature TEXT PRIMARY KEY,
    number INTEGER NOT NULL REFERENCES send,
    outcome TEXT NOT NULL,
    at INTEGER NOT NULL
);
"""


class SendState(StrEnum):
    SIGNED = "signed"
    SENT = "sent"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    EXPIRED = "expired"


UNDECIDED = (SendState.SIGNED, SendState.SENT)


@dataclass(frozen=True, slots=True)
class Send:
    request_id: str
    genesis: str
    """Of the cluster it was signed for; nowhere else does its outcome say anything."""
    intent: Transfer
    state: SendState
    prepared: PreparedTransfer
    error: str
    created_at: int
    updated_at: int

    @property
    def undecided(self) -> bool:
        return self.state in UNDECIDED


class Outbox:
    """One file, shared by every process of this installation. Methods write to the disk before they return.

    Use it from the thread that opened it. Every method raises ``SystemResourceError`` when the disk refuses.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @classmethod
    def open(cls, file: Path) -> Outbox:
        """Open or create ``file`` (0600, in a directory of 0700).

        Raises:
            SystemResourceError: it cannot be used.
            LedgerError: ``outbox_damaged``, or ``outbox_version`` for a newer program's.
        """
        private_directory(file.parent)
        db: sqlite3.Connection | None = None
        try:
            os.close(os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            db = sqlite3.connect(file, timeout=10.0, isolation_level=None)
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                db.execute(f"PRAGMA {pragma}")
            _prepare(db, file)
        except (OSError, sqlite3.Error, LedgerError) as error:
            if db is not None:
                db.close()
            raise _open_error(file, error) from error
        return cls(db)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, request_id: str) -> Send | None:
        row = self._db.execute(f"{_SELECT} WHERE request_id = ?", (request_id,)).fetchone()
        return None if row is None else _send(row)

    def sends(self, limit: int = 100) -> tuple[Send, ...]:
        """The last ones, newest first."""
        return tuple(_send(row) for row in self._db.execute(f"{_SELECT} ORDER BY number DESC LIMIT ?", (limit,)))

    def undecided(self, genesis: str) -> tuple[Send, ...]:
        """What may still land on one cluster, oldest first."""
        rows = self._db.execute(
            f"{_SELECT} WHERE state IN (?, ?) AND genesis = ? ORDER BY number", (*UNDECIDED, genesis)
        )
        return tuple(_send(row) for row in rows)

    def twin(self, intent: Transfer, genesis: str) -> Send | None:
        """An undecided send of the same amount from the same wallet to the same one, whatever its memo."""
        row = self._db.execute(
            f"{_SELECT} WHERE state IN (?, ?) AND genesis = ? AND payment = ? LIMIT 1",
            (*UNDECIDED, genesis, _payment(intent)),
        ).fetchone()
        return None if row is None else _send(row)

    def signatures(self, request_id: str) -> tuple[tuple[str, str], ...]:
        """(signature, outcome) of every transaction signed for a send, in order."""
        rows = self._db.execute(
            "SELECT attempt.signature, outcome FROM attempt JOIN send USING (number) WHERE request_id = ?"
            " ORDER BY attempt.rowid",
            (request_id,),
        )
        return tuple((str(signature), str(outcome)) for signature, outcome in rows)

    # -- writing -------------------------------------------------------------------------------------------------

    def add(
        self, request_id: str, intent: Transfer, genesis: str, prepared: PreparedTransfer, now: int
    ) -> tuple[Send, bool]:
        """Store a new send with its signed transaction, before that is sent.

        Returns:
            What is stored under ``request_id``, and whether this call stored it: if another did, ``prepared`` is void
            and has to be thrown away.

        Raises:
            UsageError: ``request_id_used`` for another payment, or ``request_id_malformed``.
            LedgerError: ``signature_used``: that very transaction belongs to another send.
        """
        if not 0 < len(request_id) <= MAX_REQUEST_ID or not request_id.isprintable():
            raise UsageError("request_id_malformed", "The id of a send has 1 to 128 printable characters.")
        with self._write():
            found = self.get(request_id)
            if found is not None:
                if (found.intent, found.genesis) != (intent, genesis):
                    raise request_id_used(request_id)
                return found, False
            self._check_signature(prepared)
            cursor = self._db.execute(
                "INSERT INTO send (request_id, genesis, payment, memo, state, signature, raw, last_valid_block_height,"
                " slot, error, created_at, updated_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '', ?, ?)",
                (
                    *(request_id, genesis, _payment(intent), intent.memo, SendState.SIGNED, prepared.signature),
                    *(prepared.raw, prepared.last_valid_block_height, prepared.slot, now, now),
                ),
            )
            self._attempt(prepared.signature, cursor.lastrowid, now)
            return self._require(request_id), True

    def sign_again(self, send: Send, prepared: PreparedTransfer, now: int) -> Send | None:
        """Put a new transaction in the place of one that expired; ``None`` if that is no longer so.

        Raises:
            LedgerError: ``signature_used``.
        """
        with self._write():
            self._check_signature(prepared)
            changed = self._db.execute(
                "UPDATE send SET state = ?, signature = ?, raw = ?, last_valid_block_height = ?, slot = ?, error = '',"
                " updated_at = ? WHERE request_id = ? AND signature = ? AND state = ?",
                (
                    *(SendState.SIGNED, prepared.signature, prepared.raw, prepared.last_valid_block_height),
                    *(prepared.slot, now, send.request_id, send.prepared.signature, SendState.EXPIRED),
                ),
            ).rowcount
            if not changed:
                return None
            (number,) = self._db.execute("SELECT number FROM send WHERE request_id = ?", (send.request_id,)).fetchone()
            self._attempt(prepared.signature, number, now)
            return self.get(send.request_id)

    def advance(self, send: Send, state: SendState, now: int, error: str = "") -> Send:
        """Move a send on from the transaction that ``send`` names; the send as it is then.

        Another process may have been faster; what it wrote stands.
        """
        before = [each for each in SendState if state in _AFTER[each]]
        marks = ", ".join("?" * len(before))
        with self._write():
            moved = self._db.execute(
                f"UPDATE send SET state = ?, error = ?, updated_at = ?"  # noqa: S608 - only question marks are put in
                f" WHERE request_id = ? AND signature = ? AND state IN ({marks})",
                (state, error, now, send.request_id, send.prepared.signature, *before),
            ).rowcount
            if moved:
                self._db.execute(
                    "UPDATE attempt SET outcome = ?, at = ? WHERE signature = ?", (state, now, send.prepared.signature)
                )
            return self._require(send.request_id)

    def _require(self, request_id: str) -> Send:
        send = self.get(request_id)
        if send is None:
            raise LedgerError("send_unknown", f"There is no send {request_id} in the outbox.")
        return send

    def _attempt(self, signature: str, number: int | None, now: int) -> None:
        self._db.execute("INSERT INTO attempt VALUES (?, ?, ?, ?)", (signature, number, SendState.SIGNED, now))

    def _check_signature(self, prepared: PreparedTransfer) -> None:
        if self._db.execute("SELECT 1 FROM attempt WHERE signature = ?", (prepared.signature,)).fetchone():
            raise LedgerError(
                "signature_used", "That very transaction belongs to another send.", "Sign over a newer blockhash."
            )

    @contextmanager
    def _write(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise SystemResourceError(
                "outbox_unwritable", f"The outbox did not take the change: {error}.", "Nothing was sent because of it."
            ) from error


_AFTER: Mapping[SendState, tuple[SendState, ...]] = {
    SendState.SIGNED: (*(SendState.SIGNED, SendState.SENT, SendState.CONFIRMED, SendState.FAILED, SendState.EXPIRED),),
    SendState.SENT: (SendState.SENT, SendState.CONFIRMED, SendState.FAILED, SendState.EXPIRED),
    # An RPC that knew more than the one before it: what landed has landed.
    SendState.EXPIRED: (SendState.CONFIRMED, SendState.FAILED),
    SendState.CONFIRMED: (),
    SendState.FAILED: (),
}
_SELECT = (
    "SELECT request_id, genesis, payment, memo, state, signature, raw, last_valid_block_height, slot, error,"
    " created_at, updated_at FROM send"
)


def request_id_used(request_id: str) -> UsageError:
    return UsageError(
        "request_id_used", f"The id {request_id} was used for another payment.", "Each payment has an id of its own."
    )


def _send(row: tuple[Any, ...]) -> Send:
    request_id, genesis, payment, memo, state, signature, raw, height, slot, error, created_at, updated_at = row
    return Send(
        request_id=request_id,
        genesis=genesis,
        intent=_intent(payment, memo),
        state=SendState(state),
        prepared=PreparedTransfer(bytes(raw), signature, height, slot),
        error=error,
        created_at=created_at,
        updated_at=updated_at,
    )


def _payment(intent: Transfer) -> str:
    """A transfer without its memo, always written the same way."""
    fields = {**asdict(intent), "kind": "kvr" if isinstance(intent, KvrTransfer) else "sol"}
    del fields["memo"]
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _intent(payment: str, memo: str) -> Transfer:
    fields = json.loads(payment)
    kind = KvrTransfer if fields.pop("kind") == "kvr" else SolTransfer
    return kind(**fields, memo=memo)


def _prepare(db: sqlite3.Connection, file: Path) -> None:
    """Create the tables of a new file, or check the version of an old one."""
    db.execute("BEGIN IMMEDIATE")
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version == 0:
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")
    if version > SCHEMA_VERSION:
        raise LedgerError(
            "outbox_version",
            f"The outbox {file} has format {version}; this program knows format {SCHEMA_VERSION}.",
            "Run the newer version of the program.",
        )


def _open_error(file: Path, error: Exception) -> LedgerError | SystemResourceError:
    if isinstance(error, LedgerError):
        return error
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return LedgerError(
            "outbox_damaged",
            f"The outbox {file} is damaged: {error}.",
            "Restore it from a backup. Without it, look up what was sent in the wallet's history before sending again.",
        )
    return SystemResourceError("outbox_unavailable", f"The outbox {file} cannot be used: {error}.")
