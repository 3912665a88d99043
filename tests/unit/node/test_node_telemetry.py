"""Rates out of counters, through restarts of the engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.node.telemetry import HISTORY, Counters, Telemetry


def rows(count: int) -> Counters:
    return Counters(requests=count, rows=count, pairs=2 * count, tokens=count)


def test_nothing_is_known_before_the_second_sample():
    telemetry = Telemetry()
    assert telemetry.view().history == ()
    telemetry.sample(rows(500), 1.0)
    view = telemetry.view()
    assert (view.rows, view.pairs, view.rows_per_s, view.history) == (500, 1000, 0.0, ())


def test_a_rate_is_work_over_the_time_it_took():
    telemetry = Telemetry()
    telemetry.sample(rows(0), 1.0)
    telemetry.sample(Counters(rows=30, tokens=5), 2.0)
    view = telemetry.view()
    assert (view.rows_per_s, view.tokens_per_s, view.history) == (15.0, 2.5, (15.0,))


def test_a_restarted_engine_neither_loses_work_nor_shows_a_negative_rate():
    telemetry = Telemetry()
    telemetry.sample(rows(0), 1.0)
    telemetry.sample(rows(100), 1.0)
    telemetry.sample(rows(4), 1.0)
    view = telemetry.view()
    assert (view.rows, view.pairs, view.requests) == (104, 208, 104)
    assert view.history == (100.0, 4.0)


@pytest.mark.parametrize("field", ["requests", "rows", "pairs", "tokens"])
def test_any_counter_that_falls_is_a_restart(field):
    telemetry = Telemetry()
    telemetry.sample(Counters(**{field: 10}), 1.0)
    telemetry.sample(Counters(**{field: 3}), 1.0)
    assert getattr(telemetry.view(), field) == 13


def test_the_rate_covers_the_last_ten_seconds_only():
    telemetry = Telemetry()
    for total in (0, 1000, *([1010 + 10 * second for second in range(10)])):
        telemetry.sample(rows(total), 1.0)
    assert telemetry.view().rows_per_s == 10.0
    assert telemetry.view().history[0] == 1000.0


def test_the_history_is_bounded():
    telemetry = Telemetry()
    for total in range(HISTORY + 100):
        telemetry.sample(rows(total), 1.0)
    assert len(telemetry.view().history) == HISTORY


def test_no_time_gives_no_rate():
    telemetry = Telemetry()
    telemetry.sample(rows(1), 1.0)
    telemetry.sample(rows(9), 0.0)
    assert telemetry.view().history == ()
    assert telemetry.view().rows == 9


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=6), min_size=1, max_size=5))
def test_the_total_is_the_sum_over_all_lives_of_the_engine(lives):
    """Each life counts up from 0; a restart is seen when the first reading is below the last one."""
    telemetry, expected = Telemetry(), 0
    for steps in lives:
        telemetry.sample(Counters(), 1.0)
        total = 0
        for step in steps:
            total += step
            telemetry.sample(Counters(rows=total), 1.0)
        expected += total
    assert telemetry.view().rows == expected
    assert all(rate >= 0 for rate in telemetry.view().history)


def test_the_history_of_layers_is_in_tokens_and_of_experts_in_rows() -> None:
    telemetry = Telemetry()
    telemetry.sample(Counters(), 1.0)
    telemetry.sample(Counters(rows=40, tokens=8), 2.0)
    assert telemetry.view().history == (20.0,)
    assert telemetry.view(layers=True).history == (4.0,)
