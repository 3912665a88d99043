"""One outbound session of a node, kept alive until it is closed: relay WebSocket on one side, engine on the other.

    closed ── run ──► dialling ──► open ──► waiting ──► dialling ── ...
                          └──────────────────┘ refused, unreachable

The node dials out, on 443 only; nothing on it listens to the network. Once the WebSocket is open the engine's data
socket is dialled and told what the session is (``wire.preamble``); from then on bytes are pumped both ways with
back-pressure and never looked at.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.protocol import State

from kvasir_console.errors import KvasirError, NetworkError
from kvasir_console.relay.backoff import Backoff
from kvasir_console.relay.closing import CloseCode, Closing, clean, explain
from kvasir_console.relay.splice import SocketEnd, pump, race
from kvasir_console.relay.tls import client_context, is_loopback
from kvasir_console.relay.wire.preamble import Preamble

__all__ = ["TokenProvider", "Uplink", "UplinkPhase", "UplinkState", "client_context", "expert_url", "ring_url"]

MAX_FRAME_BYTES = 16 * 2**20
_TOKEN = re.compile(r"[!-~]+")
_T = TypeVar("_T")


class UplinkPhase(StrEnum):
    CLOSED = "closed"
    DIALLING = "dialling"
    OPEN = "open"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class UplinkState:
    """An uplink at one moment. Times are the injected clock's seconds."""

    session: str
    url: str
    """Without its query, which may hold a token."""
    phase: UplinkPhase
    since: float
    since_s: float
    """How long it has been in this phase."""
    retry_in_s: float | None
    """Only while waiting."""
    rtt_ms: float | None
    """Latest ping's round trip; ``None`` before the first."""
    bytes_up: int
    """Payload from the engine, handed to the relay; over all connections."""
    bytes_down: int
    """Payload from the relay, handed to the engine; over all connections."""
    connects: int
    last_close: Closing | None


class TokenProvider(Protocol):
    async def __call__(self, *, refresh: bool) -> str:
        """A node token; with ``refresh`` a new one, because the relay refused the last. Raises ``KvasirError``."""
        ...


def expert_url(gateway: str, session: str) -> str:
    """The expert relay of a gateway (``https://host``) for a session name."""
    return _relay_url(gateway, "/api/expert-relay", {"session": session})


def ring_url(gateway: str, ring_id: str, edge: int | str, role: str) -> str:
    """One end of a ring edge: ``edge`` is its number or ``entry``, ``role`` is ``P`` or ``N``."""
    return _relay_url(gateway, "/api/ring-relay", {"controller_id": ring_id, "edge": str(edge), "role": role})


def _relay_url(gateway: str, path: str, query: dict[str, str]) -> str:
    parts = urlsplit(gateway)
    scheme = {"https": "wss", "http": "ws"}.get(parts.scheme, parts.scheme)
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}{path}?{urlencode(query, quote_via=quote)}"


class Uplink:
    """``run`` keeps the session alive; ``close`` ends it; ``snapshot`` looks at it."""

    def __init__(
        self,
        url: str,
        session: str,
        token: TokenProvider,
        *,
        token_in_header: bool,
        ssl_context: ssl.SSLContext | None,
        engine_socket: Path,
        preamble: Preamble,
        user_agent: str,
        redial_min_s: float = 5.0,
        redial_max_s: float = 60.0,
        open_timeout_s: float = 20.0,
        engine_timeout_s: float = 5.0,
        ping_interval_s: float = 10.0,
        ping_timeout_s: float = 10.0,
        close_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        on_change: Callable[[UplinkState], None] | None = None,
    ) -> None:
        """
        Args:
            url: ``wss://...`` with the session in its query and no token (``expert_url``, ``ring_url``).
            token_in_header: the relay takes the token in ``Authorization``; otherwise it goes into the query.
            ssl_context: from ``client_context``; ``None`` trusts the system's authorities.
            on_change: told of every change of phase; must not raise.

        Raises:
            NetworkError: the URL is not a relay's, or not encrypted though it leaves this machine.
        """
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in ("ws", "wss") or not host or parts.username is not None:
            raise NetworkError("relay_url_malformed", f"{_public(url)} is not the address of a relay.")
        self._loopback = is_loopback(host)
        if parts.scheme == "ws" and not self._loopback:
            raise NetworkError(
                "relay_not_encrypted",
                f"{_public(url)} is not encrypted, and {host} is another machine.",
                "Use an https:// gateway; http:// is for loopback addresses only.",
            )
        self._url = url
        self._secure = parts.scheme == "wss"
        self._session = session
        self._token = token
        self._token_in_header = token_in_header
        self._ssl = ssl_context
        self._engine_socket = engine_socket
        self._preamble = preamble
        self._user_agent = user_agent
        self._open_timeout_s = open_timeout_s
        self._engine_timeout_s = engine_timeout_s
        self._ping_interval_s = ping_interval_s
        self._ping_timeout_s = ping_timeout_s
        self._close_timeout_s = close_timeout_s
        self._backoff = Backoff(redial_min_s, redial_max_s, rng=rng)
        self._clock = clock
        self._on_change = on_change
        self._phase = UplinkPhase.CLOSED
        self._since = clock()
        self._retry_at: float | None = None
        self._last_close: Closing | None = None
        self._rtt_ms: float | None = None
        self._bytes_up = 0
        self._bytes_down = 0
        self._connects = 0
        self._refresh = False
        self._closing = asyncio.Event()
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._finished.set()

    def snapshot(self) -> UplinkState:
        now = self._clock()
        return UplinkState(
            session=self._session,
            url=_public(self._url),
            phase=self._phase,
            since=self._since,
            since_s=now - self._since,
            retry_in_s=max(0.0, self._retry_at - now) if self._retry_at is not None else None,
            rtt_ms=self._rtt_ms,
            bytes_up=self._bytes_up,
            bytes_down=self._bytes_down,
            connects=self._connects,
            last_close=self._last_close,
        )

    async def run(self) -> None:
        """Dial, carry, wait, dial again; returns after ``close``. Never raises because of a peer."""
        self._finished.clear()
        try:
            while not self._closing.is_set():
                self._enter(UplinkPhase.DIALLING)
                self._last_close = await self._once()
                self._refresh = self._last_close.code == CloseCode.UNAUTHORISED
                if self._closing.is_set():
                    break
                delay_s = self._backoff.next_s()
                _log.info("session %s: %s; next try in %.1f s", self._session, self._last_close.text, delay_s)
                self._wake.clear()
                self._enter(UplinkPhase.WAITING, delay_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._wake.wait()
        finally:
            self._finished.set()
            self._enter(UplinkPhase.CLOSED)

    def redial(self) -> None:
        """Dial now if waiting, for example because coverage was just reported."""
        self._wake.set()

    async def close(self) -> None:
        """End the session with 1000 and return once ``run`` has."""
        self._closing.set()
        self._wake.set()
        await self._finished.wait()

    def _enter(self, phase: UplinkPhase, delay_s: float | None = None) -> None:
        self._phase = phase
        self._since = self._clock()
        self._retry_at = self._since + delay_s if delay_s is not None else None
        if phase is not UplinkPhase.OPEN:
            self._rtt_ms = None
        if self._on_change is not None:
            self._on_change(self.snapshot())

    async def _once(self) -> Closing:
        """One connection, from token to end; returns why it is over."""
        try:
            ws = await self._unless_closing(self._dial())
        except KvasirError as error:
            return Closing(None, "", error.message, error.hint or "trying again")
        except InvalidStatus as error:
            status = error.response.status_code
            return Closing(None, f"HTTP {status}", "the relay refused the connection", "dialling again")
        except ssl.SSLCertVerificationError as error:
            reason = clean(error.verify_message)
            return Closing(
                None, reason, "the relay's certificate is not trusted", "set network.ca_file to its authority"
            )
        except ImportError:
            return Closing(None, "", "a SOCKS proxy needs the python-socks package", "install it, or unset the proxy")
        except TimeoutError:
            return Closing(None, "", "the relay did not answer in time", "dialling again")
        except OSError as error:
            return Closing(
                None, clean(error.strerror or type(error).__name__), "the relay is unreachable", "dialling again"
            )
        except WebSocketException as error:
            # Its text may hold the URL or a proxy's password.
            return Closing(None, type(error).__name__, "the relay does not answer as one", "dialling again")
        if ws is None:
            return explain(CloseCode.NORMAL)
        try:
            self._connects += 1
            self._enter(UplinkPhase.OPEN)
            return await self._carry(ws)
        finally:
            ws.transport.abort()

    async def _unless_closing(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """The result of ``work``, or ``None`` if ``close`` was called before there was one."""
        task = asyncio.ensure_future(work)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait([task, closing], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            closing.cancel()
            task.cancel()
            await asyncio.gather(task, closing, return_exceptions=True)

    async def _dial(self) -> _Connection:
        token = await self._token(refresh=self._refresh)
        if not _TOKEN.fullmatch(token):
            raise NetworkError("token_malformed", "The node token is empty or not printable.")
        url, headers = self._url, {}
        if self._token_in_header:
            headers["Authorization"] = f"Bearer {token}"
        else:
            url += ("&" if "?" in url else "?") + urlencode({"token": token})
        options: dict[str, Any] = {}
        if self._secure:
            if self._ssl is None:
                self._ssl = client_context()
            options["ssl"] = self._ssl
        connection = await _Connect(
            url,
            create_connection=_Connection,
            additional_headers=headers,
            user_agent_header=self._user_agent,
            compression=None,
            proxy=None if self._loopback else True,
            open_timeout=self._open_timeout_s,
            close_timeout=self._close_timeout_s,
            # The library's keepalive would call a session dead whose engine is merely busy; ``_watch`` does not.
            ping_interval=None,
            max_size=(None, MAX_FRAME_BYTES),
            max_queue=4,
            logger=_frame_logger(),
            **options,
        )
        assert isinstance(connection, _Connection)  # noqa: S101 (narrowing: made by ``create_connection``)
        return connection

    async def _carry(self, ws: _Connection) -> Closing:
        """Join ``ws`` to the engine until one of them ends; returns why."""
        try:
            async with asyncio.timeout(self._engine_timeout_s):
                engine = SocketEnd(*await asyncio.open_unix_connection(self._engine_socket))
        except OSError as error:  # a timeout is one too
            await self._goodbye(ws, CloseCode.UPSTREAM, "engine gone")
            reason = clean(error.strerror or "")
            return Closing(CloseCode.UPSTREAM, reason, "this node's engine does not answer", "trying again")
        relay = _RelayEnd(ws)
        dead = 3
        ended_by = -1
        try:
            await engine.write(self._preamble.encode())
            ended_by = await race(
                pump(relay, engine, self._count_down),
                pump(engine, relay, self._count_up),
                self._ping(ws),
                self._watch(relay),
                self._closing.wait(),
            )
        except (ConnectionError, ConnectionClosed):
            pass
        finally:
            await engine.close()
        if self._closing.is_set():
            await self._goodbye(ws, CloseCode.NORMAL, "")
            return explain(CloseCode.NORMAL)
        if ended_by == dead:
            limit_s = self._ping_interval_s + self._ping_timeout_s
            return Closing(
                CloseCode.ABNORMAL, "", f"the relay gave no sign of life for {limit_s:g} s", "dialling again"
            )
        if ws.state is State.OPEN:
            await self._goodbye(ws, CloseCode.UPSTREAM, "engine gone")
            return Closing(CloseCode.UPSTREAM, "", "this node's engine ended the session", "dialling again")
        await self._gone(ws)
        return explain(ws.close_code or CloseCode.ABNORMAL, ws.close_reason or "")

    async def _ping(self, ws: _Connection) -> None:
        while True:
            await ws.ping()
            await asyncio.sleep(self._ping_interval_s)

    async def _watch(self, relay: _RelayEnd) -> None:
        """Return when nothing has come from the relay for so long that the path must be dead."""
        limit_s = self._ping_interval_s + self._ping_timeout_s
        while (left_s := limit_s - relay.silent_s()) > 0:
            await asyncio.sleep(min(left_s, self._ping_interval_s / 4))
            if relay.ws.latency:
                self._rtt_ms = relay.ws.latency * 1000.0

    async def _goodbye(self, ws: _Connection, code: int, reason: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._close_timeout_s):
                await ws.close(code, reason)

    async def _gone(self, ws: _Connection) -> None:
        """Wait for the end of a WebSocket that is closing, so that its close code is known."""
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._close_timeout_s):
                await ws.wait_closed()

    def _count_down(self, size: int) -> None:
        self._backoff.reset()
        self._bytes_down += size

    def _count_up(self, size: int) -> None:
        self._bytes_up += size


class _Connect(connect):
    """The library's dialler, but it goes only where the user configured."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class _Connection(ClientConnection):
    """The library's connection, which also remembers when anything last came."""

    last_received: float = 0.0

    def data_received(self, data: bytes) -> None:
        self.last_received = self.loop.time()
        super().data_received(data)


class _RelayEnd:
    """The WebSocket as a byte stream. Frame by frame, since one message may never end."""

    def __init__(self, ws: _Connection) -> None:
        self.ws = ws
        self._frames = self._receive()
        self._listening_since: float | None = None

    async def _receive(self) -> AsyncIterator[bytes]:
        while True:
            async for payload in self.ws.recv_streaming(decode=False):
                yield payload

    def silent_s(self) -> float:
        """Seconds for which we listened and nothing came; 0 while the engine holds us up and we cannot listen."""
        if self._listening_since is None:
            return 0.0
        return self.ws.loop.time() - max(self._listening_since, self.ws.last_received)

    async def read(self) -> bytes:
        self._listening_since = self.ws.loop.time()
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
        try:
            await self.ws.send(data)
        except ConnectionClosed:
            raise ConnectionResetError("the relay's WebSocket is closed") from None


def _public(url: str) -> str:
    """``url`` without query and user, fit for a message."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


_log = logging.getLogger(__name__)


def _frame_logger() -> logging.Logger:
    """At level DEBUG the library logs requests with their token, and payloads: it gets no such level."""
    logger = logging.getLogger(f"{__name__}.frames")
    logger.setLevel(logging.WARNING)
    return logger
