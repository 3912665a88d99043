"""A ring stage's sessions for workers: one always waits at the hub, so that the next worker finds it.

The stage owns the router of its MoE layers, but nobody can dial its machine. So it dials out: each of these sessions
is joined by the hub to one worker that holds experts of the stage's layers. A session is taken once bytes have come
on it (the first are the hub's, and say who the worker is); then another one is dialled. A session whose worker left
is dialled again and waits for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvasir_console.relay.uplink import MAX_WAITING, UplinkPhase, UplinkState

TEND_S = 0.2


class Session(Protocol):
    """``relay.uplink.Uplink``, as far as it matters here."""

    def snapshot(self) -> UplinkState: ...


class Star:
    """Decides when another session is dialled. ``dial`` makes and starts the session of a slot."""

    def __init__(self, dial: Callable[[int], Session], most: int = MAX_WAITING) -> None:
        self._dial = dial
        self._most = most
        self._sessions: list[Session] = []
        self._opened_with: dict[int, int] = {}

    async def run(self) -> None:
        """Tend until cancelled."""
        while True:
            self.tend()
            await asyncio.sleep(TEND_S)

    def tend(self) -> None:
        """Dial another session if every one so far has its worker."""
        if len(self._sessions) < self._most and all(self._taken(slot) for slot in range(len(self._sessions))):
            self._sessions.append(self._dial(len(self._sessions)))

    def changed(self, slot: int, state: UplinkState) -> None:
        """A session's phase changed."""
        if state.phase is UplinkPhase.OPEN:
            self._opened_with[slot] = state.bytes_down

    def _taken(self, slot: int) -> bool:
        state = self._sessions[slot].snapshot()
        return state.phase is UplinkPhase.OPEN and state.bytes_down > self._opened_with.get(slot, state.bytes_down)
