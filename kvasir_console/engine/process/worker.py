"""The trunk's end of one worker session, whatever dispatch wire it speaks: rows in, weighted sums out, and its account.

A ``Worker`` sends requests, hands each reply to the request it answers, bounds what it reads and counts what was
acknowledged. Which pairs go to whom, how long to wait and what to do when a worker fails is the router's business.
Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from kvasir_console.engine.process.legacy_link import LegacyLink
from kvasir_console.engine.process.link import F32Array, Link, WorkerError
from kvasir_console.engine.process.v3_link import V3Link
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.dispatch_v3 import HeldSlice, Hello
from kvasir_console.relay.wire.preamble import Preamble, Wire
from kvasir_console.relay.wire.values import Dtype

__all__ = ["DigestOf", "SessionStats", "Slice", "StatsOf", "Worker", "WorkerError", "choose_wire"]

UNKNOWN_DIGEST = bytes(32)


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
    paid_rows: int = 0
    """Of ``rows`` and ``pairs``, those that ``paid_bytes`` is made of."""
    paid_pairs: int = 0
    failures: int = 0
    in_flight: int = 0
    """Pairs sent and not answered."""
    connected: bool = False
    rtt_ms: float | None = None
    """Smoothed time from request to reply: network and the worker's compute."""
    quarantined: bool = False
    convictions: int = 0
    """How often it was caught; more than once if its quarantine was lifted between."""
    fault: str = ""
    """What it was caught at last, as are the two below."""
    evidence: str = ""
    """Where the case is kept on this machine; empty if it is not."""
    evidence_digest: str = ""
    """SHA-256 of the kept arrays."""
    shard_digest: str = ""
    """What the worker says its shard is (SHA-256, hexadecimal); empty if it does not say."""
    dtype: str = "f32"
    """What rows and sums are written in."""
    ping_ms: float | None = None
    """Smoothed round trip without any work; None on wires that have no PING."""
    proven: bool = False
    """Enough of its pairs were found right (``checks``)."""
    checked_pairs: int = 0
    held_bytes: int = 0
    """Acknowledged, and paid once the slice is proven; as are the rows and pairs."""
    held_rows: int = 0
    held_pairs: int = 0
    voided_bytes: int = 0
    mismatches: int = 0
    hedges: int = 0
    """Requests that somebody else was asked for too, because this one was late."""


StatsOf = Callable[[Slice], SessionStats]
"""The account of a slice of this session, kept by the router over redials."""


DigestOf = Callable[[Slice], Awaitable[bytes]]
"""The shard digest that a slice of this model must have; zero bytes where it cannot be known."""


def choose_wire(wanted: Wire, spoken: Wire, dtype: Dtype) -> Wire:
    """The wire for a worker that speaks ``spoken``: the wanted one, or of the older ones the nearest to it."""
    if wanted & spoken:
        return wanted
    if wanted is Wire.V3 and dtype is not Dtype.F32 and spoken & Wire.V2F16:
        return Wire.V2F16
    return Wire.V2


class Worker:
    """One live connection to a remote worker; ``open`` it, then keep ``run`` running.

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
        *,
        n_embd: int,
        dtype: Dtype = Dtype.F32,
        digest_of: DigestOf | None = None,
    ) -> None:
        """
        Args:
            preamble: who it is, and the windows the hub admitted it with. An older wire serves the first of them.
            dtype: what version 3 writes rows and sums in, where the worker offers it.
        """
        self.name = preamble.session
        self.wallet = preamble.wallet
        self.wire = wire
        self.slices: tuple[Slice, ...] = ()
        self.stats: dict[int, SessionStats] = {}
        """The account of each layer's slice."""
        self.broken = False
        self._stats_of = stats_of
        self._digest_of = digest_of
        self._numbers: dict[int, int] = {}
        self._admitted = [Slice(*window) for window in preamble.windows]
        self._link: Link
        self._v3: V3Link | None = None
        if wire is Wire.V3:
            admitted = tuple(HeldSlice(*window) for window in preamble.windows)
            hello = Hello(n_embd, admitted, preamble.model_digest, dtypes=dtype.bit | Dtype.F32.bit)
            self._link = self._v3 = V3Link(hello, dtype, reader, writer)
            self._model_digest = preamble.model_digest
        else:
            self._link = LegacyLink(wire, reader, writer)
            self._hold(0, self._admitted[0], "")

    async def open(self) -> None:
        """Exchange greetings, on the wire that has them; then the slices are known.

        Raises:
            OSError: no greeting came in time, or the stream ended.
            ValueError: it breaks the contract, or names other experts than the session was admitted with.
        """
        if self._v3 is None:
            return
        try:
            hello = await self._v3.open()
            if hello.model_digest != self._model_digest:
                raise ValueError("the worker serves another model")
            for number, held in enumerate(hello.slices):
                await self._take_slice(number, held)
            if not self.slices:
                raise ValueError("the worker serves none of the experts it was admitted with")
        except BaseException as error:
            self.drop(str(error) or "no greeting came in time")
            raise

    @property
    def draining(self) -> bool:
        """The worker asked for no more work; what comes all the same, it answers."""
        return self._link.draining

    @property
    def dtype(self) -> str:
        """What rows and sums are written in (f32, f16, bf16, int8), unless that cannot carry them."""
        return self._link.dtype.name.lower()

    @property
    def ping_ms(self) -> float | None:
        """Smoothed round trip without any work; None on wires that have no PING."""
        return self._link.ping_ms

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
        """The experts of ``layer`` that this worker computes; None too if it wants no more work."""
        for each in self.slices if not self._link.draining else ():
            if each.layer == layer:
                return range(each.begin, each.end)
        return None

    def fits(self, n_rows: int, n_pairs: int) -> bool:
        """Whether one request can carry so much."""
        return self._link.fits(n_rows, n_pairs)

    def as_received(self, request: dispatch.Request) -> tuple[F32Array, F32Array]:
        """Rows (R, D) and weights (P,) as the worker reads them off the wire; a check recomputes from these."""
        return self._link.as_received(request)

    async def run(self) -> str:
        """Receive until the session ends; returns why. It is dropped by then."""
        try:
            why = await self._link.receive()
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
        held = next((each for each in self.slices if each.layer == layer), None)
        if held is None:
            raise ValueError(f"{self.name} holds no experts of layer {layer}")
        stats = self.stats[layer]
        local = dispatch.local_ids(request.ids, held.begin, held.end)
        request = dispatch.Request(self.wire, request.rows, request.row_idx, local, request.weights)
        stats.in_flight += request.n_pairs
        try:
            reply = await self._link.ask(self._numbers[layer], request)
        finally:
            stats.in_flight -= request.n_pairs
        if not np.isfinite(reply.sums).all() and np.isfinite(request.rows).all():
            raise WorkerError("the worker answered with values that are not finite", "not_finite")
        stats.rtt_ms = reply.elapsed_ms if stats.rtt_ms is None else 0.8 * stats.rtt_ms + 0.2 * reply.elapsed_ms
        stats.ping_ms = self._link.ping_ms
        if pay:
            self.acknowledge(layer, request)
        return reply.sums

    def acknowledge(self, layer: int, request: dispatch.Request) -> None:
        """Count an answered request as work to be paid for."""
        stats = self.stats[layer]
        stats.requests += 1
        stats.rows += request.n_rows
        stats.pairs += request.n_pairs
        stats.paid_rows += request.n_rows
        stats.paid_pairs += request.n_pairs
        stats.paid_bytes += dispatch.paid_bytes(request.n_embd, request.n_rows, request.n_pairs)

    def drop(self, why: str) -> None:
        """End the session; whoever waits for a reply gets ``ConnectionResetError``."""
        if self.broken:
            return
        self.broken = True
        for stats in self.stats.values():
            stats.connected = False
        self._link.close(why)

    async def _take_slice(self, number: int, held: HeldSlice) -> None:
        """Enter one slice of the worker's greeting, if the session was admitted with it."""
        offered = Slice(held.layer, held.begin, held.end)
        admitted = any(
            offered.layer == each.layer and each.begin <= offered.begin and offered.end <= each.end
            for each in self._admitted
        )
        if not admitted or offered.layer in self.stats:
            return
        # Of a part of a window nobody knows a digest, and hashing what a stranger names is work for nothing.
        digest = held.digest if offered in self._admitted else UNKNOWN_DIGEST
        if self._digest_of is not None and digest != UNKNOWN_DIGEST:
            due = await self._digest_of(offered)
            if due not in (UNKNOWN_DIGEST, digest):
                raise ValueError(f"the worker's experts of layer {held.layer} are not those of this model")
        self._hold(number, offered, "" if digest == UNKNOWN_DIGEST else digest.hex())

    def _hold(self, number: int, held: Slice, digest: str) -> None:
        self.slices += (held,)
        self._numbers[held.layer] = number
        stats = self.stats[held.layer] = self._stats_of(held)
        stats.wire, stats.connected = (self.wire.name or "").lower(), True
        stats.dtype, stats.shard_digest = self.dtype, digest
