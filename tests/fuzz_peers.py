"""Whole ends of a connection against a peer that sends anything: trunk, edge, rank, engine, gateway, hub.

Each input is everything that a peer ever sends on one connection. What an end sends is thrown away; what it must not do
is raise, wait for ever once the peer has left, or lose a task that serves others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import struct
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from fuzz_wire import N_LOCAL, E, lying, request
from hash_layers import SIZE, Inline, Layers

from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.client import DoneEvent, GenerateRequest
from kvasir_console.engine.process.legacy_link import LegacyLink
from kvasir_console.engine.process.link import Reply
from kvasir_console.engine.process.ring import RingConfig, RingNode
from kvasir_console.engine.process.verbs import ENTRY_VERBS, Engine, VerbSession
from kvasir_console.engine.process.worker import SessionStats, Slice, Worker, WorkerError
from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.backends import BackendInfo, RingBackend
from kvasir_console.node.gateway.generation import Generation
from kvasir_console.node.gateway.slots import Slots
from kvasir_console.relay import direct, hub
from kvasir_console.relay.counting import OwnCount, Tally
from kvasir_console.relay.http_requests import HeadError, RequestHead
from kvasir_console.relay.server_socket import ServerSocket
from kvasir_console.relay.wire import control, dispatch, ring, ring_frame
from kvasir_console.relay.wire import dispatch_v3 as v3
from kvasir_console.relay.wire.dispatch_v3 import HeldSlice, Hello
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire
from kvasir_console.relay.wire.ring import Admit, Held, Known
from kvasir_console.relay.wire.ring_frame import Frame, FrameKind, Item
from kvasir_console.relay.wire.values import ALL_DTYPES, Dtype

from codec_fuzz import Target, altered, broken, dumped

TURNS = 400
"""Turns of the loop after which an end that has its whole input must have dealt with it."""
WAIT_S = 20.0
_LOOP: list[asyncio.AbstractEventLoop] = []


class Sink:
    """A connection's way out, to a peer that takes everything."""

    def __init__(self) -> None:
        self.transport = self
        self.closed = False

    def write(self, data: Any) -> None:
        pass

    def writelines(self, pieces: Sequence[Any]) -> None:
        pass

    async def drain(self) -> None:
        await asyncio.sleep(0)
        if self.closed:
            raise ConnectionResetError("closed")

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    async def wait_closed(self) -> None:
        pass


def writer() -> Any:
    return Sink()


def run(work: Coroutine[Any, Any, bool]) -> bool:
    """On a loop of this module, within a bound that no busy machine meets."""
    if not _LOOP:
        _LOOP.append(asyncio.new_event_loop())
    log = logging.getLogger("kvasir_console")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what is refused by the thousand is told by the thousand
    try:
        return _LOOP[0].run_until_complete(asyncio.wait_for(work, WAIT_S))
    finally:
        log.setLevel(level)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def fed(reader: asyncio.StreamReader, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        if piece:
            reader.feed_data(piece)
        await turns()
    reader.feed_eof()


def legacy_trunk() -> Target:
    """The trunk's end of an older wire, with two requests on their way."""
    sums = np.ones((2, E), np.float32)
    samples = tuple(2 * dispatch.encode_reply(wire, sums) for wire in (Wire.V2, Wire.V2F16))

    async def once(wire: Wire, pieces: list[bytes]) -> bool:
        reader = asyncio.StreamReader()
        link = LegacyLink(wire, reader, writer())
        asks = [asyncio.create_task(link.ask(0, request(2, 3, wire))) for _ in range(2)]
        await turns()
        feeding = asyncio.create_task(fed(reader, pieces))
        clean = True
        try:
            await link.receive()
        except (OSError, EOFError, ValueError):
            clean = False
        link.close("the peer left")
        await feeding
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(answer, Reply | OSError) for answer in answers), answers
        assert not link._pending
        return clean and all(isinstance(answer, Reply) for answer in answers)

    def read(pieces: list[bytes]) -> bool:
        size = sum(map(len, pieces))
        return run(once(Wire.V2F16 if size == len(samples[1]) else Wire.V2, pieces))

    return Target("dispatch v1, v2, v2f16: trunk", samples, read)


def v3_trunk() -> Target:
    """A worker's greeting and its answer, as the router's ``Worker`` takes them."""
    preamble = Preamble(Kind.DISPATCH, "expert-a", "wallet", bytes(32), 0, 0, N_LOCAL, more=((1, 0, 2),), wires=Wire.V3)
    hello = v3.encode_hello(
        Hello(E, (HeldSlice(0, 0, N_LOCAL, b"d" * 32), HeldSlice(1, 0, 2)), bytes(32), ALL_DTYPES, 2**16)
    )
    sums = np.ones((2, E), np.float32)
    answer = b"".join(v3.encode_reply(1, 0, Dtype.F32, sums, 5))
    bye = v3.encode(v3.Frame(v3.FrameKind.GOODBYE, payload=b"so long"))
    opening = len(hello)

    async def digest_of(held: Slice) -> bytes:
        return b"d" * 32

    async def once(data: bytes) -> bool:
        stats: dict[Slice, SessionStats] = {}

        def stats_of(held: Slice) -> SessionStats:
            fresh = SessionStats("expert-a", "wallet", held.layer, held.begin, held.end)
            return stats.setdefault(held, fresh)

        reader = asyncio.StreamReader()
        worker = Worker(preamble, Wire.V3, reader, writer(), stats_of, n_embd=E, digest_of=digest_of)
        opened = asyncio.create_task(worker.open())
        reader.feed_data(data[:opening])
        await turns(6)
        if not opened.done():  # its greeting is longer than it should be
            await fed(reader, [data[opening:]])
        try:
            await opened
        except (OSError, ValueError):
            assert worker.broken
            return False
        running = asyncio.create_task(worker.run())
        asked = asyncio.create_task(worker.ask(worker.slices[0].layer, request(2, 1, Wire.V3)))
        await turns()
        if not reader._eof:  # type: ignore[attr-defined]
            await fed(reader, [data[opening:]])
        why = await running
        assert isinstance(why, str)
        assert len(stats) <= 2
        try:
            await asked
        except (OSError, EOFError, ValueError, WorkerError):
            assert not any(each.paid_bytes for each in stats.values())
            return False
        return True

    def read(pieces: list[bytes]) -> bool:
        return run(once(b"".join(pieces)))

    return Target("dispatch v3: a router's worker", (hello + answer, hello + answer + bye), read, factor=12)


def ring_rank(
    name: str, rank: int, attacked: str, honest: bytes, opening: bytes, streams: Sequence[tuple[Frame, ...]]
) -> Target:
    """A rank whose one neighbour says anything while the other behaves."""

    async def once(pieces: list[bytes]) -> bool:
        layers: Any = Layers(rank)
        compute: Any = Inline()
        node = RingNode(RingConfig("r", 1, rank, SIZE, SIZE), layers, bytes(32), compute, KvBudget(10**6))
        readers = {side: asyncio.StreamReader() for side in ("next", "prev")}
        serving = [
            asyncio.create_task(node.serve_next(readers["next"], writer())),
            asyncio.create_task(node.serve_prev(readers["prev"], writer())),
        ]
        try:
            other = "prev" if attacked == "next" else "next"
            readers[other].feed_data(honest)
            for piece in pieces:
                readers[attacked].feed_data(piece)
                await turns()
            for _ in range(TURNS):
                await asyncio.sleep(0)
                if serving[attacked == "prev"].done() or not (readers[attacked]._buffer or node._inbox.qsize()):  # type: ignore[attr-defined]
                    break
            taken = node.ready
            for reader in readers.values():
                reader.feed_eof()
            await asyncio.gather(*serving)
            await turns()
            assert not any(task.done() for task in node._tasks), "a task of the rank ended"
            return taken
        finally:
            node.leave()
            await asyncio.gather(*node._tasks, *serving, return_exceptions=True)

    def read(pieces: list[bytes]) -> bool:
        return run(once(pieces))

    def shape(rng: random.Random) -> bytearray:
        """A real opening, then frames that lie; some inputs are broken anywhere."""
        frames = [*rng.choice(streams)]
        data = bytearray(opening)
        for each in frames if rng.random() < 0.7 or not frames else rng.choices(frames, k=rng.randint(1, 6)):
            data += lying(rng, each) if rng.random() < 0.5 else ring_frame.encode(each)
        return broken(rng, samples, data) if rng.random() < 0.15 else data

    samples = tuple(opening + b"".join(ring_frame.encode(each) for each in frames) for frames in streams)
    return Target(name, samples, read, shape=shape, factor=40, constant=2**20)


def ring_ranks() -> list[Target]:
    def hello(rank: int, role: bytes = b"") -> bytes:
        payload = ring.Hello(bytes(32), 2, ring.DType.F32, rank, rank + 1, SIZE, rank, SIZE).encode()
        return role + ring_frame.encode(Frame(FrameKind.HELLO, 1, payload=payload))

    def said(*frames: Frame) -> bytes:
        return b"".join(ring_frame.encode(frame) for frame in frames)

    admit = ring.encode_admit(Admit({"sampling": {}, "capacity": 16, "prompt_length": 2}, (1, 2)))
    rows = ring.encode_hidden(np.ones((2, 2), np.float32))
    work = (
        Frame(FrameKind.ADMIT, 1, (Item(4, rows=0),), admit),
        Frame(FrameKind.HIDDEN, 1, (Item(4, 9, 0, 2, 1),), rows),
        Frame(FrameKind.ROLL, 1, (Item(4, rows=0),)),
        Frame(FrameKind.PING, 1, payload=struct.pack("<d", 1.0)),
        Frame(FrameKind.RELEASE, 1, (Item(4, rows=0),)),
    )
    held = tuple(ring.encode_held(1, {4: Held(9, 0, 2)}))
    known = tuple(ring.encode_known(1, {4: Known(9, 3, (1, 2, 3))}))
    tokens = Frame(FrameKind.TOKEN, 1, (Item(4, 9, 1, 1),), ring.encode_tokens([3]))
    error = Frame(FrameKind.ERROR, 1, (Item(4, rows=0),), ring.encode_error(KvasirError("ring_busy", "Busy.")))
    return [
        ring_rank(
            "ring: a rank, from its predecessor",
            1,
            "prev",
            hello(2, b"N") + said(*held),
            hello(0, b"P"),
            (work[:1], work[:2], work, work[1:], ()),
        ),
        ring_rank(
            "ring: a rank, from its successor",
            1,
            "next",
            hello(0, b"P") + said(*work[:2]),
            hello(2, b"N"),
            (held, (*held, error), ()),
        ),
        ring_rank(
            "ring: the last rank, from rank 0",
            2,
            "next",
            hello(1, b"P") + said(*work[:2]),
            hello(0, b"N"),
            (known, (*known, error), ()),
        ),
        ring_rank(
            "ring: rank 0, from the last rank",
            0,
            "prev",
            hello(1, b"N") + said(*held),
            hello(2, b"P"),
            ((tokens,), (error, tokens), ()),
        ),
    ]


def messages(samples: Sequence[Sequence[Any]]) -> Any:
    """Streams of control messages: altered ones, some with a length that lies, some broken."""

    def shape(rng: Any) -> bytearray:
        data = bytearray()
        for message in rng.choice(samples):
            body = dumped(rng, altered(rng, message) if rng.random() < 0.4 else message)
            length = len(body) if rng.random() < 0.97 else rng.choice([0, 1, len(body) - 1, 2**16, 2**32 - 1])
            data += struct.pack("<I", max(0, length)) + body
        return broken(rng, [bytes(data)], data) if rng.random() < 0.1 else data

    return shape


def engine_control() -> Target:
    """An engine without a load, asked anything by whoever may use its entry."""
    streams = [
        [{"id": 1, "verb": "info"}, {"id": 2, "verb": "generate", "prompt": "a", "max_tokens": 3}],
        [{"id": 1, "verb": "count_tokens", "messages": [{"role": "user", "content": "a"}]}],
        [{"id": 7, "verb": "cancel", "request": 1}, {"id": 8, "verb": "load", "path": "/etc/passwd"}],
        [{"id": 9, "verb": "generate", "prompt_tokens": [1, 2], "resumed": [3], "key": 5, "max_tokens": 9}],
    ]
    engine: Any = object.__new__(Engine)
    engine.loaded, engine.draining, engine.active, engine.listeners = None, False, 0, set()

    async def once(pieces: list[bytes]) -> bool:
        reader = asyncio.StreamReader()
        session = VerbSession(engine, reader, writer(), allowed=ENTRY_VERBS)
        clean: list[bool] = []
        session._send = send_to(clean)  # type: ignore[method-assign]
        serving = asyncio.create_task(session.run())
        answering: set[asyncio.Task[None]] = set()
        for piece in pieces:
            reader.feed_data(piece)
            for _ in range(8):
                answering |= session._tasks
                await asyncio.sleep(0)
        reader.feed_eof()
        await serving
        done = await asyncio.gather(*answering, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done), done
        return bool(clean)

    def send_to(clean: list[bool]) -> Any:
        async def send(message: Any) -> None:
            control.encode(message)
            clean.append(True)

        return send

    def read(pieces: list[bytes]) -> bool:
        return run(once(pieces))

    samples = tuple(b"".join(control.encode(message) for message in stream) for stream in streams)
    return Target("control: an engine's entry", samples, read, shape=messages(streams), factor=40, constant=2**20)


class Entries:
    """A hub to whose entry a hostile rank 0 is joined."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def entry_connected(self, ring_id: str) -> bool:
        return True

    async def open_entry(self, ring_id: str, timeout_s: float) -> Any:
        reader = asyncio.StreamReader()
        await fed(reader, self._pieces)
        return reader, writer()


PROMPT = {"id": 1, "ok": True, "prompt_tokens": 3, "prompt_token_ids": [1, 2, 3]}
INFO = {"id": 2, "ok": True, "info": {"context_length": 64, "kv_tokens": 64, "whole": {"missing": ""}}}
TOKENS = [{"id": 1, "event": "token", "index": n, "token": 5 + n, "text": "ab"} for n in range(2)]
DONE = {
    "id": 1,
    "event": "done",
    "finish_reason": "stop",
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "tokens": [5, 6],
    "text": "abab",
    "tail": "",
    "rows": 4,
    "pairs_local": 0,
    "pairs_remote": 0,
    "failovers": 0,
    "ttft_ms": 1.0,
    "decode_ms": 1.0,
    "trace_path": None,
    "cached_tokens": 0,
    "decode_steps": 1,
}


def backend_of(pieces: list[bytes]) -> RingBackend:
    planned: Any = SimpleNamespace(plan=SimpleNamespace(ring="r", generation=1))
    clock = itertools.count()
    info = BackendInfo("m", "M", context_limit=64)
    entries: Any = Entries(pieces)
    return RingBackend(info, planned, entries, recover_s=-1.0, clock=lambda: float(next(clock)))


def ring_entry() -> Target:
    """A gateway's request to a ring whose rank 0 answers anything."""
    streams = [
        [PROMPT, INFO, *TOKENS, DONE],
        [INFO, PROMPT, TOKENS[0], TOKENS[0], TOKENS[1], DONE],
        [{"id": 1, "error": {"kind": "EngineError", "code": "queue_full", "message": "Full.", "hint": ""}}],
        [PROMPT, TOKENS[0], {"id": 1, "event": "error", "error": {"code": "ring_broken", "message": "Broken."}}],
    ]

    async def once(pieces: list[bytes]) -> bool:
        backend = backend_of(pieces)
        asked = GenerateRequest(prompt="abc", max_tokens=2)
        generation = Generation(backend, Slots(), asked, "chatcmpl-0", 3)
        end = await generation._generate()
        beat = backend._beats
        assert beat is None or not beat.done() or beat.cancelled() or beat.exception() is None
        await backend.close()
        assert isinstance(end, DoneEvent | KvasirError)
        assert len(generation._tokens) <= 2
        assert all(len(event.text) <= 2**14 for event in generation._events._queue)  # type: ignore[attr-defined]
        return isinstance(end, DoneEvent)

    def read(pieces: list[bytes]) -> bool:
        return run(once(pieces))

    def taken(pieces: list[bytes]) -> bool:
        """The samples that end in an error are as real as the others."""
        data = b"".join(pieces)
        return read(pieces) or data in samples

    samples = tuple(b"".join(control.encode(message) for message in stream) for stream in streams)
    return Target("control: a gateway at a ring's entry", samples, taken, shape=messages(streams), factor=60)


def ring_limits() -> Target:
    """What rank 0 says about itself and about a prompt's length."""
    streams = [
        [
            {**INFO, "id": 1},
            {"id": 2, "ok": True, "tokens": 3, "context_length": 64},
            {"id": 3, "ok": True, "tokens": 4},
        ],
        [{"id": 1, "ok": True, "tokens": 3}, {**INFO, "id": 2}, {"id": 3, "ok": True, "tokens": 4}],
    ]

    async def once(pieces: list[bytes]) -> bool:
        backend = backend_of(pieces)
        clean = True
        for call in (backend.limits, lambda: backend.count_tokens("abc", None)):
            try:
                found = await call()
                if isinstance(found, int):
                    assert 0 <= found < 2**31
                else:
                    assert found.context_length <= 64
            except KvasirError:
                clean = False
        beat = backend._beats
        assert beat is None or not beat.done() or beat.cancelled() or beat.exception() is None
        await backend.close()
        return clean

    def read(pieces: list[bytes]) -> bool:
        return run(once(pieces)) or b"".join(pieces) in samples

    samples = tuple(b"".join(control.encode(message) for message in stream) for stream in streams)
    return Target("control: what rank 0 says of itself", samples, read, shape=messages(streams), factor=60)


HEAD = (
    "GET /api/{path} HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    "Authorization: Bearer token\r\nKvasir-Received: 0123456789abcdef 12\r\n\r\n"
)


def frame(opcode: int, payload: bytes, *, last: bool = True) -> bytes:
    """A masked WebSocket frame, as clients send them (RFC 6455 section 5.2)."""
    mask = b"\x01\x02\x03\x04"
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack(">H", size)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return bytes([(0x80 if last else 0) | opcode]) + length + mask + masked


def hub_session() -> Target:
    """A dial to the hub and what comes on its WebSocket, to where the bytes would be handed on."""
    dials = ("expert-relay?session=expert-a", "ring-relay?controller_id=r&edge=0&role=P&token=abc")
    frames = frame(2, b"P" + b"x" * 200) + frame(9, b"ping") + frame(10, b"0123456789abcdef 5") + frame(1, b"text")
    parts = frame(2, b"begin", last=False) + frame(0, b"end") + frame(8, struct.pack(">H", 1000) + b"bye")
    samples = tuple(HEAD.format(path=path).encode() + frames + parts for path in dials)

    async def once(data: bytes) -> bool:
        raw, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            return False
        head = RequestHead.parse(raw + end)
        if not head.websocket or head.path not in (hub.EXPERT_PATH, hub.RING_PATH):
            return False
        reader = asyncio.StreamReader()
        ws = ServerSocket(reader, writer(), max_frame_bytes=2**16)
        asked = ws.handshake(raw + end)
        if asked is None:
            return False
        dial = hub._dial(asked)
        assert "token" not in dial.query
        assert "token=" not in repr(dial)
        tally = Tally("k", "w")
        tally.settle(hub._header(asked, hub.RECEIVED_HEADER))
        tally.connection = "0123456789abcdef"
        tally.add_tcp2ws(9)
        ws.on_pong = tally.confirm
        ws.welcome({"Kvasir-Connection": tally.enter(0.0)})
        await fed(reader, [rest[at : at + 50] for at in range(0, len(rest), 50)])
        came = 0
        while data := await ws.read():
            came += len(data)
        assert came <= len(rest)
        count = tally.count()
        assert count.confirmed <= count.tcp2ws
        assert isinstance(ws.ending.code, int)
        return ws.ending.code < 1002 or ws.ending.code == 1005

    def read(pieces: list[bytes]) -> bool:
        try:
            return run(once(b"".join(pieces)))
        except (HeadError, hub.Refused):
            return False

    return Target("hub: a dial and its WebSocket", samples, read, factor=12)


def direct_greeting() -> Target:
    """Whoever knocks at a node that listens for its neighbour."""
    longest = direct.encode_greeting("r" * direct.MAX_RING_BYTES, 2**16 - 1, bytes(32))
    samples = (direct.encode_greeting("ring", 1, bytes(range(32))), longest)

    async def once(pieces: list[bytes]) -> bool:
        reader = asyncio.StreamReader()
        feeding = asyncio.ensure_future(fed(reader, pieces))
        try:
            name, edge, ticket = await direct.read_greeting(reader)
        except (EOFError, ValueError):
            return False
        finally:
            await feeding
        assert len(name.encode()) <= direct.MAX_RING_BYTES
        assert 0 <= edge < 2**16
        assert len(ticket) == direct.TICKET_BYTES
        return True

    return Target("direct edges: who knocks", samples, lambda pieces: run(once(pieces)))


def counts() -> Target:
    """The headers by which both ends of a session agree on bytes."""
    samples = (b"0123456789abcdef 12", b"0123456789abcdef 12 7", b"fedcba9876543210 0 0")

    def read(pieces: list[bytes]) -> bool:
        text = b"".join(pieces).decode("latin-1")
        tally, own = Tally("k", "w"), OwnCount(connection="0123456789abcdef", sent=20, received=10)
        tally.enter(0.0)
        tally.connection = "0123456789abcdef"
        tally.add_tcp2ws(9)
        tally.confirm(text.encode())
        answer = tally.settle(text)
        own.opened({"Kvasir-Counted": text, "Kvasir-Connection": text})
        assert 0 <= tally.count().confirmed <= 9
        assert own.total_up <= 20
        assert own.total_down <= 10
        return bool(answer) or own.disputed > 0 or own.lost_up > 0 or text in {each.decode() for each in samples}

    return Target("hub and node: counts", samples, read)


def targets() -> list[Target]:
    return [
        legacy_trunk(),
        v3_trunk(),
        *ring_ranks(),
        engine_control(),
        ring_entry(),
        ring_limits(),
        hub_session(),
        direct_greeting(),
        counts(),
    ]
