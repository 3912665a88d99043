"""Whether a worker's answers are right: which are looked at, how they are judged, what follows (pure).

An unproven slice is looked at fully until ``TRIAL_PAIRS`` of its pairs were found right; its work is paid after that.
Of a proven one a small random share is looked at. The first answer that no rounding explains ends the session.

The reference is computed from the rows *as the worker received them*, after the wire's rounding, so what remains is
the rounding of the reply, which is known, and that of other kernels, which is bounded here. An answer is the sum of
the weighted outputs of a row's experts; three things are asked of its error:

* does the error lie along one expert's output: that expert's *gain* is off. Rounding has no direction, so this sees a
  few percent of one expert even under the noise of an 8-bit wire;
* is it large on the whole (a wrong expert, another row's answer);
* is it large in one value.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_console.engine.process.worker import SessionStats

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

TRIAL_PAIRS = 32
SHARE = 0.01
KERNEL = 0.01
"""Root mean square error, as a part of the terms, that other kernels may have (8-bit activations are at 0.5%)."""
GAIN = 0.02
"""Error of an expert's gain that other kernels may have; theirs has no direction, so this is generous."""
SIGMAS = 6.0
"""Rounding beyond so many standard deviations is none."""
DETECTABLE = 0.035
"""A pair counts as looked at if an error of its gain of this size would have been told from rounding."""
_VALUE_SIGMAS = 8.0
_KERNEL_SIGMA = KERNEL / 4
_SAME = 1e-4

_UNIT = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of a rounded value."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with an answer."""

    kind: str
    """``gain``, ``residual`` or ``value``."""
    row: int
    """Of the judged rows."""
    pair: int | None
    """For a gain: of the judged pairs."""
    size: float
    """Measured; its limit beside it."""
    limit: float

    def __str__(self) -> str:
        what = {"gain": "an expert's gain is off by", "residual": "an answer is off by", "value": "a value is off by"}
        return f"{what[self.kind]} {self.size:.3g} (at most {self.limit:.3g} is rounding)"


@dataclass(frozen=True, slots=True)
class Verdict:
    pairs: int
    """Pairs whose gain could be measured."""
    fault: Fault | None


def judge(values: F32, terms: F32, row_idx: I64, dtype: str) -> Verdict:
    """Hold answers against a reference.

    Args:
        values: (R, D) what the worker answered.
        terms: (P, D) the weighted output of each pair, by the reference.
        row_idx: (P,) the row of each pair, in [0, R).
        dtype: of the reply on the wire: ``f32``, ``f16``, ``bf16`` or ``int8`` (a scale a row).
    """
    checked, fault = 0, None
    counts = np.bincount(row_idx, minlength=len(values))
    order = np.argsort(row_idx, kind="stable")
    starts = np.concatenate(([0], np.cumsum(counts)))
    for k in np.unique(counts[counts > 0]).tolist():
        rows = np.flatnonzero(counts == k)
        pairs = order[starts[rows][:, None] + np.arange(k)]  # (R_k, k)
        seen, worst = _judge_rows(values[rows], terms[pairs], dtype)
        checked += seen
        if worst is not None and fault is None:
            pair = None if worst.pair is None else int(pairs[worst.row, worst.pair])
            fault = Fault(worst.kind, int(rows[worst.row]), pair, worst.size, worst.limit)
    return Verdict(checked, fault)


def _judge_rows(values: F32, terms: F32, dtype: str) -> tuple[int, Fault | None]:
    """Rows of k pairs each: (R, D) and (R, k, D)."""
    _, k, D = terms.shape
    a, T = values.astype(np.float64), terms.astype(np.float64)
    b = T.sum(axis=1)
    norms = np.sqrt(np.einsum("rkd,rkd->rk", T, T))
    scale = norms.sum(axis=1) / np.sqrt(D) + 1e-30  # (R,) size of a value before terms cancel
    sigma, widest = _reply_noise(b, dtype)
    error = a - b
    gram = np.einsum("rkd,rld->rkl", T, T) + np.eye(k) * (1e-12 * np.sum(norms**2, axis=1) + 1e-60)[:, None, None]
    inverse = np.linalg.inv(gram)
    gain = np.einsum("rkl,rl->rk", inverse, np.einsum("rkd,rd->rk", T, error))
    noise = sigma + _KERNEL_SIGMA * scale
    limits = GAIN + SIGMAS * noise[:, None] * np.sqrt(np.maximum(np.diagonal(inverse, axis1=1, axis2=2), 0.0))
    off = np.argwhere(np.abs(gain) > limits)
    if len(off):
        row, pair = (int(each) for each in off[0])
        return 0, Fault("gain", row, pair, float(gain[row, pair]), float(limits[row, pair]))
    size = np.sqrt(np.mean(error * error, axis=1))
    limit = KERNEL * scale + 1.5 * sigma
    bad = np.flatnonzero(~(size <= limit))  # a NaN is bad
    if len(bad):
        row = int(bad[0])
        return 0, Fault("residual", row, None, float(size[row] / scale[row]), float(limit[row] / scale[row]))
    largest = np.abs(error).max(axis=1)
    limit = _VALUE_SIGMAS * KERNEL * scale + widest
    bad = np.flatnonzero(largest > limit)
    if len(bad):
        row = int(bad[0])
        return 0, Fault("value", row, None, float(largest[row] / scale[row]), float(limit[row] / scale[row]))
    return int((limits <= DETECTABLE).sum()), None


def differ(one: F32, other: F32, one_dtype: str, other_dtype: str) -> NDArray[np.bool_]:
    """(R,) whether two workers' answers to the same rows are further apart than wires of equal kernels explain.

    This is strict: whoever differs is not guilty yet, but a reason to compute the row here.
    """
    a, b = one.astype(np.float64), other.astype(np.float64)
    size = np.sqrt(np.mean((a - b) ** 2, axis=1))
    noise = _reply_noise(a, one_dtype)[0] + _reply_noise(b, other_dtype)[0]
    apart: NDArray[np.bool_] = ~(size <= _SAME * np.sqrt(np.mean(b * b, axis=1)) + 2 * noise + 1e-30)
    return apart


def _reply_noise(b: NDArray[np.float64], dtype: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(R,) standard deviation and (R,) largest size of the rounding of a reply's values."""
    peak = np.abs(b).max(axis=1)
    if dtype == "int8":
        step = peak / 127
        return step / np.sqrt(12), step
    unit = _UNIT[dtype]
    # Uniform within half a unit in the last place, which is between 1/2 and 1 of the largest relative error.
    return unit * np.sqrt(np.mean(b * b, axis=1) / 3), 2 * unit * peak


def generator(seed: int | str) -> np.random.Generator:
    """Draws that nobody foresees who does not know ``seed``."""
    return np.random.Generator(np.random.PCG64(random.Random(seed).getrandbits(128)))  # noqa: S311


@dataclass(slots=True)
class Sampler:
    """Which pairs of a request are looked at, unpredictably to whoever answers it."""

    seed: int | str
    share: float = SHARE
    missed: int = 0
    """Pairs that were looked at in vain: their gain could not be told from rounding. Others are drawn for them."""
    _rng: Any = field(init=False)

    def __post_init__(self) -> None:
        self._rng = generator(self.seed)

    def draw(self, n_pairs: int) -> I64:
        """Indices of the pairs to look at, ascending."""
        drawn = np.flatnonzero(self._rng.random(n_pairs) < self.share)
        if self.missed and n_pairs > len(drawn):
            more = self._rng.integers(0, n_pairs, min(self.missed, n_pairs))
            self.missed -= len(more)
            drawn = np.union1d(drawn, more)
        return drawn.astype(np.int64)


def acknowledge(stats: SessionStats, n_rows: int, n_pairs: int, n_bytes: int) -> None:
    """Count answered work. Until its slice is proven, its pay is held; a quarantined one earns nothing."""
    if stats.quarantined:
        return
    stats.requests += 1
    stats.rows += n_rows
    stats.pairs += n_pairs
    stats.held_rows += n_rows
    stats.held_pairs += n_pairs
    stats.held_bytes += n_bytes
    if stats.proven:
        _release(stats)


def passed(stats: SessionStats, pairs: int, trial_pairs: int) -> None:
    """So many pairs more were right. After ``trial_pairs`` of them the slice is proven and what was held is paid."""
    stats.checked_pairs += pairs
    if not stats.proven and not stats.quarantined and stats.checked_pairs >= trial_pairs:
        stats.proven = True
        _release(stats)


def convict(stats: SessionStats) -> None:
    """A slice of this session was caught, or its operator's word came: what is held is void."""
    if not stats.quarantined:
        stats.convictions += 1
    stats.quarantined = True
    stats.proven = False
    stats.voided_bytes += stats.held_bytes
    stats.held_bytes = stats.held_rows = stats.held_pairs = 0


def pardon(stats: SessionStats, trial_pairs: int) -> None:
    """Its operator lifted the quarantine: it has to be proven anew. What was void stays void."""
    stats.quarantined = False
    stats.checked_pairs = 0
    stats.proven = trial_pairs == 0


def _release(stats: SessionStats) -> None:
    stats.paid_bytes += stats.held_bytes
    stats.paid_rows += stats.held_rows
    stats.paid_pairs += stats.held_pairs
    stats.held_bytes = stats.held_rows = stats.held_pairs = 0
