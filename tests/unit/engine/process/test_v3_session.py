"""Version 3 from the trunk's ``Worker`` to an ``ExpertServer`` with real experts, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir_console.engine.checkpoint.digest import shard_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.expert_server import ExpertServer
from kvasir_console.engine.process.served import HeldBank
from kvasir_console.engine.process.v3_link import V3Link
from kvasir_console.engine.process.worker import SessionStats, Slice, Worker, WorkerError
from kvasir_console.relay.wire import dispatch_v3 as v3
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.dispatch_v3 import Hello
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire
from kvasir_console.relay.wire.values import Dtype

SHARD = Path(__file__).parents[3] / "data" / "conformance" / "dispatch" / "shard_small-f32.gguf"
MODEL = bytes(range(32))
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def bank() -> ExpertBank:
    with Checkpoint.open(SHARD) as checkpoint:
        layer = int(checkpoint.metadata["kvasir.expert_shard.layer"])
        begin, end = (int(checkpoint.metadata[f"kvasir.expert_shard.expert_{which}"]) for which in ("begin", "end"))
        return ExpertBank.load(checkpoint, layer, begin, end)


@pytest.fixture
def compute() -> Compute:
    made = Compute()
    yield made
    made.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


def link_of(worker: Worker) -> V3Link:
    assert worker._v3 is not None
    return worker._v3


class Held:
    """A compute thread that waits until it is let go."""

    def __init__(self, compute: Compute) -> None:
        self._go, self._begun = threading.Event(), threading.Event()
        self.task = asyncio.ensure_future(compute.run(self._wait))

    def _wait(self) -> None:
        self._begun.set()
        assert self._go.wait(TIMEOUT_S)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, TIMEOUT_S)

    async def release(self) -> None:
        self._go.set()
        await self.task


class Network:
    """Sessions between one server and trunks."""

    def __init__(self, server: ExpertServer, preamble: Preamble) -> None:
        self.server = server
        self.preamble = preamble
        self.served: Preamble | None = None
        """What the worker's own node says, if it says something else."""
        self.accounts: dict[Slice, SessionStats] = {}
        self.tasks: list[asyncio.Task[object]] = []
        self.workers: list[Worker] = []
        self.n_embd = 0

    def stats_of(self, held: Slice) -> SessionStats:
        fresh = SessionStats("expert-a", "wallet", held.layer, held.begin, held.end)
        return self.accounts.setdefault(held, fresh)

    async def pair(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs)

        async def serve() -> None:
            with contextlib.suppress(OSError):  # as the engine's server does
                await self.server.serve(self.served or self.preamble, reader, writer)
            writer.close()

        self.tasks.append(asyncio.create_task(serve()))
        return await asyncio.open_connection(sock=ours)

    async def made(
        self, dtype: Dtype = Dtype.F32, digest_of: Callable[[Slice], Awaitable[bytes]] | None = None
    ) -> Worker:
        reader, writer = await self.pair()
        worker = Worker(
            self.preamble, Wire.V3, reader, writer, self.stats_of, n_embd=self.n_embd, dtype=dtype, digest_of=digest_of
        )
        self.workers.append(worker)
        return worker

    async def worker(self, dtype: Dtype = Dtype.F32) -> Worker:
        worker = await self.made(dtype)
        await worker.open()
        self.tasks.append(asyncio.create_task(worker.run()))
        return worker

    async def close(self) -> None:
        for worker in self.workers:
            worker.drop("the test is over")
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*self.tasks)


@pytest.fixture
async def network(bank: ExpertBank, compute: Compute) -> AsyncIterator[Network]:
    with Checkpoint.open(SHARD) as checkpoint:
        digest = shard_digest(checkpoint)
    second = ExpertBank(bank.layer + 1, 0, 2, bank._experts[1:3])
    server = ExpertServer([HeldBank(bank, MODEL, digest), HeldBank(second, MODEL)], compute)
    preamble = Preamble(
        Kind.DISPATCH,
        "expert-a",
        "wallet",
        MODEL,
        bank.layer,
        bank.begin,
        bank.end,
        more=((second.layer, 0, 2),),
    )
    made = Network(server, preamble)
    made.n_embd = bank.n_embd
    yield made
    await made.close()


def request(bank: ExpertBank, n_rows: int = 3, seed: int = 0, scale: float = 1.0) -> Request:
    """``n_rows`` rows, two pairs each, ids of the whole layer."""
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((n_rows, bank.n_embd)) * scale).astype(np.float32)
    ids = np.stack([rng.permutation(bank.end - bank.begin)[:2] + bank.begin for _ in range(n_rows)])
    weights = rng.random(2 * n_rows).astype(np.float32)
    row_idx = np.repeat(np.arange(n_rows, dtype=np.int32), 2)
    return Request(Wire.V3, rows, row_idx, ids.reshape(-1).astype(np.int32), weights)


def sums(bank: ExpertBank, asked: Request, rows: np.ndarray | None = None) -> np.ndarray:
    given = asked.rows if rows is None else rows
    with torch.inference_mode():
        out = bank.weighted_sum(
            torch.from_numpy(np.ascontiguousarray(given)),
            torch.from_numpy(asked.row_idx.astype(np.int64)),
            torch.from_numpy(asked.ids.astype(np.int64) - bank.begin),
            torch.from_numpy(asked.weights),
        )
    return out.numpy()


async def test_f32_gives_the_banks_own_bits_and_the_account_is_that_of_any_wire(
    network: Network, bank: ExpertBank
) -> None:
    worker = await network.worker()
    asked = [request(bank, rows, seed=rows) for rows in (1, 2, 5)]
    got = await asyncio.gather(*(worker.ask(bank.layer, each) for each in asked))
    for each, answer in zip(asked, got, strict=True):
        assert np.array_equal(answer, sums(bank, each))
    stats = worker.stats[bank.layer]
    assert (stats.requests, stats.rows, stats.pairs, stats.in_flight) == (3, 8, 16, 0)
    assert stats.paid_bytes == 2 * bank.n_embd * 8 + 10 * 16
    assert (stats.wire, stats.dtype, stats.connected) == ("v3", "f32", True)
    assert network.server.served.pairs == 16


@pytest.mark.parametrize(("dtype", "bound"), [(Dtype.F16, 2e-3), (Dtype.BF16, 2e-2), (Dtype.INT8, 3e-2)])
async def test_thrifty_dtypes_cost_precision_and_are_paid_alike(
    network: Network, bank: ExpertBank, dtype: Dtype, bound: float
) -> None:
    worker = await network.worker(dtype)
    asked = request(bank, 6)
    answer, exact = await worker.ask(bank.layer, asked), sums(bank, asked)
    assert 0 < np.abs(answer - exact).max() <= bound * np.abs(exact).max()
    # What the worker computes from is known here to the bit; the rest is the rounding of its answer.
    rows, weights = worker.as_received(asked)
    assert np.array_equal(weights, asked.weights)
    due = sums(bank, asked, rows)
    largest = np.abs(due).max(axis=1, keepdims=True)
    unit = {Dtype.F16: 2**-11, Dtype.BF16: 2**-8, Dtype.INT8: 1 / 254}[dtype]
    assert np.all(np.abs(answer - due) <= unit * largest * (1 + 1e-4) + 2.0**-24)
    assert worker.stats[bank.layer].paid_bytes == 2 * bank.n_embd * 6 + 10 * 12
    assert worker.dtype == dtype.name.lower()


async def test_what_half_precision_cannot_carry_goes_in_f32(network: Network, bank: ExpertBank) -> None:
    worker = await network.worker(Dtype.F16)
    asked = request(bank, 2, scale=1e6)
    assert np.array_equal(await worker.ask(bank.layer, asked), sums(bank, asked))
    assert np.array_equal(worker.as_received(asked)[0], asked.rows)


async def test_one_session_serves_slices_of_several_layers(network: Network, bank: ExpertBank) -> None:
    worker = await network.worker()
    other = bank.layer + 1
    assert worker.slices == (Slice(bank.layer, bank.begin, bank.end), Slice(other, 0, 2))
    assert worker.holds(other) == range(2)
    assert worker.holds(other + 1) is None
    asked = request(bank, 4)
    moved = dataclasses.replace(asked, ids=(np.arange(8, dtype=np.int32) % 2))
    first, second = await asyncio.gather(worker.ask(bank.layer, asked), worker.ask(other, moved))
    assert np.array_equal(first, sums(bank, asked))
    again = dataclasses.replace(moved, ids=moved.ids + 1 + bank.begin)  # the second slice holds experts 1 and 2 of it
    assert np.array_equal(second, sums(bank, again))
    assert [network.accounts[each].pairs for each in worker.slices] == [8, 8]
    assert worker.stats[bank.layer].shard_digest
    assert not worker.stats[other].shard_digest


async def test_several_slices_in_one_process_serve_older_wires_by_what_the_session_is_for(
    network: Network, bank: ExpertBank
) -> None:
    for layer, begin, end, shift in ((bank.layer, bank.begin, bank.end, bank.begin), (bank.layer + 1, 0, 2, 0)):
        network.preamble = Preamble(Kind.EXPERTS, "expert-a", "wallet", MODEL, layer, begin, end)
        reader, writer = await network.pair()
        worker = Worker(network.preamble, Wire.V2, reader, writer, network.stats_of, n_embd=bank.n_embd)
        network.workers.append(worker)
        await worker.open()
        network.tasks.append(asyncio.create_task(worker.run()))
        asked = dataclasses.replace(request(bank, 4), ids=np.arange(8, dtype=np.int32) % 2 + shift)
        in_bank = asked if shift or layer == bank.layer else dataclasses.replace(asked, ids=asked.ids + 1 + bank.begin)
        assert np.array_equal(await worker.ask(layer, asked), sums(bank, in_bank))


async def test_a_request_that_is_refused_fails_alone(network: Network, bank: ExpertBank) -> None:
    worker = await network.worker()
    worker.slices = (Slice(bank.layer, bank.begin, bank.end + 1),)  # a trunk that is mistaken
    asked = request(bank, 1)
    wrong = dataclasses.replace(asked, ids=np.full(2, bank.end, np.int32))
    refused, fine = await asyncio.gather(
        worker.ask(bank.layer, wrong), worker.ask(bank.layer, asked), return_exceptions=True
    )
    assert isinstance(refused, WorkerError)
    assert refused.reason == "request"
    assert np.array_equal(fine, sums(bank, asked))
    assert not worker.broken
    assert worker.stats[bank.layer].requests == 1


async def test_a_worker_that_fails_says_so_and_goes_on(
    network: Network, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await network.worker()
    asked = request(bank, 1)
    with monkeypatch.context() as patched:
        patched.setattr(bank, "weighted_sum", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory at 0x7f")))
        with pytest.raises(WorkerError, match="the worker failed: RuntimeError") as caught:
            await worker.ask(bank.layer, asked)
    assert caught.value.reason == "internal"
    assert np.array_equal(await worker.ask(bank.layer, asked), sums(bank, asked))


async def test_a_session_that_cannot_answer_any_more_ends(
    network: Network, bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await network.worker()
    (session,) = network.server._sessions

    def broken(*_: object) -> None:
        raise ConnectionResetError("the trunk's socket is gone")

    monkeypatch.setattr(session._end, "answer", broken)
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(worker.ask(bank.layer, request(bank, 1)), TIMEOUT_S)
    assert not network.server._sessions


async def test_a_cancelled_request_is_not_computed_and_frees_its_room(
    network: Network, bank: ExpertBank, compute: Compute
) -> None:
    worker = await network.worker()
    held = Held(compute)
    await held.begun()
    asks = [asyncio.create_task(worker.ask(bank.layer, request(bank, 2, seed))) for seed in range(3)]
    link = link_of(worker)
    await until(lambda: link._end.in_flight == 3)
    asks[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asks[2]
    await until(lambda: link._end.in_flight == 2)  # the worker let go of it while it was busy
    await held.release()
    for seed, ask in enumerate(asks[:2]):
        assert np.array_equal(await ask, sums(bank, request(bank, 2, seed)))
    assert worker.stats[bank.layer].requests == 2
    assert network.server.served.cancelled == 1
    assert network.server.served.requests == 2
    assert link._end.in_flight_bytes == 0


async def test_the_workers_byte_budget_is_kept(bank: ExpertBank, compute: Compute) -> None:
    one = v3.request_bytes(Dtype.F32, bank.n_embd, 2, 4)
    budget = 2 * v3.cost_bytes(Dtype.F32, bank.n_embd, one)
    server = ExpertServer([HeldBank(bank, MODEL)], compute, byte_budget=budget)
    preamble = Preamble(Kind.DISPATCH, "expert-a", "wallet", MODEL, bank.layer, bank.begin, bank.end)
    network = Network(server, preamble)
    network.n_embd = bank.n_embd
    worker = await network.worker()
    held = Held(compute)
    await held.begun()
    asks = [asyncio.create_task(worker.ask(bank.layer, request(bank, 2, seed))) for seed in range(6)]
    for _ in range(50):
        await asyncio.sleep(0.001)
        assert link_of(worker)._end.in_flight_bytes <= budget
    assert link_of(worker)._end.in_flight == 2
    asks[4].cancel()  # it waits for room
    await held.release()
    for seed in (0, 1, 2, 3, 5):
        assert np.array_equal(await asks[seed], sums(bank, request(bank, 2, seed)))
    assert server.served.rejected == 0
    assert worker.fits(2, 4)
    assert not worker.fits(20, 40)
    with pytest.raises(ValueError, match="more than this worker takes"):
        await worker.ask(bank.layer, request(bank, 20))
    await network.close()


async def test_draining_answers_what_is_asked_and_then_parts(
    network: Network, bank: ExpertBank, compute: Compute
) -> None:
    worker = await network.worker()
    running = network.tasks[-1]
    held = Held(compute)
    await held.begun()
    asks = [asyncio.create_task(worker.ask(bank.layer, request(bank, 2, seed))) for seed in range(2)]
    await until(lambda: bool(worker.in_flight))
    draining = asyncio.create_task(network.server.drain(TIMEOUT_S))
    await until(lambda: worker.draining)
    assert worker.holds(bank.layer) is None
    assert not draining.done()
    await held.release()
    for seed, ask in enumerate(asks):
        assert np.array_equal(await ask, sums(bank, request(bank, 2, seed)))
    assert await draining
    assert await running == "the worker leaves: the worker is being stopped"
    assert worker.broken
    late = await network.made()
    await late.open()  # a trunk that dials now is told at once
    assert await late.run() == "the worker leaves: the worker is being stopped"


async def test_a_drain_that_takes_too_long_says_so(network: Network, bank: ExpertBank, compute: Compute) -> None:
    worker = await network.worker()
    held = Held(compute)
    await held.begun()
    asked = asyncio.create_task(worker.ask(bank.layer, request(bank, 1)))
    await until(lambda: bool(worker.in_flight))
    assert not await network.server.drain(0.05)
    await held.release()
    await asked


async def test_a_trunk_that_goes_leaves_nothing_behind(network: Network, bank: ExpertBank, compute: Compute) -> None:
    worker = await network.worker()
    held = Held(compute)
    await held.begun()
    asks = [asyncio.create_task(worker.ask(bank.layer, request(bank, 2, seed))) for seed in range(4)]
    await until(lambda: worker.in_flight == 16)
    await asyncio.sleep(0.02)
    worker.drop("the trunk has had enough")
    for ask in asks:
        with pytest.raises(ConnectionResetError, match="had enough"):
            await ask
    await held.release()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*network.tasks)
    assert network.server.served.requests <= 4
    assert not network.server._sessions


async def test_a_bad_stream_is_told_why_and_closed(network: Network, bank: ExpertBank) -> None:
    reader, writer = await network.pair()
    writer.write(v3.OPENING + v3.encode_header(v3.FrameKind.PING, 0))
    said = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    assert said.startswith(v3.OPENING)
    assert b"begins with one HELLO" in said
    writer.close()
    assert network.server.served.rejected == 1
    worker = await network.made()
    link_of(worker)._end.outgoing[0] = v3.encode_hello(Hello(bank.n_embd, versions=(4, 5)))
    with pytest.raises(ConnectionResetError, match="the peer speaks versions 4 to 5"):
        await worker.open()


async def test_a_worker_of_another_model_or_with_other_bytes_is_refused(network: Network, bank: ExpertBank) -> None:
    network.served = network.preamble
    network.preamble = dataclasses.replace(network.preamble, model_digest=bytes(32))
    with pytest.raises(ValueError, match="another model"):
        await (await network.made()).open()
    network.preamble = network.served

    async def other(_held: Slice) -> bytes:
        return b"\1" * 32

    with pytest.raises(ValueError, match="not those of this model"):
        await (await network.made(digest_of=other)).open()

    async def unknown(_held: Slice) -> bytes:
        return bytes(32)

    worker = await network.made(digest_of=unknown)
    await worker.open()
    network.tasks.append(asyncio.create_task(worker.run()))


async def test_only_what_the_hub_admitted_is_asked_for(network: Network, bank: ExpertBank) -> None:
    network.served = network.preamble
    network.preamble = dataclasses.replace(network.preamble, more=())
    worker = await network.worker()
    assert worker.slices == (Slice(bank.layer, bank.begin, bank.end),)
    network.preamble = dataclasses.replace(network.preamble, begin=bank.begin + 1)
    refused = await network.made()
    with pytest.raises(ValueError, match="none of the experts"):
        await refused.open()
    assert refused.broken


async def test_a_silent_worker_is_given_up_and_a_lively_one_is_timed(bank: ExpertBank) -> None:
    now = 0.0
    ours, theirs = socket.socketpair()
    far_reader, far_writer = await asyncio.open_connection(sock=theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    link = V3Link(Hello(8), Dtype.INT8, reader, writer, ping_every_s=0.001, dead_after_s=10.0, clock=lambda: now)
    far_writer.write(v3.encode_hello(Hello(8, dtypes=Dtype.F32.bit)))
    assert (await link.open()).n_embd == 8
    assert link.dtype is Dtype.F32  # all that the worker offers
    running = asyncio.create_task(link.receive())
    far = v3.FrameReader(lambda _: None)

    async def ping() -> v3.Frame:
        while True:
            for frame in far.feed(await far_reader.read(2**16)):
                if isinstance(frame, v3.Frame) and frame.kind is v3.FrameKind.PING:
                    return frame

    first = await ping()
    now = 0.25
    far_writer.write(v3.encode(v3.Frame(v3.FrameKind.PONG, payload=first.payload)))
    await ping()
    assert link.ping_ms == 250.0
    now = 30.0  # the trunk itself was stopped, or the machine slept: that is not the worker's silence
    await asyncio.sleep(0.02)
    assert not running.done()
    for _ in range(19):
        now += 0.5
        await asyncio.sleep(0.005)
        assert not running.done()
    now += 0.5
    with pytest.raises(ConnectionAbortedError, match="no sign of life for 10 s"):
        await asyncio.wait_for(running, TIMEOUT_S)
    link.close("gone")
    far_writer.close()


async def test_a_worker_that_wants_pongs_and_reads_none_is_not_read_either() -> None:
    """What it is owed would else grow for as long as it asks."""
    ours, theirs = socket.socketpair()
    far_reader, far_writer = await asyncio.open_connection(sock=theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    link = V3Link(Hello(8), Dtype.F32, reader, writer)
    far_writer.write(v3.encode_hello(Hello(8)))
    await link.open()
    far_reader._transport.pause_reading()  # type: ignore[attr-defined]
    running = asyncio.create_task(link.receive())
    pings = 1000 * v3.encode(v3.Frame(v3.FrameKind.PING, payload=bytes(64)))
    stuck, sent = False, 0
    while not stuck and sent < 2**26:
        far_writer.write(pings)
        sent += len(pings)
        try:
            await asyncio.wait_for(far_writer.drain(), 0.5)
        except TimeoutError:
            stuck = True
    assert stuck
    assert writer.transport.get_write_buffer_size() < 2**20
    far_reader._transport.resume_reading()  # type: ignore[attr-defined]
    swallowing = asyncio.create_task(swallow(far_reader))
    await asyncio.wait_for(far_writer.drain(), TIMEOUT_S)  # it reads again, and is read again
    link.close("enough")
    far_writer.close()
    await asyncio.gather(running, swallowing, return_exceptions=True)


async def swallow(reader: asyncio.StreamReader) -> None:
    while await reader.read(2**16):
        pass


async def test_no_greeting_in_time_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    link = V3Link(Hello(8), Dtype.F32, reader, writer)
    with pytest.raises(TimeoutError):
        await link.open(timeout_s=0.01)
    link.close("")
    theirs.close()
