"""Answers of a ring: tokens or an error, whichever comes, and whenever."""

from __future__ import annotations

import pytest

from kvasir_console.engine.process.answers import Answers
from kvasir_console.errors import EngineError

LOST = EngineError("lost", "no")


async def test_an_answer_is_complete_with_its_last_token():
    answers = Answers(100)
    one, other = answers.expect(1, 2), answers.expect(2, 1)
    answers.receive(1, 5)
    assert not one.done()
    answers.receive(2, 7)
    answers.receive(1, 6)
    assert (await one, await other) == ([5, 6], [7])
    answers.receive(1, 8)  # for nobody
    assert await answers.expect(3, 0) == []


async def test_an_error_reaches_who_waits_or_who_asks_next():
    answers = Answers(100)
    waiting = answers.expect(1, 1)
    answers.fail(1, LOST)
    answers.fail(2, LOST)
    for answer in (waiting, answers.expect(2, 1)):
        with pytest.raises(EngineError) as error:
            await answer
        assert error.value.code == "lost"
    again = answers.expect(2, 1)  # an error is told once
    answers.receive(2, 3)
    assert await again == [3]


async def test_what_is_no_token_is_an_error():
    answers = Answers(100)
    answer = answers.expect(1, 1)
    answers.receive(1, 100)
    with pytest.raises(EngineError) as error:
        await answer
    assert error.value.code == "bad_token"


async def test_losing_an_edge_ends_every_answer_and_forgetting_leaves_nothing():
    answers = Answers(100)
    waiting = [answers.expect(n, 1) for n in range(3)]
    answers.fail_all(LOST)
    for answer in waiting:
        with pytest.raises(EngineError):
            await answer
    left = answers.expect(9, 1)
    answers.forget(9)
    with pytest.raises(EngineError) as error:
        await left
    assert error.value.code == "released"
    fresh = answers.expect(9, 1)
    answers.receive(9, 1)
    assert await fresh == [1]
