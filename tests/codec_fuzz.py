"""Fuzzing of every codec that reads what a peer sends: broken copies of real streams, in pieces, under a memory bound.

A codec passes an input by reading it or by raising its own error. It fails by any other exception, by a hang (the
caller's timeout), by keeping more than it was fed, or by allocating more than ``BOUND_BYTES`` over what it was fed.
"""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import google_crc32c
import numpy as np

from kvasir_console.relay.wire import dispatch, ring_frame
from kvasir_console.relay.wire import dispatch_v3 as v3
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.dispatch_ends import Asked, CancelAsked, TrunkEnd, WorkerEnd
from kvasir_console.relay.wire.dispatch_v3 import HeldSlice, Hello
from kvasir_console.relay.wire.preamble import Kind, Preamble, PreambleError, Wire
from kvasir_console.relay.wire.ring_frame import Frame, FrameDecoder, FrameKind, Item, RingError
from kvasir_console.relay.wire.values import ALL_DTYPES, Dtype

E, N_LOCAL = 8, 4
BOUND_BYTES = 2**18
WORKER = Hello(E, (HeldSlice(0, 0, N_LOCAL), HeldSlice(1, 0, 2)), bytes(32), ALL_DTYPES, 2**16)
# What an attacker tries first where a count or a length stands.
_NUMBERS = (0, 1, 2, 3, 127, 128, 255, 256, 8192, 8193, 65535, 65536, 65537, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1)


@dataclass(frozen=True)
class Target:
    """A codec under attack: real streams, and what reads pieces of one."""

    name: str
    samples: tuple[bytes, ...]
    read: Callable[[list[bytes]], None]
    mend: Callable[[bytearray, random.Random], None] = lambda _data, _rng: None
    """Makes a broken stream pass what guards the rest, such as a checksum."""


def request(n_rows: int, n_pairs: int, wire: Wire, seed: int = 0) -> Request:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_rows, E)).astype(np.float32)
    row_idx = rng.integers(0, n_rows, n_pairs).astype(np.int32)
    ids = rng.integers(0, 2, n_pairs).astype(np.int32)
    return Request(wire, rows, row_idx, ids, np.ones(n_pairs, np.float32))


def legacy() -> Target:
    wires = (Wire.V1, Wire.V2, Wire.V2F16)
    samples = tuple(dispatch.encode_request(request(rows, 3, wire), wire) for wire in wires for rows in (1, 3))

    def read(pieces: list[bytes]) -> None:
        decoder = dispatch.RequestDecoder(E, N_LOCAL, byte_budget=2**16)
        fed = 0
        try:
            for piece in pieces:
                decoder.feed(piece)
                fed += len(piece)
                while decoder.next() is not None:
                    pass
                assert decoder.buffered_bytes <= fed
            decoder.eof()
        except dispatch.DispatchError:
            assert decoder.buffered_bytes <= fed + len(piece)

    return Target("dispatch v1, v2, v2f16", (*samples, b"".join(samples)), read)


def worker_end() -> Target:
    hello = v3.encode_hello(Hello(E))
    asks = [
        b"".join(v3.encode_request(number, number % 2, dtype, request(2, 3, Wire.V3)))
        for number, dtype in enumerate(Dtype, start=1)
    ]
    rest = v3.encode(v3.Frame(v3.FrameKind.CANCEL, 2)) + v3.encode(v3.Frame(v3.FrameKind.PING, payload=b"nonce"))
    bye = v3.encode(v3.Frame(v3.FrameKind.GOODBYE, payload=b"so long"))
    error = v3.encode_error(0, v3.ErrorCode.PROTOCOL, "what")

    def read(pieces: list[bytes]) -> None:
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
            pass
        assert 0 <= end.in_flight_bytes <= WORKER.byte_budget

    samples = (hello + b"".join(asks) + rest + bye, hello + rest + asks[3] + error, hello + asks[0] + asks[1])
    return Target("dispatch v3, worker", samples, read)


def trunk_end() -> Target:
    hello = v3.encode_hello(WORKER)
    sums = np.ones((2, E), np.float32)
    replies = [
        b"".join(v3.encode_reply(number, number % 2, dtype, sums, 5)) for number, dtype in enumerate(Dtype, start=1)
    ]
    rest = v3.encode_error(5, v3.ErrorCode.INTERNAL, "broken") + v3.encode(v3.Frame(v3.FrameKind.PING, payload=b"x"))
    pong = v3.encode(v3.Frame(v3.FrameKind.PONG, payload=b"nonce"))

    def read(pieces: list[bytes]) -> None:
        end = TrunkEnd(Hello(E))
        asked = False
        answers = 0
        try:
            for piece in pieces:
                for event in end.receive(piece):
                    answers += type(event).__name__ == "Answered"
                if end.peer is not None and not asked:
                    asked = True
                    for number, dtype in enumerate([*Dtype, Dtype.F32], start=1):
                        if end.room(dtype, 2, 3):
                            end.ask(number % 2, dtype, request(2, 3, Wire.V3))
                    end.ping(b"nonce")
                    end.cancel(2)
                end.outgoing.clear()
        except v3.V3Error:
            pass
        assert answers <= 4
        assert end.in_flight_bytes >= 0

    return Target("dispatch v3, trunk", (hello + b"".join(replies) + rest + pong, hello + pong + replies[2]), read)


def preambles() -> Target:
    plain = Preamble(Kind.DISPATCH, "expert-a", "w" * 44, bytes(range(32)), 3, 0, 8, 1, Wire.V2 | Wire.V3)
    more = Preamble(Kind.EXPERTS, "é" * 20, layer=1, begin=0, end=2, more=((2, 0, 4), (5, 1, 2)))

    def read(pieces: list[bytes]) -> None:
        data = b"".join(pieces)
        with contextlib.suppress(PreambleError):
            assert len(Preamble.decode(data).encode()) == len(data)

    return Target("preamble", (plain.encode(), more.encode()), read)


def ring_frames() -> Target:
    frames = (
        Frame(FrameKind.HIDDEN, 7, (Item(1, 2, 3, 2), Item(4, 5, 6, 1)), bytes(3 * 4 * E)),
        Frame(FrameKind.TOKEN, 7, (Item(1), Item(2)), struct.pack("<ii", 5, 6)),
        Frame(FrameKind.RELEASE, 7, (Item(9),)),
        Frame(FrameKind.PING, 7, payload=b"x"),
    )

    def read(pieces: list[bytes]) -> None:
        decoder = FrameDecoder()
        try:
            for piece in pieces:
                decoder.feed(piece)
                while decoder.next() is not None:
                    pass
            decoder.eof()
        except RingError:
            pass

    def mend(data: bytearray, rng: random.Random) -> None:
        """Most checksums are made right, or nothing behind them would be seen."""
        if len(data) >= ring_frame.HEADER_BYTES + 4 and rng.random() < 0.8:
            data[-4:] = struct.pack("<I", google_crc32c.value(bytes(data[:-4])))

    return Target("ring frames", tuple(ring_frame.encode(frame) for frame in frames), read, mend)


def targets() -> list[Target]:
    return [legacy(), worker_end(), trunk_end(), preambles(), ring_frames()]


def broken(rng: random.Random, samples: tuple[bytes, ...]) -> bytearray:
    """A real stream with one to four things done to it."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 16))
            case 3:
                del data[at : at + rng.randint(1, 16)]
            case 4:  # a number where one may stand
                width, code = rng.choice([(2, "<H"), (4, "<I"), (4, "<I"), (8, "<Q")])
                at -= at % 2
                number = rng.choice(_NUMBERS) % 2 ** (8 * width)
                data[at : at + width] = struct.pack(code, number)
            case 5:  # a part of another stream
                other = rng.choice(samples)
                begin = rng.randrange(len(other))
                data[at:at] = other[begin : begin + rng.randint(1, 64)]
            case 6:
                data += data[at : at + rng.randint(1, 200)]
            case _:
                data[at : at + 8] = rng.randbytes(8)
    return data


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """The stream in one to five pieces."""
    edges = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(5)))
    return [data[begin:end] for begin, end in zip([0, *edges], [*edges, len(data)], strict=True)]


def fuzz(target: Target, count: int, seed: int = 0) -> None:
    """Attack a codec ``count`` times. Raises ``AssertionError`` with the input that it does not stand."""
    rng = random.Random(f"{target.name}:{seed}")
    for sample in target.samples:
        target.read([sample])
    tracemalloc.start()
    try:
        for number in range(count):
            data = broken(rng, target.samples)
            target.mend(data, rng)
            pieces = cut(rng, bytes(data))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                target.read(pieces)
            except Exception as error:
                raise AssertionError(f"{target.name}, input {number}: {error!r} for {data.hex()}") from error
            grown = tracemalloc.get_traced_memory()[1] - before
            assert grown <= BOUND_BYTES + 4 * len(data), (
                f"{target.name}, input {number}: {grown} bytes for {data.hex()}"
            )
    finally:
        tracemalloc.stop()
