"""The ring's benchmark measures a real network, and says what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_console.bench import ring


@pytest.mark.parametrize("direct", [False, True], ids=["through the hub", "past the hub"])
async def test_a_ring_is_measured_against_one_process(smollm2_path: Path, direct: bool) -> None:
    plan = ring.Plan(smollm2_path, rtt_ms=30.0, batch=2, streams=3, tokens=8, pairs=2, direct=direct)
    report = await ring.run(plan, lambda _: None)
    assert report["stages"] == [[0, 15], [15, 30]]
    assert len(report["samples_loopback"]["ring_tps"]) == plan.pairs
    assert report["loopback_ratio_ci"][0] <= report["loopback_ratio"] <= report["loopback_ratio_ci"][1]
    assert report["direct"] is direct
    text = ring.describe(report)
    if direct:
        assert set(report["bars"]) == {"loopback_ratio"}
        assert "past the hub" in text
        return
    assert set(report["bars"]) == {"loopback_ratio", "added_ms_per_token", "aggregate_ratio"}
    # Each token crosses both nodes' links both ways, 60 ms; a busy machine makes the other side slow, too.
    assert report["added_ms_per_token"] > plan.rtt_ms
    assert report["bars"]["added_ms_per_token"]["bar"] == 2 * plan.rtt_ms + ring.ADDED_BAR_MS
    assert 0 < report["aggregate_ratio"] < 1
    assert "3 streams, 30 ms over no delay" in text
