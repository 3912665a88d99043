"""A longer memory for a node's log: snapshots carry its last lines, and successive ones overlap."""

from __future__ import annotations

from collections.abc import Sequence

MOST_LINES = 1000
GAP = "... lines are missing here ..."


class LogBuffer:
    """The last ``most`` lines that were seen, oldest first."""

    def __init__(self, most: int = MOST_LINES) -> None:
        self._most = most
        self._lines: list[str] = []
        self._window: tuple[str, ...] = ()

    @property
    def lines(self) -> Sequence[str]:
        return self._lines

    def take(self, window: tuple[str, ...]) -> tuple[int, int]:
        """Add what is new in ``window``, a node's newest lines. Returns how many were added, how many dropped.

        If nothing of it is known, lines were missed in between and a line says so.
        """
        if window == self._window:
            return 0, 0
        self._window = window
        known = self._overlap(window)
        new = list(window[known:])
        if self._lines and not known and new:
            new.insert(0, GAP)
        self._lines += new
        dropped = max(0, len(self._lines) - self._most)
        del self._lines[:dropped]
        return len(new), dropped

    def _overlap(self, window: tuple[str, ...]) -> int:
        """Most lines at the window's beginning that are the buffer's end."""
        for size in range(min(len(window), len(self._lines)), 0, -1):
            if self._lines[-size] == window[0] and tuple(self._lines[-size:]) == window[:size]:
                return size
        return 0
