"""Figures out of a noisy box: medians of pairs, and how sure one can be of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with the bounds of its 95% interval (percentile bootstrap over the measurements)."""

    median: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Interval:
    """``ours[i] / theirs[i]`` for measurements taken one after the other. Raises ``ValueError`` for unequal counts."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError("pairs need as many measurements of one side as of the other")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median(ratios, seed)


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Interval:
    """``ours[i] - theirs[i]``, as ``paired_ratio``."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError("pairs need as many measurements of one side as of the other")
    return median([a - b for a, b in zip(ours, theirs, strict=True)], seed)


def median(values: Sequence[float], seed: int = 0) -> Interval:
    """The median of independent measurements."""
    rng = random.Random(seed)  # noqa: S311 - resampling, not secrecy
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Interval(statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])
