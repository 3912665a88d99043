"""The relay benchmark with its four real processes, short: every payload is compared with its digest on the way."""

from __future__ import annotations

import pytest

from kvasir_console.bench import relay


async def test_a_short_run_reports_every_field_and_its_interval() -> None:
    report = await relay.run(pairs=1, rounds=5, blocks=1, rtt_ms=6.0)
    for field in ("added_ms_per_layer_p50", "up_mb_s", "down_mb_s"):
        low, high = report[f"{field}_ci"]
        assert low <= report[field] <= high
    # Twice the way through the delayed link is in every round trip, whatever the machine does; what it does may be in
    # those past the link, too.
    (direct,), (relayed,) = (report["samples_added"][f"{path}_ms"] for path in ("direct", "relay"))
    assert relayed >= 5.9
    assert report["added_ms_per_layer_p50"] == pytest.approx(relayed - direct)
    assert set(report["bars"]) == {"added_ms_per_layer_p50", "up_mb_s", "down_mb_s"}
    assert "node to gateway" in relay.describe(report)
