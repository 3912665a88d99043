"""A model's admission queue: so many requests at once, so many waiting, first come first served (contract 6.2)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvasir_console.errors import EngineError

MAX_CONCURRENT = 8
MAX_WAITING = 16
"""What the contract says; the operator may say otherwise (``gateway.max_requests``, ``gateway.max_waiting``)."""
WAIT_S = 120.0
RETRY_AFTER_FULL_S = 5
RETRY_AFTER_WAITED_S = 10


class BusyError(EngineError):
    """No slot: the queue is full, or the wait was too long."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            "ring_busy", "The model serves as many requests as it can.", f"Try again in {retry_after_s} seconds."
        )
        self.retry_after_s = retry_after_s


class Slots:
    def __init__(
        self, max_concurrent: int = MAX_CONCURRENT, max_waiting: int = MAX_WAITING, wait_s: float = WAIT_S
    ) -> None:
        self._free = max_concurrent
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a slot. Raises ``BusyError``; whoever leaves while waiting gives up the place."""
        if self._free:
            self._free -= 1
        else:
            await self._wait()
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise BusyError(RETRY_AFTER_FULL_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await asyncio.shield(turn)
        except BaseException as error:
            if turn.done():
                self._pass_on()  # the slot came in the moment of leaving
            else:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise BusyError(RETRY_AFTER_WAITED_S) from None
            raise

    def _pass_on(self) -> None:
        """Give a slot to the first that waits, without letting a newcomer in between."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._free += 1
