"""Answers of a ring: tokens or an error, whichever comes, and whenever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.answers import Answers
from kvasir_console.errors import EngineError

LOST = EngineError("lost", "no")


async def test_an_answer_is_complete_with_its_last_token():
    answers = Answers(100)
    one, other = answers.expect(1, 7, 20, 2), answers.expect(2, 8, 5, 1)
    answers.receive(1, 7, 20, 5)
    assert answers.waits(1) == (7, 21)
    assert not one.done()
    answers.receive(2, 8, 5, 7)
    answers.receive(1, 7, 21, 6)
    assert (await one, await other) == ([5, 6], [7])
    answers.receive(1, 7, 22, 8)  # for nobody
    assert answers.waits(1) is None
    assert await answers.expect(3, 9, 1, 0) == []


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(10, 14)), max_size=40), st.integers(1, 4))
async def test_whatever_comes_twice_late_or_in_disorder_an_answer_is_its_step_in_order(sent, count):
    """Tokens are 10 x step + position, so that each says where it belongs."""
    answers = Answers(1000)
    answer = answers.expect(1, 2, 11, count)
    for step, position in sent:
        answers.receive(1, step, position, 10 * step + position)
    while (waiting := answers.waits(1)) is not None:  # what a resumed edge sends again
        answers.receive(1, *waiting, 10 * waiting[0] + waiting[1])
    assert await answer == [31 + n for n in range(count)]


async def test_an_answer_that_later_ones_have_overtaken_is_known():
    now = 0.0
    answers = Answers(100, lambda: now)
    answers.expect(1, 1, 0, 1)
    for request_id in (2, 3):
        now += 60.0
        answers.expect(request_id, 1, 0, 2)
        assert answers.receive(request_id, 1, 0, 5)
        assert not answers.overtaken(100.0)
    assert answers.receive(3, 1, 1, 5)
    assert answers.overtaken(100.0) == [1]  # the second is not late enough
    assert not answers.overtaken(120.0)
    assert not answers.receive(3, 1, 1, 5)
    assert answers.waiting
    answers.fail_all(LOST)
    assert not answers.overtaken(0.0)
    assert not answers.waiting


async def test_an_error_reaches_who_waits_or_who_asks_next():
    answers = Answers(100)
    waiting = answers.expect(1, 1, 0, 1)
    answers.fail(1, LOST)
    answers.fail(2, LOST)
    for answer in (waiting, answers.expect(2, 2, 0, 1)):
        with pytest.raises(EngineError) as error:
            await answer
        assert error.value.code == "lost"
    again = answers.expect(2, 3, 0, 1)  # an error is told once
    answers.receive(2, 3, 0, 3)
    assert await again == [3]


async def test_what_is_no_token_is_an_error():
    answers = Answers(100)
    answer = answers.expect(1, 1, 0, 1)
    answers.receive(1, 1, 0, 100)
    with pytest.raises(EngineError) as error:
        await answer
    assert error.value.code == "bad_token"


async def test_a_broken_ring_ends_every_answer_and_forgetting_leaves_nothing():
    answers = Answers(100)
    waiting = [answers.expect(n, 1, 0, 1) for n in range(3)]
    answers.fail_all(LOST)
    for answer in waiting:
        with pytest.raises(EngineError):
            await answer
    left = answers.expect(9, 1, 0, 1)
    answers.forget(9)
    with pytest.raises(EngineError) as error:
        await left
    assert error.value.code == "released"
    fresh = answers.expect(9, 2, 0, 1)
    answers.receive(9, 2, 0, 1)
    assert await fresh == [1]
