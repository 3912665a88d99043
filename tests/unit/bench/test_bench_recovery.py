"""What is asked under faults, and what is made of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvasir_console.bench.faults import Fault, Kind, Part
from kvasir_console.bench.recovery import Batch, Event, Plan, Request, RowCount, Run, describe, report, requests

PLAN = Plan(requests=3, tokens=2)


class Rows(RowCount):
    def __init__(self) -> None:
        self._seen = {("stage-0", 1): (100, 0), ("stage-0", 2): (50, 30), ("stage-1", 3): (90, 5)}
        self._before = {("stage-0", 1): (40, 0), ("stage-1", 3): (40, 5)}


def batch(*tokens: tuple[int, ...], error: str = "") -> Batch:
    return Batch([Run(Request("p", {}), over=True, tokens=each, rows=10, error=error) for each in tokens])


def kill(recovery_ms: float | None, *, at_work: bool = True, error: str = "") -> Event:
    return Event(Fault(0, 0.5, Kind.KILL, "stage-0", Part.ENGINE), at_work, 3, recovery_ms, error)


def test_the_same_seed_asks_the_same_and_another_asks_otherwise() -> None:
    plan = Plan(seed=4)
    assert requests(plan) == requests(plan)
    assert len({each.prompt for each in requests(plan)}) == 64
    assert requests(replace(plan, seed=5)) != requests(plan)


def test_a_run_is_compared_with_its_undisturbed_one() -> None:
    calm = batch((1, 2), (3, 4), (5, 6))
    found = report(PLAN, calm, batch((1, 2), (3, 9), (5,)), [kill(900.0), kill(100.0)], Rows())
    assert (found["requests"], found["completed"], found["identical"]) == (3, 2, 1)
    assert (found["faults"], found["faults_with_work_in_flight"]) == (2, 2)
    assert (found["recovery_ms_p50"], found["recovery_ms_max"]) == (500.0, 900.0)
    assert (found["rows"], found["recomputed_rows"]) == (60 + 50 + 50, 30)
    assert "1 with the tokens of the undisturbed run" in describe(found)


def test_requests_that_failed_are_not_complete_and_equal_nothing_is_not_identical() -> None:
    nothing = batch((), (), ())
    found = report(PLAN, nothing, batch((), (), (), error="gone"), [], Rows())
    assert (found["completed"], found["identical"], found["errors"]) == (0, 0, ["gone"] * 3)


def test_a_kill_that_was_not_recovered_from_has_no_median() -> None:
    events = [kill(100.0), kill(None, error="not every request went on within 180 s")]
    found = report(PLAN, batch((1, 2)), batch((1, 2)), events, Rows())
    assert found["recovery_ms_p50"] is None
    assert (found["kills"], found["faults"], found["faults_with_work_in_flight"]) == (2, 1, 1)


def test_a_fault_is_due_when_enough_has_come_and_never_once_all_is_over() -> None:
    async def scenario() -> None:
        running = Batch([Run(Request("p", {}))])
        due = asyncio.create_task(running.until(lambda: running.pieces >= 2))
        for _ in range(2):
            await asyncio.sleep(0)
            assert not due.done()
            running.runs[0].pieces += 1
            running.moved.set()
        await due
        over = asyncio.create_task(running.until(lambda: False))
        await asyncio.sleep(0)
        running.runs[0].over = True
        running.moved.set()
        await over

    asyncio.run(scenario())
