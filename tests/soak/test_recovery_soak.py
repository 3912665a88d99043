"""Half an hour of faults: every request complete, every token the same, nothing creeps up. The report is printed."""

from __future__ import annotations

import os

import pytest

from kvasir_console.bench import recovery, soak

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))


@pytest.mark.timeout(7200)
async def test_a_ring_that_is_always_disturbed_stays_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    plan = recovery.Plan(seed=20)

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    report = await soak.run(plan, MINUTES, say)
    say(soak.describe(report))
    assert report["completed"] == report["identical"] == report["requests"]
    assert report["restarted_consoles"] == {}
    for name, grown in report["growth"].items():
        before, after = grown["rss_mib"]
        assert after <= 1.1 * before + 8, name
        before, after = grown["descriptors"]
        assert after <= before + 16, name
    before, after = report["rtt_ms"]
    assert after <= 1.25 * before + 2
