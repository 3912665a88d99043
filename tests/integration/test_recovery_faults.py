"""The network that faults are tried on, in small: real processes, TLS, a delay on every link, and real kills."""

from __future__ import annotations

import pytest

from kvasir_console.bench import recovery
from kvasir_console.bench.agreement import agreement
from kvasir_console.bench.faults import Fault, Kind, Part

FAULTS = (
    Fault(0, 0.05, Kind.KILL, "stage-1", Part.ENGINE),
    Fault(1, 0.12, Kind.CUT, "gateway", Part.LINK),
    Fault(2, 0.2, Kind.KILL, "worker-0", Part.ENGINE),
    Fault(3, 0.28, Kind.KILL, "stage-0", Part.ENGINE),
    Fault(4, 0.36, Kind.CUT, "stage-2", Part.LINK, after_bytes=777),
    Fault(5, 0.42, Kind.KILL, "stage-2", Part.CONSOLE),
)
"""Most of the tokens come after the last, so that it finds requests that run however late it strikes."""


@pytest.mark.network
@pytest.mark.timeout(900)
async def test_requests_outlive_kills_and_cuts_with_the_tokens_of_an_undisturbed_run() -> None:
    plan = recovery.Plan(requests=8, tokens=112, rtt_ms=30.0, seed=3)
    made = recovery.requests(plan)
    async with recovery.network(plan, print) as net:
        calm = await recovery.undisturbed(net, made, plan.tokens)
        assert len({run.tokens for run in calm.runs}) == 8
        async with recovery.RowCount(net) as rows:
            batch, events = await recovery.disturbed(net, made, plan.tokens, FAULTS, print)
        counts = await agreement(net)
        report = recovery.report(plan, calm, batch, events, rows)
    assert report["errors"] == []
    assert (report["requests"], report["completed"], report["identical"]) == (8, 8, 8)
    assert report["faults"] == report["faults_with_work_in_flight"] == len(FAULTS)
    assert all(event.recovery_ms is not None for event in events)
    # The hub was cut off, engines and a console were killed: both sides still count the same, and say so.
    assert counts["sessions_alike"] == counts["sessions"] >= counts["members"] == 7
    assert counts["disputed_bytes"] == 0
    assert min(counts["bytes_up"], counts["bytes_down"]) > 0
    assert (counts["acknowledged"], counts["refused"]) == (7, [])
    # Three ranks were lost one after the other. Had everybody begun anew each time, all ranks had computed all rows.
    assert 0 < report["recomputed_rows"] < report["rows_from_scratch"]
