"""One generation: run in a task of its own, handed on event by event, and entered in the request store at its end.

The task is apart from the HTTP response because a response ends when its client leaves; the engine's request must then
still be cancelled, and what was computed still be metered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from kvasir_console.engine.process.client import DoneEvent, GenerateRequest
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.node.gateway.backends import Backend, Event
from kvasir_console.node.gateway.slots import Slots
from kvasir_console.node.gateway.store import RequestRecord, Store

log = logging.getLogger(__name__)


class Generation:
    """Events of one request. ``cancel`` may be called at any time, also after the end."""

    def __init__(self, task: asyncio.Task[None], events: asyncio.Queue[Event | KvasirError], begun: float) -> None:
        self._task = task
        self._events = events
        self._begun = begun
        self.first_token_ms: float | None = None

    async def next(self) -> Event:
        """The next event; after a ``DoneEvent`` there is none. Raises the error that ended the generation."""
        event = await self._events.get()
        if isinstance(event, KvasirError):
            raise event
        if self.first_token_ms is None:
            self.first_token_ms = (time.monotonic() - self._begun) * 1e3
        return event

    def cancel(self) -> None:
        self._task.cancel()


class Generations:
    """All running generations of a gateway."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return len(self._tasks)

    def start(
        self, backend: Backend, slots: Slots, request: GenerateRequest, request_id: str, prompt_tokens: int
    ) -> Generation:
        events: asyncio.Queue[Event | KvasirError] = asyncio.Queue()
        run = self._run(backend, slots, request, request_id, prompt_tokens, events)
        task = asyncio.create_task(run, name=f"generation-{request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Generation(task, events, time.monotonic())

    async def close(self, timeout_s: float = 10.0) -> None:
        """Cancel what runs and wait until it is recorded."""
        running = set(self._tasks)
        for task in running:
            task.cancel()
        if running:
            _, late = await asyncio.wait(running, timeout=timeout_s)
            if late:
                log.warning("%d generations did not end within %g s", len(late), timeout_s)

    async def _run(
        self,
        backend: Backend,
        slots: Slots,
        request: GenerateRequest,
        request_id: str,
        prompt_tokens: int,
        events: asyncio.Queue[Event | KvasirError],
    ) -> None:
        tokens: list[int] = []
        done: DoneEvent | None = None
        finish = "cancelled"
        begun = False
        try:
            async with slots.hold():
                await asyncio.to_thread(
                    self._store.begin_request, request_id, backend.info.model_id, int(self._clock())
                )
                begun = True
                async with contextlib.aclosing(backend.generate(request)) as stream:
                    async for event in stream:
                        if isinstance(event, DoneEvent):
                            done, finish = event, event.finish_reason
                        else:
                            tokens.append(event.token)
                        events.put_nowait(event)
            if done is None:
                raise EngineError("engine_gone", "The engine ended the answer before it was complete.", "Try again.")
        except asyncio.CancelledError:
            events.put_nowait(EngineError("cancelled", "The answer was cancelled.", "Ask again."))
            raise
        except KvasirError as error:
            finish = error.code
            events.put_nowait(error)
        except Exception as error:
            log.exception("the generation %s failed", request_id)
            finish = "engine_failed"
            events.put_nowait(EngineError("engine_failed", f"The answer failed: {type(error).__name__}.", "Try again."))
        finally:
            if begun:
                await self._record(backend, request_id, prompt_tokens, tokens, done, finish)

    async def _record(
        self,
        backend: Backend,
        request_id: str,
        prompt_tokens: int,
        tokens: list[int],
        done: DoneEvent | None,
        finish: str,
    ) -> None:
        ring = backend.info.ring
        prompt = done.prompt_tokens if done is not None else prompt_tokens
        record = RequestRecord(
            request_id=request_id,
            prompt_tokens=prompt,
            completion_tokens=len(tokens),
            finish=finish,
            tokens=tuple(tokens),
            ring=ring.plan.ring if ring else "",
            generation=ring.plan.generation if ring else 0,
            plan=ring.text if ring else "",
            token_rows=proven_rows(prompt, len(tokens), done is not None) if ring else 0,
        )
        try:
            await asyncio.shield(asyncio.to_thread(self._store.finish_request, record, int(self._clock())))
        except KvasirError as error:
            log.error("the request %s is not recorded: %s", request_id, error)


def proven_rows(prompt_tokens: int, completion_tokens: int, done: bool) -> int:
    """Token rows through the whole model that the answer itself proves.

    The first token proves the prompt's rows, each further one the row of the token before it. A row whose result
    nobody saw is not counted; an answer that ended at once proves its prompt.
    """
    if completion_tokens == 0:
        return prompt_tokens if done else 0
    return prompt_tokens + completion_tokens - 1
