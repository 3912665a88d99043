"""Who may dial: the question the hub asks for every session, and the answers it understands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvasir_console.errors import NetworkError
from kvasir_console.relay.wire.preamble import Preamble


class Refused(NetworkError):  # noqa: N818 (an answer, raised by an authority)
    """A session is refused; the dialling node is told with this close code (``closing.CloseCode``)."""

    http_status = 403

    def __init__(self, close_code: int, reason: str) -> None:
        super().__init__("relay_refused", f"A relay session was refused with {close_code}: {reason}.")
        self.close_code = close_code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted session is and where its bytes go."""

    key: str
    """One live session per key: a session name, or ``ring/edge/role``."""
    wallet: str
    worker: str = ""
    """Whose bytes these are among the wallet's workers."""
    model_digest: str = ""
    """Of the model they are for, in hexadecimal digits."""
    peer_key: str | None = None
    """Ring edge: the key of the other end."""
    preamble: Preamble | None = None
    """Expert session: what the engine is told first."""
    engine_socket: Path | None = None
    """Expert session: the data socket of the engine that dispatches."""
    star: str | None = None
    """Experts of a ring's stage: the star that this session is part of, as the worker (it has a ``preamble``) or as one
    of the stage's sessions that wait for workers."""
    entry_model: str | None = None
    """Entry edge of a ring: the model that the ring serves."""


class Authority(Protocol):
    """Decides who may dial. ``query`` never holds the token."""

    async def admit(self, path: str, query: Mapping[str, str], token: str | None) -> Admission:
        """The admission of one dial. Raises ``Refused``."""
        ...
