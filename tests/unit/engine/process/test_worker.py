"""The trunk's end of a worker session, against a peer that reads the wire with its own decoder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvasir_console.engine.process.worker import SessionStats, Slice, Worker, WorkerError, choose_wire
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire
from kvasir_console.relay.wire.values import Dtype

E, LAYER, BEGIN, END = 8, 3, 4, 8
PREAMBLE = Preamble(Kind.DISPATCH, "expert-a", "wallet", bytes(32), LAYER, BEGIN, END)


@dataclass
class Peer:
    """The far end: takes whole requests, answers when told to."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __post_init__(self) -> None:
        self.decoder = dispatch.RequestDecoder(E, END - BEGIN)
        self.reads: list[int] = []

    async def request(self) -> dispatch.Request:
        while (request := self.decoder.next()) is None:
            data = await self.reader.read(2**20)
            assert data, "the trunk left"
            self.reads.append(len(data))
            self.decoder.feed(data)
        return request

    def answer(self, request: dispatch.Request) -> None:
        """Each expert ``i`` (local) multiplies its row by ``i + 1``."""
        raw = request.rows[request.row_idx] * (request.ids[:, None] + 1)
        if request.weights is None:
            out = raw
        else:
            out = np.zeros_like(request.rows)
            np.add.at(out, request.row_idx, raw * request.weights[:, None])
        self.writer.write(dispatch.encode_reply(request.wire, out.astype(np.float32)))


@dataclass
class Joint:
    worker: Worker
    peer: Peer
    stats: SessionStats
    running: asyncio.Task[str]


@pytest.fixture
async def joint(request: pytest.FixtureRequest) -> AsyncIterator[Joint]:
    wire = getattr(request, "param", Wire.V2)
    ours, theirs = socket.socketpair()
    peer = Peer(*await asyncio.open_connection(sock=theirs))
    accounts: dict[Slice, SessionStats] = {}

    def stats_of(held: Slice) -> SessionStats:
        fresh = SessionStats("expert-a", "wallet", held.layer, held.begin, held.end)
        return accounts.setdefault(held, fresh)

    worker = Worker(PREAMBLE, wire, *await asyncio.open_connection(sock=ours), stats_of, n_embd=E)
    running = asyncio.create_task(worker.run())
    yield Joint(worker, peer, accounts[Slice(LAYER, BEGIN, END)], running)
    worker.drop("the test is over")
    await running
    peer.writer.close()


def request(rows: int = 2, scale: float = 1.0) -> dispatch.Request:
    """``rows`` rows, two pairs each, experts 5 and 7 of the layer."""
    states = (np.arange(rows * E, dtype=np.float32).reshape(rows, E) + 1) * np.float32(scale)
    row_idx = np.repeat(np.arange(rows, dtype=np.int32), 2)
    ids = np.tile(np.array([5, 7], np.int32), rows)
    weights = np.tile(np.array([0.25, 0.5], np.float32), rows)
    return dispatch.Request(Wire.V2, states, row_idx, ids, weights)


def expected(sent: dispatch.Request) -> np.ndarray:
    """0.25 of twice a row and 0.5 of four times a row: exact in binary."""
    return sent.rows * np.float32(2.5)


@pytest.mark.parametrize("joint", [Wire.V1, Wire.V2, Wire.V2F16], indirect=True)
async def test_sums_and_account_are_the_same_on_every_wire(joint: Joint) -> None:
    sent = request()
    asked = asyncio.create_task(joint.worker.ask(LAYER, sent))
    joint.peer.answer(await joint.peer.request())
    assert np.array_equal(await asked, expected(sent))
    assert (joint.stats.requests, joint.stats.rows, joint.stats.pairs) == (1, 2, 4)
    assert joint.stats.paid_bytes == 2 * E * 2 + 10 * 4
    assert joint.stats.in_flight == 0
    assert joint.worker.rtt_ms is not None


@pytest.mark.parametrize("joint", [Wire.V2F16], indirect=True)
async def test_values_beyond_half_precision_leave_in_f32(joint: Joint) -> None:
    sent = request(scale=65536.0)
    asked = asyncio.create_task(joint.worker.ask(LAYER, sent))
    arrived = await joint.peer.request()
    assert arrived.wire is Wire.V2
    joint.peer.answer(arrived)
    assert np.array_equal(await asked, expected(sent))


async def test_requests_of_one_turn_leave_in_one_write(joint: Joint) -> None:
    sent = [request(rows) for rows in (1, 2, 3)]
    asked = [asyncio.create_task(joint.worker.ask(LAYER, each)) for each in sent]
    arrived = [await joint.peer.request() for _ in sent]
    assert len(joint.peer.reads) == 1
    for each in arrived:
        joint.peer.answer(each)
    for each, task in zip(sent, asked, strict=True):
        assert np.array_equal(await task, expected(each))


async def test_a_late_reply_of_a_cancelled_request_is_swallowed_and_earns_nothing(joint: Joint) -> None:
    late = asyncio.create_task(joint.worker.ask(LAYER, request(3)))
    first = await joint.peer.request()
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    sent = request(1, 3.0)
    asked = asyncio.create_task(joint.worker.ask(LAYER, sent))
    second = await joint.peer.request()
    joint.peer.answer(first)
    joint.peer.answer(second)
    assert np.array_equal(await asked, expected(sent))
    assert (joint.stats.requests, joint.stats.rows, joint.stats.in_flight) == (1, 1, 0)
    assert not joint.worker.broken


async def test_unpaid_work_is_acknowledged_by_its_caller(joint: Joint) -> None:
    sent = request()
    asked = asyncio.create_task(joint.worker.ask(LAYER, sent, pay=False))
    joint.peer.answer(await joint.peer.request())
    await asked
    assert joint.stats.paid_bytes == joint.stats.requests == 0
    joint.worker.acknowledge(LAYER, sent)
    assert joint.stats.paid_bytes == 2 * E * 2 + 10 * 4


async def test_values_that_are_not_finite_are_refused_and_the_session_lives(joint: Joint) -> None:
    asked = asyncio.create_task(joint.worker.ask(LAYER, request(1)))
    await joint.peer.request()
    joint.peer.writer.write(np.full((1, E), np.nan, np.float32).tobytes())
    with pytest.raises(WorkerError) as caught:
        await asked
    assert caught.value.reason == "not_finite"
    assert joint.stats.paid_bytes == 0
    assert not joint.worker.broken


async def test_bytes_nobody_asked_for_end_the_session(joint: Joint) -> None:
    joint.peer.writer.write(b"x")
    assert await joint.running == "the worker sent bytes that nobody asked for"
    assert joint.worker.broken
    assert not joint.stats.connected
    assert joint.stats.paid_bytes == 0


async def test_a_lost_session_fails_what_waits_and_what_comes(joint: Joint) -> None:
    asked = asyncio.create_task(joint.worker.ask(LAYER, request()))
    await joint.peer.request()
    joint.peer.writer.close()
    with pytest.raises(OSError, match="closed the stream"):
        await asked
    with pytest.raises(OSError, match="closed"):
        await joint.worker.ask(LAYER, request())
    assert joint.stats.in_flight == 0


async def test_a_layer_or_expert_it_does_not_hold_is_not_sent(joint: Joint) -> None:
    assert joint.worker.holds(LAYER) == range(BEGIN, END)
    assert joint.worker.holds(LAYER + 1) is None
    with pytest.raises(ValueError, match="holds no experts of layer 4"):
        await joint.worker.ask(LAYER + 1, request())
    outside = dispatch.Request(
        Wire.V2, np.ones((1, E), np.float32), np.zeros(1, np.int32), np.array([3], np.int32), np.ones(1, np.float32)
    )
    with pytest.raises(dispatch.DispatchError):
        await joint.worker.ask(LAYER, outside)
    assert joint.stats.in_flight == 0


@pytest.mark.parametrize(
    ("wanted", "spoken", "dtype", "wire"),
    [
        (Wire.V3, Wire.V1 | Wire.V2 | Wire.V2F16 | Wire.V3, Dtype.INT8, Wire.V3),
        (Wire.V3, Wire.V2 | Wire.V2F16, Dtype.F32, Wire.V2),
        (Wire.V3, Wire.V2 | Wire.V2F16, Dtype.INT8, Wire.V2F16),
        (Wire.V3, Wire.V2, Dtype.F16, Wire.V2),
        (Wire.V2F16, Wire.V2 | Wire.V3, Dtype.F32, Wire.V2),
        (Wire.V1, Wire.V1 | Wire.V2, Dtype.F32, Wire.V1),
    ],
)
def test_the_nearest_wire_that_both_speak(wanted: Wire, spoken: Wire, dtype: Dtype, wire: Wire) -> None:
    assert choose_wire(wanted, spoken, dtype) is wire
