"""How many groups keep a ring busy, and the numbers of steps."""

from __future__ import annotations

import itertools

import pytest

from kvasir_console.engine.process.ring_pipeline import MAX_GROUPS, Walk, _numbers


def walk_of(size: int, network_s: float, slowest_s: float, waited_s: float = 0.0) -> Walk:
    walk = Walk(size)
    for _ in range(50):
        inside_s = size * slowest_s + waited_s
        walk.record(network_s + inside_s, inside_s, slowest_s)
    return walk


@pytest.mark.parametrize(
    ("size", "network_ms", "slowest_ms", "groups"),
    [
        (3, 0.0, 5.0, 3),  # no network: one group for each rank
        (2, 40.0, 10.0, 6),  # a walk of 60 ms: six groups of 10 ms
        (3, 60.0, 20.0, 6),
        (3, 60.0, 0.1, MAX_GROUPS),
    ],
)
def test_the_slowest_rank_never_waits(size: int, network_ms: float, slowest_ms: float, groups: int) -> None:
    walk = walk_of(size, network_ms / 1e3, slowest_ms / 1e3)
    assert walk.groups == groups
    if groups < MAX_GROUPS:
        assert groups * slowest_ms >= network_ms + size * slowest_ms


def test_groups_that_wait_for_each_other_are_not_taken_for_a_slow_network() -> None:
    assert walk_of(3, 0.060, 0.020, waited_s=0.5).groups == walk_of(3, 0.060, 0.020).groups


def test_before_anything_is_measured_every_rank_has_a_group() -> None:
    assert Walk(4).groups == 4


def test_numbers_of_steps_go_round_without_0() -> None:
    assert list(itertools.islice(_numbers(2**32 - 2), 4)) == [2**32 - 2, 2**32 - 1, 1, 2]
