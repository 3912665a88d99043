"""Version 3 of the dispatch stream, as the trunk speaks it over a socket (the rules are in ``dispatch_ends``)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from kvasir_console.engine.process.link import F32Array, Outbox, Reply, WorkerError
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.dispatch_ends import (
    Answered,
    Complaint,
    Failed,
    Parting,
    Ponged,
    TrunkEnd,
    TrunkEvent,
)
from kvasir_console.relay.wire.dispatch_v3 import Hello, V3Error
from kvasir_console.relay.wire.preamble import Wire
from kvasir_console.relay.wire.values import Dtype, carries, decode_rows, encode_rows

_READ_BYTES = 256 * 1024
GREETING_TIMEOUT_S = 10.0
PING_EVERY_S = 5.0
DEAD_AFTER_S = 10.0
"""A worker that sends nothing for so long after a PING is gone; with the pause before it, in 15 s at most."""
STALL_S = 1.0
"""A wait that took so much longer than it should."""
MAX_UNREAD_BYTES = 64 * 1024
"""PONGs that a worker asked for and may not have read; for more, nothing is read from it until it reads."""
LINGER_S = 0.1
"""A worker that wants to leave is kept so long after its last answer: a step that was planned with it may still ask."""


class V3Link:
    """``open`` exchanges greetings; then ``receive`` runs while others ``ask``."""

    wire = Wire.V3

    def __init__(
        self,
        hello: Hello,
        dtype: Dtype,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        ping_every_s: float = PING_EVERY_S,
        dead_after_s: float = DEAD_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dtype = dtype
        self.draining = False
        self.ping_ms: float | None = None
        self._end = TrunkEnd(hello)
        self._reader = reader
        self._outbox = Outbox(writer)
        self._ping_every_s = ping_every_s
        self._dead_after_s = dead_after_s
        self._clock = clock
        self._heard_at = clock()
        self._pinged_at: float | None = None
        self._why = "the worker closed the stream"
        self._owed_bytes = 0
        self._waiting: dict[int, asyncio.Future[Answered]] = {}
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def open(self, timeout_s: float = GREETING_TIMEOUT_S) -> Hello:
        """Exchange greetings; returns the worker's.

        Raises:
            OSError: there was none in time (``TimeoutError`` is one), or the stream ended.
            ValueError: it breaks the contract.
        """
        self._post()
        async with asyncio.timeout(timeout_s):
            while self._end.peer is None:
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    raise ConnectionResetError(self._why)
                self._take(data)
        if not self._end.offers(self.dtype):
            self.dtype = Dtype.F32
        return self._end.peer

    def fits(self, n_rows: int, n_pairs: int) -> bool:
        return self._end.possible(Dtype.F32, n_rows, n_pairs)

    def as_received(self, request: Request) -> tuple[F32Array, F32Array]:
        assert request.weights is not None  # noqa: S101 - every request of a trunk has weights
        dtype = self._dtype_of(request)
        if dtype is Dtype.F32:
            return request.rows, request.weights
        data = b"".join(encode_rows(dtype, request.rows))
        return decode_rows(dtype, data, 0, request.n_rows, request.n_embd), request.weights

    async def ask(self, slice_: int, request: Request) -> Reply:
        dtype = self._dtype_of(request)
        if not self._end.possible(dtype, request.n_rows, request.n_pairs):
            raise ValueError(f"{request.n_rows} rows and {request.n_pairs} pairs are more than this worker takes")
        async with self._turn:  # first come, first served
            await self._outbox.ready()
            while not self._end.room(dtype, request.n_rows, request.n_pairs):
                self._freed.clear()
                await self._freed.wait()
                await self._outbox.ready()
            number = self._end.ask(slice_, dtype, request)
            self._post()
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        started = self._clock()
        try:
            got = await answer
        except asyncio.CancelledError:
            self._end.cancel(number)
            self._post()
            raise
        finally:
            self._waiting.pop(number, None)
        return Reply(got.sums, (self._clock() - started) * 1e3, got.took_us / 1e3)

    async def receive(self) -> str:
        watch = asyncio.create_task(self._keep_alive())
        try:
            while True:
                idle = self.draining and not self._end.in_flight
                try:
                    async with asyncio.timeout(LINGER_S if idle else None):
                        data = await self._reader.read(_READ_BYTES)
                except TimeoutError:
                    if not self._end.in_flight:
                        break
                    continue
                if not data:
                    break
                self._take(data)
                if self._owed_bytes > MAX_UNREAD_BYTES:
                    await self._outbox.ready()
                    self._owed_bytes = 0
        finally:
            watch.cancel()
        return self._why

    def close(self, why: str) -> None:
        if self._end.peer is not None and not self._outbox.closed:
            self._end.goodbye(why)
            self._post()
        self._outbox.close()
        self._freed.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError(why))

    def _dtype_of(self, request: Request) -> Dtype:
        return self.dtype if carries(self.dtype, request.rows) else Dtype.F32

    def _take(self, data: bytes) -> None:
        self._heard_at = self._clock()
        try:
            for event in self._end.receive(data):
                self._handle(event)
        except V3Error as error:
            raise ValueError(f"{error} ({error.reason})") from error
        finally:
            self._owed_bytes += sum(len(piece) for piece in self._end.outgoing)
            self._post()
            self._freed.set()

    def _handle(self, event: TrunkEvent) -> None:
        match event:
            case Answered():
                if (answer := self._waiting.get(event.request_id)) is not None and not answer.done():
                    answer.set_result(event)
            case Failed():
                if (answer := self._waiting.get(event.request_id)) is not None and not answer.done():
                    answer.set_exception(WorkerError(str(event.error), event.error.reason))
            case Ponged():
                if self._pinged_at is not None:
                    took_ms = (self._clock() - self._pinged_at) * 1e3
                    self.ping_ms = took_ms if self.ping_ms is None else 0.8 * self.ping_ms + 0.2 * took_ms
                    self._pinged_at = None
            case Parting():
                self.draining = True
                self._why = f"the worker leaves: {event.text}" if event.text else "the worker leaves"
            case Complaint():
                self._why = f"the worker says: {event.error} ({event.error.reason})"

    async def _keep_alive(self) -> None:
        """PING now and then; a worker that then sends nothing at all is given up, and reading ends with that."""
        while True:
            if self._end.ping(secrets.token_bytes(8)):
                self._pinged_at = self._clock()
                self._post()
            slept_at = self._clock()
            await asyncio.sleep(self._ping_every_s)
            if self._clock() - slept_at > self._ping_every_s + STALL_S:
                self._heard_at = self._clock()  # this process slept; that says nothing about the worker
            if self._pinged_at is not None:
                silent_s = self._clock() - max(self._pinged_at, self._heard_at)
                if silent_s >= self._dead_after_s:
                    why = f"the worker gave no sign of life for {silent_s:.0f} s"
                    self._reader.set_exception(ConnectionAbortedError(why))
                    self._outbox.close()  # it may be the one that waits, for a worker that reads nothing
                    return

    def _post(self) -> None:
        pieces, self._end.outgoing = self._end.outgoing, []
        self._outbox.post(pieces)
