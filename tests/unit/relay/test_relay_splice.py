from __future__ import annotations

import asyncio

import pytest

from kvasir_console.relay.splice import CHUNK_BYTES, pump, race


class _Script:
    """A source that gives fixed pieces and remembers how many were asked for."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)
        self.reads = 0

    async def read(self) -> bytes:
        self.reads += 1
        return self._pieces.pop(0) if self._pieces else b""


class _Gate:
    """A sink that takes one piece each time it is let."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.permits = asyncio.Semaphore(0)

    async def write(self, data: bytes | memoryview, /) -> None:
        await self.permits.acquire()
        self.taken.append(bytes(data))


async def test_nothing_is_read_ahead_of_a_sink_that_has_not_taken_the_last_piece():
    source, sink = _Script(b"one", b"two", b"three"), _Gate()
    pumping = asyncio.create_task(pump(source, sink))
    for taken in range(3):
        for _ in range(5):
            await asyncio.sleep(0)
        assert (source.reads, len(sink.taken)) == (taken + 1, taken)
        sink.permits.release()
    await pumping
    assert sink.taken == [b"one", b"two", b"three"]


async def test_a_large_piece_goes_on_in_chunks_and_every_byte_is_counted():
    data = bytes(range(256)) * 1000
    source, sink, counted = _Script(data), _Gate(), []
    for _ in range(10):
        sink.permits.release()
    await pump(source, sink, counted.append)
    assert b"".join(sink.taken) == data
    assert max(map(len, sink.taken)) == CHUNK_BYTES
    assert sum(counted) == len(data)


async def test_a_race_stops_the_losers_and_says_who_won():
    stopped = asyncio.Event()

    async def loser():
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def winner():
        await asyncio.sleep(0)

    assert await race(loser(), winner()) == 1
    assert stopped.is_set()


async def test_a_race_raises_what_ended_it():
    async def broken():
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError, match="gone"):
        await race(asyncio.Event().wait(), broken())


async def test_a_cancelled_race_leaves_nobody_running():
    stopped = asyncio.Event()

    async def part():
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    running = asyncio.create_task(race(part(), asyncio.Event().wait()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stopped.is_set()
