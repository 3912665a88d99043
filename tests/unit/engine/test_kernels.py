"""The rounding-sensitive operations, against float64 and against themselves in other company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvasir_console.engine import kernels


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("given", "padded"), [(0, 0), (1, 4), (3, 4), (4, 4), (5, 8), (255, 256)])
def test_rows_are_padded_with_zeros(given, padded):
    x = random(given, 3, 5)
    y = kernels.tile_rows(x)
    assert y.shape == (padded, 3, 5)
    assert torch.equal(y[:given], x)
    assert not y[given:].any()


@pytest.mark.parametrize("rows", [1, 4, 700])
def test_swiglu_is_the_formula_however_it_is_cut(rows):
    x = random(rows, 2 * 96)
    gate, up = x.double().numpy()[:, :96], x.double().numpy()[:, 96:]
    wanted = gate / (1 + np.exp(-gate)) * up
    assert np.abs(kernels.swiglu(x).numpy() - wanted).max() < 2e-6
    assert torch.equal(kernels.swiglu(x)[-1:], kernels.swiglu(x[-1:]))


@pytest.mark.parametrize("rows", [1, 700])
def test_geglu_is_the_formula_however_it_is_cut(rows):
    x = random(rows, 2 * 96)
    gate, up = x.double().numpy()[:, :96], x.double().numpy()[:, 96:]
    wanted = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    assert np.abs(kernels.geglu(x).numpy() - wanted).max() < 2e-6
    assert torch.equal(kernels.geglu(x)[-1:], kernels.geglu(x[-1:]))


def test_rms_norm_is_the_formula():
    x, weight = random(5, 64), random(64)
    exact = x.double().numpy()
    plain = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5)
    assert np.abs(kernels.rms_norm(x, weight, 1e-5).numpy() - plain * weight.double().numpy()).max() < 2e-6
    assert np.abs(kernels.rms_norm(x, None, 1e-5).numpy() - plain).max() < 2e-6


@pytest.mark.parametrize(
    ("rotate", "pairs"),
    [(kernels.rotate_pairs, [(0, 1), (2, 3), (4, 5)]), (kernels.rotate_halves, [(0, 3), (1, 4), (2, 5)])],
    ids=["pairs", "halves"],
)
def test_rotation_turns_each_pair_by_its_angle(rotate, pairs):
    """By rotation matrices in float64; the values past rope_dim stay."""
    positions, frequencies = torch.tensor([0, 7, 8191]), torch.tensor([1.0, 0.1, 0.001], dtype=torch.float64)
    x = random(3, 2, 8)
    got = x.clone()
    rotate(got[..., :6], kernels.turns(positions, frequencies))
    wanted = x.double().numpy().copy()
    for row, position in enumerate(positions.tolist()):
        for (first, second), frequency in zip(pairs, frequencies.tolist(), strict=True):
            angle = position * frequency
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            wanted[row, :, [first, second]] = turn @ wanted[row, :, [first, second]]
    assert np.abs(got.numpy() - wanted).max() < 1e-6
    assert torch.equal(got[..., 6:], x[..., 6:])
