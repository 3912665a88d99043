"""What a gateway remembers of a request, however often its engine is another one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent
from kvasir_console.errors import EngineError
from kvasir_console.node.gateway.memory import Memory

ANSWER = [7, 3, 3, 9, 1, 4, 4, 8]
REQUEST = GenerateRequest(messages=({"role": "user", "content": "hello"},), max_tokens=8, seed=5, temperature=0.5)


def token(index: int) -> TokenEvent:
    return TokenEvent(index, ANSWER[index], f"<{ANSWER[index]}>")


def done(tokens: list[int]) -> DoneEvent:
    return DoneEvent("length", 3, len(tokens), tuple(tokens), "", "", 10, 0, 0, 0, 1.0, 1.0, None)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=12))
def test_whatever_engines_repeat_the_caller_sees_each_token_once(lives: list[tuple[int, int]]) -> None:
    """Each life begins where it was told to, or up to some tokens earlier, and ends after so many more."""
    memory, seen = Memory(REQUEST, 99), []
    for more, earlier in [*lives, (8, 0)]:
        asked = memory.request
        assert asked.key == 99
        assert asked.seed == 5
        assert list(asked.resumed) == seen
        if memory.begun:
            assert asked.prompt_tokens == (11, 12, 13)
            assert asked.messages is None
        else:
            assert asked.messages == REQUEST.messages
        memory.prompt([11, 12, 13])
        begin = max(0, len(asked.resumed) - earlier)
        for index in range(begin, min(len(ANSWER), len(asked.resumed) + more)):
            if (shown := memory.take(token(index))) is not None:
                seen.append(shown.token)
    assert seen == ANSWER
    assert memory.take(done(ANSWER)) == done(ANSWER)


def test_the_first_word_for_a_prompt_stays() -> None:
    memory = Memory(REQUEST, 1)
    memory.prompt([1, 2])
    memory.prompt([1, 2, 3])
    assert memory.request.prompt_tokens == (1, 2)


def test_tokens_that_are_left_out_are_not_made_up() -> None:
    memory = Memory(REQUEST, 1)
    memory.take(token(0))
    for event in (token(2), done([])):
        with pytest.raises(EngineError) as caught:
            memory.take(event)
        assert caught.value.code == "engine_misbehaved"
