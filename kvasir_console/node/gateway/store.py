"""The operator's database: opening it, its transactions, and the small records (nonces, plans, requests, facts).

SQLite in WAL mode by default, PostgreSQL by URL. Money has a module of its own, ``ledger.py``, over the same tables.
The facts say which version of the schema a database has; an older one is brought up to date when it is opened, a newer
one is refused.

A write transaction takes SQLite's lock at its start (``BEGIN IMMEDIATE``): a transaction that read first and then
wanted to write could otherwise fail half-way because another writer came between. On PostgreSQL the rows that a
decision rests on are locked with ``FOR UPDATE``. Methods block; call them from a thread.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import DataError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from kvasir_console.errors import LedgerError
from kvasir_console.node.gateway.tables import (
    accounts,
    credited_units,
    delegations,
    facts,
    metadata,
    nonces,
    plans,
    quarantines,
    relay_counts,
    requests,
    ring_totals,
    stage_bytes,
    stage_reports,
    statements,
)

SCHEMA_VERSION = 4
NONCE_TTL_S = 300
NONCES_TOTAL = 10_000
NONCES_PER_WALLET = 16
NONCES_PER_ADDRESS = 1_000
DELEGATIONS_PER_WALLET = 16
BUSY_TIMEOUT_MS = 10_000
MAX_REASON = 300
CONTENT_TTL_S = 30 * 86_400
"""How long the tokens of an answer are kept; the accounting row stays."""


def _to_version_2(connection: Connection) -> None:
    """Units by multiplier, and the slot a claim was signed in. Version 1 knew one multiplier for each row."""
    credited_units.create(connection)
    columns = [each["name"] for each in sa.inspect(connection).get_columns("claims")]
    if "slot" not in columns:
        connection.execute(sa.text("ALTER TABLE claims ADD COLUMN slot BIGINT NOT NULL DEFAULT 0"))
    key = (accounts.c.wallet, accounts.c.worker_id, accounts.c.kind, accounts.c.multiplier, accounts.c.micro_units)
    connection.execute(
        credited_units.insert().from_select(
            ["wallet", "worker_id", "kind", "multiplier", "micro_units"], sa.select(*key)
        )
    )


def _to_version_3(connection: Connection) -> None:
    """Statements, and the byte counts they are made of."""
    relay_counts.create(connection, checkfirst=True)
    statements.create(connection, checkfirst=True)


def _to_version_4(connection: Connection) -> None:
    """Reports of stages, and quarantines as cases; they were facts before, one a worker."""
    for table in (quarantines, stage_bytes, stage_reports):
        table.create(connection, checkfirst=True)
    columns = {each["name"] for each in sa.inspect(connection).get_columns("meter")}
    for name, kind in (("voided", "BIGINT NOT NULL DEFAULT 0"), ("shard_digest", "VARCHAR(64) NOT NULL DEFAULT ''")):
        if name not in columns:
            connection.execute(sa.text(f"ALTER TABLE meter ADD COLUMN {name} {kind}"))
    old = facts.c.name.like("quarantine:%")
    for value in connection.scalars(sa.select(facts.c.value).where(old)).all():
        known = json.loads(value)
        case = {name: known[name] for name in ("wallet", "worker_id", "run_id", "at")}
        rest = dict.fromkeys(
            ("caught_by", "session", "fault", "evidence", "evidence_digest", "report", "signature"), ""
        )
        connection.execute(quarantines.insert().values(**case, **rest, number=1))
    connection.execute(facts.delete().where(old))


_UPGRADES: Mapping[int, Callable[[Connection], None]] = {1: _to_version_2, 2: _to_version_3, 3: _to_version_4}
"""By the version they start from."""
_SETUP_LOCK = 0x6B76_6173_6972
"""PostgreSQL's advisory lock for setting up: two gateways may start on an empty database at once."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The end of one request. ``ring`` and ``token_rows`` are set when a ring is to be paid for it."""

    request_id: str
    prompt_tokens: int | None
    completion_tokens: int
    finish: str
    tokens: tuple[int, ...]
    ring: str = ""
    generation: int = 0
    plan: str = ""
    token_rows: int = 0


class Store:
    """One database. ``open`` makes the tables; ``close`` gives the connections back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str) -> Store:
        """Connect, create what is missing, and bring an older schema up to date.

        Raises:
            LedgerError: the URL cannot be used, or a newer version of this program wrote the database.
        """
        try:
            parsed = make_url(url)
            if (file := sqlite_file(url)) is not None:
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            store = cls(make_engine(parsed))
            try:
                with store.write() as connection:
                    _set_up(connection)
            except BaseException:
                store.close()
                raise
        except (SQLAlchemyError, OSError, ModuleNotFoundError, LedgerError) as error:
            if isinstance(error, LedgerError) and error.code == "store_version":
                raise
            cause = error.__cause__ if isinstance(error, LedgerError) else error
            raise LedgerError(
                "store_unavailable",
                f"The settlement database cannot be opened: {_reason(cause)}.",
                "Check gateway.database, and that its folder or server can be written to.",
            ) from error
        return store

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write; it commits at the end and rolls back on any error.

        Raises:
            LedgerError: the database is locked by others for longer than the busy time-out, or away; or
                ``store_value``: it cannot hold what it was given.
        """
        try:
            with self._engine.connect().execution_options(kvasir_write=True) as connection, connection.begin():
                yield connection
        except OperationalError as error:
            raise LedgerError(
                "store_busy", "The settlement database did not take the change.", "Try again in a moment."
            ) from error
        except DataError as error:
            raise LedgerError(
                "store_value", "The settlement database cannot hold that value.", "Nothing was changed."
            ) from error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent view. Raises ``LedgerError`` as ``write``."""
        try:
            with self._engine.connect() as connection, connection.begin():
                yield connection
        except OperationalError as error:
            raise LedgerError(
                "store_busy", "The settlement database does not answer.", "Try again in a moment."
            ) from error

    def remember(self, name: str, value: str) -> str:
        """The fact ``name``; ``value`` is kept as it if there is none yet."""
        with self.write() as connection:
            found = connection.scalar(sa.select(facts.c.value).where(facts.c.name == name))
            if found is None:
                connection.execute(facts.insert().values(name=name, value=value))
                return value
            return str(found)

    def set_fact(self, name: str, value: str) -> None:
        with self.write() as connection:
            _set_fact(connection, name, value)

    def fact(self, name: str) -> str | None:
        with self.read() as connection:
            return connection.scalar(sa.select(facts.c.value).where(facts.c.name == name))

    def issue_nonce(self, wallet: str, purpose: str, now: int, *, address: str = "", ttl_s: int = NONCE_TTL_S) -> str:
        """A fresh single-use nonce, 16 random bytes in hex, bound to ``wallet`` and ``purpose``.

        A wallet has a bounded number outstanding and its oldest gives way: asking needs no proof, so a refusal here
        would let anyone lock a wallet out. What one network address can have outstanding is refused beyond its bound.

        Raises:
            LedgerError: ``too_many_nonces`` when the total, or that of ``address``, is outstanding.
        """
        nonce = secrets.token_hex(16)
        with self.write() as connection:
            connection.execute(nonces.delete().where(nonces.c.expires_at <= now))
            count = sa.select(sa.func.count()).select_from(nonces)
            total = connection.scalar(count) or 0
            from_there = connection.scalar(count.where(nonces.c.address == address)) or 0
            if total >= NONCES_TOTAL or from_there >= NONCES_PER_ADDRESS:
                raise LedgerError(
                    "too_many_nonces", "Too many challenges are outstanding.", "Try again in a few minutes."
                )
            surplus = connection.scalars(
                sa.select(nonces.c.nonce)
                .where(nonces.c.wallet == wallet)
                .order_by(nonces.c.issued_at.desc(), nonces.c.nonce)
                .offset(NONCES_PER_WALLET - 1)
            ).all()
            if surplus:
                connection.execute(nonces.delete().where(nonces.c.nonce.in_(surplus)))
            connection.execute(
                nonces.insert().values(
                    nonce=nonce,
                    wallet=wallet,
                    purpose=purpose,
                    address=address,
                    issued_at=now,
                    expires_at=now + ttl_s,
                )
            )
        return nonce

    def consume_nonce(self, nonce: str, wallet: str, purpose: str, now: int) -> bool:
        """Whether ``nonce`` was issued for exactly this and is alive. It is spent either way."""
        with self.write() as connection:
            row = connection.execute(
                nonces.delete()
                .where(nonces.c.nonce == nonce)
                .returning(nonces.c.wallet, nonces.c.purpose, nonces.c.expires_at)
            ).one_or_none()
        return row is not None and row.wallet == wallet and row.purpose == purpose and row.expires_at > now

    def delegate(self, wallet: str, key: str, until: int, now: int) -> None:
        """Let ``key`` take part for ``wallet`` until ``until``; 0 takes that back. The oldest of too many give way."""
        with self.write() as connection:
            connection.execute(
                delegations.delete().where(
                    delegations.c.wallet == wallet,
                    sa.or_(delegations.c.key == key, delegations.c.until <= now),
                )
            )
            if not until:
                return
            surplus = connection.scalars(
                sa.select(delegations.c.key)
                .where(delegations.c.wallet == wallet)
                .order_by(delegations.c.created_at.desc(), delegations.c.key)
                .offset(DELEGATIONS_PER_WALLET - 1)
            ).all()
            if surplus:
                connection.execute(
                    delegations.delete().where(delegations.c.wallet == wallet, delegations.c.key.in_(surplus))
                )
            connection.execute(delegations.insert().values(wallet=wallet, key=key, until=until, created_at=now))

    def delegated_until(self, wallet: str, key: str, now: int) -> int | None:
        """Until when ``key`` may take part for ``wallet``; ``None`` if it may not."""
        with self.read() as connection:
            return connection.scalar(
                sa.select(delegations.c.until).where(
                    delegations.c.wallet == wallet, delegations.c.key == key, delegations.c.until > now
                )
            )

    def plan_generation(self, ring: str, content: str, kept: tuple[str, str] | None = None) -> int:
        """The generation of a plan with this ``content``: one more than the last whenever the content changed.

        ``kept`` is a fact (name and value) that is set with it, or not at all.
        """
        with self.write() as connection:
            if kept is not None:
                _set_fact(connection, *kept)
            row = connection.execute(sa.select(plans).where(plans.c.ring == ring).with_for_update()).one_or_none()
            if row is None:
                connection.execute(plans.insert().values(ring=ring, generation=1, content=content))
                return 1
            if row.content == content:
                return int(row.generation)
            generation = int(row.generation) + 1
            connection.execute(
                plans.update().where(plans.c.ring == ring).values(generation=generation, content=content)
            )
            return generation

    def begin_request(self, request_id: str, model: str, now: int) -> None:
        """Open a request; one that is sent again stays as it is."""
        with self.write() as connection:
            if connection.execute(sa.select(requests.c.id).where(requests.c.id == request_id)).one_or_none() is None:
                values = {"id": request_id, "model": model, "created": now, "completion_tokens": 0}
                connection.execute(requests.insert().values(values))

    def finish_request(self, record: RequestRecord, now: int) -> None:
        """Close a request and, in the same transaction, count its rows for the ring that served it."""
        with self.write() as connection:
            closed = connection.execute(
                requests.update()
                .where(requests.c.id == record.request_id, requests.c.finished.is_(None))
                .values(
                    finished=now,
                    prompt_tokens=record.prompt_tokens,
                    completion_tokens=record.completion_tokens,
                    finish=record.finish,
                    tokens=json.dumps(record.tokens, separators=(",", ":")),
                )
            ).rowcount
            if not closed or not record.ring or record.token_rows <= 0:
                return
            key = (ring_totals.c.ring == record.ring, ring_totals.c.generation == record.generation)
            counted = connection.execute(
                ring_totals.update()
                .where(*key)
                .values(
                    token_rows=ring_totals.c.token_rows + record.token_rows,
                    requests=ring_totals.c.requests + 1,
                    updated_at=now,
                )
            ).rowcount
            if not counted:
                connection.execute(
                    ring_totals.insert().values(
                        ring=record.ring,
                        generation=record.generation,
                        token_rows=record.token_rows,
                        requests=1,
                        plan=record.plan,
                        updated_at=now,
                    )
                )

    def request(self, request_id: str) -> Mapping[str, Any] | None:
        with self.read() as connection:
            row = connection.execute(sa.select(requests).where(requests.c.id == request_id)).one_or_none()
            return None if row is None else dict(row._mapping)

    def forget_content(self, now: int, ttl_s: int = CONTENT_TTL_S) -> int:
        """Erase the tokens of answers older than ``ttl_s``; how many were erased."""
        with self.write() as connection:
            return connection.execute(
                requests.update()
                .where(requests.c.created < now - ttl_s, requests.c.tokens.is_not(None))
                .values(tokens=None)
            ).rowcount


def _set_fact(connection: Connection, name: str, value: str) -> None:
    if not connection.execute(facts.update().where(facts.c.name == name).values(value=value)).rowcount:
        connection.execute(facts.insert().values(name=name, value=value))


def _set_up(connection: Connection) -> None:
    """Make the tables of an empty database, or upgrade those of an older one. Raises ``LedgerError``."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SETUP_LOCK})
    facts.create(connection, checkfirst=True)
    version = facts.c.name == "schema_version"
    found = connection.scalar(sa.select(facts.c.value).where(version))
    if found is None:
        metadata.create_all(connection)
        connection.execute(facts.insert().values(name="schema_version", value=str(SCHEMA_VERSION)))
        return
    if int(found) > SCHEMA_VERSION:
        raise LedgerError(
            "store_version",
            f"The settlement database has schema version {found}; this program knows version {SCHEMA_VERSION}.",
            "Run the version of kvasir-console that wrote it, or give another gateway.database.",
        )
    for step in range(int(found), SCHEMA_VERSION):
        _UPGRADES[step](connection)
    connection.execute(facts.update().where(version).values(value=str(SCHEMA_VERSION)))


def sqlite_file(url: str) -> Path | None:
    """The file of an SQLite database; ``None`` for another kind, for one in memory, and for what is no URL."""
    try:
        parsed = make_url(url)
    except SQLAlchemyError:
        return None
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return Path(str(parsed.database))


def _reason(error: BaseException | None) -> str:
    """Why a database cannot be opened, in the driver's words: those name no password, and SQLAlchemy's may."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        lines = str(error.orig).strip().splitlines()
        return lines[0].strip()[:MAX_REASON].rstrip(".") if lines else type(error.orig).__name__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return {
        "ArgumentError": "that is no database's URL",
        "NoSuchModuleError": "no driver for that kind of database is known",
    }.get(type(error).__name__, type(error).__name__)


def make_engine(url: URL) -> Engine:
    """An engine whose transactions begin the way the module's docstring says."""
    if url.get_backend_name() != "sqlite":
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        return sa.create_engine(url, pool_pre_ping=True)
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: ConnectionPoolEntry) -> None:
        # The driver opens transactions by itself, and late; from here on only "begin" below does.
        connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("kvasir_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
