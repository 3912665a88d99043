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
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.plans import plan_from_text
from kvasir_console.node.gateway.quarantine import (
    OWN,
    Case,
    Quarantines,
    Standing,
    caught_in,
    credited,
    open_cases,
)
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import counters, meter, ring_totals
from kvasir_console.relay.hub import SessionCount
from kvasir_console.relay.wire.statement import held_digest
from kvasir_console.wallet import settlement

log = logging.getLogger(__name__)

EXPERT = "expert"
RING = "ring"
LISTED_S = 30 * 86_400
"""How long a run that is over stays in the contributions; it was credited long before."""
STAGE_LISTED_S = 3600
"""The same for runs of ring stages once they are credited: strangers name those, and an answer that is too long for the
settlement would keep everybody from their pay."""


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
    shard_digest: str = ""
    """Of what the worker holds (``held_digest``); empty if this reading does not say."""

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
        self._quarantines = Quarantines(store)
        self._written: dict[tuple[str, str, str], tuple[object, ...]] = {}
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

    def quarantined(self, wallet: str, worker_id: str, stage: str = OWN) -> bool:
        """Whether a worker was caught with a wrong answer, by any engine of this database or by ``stage``. Blocks."""
        return self._quarantines.quarantined(wallet, worker_id, stage)

    async def read_engine(self, run_id: str, coverage: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
        """Enter one reading of an engine's ``coverage``.

        Every session that did work is a replica from now on, whatever was promised.

        Returns:
            The sessions (with their wallets) that the engine holds for quarantined while the operator lifted it.
        """
        sessions: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for entry in coverage:
            session, wallet = str(entry["session"]), str(entry["wallet"])
            if (session, wallet) not in self._known:
                log.error("the engine reports work of a session that was never admitted here: %s", session)
                continue
            if entry["rows"]:
                self._census.served(session, wallet, int(entry["layer"]), int(entry["begin"]), int(entry["end"]))
            sessions.setdefault((session, wallet), []).append(entry)
        lifted = [key for key, entries in sessions.items() if await self._standing(run_id, *key, entries)]
        carried = {(count.key, count.wallet): count for count in self._bytes()}
        rows: dict[tuple[str, str], Contribution] = {}
        for (session, wallet), entries in sessions.items():
            row = self._contribution(run_id, session, wallet, entries, carried.get((session, wallet)))
            rows[wallet, row.worker_id] = add(rows.get((wallet, row.worker_id)), row)
        changed = [row for row in rows.values() if self._written.get(_key(row)) != _figures(row)]
        if changed:
            await asyncio.to_thread(self._write, changed)
            self._written |= {_key(row): _figures(row) for row in changed}
        return tuple(lifted)

    async def _standing(self, run_id: str, session: str, wallet: str, entries: Iterable[Mapping[str, Any]]) -> bool:
        """Enter a session's case, if its engine caught it; whether that case was lifted."""
        caught = [entry for entry in entries if entry.get("quarantined")]
        if not caught:
            return False
        last = max(caught, key=lambda entry: int(entry.get("convictions", 1)))
        case = Case(
            wallet=wallet,
            worker_id=self._known[session, wallet].worker_id,
            caught_by=OWN,
            run_id=run_id,
            session=session,
            number=int(last.get("convictions", 1)),
            at=int(self._clock()),
            fault=str(last.get("fault", "")),
            evidence=str(last.get("evidence", "")),
            evidence_digest=str(last.get("evidence_digest", "")),
        )
        return await asyncio.to_thread(self._quarantines.catch, case) is Standing.LIFTED

    def _contribution(
        self, run_id: str, session: str, wallet: str, entries: Iterable[Mapping[str, Any]], count: SessionCount | None
    ) -> Contribution:
        known = self._known[session, wallet]
        paid, requests, rows, pairs = (
            sum(int(entry[key]) for entry in entries) for key in ("paid_bytes", "requests", "rows", "pairs")
        )
        held = [
            (int(entry["layer"]), int(entry["begin"]), int(entry["end"]), str(entry.get("shard_digest", "")))
            for entry in entries
            if entry.get("connected")
        ]
        return Contribution(
            run_id=run_id,
            wallet=wallet,
            worker_id=known.worker_id,
            kind=EXPERT,
            model=known.model,
            micro_units=settlement.expert_micro_units(paid),
            requests=requests,
            rows=rows,
            pairs=pairs,
            bytes_up=count.ws2tcp if count else 0,
            bytes_down=count.tcp2ws if count else 0,
            updated_at=int(self._clock()),
            platform=known.platform,
            shard_digest=held_digest(held) if held else "",
        )

    async def contributions(self) -> list[Contribution]:
        """Everything metered up to now, cumulative by run."""
        if self._read_engines is not None:
            await self._read_engines()
        return await asyncio.to_thread(self._read)

    def _write(self, rows: Iterable[Contribution]) -> None:
        with self._store.write() as connection:
            for row in rows:
                enter(connection, row)

    def _read(self) -> list[Contribution]:
        now = int(self._clock())
        since = now - LISTED_S
        with self._store.read() as connection:
            columns = [column for column in meter.c if column is not meter.c.voided]
            listed = sa.select(*columns).where(meter.c.updated_at >= since, _worth_listing(now))
            experts = connection.execute(listed).all()
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


def _worth_listing(now: int) -> sa.ColumnElement[bool]:
    """Of a stage's run: whether it still goes on, or was not credited yet."""
    names = ("run_id", "wallet", "worker_id", "kind")
    same = (counters.c[name] == meter.c[name] for name in names)
    baseline = sa.select(counters.c.baseline).where(*same).scalar_subquery()
    return sa.or_(
        meter.c.run_id.not_like("stage:%"),
        meter.c.updated_at >= now - STAGE_LISTED_S,
        meter.c.micro_units > sa.func.coalesce(baseline, 0),
    )


def enter(connection: sa.Connection, row: Contribution) -> None:
    """Write a counter as it reads now, less what was voided of it; of a quarantined worker's, all that grew is void."""
    key = {"run_id": row.run_id, "wallet": row.wallet, "worker_id": row.worker_id, "kind": row.kind}
    mine = [meter.c[name] == value for name, value in key.items()]
    voided = connection.scalar(sa.select(meter.c.voided).where(*mine).with_for_update())
    payable = max(0, row.micro_units - int(voided or 0))
    if open_cases(connection, row.wallet, row.worker_id) & {OWN, caught_in(row.run_id)}:
        payable = min(payable, credited(connection, **key))
    values = {
        "model": row.model,
        "micro_units": payable,
        "voided": row.micro_units - payable,
        "requests": row.requests,
        "rows": row.rows,
        "pairs": row.pairs,
        "bytes_up": row.bytes_up,
        "bytes_down": row.bytes_down,
        "updated_at": row.updated_at,
    }
    if row.platform or voided is None:
        values["platform"] = json.dumps(dict(row.platform), sort_keys=True)
    if row.shard_digest:
        values["shard_digest"] = row.shard_digest
    if voided is None:
        connection.execute(meter.insert().values(**key, **values))
    else:
        connection.execute(meter.update().where(*mine).values(**values))


def worker_shard(connection: sa.Connection, wallet: str, worker_id: str) -> str:
    """The digest of what a worker held when it was last metered; empty if no reading ever said."""
    query = sa.select(meter.c.shard_digest).where(
        meter.c.wallet == wallet, meter.c.worker_id == worker_id, meter.c.shard_digest != ""
    )
    return str(connection.scalar(query.order_by(meter.c.updated_at.desc()).limit(1)) or "")


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


def add(one: Contribution | None, other: Contribution) -> Contribution:
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
        shard_digest=other.shard_digest or one.shard_digest,
    )


def _key(row: Contribution) -> tuple[str, str, str]:
    return row.run_id, row.wallet, row.worker_id


def _figures(row: Contribution) -> tuple[object, ...]:
    return row.micro_units, row.requests, row.rows, row.pairs, row.bytes_up, row.bytes_down, row.shard_digest
