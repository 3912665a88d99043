"""When experts leave the machine at all (pure).

The trunk holds every expert. In quiet times it computes them itself: no hop is faster than none. When its streams
saturate it, experts go to *proven* workers, and a new one gets a fair first try: the one that has waited longest for
it, one at a time, with every pair checked. As it quietens, experts come back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Dispatch(StrEnum):
    """What the operator wants."""

    ALWAYS = "always"
    """Whatever a session holds is asked of it."""
    ELASTIC = "elastic"
    """Only under load."""


BUSY_STREAMS = 4
"""So many streams in one step saturate a trunk unless its owner says otherwise."""
CALM_S = 5.0
"""How long a trunk must have been under its mark before experts come back."""


@dataclass(slots=True)
class Elastic:
    """Quiet or saturated, decided from the number of streams in each step."""

    mode: Dispatch = Dispatch.ALWAYS
    busy_streams: int = BUSY_STREAMS
    calm_s: float = CALM_S
    _saturated: bool = False
    _busy_at: float = 0.0

    @property
    def streaming(self) -> bool:
        """Whether experts are to be asked of workers now."""
        return self.mode is Dispatch.ALWAYS or self._saturated

    @property
    def saturated(self) -> bool:
        return self._saturated

    def observe(self, streams: int, now: float) -> None:
        """A step of so many streams begins at ``now`` (seconds of a steady clock)."""
        if streams >= self.busy_streams:
            self._saturated, self._busy_at = True, now
        elif self._saturated and now - self._busy_at >= self.calm_s:
            self._saturated = False


@dataclass(frozen=True, slots=True)
class Newcomer:
    """An unproven session that holds some of what is wanted."""

    name: str
    connected_at: float
    tried_pairs: int
    under_way: bool


def first_try(newcomers: Iterable[Newcomer]) -> str | None:
    """Who is tried next: whoever was tried least, then who came first; nobody while one is being tried."""
    waiting = list(newcomers)
    if not waiting or any(each.under_way for each in waiting):
        return None
    return min(waiting, key=lambda each: (each.tried_pairs, each.connected_at, each.name)).name
