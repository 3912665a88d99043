"""The ring's benchmark measures a real network, and says what it measured."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from kvasir_console.bench import ring


@pytest.mark.timeout(900)
@pytest.mark.parametrize("direct", [False, True], ids=["through the hub", "past the hub"])
async def test_a_ring_is_measured_against_one_process(smollm2_path: Path, direct: bool) -> None:
    plan = ring.Plan(smollm2_path, rtt_ms=60.0, batch=2, streams=3, tokens=8, pairs=2, direct=direct)
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
    # Each token crosses both nodes' links both ways, 120 ms, whatever the machine does. A busy one makes the near side
    # slow, too, but hardly each time.
    far_ms, near_ms = (report["samples_added"][f"{side}_ms"] for side in ("far", "near"))
    assert min(far_ms) > plan.rtt_ms
    assert min(near_ms) < max(far_ms)
    assert report["added_ms_per_token"] == pytest.approx(median(a - b for a, b in zip(far_ms, near_ms, strict=True)))
    assert report["bars"]["added_ms_per_token"]["bar"] == 2 * plan.rtt_ms + ring.ADDED_BAR_MS
    far_tps, near_tps = (report["samples_aggregate"][f"{side}_tps"] for side in ("far", "near"))
    assert 0 < max(far_tps) < plan.streams * plan.tokens / ((plan.tokens - 1) * plan.rtt_ms / 1e3)
    assert min(far_tps) < max(near_tps)
    assert report["aggregate_ratio"] == pytest.approx(median(a / b for a, b in zip(far_tps, near_tps, strict=True)))
    assert "3 streams, 60 ms over no delay" in text
