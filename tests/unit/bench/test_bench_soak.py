"""What a soak makes of its samples."""

from __future__ import annotations

from kvasir_console.bench.faults import Kind, Part
from kvasir_console.bench.soak import Sample, growth, rtt_growth, soak_faults


def samples(name: str, pid: int, memory: list[float], descriptors: int = 10) -> list[Sample]:
    return [Sample(name, pid, value, descriptors + at) for at, value in enumerate(memory)]


def test_growth_is_the_last_quarter_beside_the_second() -> None:
    found = growth(samples("gateway console", 1, [50.0] * 4 + [100.0] * 4 + [120.0] * 4 + [150.0] * 4))
    assert found == {
        "gateway console": {"samples": 16, "rss_mib": [100.0, 150.0], "descriptors": [15.5, 23.5]},
    }


def test_a_process_that_was_replaced_is_judged_by_its_longest_life() -> None:
    found = growth(samples("e", 1, [1.0] * 9) + samples("e", 2, [2.0] * 12) + samples("f", 3, [1.0] * 7))
    assert found["e"]["samples"] == 12
    assert found["e"]["rss_mib"] == [2.0, 2.0]
    assert "f" not in found


def test_round_trips_need_enough_samples() -> None:
    assert rtt_growth([20.0] * 7) is None
    assert rtt_growth([1.0, 1.0, 20.0, 20.0, 5.0, 5.0, 30.0, 30.0]) == [20.0, 30.0]


def test_a_soak_kills_engines_only() -> None:
    faults = [fault for seed in range(20) for fault in soak_faults(seed, 16)]
    assert {fault.part for fault in faults if fault.kind is Kind.KILL} == {Part.ENGINE}
    assert {fault.part for fault in faults if fault.kind is Kind.STOP} == {Part.ENGINE, Part.CONSOLE}
