"""The delay proxy as a real process: every byte in order, delays kept, cuts where they were ordered."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator

import pytest

from kvasir_console.bench.delay import Shape
from kvasir_console.bench.links import Links


class Echo:
    """A server that sends back what it gets, and remembers how much came."""

    def __init__(self) -> None:
        self.got = 0
        self.gone = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.got += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            self.gone.set()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, int]]:
    handler = Echo()
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    yield handler, server.sockets[0].getsockname()[1]
    server.close()


async def test_bytes_come_through_whole_and_in_order_over_a_slow_jittery_link(echo: tuple[Echo, int]) -> None:
    payload = random.Random(1).randbytes(3_000_000)
    async with Links(seed=1) as links:
        port = await links.open(
            "a", echo[1], rtt_ms=4.0, jitter_ms=3.0, up_mb_s=50.0, stall_every_s=0.05, stall_ms=10.0
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(payload)
        writer.write_eof()
        back = await reader.read(-1)
        stats = (await links.stats())["a"]
        writer.close()
    assert hashlib.sha256(back).digest() == hashlib.sha256(payload).digest()
    assert stats["up_bytes"] == stats["down_bytes"] == len(payload)


async def test_no_answer_comes_before_the_round_trip_is_over(echo: tuple[Echo, int]) -> None:
    loop = asyncio.get_running_loop()
    async with Links() as links:
        port = await links.open("a", echo[1], rtt_ms=30.0)
        start = loop.time()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for trip in range(3):
            start = start if trip == 0 else loop.time()  # the first waits for the handshake too
            writer.write(b"x")
            await reader.readexactly(1)
            assert loop.time() - start >= (0.060 if trip == 0 else 0.030)
        writer.close()


async def test_a_link_is_cut_after_exactly_the_ordered_bytes(echo: tuple[Echo, int]) -> None:
    handler, port = echo
    async with Links() as links:
        through = await links.open("a", port)
        await links.cut("a", direction="up", after_bytes=70_001)
        reader, writer = await asyncio.open_connection("127.0.0.1", through)
        writer.write(bytes(200_000))
        with pytest.raises(ConnectionError):
            await reader.readexactly(200_000)
        await handler.gone.wait()
        stats = (await links.stats())["a"]
    assert stats["up_bytes"] == 70_001
    assert handler.got <= 70_001
    assert (stats["cuts"], stats["connections"]) == (1, 0)


async def test_a_stalled_link_loses_nothing_and_goes_on_when_told(echo: tuple[Echo, int]) -> None:
    async with Links() as links:
        reader, writer = await asyncio.open_connection("127.0.0.1", await links.open("a", echo[1]))
        await links.stall("a")
        writer.write(b"held")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.readexactly(4)
        await links.resume("a")
        assert await reader.readexactly(4) == b"held"
        writer.close()


async def test_a_link_that_is_down_refuses_until_it_is_up(echo: tuple[Echo, int]) -> None:
    async with Links() as links:
        port = await links.open("a", echo[1])
        await links.down("a")

        async def try_it() -> None:
            reader, _writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.readexactly(1)

        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await try_it()
        await links.down("a", False)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        writer.close()


async def test_the_same_seed_cuts_at_the_same_bytes(echo: tuple[Echo, int]) -> None:
    async def passed(seed: int) -> int:
        async with Links(seed=seed) as links:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", await links.open("a", echo[1], cut_every_mb=0.05, down_mb_s=0.001)
            )
            writer.write(bytes(2_000_000))
            with pytest.raises(ConnectionError):
                await reader.read(-1)
            stats = (await links.stats())["a"]
            return stats["up_bytes"] + stats["down_bytes"]

    assert await passed(3) == await passed(3) != await passed(4)


async def test_nonsense_is_refused_and_the_proxy_goes_on(echo: tuple[Echo, int]) -> None:
    async with Links() as links:
        with pytest.raises(RuntimeError, match="rtt_ms"):
            await links.open("a", echo[1], rtt_ms=-1.0)
        with pytest.raises(RuntimeError, match="KeyError"):
            await links.stall("nowhere")
        assert await links.stats() == {}


@pytest.mark.parametrize("field", ["up_mb_s", "cut_every_mb", "stall_every_s"])
def test_a_rate_or_interval_of_zero_is_no_shape(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Shape(**{field: 0.0})
