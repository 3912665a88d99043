"""A fault schedule: what every one of them holds, whatever the seed."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.bench.faults import MIN_FAULTS, Kind, Part, schedule

seeds = st.integers(0, 2**63)
counts = st.integers(MIN_FAULTS, 60)


@given(seeds, counts)
def test_the_same_seed_gives_the_same_faults(seed: int, count: int) -> None:
    assert schedule(seed, count) == schedule(seed, count)


def test_another_seed_gives_others() -> None:
    assert len({schedule(seed) for seed in range(50)}) == 50


@given(seeds, counts, st.integers(3, 8), st.integers(1, 6))
def test_every_place_and_every_kind_is_struck(seed: int, count: int, stages: int, workers: int) -> None:
    faults = schedule(seed, count, stages=stages, workers=workers)
    assert [fault.number for fault in faults] == list(range(count))
    kinds = defaultdict(set)
    for fault in faults:
        name, _, number = fault.target.partition("-")
        if name == "stage":
            name = {0: "first", stages - 1: "last"}.get(int(number), "middle")
        kinds[name].add(fault.kind)
    assert set(kinds) == {"first", "middle", "last", "worker", "gateway"}
    assert {kind for found in kinds.values() for kind in found} == set(Kind)
    if count >= 15:
        assert all(found == set(Kind) for found in kinds.values())


@given(seeds, counts)
def test_faults_come_in_order_while_there_is_work(seed: int, count: int) -> None:
    shares = [fault.share for fault in schedule(seed, count)]
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] < 1 - 0.25 / (count + 1)


@given(seeds)
def test_a_worker_is_not_struck_twice_before_all_others_were(seed: int) -> None:
    struck = [fault.target for fault in schedule(seed, 60) if fault.target.startswith("worker")]
    for at in range(0, len(struck) - 3, 4):
        assert len(set(struck[at : at + 4])) == 4


@given(seeds)
def test_cuts_are_cuts_of_links_and_signals_go_to_processes(seed: int) -> None:
    for fault in schedule(seed, 40):
        assert (fault.kind is Kind.CUT) == (fault.part is Part.LINK)
        if fault.target == "gateway" and fault.kind is not Kind.CUT:
            assert fault.part is Part.CONSOLE


@pytest.mark.parametrize("arguments", [{"count": 11}, {"stages": 2}, {"workers": 0}])
def test_too_little_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        schedule(1, **arguments)
