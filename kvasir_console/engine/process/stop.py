"""Stop strings: found wherever token boundaries fall, and never shown in part."""

from __future__ import annotations


class StopScanner:
    """Releases text as it comes, but holds back what may be the beginning of a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self._released: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._released)

    def push(self, text: str) -> str:
        """Take new text, return what may be shown now."""
        if self.stopped:
            return ""
        self._held += text
        cut = min((at for stop in self._stop if (at := self._held.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            return self._release(cut)
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return self._release(len(self._held) - keep)

    def flush(self) -> str:
        """The end: what was held back is no stop string after all."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, count: int) -> str:
        ready, self._held = self._held[:count], self._held[count:]
        self._released.append(ready)
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
