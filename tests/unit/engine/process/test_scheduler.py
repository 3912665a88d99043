"""The scheduler over a pipeline that only counts: who is admitted, who waits, what a step holds, what is freed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvasir_console.engine.process.pipeline import PREFILL_CHUNK, Choice, Feed, More, Outcome, SequenceParams
from kvasir_console.engine.process.scheduler import Progress, Scheduler
from kvasir_console.engine.process.speculate import accepted
from kvasir_console.engine.process.tally import Tally
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.errors import EngineError, KvasirError, RequestError

from engines import until


def next_token(history: Sequence[int]) -> int:
    """What the model of these tests says: the sequence repeats itself with a period of five, counting up."""
    return history[-5] + 1 if len(history) % 7 == 0 else history[-5]


def answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class CountedSequence:
    params: SequenceParams
    rows: list[int] = field(default_factory=list)
    reused: int = 0
    tally: Tally = field(default_factory=Tally)


class CountedPipeline:
    """Keeps rows instead of keys and values, and checks that each comes in its place."""

    def __init__(self, *, depth: int = 1, memory: int = 10**9, drafts: int = 0) -> None:
        self.depth = depth
        self.interruptible = False
        self.memory, self.used, self.most_used = memory, 0, 0
        self.drafts = drafts
        self.steps: list[list[tuple[CountedSequence, int, int]]] = []
        self.under_way = 0
        self.most_under_way = 0
        self.fail: dict[int, KvasirError] = {}
        self.refuse_open: list[KvasirError] = []
        self.gate: asyncio.Event | None = None

    def check(self, params: SequenceParams) -> None:
        if params.capacity > self.memory:
            raise RequestError("kv_budget_exceeded", "never")

    def fits(self, params: SequenceParams) -> bool:
        return self.used + params.capacity <= self.memory

    def draft_limit(self, params: SequenceParams) -> int:
        return self.drafts

    def network_bound(self, params: SequenceParams) -> bool:
        return params.experts == "network"

    async def open(self, params: SequenceParams) -> CountedSequence:
        if self.refuse_open:
            raise self.refuse_open.pop(0)
        self.used += params.capacity
        self.most_used = max(self.used, self.most_used)
        assert self.used <= self.memory
        return CountedSequence(params)

    async def run(self, feeds: list[Feed], more: More) -> None:
        while feeds:
            feeds = more(await self.step(feeds))

    async def step(self, feeds: Sequence[Feed]) -> list[Outcome]:
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)
        self.steps.append([(feed.sequence, len(feed.tokens), feed.choices) for feed in feeds])
        await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        self.under_way -= 1
        return [self._outcome(feed) for feed in feeds]

    def _outcome(self, feed: Feed) -> Outcome:
        sequence: CountedSequence = feed.sequence
        assert len(sequence.rows) == feed.position
        sequence.rows += feed.tokens
        assert len(sequence.rows) <= sequence.params.capacity
        if (error := self.fail.get(sequence.params.prompt_tokens[0])) is not None:
            return error
        if not feed.choices:
            return []
        known = sequence.rows[: len(sequence.rows) - feed.choices + 1]
        chosen = []
        for _ in range(feed.choices):
            chosen.append(next_token([*known, *chosen]))
        right = accepted(feed.tokens[1:], chosen) if feed.choices > 1 else 0
        del sequence.rows[feed.position + len(feed.tokens) - (feed.choices - 1 - right) :]
        return [Choice(token) for token in chosen[: right + 1]]

    async def close(self, sequence: CountedSequence) -> str | None:
        self.used -= sequence.params.capacity
        return None

    def stats(self) -> dict[str, Any]:
        return {}


class Asked:
    """A request that remembers what it got."""

    def __init__(self, prompt: Sequence[int], count: int, *, speculation: str = "off", experts: str = "local") -> None:
        self.params = SequenceParams(SamplingParams(), len(prompt) + count, tuple(prompt), experts=experts)
        self.max_tokens = count
        self.speculation = speculation
        self.progress = Progress()
        self.tokens: list[int] = []
        self.was_admitted = False
        self.error: KvasirError | None = None
        self.shown = 0
        self.over = asyncio.Event()
        self._reached: dict[int, asyncio.Event] = {}

    async def reaches(self, count: int) -> None:
        """Wait for the token of this number."""
        await self._reached.setdefault(count, asyncio.Event()).wait()

    def admitted(self) -> None:
        self.was_admitted = True

    def push(self, choice: Choice) -> bool:
        assert not self.over.is_set()
        self.tokens.append(choice.token)
        if reached := self._reached.get(len(self.tokens)):
            reached.set()
        return len(self.tokens) == self.max_tokens

    def flush(self) -> None:
        assert not self.over.is_set()
        self.shown = len(self.tokens)

    def finish(self, error: KvasirError | None) -> None:
        assert not self.over.is_set()
        self.error = error
        self.over.set()

    @property
    def wanted(self) -> list[int]:
        return answer(self.params.prompt_tokens, self.max_tokens)


def steady(pipeline: CountedPipeline, **options: float) -> Scheduler:
    """Each of its steps takes a second, however busy this machine is."""
    return Scheduler(pipeline, clock=lambda: float(len(pipeline.steps)), **options)


async def run(scheduler: Scheduler, *requests: Asked) -> None:
    for request in requests:
        scheduler.submit(request)
    async with asyncio.timeout(120):
        await asyncio.gather(*(request.over.wait() for request in requests))


def prompt(seed: int, length: int = 8) -> list[int]:
    return [seed * 100 + place % 5 for place in range(length)]


async def test_everyone_gets_what_it_gets_alone_and_everything_is_freed():
    pipeline = CountedPipeline()
    scheduler = steady(pipeline)
    requests = [Asked(prompt(seed, 5 + 97 * seed), 10 + seed) for seed in range(1, 9)]
    await run(scheduler, *requests)
    assert [each.tokens for each in requests] == [each.wanted for each in requests]
    assert pipeline.used == 0
    assert not any(each.error for each in requests)


async def test_those_who_decode_share_a_step():
    pipeline = CountedPipeline()
    await run(steady(pipeline), *(Asked(prompt(seed), 20) for seed in range(1, 7)))
    assert max(len(step) for step in pipeline.steps) == 6
    assert len(pipeline.steps) < 30


async def test_prompts_are_cut_at_multiples_of_the_chunk():
    pipeline = CountedPipeline()
    request = Asked(prompt(1, 2 * PREFILL_CHUNK + 40), 3)
    await run(steady(pipeline), request)
    assert [step[0][1:] for step in pipeline.steps] == [
        (PREFILL_CHUNK, 0),
        (PREFILL_CHUNK, 0),
        (40, 1),
        (1, 1),
        (1, 1),
    ]


async def test_a_step_holds_one_chunk_of_prompt_rows_at_most():
    pipeline = CountedPipeline()
    await run(steady(pipeline), *(Asked(prompt(seed, 150), 4) for seed in range(1, 7)))
    for step in pipeline.steps:
        assert sum(rows for _, rows, _ in step if rows > 1) <= PREFILL_CHUNK


async def test_a_short_prompt_does_not_wait_for_all_of_a_long_one():
    pipeline = CountedPipeline()
    long, short = Asked(prompt(1, 20 * PREFILL_CHUNK), 2), Asked(prompt(2), 2)
    await run(steady(pipeline), long, short)
    first_of_short = next(n for n, step in enumerate(pipeline.steps) for s, _, _ in step if s.params is short.params)
    assert first_of_short <= 2


async def test_decoding_has_half_of_the_time_while_a_long_prompt_comes():
    clock = Clock()
    pipeline = CountedPipeline()
    scheduler = Scheduler(pipeline, clock=clock)
    clock.pipeline = pipeline
    stream, long = Asked(prompt(1), 1000), Asked(prompt(2, 12 * PREFILL_CHUNK), 1)
    await run(scheduler, stream, long)
    until = max(n for n, step in enumerate(pipeline.steps) for s, _, _ in step if s.params is long.params)
    only_decoding = [step for step in pipeline.steps[:until] if all(rows == 1 for _, rows, _ in step)]
    mixed = [step for step in pipeline.steps[:until] if any(rows > 1 for _, rows, _ in step)]
    assert sum(map(cost, only_decoding)) >= 0.8 * sum(map(cost, mixed[2:]))
    assert all(any(s.params is stream.params for s, _, _ in step) for step in mixed[1:])


def cost(step: list[tuple[CountedSequence, int, int]]) -> float:
    return 0.5 + sum(rows for _, rows, _ in step) / 10


class Clock:
    """Time passes by the work of the pipeline's steps."""

    def __init__(self) -> None:
        self.pipeline: CountedPipeline | None = None

    def __call__(self) -> float:
        return sum(map(cost, self.pipeline.steps)) if self.pipeline else 0.0


async def test_what_does_not_fit_waits_in_order_and_is_served_later():
    pipeline = CountedPipeline(memory=40)
    scheduler = steady(pipeline)
    requests = [Asked(prompt(seed), 12) for seed in range(1, 8)]
    for request in requests:
        scheduler.submit(request)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [each.was_admitted for each in requests] == [True, True, False, False, False, False, False]
    assert scheduler.stats()["queued"] == 5
    async with asyncio.timeout(120):
        await asyncio.gather(*(request.over.wait() for request in requests))
    assert [each.tokens for each in requests] == [each.wanted for each in requests]
    assert pipeline.most_used == 40


async def test_a_small_request_does_not_overtake_a_large_one():
    pipeline = CountedPipeline(memory=100)
    scheduler = steady(pipeline)
    running, large, small = Asked(prompt(1), 52), Asked(prompt(2), 82), Asked(prompt(3), 2)
    order: list[Asked] = []
    for each in (large, small):
        each.admitted = lambda each=each: order.append(each)  # type: ignore[method-assign]
    await run(scheduler, running, large, small)
    assert order == [large, small]


async def test_what_never_fits_is_refused_at_once_by_name():
    scheduler = steady(CountedPipeline(memory=10))
    with pytest.raises(RequestError) as refusal:
        scheduler.submit(Asked(prompt(1), 12))
    assert refusal.value.code == "kv_budget_exceeded"


async def test_a_full_queue_refuses_at_once_by_name():
    pipeline = CountedPipeline(memory=20)
    pipeline.gate = asyncio.Event()
    scheduler = steady(pipeline, max_queue=2)
    requests = [Asked(prompt(seed), 12) for seed in range(1, 4)]
    scheduler.submit(requests[0])
    await until(lambda: requests[0].was_admitted)
    scheduler.submit(requests[1])
    scheduler.submit(requests[2])
    with pytest.raises(EngineError) as refusal:
        scheduler.submit(Asked(prompt(9), 12))
    assert refusal.value.code == "queue_full"
    pipeline.gate.set()
    await asyncio.gather(*(each.over.wait() for each in requests))
    assert all(each.tokens == each.wanted for each in requests)


async def test_one_that_waits_too_long_is_refused_by_name_before_anything_of_it_is_computed():
    pipeline = CountedPipeline(memory=20)
    pipeline.gate = asyncio.Event()
    scheduler = steady(pipeline, max_wait_s=0.01)
    running, late = Asked(prompt(1), 12), Asked(prompt(2), 12)
    scheduler.submit(running)
    scheduler.submit(late)
    await late.over.wait()
    assert late.error is not None
    assert late.error.code == "queue_timeout"
    assert (late.was_admitted, running.over.is_set()) == (False, False)
    pipeline.gate.set()
    await running.over.wait()  # whoever was admitted has all the time it needs
    assert running.tokens == running.wanted
    assert (pipeline.used, scheduler.stats()["queued"]) == (0, 0)


async def test_cancelling_frees_before_it_returns_and_nobody_else_notices():
    pipeline = CountedPipeline()
    scheduler = steady(pipeline)
    requests = [Asked(prompt(seed), 300) for seed in range(1, 6)]
    for request in requests:
        scheduler.submit(request)
    await requests[0].reaches(10)
    for request in requests[1:3]:
        before = pipeline.used
        await scheduler.cancel(request)
        assert pipeline.used < before
        assert request.error is None
    gone = [len(request.tokens) for request in requests[1:3]]
    survivors = [requests[0], *requests[3:]]
    await asyncio.gather(*(each.over.wait() for each in survivors))
    assert [len(request.tokens) for request in requests[1:3]] == gone
    assert all(each.tokens == each.wanted for each in survivors)
    assert pipeline.used == 0


async def test_a_waiting_request_can_be_cancelled():
    pipeline = CountedPipeline(memory=20)
    scheduler = steady(pipeline)
    running, waiting = Asked(prompt(1), 12), Asked(prompt(2), 12)
    scheduler.submit(running)
    scheduler.submit(waiting)
    await scheduler.cancel(waiting)
    await running.over.wait()
    assert scheduler.stats()["queued"] == 0
    assert waiting.tokens == []
    await scheduler.cancel(waiting)  # once more is no harm
    assert pipeline.used == 0


async def test_one_that_fails_takes_nobody_with_it():
    pipeline = CountedPipeline()
    bad, good = Asked(prompt(1), 10), Asked(prompt(2), 10)
    pipeline.fail[bad.params.prompt_tokens[0]] = EngineError("bad_logits", "no")
    await run(steady(pipeline), bad, good)
    assert bad.error is not None
    assert bad.error.code == "bad_logits"
    assert good.tokens == good.wanted
    assert pipeline.used == 0


async def test_one_that_is_not_admitted_hears_why():
    pipeline = CountedPipeline()
    pipeline.refuse_open.append(EngineError("ring_broken", "no"))
    refused, fine = Asked(prompt(1), 3), Asked(prompt(2), 3)
    await run(steady(pipeline), refused, fine)
    assert refused.error is not None
    assert refused.error.code == "ring_broken"
    assert fine.tokens == fine.wanted


async def test_one_for_which_another_rank_is_full_waits_until_somebody_leaves():
    pipeline = CountedPipeline()
    scheduler = steady(pipeline)
    running, late = Asked(prompt(1), 50), Asked(prompt(2), 5)
    pipeline.fail[late.params.prompt_tokens[0]] = EngineError("kv_budget_full", "no")

    def leave(error: KvasirError | None, finish=running.finish) -> None:
        pipeline.fail.clear()
        finish(error)

    running.finish = leave  # type: ignore[method-assign]
    await run(scheduler, running, late)
    assert late.tokens == late.wanted
    assert sum(1 for step in pipeline.steps for s, _, _ in step if s.params is late.params) <= 7
    # once it has waited too long, it is refused while others run on
    pipeline.gate = asyncio.Event()
    scheduler = steady(pipeline, max_wait_s=0.0)
    running, late = Asked(prompt(1), 50), Asked(prompt(2), 5)
    pipeline.fail[late.params.prompt_tokens[0]] = EngineError("kv_budget_full", "no")
    scheduler.submit(running)
    scheduler.submit(late)
    await asyncio.sleep(0.01)
    pipeline.gate.set()
    await late.over.wait()
    assert late.error is not None
    assert late.error.code == "kv_budget_full"
    await running.over.wait()
    assert running.tokens == running.wanted
    scheduler, pipeline.gate = steady(pipeline), None
    # alone it would wait for ever: it is refused
    alone = Asked(prompt(3), 5)
    pipeline.fail[alone.params.prompt_tokens[0]] = EngineError("kv_budget_full", "no")
    await run(scheduler, alone)
    assert alone.error is not None
    assert alone.error.code == "kv_budget_full"


async def test_closing_ends_everybody_with_a_reason():
    pipeline = CountedPipeline(memory=50)
    scheduler = steady(pipeline)
    requests = [Asked(prompt(seed), 30) for seed in range(1, 4)]
    for request in requests:
        scheduler.submit(request)
    await requests[0].reaches(1)
    await scheduler.close()
    assert {each.error.code for each in requests if each.error} == {"engine_closed"}
    assert all(each.over.is_set() for each in requests)
    assert pipeline.used == 0
    with pytest.raises(EngineError):
        scheduler.submit(Asked(prompt(1), 3))


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize("depth", [1, 3])
async def test_drafts_change_no_token_and_save_steps(mode: str, depth: int):
    requests = [Asked(prompt(seed, 20), 70, speculation=mode) for seed in range(1, 5)]
    pipeline = CountedPipeline(drafts=7, depth=depth)
    scheduler = Scheduler(pipeline, clock=lambda: len(pipeline.steps))  # rows cost nothing
    await run(scheduler, *requests)
    assert [each.tokens for each in requests] == [each.wanted for each in requests]
    for each in requests:
        progress = each.progress
        assert progress.decode_steps + progress.accepted_tokens >= each.max_tokens - 1
        assert progress.decode_steps < each.max_tokens - 1
        assert 0 < progress.accepted_tokens <= progress.drafted_tokens
    assert scheduler.stats()["speculation"]["tokens_per_step"] > 1.2


async def test_no_drafts_when_they_are_off_or_others_would_be_paid_for_them():
    pipeline = CountedPipeline(drafts=7)
    off, paid = Asked(prompt(1, 20), 40), Asked(prompt(2, 20), 40, speculation="auto", experts="network")
    await run(steady(pipeline), off, paid)
    assert off.progress.drafted_tokens == paid.progress.drafted_tokens == 0
    assert off.tokens == off.wanted


async def test_several_steps_are_under_way_where_the_pipeline_is_deep():
    pipeline = CountedPipeline(depth=3)
    requests = [Asked(prompt(seed, 300), 20) for seed in range(1, 7)]
    await run(steady(pipeline), *requests)
    assert [each.tokens for each in requests] == [each.wanted for each in requests]
    assert pipeline.most_under_way == 3
    for step in pipeline.steps:
        assert len({id(sequence) for sequence, _, _ in step}) == len(step)


async def test_an_interruptible_pipeline_frees_in_the_middle_of_a_step():
    pipeline = CountedPipeline(depth=2)
    pipeline.interruptible = True
    pipeline.gate = asyncio.Event()
    scheduler = steady(pipeline)
    stuck = Asked(prompt(1), 10)
    scheduler.submit(stuck)
    await until(lambda: pipeline.under_way == 1)
    await scheduler.cancel(stuck)
    assert pipeline.used == 0
    pipeline.gate.set()
    fine = Asked(prompt(2), 10)
    await run(scheduler, fine)
    assert fine.tokens == fine.wanted
    assert stuck.tokens == []


async def test_a_request_joins_at_the_next_step():
    pipeline = CountedPipeline()
    scheduler = steady(pipeline)
    stream, late = Asked(prompt(1), 500), Asked(prompt(2), 5)
    scheduler.submit(stream)
    await stream.reaches(10)
    await run(scheduler, late)
    assert len(stream.tokens) < 30
    await scheduler.cancel(stream)


@pytest.mark.parametrize("trouble", [OSError("disk full"), RuntimeError("bug")])
async def test_one_that_cannot_be_closed_properly_is_told_and_the_others_go_on(trouble: Exception):
    pipeline = CountedPipeline()
    close, failures = pipeline.close, [trouble]

    async def failing(sequence: CountedSequence) -> str | None:
        await close(sequence)
        if failures:
            raise failures.pop()
        return None

    pipeline.close = failing  # type: ignore[method-assign]
    first, second = Asked(prompt(1), 3), Asked(prompt(2), 9)
    await run(steady(pipeline), first, second)
    assert first.error is not None
    assert str(trouble) in first.error.message
    assert second.error is None
    assert second.tokens == second.wanted
