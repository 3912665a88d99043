"""The meter: what every node's work comes to, cumulative, and kept in the database as it is read.

* Expert work is what the trunk acknowledged: the paid bytes of its sessions (design section 5), one micro-unit each.
  An engine counts for as long as it lives, so its counters belong to a run, named by a random id; the readings of runs
  that are over stay in the database until they are credited, and after.
* Ring work is what the gateway's own request store proves: token rows through the whole model under one generation of
  a plan, split among the stages at the window boundaries of the running total.

The hub's byte counts stand beside the expert counters as a bound. They are not what is paid.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.plans import plan_from_text
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import counters, meter, ring_totals
from kvasir_console.relay.hub import SessionCount
from kvasir_console.wallet import settlement

log = logging.getLogger(__name__)

EXPERT = "expert"
RING = "ring"
LISTED_S = 30 * 86_400
"""How long a run that is over stays in the contributions; it was credited long before."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Whose work a session's counters are."""

    worker_id: str
    model: str
    platform: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Contribution:
    """One row of ``/api/contributions``."""

    run_id: str
    wallet: str
    worker_id: str
    kind: str
    model: str
    micro_units: int
    requests: int
    rows: int
    pairs: int
    bytes_up: int
    bytes_down: int
    updated_at: int
    platform: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The contract's fields, then ours."""
        return {
            "node_id": self.worker_id,
            "owner": self.wallet,
            "units": self.micro_units / settlement.MICRO,
            "node_name": self.worker_id,
            "backend": self.platform.get("backend", ""),
            "os": self.platform.get("os", "unknown"),
            "accelerator": self.platform.get("accelerator", "cpu"),
            "device_kind": self.platform.get("device_kind", ""),
            "perf_tps": None,
            "rows": self.rows,
            "requests": self.requests,
            "agent": "kvasir-console",
            "kind": self.kind,
            "model": self.model,
            "run_id": self.run_id,
            "micro_units": self.micro_units,
            "pairs": self.pairs,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "updated_at": self.updated_at,
        }


class Meter:
    """Takes readings of engines and lists what was metered."""

    def __init__(self, store: Store, census: Census, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._census = census
        self._clock = clock
        self._known: dict[tuple[str, str], _Known] = {}
        self._bytes: Callable[[], Iterable[SessionCount]] = tuple
        self._quarantined: dict[tuple[str, str], str] = {}
        """By (wallet, worker id): what it was caught at."""
        self._written: dict[tuple[str, str, str], tuple[int, ...]] = {}
        self._read_engines: Callable[[], Awaitable[None]] | None = None

    def watch_bytes(self, sessions: Callable[[], Iterable[SessionCount]]) -> None:
        """Where the hub's byte counts come from."""
        self._bytes = sessions

    def watch_engines(self, read: Callable[[], Awaitable[None]]) -> None:
        """What enters a fresh reading of every engine: a list of contributions is never older than its request."""
        self._read_engines = read

    def admitted(self, session: str, wallet: str, worker_id: str, model: str, platform: Mapping[str, str]) -> None:
        """Remember which worker a session belongs to.

        The first answer holds for as long as this process counts: were the session's cumulative counter moved to
        another worker of the wallet, what it held before would be credited twice.
        """
        self._known.setdefault((session, wallet), _Known(worker_id, model, platform))

    def quarantined(self, wallet: str, worker_id: str) -> bool:
        """Whether a worker was caught with a wrong answer, by any engine of this database. Blocks."""
        key = (wallet, worker_id)
        if key not in self._quarantined:
            found = self._store.fact(_fact(wallet, worker_id))
            if found is None:
                return False
            self._quarantined[key] = found
        return True

    def _quarantine(self, wallet: str, worker_id: str, run_id: str, now: int) -> None:
        if (wallet, worker_id) not in self._quarantined:
            why = json.dumps({"wallet": wallet, "worker_id": worker_id, "run_id": run_id, "at": now}, sort_keys=True)
            self._quarantined[wallet, worker_id] = self._store.remember(_fact(wallet, worker_id), why)
            self._written = {key: value for key, value in self._written.items() if key[1:3] != (wallet, worker_id)}
            log.warning("worker %s of %s is quarantined: what was not credited is void", worker_id, wallet)

    def _credited(self, row: Contribution) -> int:
        """How much of a counter was credited."""
        with self._store.read() as connection:
            found = connection.scalar(
                sa.select(counters.c.baseline).where(
                    counters.c.run_id == row.run_id,
                    counters.c.wallet == row.wallet,
                    counters.c.worker_id == row.worker_id,
                    counters.c.kind == row.kind,
                )
            )
        return int(found or 0)

    def _void(self, row: Contribution) -> Contribution:
        """A quarantined worker's row: what was credited stays, all else is void."""
        return replace(row, micro_units=min(row.micro_units, self._credited(row)))

    async def read_engine(self, run_id: str, coverage: Iterable[Mapping[str, Any]]) -> None:
        """Enter one reading of an engine's ``coverage``.

        Every session that did work is a replica from now on, whatever was promised.
        """
        totals: dict[tuple[str, str], list[int]] = {}
        carried = {(count.key, count.wallet): count for count in self._bytes()}
        for entry in coverage:
            session, wallet = str(entry["session"]), str(entry["wallet"])
            known = self._known.get((session, wallet))
            if known is None:
                log.error("the engine reports work of a session that was never admitted here: %s", session)
                continue
            if entry["rows"]:
                self._census.served(session, wallet, int(entry["layer"]), int(entry["begin"]), int(entry["end"]))
            if entry.get("quarantined"):
                await asyncio.to_thread(self._quarantine, wallet, known.worker_id, run_id, int(self._clock()))
            total = totals.setdefault((session, wallet), [0, 0, 0, 0])
            for place, key in enumerate(("paid_bytes", "requests", "rows", "pairs")):
                total[place] += int(entry[key])
        rows: dict[tuple[str, str], Contribution] = {}
        now = int(self._clock())
        for (session, wallet), (paid, requests, n_rows, pairs) in totals.items():
            known = self._known[session, wallet]
            count = carried.get((session, wallet))
            row = Contribution(
                run_id=run_id,
                wallet=wallet,
                worker_id=known.worker_id,
                kind=EXPERT,
                model=known.model,
                micro_units=settlement.expert_micro_units(paid),
                requests=requests,
                rows=n_rows,
                pairs=pairs,
                bytes_up=count.ws2tcp if count else 0,
                bytes_down=count.tcp2ws if count else 0,
                updated_at=now,
                platform=known.platform,
            )
            rows[wallet, known.worker_id] = _sum(rows.get((wallet, known.worker_id)), row)
        changed = [row for row in rows.values() if self._written.get(_key(row)) != _figures(row)]
        if changed:
            await asyncio.to_thread(self._write, changed)
            self._written |= {_key(row): _figures(row) for row in changed}

    async def contributions(self) -> list[Contribution]:
        """Everything metered up to now, cumulative by run."""
        if self._read_engines is not None:
            await self._read_engines()
        return await asyncio.to_thread(self._read)

    def _write(self, rows: Iterable[Contribution]) -> None:
        rows = [self._void(row) if self.quarantined(row.wallet, row.worker_id) else row for row in rows]
        with self._store.write() as connection:
            for row in rows:
                key = (
                    meter.c.run_id == row.run_id,
                    meter.c.wallet == row.wallet,
                    meter.c.worker_id == row.worker_id,
                    meter.c.kind == row.kind,
                )
                values = {
                    "model": row.model,
                    "micro_units": row.micro_units,
                    "requests": row.requests,
                    "rows": row.rows,
                    "pairs": row.pairs,
                    "bytes_up": row.bytes_up,
                    "bytes_down": row.bytes_down,
                    "platform": json.dumps(dict(row.platform), sort_keys=True),
                    "updated_at": row.updated_at,
                }
                if not connection.execute(meter.update().where(*key).values(**values)).rowcount:
                    connection.execute(
                        meter.insert().values(
                            run_id=row.run_id, wallet=row.wallet, worker_id=row.worker_id, kind=row.kind, **values
                        )
                    )

    def _read(self) -> list[Contribution]:
        since = int(self._clock()) - LISTED_S
        with self._store.read() as connection:
            experts = connection.execute(sa.select(meter).where(meter.c.updated_at >= since)).all()
            rings = connection.execute(sa.select(ring_totals).where(ring_totals.c.updated_at >= since)).all()
        found = [
            Contribution(**{**row._mapping, "platform": json.loads(row.platform)})  # columns are the fields
            for row in experts
        ]
        for row in rings:
            try:
                found += ring_contributions(row.plan, int(row.token_rows), int(row.requests), int(row.updated_at))
            except KvasirError as error:
                log.error("the work of ring %s cannot be split: %s", row.ring, error)
        return sorted(found, key=lambda row: (row.wallet, row.worker_id, row.run_id))


def worker_totals(connection: sa.Connection, wallet: str, worker_id: str) -> tuple[int, int]:
    """(rows, pairs) that a worker was ever metered with, over all runs."""
    mine = (meter.c.wallet == wallet, meter.c.worker_id == worker_id)
    total = sa.select(sa.func.coalesce(sa.func.sum(meter.c.rows), 0), sa.func.coalesce(sa.func.sum(meter.c.pairs), 0))
    rows, pairs = connection.execute(total.where(*mine)).one()
    for row in connection.execute(sa.select(ring_totals)):
        for share in ring_contributions(row.plan, int(row.token_rows), int(row.requests), int(row.updated_at)):
            if (share.wallet, share.worker_id) == (wallet, worker_id):
                rows += share.rows
    return int(rows), int(pairs)


def ring_contributions(plan_text: str, token_rows: int, requests: int, updated_at: int) -> list[Contribution]:
    """What the stages of a plan earned for ``token_rows`` through all of them.

    A stage's run id names the plan's generation, so its counter only grows, over restarts too.
    """
    plan = plan_from_text(plan_text)
    split = settlement.RingSplit(
        tuple((stage.begin, stage.end) for stage in plan.stages), settlement.ring_micro_units(token_rows)
    )
    return [
        Contribution(
            run_id=f"ring:{plan.ring}:{plan.generation}",
            wallet=stage.wallet,
            worker_id=ring_worker_id(plan.ring, stage.rank),
            kind=RING,
            model=plan.model,
            micro_units=earned,
            requests=requests,
            rows=token_rows,
            pairs=0,
            bytes_up=0,
            bytes_down=0,
            updated_at=updated_at,
        )
        for stage, earned in zip(plan.stages, split.earned_micro_units, strict=True)
    ]


def ring_worker_id(ring: str, rank: int) -> str:
    """The worker that a rank of a ring is, whichever machine its wallet runs it on."""
    return f"ring-{ring}-{rank}"


def _sum(one: Contribution | None, other: Contribution) -> Contribution:
    """The counters of two sessions of one worker."""
    if one is None:
        return other
    return Contribution(
        run_id=other.run_id,
        wallet=other.wallet,
        worker_id=other.worker_id,
        kind=other.kind,
        model=other.model,
        micro_units=one.micro_units + other.micro_units,
        requests=one.requests + other.requests,
        rows=one.rows + other.rows,
        pairs=one.pairs + other.pairs,
        bytes_up=one.bytes_up + other.bytes_up,
        bytes_down=one.bytes_down + other.bytes_down,
        updated_at=other.updated_at,
        platform=other.platform,
    )


def _fact(wallet: str, worker_id: str) -> str:
    return "quarantine:" + hashlib.sha256(f"{wallet}\0{worker_id}".encode()).hexdigest()[:48]


def _key(row: Contribution) -> tuple[str, str, str]:
    return row.run_id, row.wallet, row.worker_id


def _figures(row: Contribution) -> tuple[int, ...]:
    return row.micro_units, row.requests, row.rows, row.pairs, row.bytes_up, row.bytes_down
