"""Into how many groups a trunk's streams are put, so that one computes while another waits for the network (pure).

With G groups of n/G streams each, a cycle in which every stream gets a token takes max(G c, c + w): c is what a group's
step computes, w what it then waits. More groups hide more, and cost more: a step of few rows reads the weights for few
rows. Both are measured, so the number is the best one there and changes with the network and the load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_GROUPS = 4
GAIN = 1.03
"""Another number of groups has to promise so much more."""
_MEMORY = 0.9
_HOLD_STEPS = 32
"""A number of groups is kept for so many steps, or its measurements would be of the change."""
_SAME_LOAD = 0.25
"""Measurements hold for so much more or fewer streams."""


@dataclass(slots=True)
class Groups:
    """Chooses a number of groups from the steps so far. One that was never tried counts as dividing without loss, so
    that it is tried where it could be worth it, and left again if it is not."""

    forced: int = 0
    """0 for the measured choice."""
    _step_s: dict[int, float] = field(default_factory=dict)
    """By number of groups: what a step computes."""
    _wait_s: float = 0.0
    _streams: int = 0
    _count: int = 1
    _held: int = 0

    @property
    def count(self) -> int:
        return self.forced or self._count

    def record(self, computed_s: float, waited_s: float, streams: int) -> None:
        """A step of decoding rows is over.

        Args:
            computed_s: of its time, what this machine computed.
            waited_s: how long its answers took once nothing was left to compute.
            streams: that decode, in all groups.
        """
        if abs(streams - self._streams) > _SAME_LOAD * streams:
            self._step_s.clear()
            self._streams, self._held = streams, 0
        self._held += 1
        if 4 * self._held <= _HOLD_STEPS:
            return  # the steps of a change are neither the one nor the other
        known = self._step_s.get(self._count, computed_s)
        # What disturbs a step makes it longer only.
        self._step_s[self._count] = _MEMORY * known + (1 - _MEMORY) * min(computed_s, 2 * known)
        self._wait_s = _MEMORY * self._wait_s + (1 - _MEMORY) * waited_s
        if self._held < _HOLD_STEPS:
            return
        most = min(MAX_GROUPS, max(1, streams))
        best = min(range(1, most + 1), key=self._cycle_s)
        if best != self._count and self._cycle_s(best) * GAIN < self._cycle_s(self._count):
            self._count, self._held = best, 0

    def _cycle_s(self, count: int) -> float:
        computing = self._step_s.get(count)
        if computing is None:
            fewer = max((known for known in self._step_s if known < count), default=self._count)
            computing = self._step_s[fewer] * fewer / count
        return max(count * computing, computing + self._wait_s)
