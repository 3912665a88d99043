"""The operations between products against torch in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvasir_console.engine.native import ops
from kvasir_console.errors import EngineError


def _rows(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


@pytest.mark.parametrize("width", [1, 17, 64, 576, 1000])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(library, width, weighted):
    x, weight = _rows(70, width, scale=3), _rows(width) if weighted else None
    got = ops.rms_norm(library, x, weight, 1e-5)
    exact = F.rms_norm(x.double(), (width,), None if weight is None else weight.double(), 1e-5)
    assert torch.allclose(got.double(), exact, rtol=1e-6, atol=1e-7)
    assert all(
        torch.equal(ops.rms_norm(library, row, weight, 1e-5), got[i : i + 1]) for i, row in enumerate(x.split(1))
    )


@pytest.mark.parametrize("width", [1, 20, 256, 1536])
@pytest.mark.parametrize(("name", "activation"), [("silu", F.silu), ("gelu", lambda x: F.gelu(x, approximate="tanh"))])
def test_gates(library, width, name, activation):
    gate_up = _rows(40, 2 * width, scale=6)
    got = ops.gated(library, gate_up, name)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert torch.allclose(got.double(), activation(gate) * up, rtol=2e-6, atol=1e-6)
    assert all(torch.equal(ops.gated(library, row, name), got[i : i + 1]) for i, row in enumerate(gate_up.split(1)))


def test_gates_far_out(library):
    extremes = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.nan]])
    got = ops.gated(library, torch.cat((extremes, torch.ones(1, 8)), dim=1), "silu")[0]
    assert got[:3].abs().max() < 1e-6
    assert torch.equal(got[3:7], extremes[0, 3:7])
    assert bool(got[7].isnan())


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dim", [32, 64])
def test_rotary_positions(library, halves, dim):
    heads = _rows(9, 5, 64)
    angles = _rows(9, dim // 2, scale=3).double()
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    got = heads.clone()
    ops.rotate(library, got, turns, halves=halves)
    turned = heads[..., :dim].double()
    pairs = torch.stack(turned.chunk(2, dim=-1), dim=-1) if halves else turned.unflatten(-1, (-1, 2))
    exact = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns.unsqueeze(1))
    exact = torch.cat(exact.unbind(-1), dim=-1) if halves else exact.flatten(-2)
    assert torch.allclose(got[..., :dim].double(), exact, rtol=0, atol=1e-6)
    assert torch.equal(got[..., dim:], heads[..., dim:])


def test_rotation_of_some_of_the_heads_leaves_the_others(library):
    qkv = _rows(6, 5, 32)
    turns = torch.polar(torch.ones(6, 16), _rows(6, 16))
    got, whole = qkv.clone(), qkv.clone()
    ops.rotate(library, got[:, 1:3], turns, halves=False)
    ops.rotate(library, whole, turns, halves=False)
    assert torch.equal(got[:, 1:3], whole[:, 1:3])
    assert torch.equal(got[:, [0, 3, 4]], qkv[:, [0, 3, 4]])


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("n", "used"), [(8, 2), (8, 8), (60, 4), (128, 1)])
def test_routing_takes_the_most_probable(library, n, used, normalised):
    logits = _rows(50, n, scale=4)
    ids, weights = ops.route(library, logits, used, normalised=normalised, scale=2.5)
    best, order = logits.double().softmax(-1).topk(used)
    if normalised:
        best = best / best.sum(-1, keepdim=True)
    assert torch.equal(ids, order)
    assert torch.allclose(weights.double(), 2.5 * best, rtol=1e-6)


def test_routing_prefers_the_lowest_among_equals_and_survives_what_is_no_number(library):
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0], [torch.nan] * 4, [-torch.inf, 0.0, -torch.inf, -torch.inf]])
    ids, weights = ops.route(library, logits, 2, normalised=True, scale=1.0)
    assert ids.tolist() == [[1, 2], [0, 1], [1, 0]]
    assert weights[0].tolist() == [0.5, 0.5]
    assert bool(weights[1].isnan().all())


def test_tensors_that_do_not_fit_are_refused(library):
    x = torch.zeros(3, 8)
    with pytest.raises(EngineError):
        ops.rms_norm(library, x, torch.zeros(7), 1e-5)
    with pytest.raises(EngineError):
        ops.rms_norm(library, x.double(), None, 1e-5)
    with pytest.raises(EngineError):
        ops.rotate(library, torch.zeros(3, 2, 8), torch.zeros(3, 5, dtype=torch.complex64), halves=True)
    with pytest.raises(EngineError):
        ops.rotate(library, torch.zeros(3, 2, 8), torch.zeros(3, 4, dtype=torch.complex128), halves=True)
    with pytest.raises(EngineError):
        ops.route(library, x, 9, normalised=True, scale=1.0)
