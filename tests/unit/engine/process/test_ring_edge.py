"""An edge's end: what it says first, whom it answers, when it gives its peer up, and epochs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from kvasir_console.engine.process.ring_edge import MAX_UNREAD_BYTES, Edge, StaleError
from kvasir_console.relay.wire import ring as wire
from kvasir_console.relay.wire.ring import Frame, FrameKind, Hello

from engines import until

HELLO = Hello(bytes(32), 8, wire.DType.F32, 0, 1, 2, 0, 2).encode()
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[Streams, Streams]]:
    near, far = socket.socketpair()
    one, other = await asyncio.open_connection(sock=near), await asyncio.open_connection(sock=far)
    try:
        yield one, other
    finally:
        for _, writer in (one, other):
            writer.close()


def hello(epoch: int = 3) -> Frame:
    return Frame(FrameKind.HELLO, epoch, payload=HELLO)


async def ready(edge: Edge, frame: Frame) -> None:
    if frame.kind is FrameKind.HELLO:
        edge.ready = True


async def test_the_role_and_a_hello_come_first_and_pings_are_answered() -> None:
    async with pair() as (mine, (reader, writer)):
        edge = Edge("next", *mine)
        running = asyncio.create_task(edge.run(b"P", b"N", hello(), ready))
        assert await reader.readexactly(1) == b"P"
        assert (await wire.read_frame(reader)) == hello()
        ping = Frame(FrameKind.PING, 3, payload=b"still there")
        writer.write(b"N" + wire.encode(hello()) + wire.encode(ping))
        assert await wire.read_frame(reader) == Frame(FrameKind.PONG, 3, payload=b"still there")
        writer.close()
        assert await running != ""
        assert edge.closed


@pytest.mark.parametrize("first", [b"P" + wire.encode(hello()), b"N" + wire.encode(Frame(FrameKind.HELD, 3))])
async def test_another_role_or_a_frame_before_hello_ends_the_edge(first: bytes) -> None:
    async with pair() as (mine, (_, writer)):
        edge = Edge("next", *mine)
        writer.write(first)
        why = await edge.run(b"P", b"N", hello(), ready)
        assert "role" in why or "before HELLO" in why


async def test_a_second_hello_ends_the_edge() -> None:
    """Each would be answered by all that is known of every sequence."""
    async with pair() as (mine, (_, writer)):
        edge = Edge("next", *mine)
        writer.write(b"N" + wire.encode(hello()) + wire.encode(hello()))
        assert "second HELLO" in await edge.run(b"P", b"N", hello(), ready)


async def test_a_peer_that_wants_pongs_and_reads_none_gets_no_more_of_them() -> None:
    async with pair() as (mine, (reader, writer)):
        edge = Edge("next", *mine)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        running = asyncio.create_task(edge.run(b"P", b"N", hello(), ready))
        pings = 1000 * wire.encode(Frame(FrameKind.PING, 3, payload=bytes(64)))
        writer.write(b"N" + wire.encode(hello()))
        for _ in range(100):  # ten megabytes
            writer.write(pings)
            await writer.drain()
        assert mine[1].transport.get_write_buffer_size() <= MAX_UNREAD_BYTES + len(pings)
        assert edge.ready
        edge.close("enough")
        assert await asyncio.wait_for(running, 120) == "enough"  # though nothing that was sent is taken


async def test_a_peer_that_says_nothing_is_given_up_and_one_that_only_pings_is_not() -> None:
    async with pair() as (mine, theirs), pair() as (other, lively):
        silent = Edge("next", *mine, ping_s=0.02, silence_s=0.1)
        chatty = Edge("next", *other, ping_s=0.02, silence_s=0.1)
        peer = Edge("prev", *lively, ping_s=0.02, silence_s=0.1)
        theirs[1].write(b"N" + wire.encode(hello()))
        tasks = [
            asyncio.create_task(chatty.run(b"P", b"N", hello(), ready)),
            asyncio.create_task(peer.run(b"N", b"P", hello(), ready)),
        ]
        assert "said nothing" in await silent.run(b"P", b"N", hello(), ready)
        await until(lambda: chatty.rtt_ms is not None)
        assert chatty.ready
        assert peer.ready
        chatty.close("enough")
        assert await tasks[0] == "enough"
        await tasks[1]


async def test_a_peer_whose_frame_takes_longer_than_silence_may_last_is_not_silent() -> None:
    """A slow link: bytes of one frame keep coming, for four times as long."""
    now = 0.0
    came: list[Frame] = []

    async def keep(edge: Edge, frame: Frame) -> None:
        await ready(edge, frame)
        came.append(frame)

    async with pair() as (mine, (_, writer)):
        edge = Edge("prev", *mine, ping_s=0.01, silence_s=0.1, clock=lambda: now)
        running = asyncio.create_task(edge.run(b"N", b"P", hello(), keep))
        writer.write(b"P" + wire.encode(hello()))
        await until(lambda: edge.ready)
        frame = Frame(FrameKind.HIDDEN, 3, (wire.Item(1, rows=10),), bytes(4000))
        data = wire.encode(frame)
        for at in range(0, len(data), 150):
            writer.write(data[at : at + 150])
            now += 0.015  # less than a pause of this process would be
            await asyncio.sleep(0.02)  # the watch looks
        await until(lambda: came[-1] == frame)
        assert edge.ready
        while not running.done():
            now += 0.015
            await asyncio.sleep(0.02)
        assert "said nothing" in await running


async def test_a_peer_that_is_not_read_is_not_taken_for_silent() -> None:
    """What came waits for room here: that says nothing about the peer."""
    now = 0.0
    room = asyncio.Event()
    came: list[FrameKind] = []

    async def wait(edge: Edge, frame: Frame) -> None:
        came.append(frame.kind)
        await ready(edge, frame)
        if frame.kind is FrameKind.ROLL:
            await room.wait()

    async with pair() as (mine, (reader, writer)):
        edge = Edge("prev", *mine, ping_s=0.01, silence_s=0.1, clock=lambda: now)
        running = asyncio.create_task(edge.run(b"N", b"P", hello(), wait))
        writer.write(b"P" + wire.encode(hello()) + wire.encode(Frame(FrameKind.ROLL, 3)))
        await until(lambda: FrameKind.ROLL in came)
        for _ in range(25):
            now += 0.015
            await asyncio.sleep(0.02)
        await reader.readexactly(1)
        await wire.read_frame(reader)
        assert (await wire.read_frame(reader)).kind is FrameKind.PING  # and the peer hears that we are there
        writer.write(wire.encode(Frame(FrameKind.HELD, 3)))
        room.set()
        await until(lambda: FrameKind.HELD in came)
        writer.close()
        await running


async def test_an_edge_waits_for_a_peer_that_has_not_come_yet() -> None:
    async with pair() as (mine, (_, writer)):
        edge = Edge("next", *mine, ping_s=0.01, silence_s=0.02)
        running = asyncio.create_task(edge.run(b"P", b"N", hello(), ready))
        await asyncio.sleep(0.1)
        assert not running.done()
        writer.close()
        await running


async def test_a_peer_of_an_older_epoch_is_told_and_one_of_a_newer_tells() -> None:
    async with pair() as (mine, (reader, writer)):
        edge = Edge("next", *mine)
        writer.write(b"N" + wire.encode(hello(2)))
        with pytest.raises(StaleError) as caught:
            await edge.run(b"P", b"N", hello(3), ready)
        assert not caught.value.mine
        await reader.readexactly(1)
        await wire.read_frame(reader)
        told = await wire.read_frame(reader)
        assert (told.kind, told.epoch) == (FrameKind.ERROR, 3)
        assert wire.decode_error(told.payload).code == "stale_epoch"
    async with pair() as (mine, (_, writer)):
        writer.write(b"N" + wire.encode(hello(4)))
        with pytest.raises(StaleError) as caught:
            await Edge("next", *mine).run(b"P", b"N", hello(3), ready)
        assert caught.value.mine


async def test_frames_leave_in_their_order_each_made_when_it_is_its_turn() -> None:
    made: list[int] = []

    def frames(begin: int, end: int):
        for number in range(begin, end):
            made.append(number)
            yield Frame(FrameKind.PING, 3, payload=bytes([number]))

    async with pair() as (mine, (reader, writer)):
        edge = Edge("next", *mine)
        running = asyncio.create_task(edge.run(b"P", b"N", hello(), ready))
        edge.post(frames(0, 3))
        edge.post(frames(3, 5))
        assert made == []
        await reader.readexactly(1)
        await wire.read_frame(reader)
        assert [(await wire.read_frame(reader)).payload[0] for _ in range(5)] == [0, 1, 2, 3, 4]
        writer.close()
        await running
