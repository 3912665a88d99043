"""How a worker computes a request: the sums a bank gives, in memory that the request does not choose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.process import served
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.preamble import Wire

import builders

N_EXPERT = 8


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> ExpertBank:
    path = Path(tmp_path_factory.mktemp("m")) / "moe.gguf"
    builders.write_tiny_llama(path, n_layer=1, n_expert=N_EXPERT, n_expert_used=2, seed=4)
    with Checkpoint.open(path) as checkpoint:
        return ExpertBank.load(checkpoint, 0, 0, N_EXPERT)


def request(row_idx: np.ndarray, n_rows: int) -> Request:
    rng = np.random.default_rng(len(row_idx))
    rows = rng.standard_normal((n_rows, 64)).astype(np.float32)
    ids = rng.integers(0, N_EXPERT, len(row_idx)).astype(np.int32)
    return Request(Wire.V3, rows, row_idx.astype(np.int32), ids, rng.random(len(row_idx)).astype(np.float32))


@pytest.mark.parametrize("shuffled", [False, True])
def test_many_pairs_are_computed_a_block_at_a_time(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch, shuffled: bool
) -> None:
    """Rows without pairs, with a few, and one with more than a block holds."""
    row_idx = np.repeat([0, 1, 2, 4, 5, 7, 8], [3, 4, 9, 1, 40, 2, 7])
    if shuffled:
        np.random.default_rng(1).shuffle(row_idx)
    asked = request(row_idx, 10)
    whole = served.expert_reply(bank, asked, 0)
    most = 0
    outputs = ExpertBank.outputs

    def counted(self: ExpertBank, rows, some, ids):
        nonlocal most
        most = max(most, len(ids))
        return outputs(self, rows, some, ids)

    monkeypatch.setattr(served, "BLOCK_PAIRS", 10)
    monkeypatch.setattr(ExpertBank, "outputs", counted)
    found = served.expert_reply(bank, asked, 0)
    assert 0 < most <= 10
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
    assert not found[[3, 6, 9]].any()
