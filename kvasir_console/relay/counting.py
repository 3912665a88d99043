"""Bytes of a relay session, counted at both ends so that the two agree to the byte, whatever broke in between.

A connection that breaks leaves bytes that one end sent and the other never got. What counts is what arrived: the hub
knows what it delivered from the node, the node what it received from the hub. Both learn the other's number when the
node dials again:

    node → hub   Kvasir-Received: {connection} {bytes}         of its last connection
    hub → node   Kvasir-Counted: {connection} {up} {down}      what that connection is settled at
                 Kvasir-Connection: {connection}               the name of the new one

The hub believes a node no more than it sent and no less than the node confirmed: its pings carry the number of bytes
sent before them, and the pong brings it back. Peers that know none of these headers lose nothing but the agreement.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONNECTION_HEADER = "Kvasir-Connection"
RECEIVED_HEADER = "Kvasir-Received"
COUNTED_HEADER = "Kvasir-Counted"
_NAME = re.compile(r"[0-9a-f]{16}")
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,18})")
_SETTLED_KEPT = 8
"""Settled connections a hub can still name: a node whose dials fail half-way asks for an older one."""


@dataclass(frozen=True, slots=True)
class SessionCount:
    """Payload bytes of one (wallet, key), over all its connections."""

    key: str
    wallet: str
    ws2tcp: int
    """Bytes from the node, delivered to the engine, the other end of the edge or the gateway."""
    tcp2ws: int
    """Bytes sent to the node."""
    connected: bool
    connects: int
    opened_at: float
    """Unix time of the latest connection, seconds."""
    last_close: tuple[int, str] | None
    """Close code and reason of the latest connection that ended."""
    worker: str = ""
    model_digest: str = ""
    confirmed: int = 0
    """Bytes to the node that are known to have arrived: never more than ``tcp2ws``."""


@dataclass(slots=True)
class Tally:
    """The hub's running totals behind a ``SessionCount``. ``state`` and ``restore`` carry them over a restart."""

    key: str
    wallet: str
    worker: str = ""
    model_digest: str = ""
    connected: bool = False
    connects: int = 0
    opened_at: float = 0.0
    last_close: tuple[int, str] | None = None
    closed_at: float = 0.0
    """When the latest connection ended, Unix seconds."""
    connection: str = ""
    """Name of the latest connection; empty before the first."""
    _up: int = 0
    _down: int = 0
    """Of the settled connections."""
    _sent_before: int = 0
    _connection_up: int = 0
    _connection_sent: int = 0
    _connection_confirmed: int = 0
    _settled: dict[str, tuple[int, int]] = field(default_factory=dict)

    def enter(self, now: float) -> str:
        """A new connection begins; its name."""
        self._settle(self._connection_confirmed)
        self.connection = secrets.token_hex(8)
        self.connected = True
        self.connects += 1
        self.opened_at = now
        return self.connection

    def leave(self, code: int, reason: str) -> None:
        self.connected = False
        self.last_close = (code, reason)

    def add_ws2tcp(self, size: int) -> None:
        self._connection_up += size

    def add_tcp2ws(self, size: int) -> None:
        self._connection_sent += size

    def mark(self) -> bytes:
        """The payload of a ping: how much went before it."""
        return f"{self.connection} {self._connection_sent}".encode()

    def confirm(self, mark: bytes) -> None:
        """A pong came back with a ``mark``; anything else is ignored."""
        claim = parse_received(mark.decode("ascii", "replace"))
        if claim is not None and claim[0] == self.connection and claim[1] <= self._connection_sent:
            self._connection_confirmed = max(self._connection_confirmed, claim[1])

    def settle(self, received: str) -> str:
        """Answer a node's ``Kvasir-Received``: what that connection is settled at; empty if the header is none."""
        claim = parse_received(received)
        if claim is None:
            return ""
        connection, got = claim
        if connection == self.connection:
            self._settle(min(max(got, self._connection_confirmed), self._connection_sent))
        up, down = self._settled.get(connection, (0, 0))
        return f"{connection} {up} {down}"

    def _settle(self, down: int) -> None:
        if not self.connection:
            return
        self._settled[self.connection] = (self._connection_up, down)
        while len(self._settled) > _SETTLED_KEPT:
            del self._settled[next(iter(self._settled))]
        self._up += self._connection_up
        self._down += down
        self._sent_before += self._connection_sent
        self.connection = ""
        self._connection_up = self._connection_sent = self._connection_confirmed = 0

    def count(self) -> SessionCount:
        return SessionCount(
            key=self.key,
            wallet=self.wallet,
            ws2tcp=self._up + self._connection_up,
            tcp2ws=self._sent_before + self._connection_sent,
            connected=self.connected,
            connects=self.connects,
            opened_at=self.opened_at,
            last_close=self.last_close,
            worker=self.worker,
            model_digest=self.model_digest,
            confirmed=self._down + self._connection_confirmed,
        )

    def state(self) -> dict[str, Any]:
        """What has to outlive the process, as JSON values."""
        return {
            "up": self._up,
            "down": self._down,
            "sent": self._sent_before,
            "connection": self.connection,
            "connection_up": self._connection_up,
            "connection_sent": self._connection_sent,
            "connection_confirmed": self._connection_confirmed,
            "settled": {name: list(counts) for name, counts in self._settled.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` said. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for another shape."""
        self._up, self._down, self._sent_before = int(state["up"]), int(state["down"]), int(state["sent"])
        self.connection = str(state["connection"])
        self._connection_up = int(state["connection_up"])
        self._connection_sent = int(state["connection_sent"])
        self._connection_confirmed = int(state["connection_confirmed"])
        self._settled = {str(name): (int(up), int(down)) for name, (up, down) in state["settled"].items()}


@dataclass(slots=True)
class Joint:
    """Payload bytes between one stage of a ring and one worker's session, over all their connections: what a stage's
    reports about that worker are bounded by."""

    star: str
    """The stage's sessions for workers (``Admission.star``)."""
    stage: str
    """The stage's wallet."""
    wallet: str
    """The worker's, as are the session and the worker id."""
    session: str
    worker: str
    """Who it was when they first met: a counter never moves to another worker."""
    down: int = 0
    """Delivered to the worker."""
    up: int = 0
    """Delivered to the stage."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.star, self.stage, self.wallet, self.session

    def add_down(self, size: int) -> None:
        self.down += size

    def add_up(self, size: int) -> None:
        self.up += size


@dataclass(slots=True)
class OwnCount:
    """The node's side of one session: what it sent and received by its own count, settled with the hub's answers."""

    up: int = 0
    """Of settled connections, as are ``down`` and ``lost_up``."""
    down: int = 0
    lost_up: int = 0
    """Sent on connections that broke before the hub delivered it."""
    disputed: int = 0
    """Bytes by which the hub said it got or sent more than this node ever counted."""
    connection: str = ""
    sent: int = 0
    """On the current connection, or the last one until it is settled."""
    received: int = 0
    restored: bool = False
    """``sent`` and ``received`` are from a file that may be older than the connection was."""

    def header(self) -> dict[str, str]:
        """What to send with a dial."""
        return {RECEIVED_HEADER: f"{self.connection} {self.received}"} if self.connection else {}

    def opened(self, headers: Mapping[str, str]) -> None:
        """A connection is open; ``headers`` came with the 101. Settles the one before it."""
        told = {name.lower(): value for name, value in headers.items()}
        counted = parse_counted(told.get(COUNTED_HEADER.lower(), ""))
        if counted is not None and counted[0] == self.connection:
            _, up, down = counted
            if not self.restored:
                self.disputed += max(0, up - self.sent) + max(0, down - self.received)
                up, down = min(up, self.sent), min(down, self.received)
                self.lost_up += self.sent - up
            self.up += up
            self.down += down
        else:
            self.up += self.sent
            self.down += self.received
        name = told.get(CONNECTION_HEADER.lower(), "")
        self.connection = name if _NAME.fullmatch(name) else ""
        self.sent = self.received = 0
        self.restored = False

    @property
    def total_up(self) -> int:
        return self.up + self.sent

    @property
    def total_down(self) -> int:
        return self.down + self.received

    def to_json(self) -> dict[str, Any]:
        names = ("up", "down", "lost_up", "disputed", "connection", "sent", "received")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OwnCount:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for another shape."""
        counts = {name: int(data[name]) for name in ("up", "down", "lost_up", "disputed", "sent", "received")}
        return cls(**counts, connection=str(data["connection"]), restored=True)


def parse_received(text: str) -> tuple[str, int] | None:
    """(connection, bytes) of a ``Kvasir-Received``; ``None`` if it is none."""
    name, _, number = text.partition(" ")
    if _NAME.fullmatch(name) and _NUMBER.fullmatch(number):
        return name, int(number)
    return None


def parse_counted(text: str) -> tuple[str, int, int] | None:
    """(connection, bytes up, bytes down) of a ``Kvasir-Counted``; ``None`` if it is none."""
    name, *numbers = text.split(" ")
    if _NAME.fullmatch(name) and len(numbers) == 2 and all(_NUMBER.fullmatch(number) for number in numbers):
        return name, int(numbers[0]), int(numbers[1])
    return None
