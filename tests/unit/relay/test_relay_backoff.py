from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.relay.backoff import Backoff


class _Fixed(random.Random):
    """Randomness that always says the same."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def random(self) -> float:
        return self._value


def test_doubles_from_5_s_to_60_s_as_the_contract_says():
    backoff = Backoff(rng=_Fixed(0.0))
    assert [backoff.next_s() for _ in range(6)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_reset_starts_over():
    backoff = Backoff(rng=_Fixed(0.0))
    for _ in range(4):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 5.0


def test_two_nodes_that_lost_one_relay_do_not_come_back_together():
    first, second = Backoff(rng=random.Random(1)), Backoff(rng=random.Random(2))
    assert [first.next_s() for _ in range(8)] != [second.next_s() for _ in range(8)]


@given(
    minimum=st.floats(0.01, 100.0),
    factor=st.floats(1.0, 100.0),
    tries=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_every_delay_lies_within_a_quarter_below_its_step(minimum, factor, tries, seed):
    backoff = Backoff(minimum, minimum * factor, rng=random.Random(seed))
    for attempt in range(tries):
        step = min(minimum * 2**attempt, minimum * factor)
        assert 0.75 * step <= backoff.next_s() <= step * (1 + 1e-12)


@pytest.mark.parametrize(("minimum", "maximum"), [(0.0, 5.0), (-1.0, 5.0), (6.0, 5.0)])
def test_a_schedule_that_cannot_be_is_refused(minimum, maximum):
    with pytest.raises(ValueError, match="backoff"):
        Backoff(minimum, maximum)
