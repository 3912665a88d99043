"""Readers of frames, sans-I/O: dispatch on all four wires at both ends, preambles, ring frames and what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Coroutine
from typing import Any

import google_crc32c
import numpy as np

from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.relay.wire import control, dispatch, preamble, ring, ring_frame
from kvasir_console.relay.wire import dispatch_v3 as v3
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.dispatch_ends import Answered, Asked, CancelAsked, TrunkEnd, WorkerEnd
from kvasir_console.relay.wire.dispatch_v3 import HeldSlice, Hello
from kvasir_console.relay.wire.preamble import Kind, Preamble, PreambleError, Wire
from kvasir_console.relay.wire.ring import Admit, Held, Known
from kvasir_console.relay.wire.ring_frame import Frame, FrameDecoder, FrameKind, Item, RingError
from kvasir_console.relay.wire.values import ALL_DTYPES, Dtype

from codec_fuzz import Target, broken

E, N_LOCAL = 8, 4
WORKER = Hello(E, (HeldSlice(0, 0, N_LOCAL), HeldSlice(1, 0, 2)), bytes(32), ALL_DTYPES, 2**16)
EPOCH = 7
RING_HELLO = ring.Hello(bytes(range(32)), E, ring.DType.F32, 4, 8, 12, 1, 3)


class Pieces:
    """A stream whose bytes are all there; what waits for more meets its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    async def readexactly(self, n: int, /) -> bytes:
        piece = self._data[self._at : self._at + n]
        self._at += len(piece)
        if len(piece) < n:
            raise asyncio.IncompleteReadError(piece, n)
        return piece


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    work.close()
    raise AssertionError("it waits though every byte is there")


def request(n_rows: int, n_pairs: int, wire: Wire, seed: int = 0) -> Request:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_rows, E)).astype(np.float32)
    row_idx = rng.integers(0, n_rows, n_pairs).astype(np.int32)
    ids = rng.integers(0, 2, n_pairs).astype(np.int32)
    return Request(wire, rows, row_idx, ids, np.ones(n_pairs, np.float32))


def legacy() -> Target:
    wires = (Wire.V1, Wire.V2, Wire.V2F16)
    samples = tuple(dispatch.encode_request(request(rows, 3, wire), wire) for wire in wires for rows in (1, 3))

    def read(pieces: list[bytes]) -> bool:
        decoder = dispatch.RequestDecoder(E, N_LOCAL, byte_budget=2**16)
        fed = 0
        try:
            for piece in pieces:
                fed += len(piece)
                decoder.feed(piece)
                while (found := decoder.next()) is not None:
                    assert int(found.ids.max()) < N_LOCAL
                    assert int(found.row_idx.max()) < found.n_rows
                assert decoder.buffered_bytes <= fed
                assert decoder.wanted_bytes <= 2**16
            decoder.eof()
        except dispatch.DispatchError:
            assert decoder.buffered_bytes <= fed
            return False
        return True

    return Target("dispatch v1, v2, v2f16: worker", (*samples, b"".join(samples)), read)


def worker_end() -> Target:
    hello = v3.encode_hello(Hello(E))
    asks = [
        b"".join(v3.encode_request(number, number % 2, dtype, request(2, 3, Wire.V3)))
        for number, dtype in enumerate(Dtype, start=1)
    ]
    rest = v3.encode(v3.Frame(v3.FrameKind.CANCEL, 2)) + v3.encode(v3.Frame(v3.FrameKind.PING, payload=b"nonce"))
    bye = v3.encode(v3.Frame(v3.FrameKind.GOODBYE, payload=b"so long"))
    error = v3.encode_error(0, v3.ErrorCode.PROTOCOL, "what")

    def read(pieces: list[bytes]) -> bool:
        end = WorkerEnd(WORKER)
        waiting: list[Asked] = []
        try:
            for piece in pieces:
                for event in end.receive(piece):
                    if isinstance(event, Asked):
                        assert event.request.rows.shape[1] == E
                        assert int(event.request.ids.max()) < WORKER.slices[event.slice].end
                        waiting.append(event)
                    elif isinstance(event, CancelAsked):
                        for each in [each for each in waiting if each.request_id == event.request_id]:
                            waiting.remove(each)
                            end.cancelled(each.request_id)
                if len(waiting) > 2:
                    each = waiting.pop()
                    end.answer(each.request_id, each.request.rows)
                assert 0 <= end.in_flight_bytes <= WORKER.byte_budget
                end.outgoing.clear()
        except v3.V3Error:
            end.last_words(v3.V3Error("enough"))
            return False
        finally:
            assert 0 <= end.in_flight_bytes <= WORKER.byte_budget
        return not end.refused

    samples = (hello + b"".join(asks) + rest + bye, hello + rest + asks[3] + error, hello + asks[0] + asks[1])
    return Target("dispatch v3: worker", samples, read)


def trunk_end() -> Target:
    hello = v3.encode_hello(WORKER)
    sums = np.ones((2, E), np.float32)
    replies = [
        b"".join(v3.encode_reply(number, number % 2, dtype, sums, 5)) for number, dtype in enumerate(Dtype, start=1)
    ]
    rest = v3.encode_error(5, v3.ErrorCode.INTERNAL, "broken") + v3.encode(v3.Frame(v3.FrameKind.PING, payload=b"x"))
    pong = v3.encode(v3.Frame(v3.FrameKind.PONG, payload=b"nonce"))

    opening = len(hello)

    def read(pieces: list[bytes]) -> bool:
        """The greeting comes by itself, since nothing may be answered that was not asked."""
        data = b"".join(pieces)
        end = TrunkEnd(Hello(E))
        asked = False
        answers = 0
        try:
            for piece in (data[:opening], *(data[at : at + 97] for at in range(opening, len(data), 97))):
                for event in end.receive(piece):
                    answers += isinstance(event, Answered)
                if end.peer is not None and not asked:
                    asked = True
                    for number, dtype in enumerate([*Dtype, Dtype.F32], start=1):
                        if end.room(dtype, 2, 3):
                            end.ask(number % 2, dtype, request(2, 3, Wire.V3))
                    end.ping(b"nonce")
                    end.cancel(2)
                end.outgoing.clear()
        except v3.V3Error:
            return False
        finally:
            assert answers <= 4
            assert end.in_flight_bytes >= 0
        return True

    return Target("dispatch v3: trunk", (hello + b"".join(replies) + rest + pong, hello + pong + replies[2]), read)


def preambles() -> Target:
    plain = Preamble(Kind.DISPATCH, "expert-a", "w" * 44, bytes(range(32)), 3, 0, 8, 1, Wire.V2 | Wire.V3)
    more = Preamble(Kind.EXPERTS, "é" * 20, layer=1, begin=0, end=2, more=((2, 0, 4), (5, 1, 2)))

    def read(pieces: list[bytes]) -> bool:
        data = b"".join(pieces)
        try:
            found = at_once(preamble.read_preamble(Pieces(data)))
            assert data.startswith(found.encode()[:4])
            assert len(found.windows) <= preamble.MAX_WINDOWS
            assert Preamble.decode(found.encode()) == found
        except (PreambleError, EOFError):
            return False
        return True

    return Target("session preamble", (plain.encode(), more.encode()), read)


def ring_samples() -> tuple[Frame, ...]:
    """A frame of every kind, as ranks write them."""
    rows = np.arange(3 * E, dtype=np.float32).reshape(3, E)
    admit = Admit({"sampling": {"temperature": 0.5, "seed": 7}, "capacity": 64, "prompt_length": 3}, (5, 6, 7))
    error = ring.encode_error(EngineError("ring_busy", "The ring is busy.", "Wait."))
    return (
        Frame(FrameKind.HELLO, EPOCH, payload=RING_HELLO.encode()),
        Frame(FrameKind.ADMIT, EPOCH, (Item(4, rows=0),), ring.encode_admit(admit)),
        Frame(FrameKind.HIDDEN, EPOCH, (Item(1, 2, 3, 2), Item(4, 5, 6, 1)), ring.encode_hidden(rows), 0, 9, 12),
        Frame(FrameKind.TOKEN, EPOCH, (Item(1), Item(2)), ring.encode_tokens([5, 6])),
        Frame(FrameKind.RELEASE, EPOCH, (Item(9),)),
        Frame(FrameKind.ERROR, EPOCH, (Item(4, rows=0),), error),
        Frame(FrameKind.PING, EPOCH, payload=b"x"),
        Frame(FrameKind.PONG, EPOCH, payload=struct.pack("<d", 1.5)),
        *ring.encode_held(EPOCH, {1: Held(3, 4, 6), 2: Held(0, 0, 0)}),
        *ring.encode_known(EPOCH, {1: Known(3, 4, (5, 6, 7, 8)), 2: Known(0, 2, (1, 2))}),
        Frame(FrameKind.ROLL, EPOCH, (Item(1, rows=0), Item(2, rows=0))),
        ring.encode_lost(EPOCH, (0, 2)),
        ring.encode_progress(EPOCH, ring.Progress(500, 20, 2, 1500)),
    )


def open_payload(frame: Frame) -> None:
    """Read what a frame holds, by everybody who may. Raises ``RingError``."""
    match frame.kind:
        case FrameKind.HELLO:
            theirs = ring.Hello.decode(frame.payload)
            with contextlib.suppress(RingError):
                ring.check_hello(RING_HELLO, theirs)
            ring.check_hello(theirs, RING_HELLO)
        case FrameKind.ADMIT:
            ring.decode_admit(frame)
        case FrameKind.HIDDEN:
            assert ring.decode_hidden(frame, E).shape == (frame.rows, E)
        case FrameKind.TOKEN:
            assert len(ring.decode_tokens(frame)) == len(frame.items)
        case FrameKind.ERROR:
            assert isinstance(ring.decode_error(frame.payload), KvasirError)
        case FrameKind.HELD:
            with contextlib.suppress(RingError):
                ring.decode_held(frame)
            ring.decode_known(frame)
        case FrameKind.LOST:
            assert ring.decode_lost(frame, 3) <= {0, 1, 2}
        case FrameKind.PROGRESS:
            assert ring.decode_progress(frame, 3).rank < 3


NUMBERS = (0, 1, 2, 3, 4, 15, 255, 256, 4096, 4097, 65536, 65537, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def lying(rng: random.Random, frame: Frame) -> bytes:
    """The bytes of a frame with one to three fields changed, its checksum right: nobody of ours could write them."""
    items = [[item.request_id, item.step, item.position, item.rows, item.flags] for item in frame.items]
    payload = bytearray(frame.payload)
    kind, epoch, flags = int(frame.kind), frame.epoch, frame.flags
    count: int | None = None
    size: int | None = None
    for _ in range(rng.randint(1, 3)):
        match rng.randrange(10):
            case 0 | 1 | 2 if items:
                rng.choice(items)[rng.randrange(5)] = rng.choice(NUMBERS)
            case 3 if payload:
                at = rng.randrange(len(payload))
                payload[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS))
            case 4:
                payload = payload[: rng.randrange(len(payload) + 1)] + rng.randbytes(rng.choice([0, 0, 4, 60, 3000]))
            case 5:
                kind = rng.choice([*range(max(FrameKind) + 2), 255])
            case 6:
                epoch, flags = rng.choice([0, frame.epoch, frame.epoch + 1, 2**32 - 1]), rng.choice([0, 1, 2, 65535])
            case 7:
                items = [[*item] for item in items * rng.choice([0, 2, 300])][:5000] or [[1, 0, 0, 1, 0]]
            case 8 if rng.random() < 0.3:
                count, size = rng.choice([None, *NUMBERS]), rng.choice([None, *NUMBERS])
            case 9 if b"{" in payload[:5]:
                payload = payload.replace(b"1", rng.choice([b"1e999", b"-1", b"null", b"[]", b"9" * 30]), 1)
    head = struct.pack(
        "<4sBBHIII",
        *(ring_frame.MAGIC, ring_frame.VERSION, kind, flags, epoch),
        *(len(items) if count is None else count, len(payload) if size is None else size),
    )
    table = b"".join(struct.pack("<QIIII", *item) for item in items)
    body = head + struct.pack("<III", frame.slowest_us, frame.inside_us, 0) + table + payload
    return body + struct.pack("<I", google_crc32c.value(body))


def ring_shape(rng: random.Random) -> bytearray:
    frames = [*ring_samples()]
    data = bytearray()
    for each in rng.choices(frames, k=rng.randint(1, 4)):
        data += lying(rng, each) if rng.random() < 0.7 else ring_frame.encode(each)
    return broken(rng, [bytes(data)], data) if rng.random() < 0.25 else data


def ring_frames() -> Target:
    first = ring.Hello(bytes(range(32)), E, ring.DType.F32, 0, 4, 12, 0, 3)
    frames = (Frame(FrameKind.HELLO, EPOCH, payload=first.encode()), *ring_samples()[1:])

    def read(pieces: list[bytes]) -> bool:
        decoder = FrameDecoder()
        try:
            for piece in pieces:
                decoder.feed(piece)
                while (frame := decoder.next()) is not None:
                    assert frame.rows <= ring_frame.MAX_ROWS
                    if frame.kind is FrameKind.HELLO:
                        ring.check_hello(ring.Hello.decode(frame.payload), RING_HELLO)
                    elif frame.kind is FrameKind.HELD and not frame.payload:
                        ring.decode_held(frame)
                    else:
                        open_payload(frame)
            decoder.eof()
        except RingError:
            return False
        return True

    # A table of items becomes objects that are six times as large.
    samples = tuple(ring_frame.encode(frame) for frame in frames)
    return Target("ring frames and payloads", (*samples, b"".join(samples)), read, shape=ring_shape, factor=24)


def ring_stream() -> Target:
    """The same frames through the reader that edges use, whose next bytes are the next frame's."""
    samples = tuple(ring_frame.encode(frame) for frame in ring_samples())

    def read(pieces: list[bytes]) -> bool:
        stream = Pieces(b"".join(pieces))
        try:
            while True:
                at_once(ring_frame.read_frame(stream))
        except RingError:
            return False
        except EOFError:
            return True

    return Target("ring frames off a stream", samples, read, shape=ring_shape, factor=24)


def control_messages() -> Target:
    messages = ({"id": 1, "verb": "info"}, {"id": 2, "ok": True, "text": "é" * 20}, {"id": 3, "event": "token"})

    def read(pieces: list[bytes]) -> bool:
        stream = Pieces(b"".join(pieces))
        try:
            while True:
                assert isinstance(at_once(control.read_message(stream, limit=2**16)), dict)
        except KvasirError:
            return False
        except EOFError:
            return True

    # The worst JSON: an empty object of three bytes becomes 64 and a reference.
    return Target("control messages", tuple(control.encode(message) for message in messages), read, factor=40)


def targets() -> list[Target]:
    return [
        legacy(),
        worker_end(),
        trunk_end(),
        preambles(),
        ring_frames(),
        ring_stream(),
        control_messages(),
    ]
