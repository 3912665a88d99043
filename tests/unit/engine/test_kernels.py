"""The rounding-sensitive operations, against float64 and against themselves in other company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir_console.engine import kernels


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("given", "padded"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 8), (255, 256)])
def test_only_many_rows_are_padded_and_with_zeros(given, padded):
    x = random(given, 6)
    y = kernels.pad_rows(x)
    assert y.shape == (padded, 6)
    assert torch.equal(y[:given], x)
    assert not y[given:].any()


def test_tiled_rows_are_never_few():
    x = random(1, 3, 5)
    y = kernels.tile_rows(x)
    assert y.shape == (kernels.ROW_TILE, 3, 5)
    assert torch.equal(y[:1], x)
    assert not y[1:].any()


@pytest.mark.parametrize("rows", [1, 4, 700])
def test_swiglu_is_the_formula_however_it_is_cut(rows):
    x = random(rows, 2 * 96)
    gate, up = x.double().numpy()[:, :96], x.double().numpy()[:, 96:]
    wanted = gate / (1 + np.exp(-gate)) * up
    assert np.abs(kernels.swiglu(x).numpy() - wanted).max() < 2e-6
    assert torch.equal(kernels.swiglu(x)[-1:], kernels.swiglu(x[-1:]))


def test_rms_norm_is_the_formula():
    x, weight = random(5, 64), random(64)
    exact = x.double().numpy()
    wanted = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight.double().numpy()
    assert np.abs(kernels.rms_norm(x, weight, 1e-5).numpy() - wanted).max() < 2e-6


def test_row_invariance_is_measured_and_not_assumed(monkeypatch):
    weight = random(96, 64).t().contiguous().t()
    linear = kernels.linear

    def company_matters(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear(x, w) * (1 + 1e-6 * len(x))

    honest = kernels.row_invariant(weight)
    monkeypatch.setattr(kernels, "linear", company_matters)
    assert not kernels.row_invariant(weight)
    monkeypatch.setattr(kernels, "linear", lambda x, w: (x.double().unsqueeze(1) * w.double()).sum(-1).float())
    assert kernels.row_invariant(weight)
    assert isinstance(honest, bool)
