"""A million pairs of an honest worker through each wire, and a crooked one caught in time, by real experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.process import checks
from kvasir_console.relay.wire.values import Dtype, decode_rows, encode_rows

import builders

N_EMBD, N_EXPERT, ROWS = 64, 8, 2000
DTYPES = (Dtype.F32, Dtype.F16, Dtype.INT8)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> ExpertBank:
    path = builders.write_tiny_llama(
        Path(tmp_path_factory.mktemp("m")) / "moe.gguf", n_layer=1, n_expert=N_EXPERT, n_expert_used=2, seed=4
    )
    with Checkpoint.open(path) as checkpoint:
        return ExpertBank.load(checkpoint, 0, 0, N_EXPERT)


def carried(dtype: Dtype, rows: np.ndarray) -> np.ndarray:
    """Rows after a wire."""
    return decode_rows(dtype, b"".join(encode_rows(dtype, rows)), 0, *rows.shape)


def step(bank: ExpertBank, rng: np.random.Generator, dtype: Dtype, gain: float) -> tuple[np.ndarray, ...]:
    """What a worker answers to a step whose expert 3 is off by ``gain``, the reference's terms, rows, experts."""
    # A few channels are far larger than the others, as they are in real hidden states.
    states = rng.standard_normal((ROWS, N_EMBD)) * np.where(np.arange(N_EMBD) % 29 == 0, 6.0, 1.0)
    rows = carried(dtype, states.astype(np.float32)).copy()
    ids = np.argsort(rng.random((ROWS, N_EXPERT)), axis=1)[:, :2].reshape(-1)
    first = 1 / (1 + np.exp(-np.abs(rng.normal(0, 1.5, ROWS))))
    weights = np.stack([first, 1 - first], axis=1).reshape(-1).astype(np.float32)
    row_idx = np.repeat(np.arange(ROWS), 2)
    with torch.inference_mode():
        outputs = bank.outputs(torch.from_numpy(rows), torch.from_numpy(row_idx), torch.from_numpy(ids)).numpy()
    terms = outputs * weights[:, None]
    answered = (terms * np.where(ids == 3, gain, 1.0)[:, None]).reshape(ROWS, 2, N_EMBD).sum(axis=1)
    return carried(dtype, answered.astype(np.float32)), terms, row_idx, ids


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name.lower())
def test_an_honest_worker_is_never_quarantined_in_a_million_pairs(bank: ExpertBank, dtype: Dtype) -> None:
    rng, looked = np.random.default_rng(17), 0
    for _ in range(1_000_000 // (2 * ROWS)):
        answered, terms, row_idx, _ = step(bank, rng, dtype, gain=1.0)
        verdict = checks.judge(answered, terms, row_idx, dtype.name.lower())
        assert verdict.fault is None
        looked += verdict.pairs
    assert looked > 300_000


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name.lower())
def test_an_expert_off_by_five_percent_is_caught_by_the_first_check_that_meets_it(
    bank: ExpertBank, dtype: Dtype
) -> None:
    """A hundredth of the pairs is drawn; over many seeds, the wait is what a hundredth of that expert's pairs means."""
    waits = []
    for seed in range(40):
        rng, sampler, pairs = np.random.default_rng(seed), checks.Sampler(seed), 0
        while True:
            answered, terms, row_idx, ids = step(bank, rng, dtype, gain=1.05)
            caught = None
            for pair in sampler.draw(len(ids)).tolist():
                row = row_idx[pair]
                mine = np.flatnonzero(row_idx == row)
                one = np.zeros(2, dtype=np.int64)
                fault = checks.judge(answered[row : row + 1], terms[mine], one, dtype.name.lower()).fault
                honest = carried(dtype, terms[mine].sum(axis=0, keepdims=True))
                visible = checks.judge(honest, terms[mine], one, dtype.name.lower()).pairs == 2
                met = bool((ids[mine] == 3).any())
                if fault is not None:
                    assert met
                    caught = pair
                    break
                assert not (met and visible)  # the first that meets it is the last
            if caught is not None:
                waits.append(pairs + caught + 1)
                break
            pairs += len(ids)
    share = 1 / N_EXPERT
    assert np.mean(waits) < 100 / share
