"""Requests that outlive the stream that asked for them: whoever comes back with the key goes on following.

A gateway whose session with this engine was cut finds its requests still running. One that nobody follows any more is
kept for ``keep_s``, over or not, and then cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

KEEP_S = 120.0
MAX_KEPT = 1024


class Followed(Protocol):
    """A request that runs (``generate.Generation``); leaving it cancels it."""

    def follow(self, index: int) -> AsyncIterator[Any]: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(slots=True)
class _Entry:
    request: Followed
    followers: int = 0
    expiry: asyncio.TimerHandle | None = None


class Kept:
    """By key."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._entries: dict[int, _Entry] = {}
        self._dropping: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: int) -> Followed | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.request

    def add(self, key: int, request: Followed) -> None:
        """Keep a request. Of very many, the oldest that nobody follows makes room."""
        if len(self._entries) >= MAX_KEPT:
            idle = next((each for each, entry in self._entries.items() if not entry.followers), None)
            if idle is not None:
                self._expire(idle)
        self._entries[key] = _Entry(request)

    @contextlib.contextmanager
    def following(self, key: int) -> Iterator[None]:
        """While somebody follows a request it does not expire."""
        entry = self._entries[key]
        entry.followers += 1
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        try:
            yield
        finally:
            entry.followers -= 1
            if not entry.followers and self._entries.get(key) is entry:
                entry.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._expire, key)

    async def give_up(self, key: int) -> None:
        """One follower wants no more; the last one's word cancels the request."""
        entry = self._entries.get(key)
        if entry is not None and entry.followers <= 1:
            await self.drop(key)

    async def drop(self, key: int) -> None:
        """Cancel a request and forget it."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            if entry.expiry is not None:
                entry.expiry.cancel()
            await entry.request.__aexit__(None, None, None)

    def close(self) -> None:
        """Forget all; the scheduler ends them."""
        for entry in self._entries.values():
            if entry.expiry is not None:
                entry.expiry.cancel()
        self._entries.clear()

    def _expire(self, key: int) -> None:
        task = asyncio.get_running_loop().create_task(self.drop(key), name="kept-expires")
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)
