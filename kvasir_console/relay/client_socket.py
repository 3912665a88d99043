"""The client side of one relay WebSocket: dialled through whatever proxy the environment names, then a byte stream.

``websockets`` does the dialling and RFC 6455. No token of ours ever gets into a message or a log from here, and no
redirect is followed: a node talks to the one destination its owner configured.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import DATA_OPCODES, Frame
from websockets.protocol import Event, State

from kvasir_console.errors import NetworkError
from kvasir_console.relay.closing import CloseCode, Closing, clean, explain
from kvasir_console.relay.tls import client_context, is_loopback

MAX_FRAME_BYTES = 16 * 2**20


class DialError(Exception):
    """The WebSocket did not open; ``closing`` says why."""

    def __init__(self, closing: Closing) -> None:
        super().__init__(closing.text)
        self.closing = closing


class PathDeadError(ConnectionError):
    """The other side gives no sign of life."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to dial, checked.

    Raises:
        NetworkError: the URL is not a relay's, or not encrypted though it leaves this machine.
    """

    url: str
    """With its query but without a token."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.username is not None:
            raise NetworkError("relay_url_malformed", f"{self.public} is not the address of a relay.")
        if parts.scheme == "ws" and not self.loopback:
            raise NetworkError(
                "relay_not_encrypted",
                f"{self.public} is not encrypted, and {parts.hostname} is another machine.",
                "Use an https:// gateway; http:// is for loopback addresses only.",
            )

    @property
    def public(self) -> str:
        """The URL without query and user, fit for a message."""
        parts = urlsplit(self.url)
        if not parts.scheme or not parts.hostname:
            return "The configured address"
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def loopback(self) -> bool:
        return is_loopback(urlsplit(self.url).hostname or "")

    @property
    def secure(self) -> bool:
        return urlsplit(self.url).scheme == "wss"


async def dial(
    target: Target,
    token: str,
    *,
    token_in_header: bool,
    ssl_context: ssl.SSLContext | None,
    user_agent: str,
    open_timeout_s: float = 20.0,
    close_timeout_s: float = 2.0,
    extra_headers: Mapping[str, str] | None = None,
) -> ClientSocket:
    """Open a WebSocket to ``target``, with the token in ``Authorization`` or else in the query.

    Raises:
        DialError: it did not open.
    """
    url, headers = target.url, dict(extra_headers or {})
    if token_in_header:
        headers["Authorization"] = f"Bearer {token}"
    else:
        url += ("&" if "?" in url else "?") + urlencode({"token": token})
    tls: dict[str, Any] = {"ssl": ssl_context or client_context()} if target.secure else {}
    try:
        connection = await _Connect(
            url,
            create_connection=_Connection,
            additional_headers=headers,
            user_agent_header=user_agent,
            compression=None,
            proxy=None if target.loopback else True,
            open_timeout=open_timeout_s,
            close_timeout=close_timeout_s,
            # The library's keepalive would call a session dead whose engine is merely busy; see ``keep_alive``.
            ping_interval=None,
            # A limit on frames, none on messages: a stream may be one endless fragmented message.
            max_size=(None, MAX_FRAME_BYTES),
            max_queue=4,
            logger=_frame_logger(),
            **tls,
        )
    except (OSError, ImportError, WebSocketException) as error:
        raise DialError(_not_opened(error)) from None
    assert isinstance(connection, _Connection)  # noqa: S101 (narrowing: made by ``create_connection``)
    return ClientSocket(connection, close_timeout_s)


def _not_opened(error: Exception) -> Closing:
    """What ``error`` means to a person. Errors of the library are named, not quoted: they may hold the URL."""
    again = "dialling again"
    match error:
        case InvalidStatus():
            return Closing(None, f"HTTP {error.response.status_code}", "the relay refused the connection", again)
        case ssl.SSLCertVerificationError():
            reason = clean(error.verify_message)
            return Closing(None, reason, "the relay's certificate is not trusted", "set network.ca_file to its issuer")
        case TimeoutError():
            return Closing(None, "", "the relay did not answer in time", again)
        case OSError():
            return Closing(None, clean(error.strerror or type(error).__name__), "the relay cannot be reached", again)
        case ImportError():
            return Closing(None, "", "a SOCKS proxy needs the python-socks package", "install it, or unset the proxy")
        case _:
            return Closing(None, type(error).__name__, "what answers there is not a relay", again)


class ClientSocket:
    """One open WebSocket as a byte stream, read frame by frame since one message may never end."""

    def __init__(self, connection: _Connection, close_timeout_s: float) -> None:
        self._connection = connection
        self._close_timeout_s = close_timeout_s
        self._loop = asyncio.get_running_loop()
        self._frames = self._receive()
        self._listening_since: float | None = None
        self._awake_since = 0.0
        """When this process last got its turn again, much later than it had asked for."""
        self.sent_bytes = 0
        """Payload given to the connection, whether it has left or not."""

    @property
    def open(self) -> bool:
        return self._connection.state is State.OPEN

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the relay's 101."""
        response = self._connection.response
        return dict(response.headers.raw_items()) if response is not None else {}

    @property
    def received_bytes(self) -> int:
        """Payload that has arrived, whether ``read`` gave it out already or not."""
        return self._connection.received_bytes

    @property
    def rtt_ms(self) -> float | None:
        """Round trip of the latest ping that was answered."""
        return self._connection.latency * 1000.0 or None

    async def read(self) -> bytes:
        """The payload of the next frame; ``b""`` once the WebSocket is closed."""
        self._listening_since = self._loop.time()
        try:
            async for payload in self._frames:
                if payload:
                    return payload
        except ConnectionClosed:
            pass
        finally:
            self._listening_since = None
        return b""

    async def write(self, data: bytes | memoryview, /) -> None:
        """Send one binary frame; returns when there is room for more. Raises ``ConnectionError`` if it is closed."""
        self.sent_bytes += len(data)
        try:
            await self._connection.send(data)
        except ConnectionClosed:
            raise ConnectionResetError("the relay's WebSocket is closed") from None

    async def keep_alive(self, interval_s: float, dead_after_s: float) -> None:
        """Ping every ``interval_s``; never returns.

        While the engine holds us up we do not listen, so silence means nothing then. Nor does it after a pause of this
        process itself, which was stopped or did not get its turn.

        Raises:
            PathDeadError: we listened for ``dead_after_s`` and nothing came.
            ConnectionError: the WebSocket is closed.
        """
        pinging = asyncio.ensure_future(self._ping(interval_s))
        try:
            while not pinging.done():
                left_s = dead_after_s - self._silent_s()
                if left_s <= 0:
                    raise PathDeadError(f"nothing came for {dead_after_s} s")
                asleep, pause_s = self._loop.time(), min(left_s, interval_s)
                await asyncio.wait([pinging], timeout=pause_s)
                if self._loop.time() - asleep > pause_s + interval_s:
                    self._awake_since = self._loop.time()
            pinging.result()
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)

    async def _ping(self, interval_s: float) -> None:
        while True:
            try:
                await self._connection.ping()
            except ConnectionClosed:
                raise ConnectionResetError("the relay's WebSocket is closed") from None
            await asyncio.sleep(interval_s)

    def _silent_s(self) -> float:
        if self._listening_since is None:
            return 0.0
        heard = max(self._listening_since, self._connection.last_received, self._awake_since)
        return self._loop.time() - heard

    async def close(self, code: int = CloseCode.NORMAL, reason: str = "") -> Closing:
        """Close with ``code``, or learn with which one the relay closes already; then nothing is left open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._close_timeout_s):
                await self._connection.close(code, clean(reason))
                await self._connection.wait_closed()
        self.abort()
        with suppress(ConnectionClosed):
            await self._frames.aclose()
        return explain(self._connection.close_code or CloseCode.ABNORMAL, self._connection.close_reason or "")

    def abort(self) -> None:
        """Cut the connection off."""
        self._connection.transport.abort()

    async def _receive(self) -> AsyncGenerator[bytes]:
        while True:
            async for payload in self._connection.recv_streaming(decode=False):
                yield payload


class _Connect(connect):
    """The library's dialler without its redirects."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class _Connection(ClientConnection):
    """The library's connection, which also remembers when anything last came, and how much payload."""

    last_received: float = 0.0
    received_bytes: int = 0

    def data_received(self, data: bytes) -> None:
        self.last_received = self.loop.time()
        super().data_received(data)

    def process_event(self, event: Event) -> None:
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
            self.received_bytes += len(event.data)
        super().process_event(event)


def _frame_logger() -> logging.Logger:
    """At level DEBUG the library logs requests with their token, and payloads: it gets no such level."""
    logger = logging.getLogger(f"{__name__}.frames")
    logger.setLevel(logging.WARNING)
    return logger
