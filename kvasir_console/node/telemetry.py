"""Rates from counters: one sample a second, pure but for the caller's clock."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass, field

from kvasir_console.node.snapshot import WorkView

HISTORY = 240
RATE_WINDOW_S = 10


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative work of the engine since it started."""

    requests: int = 0
    rows: int = 0
    pairs: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Telemetry:
    """Turns cumulative counters into a history a screen can draw. A counter that falls means a restarted engine."""

    _last: Counters | None = None
    _base: Counters = field(default_factory=Counters)
    _rates: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def sample(self, now: Counters, elapsed_s: float) -> None:
        """Take the counters ``elapsed_s`` seconds after the last sample."""
        last = self._last
        if last is not None and any(new < old for new, old in zip(astuple(now), astuple(last), strict=True)):
            self._base = _add(self._base, last)
            last = Counters()
        if last is not None and elapsed_s > 0:
            self._rates.append(((now.rows - last.rows) / elapsed_s, (now.tokens - last.tokens) / elapsed_s))
        self._last = now

    def view(self, *, layers: bool = False) -> WorkView:
        """``layers``: the node serves a window of layers, whose history counts tokens; experts count rows."""
        total = _add(self._base, self._last or Counters())
        recent = list(self._rates)[-RATE_WINDOW_S:]
        count = max(len(recent), 1)
        rows_per_s = sum(rows for rows, _ in recent) / count
        tokens_per_s = sum(tokens for _, tokens in recent) / count
        return WorkView(
            requests=total.requests,
            rows=total.rows,
            pairs=total.pairs,
            tokens=total.tokens,
            rows_per_s=round(rows_per_s, 2),
            tokens_per_s=round(tokens_per_s, 2),
            history=tuple(round(tokens if layers else rows, 2) for rows, tokens in self._rates),
        )


def _add(a: Counters, b: Counters) -> Counters:
    return Counters(a.requests + b.requests, a.rows + b.rows, a.pairs + b.pairs, a.tokens + b.tokens)
