"""The dispatch stream of the older wires, as the trunk speaks it: no ids, so replies come in the order of requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from kvasir_console.engine.process.link import F32Array, Outbox, Reply
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.preamble import Wire
from kvasir_console.relay.wire.values import Dtype

_READ_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request on its way: the reply has exactly ``size`` bytes."""

    size: int
    reply: asyncio.Future[bytes]


class LegacyLink:
    """v1, v2 or v2f16. A cancelled request's reply is swallowed when it comes."""

    draining = False
    ping_ms: float | None = None

    def __init__(self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.wire = wire
        self.dtype = Dtype.F16 if wire is Wire.V2F16 else Dtype.F32
        self._reader = reader
        self._outbox = Outbox(writer)
        self._pending: deque[_Pending] = deque()

    def fits(self, n_rows: int, n_pairs: int) -> bool:
        if self.wire is Wire.V1:  # it repeats a row for each of its pairs
            return n_pairs <= dispatch.MAX_TOKENS
        return n_pairs <= dispatch.MAX_PAIRS and n_rows <= dispatch.MAX_ROWS

    def as_received(self, request: Request) -> tuple[F32Array, F32Array]:
        assert request.weights is not None  # noqa: S101 - every request of a trunk has weights
        if self._wire_of(request) is not Wire.V2F16:
            return request.rows, request.weights
        return request.rows.astype("<f2").astype(np.float32), request.weights.astype("<f2").astype(np.float32)

    async def ask(self, slice_: int, request: Request) -> Reply:
        del slice_  # there is one
        wire = self._wire_of(request)
        encoded = dispatch.encode_request(request, wire)
        size = dispatch.reply_bytes(wire, request.n_embd, request.n_rows, request.n_pairs)
        await self._outbox.ready()
        waiting = _Pending(size, asyncio.get_running_loop().create_future())
        self._pending.append(waiting)
        self._outbox.post([encoded])
        started = time.monotonic()
        reply = await waiting.reply
        elapsed_ms = (time.monotonic() - started) * 1e3
        return Reply(_weighted(request, dispatch.decode_reply(wire, reply, request.n_embd), wire), elapsed_ms, None)

    async def receive(self) -> str:
        while data := await self._reader.read(_READ_BYTES):
            while data:
                if not self._pending:
                    raise ValueError("the worker sent bytes that nobody asked for")
                waiting = self._pending[0]
                missing = waiting.size - len(data)
                body = data[: waiting.size] if missing <= 0 else data + await self._reader.readexactly(missing)
                if self._outbox.closed:
                    return "the session is closed"
                self._pending.popleft()
                if not waiting.reply.done():
                    waiting.reply.set_result(body)
                data = data[waiting.size :]
        return "the worker closed the stream"

    def close(self, why: str) -> None:
        self._outbox.close()
        while self._pending:
            waiting = self._pending.popleft()
            if not waiting.reply.done():
                waiting.reply.set_exception(ConnectionResetError(why))

    def _wire_of(self, request: Request) -> Wire:
        # Hidden states beyond half precision's range would become infinite on the thrifty wire.
        return self.wire if self.wire is not Wire.V2F16 or dispatch.fits_f16(request) else Wire.V2


def _weighted(request: Request, reply: F32Array, wire: Wire) -> F32Array:
    """The (R, D) weighted sums of a reply. v1 carries raw outputs, one a pair, which are weighed here."""
    if wire is not Wire.V1:
        return np.ascontiguousarray(reply, dtype=np.float32)
    out = np.zeros_like(request.rows)
    if request.weights is None:
        raise ValueError("a request without weights has no weighted sums")
    for pair, row in enumerate(request.row_idx):
        out[row] += request.weights[pair] * reply[pair]
    return out
