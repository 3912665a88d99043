"""Continuous batching: requests queue, are admitted while their keys and values fit, and share every step.

One scheduler drives one pipeline. Admission is first come, first served, and final: what runs never fails for want of
memory. A step holds the next row of every sequence that decodes (and its draft, if one is worth it), and prompts in
chunks cut at multiples of ``PREFILL_CHUNK``, at most one chunk's rows a step, the prompt that has waited longest first
(``turns`` says how often). What a request gets never depends on its company: a row has the same bits in any step.

The pipeline computes on a thread of its own, and steps that need nothing in between follow each other there: the
scheduler's state then belongs to that thread while ``_run`` awaits it. Only ``submit`` and ``cancel`` come in between,
and they do no more than leave word.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvasir_console.engine.process.pipeline import (
    MAX_SEQUENCES,
    PREFILL_CHUNK,
    Admitted,
    Choice,
    Feed,
    Outcome,
    Pipeline,
    SequenceParams,
    as_engine_error,
)
from kvasir_console.engine.process.speculate import Chance, Lookup, StepCost, accepted, worthwhile
from kvasir_console.engine.process.tally import Tally
from kvasir_console.engine.process.turns import Turns
from kvasir_console.errors import EngineError, KvasirError

log = logging.getLogger(__name__)

MAX_QUEUE = 256
"""Most requests that wait for admission; a further one is refused."""
MAX_WAIT_S = 120.0
"""Longest wait for admission; then a request is refused, before anything of it was computed."""


@dataclass(slots=True)
class Progress:
    """What a request has cost so far."""

    cached_tokens: int = 0
    """Prompt tokens whose rows were kept from an earlier request."""
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were right: each saved a step."""
    tally: Tally = field(default_factory=Tally)
    trace_path: str | None = None


class Request(Protocol):
    """What the scheduler runs. Its methods return at once. They are called on the event loop, but ``push``, which is
    called wherever the step was computed."""

    params: SequenceParams
    max_tokens: int
    speculation: str
    """``auto``, ``on`` (draft whenever there is something to draft) or ``off``."""
    progress: Progress

    def admitted(self) -> None:
        """The request left the queue."""

    def push(self, choice: Choice) -> bool:
        """Take the next token; returns whether the request is complete with it."""

    def flush(self) -> None:
        """Show what was pushed."""

    def finish(self, error: KvasirError | None) -> None:
        """The request is over, by itself or by an error, and nothing of it is held any more."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request in the pipeline."""

    request: Request
    sequence: Admitted
    tokens: list[int]
    """Prompt and chosen tokens."""
    fed: int
    """How many of them the sequence holds rows of."""
    served: int
    """The turn at which it was last in a step."""
    busy: bool = False
    cancelled: bool = False
    over: bool = False
    """Complete, cancelled or failed: it leaves as soon as no step holds it."""
    error: KvasirError | None = None
    lookup: Lookup | None = None
    chance: Chance = field(default_factory=Chance)

    @property
    def prompt_length(self) -> int:
        return len(self.request.params.prompt_tokens)

    @property
    def given(self) -> int:
        """Tokens that were there when the request was admitted."""
        return self.prompt_length + len(self.request.params.resumed)

    @property
    def fill(self) -> int:
        """Rows before the first that decodes: the prompt's, and those of a resumed answer but its last token's."""
        return max(self.prompt_length, self.given - 1)

    @property
    def decoding(self) -> bool:
        return self.fed >= self.fill


class Scheduler:
    """Runs requests over one pipeline until ``close``."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        max_queue: int = MAX_QUEUE,
        max_running: int = MAX_SEQUENCES,
        max_wait_s: float = MAX_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._max_queue = max_queue
        self._max_running = max_running
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        self._gone: dict[int, asyncio.Event] = {}
        self._patience: dict[int, asyncio.TimerHandle] = {}
        self._steps: set[asyncio.Task[None]] = set()
        self._full = False
        """Another rank had no memory for the next request: it waits until a sequence ends."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._turn = itertools.count(1)
        self._turns = Turns()
        self._cost = StepCost()
        self._prompts_last = False
        self.rows = 0
        self._step_count = 0
        self._batches: Counter[int] = Counter()
        self._admitted = 0
        self._decode_steps = 0
        self._drafted = 0
        self._accepted = 0

    def submit(self, request: Request) -> None:
        """Queue a request. One that waits for longer than ``max_wait_s`` ends with ``queue_timeout``.

        Raises:
            RequestError: ``kv_budget_exceeded``; not even an idle engine could hold it.
            EngineError: ``queue_full``; or ``engine_closed``.
        """
        if self._closed:
            raise _closed()
        self._pipeline.check(request.params)
        if len(self._waiting) >= self._max_queue:
            raise EngineError(
                "queue_full",
                f"{len(self._waiting)} requests wait for this engine already.",
                "Try again shortly, or ask another node.",
            )
        self._waiting.append(request)
        self._gone[id(request)] = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._patience[id(request)] = loop.call_later(self._max_wait_s, self._give_up, request)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="scheduler")
        self._wake.set()

    async def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is; returns once nothing of it is held any more."""
        gone = self._gone.get(id(request))
        if gone is None:
            return
        if request in self._waiting:
            self._waiting.remove(request)
            self._leave(request)
            return
        for each in self._running:
            if each.request is request:
                each.over = each.cancelled = True
        self._wake.set()
        await gone.wait()

    async def close(self) -> None:
        """End every request with ``engine_closed``, and stop."""
        self._closed = True
        for request in list(self._waiting):
            request.finish(_closed())
            self._leave(request)
        self._waiting.clear()
        for each in self._running:
            each.over, each.error = True, _closed()
        self._wake.set()
        if self._task is not None:
            await self._task

    def stats(self) -> dict[str, Any]:
        decoded = self._decode_steps + self._accepted
        return {
            "queued": len(self._waiting),
            "running": len(self._running),
            "max_queue": self._max_queue,
            "max_running": self._max_running,
            "admitted": self._admitted,
            "steps": self._step_count,
            "rows": self.rows,
            "batch_sizes": {str(size): count for size, count in sorted(self._batches.copy().items())},
            "speculation": {
                "drafted": self._drafted,
                "accepted": self._accepted,
                "tokens_per_step": decoded / self._decode_steps if self._decode_steps else None,
            },
            **self._pipeline.stats(),
        }

    async def _run(self) -> None:
        try:
            while not (self._closed and not self._running and not self._steps):
                self._wake.clear()
                for each in [each for each in self._running if each.over]:
                    if not each.busy or self._pipeline.interruptible:
                        await self._end(each)
                await self._admit()
                if self._pipeline.depth > 1:
                    self._start_steps()
                    await self._wake.wait()
                elif self._steps:  # the pipeline has become shallower
                    await self._wake.wait()
                elif feeds := self._feeds():
                    await self._step(feeds)
                else:
                    await self._wake.wait()
        except Exception as error:
            log.exception("the scheduler failed")
            self._closed = True
            trouble = EngineError("engine_failed", f"The engine's scheduler failed: {type(error).__name__}.")
            for request in [*self._waiting, *(each.request for each in self._running)]:
                request.finish(trouble)
                self._leave(request)

    def _start_steps(self) -> None:
        """Have as many steps under way as the pipeline takes."""

        def over(step: asyncio.Task[None]) -> None:
            self._steps.discard(step)
            self._wake.set()

        while len(self._steps) < self._pipeline.depth and (feeds := self._feeds()):
            step = asyncio.create_task(self._step(feeds), name="step")
            self._steps.add(step)
            step.add_done_callback(over)

    async def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running and not self._full:
            request = self._waiting[0]
            if not self._pipeline.fits(request.params):
                return
            self._waiting.popleft()
            try:
                sequence = await self._pipeline.open(request.params)
            except Exception as error:
                request.finish(as_engine_error(error))
                self._leave(request)
                continue
            self._admitted += 1
            request.progress.cached_tokens = sequence.reused
            request.admitted()
            tokens = [*request.params.prompt_tokens, *request.params.resumed]
            self._running.append(_Running(request, sequence, tokens, sequence.reused, next(self._turn)))

    async def _end(self, each: _Running) -> None:
        """Free what a sequence holds, then tell its request."""
        self._running.remove(each)
        request, progress = each.request, each.request.progress
        progress.tally = each.sequence.tally
        try:
            progress.trace_path = await self._pipeline.close(each.sequence)
        except Exception as error:  # a trace that cannot be written, say
            each.error = each.error or as_engine_error(error)
        refused = each.error is not None and each.error.code == "kv_budget_full"
        patient = self._patience[id(request)].when() > asyncio.get_running_loop().time()
        if refused and patient and not each.cancelled and len(each.tokens) == each.given and self._running:
            self._full = True
            self._waiting.appendleft(request)
            return
        self._full = False
        request.finish(each.error)
        self._leave(request)

    def _give_up(self, request: Request) -> None:
        """A request has waited for too long, unless it waits no more."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.finish(_waited(self._max_wait_s))
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self._patience.pop(id(request)).cancel()
        self._gone.pop(id(request)).set()
        self._wake.set()

    def _feeds(self) -> list[tuple[_Running, Feed]]:
        """Rows for the next step; empty if there is nothing to do."""
        ready = sorted((each for each in self._running if not each.busy), key=lambda each: each.served)
        decoding = [each for each in ready if each.decoding]
        prompts = [each for each in ready if not each.decoding]
        if self._pipeline.depth > 1:
            # Several steps are under way at once, in turn a prompt's chunk and an even share of those who decode.
            self._prompts_last = bool(prompts) and not (decoding and self._prompts_last)
            share = math.ceil(sum(each.decoding for each in self._running) / self._pipeline.depth)
            decoding, prompts = ([], prompts) if self._prompts_last else (decoding[:share], [])
        elif not self._turns.prompts_may(bool(decoding)):
            prompts = []
        return [*self._decode_feeds(decoding), *self._prompt_feeds(prompts)]

    def _prompt_feeds(self, prompts: list[_Running]) -> list[tuple[_Running, Feed]]:
        feeds: list[tuple[_Running, Feed]] = []
        room = PREFILL_CHUNK
        for each in prompts:
            end = min((each.fed // PREFILL_CHUNK + 1) * PREFILL_CHUNK, each.fill)
            if end - each.fed > room:
                break
            room -= end - each.fed
            resumed = each.given > each.prompt_length
            feeds.append(self._feed(each, each.tokens[each.fed : end], int(end == each.fill and not resumed)))
        return feeds

    def _decode_feeds(self, decoding: list[_Running]) -> list[tuple[_Running, Feed]]:
        feeds: list[tuple[_Running, Feed]] = []
        rows, expected = len(decoding), float(len(decoding))
        for each in decoding:
            draft = self._draft(each, rows, expected)
            rows += len(draft)
            expected += sum(each.chance.value**place for place in range(1, len(draft) + 1))
            feeds.append(self._feed(each, [each.tokens[-1], *draft], 1 + len(draft)))
        return feeds

    def _feed(self, each: _Running, tokens: list[int], choices: int) -> tuple[_Running, Feed]:
        each.busy, each.served = True, next(self._turn)
        resumed = each.given > each.prompt_length
        refill, again = resumed and choices == 0, resumed and each.fed == each.fill
        return each, Feed(each.sequence, tokens, each.fed, choices, refill, again)

    def _draft(self, each: _Running, rows: int, expected: float) -> list[int]:
        request = each.request
        limit = min(
            self._pipeline.draft_limit(request.params),
            request.max_tokens - (len(each.tokens) - each.prompt_length) - 1,
        )
        if request.speculation == "off" or limit < 1:
            return []
        if request.speculation == "auto" and self._pipeline.network_bound(request.params):
            return []  # a row that is rejected would be paid for nothing
        if each.lookup is None:
            each.lookup = Lookup(each.tokens)
        draft = each.lookup.draft(limit)
        if not draft or request.speculation == "on":
            return draft
        count = worthwhile(each.chance.value, self._cost, rows, expected, limit)
        return draft[: count or each.chance.probe(limit)]

    async def _step(self, batch: list[tuple[_Running, Feed]]) -> None:
        """Run steps, beginning with this one, until something has to be looked after in between."""
        loop = asyncio.get_running_loop()
        started = self._clock()

        def more(outcomes: list[Outcome]) -> list[Feed]:
            nonlocal batch, started
            over = self._account(batch, outcomes, self._clock() - started)
            loop.call_soon_threadsafe(_flush, [each.request for each, _ in batch if each in self._running])
            if over or self._wake.is_set() or self._pipeline.depth > 1 or self._steps:
                return []
            batch, started = self._feeds(), self._clock()
            return [feed for _, feed in batch]

        try:
            await self._pipeline.run([feed for _, feed in batch], more)
        except Exception as error:
            trouble = as_engine_error(error)
            self._account(batch, [trouble] * len(batch), self._clock() - started)

    def _account(self, batch: list[tuple[_Running, Feed]], outcomes: list[Outcome], elapsed_s: float) -> bool:
        """Hand out a step's outcomes; returns whether anybody is through with it."""
        rows = sum(len(feed.tokens) for _, feed in batch)
        decoding = sum(each.decoding for each, _ in batch)
        self._turns.spent(elapsed_s, prompts=decoding < len(batch), decoding=decoding > 0)
        if decoding == len(batch):
            self._cost.record(rows, elapsed_s)
        self._step_count += 1
        self._batches[len(batch)] += 1
        self.rows += rows
        for (each, feed), outcome in zip(batch, outcomes, strict=True):
            self._take(each, feed, outcome)
        return any(each.over for each, _ in batch)

    def _take(self, each: _Running, feed: Feed, outcome: Outcome) -> None:
        each.busy = False
        if each not in self._running:
            return  # it was interrupted
        if isinstance(outcome, KvasirError):
            each.error = each.error or outcome
            each.over = True
            return
        if not each.decoding:
            each.fed += len(feed.tokens)
        else:
            draft = feed.tokens[1:]
            right = accepted(draft, [choice.token for choice in outcome])
            each.chance.record(len(draft), right)
            each.fed += 1 + right
            progress = each.request.progress
            progress.decode_steps += 1
            progress.drafted_tokens += len(draft)
            progress.accepted_tokens += right
            self._decode_steps += 1
            self._drafted += len(draft)
            self._accepted += right
        tokens = [choice.token for choice in outcome]
        each.tokens += tokens
        if each.lookup is not None:
            each.lookup.extend(tokens)
        if each.over:
            return
        for choice in outcome:
            if each.request.push(choice):
                each.over = True
                return


def _flush(requests: list[Request]) -> None:
    for request in requests:
        request.flush()


def _waited(seconds: float) -> EngineError:
    return EngineError(
        "queue_timeout",
        f"The request waited {seconds:g} s for memory for its keys and values; other requests had it all.",
        "Try again shortly, shorten the prompt or lower max_tokens.",
    )


def _closed() -> EngineError:
    return EngineError("engine_closed", "The engine loads another model or leaves.", "Try again in a moment.")
