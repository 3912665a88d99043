"""How long an answer should take, when it is late, and whether asking a second worker is affordable (pure).

Tail latency after Dean and Barroso, "The Tail at Scale" (2013): a request that is not answered by the time 95 of a
hundred are is asked of somebody else too, and the first answer counts. Both are paid if they come in time, so second
requests are bounded to a share of the first ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_MS = 1000.0
"""When an answer counts as late as long as too little was measured."""
MIN_SAMPLES = 8
LATE_SHARE = 0.95
SLACK_MS = 2.0
"""An answer is not late before so long past what was expected: loops and threads have their own jitter."""
MAX_LATE_FACTOR = 8.0
_WINDOW = 64
_MEMORY = 0.95


@dataclass(slots=True)
class Pace:
    """A session's answers: a delay and a time for each pair, fitted to those of late, and how they scatter."""

    _weight: float = 0.0
    _pairs: float = 0.0
    _ms: float = 0.0
    _pairs_squared: float = 0.0
    _products: float = 0.0
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def samples(self) -> int:
        return len(self._ratios)

    @property
    def pair_ms(self) -> float:
        """What a pair more adds."""
        if not self._weight:
            return 0.0
        mean = self._pairs / self._weight
        spread = self._pairs_squared - self._pairs * mean
        slope = (self._products - self._ms * mean) / spread if spread > 1e-9 * self._pairs_squared else 0.0
        return min(max(0.0, slope), self._ms / self._pairs)

    @property
    def delay_ms(self) -> float:
        """The time of a request of no pairs."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._ms - self.pair_ms * self._pairs) / self._weight)

    def expected_ms(self, pairs: int) -> float:
        """0 before the first answer: who was never asked is asked."""
        return self.delay_ms + self.pair_ms * pairs

    def record(self, pairs: int, elapsed_ms: float) -> None:
        """A request of ``pairs`` was answered after ``elapsed_ms``."""
        expected = self.expected_ms(pairs)
        self._ratios.append(min(elapsed_ms / expected, MAX_LATE_FACTOR) if expected > 0 else 1.0)
        # One answer out of a stall must not make a worker look slow for long.
        ms = elapsed_ms if self.samples < MIN_SAMPLES else min(elapsed_ms, MAX_LATE_FACTOR * expected + SLACK_MS)
        keep = _MEMORY
        self._weight = self._weight * keep + 1
        self._pairs = self._pairs * keep + pairs
        self._ms = self._ms * keep + ms
        self._pairs_squared = self._pairs_squared * keep + pairs * pairs
        self._products = self._products * keep + pairs * ms

    def late_ms(self, pairs: int) -> float:
        """After how long a request of ``pairs`` is past what ``LATE_SHARE`` of the answers of late took."""
        if self.samples < MIN_SAMPLES:
            return FIRST_MS
        ordered = sorted(self._ratios)
        ratio = max(1.0, ordered[min(len(ordered) - 1, int(LATE_SHARE * len(ordered)))])
        expected = self.expected_ms(pairs)
        return max(expected * ratio, expected + SLACK_MS)


@dataclass(slots=True)
class HedgeBudget:
    """Second requests that may be made: a share of the first ones, saved up to ``burst``."""

    share: float = 0.1
    burst: float = 8.0
    _saved: float = 2.0

    def asked(self) -> None:
        """A first request was made."""
        self._saved = min(self.burst, self._saved + self.share)

    def take(self) -> bool:
        """Whether a second one may be made; it is counted if so."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
