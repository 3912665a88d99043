"""Figures out of a noisy box: medians of pairs, and how sure one can be of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of paired ratios with the bounds of its 95% interval (percentile bootstrap over the pairs)."""

    median: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """``ours[i] / theirs[i]`` for measurements taken one after the other. Raises ``ValueError`` for unequal counts."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError("pairs need as many measurements of one side as of the other")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(seed)  # noqa: S311 - resampling, not secrecy
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return Ratio(statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])
