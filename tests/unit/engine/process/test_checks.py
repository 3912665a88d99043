"""Checks: one expert a few percent off is seen through every wire's rounding, and an honest worker never is guilty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.process import checks
from kvasir_console.engine.process.worker import SessionStats

D = 64
WIRES = ("f32", "f16", "bf16", "int8")


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` (R, D) after a wire of ``dtype``."""
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    if dtype == "int8":
        scale = np.abs(values).max(axis=1, keepdims=True) / 127
        return (np.rint(values / np.maximum(scale, 1e-30)) * scale).astype(np.float32)
    return values.astype(np.float32)


def work(rng: np.random.Generator, rows: int, n_expert: int = 8, width: int = D) -> tuple[np.ndarray, ...]:
    """Weighted outputs of two experts a row, the experts, and the rows of the pairs; weights as a softmax gives."""
    ids = np.argsort(rng.random((rows, n_expert)), axis=1)[:, :2]
    logits = rng.normal(0, 1.5, rows)
    first = 1 / (1 + np.exp(-np.abs(logits)))
    weights = np.stack([first, 1 - first], axis=1)
    # A few channels are far larger than the others, as they are in real hidden states.
    outputs = rng.standard_normal((rows, 2, width)) * np.where(np.arange(width) % 29 == 0, 6.0, 1.0)
    terms = (outputs * weights[:, :, None]).astype(np.float32).reshape(-1, width)
    return terms, ids.reshape(-1), np.repeat(np.arange(rows), 2)


def sums(terms: np.ndarray, gain: np.ndarray | float = 1.0) -> np.ndarray:
    scaled = terms * (gain[:, None] if isinstance(gain, np.ndarray) else gain)
    return scaled.reshape(-1, 2, terms.shape[1]).sum(axis=1)


@pytest.mark.parametrize("dtype", WIRES)
def test_an_honest_worker_is_never_guilty(dtype: str) -> None:
    rng = np.random.default_rng(5)
    looked = 0
    for _ in range(20):
        terms, _, row_idx = work(rng, 2500)
        noise = rng.standard_normal(terms.shape).astype(np.float32) * 0.004 * np.abs(terms).mean()
        verdict = checks.judge(rounded(sums(terms + noise), dtype), terms, row_idx, dtype)
        assert verdict.fault is None
        looked += verdict.pairs
    assert looked > (10_000 if dtype == "int8" else 40_000)  # of 100,000: what is too faint is not counted


@pytest.mark.parametrize("dtype", WIRES)
def test_one_expert_off_by_five_percent_is_guilty_at_the_first_check_that_meets_it(dtype: str) -> None:
    rng = np.random.default_rng(7)
    terms, ids, _ = work(rng, 4000, width=576)
    crooked = ids == 3
    answers = rounded(sums(terms, np.where(crooked, 1.05, 1.0)), dtype)
    honest = rounded(sums(terms), dtype)
    met = 0
    for row in np.flatnonzero(crooked.reshape(-1, 2).any(axis=1)):
        mine = slice(2 * row, 2 * row + 2)
        place = int(np.flatnonzero(crooked[mine])[0])
        # Was this pair visible at all? What an honest answer's check counts says so.
        alone = checks.judge(honest[row : row + 1], terms[mine], np.zeros(2, dtype=np.int64), dtype)
        if alone.pairs < 2:
            continue
        met += 1
        fault = checks.judge(answers[row : row + 1], terms[mine], np.zeros(2, dtype=np.int64), dtype).fault
        assert fault is not None
        assert fault.kind == "gain"
        assert fault.pair == place
        assert fault.size == pytest.approx(0.05, abs=0.015)
    assert met > 300


@pytest.mark.parametrize("dtype", WIRES)
def test_garbage_a_lie_in_one_value_and_what_is_not_finite_are_guilty(dtype: str) -> None:
    rng = np.random.default_rng(9)
    terms, _, row_idx = work(rng, 8)
    honest = rounded(sums(terms), dtype)
    assert checks.judge(honest[::-1].copy(), terms, row_idx, dtype).fault is not None
    lie = honest.copy()
    lie[5, 11] += 2.0
    fault = checks.judge(lie, terms, row_idx, dtype).fault
    assert fault is not None
    assert fault.row == 5
    lie[5, 11] = np.nan
    assert checks.judge(lie, terms, row_idx, dtype).fault is not None
    zeros = checks.judge(np.zeros_like(honest), terms, row_idx, dtype).fault
    assert zeros is not None


def test_a_row_of_one_pair_and_one_of_two_are_judged_together() -> None:
    rng = np.random.default_rng(1)
    terms = rng.standard_normal((3, D)).astype(np.float32)
    row_idx = np.array([0, 1, 1])
    values = np.stack([terms[0], terms[1] + terms[2]])
    assert checks.judge(values, terms, row_idx, "f32") == checks.Verdict(3, None)
    fault = checks.judge(np.stack([terms[0], terms[1] + 1.05 * terms[2]]), terms, row_idx, "f32").fault
    assert fault is not None
    assert (fault.row, fault.pair) == (1, 2)


def test_the_expected_number_of_pairs_to_a_conviction_is_a_hundred_over_the_experts_share() -> None:
    p, waits = 1 / 8, []
    for seed in range(200):
        sampler, rng, pairs = checks.Sampler(seed), np.random.default_rng(1000 + seed), 0
        while True:
            ids = rng.integers(0, 8, 32)
            drawn = sampler.draw(32)
            met = drawn[ids[drawn] == 3]
            if len(met):
                waits.append(pairs + int(met[0]) + 1)
                break
            pairs += 32
    # The mean of 200 geometric waits lies within 4 standard errors of 1 / (share p).
    expected = 100 / p
    assert abs(np.mean(waits) - expected) < 4 * expected / np.sqrt(200)


def test_what_was_looked_at_in_vain_is_drawn_again() -> None:
    sampler = checks.Sampler(3, share=0.0)
    assert len(sampler.draw(16)) == 0
    sampler.missed = 2
    assert 1 <= len(sampler.draw(16)) <= 2
    assert sampler.missed == 0
    assert len(sampler.draw(16)) == 0


def test_the_same_seed_draws_the_same_pairs() -> None:
    one, two, other = checks.Sampler("a"), checks.Sampler("a"), checks.Sampler("b")
    drawn = [one.draw(4096).tolist() for _ in range(4)]
    assert drawn == [two.draw(4096).tolist() for _ in range(4)]
    assert drawn != [other.draw(4096).tolist() for _ in range(4)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["work", "pass", "convict", "pardon"]), st.integers(1, 40)), max_size=40))
def test_every_acknowledged_byte_is_paid_held_or_void(events: list[tuple[str, int]]) -> None:
    stats = SessionStats("s", "w", 0, 0, 4)
    worked, proved, was_paid = 0, 0, 0
    for kind, amount in events:
        before, caught = stats.paid_bytes, stats.quarantined
        if kind == "work":
            worked += 0 if stats.quarantined else 10 * amount
            checks.acknowledge(stats, 1, amount, 10 * amount)
        elif kind == "pass":
            checks.passed(stats, amount, trial_pairs=50)
            proved += amount
        elif kind == "convict":
            checks.convict(stats)
            assert (stats.held_bytes, stats.held_rows, stats.held_pairs) == (0, 0, 0)
            proved = 0
        else:
            checks.pardon(stats, trial_pairs=50)
            proved = 0
        assert stats.paid_bytes + stats.held_bytes + stats.voided_bytes == worked
        assert (stats.paid_bytes, stats.held_bytes) == (10 * stats.paid_pairs, 10 * stats.held_pairs)
        assert stats.paid_rows <= stats.rows
        assert stats.paid_bytes >= before
        if stats.paid_bytes > before:
            assert not caught
            assert proved >= 50
        was_paid = stats.paid_bytes
    assert was_paid == 10 * stats.paid_pairs
