"""Prompt lookup: drafts are what followed before, and they are taken when time says so."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.process.speculate import NGRAM_SIZES, Chance, Lookup, StepCost, accepted, worthwhile

tokens = st.lists(st.integers(0, 3), max_size=60)


def naive_draft(known: list[int], count: int) -> list[int]:
    """The definition, without an index: search backwards for the ending, the longest size first."""
    for size in NGRAM_SIZES:
        ending = known[-size:]
        for begin in range(len(known) - size - 1, -1, -1):
            if len(ending) == size and known[begin : begin + size] == ending:
                guess = list(known)
                for _ in range(count):
                    guess.append(guess[len(guess) - (len(known) - begin - size)])
                return guess[len(known) :]
    return []


@settings(deadline=None)
@given(tokens, st.integers(1, 7))
def test_a_draft_is_what_followed_the_latest_earlier_occurrence(known, count):
    assert Lookup(known).draft(count) == naive_draft(known, count)


@settings(deadline=None)
@given(tokens, tokens)
def test_it_does_not_matter_in_which_pieces_the_tokens_came(first, second):
    piecewise = Lookup(first)
    piecewise.extend(second)
    assert piecewise.draft(5) == Lookup(first + second).draft(5)


def test_a_loop_is_continued_past_its_end():
    assert Lookup([1, 2, 3, 1, 2, 3, 1, 2, 3]).draft(7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_guessed_after_an_ending_that_is_new():
    assert Lookup([1, 2, 3, 4, 5]).draft(3) == []
    assert Lookup([]).draft(3) == []


def test_accepted_counts_up_to_the_first_difference():
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accepted([1, 9, 3], [1, 2]) == 1
    assert accepted([9], [1]) == 0
    assert accepted([], [5]) == 0


def test_the_chance_follows_what_happens():
    chance = Chance()
    for _ in range(60):
        chance.record(4, 0)
    assert chance.value < 0.01
    for _ in range(60):
        chance.record(4, 4)
    assert chance.value > 0.95


def test_what_was_given_up_is_tried_again_ever_more_rarely_until_it_is_right():
    chance = Chance()
    gaps, gap = [], 0
    while len(gaps) < 8:
        gap += 1
        if count := chance.probe(7):
            chance.record(count, 0)
            gaps.append(gap)
            gap = 0
    assert gaps == sorted(gaps)
    assert gaps[0] < 20
    assert gaps[-2:] == [256, 256]
    chance.record(2, 2)
    assert any(chance.probe(7) for _ in range(20))
    assert not any(chance.probe(0) for _ in range(300))


@settings(deadline=None)
@given(st.floats(0.001, 0.1), st.floats(0.0001, 0.05))
def test_the_cost_of_a_step_is_learnt(fixed, per_row):
    cost = StepCost()
    for turn in range(300):
        rows = 1 + turn % 8
        cost.record(rows, fixed + per_row * rows)
    for rows in (1, 4, 12):
        wanted = fixed + per_row * rows
        assert abs(cost.seconds(rows) - wanted) < 0.1 * wanted


def test_one_slow_step_does_not_change_the_picture():
    cost = StepCost()
    for turn in range(200):
        cost.record(1 + turn % 4, 0.01)
    cost.record(1, 10.0)
    assert cost.seconds(1) < 0.02


def fitted(fixed: float, per_row: float) -> StepCost:
    cost = StepCost()
    for turn in range(300):
        rows = 1 + turn % 8
        cost.record(rows, fixed + per_row * rows)
    return cost


def test_drafts_are_longer_where_rows_are_cheap_and_right():
    memory_bound, compute_bound = fitted(0.1, 0.0001), fitted(0.0001, 0.1)
    assert worthwhile(0.9, memory_bound, 1, 1.0, 7) == 7
    assert worthwhile(0.05, memory_bound, 1, 1.0, 7) <= 1
    assert worthwhile(0.9, compute_bound, 1, 1.0, 7) == 0
    assert worthwhile(0.9, memory_bound, 1, 1.0, 0) == 0
