"""One outbound session of a node, kept alive until it is closed: relay WebSocket on one side, engine on the other.

    closed ── run ──► dialling ──► open ──► waiting ──► dialling ── ...
                          └── not opened ──────┘

While another path carries the session (``direct``) it stands *aside*: nothing is dialled until that path is gone.

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
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from kvasir_console.errors import KvasirError
from kvasir_console.relay.backoff import Backoff
from kvasir_console.relay.client_socket import ClientSocket, DialError, PathDeadError, Target, dial
from kvasir_console.relay.closing import CloseCode, Closing, clean, explain
from kvasir_console.relay.counting import OwnCount
from kvasir_console.relay.splice import SocketEnd, pump, race
from kvasir_console.relay.tls import client_context
from kvasir_console.relay.wire.preamble import Preamble

__all__ = [
    "MAX_WAITING",
    "STAR_EDGE",
    "TokenProvider",
    "Uplink",
    "UplinkPhase",
    "UplinkState",
    "client_context",
    "expert_url",
    "ring_url",
]

STAR_EDGE = "experts-"
"""Edge name, with a number after it, of a session that a ring's stage keeps waiting for one worker."""
MAX_WAITING = 256
"""Most such sessions of a stage."""
ASIDE_AFTER_S = 5.0
"""How long a session goes on beside the path that is to replace it: that one may come to nothing."""
_TOKEN = re.compile(r"[!-~]+")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class UplinkPhase(StrEnum):
    CLOSED = "closed"
    DIALLING = "dialling"
    OPEN = "open"
    WAITING = "waiting"
    ASIDE = "aside"


@dataclass(frozen=True, slots=True)
class UplinkState:
    """An uplink at one moment."""

    session: str
    url: str
    """Without its query, which may hold a token."""
    phase: UplinkPhase
    since: float
    """When the phase began, on the injected clock."""
    since_s: float
    """How long ago that is."""
    retry_in_s: float | None
    """Only while waiting."""
    rtt_ms: float | None
    """Round trip of the latest ping; ``None`` before the first answer, and while not open."""
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
        count: OwnCount | None = None,
    ) -> None:
        """
        Args:
            url: ``wss://...`` with the session in its query and no token (``expert_url``, ``ring_url``).
            token_in_header: the relay takes the token in ``Authorization``; otherwise it goes into the query.
            ssl_context: from ``client_context``; ``None`` trusts the system's authorities.
            on_change: told of every change of phase; must not raise.
            count: this session's totals, to go on from.

        Raises:
            NetworkError: the URL is not a relay's, or not encrypted though it leaves this machine.
        """
        self._target = Target(url)
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
        self._dead_after_s = ping_interval_s + ping_timeout_s
        self._close_timeout_s = close_timeout_s
        self._backoff = Backoff(redial_min_s, redial_max_s, rng=rng)
        self._clock = clock
        self._on_change = on_change
        self.count = count if count is not None else OwnCount()
        """What this node counted of the session, settled with the relay's answers (``counting``)."""
        self._phase = UplinkPhase.CLOSED
        self._since = clock()
        self._retry_at: float | None = None
        self._relay: ClientSocket | None = None
        self._last_close: Closing | None = None
        self._bytes_up = 0
        self._bytes_down = 0
        self._connects = 0
        self._closing = asyncio.Event()
        self._aside = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._finished.set()

    def snapshot(self) -> UplinkState:
        now = self._clock()
        return UplinkState(
            session=self._session,
            url=self._target.public,
            phase=self._phase,
            since=self._since,
            since_s=now - self._since,
            retry_in_s=max(0.0, self._retry_at - now) if self._retry_at is not None else None,
            rtt_ms=self._relay.rtt_ms if self._relay is not None else None,
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
                if self._aside.is_set():
                    self._enter(UplinkPhase.ASIDE)
                    await self._unless_closing(self._resumed.wait())
                    continue
                self._enter(UplinkPhase.DIALLING)
                self._last_close = await self._once()
                if self._closing.is_set() or self._aside.is_set():
                    continue
                delay_s = self._backoff.next_s()
                _log.info("session %s: %s; next try in %.1f s", self._session, self._last_close.text, delay_s)
                self._wake.clear()
                self._enter(UplinkPhase.WAITING, delay_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._wake.wait()
        finally:
            self._enter(UplinkPhase.CLOSED)
            self._finished.set()

    def redial(self) -> None:
        """Dial now if waiting, for example because coverage was just reported."""
        self._wake.set()

    def stand_aside(self) -> None:
        """Another path carries this session now: end the connection in a while, and dial no other."""
        self._resumed.clear()
        self._aside.set()
        self._wake.set()

    def resume(self) -> None:
        """The other path is gone: dial at once."""
        self._aside.clear()
        self._resumed.set()
        self._backoff.reset()

    async def close(self) -> None:
        """End the session with 1000 and return once ``run`` has."""
        self._closing.set()
        self._wake.set()
        await self._finished.wait()

    def _enter(self, phase: UplinkPhase, delay_s: float | None = None) -> None:
        self._phase = phase
        self._since = self._clock()
        self._retry_at = self._since + delay_s if delay_s is not None else None
        if self._on_change is not None:
            self._on_change(self.snapshot())

    async def _once(self) -> Closing:
        """One connection, from token to end; returns why it is over."""
        try:
            relay = await self._unless_closing(self._dial())
        except DialError as error:
            return error.closing
        except KvasirError as error:
            return Closing(None, "", error.message, error.hint or "trying again")
        if relay is None:
            return explain(CloseCode.NORMAL)
        self._relay = relay
        self.count.opened(relay.headers)
        try:
            self._connects += 1
            self._enter(UplinkPhase.OPEN)
            return await self._carry(relay)
        finally:
            self._note_counts()
            self._relay = None
            relay.abort()

    async def _dial(self) -> ClientSocket:
        refused = self._last_close is not None and self._last_close.code == CloseCode.UNAUTHORISED
        token = await self._token(refresh=refused)
        if not _TOKEN.fullmatch(token):
            raise DialError(Closing(None, "", "the node token is empty or not printable", "trying again"))
        return await dial(
            self._target,
            token,
            token_in_header=self._token_in_header,
            ssl_context=self._ssl,
            user_agent=self._user_agent,
            open_timeout_s=self._open_timeout_s,
            close_timeout_s=self._close_timeout_s,
            extra_headers=self.count.header(),
        )

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

    async def _carry(self, relay: ClientSocket) -> Closing:
        """Join the relay to the engine until one of them ends; returns why."""
        try:
            async with asyncio.timeout(self._engine_timeout_s):
                engine = SocketEnd(*await asyncio.open_unix_connection(self._engine_socket))
        except OSError as error:  # a timeout is one too
            await relay.close(CloseCode.UPSTREAM, "engine gone")
            reason = clean(error.strerror or "")
            return Closing(CloseCode.UPSTREAM, reason, "this node's engine does not answer", "trying again")
        try:
            await engine.write(self._preamble.encode())
            await race(
                pump(relay, engine, self._count_down),
                pump(engine, relay, self._count_up),
                relay.keep_alive(self._ping_interval_s, self._dead_after_s),
                self._closing.wait(),
                self._replaced(),
            )
        except PathDeadError:
            meaning = f"the relay gave no sign of life for {self._dead_after_s:g} s"
            return Closing(CloseCode.ABNORMAL, "", meaning, "dialling again")
        except ConnectionError:
            pass  # one side is gone; which one is seen below
        finally:
            await engine.close()
        if self._closing.is_set() or self._aside.is_set() or not relay.open:
            return await relay.close()
        await relay.close(CloseCode.UPSTREAM, "engine gone")
        return Closing(CloseCode.UPSTREAM, "", "this node's engine ended the session", "dialling again")

    async def _replaced(self) -> None:
        """Until this session has stood aside for a while."""
        while True:
            await self._aside.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(ASIDE_AFTER_S):
                    await self._resumed.wait()
            if self._aside.is_set():
                return

    def _count_down(self, size: int) -> None:
        self._backoff.reset()
        self._bytes_down += size
        self._note_counts()

    def _count_up(self, size: int) -> None:
        self._bytes_up += size
        self._note_counts()

    def _note_counts(self) -> None:
        if self._relay is not None:
            self.count.sent, self.count.received = self._relay.sent_bytes, self._relay.received_bytes
