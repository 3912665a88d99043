"""What a worker session needs of the wire it speaks, and the outbox that every wire writes through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.preamble import Wire
from kvasir_console.relay.wire.values import Dtype

CLOSE_TIMEOUT_S = 2.0
F32Array = np.ndarray[Any, np.dtype[np.float32]]


class WorkerError(Exception):
    """The worker refused a request, or answered with what cannot be used; the session may well live on.

    ``reason`` is a stable lower_snake name.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An answered request."""

    sums: F32Array
    """(R, D) weighted sums."""
    elapsed_ms: float
    """From the write to the answer."""
    took_ms: float | None
    """How long the worker says it took; None on a wire that does not say."""


class Link(Protocol):
    """One dispatch stream as the trunk speaks it. ``receive`` runs until the stream ends."""

    wire: Wire
    dtype: Dtype
    """What rows and sums are written in, unless that cannot carry them."""
    draining: bool
    """The worker asked for no more work; what comes all the same, it answers."""
    ping_ms: float | None

    def fits(self, n_rows: int, n_pairs: int) -> bool:
        """Whether one request may be so large."""
        ...

    def as_received(self, request: Request) -> tuple[F32Array, F32Array]:
        """Rows (R, D) and weights (P,) as the worker reads them."""
        ...

    async def ask(self, slice_: int, request: Request) -> Reply:
        """Ask for the sums of ``request``, whose ids are local to the slice. Cancelling costs the session nothing.

        Raises:
            OSError: the session is over.
            ValueError: the request cannot be carried, or the reply breaks the contract.
            WorkerError: the worker refuses or fails.
        """
        ...

    async def receive(self) -> str:
        """Take what the worker sends until it has ended the session; returns why.

        Raises:
            OSError, EOFError: the stream broke off.
            ValueError: the worker broke the contract.
        """
        ...

    def close(self, why: str) -> None:
        """End the stream; whoever waits for an answer gets ``ConnectionResetError``."""
        ...


class Outbox:
    """Gathers what is sent in one turn of the event loop into one write."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pieces: list[bytes | bytearray | memoryview] = []
        self.closed = False

    async def ready(self) -> None:
        """Wait while the socket is behind. Raises ``OSError`` once the stream is closed."""
        if not self.closed:
            await self._writer.drain()
        if self.closed:
            raise ConnectionResetError("the session is closed")

    def post(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        if pieces and not self._pieces:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pieces += pieces

    def close(self) -> None:
        """Write what is left, and close; a peer that does not take it is not waited for."""
        if self.closed:
            return
        self._flush()
        self.closed = True
        with contextlib.suppress(OSError):
            self._writer.close()
        asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._writer.transport.abort)

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self.closed:
            self._writer.writelines(pieces)
