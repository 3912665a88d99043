"""Pay for the workers of a ring's stages: what each stage signs is checked, and entered beside the trunk's readings.

A stage owns the router of its layers, so only its engine knows which answers it asked for and used. Nothing of what it
says is taken without one of these: the signed plan names its wallet for the window at this epoch; the counters go on
where the last accepted report stood; and over all runs of the stage, the work it claims for a worker fits into the
bytes that this hub itself carried between the two. What a stage and a worker can still agree on is to push that many
bytes (docs/security.md).

A report and what it is booked as are one transaction, so a restart of either side pays nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvasir_console.errors import KvasirError, NetworkError, UsageError
from kvasir_console.node.gateway.authority import star_of
from kvasir_console.node.gateway.census import Census, OfferedModel
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.metering import EXPERT, Contribution, enter
from kvasir_console.node.gateway.plans import PlannedRing
from kvasir_console.node.gateway.quarantine import Standing, case_of, catch, stage_run_id
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import stage_bytes, stage_reports
from kvasir_console.node.gateway.web import read_json
from kvasir_console.relay.counting import Joint
from kvasir_console.relay.hub import Hub
from kvasir_console.relay.wire.stage_report import MAX_TEXT_BYTES, StageReport, Work, check_growth, check_passed
from kvasir_console.relay.wire.statement import held_digest
from kvasir_console.wallet import settlement
from kvasir_console.wallet.keys import decode_signature, verify

__all__ = ["StageReports"]

log = logging.getLogger(__name__)

MAX_REPORTS = 64
"""Most reports in one request."""
TELL_S = 60.0
"""Between two lines of the log about a wallet's refused reports."""
MAX_TOLD = 1024
MAX_RUNS = 64
"""Most runs that a stage may open about one worker in ``RUNS_WINDOW_S``: each is a row that is kept."""
RUNS_WINDOW_S = 3600


class StageReports:
    """Takes reports, keeps the byte counts they are bounded by."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        census: Census,
        rings: Mapping[str, PlannedRing],
        hub: Hub,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._identity = identity
        self._census = census
        self._rings = rings
        self._hub = hub
        self._clock = clock
        self._written: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        self._writing = asyncio.Lock()
        self._told: dict[str, float] = {}
        """When a wallet's refusals were last logged."""

    def routes(self) -> list[Route]:
        return [Route("/api/stage-reports", self.take, methods=["POST"])]

    async def restore(self) -> None:
        """Let the hub's counts between stages and workers go on from what was written; before it serves."""
        self._hub.restore((), await asyncio.to_thread(self._read_joints))

    async def flush(self) -> None:
        """Write the counts that changed."""
        async with self._writing:
            now = {joint.key: (joint.down, joint.up) for joint in self._hub.joints()}
            changed = [joint for joint in self._hub.joints() if self._written.get(joint.key) != now[joint.key]]
            if changed:
                await asyncio.to_thread(self._write_joints, changed)
                self._written |= {joint.key: now[joint.key] for joint in changed}

    async def take(self, request: Request) -> Response:
        """Judge each report by itself; the answers stand in the order of the reports.

        ``lifted`` says that the operator lifted what the stage holds against the worker.
        """
        wallet = self._identity.caller(request.headers).require_wallet()
        entries = (await read_json(request)).get("reports")
        if not isinstance(entries, list) or len(entries) > MAX_REPORTS:
            raise UsageError("missing_field", f"reports is needed: a list of at most {MAX_REPORTS}.")
        answers = []
        for entry in entries:
            try:
                lifted = await self._one(wallet, entry)
            except KvasirError as error:
                self._tell(wallet, error)
                answers.append({"accepted": False, "code": error.code, "message": error.message})
            else:
                answers.append({"accepted": True, "lifted": lifted})
        return JSONResponse({"results": answers})

    def _tell(self, wallet: str, error: KvasirError) -> None:
        """Log why a stage's reports are refused: now and then, whoever sends them all the time would fill the log."""
        now = self._clock()
        if now - self._told.get(wallet, -TELL_S) < TELL_S:
            return
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told[wallet] = now
        log.warning("a report of the stage of %s: %s", wallet, error)

    async def _one(self, wallet: str, entry: object) -> bool:
        """Book one report; whether the case it holds against the worker was lifted. Raises ``KvasirError``."""
        fields = entry if isinstance(entry, dict) else {}
        text, signature = fields.get("text"), fields.get("signature")
        if not isinstance(text, str) or not isinstance(signature, str) or len(text) > MAX_TEXT_BYTES:
            raise _refused("report_malformed", "it is no text with a signature")
        report = StageReport.parse(text)
        await self._check_signer(wallet, report, signature)
        ring, offered = self._check_place(report)
        star = star_of(report.ring, next(s.rank for s in ring.plan.stages if s.wallet == wallet))
        joint = self._hub.joint(star, wallet, report.wallet, report.session)
        if joint is None:
            raise _refused("report_unknown_worker", f"no worker {report.session} of {report.wallet} was joined to it")
        known = self._census.worker(report.wallet, joint.worker, self._clock())
        booking = Booking(report, signature, joint, offered, {} if known is None else known.platform)
        standing = await asyncio.to_thread(book, self._store, booking, int(self._clock()))
        for each in report.slices:
            if each.rows:
                self._census.served(report.session, report.wallet, *each.place)
        return standing is Standing.LIFTED

    async def _check_signer(self, wallet: str, report: StageReport, signature: str) -> None:
        """Raises ``NetworkError`` or ``WalletError``."""
        if report.stage != wallet:
            raise _refused("report_forged", "it is for another wallet than the one that hands it in")
        try:
            raw = decode_signature(signature)
        except KvasirError:
            raw = b""
        if not verify(report.key, report.text().encode(), raw):
            raise _refused("report_forged", "its key did not sign it")
        await self._identity.check_statement_key(wallet, report.key)
        if report.hub not in self._identity.hub_keys:
            raise _refused("report_other_hub", "it is for another hub")

    def _check_place(self, report: StageReport) -> tuple[PlannedRing, OfferedModel]:
        """The ring and its model, if the plan in force gives the stage these layers. Raises ``NetworkError``."""
        ring, offered = self._rings.get(report.ring), self._census.models.get(report.ring)
        if ring is None or offered is None:
            raise _refused("report_unknown_ring", f"no ring {report.ring} with experts is served here")
        plan, stage = ring.plan, ring.plan.stage_of(report.stage)
        if report.epoch != plan.generation:
            raise _refused("report_old_epoch", f"it is of generation {report.epoch}, the plan of {plan.generation}")
        if stage is None:
            raise _refused("report_not_in_plan", "the plan does not name that wallet")
        if report.model_digest != plan.model_digest:
            raise _refused("report_other_model", "it is about another model")
        for each in report.slices:
            within = stage.begin <= each.layer < stage.end and each.layer in offered.moe_layers
            if not within or each.end > offered.n_expert:
                raise _refused("report_outside_window", f"layer {each.layer} is not the stage's")
        return ring, offered

    # From here on in a thread

    def _read_joints(self) -> list[Joint]:
        with self._store.read() as connection:
            rows = connection.execute(sa.select(stage_bytes)).all()
        return [Joint(r.star, r.stage, r.wallet, r.session, r.worker_id, int(r.down), int(r.up)) for r in rows]

    def _write_joints(self, joints: list[Joint]) -> None:
        with self._store.write() as connection:
            for joint in joints:
                _write_joint(connection, joint)


@dataclass(frozen=True, slots=True)
class Booking:
    """A report that was checked, and what it is held against."""

    report: StageReport
    signature: str
    joint: Joint
    offered: OfferedModel
    platform: Mapping[str, str]

    @property
    def run_id(self) -> str:
        return stage_run_id(self.report.stage, self.report.run)


def book(store: Store, made: Booking, now: int) -> Standing | None:
    """Enter a report and what it makes of the books, or nothing. Raises ``KvasirError``."""
    report, joint = made.report, made.joint
    pair = {"star": joint.star, "stage": joint.stage, "wallet": joint.wallet, "session": joint.session}
    of = stage_reports.c
    at = [of[name] == value for name, value in pair.items()]
    with store.write() as connection:
        _write_joint(connection, joint)  # whoever comes meanwhile with another run of the two waits here
        last = connection.execute(sa.select(stage_reports).where(*at, of.run == report.run)).one_or_none()
        check_growth(None if last is None else StageReport.parse(last.text), report)
        if last is None:
            _check_new_run(connection, made, at, now)
        # The texts of a stage's other runs stay where they are: there may be many.
        sums = sa.select(*(sa.func.coalesce(sa.func.sum(column), 0) for column in (of.rows, of.pairs)))
        others = [Work(*map(int, connection.execute(sums.where(*at, of.run != report.run)).one()))]
        check_passed(made.offered.n_embd, [*others, report.work], joint.down, joint.up)
        values = {
            "worker_id": joint.worker if last is None else last.worker_id,
            "rows": report.work.rows,
            "pairs": report.work.pairs,
            "requests": report.requests,
            "text": report.text(),
            "signature": made.signature,
        }
        if last is None:
            connection.execute(stage_reports.insert().values(**pair, run=report.run, opened_at=now, **values))
        else:
            connection.execute(stage_reports.update().where(*at, of.run == report.run).values(**values))
        worker_id = str(values["worker_id"])
        standing = None
        if report.quarantined:
            standing = catch(connection, case_of(report, made.signature, worker_id, now))
        enter(connection, _contribution(connection, made, worker_id, now))
    return standing


def _check_new_run(connection: Connection, made: Booking, at: Sequence[sa.ColumnElement[bool]], now: int) -> None:
    """Whether this run may begin for the two. Raises ``NetworkError``.

    A run is one load of one rank, and its totals are paid once: were it taken for another rank of the wallet too, here
    or in another ring, that rank's bytes would pay for them again.
    """
    joint, run, of = made.joint, made.report.run, stage_reports.c
    ranks = sa.select(stage_bytes.c.star).where(stage_bytes.c.stage == joint.stage, stage_bytes.c.star != joint.star)
    elsewhere = sa.select(of.run).where(of.star.in_(ranks), of.stage == joint.stage, of.run == run)
    if connection.execute(elsewhere.limit(1)).one_or_none() is not None:
        raise _refused("report_other_rank", f"run {run} is of another rank of this wallet")
    opened = sa.select(sa.func.count()).where(*at, of.opened_at > now - RUNS_WINDOW_S)
    if int(connection.scalar(opened) or 0) >= MAX_RUNS:
        raise _refused("report_too_many_runs", f"{MAX_RUNS} runs were opened in {RUNS_WINDOW_S} s")


def _contribution(connection: Connection, made: Booking, worker_id: str, now: int) -> Contribution:
    """What a run of a stage comes to for a worker, over all its sessions."""
    report, n_embd = made.report, made.offered.n_embd
    table, held = stage_reports.c, stage_bytes.c
    total = sa.select(*(sa.func.sum(column) for column in (table.rows, table.pairs, table.requests)))
    at = (table.star == made.joint.star, table.stage == report.stage, table.wallet == report.wallet)
    mine = (*at, table.worker_id == worker_id)
    rows, pairs, requests = (
        int(sums) for sums in connection.execute(total.where(*mine, table.run == report.run)).one()
    )
    passed = sa.select(sa.func.sum(held.up), sa.func.sum(held.down))
    at = (held.star == made.joint.star, held.stage == report.stage, held.wallet == report.wallet)
    between = (*at, held.worker_id == worker_id)
    up, down = (int(sums or 0) for sums in connection.execute(passed.where(*between)).one())
    live = [(*each.place, each.shard_digest) for each in report.slices if each.live]
    return Contribution(
        run_id=made.run_id,
        wallet=report.wallet,
        worker_id=worker_id,
        kind=EXPERT,
        model=made.offered.model,
        micro_units=settlement.expert_micro_units(settlement.paid_bytes(n_embd, rows, pairs)),
        requests=requests,
        rows=rows,
        pairs=pairs,
        bytes_up=up,
        bytes_down=down,
        updated_at=now,
        platform=made.platform,
        shard_digest=held_digest(live) if live else "",
    )


def _write_joint(connection: Connection, joint: Joint) -> None:
    key = {"star": joint.star, "stage": joint.stage, "wallet": joint.wallet, "session": joint.session}
    values = {"worker_id": joint.worker, "down": joint.down, "up": joint.up}
    # One statement: another transaction that is about to enter the same two is waited for.
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    made = insert(stage_bytes).values(**key, **values)
    connection.execute(made.on_conflict_do_update(index_elements=list(key), set_=values))


def _refused(code: str, what: str) -> NetworkError:
    return NetworkError(code, f"A stage's report is refused: {what}.", "Nothing was booked for it.")
