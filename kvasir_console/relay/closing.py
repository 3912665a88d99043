"""Close codes of a relay session, what each means to a node, and what happens next.

Codes below 3000 are RFC 6455 section 7.4.1; the 44xx codes are the relay's own (gateway contract, section 5.1). A
refusal is a close code because the relay answers 101 first: a client that only understands sockets then learns why.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

_REASON_MAX_BYTES = 123
"""A control frame carries 125 bytes (RFC 6455 section 5.5), two of them the code."""


class CloseCode(IntEnum):
    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL = 1002
    NO_STATUS = 1005
    """Never sent: the peer closed without a code."""
    ABNORMAL = 1006
    """Never sent: the connection ended without a close frame."""
    TOO_BIG = 1009
    UPSTREAM = 1011
    UNAUTHORISED = 4401
    FORBIDDEN = 4403
    UNKNOWN_SESSION = 4404


_TABLE: dict[int, tuple[str, str]] = {
    CloseCode.NORMAL: ("the relay ended the session normally", "dialling again"),
    CloseCode.GOING_AWAY: ("the relay or the other end is going away", "dialling again"),
    CloseCode.PROTOCOL: ("the relay found a protocol error", "dialling again; if it repeats, update this program"),
    CloseCode.NO_STATUS: ("the relay closed without a reason", "dialling again"),
    CloseCode.ABNORMAL: ("the connection was lost", "dialling again"),
    CloseCode.TOO_BIG: ("the relay refused a frame as too big", "dialling again; if it repeats, update this program"),
    CloseCode.UPSTREAM: ("nothing listens for this session at the relay yet", "dialling again until something does"),
    CloseCode.UNAUTHORISED: ("the node token is missing, wrong or expired", "asking for a new token, then dialling"),
    CloseCode.FORBIDDEN: (
        "not admitted, or the session name belongs to another wallet",
        "check that this wallet is admitted, or choose another node name",
    ),
    CloseCode.UNKNOWN_SESSION: ("the relay does not know this session", "reporting coverage again, then dialling"),
}


@dataclass(frozen=True, slots=True)
class Closing:
    """Why a session is not open: the code if there was one, the peer's words, and ours."""

    code: int | None
    """Close code, or ``None`` if the connection never opened."""
    reason: str
    meaning: str
    action: str

    @property
    def text(self) -> str:
        """One line for a person: code, meaning, the peer's reason if it gave one, next action."""
        code = f"{self.code}: " if self.code is not None else ""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{code}{self.meaning}{reason}; {self.action}"


def explain(code: int, reason: str = "") -> Closing:
    """The ``Closing`` for a code received from a relay; ``reason`` may be hostile and is cleaned."""
    meaning, action = _TABLE.get(code, ("the relay closed the session", "dialling again"))
    return Closing(code, clean(reason), meaning, action)


def clean(reason: str) -> str:
    """``reason`` with nothing in it that could move a cursor, and short enough for a close frame."""
    printable = "".join(character if character.isprintable() else " " for character in reason)
    return printable.encode()[:_REASON_MAX_BYTES].decode(errors="ignore").strip()
