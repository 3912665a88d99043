"""Matrices in 8 bits against float64 products with rounded weights, and banks of them against one expert at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from kvasir_console.engine import int8 as int8_module
from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.experts import Expert, ExpertBank
from kvasir_console.engine.int8 import Digits, Int8Linear, available
from kvasir_console.engine.linear import Rows, UnsuitableError, row_invariant

from builders import Quant, stored

pytestmark = pytest.mark.skipif(not available(), reason="torch multiplies no integers here")


def part(kind: Quant, count: int, n_in: int, seed: int = 0) -> tuple[Rows, np.ndarray]:
    """Random rows as stored, and their values (count, n_in) f64."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((count, n_in)) / np.sqrt(n_in)).astype(np.float32)
    raw = torch.from_numpy(np.ascontiguousarray(stored(values, kind, rng)).view(np.uint8)).view(count, -1)
    read = dequantize(raw.numpy(), kind).reshape(count, n_in).astype(np.float64)
    return Rows(GGMLType(int(kind)), count, n_in, lambda begin, end: raw[begin:end].clone()), read


def rows(count: int, n_in: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(count, n_in, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [Quant.Q8_0, Quant.Q6_K, Quant.Q5_0])
def test_weights_are_rounded_and_rows_hardly(kind):
    stored_rows, weight = part(kind, 50, 256)
    step = np.abs(weight).max(1) / 127
    linear = Int8Linear.pack([stored_rows])
    x = rows(5, 256)
    exact = x.double().numpy() @ weight.T
    error = np.abs(linear(x).double().numpy() - exact)
    largest, total = np.abs(x.numpy()).max(1, keepdims=True), np.abs(x.numpy()).sum(1, keepdims=True)
    # Half a step of every weight, and of a row's values half of what a step of the low digit is worth.
    assert (error <= step / 2 * total + largest / (2 * 63 * 126) * np.abs(weight).sum(1) + 1e-5).all()
    # Evenly distributed errors of that size would have this root mean square; nothing else is lost.
    expected = step / np.sqrt(12) * np.linalg.norm(x.numpy(), axis=1, keepdims=True)
    assert np.sqrt(((error / expected) ** 2).mean()) < 1.1
    assert (linear.n_out, linear.n_in, linear.n_bytes) == (50, 256, 50 * 260)


def test_a_row_has_the_same_bits_in_any_company():
    linear = Int8Linear.pack([part(Quant.Q8_0, 200, 160)[0]])
    x = rows(50, 160) * torch.logspace(-6, 6, 50).unsqueeze(1)
    alone = torch.cat([linear(row) for row in torch.split(x, 1)])
    assert all(torch.equal(linear(x[:count]), alone[:count]) for count in range(1, 51))
    assert row_invariant(linear)


def test_pieces_change_nothing(monkeypatch):
    parts = [part(kind, count, 64, seed)[0] for seed, (kind, count) in enumerate([(Quant.Q8_0, 70), (Quant.Q5_1, 33)])]
    whole = Int8Linear.pack(parts)
    monkeypatch.setattr(int8_module, "PIECE_VALUES", 64 * 40)
    pieces = Int8Linear.pack(parts)
    assert len(pieces._pieces) == 3
    assert torch.equal(pieces(rows(6, 64)), whole(rows(6, 64)))


def test_rows_of_zeros_and_rows_that_are_no_numbers_stay_what_they_are():
    linear = Int8Linear.pack([part(Quant.Q8_0, 16, 64)[0]])
    x = rows(4, 64)
    x[1], x[2, 5], x[3, 7] = 0, float("nan"), float("inf")
    got = linear(x)
    assert torch.equal(got[0], linear(x[:1])[0])
    assert not got[1].any()
    assert not got[2].isfinite().any()
    assert not got[3].isfinite().any()


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(worst):
    values = torch.zeros(16, 32)
    values[3, 3] = worst
    with pytest.raises(UnsuitableError):
        Int8Linear.pack([Rows(GGMLType.F32, 16, 32, lambda begin, end: values[begin:end].view(torch.uint8).clone())])


def test_other_types_are_not_rounded():
    assert Int8Linear.suits([part(Quant.Q8_0, 16, 32)[0], part(Quant.Q8_0, 32, 32)[0]])
    assert not Int8Linear.suits([part(Quant.Q8_0, 16, 32)[0], part(Quant.Q5_0, 16, 32)[0]])


def test_digits_are_the_row():
    x = rows(7, 96)
    digits = Digits.of(x)
    high, low = digits.values.double().unbind(1)
    assert torch.equal(high, high.round())
    assert high.abs().max() <= 63
    assert low.abs().max() <= 63.1
    assert torch.allclose((high + low / 126) * digits.unit.double(), x.double(), rtol=1e-5, atol=1e-6)


def bank(count: int = 5) -> tuple[ExpertBank, list[Expert]]:
    experts = [
        Expert(
            gate_up=Int8Linear.pack([part(Quant.Q8_0, 96, 64, 2 * e)[0], part(Quant.Q8_0, 96, 64, 2 * e + 99)[0]]),
            down=Int8Linear.pack([part(Quant.Q8_0, 64, 96, 2 * e + 1)[0]]),
        )
        for e in range(count)
    ]
    return ExpertBank(0, 0, count, experts), experts


def test_a_bank_gives_what_its_experts_give_one_at_a_time():
    held, experts = bank()
    x = rows(6, 64)
    row_idx, ids = torch.tensor([0, 0, 3, 5, 1, 5, 2, 4]), torch.tensor([4, 1, 1, 0, 4, 2, 1, 1])
    wanted = torch.cat([experts[expert](x[row : row + 1]) for row, expert in zip(row_idx, ids, strict=True)])
    assert torch.equal(held.outputs(x, row_idx, ids), wanted)
    assert held.pairs.tolist() == [1, 4, 1, 0, 2]


@pytest.mark.parametrize("K", [1, 2])
def test_a_row_alone_has_its_bits_in_a_batch_and_is_counted(K):
    held, _ = bank()
    x, ids = rows(9, 64), torch.stack([torch.randperm(5)[:K] for _ in range(9)])
    weights = torch.rand(9, K)
    together = held.routed(x, ids, weights)
    before = held.pairs.copy()
    alone = torch.cat([held.routed(x[r : r + 1], ids[r : r + 1], weights[r : r + 1]) for r in range(9)])
    assert torch.equal(alone, together)
    assert (held.pairs - before).tolist() == torch.bincount(ids.view(-1), minlength=5).tolist()
