"""The trunk's end of one worker session, whatever dispatch wire it speaks: rows in, weighted sums out, and its account.

A ``Worker`` sends requests, hands each reply to the request it answers, bounds what it reads and counts what was
acknowledged. Which pairs go to whom, how long to wait and what to do when a worker fails is the router's business.
Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Preamble, Wire

_READ_BYTES = 256 * 1024
F32Array = np.ndarray[Any, np.dtype[np.float32]]


class WorkerError(Exception):
    """The worker refused a request, or answered with what cannot be used; the session may well live on.

    ``reason`` is a stable lower_snake name.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """Experts [begin, end) of one layer."""

    layer: int
    begin: int
    end: int


@dataclass(slots=True)
class SessionStats:
    """Acknowledged work of one slice of one session name over this engine's life; it outlives the connection."""

    session: str
    wallet: str
    layer: int
    begin: int
    end: int
    wire: str = ""
    requests: int = 0
    rows: int = 0
    pairs: int = 0
    paid_bytes: int = 0
    failures: int = 0
    in_flight: int = 0
    """Pairs sent and not answered."""
    connected: bool = False
    rtt_ms: float | None = None
    """Smoothed time from request to reply: network and the worker's compute."""
    quarantined: bool = False
    proven: bool = False
    """Enough of its pairs were found right (``checks``)."""
    checked_pairs: int = 0
    held_bytes: int = 0
    """Acknowledged, and paid once the slice is proven."""
    voided_bytes: int = 0
    mismatches: int = 0
    hedges: int = 0
    """Requests that somebody else was asked for too, because this one was late."""


StatsOf = Callable[[Slice], SessionStats]
"""The account of a slice of this session, kept by the router over redials."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request on its way: the reply has exactly ``size`` bytes."""

    size: int
    reply: asyncio.Future[bytes]


class Worker:
    """One live connection to a remote worker.

    Requests that are asked for in one turn of the loop leave in one write. A request whose task is cancelled leaves
    the session alive; its late reply is swallowed and earns nothing.
    """

    def __init__(
        self,
        preamble: Preamble,
        wire: Wire,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stats_of: StatsOf,
    ) -> None:
        self.name = preamble.session
        self.wallet = preamble.wallet
        self.wire = wire
        self.slices = (Slice(preamble.layer, preamble.begin, preamble.end),)
        self.stats: Mapping[int, SessionStats] = {each.layer: stats_of(each) for each in self.slices}
        """The account of each layer's slice."""
        self.broken = False
        self._reader = reader
        self._writer = writer
        self._pending: deque[_Pending] = deque()
        self._outbox: list[bytes] = []
        for stats in self.stats.values():
            stats.wire, stats.connected = (wire.name or "").lower(), True

    @property
    def rtt_ms(self) -> float | None:
        """Smoothed time from request to reply, of the layer that answered fastest."""
        known = [stats.rtt_ms for stats in self.stats.values() if stats.rtt_ms is not None]
        return min(known, default=None)

    @property
    def in_flight(self) -> int:
        """Pairs sent and not answered."""
        return sum(stats.in_flight for stats in self.stats.values())

    def holds(self, layer: int) -> range | None:
        """The experts of ``layer`` that this worker computes."""
        for each in self.slices:
            if each.layer == layer:
                return range(each.begin, each.end)
        return None

    def fits(self, n_rows: int, n_pairs: int) -> bool:
        """Whether one request of this wire can carry so much (v1 repeats a row for each of its pairs)."""
        if self.wire is Wire.V1:
            return n_pairs <= dispatch.MAX_TOKENS
        return n_pairs <= dispatch.MAX_PAIRS and n_rows <= dispatch.MAX_ROWS

    async def run(self) -> str:
        """Receive until the session ends; returns why. It is dropped by then."""
        try:
            await self._receive()
            why = "the worker closed the stream"
        except (OSError, EOFError, ValueError) as error:
            why = str(error)
        self.drop(why)
        return why

    async def ask(self, layer: int, request: dispatch.Request, *, pay: bool = True) -> F32Array:
        """The (R, D) f32 weighted sums of ``request``, whose ``ids`` are those of the whole layer.

        With ``pay`` unset the caller acknowledges the work itself, once it is content with the answer.

        Raises:
            OSError, EOFError: the session ended.
            ValueError: the reply breaks the contract, or the request cannot be carried.
            WorkerError: the answer cannot be used: ``not_finite``.
        """
        held = self.holds(layer)
        if held is None:
            raise ValueError(f"{self.name} holds no experts of layer {layer}")
        stats = self.stats[layer]
        local = dispatch.local_ids(request.ids, held.start, held.stop)
        request = dispatch.Request(self.wire, request.rows, request.row_idx, local, request.weights)
        stats.in_flight += request.n_pairs
        started = time.monotonic()
        try:
            partial = await self._ask_legacy(request)
        finally:
            stats.in_flight -= request.n_pairs
        if not np.isfinite(partial).all() and np.isfinite(request.rows).all():
            raise WorkerError("the worker answered with values that are not finite", "not_finite")
        elapsed_ms = (time.monotonic() - started) * 1e3
        stats.rtt_ms = elapsed_ms if stats.rtt_ms is None else 0.8 * stats.rtt_ms + 0.2 * elapsed_ms
        if pay:
            self.acknowledge(layer, request)
        return partial

    def acknowledge(self, layer: int, request: dispatch.Request) -> None:
        """Count an answered request as work to be paid for."""
        stats = self.stats[layer]
        stats.requests += 1
        stats.rows += request.n_rows
        stats.pairs += request.n_pairs
        stats.paid_bytes += dispatch.paid_bytes(request.n_embd, request.n_rows, request.n_pairs)

    def drop(self, why: str) -> None:
        """End the session; whoever waits for a reply gets ``ConnectionResetError``."""
        if self.broken:
            return
        self.broken = True
        for stats in self.stats.values():
            stats.connected = False
        with contextlib.suppress(OSError):
            self._writer.close()
        while self._pending:
            waiting = self._pending.popleft()
            if not waiting.reply.done():
                waiting.reply.set_exception(ConnectionResetError(why))

    async def _ask_legacy(self, request: dispatch.Request) -> F32Array:
        # Hidden states beyond half precision's range would become infinite on the thrifty wire.
        wire = self.wire if self.wire is not Wire.V2F16 or dispatch.fits_f16(request) else Wire.V2
        encoded = dispatch.encode_request(request, wire)
        size = dispatch.reply_bytes(wire, request.n_embd, request.n_rows, request.n_pairs)
        if not self.broken:
            await self._writer.drain()
        if self.broken:
            raise ConnectionResetError("the session is closed")
        waiting = _Pending(size, asyncio.get_running_loop().create_future())
        self._pending.append(waiting)
        self._post(encoded)
        return _weighted(request, dispatch.decode_reply(wire, await waiting.reply, request.n_embd), wire)

    def _post(self, frame: bytes) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(frame)

    def _flush(self) -> None:
        frames, self._outbox = self._outbox, []
        if not self.broken:
            self._writer.writelines(frames)

    async def _receive(self) -> None:
        """Hand each reply to the request it answers. Replies come in the order of requests: the wire has no ids.

        Raises:
            ValueError: the worker sent bytes that nobody asked for.
            EOFError: the stream ended in the middle of a reply.
        """
        while data := await self._reader.read(_READ_BYTES):
            while data:
                if not self._pending:
                    raise ValueError("the worker sent bytes that nobody asked for")
                waiting = self._pending[0]
                missing = waiting.size - len(data)
                body = data[: waiting.size] if missing <= 0 else data + await self._reader.readexactly(missing)
                if self.broken:
                    return
                self._pending.popleft()
                if not waiting.reply.done():
                    waiting.reply.set_result(body)
                data = data[waiting.size :]


def _weighted(request: dispatch.Request, reply: F32Array, wire: Wire) -> F32Array:
    """The (R, D) weighted sums of a reply. v1 carries raw outputs, one a pair, which are weighed here."""
    if wire is not Wire.V1:
        return np.ascontiguousarray(reply, dtype=np.float32)
    out = np.zeros_like(request.rows)
    if request.weights is None:
        raise ValueError("a request without weights has no weighted sums")
    for pair, row in enumerate(request.row_idx):
        out[row] += request.weights[pair] * reply[pair]
    return out
