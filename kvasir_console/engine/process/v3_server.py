"""One version 3 session at the worker (the rules are in ``dispatch_ends``): I/O here, sums on the compute thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence

from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.served import Served, ServedSlice, expert_reply
from kvasir_console.relay.wire.dispatch_ends import (
    Asked,
    CancelAsked,
    Complaint,
    Greeted,
    Parting,
    WorkerEnd,
    WorkerEvent,
)
from kvasir_console.relay.wire.dispatch_v3 import ErrorCode, Hello, V3Error

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024


class V3Session:
    """Reads and answers at once: while one request is computed, others arrive, and one may be cancelled.

    What waits here is bounded by the byte budget that was announced; what was computed is written before the next is
    begun, so a trunk that does not read gets no further.
    """

    def __init__(
        self,
        slices: Sequence[ServedSlice],
        hello: Hello,
        compute: Compute,
        served: Served,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.over = asyncio.Event()
        self._slices = slices
        self._compute = compute
        self._served = served
        self._reader = reader
        self._writer = writer
        self._end = WorkerEnd(hello)
        self._queue: deque[Asked] = deque()
        self._arrived = asyncio.Event()
        self._parting: str | None = None

    async def run(self, first: bytes) -> None:
        """Serve until the trunk has left, ``first`` having been read already.

        Raises:
            OSError: the connection broke.
            V3Error: the trunk broke the contract; it was told.
        """
        answering = asyncio.create_task(self._answer_all())
        answering.add_done_callback(self._answering_ended)
        try:
            await self._receive(first)
            if self._end.leaving:
                await answering  # it ends with the last answer
        except V3Error as error:
            self._end.last_words(error)
            with contextlib.suppress(OSError):
                await self._send()
            raise
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            self._served.rejected += self._end.refused
            self.over.set()

    def goodbye(self, text: str) -> None:
        """Ask the trunk for no more work. It leaves once it has the answers it waits for."""
        if self._parting is None:
            self._parting = text
            if self._end.greeted:
                self._end.goodbye(text)
                self._write()

    def _answering_ended(self, answering: asyncio.Task[None]) -> None:
        """Nobody would answer what is still read."""
        error = None if answering.cancelled() else answering.exception()
        if isinstance(error, Exception):
            self._reader.set_exception(error)

    async def _receive(self, data: bytes) -> None:
        while data and not self._end.leaving:
            for event in self._end.receive(data):
                self._handle(event)
            await self._send()
            if not self._end.leaving:
                data = await self._reader.read(_READ_BYTES)

    def _handle(self, event: WorkerEvent) -> None:
        match event:
            case Greeted():
                if self._parting is not None:
                    self._end.goodbye(self._parting)
            case Asked():
                self._queue.append(event)
                self._arrived.set()
            case CancelAsked():
                for waiting in self._queue:
                    if waiting.request_id == event.request_id:
                        self._queue.remove(waiting)
                        self._end.cancelled(event.request_id)
                        self._served.cancelled += 1
                        break
            case Parting():
                log.info("the trunk leaves: %s", event.text or "it does not say why")
                self._arrived.set()
            case Complaint():
                log.warning("the trunk says: %s", event.error)

    async def _answer_all(self) -> None:
        """Compute what waits, in turn, until the trunk has left and has its answers."""
        while self._queue or not self._end.leaving:
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            await self._answer(self._queue.popleft())
            await self._send()

    async def _answer(self, asked: Asked) -> None:
        served = self._slices[asked.slice]
        started = time.monotonic()
        try:
            sums = await self._compute.run(lambda: expert_reply(served.bank, asked.request, served.held.begin))
        except Exception as error:
            log.exception("a dispatch request failed")
            self._end.fail(asked.request_id, ErrorCode.INTERNAL, f"the worker failed: {type(error).__name__}")
            return
        self._end.answer(asked.request_id, sums, int((time.monotonic() - started) * 1e6))
        self._served.count(asked.request)

    def _write(self) -> None:
        pieces, self._end.outgoing = self._end.outgoing, []
        if pieces and not self._writer.is_closing():
            self._writer.writelines(pieces)

    async def _send(self) -> None:
        self._write()
        await self._writer.drain()
