"""Joining byte streams with back-pressure: at most one chunk is in flight on top of what the sockets buffer.

A ``pump`` reads no further chunk before the sink has taken the last one, so a slow reader slows its writer down and
memory stays bounded whatever the two sides do.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import termios
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

CHUNK_BYTES = 64 * 1024


class Source(Protocol):
    async def read(self) -> bytes:
        """The next bytes of the stream; ``b""`` once it has ended, for whatever reason."""
        ...


class Sink(Protocol):
    async def write(self, data: bytes | memoryview, /) -> None:
        """Take ``data`` and return when more may follow. Raises ``ConnectionError`` if nobody takes it any more."""
        ...


class SocketEnd:
    """An asyncio stream pair as source and sink."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        try:
            return await self._reader.read(CHUNK_BYTES)
        except OSError:
            return b""

    async def write(self, data: bytes | memoryview, /) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionResetError("the socket failed") from error

    async def close(self) -> None:
        await close_writer(self._writer)

    async def part(self) -> None:
        """The other side of the splice is over: so is this one."""
        await self.close()


class StreamEnd(SocketEnd):
    """One whose sending half can be ended alone."""

    async def end(self) -> None:
        """No more is written; what comes is still read."""
        if self._writer.can_write_eof():
            self._writer.write_eof()


class LocalEnd:
    """A Unix socket without a transport around it: asyncio's throws away what was not read yet when a write fails,
    and whoever closed may have said something first.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, path: Path) -> LocalEnd:
        """Raises ``OSError``."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, str(path))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def read(self) -> bytes:
        try:
            return await self._loop.sock_recv(self._sock, CHUNK_BYTES)
        except OSError:
            return b""

    async def write(self, data: bytes | memoryview, /) -> None:
        try:
            await self._loop.sock_sendall(self._sock, data)
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionResetError("the socket failed") from error

    async def end(self) -> None:
        """No more is written; what comes is still read."""
        with contextlib.suppress(OSError):  # the other side is gone
            self._sock.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        self._sock.close()


async def pump(source: Source, sink: Sink, delivered: Callable[[int], None] | None = None) -> None:
    """Move bytes from ``source`` to ``sink`` until the source ends.

    Args:
        delivered: told the size of every piece the sink took.

    Raises:
        ConnectionError: the sink is gone.
    """
    while data := await source.read():
        await deliver(data, sink, delivered)


async def deliver(data: bytes, sink: Sink, delivered: Callable[[int], None] | None = None) -> None:
    """Give ``data`` to ``sink`` in chunks; arguments and errors as for ``pump``."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        piece = view[start : start + CHUNK_BYTES]
        await sink.write(piece)
        if delivered is not None:
            delivered(len(piece))


async def race(*parts: Coroutine[Any, Any, Any]) -> int:
    """Run ``parts`` until one of them ends, cancel the others and wait for them.

    Returns:
        The index of the part that ended; the first of them if several did at once.

    Raises:
        Exception: whatever that part raised.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        winner = next(index for index, task in enumerate(tasks) if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tasks[winner].result()
    return winner


async def close_writer(writer: asyncio.StreamWriter, timeout_s: float = 1.0, *, goodbye_s: float | None = None) -> None:
    """Close, giving buffered bytes ``timeout_s`` to leave; then cut the connection off.

    With ``goodbye_s`` a peer that has taken all of them has only so long to close too: TLS waits for that, and whoever
    keeps a connection for later does not read it.
    """
    writer.close()
    loop = asyncio.get_running_loop()
    over_at = loop.time() + timeout_s
    gone = asyncio.ensure_future(writer.wait_closed())
    try:
        while (left_s := over_at - loop.time()) > 0:
            await asyncio.wait([gone], timeout=left_s if goodbye_s is None else min(left_s, goodbye_s))
            if gone.done() or (goodbye_s is not None and _all_taken(writer)):
                break
    finally:
        if not gone.done():
            writer.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(gone, return_exceptions=True)


def _all_taken(writer: asyncio.StreamWriter) -> bool:
    """Whether the peer's kernel has every byte that was written, as far as this system can say."""
    try:
        descriptor = writer.get_extra_info("socket").fileno()
        return fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)) == bytes(4)
    except (AttributeError, OSError, ValueError):
        return False


async def finish(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, linger_s: float = 1.0, close_s: float | None = None
) -> None:
    """Close after a last word.

    The peer may still be sending. Closing a TCP socket with unread input resets it, and the reset can overtake the
    last word; so input is thrown away until the peer has closed too, for ``linger_s`` at most. What is still buffered
    has ``close_s`` to leave (default: ``linger_s``).
    """
    try:
        async with asyncio.timeout(linger_s):
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            while await reader.read(CHUNK_BYTES):
                pass
    except OSError:  # a timeout is one too
        pass
    await close_writer(writer, linger_s if close_s is None else close_s, goodbye_s=linger_s)
