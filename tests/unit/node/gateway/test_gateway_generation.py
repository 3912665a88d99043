"""A generation is recorded once, before its end is shown; an engine that misbehaves is paid for nothing it made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_parts import Clock, ScriptedBackend
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent
from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway import generation as module
from kvasir_console.node.gateway.backends import BackendInfo, Event, Limits, TrunkBackend
from kvasir_console.node.gateway.generation import Generation, Generations, plausible_prompt_tokens, proven_rows
from kvasir_console.node.gateway.slots import Slots
from kvasir_console.node.gateway.store import Store

REQUEST = GenerateRequest(prompt="hello", max_tokens=3)


@pytest.fixture
def store(tmp_path: Path):
    opened = Store.open(f"sqlite:///{tmp_path / 'g.sqlite'}")
    yield opened
    opened.close()


@pytest.fixture
def generations(store: Store) -> Generations:
    return Generations(store, Clock())


def scripted(**fields: Any) -> ScriptedBackend:
    return ScriptedBackend(BackendInfo("m", "M"), **fields)


async def drain(generation: Generation) -> list[Event]:
    """Every event up to the end. Raises the error that ended it."""
    events = [await generation.next()]
    while not isinstance(events[-1], DoneEvent):
        events.append(await generation.next())
    return events


async def failure(generation: Generation) -> tuple[int, str]:
    """(tokens seen, code of the error) of a generation that ends badly."""
    seen = 0
    try:
        while isinstance(await generation.next(), TokenEvent):
            seen += 1
    except KvasirError as error:
        return seen, error.code
    raise AssertionError("it ended well")


async def test_the_end_is_shown_after_it_was_recorded(store: Store, generations: Generations) -> None:
    generation = generations.start(scripted(), Slots(), REQUEST, "r1", 5)
    *tokens, done = await drain(generation)
    row = store.request("r1")
    assert row is not None
    assert (row["finish"], row["prompt_tokens"], row["completion_tokens"]) == ("stop", 5, 3)
    assert len(tokens) == 3
    assert isinstance(done, DoneEvent)
    assert generation.first_token_ms is not None


async def test_cancelling_after_the_end_changes_nothing(store: Store, generations: Generations) -> None:
    generation = generations.start(scripted(), Slots(), REQUEST, "r1", 5)
    await drain(generation)
    generation.cancel()
    await generations.idle()
    row = store.request("r1")
    assert row is not None
    assert row["finish"] == "stop"


async def test_cancelled_in_the_middle_it_is_recorded_as_far_as_it_came(store: Store, generations: Generations) -> None:
    backend = scripted(hold_at=2)
    generation = generations.start(backend, Slots(), REQUEST, "r1", 5)
    await asyncio.wait_for(backend.holding.wait(), 120)
    generation.cancel()
    generation.cancel()
    assert await failure(generation) == (2, "cancelled")
    row = store.request("r1")
    assert row is not None
    assert (row["finish"], row["completion_tokens"]) == ("cancelled", 2)
    assert backend.cancelled.is_set()


async def test_cancelled_while_it_waits_it_never_began(store: Store, generations: Generations) -> None:
    slots = Slots(1)
    async with slots.hold():
        generation = generations.start(scripted(), slots, REQUEST, "r1", 5)
        await asyncio.sleep(0)
        generation.cancel()
        assert await failure(generation) == (0, "cancelled")
    assert store.request("r1") is None


async def test_closing_cancels_and_waits(store: Store, generations: Generations) -> None:
    backends = [scripted(hold_at=1) for _ in range(3)]
    made = [generations.start(backend, Slots(), REQUEST, f"r{n}", 5) for n, backend in enumerate(backends)]
    await asyncio.gather(*(asyncio.wait_for(backend.holding.wait(), 120) for backend in backends))
    await generations.close()
    assert generations.running == 0
    for number, generation in enumerate(made):
        assert await failure(generation) == (1, "cancelled")
        assert store.request(f"r{number}")["finish"] == "cancelled"


class Rogue(ScriptedBackend):
    """An engine on another's machine."""

    def __init__(self, *events: Any) -> None:
        super().__init__(BackendInfo("m", "M"))
        self.events = events

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event


def token(index: int, value: Any = 7, text: Any = "x") -> TokenEvent:
    return TokenEvent(index, value, text)


DONE = DoneEvent("stop", 5, 1, (7,), "x", "", 5, 0, 0, 0, 1.0, 1.0, None)


@pytest.mark.parametrize(
    ("events", "seen", "code"),
    [
        ([token(n) for n in range(99)], 3, "engine_misbehaved"),
        ([token(0), token(1, "7")], 1, "engine_misbehaved"),
        ([token(0), token(1, 7, None)], 1, "engine_misbehaved"),
        ([token(0)], 1, "engine_gone"),
        ([token(0), KeyError("index")], 1, "engine_failed"),
        ([], 0, "engine_gone"),
        ([token(0), token(1, 7, "x" * 20_000)], 1, "engine_misbehaved"),
        ([token(0), replace(DONE, tail="x" * 20_000)], 1, "engine_misbehaved"),
        ([token(0), replace(DONE, tail=5)], 1, "engine_misbehaved"),
        ([token(0), replace(DONE, rows="5")], 1, "engine_misbehaved"),
        ([token(0), replace(DONE, pairs_remote=-1)], 1, "engine_misbehaved"),
        ([token(0), replace(DONE, queued_ms=float("nan"))], 1, "engine_misbehaved"),
    ],
    ids=[
        *("more than asked", "no token id", "no text", "no end", "a message without its field", "nothing"),
        *("a book for a token", "a book for an end", "no tail", "no count", "less than nothing", "no time"),
    ],
)
async def test_an_engine_that_misbehaves_ends_its_answer(
    store: Store, generations: Generations, events: Any, seen: int, code: str
) -> None:
    assert await failure(generations.start(Rogue(*events), Slots(), REQUEST, "r1", 5)) == (seen, code)
    row = store.request("r1")
    assert row is not None
    assert (row["finish"], row["completion_tokens"]) == (code, seen)


async def test_what_the_engine_says_of_its_own_work_is_not_believed(store: Store, generations: Generations) -> None:
    boast = replace(DONE, prompt_tokens=10**9, completion_tokens=10**9, finish_reason="x" * 1000, tokens=(1, 2, 3))
    *_, done = await drain(generations.start(Rogue(token(0), boast), Slots(), REQUEST, "r1", 5))
    assert isinstance(done, DoneEvent)
    assert (done.prompt_tokens, done.completion_tokens, done.finish_reason, done.tokens) == (5, 1, "stop", (7,))
    row = store.request("r1")
    assert row is not None
    assert (row["prompt_tokens"], row["completion_tokens"], row["finish"]) == (5, 1, "stop")


async def test_a_silent_engine_is_given_up(
    store: Store, generations: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.05)
    backend = scripted(hold_at=1)
    assert await failure(generations.start(backend, Slots(), REQUEST, "r1", 5)) == (1, "engine_silent")
    assert backend.cancelled.is_set()


async def test_a_client_that_answers_nonsense_is_an_engine_error() -> None:
    class Nonsense:
        closed = False

        async def info(self) -> dict[str, Any]:
            return {"context_length": "many"}

        async def count_tokens(self, **_: Any) -> int:
            return int({}["tokens"])

    backend = TrunkBackend(BackendInfo("m", "M"))
    with pytest.raises(KvasirError) as caught:
        await backend.limits()
    assert caught.value.code == "model_not_ready"
    backend.attach(Nonsense())
    for call in (backend.limits(), backend.count_tokens("x", None)):
        with pytest.raises(KvasirError) as caught:
            await call
        assert caught.value.code == "engine_misbehaved"


async def test_no_engine_has_more_context_than_its_checkpoint() -> None:
    class Client:
        closed = False

        def __init__(self, **more: int) -> None:
            self.more = more

        async def info(self) -> dict[str, Any]:
            return {"context_length": 10**9, **self.more}

    # An older engine does not say what it has memory for.
    for client, kv_tokens in ((Client(), 512), (Client(kv_tokens=256), 256)):
        backend = TrunkBackend(BackendInfo("m", "M", None, 512))
        backend.attach(client)
        assert await backend.limits() == Limits(512, kv_tokens)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.booleans())
def test_proven_rows(prompt: int, tokens: int, done: bool) -> None:
    """n tokens were sampled from the last prompt row and the n - 1 rows after it."""
    expected = prompt + tokens - 1 if tokens else (prompt if done else 0)
    assert proven_rows(prompt, tokens, done) == expected >= 0


@given(st.lists(st.text(max_size=40), max_size=5))
def test_every_prompt_is_plausible_by_its_bytes(texts: list[str]) -> None:
    """A byte-level tokenizer makes at most one token of a byte."""
    messages = tuple({"role": "user", "content": text} for text in texts)
    count = sum(len(text.encode()) for text in texts)
    assert plausible_prompt_tokens(GenerateRequest(messages=messages)) >= count
    assert plausible_prompt_tokens(GenerateRequest(messages=messages)) <= count + 64 * len(texts) + 1024
    assert plausible_prompt_tokens(GenerateRequest(prompt="".join(texts))) >= count
    assert plausible_prompt_tokens(GenerateRequest(prompt_tokens=(1, 2, 3))) == 3
