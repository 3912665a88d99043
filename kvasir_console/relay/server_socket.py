"""The server side of one relay WebSocket: an asyncio stream whose request head was read becomes a byte stream.

``websockets`` does RFC 6455 without I/O; this shell feeds it from the stream and takes nothing off the network that
nobody asked for, so back-pressure reaches the peer's TCP. Message boundaries carry no meaning (gateway contract,
section 5.1): text, binary and continuation payloads are one stream, however they are cut. No extension and no
subprotocol is ever agreed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from websockets.frames import DATA_OPCODES, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from kvasir_console.relay.closing import CloseCode, clean
from kvasir_console.relay.splice import CHUNK_BYTES, close_writer

MAX_FRAME_BYTES = 16 * 2**20
_MAX_UNSENT_BYTES = 2**20
"""Far above what ``write`` can leave unsent; only a peer that sends pings and reads nothing gets there."""
_BEATS = 4
"""Signs of life in one ping interval."""


class Ending(NamedTuple):
    """How a session ended: close code and reason."""

    code: int
    reason: str


class ServerSocket:
    """One WebSocket, from its request head to its end. Reading and writing may go on in two tasks at once."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        ping_interval_s: float = 20.0,
        close_timeout_s: float = 2.0,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._ping_interval_s = ping_interval_s
        self._close_timeout_s = close_timeout_s
        # A limit on frames, none on messages: a stream may be one endless fragmented message.
        self._protocol = ServerProtocol(max_size=(None, max_frame_bytes), logger=_frame_logger())
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._welcome: Response | None = None
        self.on_pong: Callable[[bytes], None] | None = None
        """Told the payload of every pong."""
        self.on_sent: Callable[[int], None] | None = None
        """Told how many payload bytes were given to the connection, before any wait."""

    def handshake(self, head: bytes) -> Request | None:
        """Read the upgrade request ``head``; one that is none is answered with an HTTP error (then ``None``)."""
        self._protocol.receive_data(head)
        request = next((event for event in self._protocol.events_received() if isinstance(event, Request)), None)
        if request is not None:
            response = self._protocol.accept(request)
            if response.status_code == 101:
                self._welcome = response
                return request
            self._protocol.send_response(response)
        self._flush()
        return None

    def welcome(self, headers: Mapping[str, str]) -> None:
        """Answer 101 with ``headers``, once; the WebSocket is open then."""
        response, self._welcome = self._welcome, None
        if response is not None:
            for name, value in headers.items():
                response.headers[name] = value
            self._protocol.send_response(response)
            self._flush()

    @property
    def open(self) -> bool:
        return self._protocol.state is State.OPEN and not self._writer.is_closing()

    @property
    def ending(self) -> Ending:
        """The close code and reason of whichever side closed first; 1006 if neither said anything."""
        sent, received = self._protocol.close_sent, self._protocol.close_rcvd
        first = sent if sent is not None and not self._protocol.close_rcvd_then_sent else received
        return Ending(int(first.code), clean(first.reason)) if first is not None else Ending(CloseCode.ABNORMAL, "")

    async def read(self) -> bytes:
        """The next payload bytes, at most one frame and one chunk of them; ``b""`` at the end. Pings are answered."""
        while self._protocol.state is State.OPEN:
            self._waiting_since = self._loop.time()
            try:
                data = await self._reader.read(CHUNK_BYTES)
            except OSError:
                data = b""
            finally:
                self._waiting_since = None
            payload = self._receive(data)
            if payload:
                return payload
        return b""

    async def write(self, data: bytes | memoryview, /) -> None:
        """Send ``data`` as one binary frame; returns when the peer's side has room for more.

        Raises:
            ConnectionError: the WebSocket is not open any more.
        """
        if not self.open:
            raise ConnectionResetError("the WebSocket is closed")
        self._protocol.send_binary(data)
        self._flush()
        if self.on_sent is not None:
            self.on_sent(len(data))
        try:
            await self._writer.drain()
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionResetError("the WebSocket's connection failed") from error

    async def keep_alive(self, mark: Callable[[], bytes] = bytes) -> None:
        """Ping every interval, with what ``mark`` says as payload; return when the path is dead.

        Dead means that nothing arrived for two intervals while we listened. A process that was stopped, or did not get
        its turn, heard nobody: its own pause is nobody's silence.

        A side that is held up by its own engine does not listen and cannot answer pings. It is not dead, and must
        not look dead to the peer: while held up, it sends unsolicited pongs (RFC 6455 section 5.5.3).
        """
        beat, pause_s = 0, self._ping_interval_s / _BEATS
        while True:
            asleep = self._loop.time()
            await asyncio.sleep(pause_s)
            beat += 1
            if self._waiting_since is not None and self._loop.time() - asleep > 2 * pause_s:
                self._waiting_since = self._loop.time()
            since = self._waiting_since
            if not self.open or (since is not None and self._loop.time() - since >= 2 * self._ping_interval_s):
                return
            if beat % _BEATS == 0:
                self._protocol.send_ping(mark())
            elif since is None:
                self._protocol.send_pong(b"")
            self._flush()

    async def close(self, code: int, reason: str = "") -> None:
        """Close with ``code`` (1006: cut off without a word) and wait a little for the peer to do the same."""
        if code == CloseCode.ABNORMAL:
            self._writer.transport.abort()
        elif self.open:
            self._protocol.send_close(code, clean(reason))
        try:
            self._flush()
            async with asyncio.timeout(self._close_timeout_s):
                await self._writer.drain()
                # Over TLS there is no half-close: once the peer has answered, it is our turn to close.
                while self._protocol.close_rcvd is None or self._writer.can_write_eof():
                    data = await self._reader.read(CHUNK_BYTES)
                    if not data:
                        break
                    self._receive(data)
        except OSError:  # a timeout is one too
            self._writer.transport.abort()
        await close_writer(self._writer, self._close_timeout_s)

    def _receive(self, data: bytes) -> bytes:
        """Feed ``data`` (``b""``: end of the stream); returns the payload of the data frames it completed."""
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        self._flush()
        frames = [event for event in self._protocol.events_received() if isinstance(event, Frame)]
        for frame in frames:
            if frame.opcode is Opcode.PONG and self.on_pong is not None:
                self.on_pong(bytes(frame.data))
        return b"".join(frame.data for frame in frames if frame.opcode in DATA_OPCODES)

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if self._writer.is_closing():
                return
            if data:
                self._writer.write(data)
            elif self._writer.can_write_eof():
                self._writer.write_eof()
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._writer.transport.abort()


def _frame_logger() -> logging.Logger:
    """At level DEBUG the library logs request lines, which may hold a token, and payloads: it gets no such level."""
    logger = logging.getLogger(f"{__name__}.frames")
    logger.setLevel(logging.WARNING)
    return logger
