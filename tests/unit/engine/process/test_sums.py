"""Sums of pairs: the local bits, whoever computed which pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.process.sums import GroupedSum, PairedSum, Pairs, empty_sum

import builders

N_EXPERT, ROWS = 8, 6


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> ExpertBank:
    path = builders.write_tiny_llama(
        tmp_path_factory.mktemp("m") / "moe.gguf", n_layer=1, n_expert=N_EXPERT, n_expert_used=2, seed=4
    )
    with Checkpoint.open(path) as checkpoint:
        return ExpertBank.load(checkpoint, 0, 0, N_EXPERT)


def routed(k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 64, generator=generator)
    ids = torch.stack([torch.randperm(N_EXPERT, generator=generator)[:k] for _ in range(ROWS)])
    return x, ids, torch.rand(ROWS, k, generator=generator)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 3), min_size=N_EXPERT, max_size=N_EXPERT), st.integers(0, 99))
def test_the_bits_are_those_of_the_bank_for_any_placement(
    bank: ExpertBank, k: int, holders: list[int], seed: int
) -> None:
    """``holders`` says of each expert who computes it; 0 is this machine."""
    x, ids, weights = routed(k, seed)
    with torch.inference_mode():
        want = bank.routed(x, ids, weights)
        pairs, total = Pairs.of(ids, weights), empty_sum(x, k)
        assert isinstance(total, GroupedSum if k <= 2 else PairedSum)
        of = np.array(holders)[pairs.ids]
        total.local(bank, x, pairs.where(of == 0))
        for holder in (3, 1, 2):  # answers come in any order
            mine = pairs.where(of == holder)
            if not len(mine):
                continue
            sent, row_idx = total.frame(mine)
            answer = bank.weighted_sum(
                x[torch.from_numpy(sent)],
                torch.from_numpy(row_idx),
                torch.from_numpy(mine.ids),
                torch.from_numpy(mine.weights),
            )
            total.remote(mine, sent, answer.numpy())
        assert torch.equal(total.result(), want)
