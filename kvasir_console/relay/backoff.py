"""How long to wait before the next dial: a pure schedule with its randomness injected."""

from __future__ import annotations

import random


class Backoff:
    """Delays that double from ``minimum_s`` to ``maximum_s`` until ``reset``.

    Every delay is shortened by up to a quarter at random, so nodes that lost one relay together do not come back
    together (node contract, section 3a: 5 s doubling to 60 s).
    """

    SPREAD = 0.25

    def __init__(self, minimum_s: float = 5.0, maximum_s: float = 60.0, *, rng: random.Random | None = None) -> None:
        if not 0 < minimum_s <= maximum_s:
            raise ValueError("a backoff needs 0 < minimum_s <= maximum_s")
        self._minimum_s = minimum_s
        self._maximum_s = maximum_s
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 (spreads load, guards nothing)
        self._step_s = minimum_s

    def next_s(self) -> float:
        """Seconds to wait now; the wait after it is twice as long, up to the maximum."""
        delay = self._step_s * (1.0 - self.SPREAD * self._rng.random())
        self._step_s = min(self._maximum_s, 2.0 * self._step_s)
        return delay

    def reset(self) -> None:
        """The path works again: the next wait is the shortest one."""
        self._step_s = self._minimum_s
