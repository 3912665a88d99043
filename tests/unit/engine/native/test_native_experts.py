"""Banks of packed experts against their weights in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from native_blocks import random_rows, weights

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.native import NativeExperts, NativeLinear
from kvasir_console.engine.native.experts import weighted_sum
from kvasir_console.errors import EngineError

E, D, WIDTH = 4, 64, 96


class Bank:
    """Experts, and their weights."""

    def __init__(self, library, activation: str = "silu") -> None:
        raw = [
            [random_rows(GGMLType.Q4_1, n_out, n_in, seed=3 * expert + part) for part, (n_out, n_in) in enumerate(
                ((WIDTH, D), (WIDTH, D), (D, WIDTH)))]
            for expert in range(E)
        ]  # fmt: skip
        kind = int(GGMLType.Q4_1)
        self.experts = NativeExperts(
            [NativeLinear.pack([(gate, kind, WIDTH), (up, kind, WIDTH)], D, library) for gate, up, _ in raw],
            [NativeLinear.pack([(down, kind, D)], WIDTH, library) for _, _, down in raw],
            library,
            activation=activation,
        )
        self.weights = [[weights(part, GGMLType.Q4_1).double() for part in parts] for parts in raw]
        self.activation = F.silu if activation == "silu" else lambda x: F.gelu(x, approximate="tanh")

    def exact(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up, down = self.weights[expert]
        return (self.activation(x.double() @ gate.T) * (x.double() @ up.T)) @ down.T


def _pairs(rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randint(0, rows, (count,), generator=generator),
        torch.randint(0, E, (count,), generator=generator),
        torch.rand(count, generator=generator),
    )


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_each_pair_gets_its_experts_answer(library, activation):
    bank = Bank(library, activation)
    x = torch.randn(30, D, generator=torch.Generator().manual_seed(1))
    row_idx, ids, _ = _pairs(30, 70)
    got = bank.experts.outputs(x, row_idx, ids)
    exact = torch.stack([bank.exact(x[row], int(expert)) for row, expert in zip(row_idx, ids, strict=True)])
    assert got.shape == (70, D)
    assert (got.double() - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_pair_has_the_same_bits_in_any_company(library):
    bank = Bank(library)
    x = torch.randn(30, D, generator=torch.Generator().manual_seed(2))
    row_idx, ids, _ = _pairs(30, 70)
    got = bank.experts.outputs(x, row_idx, ids)
    for pair in range(70):
        alone = bank.experts.outputs(
            x[row_idx[pair]].view(1, -1), torch.zeros(1, dtype=torch.int64), ids[pair : pair + 1]
        )
        assert torch.equal(alone, got[pair : pair + 1])


def test_weights_are_applied_and_added_in_the_order_of_the_pairs(library):
    bank = Bank(library)
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(3))
    row_idx, ids, factors = _pairs(9, 40)
    terms = bank.experts.outputs(x, row_idx, ids)
    expected = torch.zeros(10, D)
    for pair, row in enumerate(row_idx.tolist()):
        expected[row] = expected[row] + factors[pair] * terms[pair]
    assert torch.equal(weighted_sum(library, terms, row_idx, factors, 10), expected)
    assert torch.equal(bank.experts.weighted_sum(x, row_idx, ids, factors), expected[:9])


def test_many_pairs_are_summed_like_few(library):
    terms = torch.randn(900, 200, generator=torch.Generator().manual_seed(4))
    row_idx, _, factors = _pairs(100, 900)
    expected = torch.zeros(100, 200)
    for pair, row in enumerate(row_idx.tolist()):
        expected[row] = expected[row] + factors[pair] * terms[pair]
    assert torch.equal(weighted_sum(library, terms, row_idx, factors, 100), expected)


def test_no_pairs_give_zeros(library):
    bank = Bank(library)
    none = torch.empty(0, dtype=torch.int64)
    assert torch.equal(bank.experts.weighted_sum(torch.ones(3, D), none, none, torch.empty(0)), torch.zeros(3, D))


def test_pairs_and_banks_that_do_not_fit_are_refused(library):
    bank = Bank(library)
    x = torch.zeros(3, D)
    one = torch.zeros(1, dtype=torch.int64)
    for rows, row_idx, ids in (
        (x, one + 3, one),
        (x, one - 1, one),
        (x, one, one + E),
        (x, one, torch.zeros(2, dtype=torch.int64)),
        (x, one.int(), one),
        (torch.zeros(3, D + 1), one, one),
    ):
        with pytest.raises(EngineError):
            bank.experts.outputs(rows, row_idx, ids)
    with pytest.raises(EngineError):
        weighted_sum(library, torch.zeros(2, 5), torch.tensor([0, 1]), torch.zeros(3), 2)
    narrow = NativeLinear.pack([(random_rows(GGMLType.Q4_1, D, D), int(GGMLType.Q4_1), D)], D, library)
    with pytest.raises(EngineError):
        NativeExperts([narrow], [narrow], library)
