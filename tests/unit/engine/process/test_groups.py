"""How many groups: one where nothing is waited for or weights dominate, more where the network does."""

from __future__ import annotations

import pytest

from kvasir_console.engine.process.groups import MAX_GROUPS, Groups


def settled(fixed_s: float, row_s: float, wait_s: float, streams: int) -> int:
    """The choice after many steps of a machine whose step takes ``fixed_s`` and ``row_s`` a row."""
    groups = Groups()
    for _ in range(400):
        rows = -(-streams // groups.count)
        groups.record(fixed_s + row_s * rows, wait_s, streams)
    return groups.count


def best(fixed_s: float, row_s: float, wait_s: float, streams: int) -> float:
    """Seconds of the shortest cycle there is."""

    def cycle(count: int) -> float:
        step = fixed_s + row_s * streams / count
        return max(count * step, step + wait_s)

    return min(cycle(count) for count in range(1, MAX_GROUPS + 1))


@pytest.mark.parametrize(
    ("fixed_s", "row_s", "wait_s"),
    [(0.03, 0.001, 0.013), (0.002, 0.002, 0.013), (0.002, 0.002, 0.2), (0.03, 0.001, 0.3), (0.01, 0.001, 0.0)],
)
def test_the_choice_is_within_a_few_percent_of_the_best(fixed_s: float, row_s: float, wait_s: float) -> None:
    count = settled(fixed_s, row_s, wait_s, 32)
    step = fixed_s + row_s * 32 / count
    assert max(count * step, step + wait_s) <= 1.05 * best(fixed_s, row_s, wait_s, 32)


def test_without_a_wait_there_is_one_group() -> None:
    assert settled(0.01, 0.001, 0.0, 32) == 1


def test_one_stream_is_one_group_however_far_the_worker() -> None:
    assert settled(0.01, 0.001, 1.0, 1) == 1


def test_a_far_worker_that_comes_near_is_no_reason_for_groups_any_more() -> None:
    groups = Groups()
    for wait_s, expected in ((0.2, True), (0.0, False)):
        for _ in range(400):
            rows = -(-32 // groups.count)
            groups.record(0.01 + 0.001 * rows, wait_s, 32)
        assert (groups.count > 1) is expected


def test_a_number_can_be_asked_for() -> None:
    assert Groups(forced=3).count == 3
