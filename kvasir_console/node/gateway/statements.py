"""Statements of the hub: what every worker did, signed when it asks, one chain for each (wallet, worker).

The figures come from two places. Bytes are the hub's counts, which are written down with every reading of the engines
and go on over restarts; rows and pairs are what the trunk acknowledged, from the meter. A statement is written when a
node asks for what is new and its figures have changed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvasir_console.errors import KvasirError, UsageError, WalletError
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.metering import worker_shard, worker_totals
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import relay_counts, statements
from kvasir_console.node.gateway.web import query_integer, read_json, text_field
from kvasir_console.relay.counting import Tally
from kvasir_console.relay.hub import MAX_TALLIES, Hub
from kvasir_console.relay.wire.statement import GENESIS, Statement, acknowledgement_text
from kvasir_console.wallet.keys import decode_signature, verify

__all__ = ["Statements"]

log = logging.getLogger(__name__)

PAGE = 128
"""Statements in one answer."""
LEAST_S = 10
"""A chain grows by one statement in this time at most."""
KEPT_S = 90 * 86_400
"""How long acknowledged statements are kept; the latest always is."""
_WORKER = re.compile(r"[!-~]{1,256}")


@dataclass(frozen=True, slots=True)
class _Row:
    values: dict[str, Any]
    state: str


class Statements:
    """Keeps the hub's counts, writes statements, takes acknowledgements."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        hub: Hub,
        clock: Callable[[], float] = time.time,
        *,
        least_s: float = LEAST_S,
    ) -> None:
        self._store = store
        self._identity = identity
        self._hub = hub
        self._clock = clock
        self._least_s = least_s
        self._run = secrets.token_hex(16)
        self._written: dict[tuple[str, str], str] = {}
        self._writing = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/api/statements", self.statements, methods=["GET"]),
            Route("/api/statements/acknowledge", self.acknowledge, methods=["POST"]),
        ]

    async def restore(self) -> None:
        """Let the hub go on from what was written; before it serves."""
        rows = await asyncio.to_thread(self._read_counts)
        tallies = [tally for row in rows if (tally := _tally(row)) is not None]
        self._written = {(tally.wallet, tally.key): _state(tally) for tally in tallies}
        self._hub.restore(tallies)
        self._hub.books = self

    async def names(self, wallet: str) -> Collection[str]:
        """Session names of a wallet that have counts."""
        return await asyncio.to_thread(self._read_names, wallet)

    async def recall(self, wallet: str, key: str) -> Tally | None:
        """The counts of a session that the hub let go of."""
        row = await asyncio.to_thread(self._read_count, wallet, key)
        return None if row is None else _tally(row)

    async def flush(self) -> None:
        """Write the byte counts that changed; those of the sessions that ended first may leave the memory then."""
        async with self._writing:
            changed: dict[tuple[str, str], _Row] = {}
            now = int(self._clock())
            for tally in self._hub.tallies():
                state = _state(tally)
                if tally.worker and self._written.get((tally.wallet, tally.key)) != state:
                    count = tally.count()
                    values = {
                        "worker_id": tally.worker,
                        "model_digest": tally.model_digest,
                        "state": state,
                        "up": count.ws2tcp,
                        "down": count.confirmed,
                        "updated_at": now,
                    }
                    changed[tally.wallet, tally.key] = _Row(values, state)
            if changed:
                await asyncio.to_thread(self._write_counts, changed, now)
                self._written |= {key: row.state for key, row in changed.items()}
            for key in self._hub.trim(lambda tally: self._written.get((tally.wallet, tally.key)) == _state(tally)):
                del self._written[key]

    async def statements(self, request: Request) -> Response:
        """What is new since a sequence: of one worker, or of each of the wallet's."""
        wallet = self._identity.caller(request.headers).require_wallet()
        since = query_integer(request, "since") if "since" in request.query_params else 0
        worker = request.query_params.get("worker", "")
        if worker and not _WORKER.fullmatch(worker):
            raise UsageError("missing_field", "worker must be printable text of at most 256 characters.")
        await self.flush()
        found = await asyncio.to_thread(self._page, wallet, worker, since)
        return JSONResponse(found)

    async def acknowledge(self, request: Request) -> Response:
        """A node's signature over one statement, by its wallet or a session key of it."""
        wallet = self._identity.caller(request.headers).require_wallet()
        body = await read_json(request)
        worker, key = text_field(body, "worker", 256), text_field(body, "key", 44)
        signature, digest, sequence = (
            text_field(body, "signature", 128),
            text_field(body, "hash", 64),
            body.get("sequence"),
        )
        if type(sequence) is not int:
            raise UsageError("missing_field", "sequence is needed: a whole number.")
        text = acknowledgement_text(wallet, worker, sequence, digest)
        await self._identity.check_statement_key(wallet, key)
        try:
            raw = decode_signature(signature)
        except KvasirError:
            raw = b""
        if not verify(key, text.encode(), raw):
            raise WalletError("signature_refused", "That is not the key's signature over this acknowledgement.")
        if not await asyncio.to_thread(self._acknowledge, wallet, worker, sequence, digest, key, signature):
            raise UsageError("statement_unknown", f"There is no statement {sequence} with that hash for this worker.")
        return JSONResponse({"worker": worker, "acknowledged": sequence})

    async def forget(self) -> None:
        """Drop what was acknowledged long ago."""
        await asyncio.to_thread(self._forget, int(self._clock()) - KEPT_S)

    # From here on in a thread

    def _read_counts(self) -> Sequence[sa.Row[Any]]:
        latest = sa.select(relay_counts).order_by(relay_counts.c.updated_at.desc()).limit(MAX_TALLIES)
        with self._store.read() as connection:
            return connection.execute(latest).all()

    def _read_count(self, wallet: str, key: str) -> sa.Row[Any] | None:
        at = (relay_counts.c.wallet == wallet, relay_counts.c.session == key)
        with self._store.read() as connection:
            return connection.execute(sa.select(relay_counts).where(*at)).one_or_none()

    def _read_names(self, wallet: str) -> set[str]:
        with self._store.read() as connection:
            return set(connection.scalars(sa.select(relay_counts.c.session).where(relay_counts.c.wallet == wallet)))

    def _write_counts(self, changed: dict[tuple[str, str], _Row], now: int) -> None:
        with self._store.write() as connection:
            for (wallet, session), row in changed.items():
                key = (relay_counts.c.wallet == wallet, relay_counts.c.session == session)
                if not connection.execute(relay_counts.update().where(*key).values(**row.values)).rowcount:
                    connection.execute(
                        relay_counts.insert().values(wallet=wallet, session=session, first_at=now, **row.values)
                    )

    def _page(self, wallet: str, worker: str, since: int) -> dict[str, Any]:
        with self._store.write() as connection:
            mine = sa.select(relay_counts.c.worker_id).where(relay_counts.c.wallet == wallet).distinct()
            workers = [worker] if worker else sorted(connection.scalars(mine))
            for each in workers:
                self._write_next(connection, wallet, each)
            at = (statements.c.wallet == wallet, statements.c.worker_id.in_(workers))
            order = (statements.c.worker_id, statements.c.sequence)
            found = connection.execute(
                sa.select(statements).where(*at, statements.c.sequence > since).order_by(*order).limit(PAGE)
            ).all()
            heads = {}
            for each in workers:
                last = self._last(connection, wallet, each)
                if last is not None:
                    latest = Statement.parse(last.text)
                    heads[each] = {"sequence": latest.sequence, "hash": latest.hash}
        listed = [{"statement": row.text, "signature": row.signature} for row in found]
        return {"statements": listed, "heads": heads}

    def _last(self, connection: sa.Connection, wallet: str, worker: str) -> sa.Row[Any] | None:
        return connection.execute(
            sa.select(statements)
            .where(statements.c.wallet == wallet, statements.c.worker_id == worker)
            .order_by(statements.c.sequence.desc())
            .limit(1)
        ).one_or_none()

    def _write_next(self, connection: sa.Connection, wallet: str, worker: str) -> None:
        """The next statement of a chain, if there is anything new to state."""
        now = int(self._clock())
        sessions = connection.execute(
            sa.select(relay_counts)
            .where(relay_counts.c.wallet == wallet, relay_counts.c.worker_id == worker)
            .order_by(relay_counts.c.updated_at)
        ).all()
        if not sessions:
            return
        row = self._last(connection, wallet, worker)
        last = None if row is None else Statement.parse(row.text)
        rows, pairs = worker_totals(connection, wallet, worker)
        up, down = sum(int(each.up) for each in sessions), sum(int(each.down) for each in sessions)
        if last is not None:
            # A worker that moved to another session takes its totals along: they never fall.
            up, down = max(up, last.bytes_up), max(down, last.bytes_down)
            rows, pairs = max(rows, last.rows), max(pairs, last.pairs)
            unchanged = (up, down, rows, pairs) == (last.bytes_up, last.bytes_down, last.rows, last.pairs)
            if unchanged or now - last.last_at < self._least_s:
                return
        elif not any((up, down, rows, pairs)):
            return
        first_at = last.first_at if last is not None else min(int(each.first_at) for each in sessions)
        statement = Statement(
            key=self._identity.hub_key,
            wallet=wallet,
            worker=worker,
            run=self._run,
            sequence=1 if last is None else last.sequence + 1,
            model_digest=sessions[-1].model_digest or GENESIS,
            shard_digest=worker_shard(connection, wallet, worker) or GENESIS,
            bytes_up=up,
            bytes_down=down,
            rows=rows,
            pairs=pairs,
            first_at=first_at,
            last_at=max(now, first_at, last.last_at if last is not None else 0),
            previous=GENESIS if last is None else last.hash,
        )
        signature = self._identity.sign_as_hub(statement.text().encode())
        connection.execute(
            statements.insert().values(
                wallet=wallet,
                worker_id=worker,
                sequence=statement.sequence,
                text=statement.text(),
                signature=base64.b64encode(signature).decode(),
                at=now,
            )
        )

    def _acknowledge(self, wallet: str, worker: str, sequence: int, digest: str, key: str, signature: str) -> bool:
        at = (
            statements.c.wallet == wallet,
            statements.c.worker_id == worker,
            statements.c.sequence == sequence,
        )
        with self._store.write() as connection:
            text = connection.scalar(sa.select(statements.c.text).where(*at))
            if text is None or Statement.parse(text).hash != digest:
                return False
            connection.execute(statements.update().where(*at).values(acknowledged_by=key, acknowledgement=signature))
        return True

    def _forget(self, before: int) -> None:
        newer = statements.alias()
        later = sa.select(newer.c.sequence).where(
            newer.c.wallet == statements.c.wallet,
            newer.c.worker_id == statements.c.worker_id,
            newer.c.sequence > statements.c.sequence,
            newer.c.acknowledgement.is_not(None),
        )
        with self._store.write() as connection:
            connection.execute(statements.delete().where(statements.c.at < before, later.exists()))


def _state(tally: Tally) -> str:
    return json.dumps(tally.state(), separators=(",", ":"))


def _tally(row: sa.Row[Any]) -> Tally | None:
    """The totals in a row; ``None`` if they cannot be read."""
    tally = Tally(row.session, row.wallet, row.worker_id, row.model_digest, closed_at=float(row.updated_at))
    try:
        tally.restore(json.loads(row.state))
    except (ValueError, KeyError, TypeError) as error:
        log.error("the byte counts of %s cannot be read: %s", row.session, error)
        return None
    return tally
