"""Matrices in every form against float64 products with the values gguf-py reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from kvasir_console.engine import linear as linear_module
from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.linear import (
    DenseLinear,
    HalfLinear,
    Int4Linear,
    Rows,
    StoredTable,
    UnsuitableError,
    row_invariant,
)

from builders import Quant, stored

needs_half = pytest.mark.skipif(not HalfLinear.available(), reason="torch has no half-precision packing here")


def part(kind: Quant, count: int, n_in: int, seed: int = 0) -> tuple[Rows, np.ndarray]:
    """Random rows as stored, and their values (count, n_in) f64."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((count, n_in)) / np.sqrt(n_in)).astype(np.float32)
    raw = torch.from_numpy(np.ascontiguousarray(stored(values, kind, rng)).view(np.uint8)).view(count, -1)
    read = dequantize(raw.numpy(), kind).reshape(count, n_in).astype(np.float64)
    return Rows(GGMLType(int(kind)), count, n_in, lambda begin, end: raw[begin:end].clone()), read


def rows(count: int, n_in: int) -> torch.Tensor:
    return torch.randn(count, n_in, generator=torch.Generator().manual_seed(9))


def error(linear, weight: np.ndarray, count: int = 5) -> float:
    """The largest difference from the exact product, relative to the sum of its terms' magnitudes."""
    x = rows(count, weight.shape[1])
    exact, magnitude = x.double().numpy() @ weight.T, np.abs(x.double().numpy()) @ np.abs(weight.T)
    return float((np.abs(linear(x).double().numpy() - exact) / magnitude).max())


@pytest.mark.parametrize("kind", [Quant.F32, Quant.BF16, Quant.Q4_K, Quant.IQ2_S])
def test_dense_is_exact(kind):
    stored_rows, weight = part(kind, 50, 256)
    linear = DenseLinear.pack([stored_rows])
    assert (linear.n_out, linear.n_in, linear.n_bytes) == (50, 256, 4 * 50 * 256)
    assert np.array_equal(linear.weight.numpy(), weight)
    assert error(linear, weight) < 3e-7
    assert np.array_equal(linear.rows(torch.tensor([7, 0])).numpy(), weight[[7, 0]])


@needs_half
@pytest.mark.parametrize("kind", [Quant.F16, Quant.Q8_0, Quant.Q6_K])
def test_half_rounds_weights_only(kind):
    stored_rows, weight = part(kind, 50, 256)
    linear = HalfLinear.pack([stored_rows])
    assert (linear.n_out, linear.n_in) == (50, 256)
    assert error(linear, weight.astype(np.float16).astype(np.float64)) < 3e-7
    assert error(linear, weight) < 2**-11


@needs_half
def test_half_comes_in_pieces_that_change_nothing(monkeypatch):
    parts = [part(kind, count, 64, seed) for seed, (kind, count) in enumerate([(Quant.Q8_0, 70), (Quant.F16, 33)])]
    weight = np.concatenate([values for _, values in parts])
    whole = HalfLinear.pack([stored_rows for stored_rows, _ in parts])
    monkeypatch.setattr(linear_module, "_PIECE_VALUES", 64 * 40)
    monkeypatch.setattr(linear_module, "CHUNK_VALUES", 64 * 16)
    pieces = HalfLinear.pack([stored_rows for stored_rows, _ in parts])
    x = rows(6, 64)
    assert len(pieces._pieces) == 3
    assert torch.equal(pieces(x), whole(x))
    assert error(pieces, weight) < 2**-11


@needs_half
def test_half_refuses_what_it_cannot_hold():
    values = torch.full((16, 32), 1e5)
    huge = Rows(GGMLType.F32, 16, 32, lambda begin, end: values[begin:end].view(torch.uint8).clone())
    with pytest.raises(UnsuitableError):
        HalfLinear.pack([huge])


@pytest.mark.parametrize("kind", [Quant.Q4_0, Quant.Q4_1, Quant.Q4_K])
def test_int4_rounds_scales_and_rows_only(kind):
    stored_rows, weight = part(kind, 70, 256)
    linear = Int4Linear.pack([stored_rows])
    assert Int4Linear.suits([stored_rows])
    assert (linear.n_out, linear.n_in) == (70, 256)
    assert linear.n_bytes == 128 * (128 + 4 * 8)
    assert linear(rows(3, 256)).dtype == torch.float32
    assert error(linear, weight) < 2**-8


def test_int4_takes_parts_of_any_height(monkeypatch):
    parts = [part(kind, count, 96, count) for kind, count in ((Quant.Q4_0, 100), (Quant.Q4_1, 1), (Quant.Q4_1, 63))]
    weight = np.concatenate([values for _, values in parts])
    packed = Int4Linear.pack([stored_rows for stored_rows, _ in parts])
    monkeypatch.setattr(linear_module, "CHUNK_VALUES", 96 * 16)
    in_chunks = Int4Linear.pack([stored_rows for stored_rows, _ in parts])
    assert all(torch.equal(a, b) for a, b in zip(packed.tensors(), in_chunks.tensors(), strict=True))
    assert packed.n_out == 164
    assert error(packed, weight) < 2**-8


def test_int4_takes_no_other_type():
    assert not Int4Linear.suits([part(Quant.Q4_0, 16, 32)[0], part(Quant.Q5_0, 16, 32)[0]])


@pytest.mark.parametrize("kind", [Quant.F32, Quant.Q8_0, Quant.Q3_K])
def test_a_table_gives_its_rows_and_holds_them_as_stored(kind, monkeypatch):
    stored_rows, weight = part(kind, 50, 256)
    monkeypatch.setattr(linear_module, "CHUNK_VALUES", 256 * 16)
    table = StoredTable.pack(stored_rows)
    assert np.array_equal(table.rows(torch.tensor([49, 3, 3])).numpy(), weight[[49, 3, 3]])
    assert table.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 256)
    assert table.n_bytes == 50 * 256 // stored_rows.type.block_values * stored_rows.type.block_bytes


def test_parts_lie_one_below_the_other():
    parts = [part(kind, 20 + seed, 64, seed) for seed, kind in enumerate((Quant.F32, Quant.Q8_0, Quant.F16))]
    together = DenseLinear.pack([stored_rows for stored_rows, _ in parts])
    x = rows(4, 64)
    each = [DenseLinear.pack([stored_rows])(x) for stored_rows, _ in parts]
    assert torch.allclose(together(x), torch.cat(each, dim=1), rtol=1e-5, atol=1e-6)


class CompanyMatters:
    """A matrix product that is off by a little for every row that comes with it."""

    kind, n_out, n_in = "odd", 8, 16

    def __init__(self, slope: float) -> None:
        self._weight, self._slope = rows(8, 16), slope

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        exact = (x.double().unsqueeze(1) * self._weight.double()).sum(-1)
        return (exact * (1 + self._slope * len(x))).float()


def test_row_invariance_is_measured_and_not_assumed():
    assert not row_invariant(CompanyMatters(1e-6))
    assert row_invariant(CompanyMatters(0.0))


@pytest.mark.parametrize("form", ["dense", "half", "int4"])
def test_row_invariance_is_what_row_invariant_says(form):
    if form == "half" and not HalfLinear.available():
        pytest.skip("torch has no half-precision packing here")
    stored_rows, _ = part(Quant.Q4_0, 200, 160)
    linear = {"dense": DenseLinear, "half": HalfLinear, "int4": Int4Linear}[form].pack([stored_rows])
    x = rows(50, 160)
    alone = torch.cat([linear(row) for row in torch.split(x, 1)])
    same = all(torch.equal(linear(x[:count]), alone[:count]) for count in range(1, 51))
    assert same or not row_invariant(linear)
