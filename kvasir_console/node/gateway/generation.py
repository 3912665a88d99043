"""One generation: run in a task of its own, handed on event by event, and entered in the request store at its end.

The task is apart from the HTTP response because a response ends when its client leaves; the engine's request must then
still be cancelled, and what was computed still be metered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.node.gateway.backends import Backend, Event
from kvasir_console.node.gateway.idempotency import RequestName, fresh_id
from kvasir_console.node.gateway.slots import Slots
from kvasir_console.node.gateway.store import RequestRecord, Store

log = logging.getLogger(__name__)

SILENCE_S = 300.0
"""Longest time without an event, the prompt included (gateway contract 6.1: engine and gateway wait 300 s)."""
COMPLETE = ("stop", "length")
MAX_TEXT_CHARACTERS = 2**14
TEMPLATE_TOKENS = 1024
MESSAGE_TOKENS = 64


class Generation:
    """One request: its events, and what is known of it so far."""

    def __init__(
        self, backend: Backend, slots: Slots, request: GenerateRequest, request_id: str, prompt_tokens: int
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._request = request
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._tokens: list[int] = []
        self._done: DoneEvent | None = None
        self._events: asyncio.Queue[Event | KvasirError] = asyncio.Queue()
        self._begun_s = time.monotonic()
        self._running = True
        self._task: asyncio.Task[None] | None = None
        self.first_token_ms: float | None = None

    async def next(self) -> Event:
        """The next event; after a ``DoneEvent`` there is none. Raises the error that ended the generation."""
        event = await self._events.get()
        if isinstance(event, KvasirError):
            raise event
        if self.first_token_ms is None:
            self.first_token_ms = (time.monotonic() - self._begun_s) * 1e3
        return event

    def cancel(self) -> None:
        """Stop generating. What is over by itself is left to finish its record."""
        if self._running and self._task is not None:
            self._running = False
            self._task.cancel()

    def start(self, store: Store, clock: Callable[[], float]) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run(store, clock), name=f"generation-{self._request_id}")
        return self._task

    async def _run(self, store: Store, clock: Callable[[], float]) -> None:
        """Generate, record, and only then show the end: what a caller saw finished has been counted."""
        end: Event | KvasirError = _failed("it ended early")
        try:
            async with self._slots.hold():
                await asyncio.to_thread(
                    store.begin_request, self._request_id, self._backend.info.model_id, int(clock())
                )
                end = await self._generate()
                self._running = False
                await self._record(store, int(clock()), end)
        except asyncio.CancelledError:
            end = _cancelled()  # while it waited for a slot
        except KvasirError as error:
            end = error
        finally:
            self._events.put_nowait(end)

    async def _generate(self) -> Event | KvasirError:
        """Hand tokens on; returns how it ended."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SILENCE_S) as silence:
                async with contextlib.aclosing(self._backend.generate(self._request)) as events:
                    async for event in events:
                        silence.reschedule(loop.time() + SILENCE_S)
                        if isinstance(event, DoneEvent):
                            self._done = self._checked(event)
                        else:
                            self._take(event)
        except asyncio.CancelledError:
            return _cancelled()  # what was generated until then is still to be recorded
        except TimeoutError:
            return EngineError("engine_silent", f"No token came for {SILENCE_S:g} s.", "Try again.")
        except KvasirError as error:
            return error
        except Exception as error:
            log.exception("the generation %s failed", self._request_id)
            return _failed(type(error).__name__)
        return self._done or EngineError("engine_gone", "The engine ended the answer before it was complete.")

    def _take(self, event: TokenEvent) -> None:
        """Hand a token on. More than were asked for, or something else, would be paid for: refused."""
        if type(event.token) is not int or not _is_text(event.text):
            raise EngineError("engine_misbehaved", "The engine sent something that is no token.")
        asked = -1 if self._request.logprobs is None else self._request.logprobs
        if (event.logprob is not None) != (asked >= 0) or len(event.top or ()) > max(asked, 0):
            raise EngineError("engine_misbehaved", "The engine sent other log probabilities than it was asked for.")
        if len(self._tokens) >= self._request.max_tokens:
            raise EngineError("engine_misbehaved", "The engine sent more tokens than it was asked for.")
        self._tokens.append(event.token)
        self._events.put_nowait(event)

    def _checked(self, done: DoneEvent) -> DoneEvent:
        """The end as far as it agrees with what was seen here. Raises ``EngineError`` for what is none."""
        counts: tuple[object, ...] = (
            *(done.rows, done.pairs_local, done.pairs_remote, done.failovers),
            *(done.decode_steps, done.drafted_tokens, done.accepted_tokens),
        )
        sound = all(isinstance(count, int) and 0 <= count < 2**63 for count in counts) and math.isfinite(done.queued_ms)
        if not sound or not _is_text(done.tail) or not (done.trace_path is None or _is_text(done.trace_path)):
            raise EngineError("engine_misbehaved", "The engine ended the answer with something that is no end.")
        return replace(
            done,
            finish_reason=done.finish_reason if done.finish_reason in COMPLETE else "stop",
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self._tokens),
            tokens=tuple(self._tokens),
            cached_tokens=min(max(done.cached_tokens, 0), self._prompt_tokens),
        )

    async def _record(self, store: Store, now: int, end: Event | KvasirError) -> None:
        ring, done = self._backend.info.ring, self._done
        paid_prompt = min(self._prompt_tokens, plausible_prompt_tokens(self._request))
        record = RequestRecord(
            request_id=self._request_id,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self._tokens),
            finish=end.code if isinstance(end, KvasirError) else done.finish_reason if done is not None else "",
            tokens=tuple(self._tokens),
            ring=ring.plan.ring if ring else "",
            generation=ring.plan.generation if ring else 0,
            plan=ring.text if ring else "",
            token_rows=proven_rows(paid_prompt, len(self._tokens), done is not None) if ring else 0,
        )
        try:
            await asyncio.to_thread(store.finish_request, record, now)
        except KvasirError as error:
            log.error("the request %s is not recorded: %s", self._request_id, error)


class Generations:
    """All running generations of a gateway."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._running: dict[asyncio.Task[None], Generation] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    def start(
        self, backend: Backend, slots: Slots, request: GenerateRequest, request_id: str, prompt_tokens: int
    ) -> Generation:
        generation = Generation(backend, slots, request, request_id, prompt_tokens)
        task = generation.start(self._store, self._clock)
        self._running[task] = generation
        task.add_done_callback(self._ended)
        return generation

    async def id_of(self, name: RequestName) -> str:
        """The id to book a request under: its own, unless what was booked there ended before it was complete."""
        if name.given:
            row = await asyncio.to_thread(self._store.request, name.id)
            if row is not None and row["finished"] is not None and row["finish"] not in COMPLETE:
                return fresh_id()
        return name.id

    async def idle(self) -> None:
        """Wait until every generation that runs now is recorded."""
        if self._running:
            await asyncio.wait(set(self._running))

    async def close(self, timeout_s: float = 10.0) -> None:
        """Cancel what runs and wait until it is recorded."""
        for generation in self._running.values():
            generation.cancel()
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle()
        except TimeoutError:
            log.warning("%d generations did not end within %g s", self.running, timeout_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a generation failed", exc_info=error)


def plausible_prompt_tokens(request: GenerateRequest) -> int:
    """The most tokens a prompt can have: one a byte, and what a chat template adds around it.

    The first rank of a ring counts the prompt, and is paid by that count.
    """
    if request.prompt_tokens is not None:
        return len(request.prompt_tokens)
    if request.prompt is not None:
        return len(request.prompt.encode()) + TEMPLATE_TOKENS
    messages = request.messages or ()
    return sum(len(str(message.get("content", "")).encode()) + MESSAGE_TOKENS for message in messages) + TEMPLATE_TOKENS


def _is_text(value: object) -> bool:
    """A token's text, with what a stop string held back before it, is short."""
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS


def _failed(why: str) -> EngineError:
    return EngineError("engine_failed", f"The answer failed: {why}.", "Try again.")


def _cancelled() -> EngineError:
    return EngineError("cancelled", "The answer was cancelled.", "Ask again.")


def proven_rows(prompt_tokens: int, completion_tokens: int, done: bool) -> int:
    """Token rows through the whole model that the answer itself proves.

    The first token proves the prompt's rows, each further one the row of the token before it. A row whose result
    nobody saw is not counted; an answer that ended at once proves its prompt.
    """
    if completion_tokens == 0:
        return prompt_tokens if done else 0
    return prompt_tokens + completion_tokens - 1
