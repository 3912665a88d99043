"""Medians of pairs, their interval, and divergences of distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.bench.engine import kl_divergence, log_softmax
from kvasir_console.bench.stats import paired_difference, paired_ratio

POSITIVE = st.floats(0.1, 1000.0)


def test_a_ratio_is_the_median_of_pairs_not_of_sums() -> None:
    ratio = paired_ratio([10.0, 30.0, 100.0], [10.0, 10.0, 200.0])
    assert ratio.median == 1.0
    assert ratio.low <= 1.0 <= ratio.high


def test_equal_pairs_leave_no_doubt() -> None:
    ratio = paired_ratio([2.0] * 9, [1.0] * 9)
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=12))
def test_the_median_lies_in_its_interval_and_the_interval_in_the_data(pairs: list[tuple[float, float]]) -> None:
    ratios = [a / b for a, b in pairs]
    ratio = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
    assert min(ratios) <= ratio.low <= ratio.median <= ratio.high <= max(ratios)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_what_is_not_paired_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        paired_ratio(ours, theirs)


def test_divergence_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    p, q = (log_softmax(rng.normal(size=500).astype(np.float32)) for _ in range(2))
    wanted = F.kl_div(torch.from_numpy(q), torch.from_numpy(p), log_target=True, reduction="sum")
    assert math.isclose(kl_divergence(p, q), float(wanted), rel_tol=1e-12)
    assert kl_divergence(p, p) == 0.0


def test_a_difference_is_taken_pair_by_pair() -> None:
    found = paired_difference([11.0, 22.0, 33.0], [10.0, 20.0, 30.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError):
        paired_difference([1.0], [])
