"""What a node tells whoever looks at it: its phase with the reason, how far a download is, and its latest lines."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from kvasir_console.node import phase
from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import DownloadView

log = logging.getLogger(__name__)

LOG_LINES = 200


class Journal:
    """``on_phase`` is called after every change of phase, not when only the reason changes."""

    def __init__(self, on_phase: Callable[[], None]) -> None:
        self.state = phase.initial(time.time())
        self.download: DownloadView | None = None
        self._on_phase = on_phase
        self._lines: deque[str] = deque(maxlen=LOG_LINES)

    @property
    def lines(self) -> tuple[str, ...]:
        """Newest last, each with its time of day."""
        return tuple(self._lines)

    def enter(self, entered: Phase, why: str = "", next_action: str = "") -> None:
        before = self.state.phase
        self.state = self.state.to(entered, time.time(), why, next_action)
        if before is not entered:
            self.note(f"{entered.value}: {why}".rstrip(": "))
            self._on_phase()

    def note(self, line: str) -> None:
        log.info(line)
        self._lines.append(f"{time.strftime('%H:%M:%S')} {line}")

    def progress(self, what: str) -> Callable[[int, int | None], None]:
        """To be told of bytes done and in all; ``download`` is to be reset when it is over."""

        def report(done: int, total: int | None) -> None:
            self.download = DownloadView(what, done, total)

        return report
