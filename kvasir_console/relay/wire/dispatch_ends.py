"""Both ends of a version 3 dispatch session (sans-I/O): what may come when, what is in flight, what is answered.

``receive`` takes bytes and gives events; what has to be sent in turn collects in ``outgoing``, which the caller writes
and empties. Whatever a peer sends, an end holds at most the byte budget it announced, plus one frame of control.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvasir_console.relay.wire import dispatch_v3 as v3
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.dispatch_v3 import (
    Buffer,
    ErrorCode,
    Frame,
    FrameKind,
    FrameReader,
    Header,
    Hello,
    Skipped,
    V3Error,
)
from kvasir_console.relay.wire.values import Dtype, F32Array, carries

MAX_IN_FLIGHT = 1024
"""Requests of one session that a worker holds at once."""
MAX_ERRORS = 256
"""Refused frames after which a worker takes its trunk for broken."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """The peer's HELLO came; work may be asked for."""

    hello: Hello


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    request_id: int
    slice: int
    dtype: Dtype
    request: Request


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """The trunk does not want this answer any more. If it was not begun, ``WorkerEnd.cancelled`` says so."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Parting:
    """GOODBYE."""

    text: str


@dataclass(frozen=True, slots=True)
class Complaint:
    """An ERROR that is about no request."""

    error: V3Error


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    request_id: int
    sums: F32Array
    """(R, E)"""
    took_us: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker refused or failed a request; the session goes on."""

    request_id: int
    error: V3Error


@dataclass(frozen=True, slots=True)
class Ponged:
    pass


WorkerEvent = Greeted | Asked | CancelAsked | Parting | Complaint
TrunkEvent = Greeted | Answered | Failed | Ponged | Parting | Complaint


class WorkerEnd:
    """The end that computes. ``hello`` is what it announces; ``receive`` raises ``V3Error`` once the session is over.

    A refused request is answered by an ERROR of its own and costs nothing else.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.outgoing: list[Buffer] = []
        self.in_flight_bytes = 0
        self.refused = 0
        self.leaving = False
        """The trunk said GOODBYE."""
        self._reader = FrameReader(self._admit)
        self._peer: Hello | None = None
        self._costs: dict[int, int] = {}
        self._slices: dict[int, int] = {}
        self._dtypes: dict[int, Dtype] = {}
        self._last_id = 0

    @property
    def greeted(self) -> bool:
        """Whether greetings were exchanged."""
        return self._peer is not None

    @property
    def in_flight(self) -> int:
        """Requests not answered yet."""
        return len(self._costs)

    def receive(self, data: Buffer) -> Iterator[WorkerEvent]:
        try:
            for found in self._reader.feed(data):
                if isinstance(found, Skipped):
                    if found.error is not None and not self.greeted:
                        raise found.error
                    if found.error is not None:
                        self._refuse(found.header.request_id, found.error)
                elif (event := self._take(found)) is not None:
                    yield event
        except V3Error as error:
            self._reader.stop(error)
            raise

    def answer(self, request_id: int, sums: F32Array, took_us: int = 0) -> None:
        """``sums`` (R, E) for a request in flight, in its dtype, or in f32 if that cannot carry them."""
        dtype = self._dtypes[request_id] if carries(self._dtypes[request_id], sums) else Dtype.F32
        self.outgoing += v3.encode_reply(request_id, self._slices[request_id], dtype, sums, took_us)
        self._forget(request_id)

    def cancelled(self, request_id: int) -> None:
        self.outgoing.append(v3.encode_cancelled(request_id, self._slices[request_id]))
        self._forget(request_id)

    def fail(self, request_id: int, code: ErrorCode, text: str) -> None:
        self.outgoing.append(v3.encode_error(request_id, code, text))
        self._forget(request_id)

    def goodbye(self, text: str) -> None:
        """Ask for no more work; what comes all the same is still answered."""
        self.outgoing.append(v3.encode(Frame(FrameKind.GOODBYE, payload=text.encode()[: v3.MAX_TEXT_BYTES])))

    def last_words(self, error: V3Error) -> None:
        """Say why the session ends."""
        if not self.greeted:
            self.outgoing = [v3.OPENING]
        self.outgoing.append(v3.encode_error(0, error.code, str(error)))

    def _admit(self, header: Header) -> Skipped | None:
        kind = FrameKind(header.kind)
        if (kind is FrameKind.HELLO) != (self._peer is None):
            raise V3Error("a session begins with one HELLO" if self._peer is None else "a second HELLO")
        if kind in (FrameKind.REPLY, FrameKind.PONG):
            raise V3Error(f"a trunk does not send {kind.name}")
        if kind is not FrameKind.REQUEST:
            return None
        if self.leaving:
            raise V3Error("work after GOODBYE")
        if header.request_id <= self._last_id:
            raise V3Error(f"request id {header.request_id} after {self._last_id}")
        self._last_id = header.request_id
        try:
            cost = self._price(header)
        except V3Error as error:
            return Skipped(header, error)
        self._costs[header.request_id] = cost
        self._slices[header.request_id] = header.slice
        self._dtypes[header.request_id] = Dtype(header.flags)
        self.in_flight_bytes += cost
        return None

    def _price(self, header: Header) -> int:
        """What a REQUEST costs. Raises ``V3Error`` if it is not taken."""
        if header.slice >= len(self.hello.slices):
            raise V3Error(f"there is no slice {header.slice} here", ErrorCode.SLICE)
        if header.flags > max(Dtype) or not self.hello.dtypes & Dtype(header.flags).bit:
            raise V3Error(f"values of dtype {header.flags} are not taken here", ErrorCode.DTYPE)
        cost = v3.cost_bytes(Dtype(header.flags), self.hello.n_embd, header.n_bytes)
        if len(self._costs) >= MAX_IN_FLIGHT or self.in_flight_bytes + cost > self.hello.byte_budget:
            raise V3Error(
                f"{self.in_flight} requests of {self.in_flight_bytes} bytes in flight leave no room for {cost} more",
                ErrorCode.OVER_BUDGET,
            )
        return cost

    def _take(self, frame: Frame) -> WorkerEvent | None:
        match frame.kind:
            case FrameKind.HELLO:
                self._peer = v3.decode_hello(frame.payload)
                if self._peer.n_embd != self.hello.n_embd:
                    raise V3Error(f"the trunk has n_embd {self._peer.n_embd}, these experts {self.hello.n_embd}")
                self.outgoing.append(v3.encode_hello(self.hello))
                return Greeted(self._peer)
            case FrameKind.REQUEST:
                held = self.hello.slices[frame.slice]
                dtype = Dtype(frame.flags)
                try:
                    request = v3.decode_request(frame.payload, dtype, self.hello.n_embd, held.end - held.begin)
                except V3Error as error:
                    self._forget(frame.request_id)
                    self._refuse(frame.request_id, error)
                    return None
                return Asked(frame.request_id, frame.slice, dtype, request)
            case FrameKind.CANCEL:
                return CancelAsked(frame.request_id) if frame.request_id in self._costs else None
            case FrameKind.PING:
                self.outgoing.append(v3.encode(Frame(FrameKind.PONG, payload=frame.payload)))
            case FrameKind.GOODBYE:
                self.leaving = True
                return Parting(v3.printable(frame.payload))
            case FrameKind.ERROR:
                return Complaint(v3.decode_error(frame.payload))
        return None

    def _refuse(self, request_id: int, error: V3Error) -> None:
        self.refused += 1
        if self.refused > MAX_ERRORS:
            raise V3Error(f"{self.refused} frames were refused; the last: {error}", error.code)
        self.outgoing.append(v3.encode_error(request_id, error.code, str(error)))

    def _forget(self, request_id: int) -> None:
        self.in_flight_bytes -= self._costs.pop(request_id)
        del self._slices[request_id], self._dtypes[request_id]


@dataclass(frozen=True, slots=True)
class _Ask:
    slice: int
    dtype: Dtype
    n_rows: int
    cost: int
    wanted: bool = True


class TrunkEnd:
    """The end that asks. ``receive`` raises ``V3Error`` for anything that was not asked for."""

    def __init__(self, hello: Hello) -> None:
        self.outgoing: list[Buffer] = [v3.encode_hello(hello)]
        self.peer: Hello | None = None
        """The worker's HELLO, once it came."""
        self.in_flight_bytes = 0
        self._hello = hello
        self._reader = FrameReader(self._admit)
        self._asks: dict[int, _Ask] = {}
        self._next_id = 1
        self._pinged: bytes | None = None

    @property
    def in_flight(self) -> int:
        """Requests not answered yet, cancelled ones included."""
        return len(self._asks)

    def offers(self, dtype: Dtype) -> bool:
        return self.peer is not None and bool(self.peer.dtypes & dtype.bit)

    def possible(self, dtype: Dtype, n_rows: int, n_pairs: int) -> bool:
        """Whether the worker could ever take such a request."""
        return self.peer is not None and self._cost(dtype, n_rows, n_pairs) <= self.peer.byte_budget

    def room(self, dtype: Dtype, n_rows: int, n_pairs: int) -> bool:
        """Whether the worker takes such a request now."""
        if self.peer is None or len(self._asks) >= MAX_IN_FLIGHT:
            return False
        return self.in_flight_bytes + self._cost(dtype, n_rows, n_pairs) <= self.peer.byte_budget

    def ask(self, slice_: int, dtype: Dtype, request: Request) -> int:
        """Send ``request`` (ids local to the slice); returns its id. There must be ``room``, and ``dtype`` on offer.

        Raises ``V3Error`` for a request that the wire cannot carry.
        """
        request_id = self._next_id
        self.outgoing += v3.encode_request(request_id, slice_, dtype, request)
        self._next_id += 1
        cost = self._cost(dtype, request.n_rows, request.n_pairs)
        self._asks[request_id] = _Ask(slice_, dtype, request.n_rows, cost)
        self.in_flight_bytes += cost
        return request_id

    def cancel(self, request_id: int) -> None:
        """Want no answer any more. One that is on its way is swallowed."""
        ask = self._asks.get(request_id)
        if ask is not None and ask.wanted:
            self._asks[request_id] = _Ask(ask.slice, ask.dtype, ask.n_rows, ask.cost, wanted=False)
            self.outgoing.append(v3.encode(Frame(FrameKind.CANCEL, request_id)))

    def ping(self, nonce: bytes) -> bool:
        """Send a PING of up to 64 bytes, unless one is unanswered."""
        if self._pinged is not None:
            return False
        self._pinged = nonce
        self.outgoing.append(v3.encode(Frame(FrameKind.PING, payload=nonce)))
        return True

    def goodbye(self, text: str) -> None:
        self.outgoing.append(v3.encode(Frame(FrameKind.GOODBYE, payload=text.encode()[: v3.MAX_TEXT_BYTES])))

    def receive(self, data: Buffer) -> Iterator[TrunkEvent]:
        try:
            for found in self._reader.feed(data):
                if isinstance(found, Skipped):
                    if found.error is not None:
                        raise found.error
                    self._forget(found.header.request_id)  # an answer that nobody waits for
                elif (event := self._take(found)) is not None:
                    yield event
        except V3Error as error:
            self._reader.stop(error)
            raise

    def _cost(self, dtype: Dtype, n_rows: int, n_pairs: int) -> int:
        size = v3.request_bytes(dtype, self._hello.n_embd, n_rows, n_pairs)
        return v3.cost_bytes(dtype, self._hello.n_embd, size)

    def _admit(self, header: Header) -> Skipped | None:
        kind = FrameKind(header.kind)
        if (kind is FrameKind.HELLO) != (self.peer is None) and kind is not FrameKind.ERROR:
            raise V3Error("a session begins with one HELLO" if self.peer is None else "a second HELLO")
        if kind in (FrameKind.REQUEST, FrameKind.CANCEL):
            raise V3Error(f"a worker does not send {kind.name}")
        if kind is FrameKind.REPLY or (kind is FrameKind.ERROR and header.request_id):
            return self._admit_answer(kind, header)
        return None

    def _admit_answer(self, kind: FrameKind, header: Header) -> Skipped | None:
        ask = self._asks.get(header.request_id)
        if ask is None:
            raise V3Error(f"the worker answered request {header.request_id}, which nobody asked for")
        if kind is FrameKind.REPLY:
            if header.slice != ask.slice or header.flags not in (ask.dtype, Dtype.F32):
                raise V3Error(f"request {header.request_id} is answered for another slice or in another dtype")
            computed = v3.reply_bytes(Dtype(header.flags), self._hello.n_embd, ask.n_rows)
            if header.n_bytes not in (v3.REPLY_BYTES, computed):
                raise V3Error(f"request {header.request_id} is answered by {header.n_bytes} bytes, not {computed}")
        return None if ask.wanted else Skipped(header, None)

    def _take(self, frame: Frame) -> TrunkEvent | None:
        match frame.kind:
            case FrameKind.HELLO:
                self.peer = v3.decode_hello(frame.payload)
                if self.peer.n_embd != self._hello.n_embd:
                    raise V3Error(f"the worker has n_embd {self.peer.n_embd}, this model {self._hello.n_embd}")
                return Greeted(self.peer)
            case FrameKind.REPLY:
                ask = self._asks[frame.request_id]
                sums, took_us = v3.decode_reply(frame.payload, Dtype(frame.flags), ask.n_rows, self._hello.n_embd)
                if sums is None:
                    raise V3Error(f"request {frame.request_id} was not cancelled")
                self._forget(frame.request_id)
                return Answered(frame.request_id, sums, took_us) if ask.wanted else None
            case FrameKind.ERROR:
                error = v3.decode_error(frame.payload)
                if not frame.request_id:
                    return Complaint(error)
                wanted = self._asks[frame.request_id].wanted
                self._forget(frame.request_id)
                return Failed(frame.request_id, error) if wanted else None
            case FrameKind.PING:
                self.outgoing.append(v3.encode(Frame(FrameKind.PONG, payload=frame.payload)))
            case FrameKind.PONG:
                if self._pinged is None or bytes(frame.payload) != self._pinged:
                    raise V3Error("a PONG that answers no PING")
                self._pinged = None
                return Ponged()
            case FrameKind.GOODBYE:
                return Parting(v3.printable(frame.payload))
        return None

    def _forget(self, request_id: int) -> None:
        self.in_flight_bytes -= self._asks.pop(request_id).cost
