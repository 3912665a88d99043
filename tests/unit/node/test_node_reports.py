"""What a stage's node tells the hub of its workers: totals of a run, signed, until they are accepted."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvasir_console.errors import EngineError, NetworkError
from kvasir_console.node import reports
from kvasir_console.node.holding import RingHolding
from kvasir_console.node.market import GatewayInfo
from kvasir_console.node.placement.plan import Plan, PlannedStage
from kvasir_console.node.reports import ASK_EVERY, AT_ONCE, TRIES, StageBook, StageReporter
from kvasir_console.node.session_key import SessionKey, new_session_key
from kvasir_console.relay.wire.stage_report import MAX_SLICES, StageReport, Work, check_growth
from kvasir_console.relay.wire.statement import GENESIS
from kvasir_console.wallet.keys import verify

from engines import until

STAGE = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
WORKER = "9xQeWvG816bUx9EPjHmaT23yvVM2ZWbrrpZb9PusVFin"
KEY = new_session_key("https://gateway", STAGE, 0.0)
PLAN = Plan("r", "r", "cd" * 32, 3, 4, (PlannedStage(0, STAGE, 0, 3),))
OVER, FORGED = "report_over_counted", "report_forged"


def entry(rows: int, pairs: int, layer: int = 0, session: str = "expert-a", **fields: Any) -> dict[str, Any]:
    """A slice of an engine's ``coverage``: what is paid for, not what was acknowledged."""
    base = {"session": session, "wallet": WORKER, "layer": layer, "begin": 0, "end": 4, "connected": True}
    counts = {"requests": 3, "rows": rows + 7, "pairs": pairs + 7, "paid_rows": rows, "paid_pairs": pairs}
    caught = {"quarantined": False, "convictions": 0, "fault": "", "evidence_digest": "", "shard_digest": "ab" * 32}
    return {**base, **counts, **caught, **fields}


class Hub:
    """Takes reports as a hub does that was told what to answer: a code for each session, or acceptance."""

    def __init__(self) -> None:
        self.taken: list[StageReport] = []
        self.codes: dict[str, str] = {}
        self.lifted = False
        self.pardoned: list[tuple[str, str]] = []
        self.silent = False

    async def send(self, reports: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        if self.silent:
            raise NetworkError("gateway_unreachable", "nobody")
        answers = []
        for each in reports:
            report = StageReport.parse(each["text"])
            assert verify(report.key, each["text"].encode(), base64.b64decode(each["signature"]))
            self.taken.append(report)
            code = self.codes.get(report.session)
            answers.append({"accepted": False, "code": code} if code else {"accepted": True, "lifted": self.lifted})
        return answers

    async def pardon(self, session: str, wallet: str) -> bool:
        self.pardoned.append((session, wallet))
        return True

    async def round(self, book: StageBook, *coverage: Mapping[str, Any]) -> list[str]:
        """One look at the engine and one sending; the codes of what was refused."""
        if coverage:
            book.observe(book.run, coverage)
        return await book.send(PLAN, STAGE, KEY, self.send, self.pardon)


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def book() -> StageBook:
    made = StageBook(STAGE)
    made.begin()
    return made


async def test_what_is_paid_for_is_reported_once_it_changed(hub: Hub, book: StageBook) -> None:
    await hub.round(book, entry(10, 20), entry(1, 2, layer=2))
    (report,) = hub.taken
    assert (report.stage, report.key, report.ring, report.epoch) == (STAGE, KEY.address, "r", 4)
    assert (report.wallet, report.session, report.model_digest, report.run) == (WORKER, "expert-a", "cd" * 32, book.run)
    assert report.work == Work(11, 22)
    assert [(each.layer, each.rows, each.shard_digest) for each in report.slices] == [
        (0, 10, "ab" * 32),
        (2, 1, "ab" * 32),
    ]
    await hub.round(book, entry(10, 20), entry(1, 2, layer=2))
    assert len(hub.taken) == 1
    await hub.round(book, entry(12, 24), entry(1, 2, layer=2))
    check_growth(*hub.taken)
    assert hub.taken[1].work == Work(13, 26)


async def test_a_legacy_worker_announces_no_shard(hub: Hub, book: StageBook) -> None:
    await hub.round(book, entry(1, 2, shard_digest=""))
    assert hub.taken[0].slices[0].shard_digest == GENESIS


async def test_what_was_not_heard_or_refused_for_now_is_said_again(hub: Hub, book: StageBook) -> None:
    hub.silent = True
    with pytest.raises(NetworkError):
        await hub.round(book, entry(10, 20))
    hub.silent, hub.codes = False, {"expert-a": OVER}
    assert await hub.round(book, entry(10, 20)) == [OVER]
    hub.codes = {}
    assert await hub.round(book, entry(10, 20)) == []
    first, second = hub.taken
    assert first.sequence < second.sequence
    assert first.work == second.work


async def test_a_dead_engines_last_figures_are_still_reported_beside_its_successors(hub: Hub, book: StageBook) -> None:
    before = book.run
    await hub.round(book, entry(10, 20))
    hub.silent = True
    with pytest.raises(NetworkError):
        await hub.round(book, entry(15, 30))
    assert book.begin() != before
    hub.silent = False
    await hub.round(book, entry(2, 4))
    assert {(each.run, each.work) for each in hub.taken[1:]} == {(before, Work(15, 30)), (book.run, Work(2, 4))}
    await hub.round(book)
    assert len(hub.taken) == 3


async def test_figures_of_a_dead_engine_that_nobody_will_take_are_given_up(hub: Hub, book: StageBook) -> None:
    hub.codes = {"expert-a": OVER, "expert-b": FORGED}
    await hub.round(book, entry(10, 20), entry(10, 20, session="expert-b"))
    book.begin()
    for _ in range(TRIES + 3):
        await hub.round(book)
    told = [each.session for each in hub.taken]
    assert (told.count("expert-a"), told.count("expert-b")) == (TRIES, 2)
    # Of the run that lives nothing is ever given up: the next report may be taken.
    hub.taken.clear()
    book.observe(book.run, [entry(1, 2, session="expert-b")])
    for _ in range(TRIES + 3):
        await hub.round(book)
    assert len(hub.taken) == TRIES + 3


async def test_workers_that_are_refused_do_not_keep_others_waiting(hub: Hub, book: StageBook) -> None:
    names = [f"expert-{number:03}" for number in range(AT_ONCE + 10)]
    hub.codes = dict.fromkeys(names[:AT_ONCE], OVER)
    book.observe(book.run, [entry(1, 2, session=name) for name in names])
    for _ in range(4):
        await hub.round(book)
    assert {each.session for each in hub.taken} == set(names)


async def test_more_busy_workers_than_one_request_holds_are_all_reported(hub: Hub, book: StageBook) -> None:
    names = {f"expert-{number:03}" for number in range(2 * AT_ONCE + 10)}
    for rows in range(1, 4):
        await hub.round(book, *[entry(rows, rows, session=name) for name in sorted(names)])
    assert {each.session for each in hub.taken} == names


@pytest.mark.parametrize("code", [None, FORGED, OVER])
async def test_an_engine_that_is_loaded_anew_while_its_report_travels_ends_nothing(
    hub: Hub, book: StageBook, code: str | None
) -> None:
    caught = entry(9, 9, quarantined=True, convictions=1, fault="wrong")
    await hub.round(book, caught)

    async def slow(reports: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        book.begin()  # nothing of the old run is open, so it is forgotten
        hub.codes = {} if code is None else {"expert-a": code}
        return await hub.send(reports)

    for _ in range(ASK_EVERY):
        await book.send(PLAN, STAGE, KEY, slow, hub.pardon)
    assert len(hub.taken) == 2
    await hub.round(book, entry(1, 2))
    assert hub.taken[-1].run == book.run


async def test_a_fault_that_is_written_down_before_the_conviction_keeps_no_report_back(
    hub: Hub, book: StageBook
) -> None:
    await hub.round(book, entry(1, 2, fault="an expert's gain is off", evidence_digest="e1" * 32), entry(3, 4, layer=1))
    (report,) = hub.taken
    assert (report.fault, report.quarantined, report.work) == ("", False, Work(4, 6))


async def test_a_slice_that_the_engine_forgot_is_named_all_the_same(hub: Hub, book: StageBook) -> None:
    await hub.round(book, entry(1, 2), entry(0, 0, layer=1, requests=0))
    await hub.round(book, entry(5, 6))
    check_growth(*hub.taken)
    assert [(each.layer, each.rows, each.live) for each in hub.taken[1].slices] == [(0, 5, True), (1, 0, False)]


async def test_a_slice_that_was_named_once_is_named_again_and_too_many_are_left_out(hub: Hub, book: StageBook) -> None:
    many = [entry(1, 2, layer=layer) for layer in range(9, 9 + MAX_SLICES)]
    await hub.round(book, *many)
    await hub.round(book, entry(5, 5, layer=0), *[{**each, "paid_rows": 2} for each in many])
    check_growth(*hub.taken)
    assert [each.layer for each in hub.taken[1].slices] == list(range(9, 9 + MAX_SLICES))


async def test_a_quarantine_is_reported_until_it_is_lifted_and_then_the_engine_is_told(
    hub: Hub, book: StageBook
) -> None:
    caught = entry(9, 9, quarantined=True, convictions=1, fault="off by 5% \u2013 or so", evidence_digest="e1" * 32)
    await hub.round(book, caught, entry(0, 0, layer=1, quarantined=True, convictions=1))
    (report,) = hub.taken
    assert (report.quarantined, report.convictions, report.evidence) == (True, 1, "e1" * 32)
    assert report.fault == "off by 5% ? or so"
    for _ in range(ASK_EVERY):
        await hub.round(book)
    assert (len(hub.taken), hub.pardoned) == (2, [])
    hub.lifted = True
    for _ in range(ASK_EVERY):
        await hub.round(book)
    assert hub.pardoned == [("expert-a", WORKER)]


# The engine it is read off, the gateway it goes to


class Stage:
    """A node's stage: its engine and the gateway are this object, ``holding`` is what the node holds now."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.session_key: SessionKey | None = KEY
        self.holding: RingHolding | None = RingHolding(PLAN, STAGE, 64)
        self.info = GatewayInfo("", (), True, True, True, True, STAGE, None, stage_reports=True)
        self.rows: int | None = 0
        self.newer = 0
        self.pardon = hub.pardon
        self.reporter = StageReporter(self, self, STAGE, self._now, self._newer_plan)  # type: ignore[arg-type]

    def _now(self) -> tuple[RingHolding, GatewayInfo] | None:
        return None if self.holding is None else (self.holding, self.info)

    def _newer_plan(self) -> None:
        self.newer += 1

    async def with_token(self, call: Any) -> Any:
        return await call("token")

    async def report_stage(self, token: str, reports: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        return await self.hub.send(reports)

    async def coverage(self) -> list[dict[str, Any]]:
        if self.rows is None:
            raise EngineError("engine_gone", "It ended.")
        return [entry(self.rows, self.rows, quarantined=self.rows > 100, convictions=int(self.rows > 100))]

    def load(self, *, layers: bool = True) -> None:
        self.reporter.loaded(self, layers=layers)  # type: ignore[arg-type]

    async def look(self, rows: int | None) -> int:
        """The last reports of a node whose engine says so; how many were taken."""
        self.rows, before = rows, len(self.hub.taken)
        await self.reporter.finish()
        return len(self.hub.taken) - before


async def test_what_the_engine_did_is_reported_and_still_is_when_it_ended(hub: Hub) -> None:
    stage = Stage(hub)
    stage.load()
    assert await stage.look(5) == 1
    assert await stage.look(5) == 0
    hub.silent = True
    assert await stage.look(9) == 0
    hub.silent = False
    stage.reporter.lost()
    assert await stage.look(70) == 1
    assert [each.work.rows for each in hub.taken] == [5, 9]
    stage.load()
    assert await stage.look(2) == 1
    assert hub.taken[-1].run != hub.taken[0].run


async def test_an_engine_that_ends_while_it_is_asked_keeps_nothing_back(hub: Hub) -> None:
    stage = Stage(hub)
    stage.load()
    hub.silent = True
    await stage.look(5)
    hub.silent = False
    assert await stage.look(None) == 1


async def test_only_a_stage_reports_where_reports_are_taken_and_a_key_may_sign(hub: Hub) -> None:
    stage = Stage(hub)
    stage.load(layers=False)
    assert await stage.look(5) == 0
    stage.load()
    stage.session_key = None
    assert await stage.look(5) == 0
    stage.session_key, stage.info = KEY, replace(stage.info, stage_reports=False)
    assert await stage.look(5) == 0
    stage.info, held, stage.holding = replace(stage.info, stage_reports=True), stage.holding, None
    assert await stage.look(5) == 0
    stage.holding = held
    assert await stage.look(5) == 1


async def test_a_refusal_for_an_old_plan_is_told(hub: Hub) -> None:
    stage = Stage(hub)
    stage.load()
    hub.codes = {"expert-a": OVER}
    await stage.look(5)
    assert stage.newer == 0
    hub.codes = {"expert-a": "report_old_epoch"}
    await stage.look(5)
    assert stage.newer > 0


async def test_the_engine_is_told_of_a_pardon_unless_it_ended(hub: Hub) -> None:
    stage = Stage(hub)
    stage.load()
    hub.lifted = True
    await stage.look(101)
    assert hub.pardoned[0] == ("expert-a", WORKER)
    stage.reporter.lost()
    hub.pardoned.clear()
    for _ in range(2 * ASK_EVERY):
        await stage.look(101)
    assert hub.pardoned == []


async def test_it_goes_on_reporting_until_the_node_stops(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "REPORT_S", 0.0)
    stage = Stage(hub)
    stage.load()
    hub.silent, stage.rows = True, 5
    running = asyncio.create_task(stage.reporter.run())
    for _ in range(20):
        await asyncio.sleep(0)
    hub.silent = False
    await until(lambda: hub.taken)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
