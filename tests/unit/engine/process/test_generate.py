"""A request that is resumed with tokens that another process chose."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent
from kvasir_console.engine.process.generate import Generation
from kvasir_console.engine.process.pipeline import Choice, SequenceParams
from kvasir_console.engine.sampling import SamplingParams

END = 9


class Letters:
    """A tokenizer whose token n is the letter number n; the 9 ends an answer."""

    eos_ids = frozenset({END})

    def stream(self, **_: bool) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return ""


def resumed(*tokens: int, max_tokens: int = 8) -> Generation:
    request = GenerateRequest(prompt_tokens=(1,), max_tokens=max_tokens, resumed=tokens)
    params = SequenceParams(SamplingParams(), 16, (1,), resumed=tokens)
    scheduler: Any = None  # nothing is run
    tokenizer: Any = Letters()
    return Generation(request, params, tokenizer, scheduler)


async def told(generation: Generation, index: int | None = None) -> tuple[str, DoneEvent]:
    text = ""
    events = generation if index is None else generation.follow(index)
    async with asyncio.timeout(120):
        async for event in events:
            if isinstance(event, DoneEvent):
                return text, event
            assert isinstance(event, TokenEvent)
            text += event.text
    raise AssertionError("it never ended")


async def test_what_comes_after_the_resumed_tokens_is_told_and_all_of_it_to_whom_asks() -> None:
    generation = resumed(2, 3)
    assert not generation.complete
    assert not generation.push(Choice(4))
    assert generation.push(Choice(END))
    generation.finish(None)
    assert (await told(generation))[0] == "e"
    text, done = await told(generation, 0)
    assert (text, done.tokens, done.finish_reason) == ("cde", (2, 3, 4), "stop")


@pytest.mark.parametrize("tokens", [(2, END), (2, END, 3)])
async def test_an_answer_that_had_ended_is_over(tokens: tuple[int, ...]) -> None:
    generation = resumed(*tokens)
    assert generation.complete
    generation.finish(None)
    text, done = await told(generation)
    assert (text, done.tokens, done.finish_reason) == ("", (2,), "stop")


async def test_as_many_tokens_as_were_asked_for_are_all_of_it() -> None:
    generation = resumed(2, 3, max_tokens=2)
    assert generation.complete
    generation.finish(None)
    text, done = await told(generation, 0)
    assert (text, done.tokens, done.finish_reason) == ("cd", (2, 3), "length")
