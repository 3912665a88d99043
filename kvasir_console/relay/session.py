"""One admitted session of the hub: what it is, what it has carried, whom it is joined to, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from kvasir_console.relay.authority import Admission
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.counting import Tally
from kvasir_console.relay.server_socket import Ending, ServerSocket
from kvasir_console.relay.splice import CHUNK_BYTES, Sink

HOLD_BYTES = CHUNK_BYTES
"""What is kept of an end that speaks before its partner came; then it is not read any more."""

PEER_LEFT = Ending(CloseCode.GOING_AWAY, "the other end left")


class Partner(Sink, Protocol):
    """Whom a ring edge or an entry is joined to: the session at the other end, or the gateway."""

    async def part(self) -> None:
        """The session this partner was joined to is over."""
        ...


class Session:
    """A live session. Its own task runs it; others may only ``end`` it, write to it or become its partner."""

    def __init__(self, admission: Admission, ws: ServerSocket) -> None:
        loop = asyncio.get_running_loop()
        self.admission = admission
        self.ws = ws
        self.tally = Tally(admission.key, admission.wallet)
        """The one of its key, once the session is the live one."""
        self.ending: asyncio.Future[Ending] = loop.create_future()
        self.partner: asyncio.Future[Partner] = loop.create_future()
        self.passed: Callable[[int], None] | None = None
        """Told, beside the tally, what the partner took."""
        self.ready = False
        """May be given a partner."""
        self.left = asyncio.Event()
        """Set once the session carries nothing any more; its WebSocket may still be saying goodbye."""

    def delivered(self, size: int) -> None:
        """The partner took so many bytes of this session's node."""
        self.tally.add_ws2tcp(size)
        if self.passed is not None:
            self.passed(size)

    def end(self, ending: Ending) -> None:
        """End the session with this close; the first caller decides."""
        if not self.ending.done():
            self.ending.set_result(ending)

    async def ended(self) -> None:
        await asyncio.wait([self.ending])

    @property
    def free(self) -> bool:
        return self.ready and not self.partner.done() and not self.ending.done()

    async def write(self, data: bytes | memoryview, /) -> None:
        await self.ws.write(data)

    async def part(self) -> None:
        self.end(PEER_LEFT)

    async def hold(self, first: bytes, limit: int) -> bytes | None:
        """Wait for a partner; returns ``first`` and what the node sent meanwhile, ``None`` if it left.

        Reading goes on until ``limit`` bytes are held, so a node that waits gets its pings answered and is missed
        when it goes.
        """
        held = bytearray(first)
        self.ready = True
        try:
            while not self.partner.done():
                if len(held) >= limit:
                    await asyncio.wait([self.partner])
                    break
                reading = asyncio.ensure_future(self.ws.read())
                either: list[asyncio.Future[Any]] = [reading, self.partner]
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    reading.cancel()
                    [chunk] = await asyncio.gather(reading, return_exceptions=True)
                if chunk == b"":
                    return None
                if isinstance(chunk, bytes):
                    held += chunk
        finally:
            self.ready = False
        return bytes(held)
