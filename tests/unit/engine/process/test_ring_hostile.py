"""A rank against a neighbour that sends more than it may: what waits here stays bounded."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hash_layers import SIZE, Layers

from kvasir_console.engine.process import ring as ring_module
from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.pipeline import MAX_RING_SEQUENCES
from kvasir_console.engine.process.ring import RingConfig, RingNode
from kvasir_console.errors import KvasirError
from kvasir_console.relay.wire import ring as wire
from kvasir_console.relay.wire.ring import MORE, Frame, FrameKind, Held, Item

from engines import until


class Stuck:
    """A compute thread that is at work for as long as the test lasts."""

    computing_s = 0.0

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def run(self, function: Any) -> Any:
        self.begun.set()
        await asyncio.Event().wait()

    def freed(self) -> None:
        pass


def hello(rank: int) -> bytes:
    payload = wire.Hello(bytes(32), 2, wire.DType.F32, rank, rank + 1, SIZE, rank, SIZE).encode()
    return wire.encode(Frame(FrameKind.HELLO, 1, payload=payload))


async def neighbours(rank: int) -> tuple[RingNode, Stuck, dict[str, asyncio.StreamWriter], list[asyncio.Task[None]]]:
    """A rank whose both edges are joined to this test."""
    layers: Any = Layers(rank)
    compute: Any = Stuck()
    node = RingNode(RingConfig("r", 1, rank, SIZE, SIZE), layers, bytes(32), compute, KvBudget(10**6))
    writers, tasks = {}, []
    for side, role, peer in (("next", b"N", (rank + 1) % SIZE), ("prev", b"P", (rank - 1) % SIZE)):
        ours, theirs = socket.socketpair()
        serve = node.serve_next if side == "next" else node.serve_prev
        tasks.append(asyncio.create_task(serve(*await asyncio.open_connection(sock=ours))))
        reader, writers[side] = await asyncio.open_connection(sock=theirs)
        writers[side].write(role + hello(peer))
        tasks.append(asyncio.create_task(swallow(reader)))
    await until(lambda: node.ready)
    return node, compute, writers, tasks


async def swallow(reader: asyncio.StreamReader) -> None:
    while await reader.read(2**16):
        pass


async def leave(node: RingNode, writers: dict[str, asyncio.StreamWriter], tasks: list[asyncio.Task[None]]) -> None:
    node.leave()
    for writer in writers.values():
        writer.close()
    await asyncio.gather(*tasks, *node._tasks, return_exceptions=True)


async def is_held_up(writer: asyncio.StreamWriter, frame: bytes, most: int) -> bool:
    """Whether a peer that sends ``most`` of these is kept waiting before it is through."""
    for _ in range(most):
        writer.write(frame)
        try:
            await asyncio.wait_for(writer.drain(), 0.5)
        except TimeoutError:
            return True
    return False


async def test_frames_that_are_all_table_count_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame without payload becomes thousands of objects: while the rank computes, few of them are read."""
    monkeypatch.setattr(ring_module, "INBOX_BYTES", 2**22)
    node, compute, writers, tasks = await neighbours(1)
    admit = wire.encode_admit(wire.Admit({"sampling": {}, "capacity": 16, "prompt_length": 2}, (1, 2)))
    rows = wire.Frame(FrameKind.HIDDEN, 1, (Item(4, 9, 0, 2, 1),), bytes(2 * 2 * 4))
    first = wire.encode(Frame(FrameKind.ADMIT, 1, (Item(4, rows=0),), admit)) + wire.encode(rows)
    writers["prev"].write(first)
    await compute.begun.wait()
    roll = wire.encode(Frame(FrameKind.ROLL, 1, tuple(Item(each, rows=0) for each in range(wire.MAX_ITEMS))))
    assert await is_held_up(writers["prev"], roll, 200)
    assert node._inbox.qsize() < 8
    await leave(node, writers, tasks)


async def test_what_is_passed_on_does_not_pile_up_before_a_successor_that_is_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each item of a RELEASE goes on in a frame of its own, for whatever sequence."""
    monkeypatch.setattr(ring_module, "INBOX_BYTES", 2**22)
    node, _, writers, tasks = await neighbours(1)
    writers["next"].write(b"".join(wire.encode(frame) for frame in wire.encode_held(1, {})))
    await until(lambda: node.rows.live)
    tasks[1].cancel()  # the successor reads no more
    edge = node._next
    assert edge is not None
    release = wire.encode(Frame(FrameKind.RELEASE, 1, tuple(Item(each, rows=0) for each in range(wire.MAX_ITEMS))))
    assert await is_held_up(writers["prev"], release, 100)
    assert len(edge._out) <= 2 * wire.MAX_ITEMS
    edge.close("the successor is gone")  # nobody waits for it then
    await until(lambda: not node._inbox.qsize())
    await leave(node, writers, tasks)


async def test_a_successor_cannot_hold_more_sequences_than_a_ring_runs() -> None:
    node, _, writers, tasks = await neighbours(1)
    held = {key: Held(0, 0, 0) for key in range(MAX_RING_SEQUENCES + 1)}
    for frame in wire.encode_held(1, held):
        writers["next"].write(wire.encode(frame))
    await until(lambda: not node.stats()["next_ready"])
    await leave(node, writers, tasks)


async def test_rank_0_cannot_know_more_sequences_than_a_ring_runs() -> None:
    """In several frames, each of which says that another follows: what was said until then would be kept."""
    node, _, writers, tasks = await neighbours(2)
    for key in range(MAX_RING_SEQUENCES + 1):
        item = Item(key, 0, 1, 1, 0)
        frame = Frame(FrameKind.HELD, 1, (item,), wire.encode_tokens([1]), MORE)
        writers["next"].write(wire.encode(frame))
    await until(lambda: not node.stats()["next_ready"])
    assert not node._known_by_next
    await leave(node, writers, tasks)


async def test_an_error_that_is_passed_on_is_no_longer_than_ours() -> None:
    node, _, writers, tasks = await neighbours(1)
    long = wire.encode_error(KvasirError("ring_busy", "x" * 1500))
    padded = long[:-1] + b', "more": "' + b"y" * 50_000 + b'"}'
    writers["prev"].write(wire.encode(Frame(FrameKind.ERROR, 1, (Item(7, rows=0),), padded)))
    await until(lambda: 7 in node.rows.notices._errors)
    kept = node.rows.notices._errors[7]
    assert len(kept) < 4 * len(long)
    assert wire.decode_error(kept).message == "x" * 1500
    await leave(node, writers, tasks)
