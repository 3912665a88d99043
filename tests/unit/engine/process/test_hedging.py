"""When an answer is late, and how many second requests there may be."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.hedging import FIRST_MS, MIN_SAMPLES, SLACK_MS, HedgeBudget, Pace


def measured(samples: int, delay_ms: float, pair_ms: float, seed: int = 1) -> Pace:
    rng, pace = random.Random(seed), Pace()
    for _ in range(samples):
        pairs = rng.choice([2, 4, 16, 64, 512])
        pace.record(pairs, delay_ms + pair_ms * pairs)
    return pace


def test_delay_and_time_a_pair_are_told_apart() -> None:
    pace = measured(60, 13.0, 0.05)
    assert pace.delay_ms == pytest.approx(13.0, rel=0.02)
    assert pace.pair_ms == pytest.approx(0.05, rel=0.02)
    assert pace.expected_ms(1000) == pytest.approx(63.0, rel=0.02)


def test_nobody_is_late_by_his_usual_time_whatever_he_was_asked() -> None:
    pace = measured(60, 13.0, 0.05)
    for pairs in (2, 512, 4096):
        usual = 13.0 + 0.05 * pairs
        assert usual + 0.5 * SLACK_MS < pace.late_ms(pairs) < 1.2 * usual + 2 * SLACK_MS


def test_the_mark_is_the_session_own_ninety_fifth_percentile() -> None:
    pace, rng = Pace(), random.Random(3)
    for _ in range(400):
        pace.record(2, 40.0 if rng.random() < 0.2 else 10.0)
    assert pace.late_ms(2) > 24.0  # one answer in five is slow: that is how this session is
    for _ in range(400):
        pace.record(2, 40.0 if rng.random() < 0.01 else 10.0)
    assert pace.late_ms(2) < 24.0


def test_too_little_is_known_at_first() -> None:
    assert measured(MIN_SAMPLES - 1, 13.0, 0.0).late_ms(2) == FIRST_MS
    assert measured(MIN_SAMPLES, 13.0, 0.0).late_ms(2) < 30.0


def test_one_answer_out_of_a_stall_does_not_move_the_mark_far() -> None:
    pace = measured(60, 13.0, 0.0)
    pace.record(2, 30_000.0)
    assert pace.expected_ms(2) < 25.0
    for _ in range(40):
        pace.record(2, 13.0)
    assert pace.late_ms(2) < 20.0


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1e5)), max_size=80), st.integers(1, 5000))
def test_expectations_are_never_negative_and_lateness_comes_after_them(answers, pairs) -> None:  # type: ignore[no-untyped-def]
    pace = Pace()
    for each in answers:
        pace.record(*each)
    assert pace.expected_ms(pairs) >= 0
    assert pace.late_ms(pairs) >= min(FIRST_MS, pace.expected_ms(pairs))


@given(st.lists(st.booleans(), max_size=300))
def test_second_requests_are_a_bounded_share(wants: list[bool]) -> None:
    budget, hedged = HedgeBudget(share=0.1, burst=4), 0
    for asked, want in enumerate(wants, 1):
        budget.asked()
        hedged += want and budget.take()
        assert hedged <= 2 + 0.1 * asked + 1e-9
