"""Who is asked for which experts: deterministic, by measured time and load, one star as short as can be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.coverage import Heat, Holder, assign, describe, replica, replicas


def counts(*each: int) -> np.ndarray:
    return np.array(each, dtype=np.int64)


def test_the_faster_replica_is_asked() -> None:
    near, far = Holder("a-far", "w1", 0, 4, delay_ms=80), Holder("b-near", "w2", 0, 4, delay_ms=12)
    assert assign(counts(1, 0, 1, 0), [far, near]) == {"b-near": [0, 2]}


def test_load_moves_work_to_the_slower_replica() -> None:
    near = Holder("near", "w1", 0, 4, delay_ms=12, pair_ms=0.1, in_flight=1000)
    far = Holder("far", "w2", 0, 4, delay_ms=80, pair_ms=0.1)
    assert assign(counts(1, 1, 1, 1), [near, far]) == {"far": [0, 1, 2, 3]}


def test_much_work_is_shared_and_little_goes_out_in_one_frame() -> None:
    one, two = (Holder(name, name, 0, 4, delay_ms=10, pair_ms=0.1) for name in "ab")
    split = assign(counts(100, 100, 100, 100), [one, two])
    assert sorted(len(each) for each in split.values()) == [2, 2]
    # Where one star's ray is long anyway, the other's work hides behind it, in a single frame.
    slow = Holder("slow", "w", 4, 5, delay_ms=50, pair_ms=0.1)
    assert assign(counts(1, 1, 1, 1, 9), [one, two, slow]) == {"slow": [4], "a": [0, 1, 2, 3]}


def test_an_expert_nobody_holds_is_left_out() -> None:
    assert assign(counts(3, 3, 3), [Holder("a", "w", 1, 2)]) == {"a": [1]}
    assert assign(counts(3, 3, 3), []) == {}


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6), st.floats(0, 99), st.floats(0, 2)), max_size=6),
    st.randoms(),
)
def test_every_wanted_expert_with_a_holder_goes_to_one_that_holds_it(wanted, held, rng) -> None:  # type: ignore[no-untyped-def]
    holders = [
        Holder(f"h{number}", "w", begin, begin + width, delay, pair)
        for number, (begin, width, delay, pair) in enumerate(held)
    ]
    given_out = assign(counts(*wanted), holders)
    by_name = {holder.name: holder for holder in holders}
    experts = [expert for each in given_out.values() for expert in each]
    assert len(experts) == len(set(experts))
    assert all(by_name[name].holds(each) for name, each in given_out.items())
    known = replicas(32, holders)
    assert sorted(experts) == [expert for expert, count in enumerate(wanted) if count and known[expert]]
    rng.shuffle(holders)
    assert assign(counts(*wanted), holders) == given_out


def test_a_replica_holds_all_that_is_asked_and_was_not_asked_before() -> None:
    holders = [Holder("a", "w", 0, 4, 1), Holder("b", "w", 0, 2, 2), Holder("c", "w", 0, 4, 3)]
    assert replica([1, 3], holders, {"a"}) == "c"
    assert replica([1], holders, {"a"}) == "b"
    assert replica([1, 3], holders, {"a", "c"}) is None


def test_the_hottest_experts_stay_local_until_others_are_clearly_hotter() -> None:
    heat = Heat(keep=0.9)
    assert heat.hottest(0, 2) == frozenset()
    for _ in range(50):
        heat.record(0, counts(5, 1, 4, 0))
    assert heat.hottest(0, 2) == {0, 2}
    for _ in range(50):
        heat.record(0, counts(5, 4, 4, 0))
    assert heat.hottest(0, 2) == {0, 2}
    for _ in range(50):
        heat.record(0, counts(5, 9, 4, 0))
    assert heat.hottest(0, 2) == {0, 1}
    assert heat.hottest(1, 2) == frozenset()


def test_the_coverage_map_tells_what_has_no_replica() -> None:
    held = {0: [Holder("a", "w", 0, 2), Holder("b", "w", 1, 4)]}
    assert describe({0: 4, 1: 4}, held) == [
        {"layer": 0, "held": 4, "of": 4, "fewest": 1},
        {"layer": 1, "held": 0, "of": 4, "fewest": 0},
    ]
