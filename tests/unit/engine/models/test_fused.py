"""Whole layers in one call: used when they agree with the operations they replace, and only then."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.experts import local_experts
from kvasir_console.engine.forms import Forms, compiled, eager
from kvasir_console.engine.linear import Rows
from kvasir_console.engine.native import Layers, Library
from kvasir_console.engine.stage import Span, Stage

from builders import Quant, write_tiny_gemma3, write_tiny_llama

TOKENS = np.random.default_rng(8).integers(0, 288, 40)
WRITERS = {
    "llama": lambda path: write_tiny_llama(path, weight_type=(Quant.Q4_1, Quant.Q8_0), n_layer=3),
    "llama, mixture": lambda path: write_tiny_llama(path, weight_type=Quant.Q8_0, n_expert=4, n_expert_used=2),
    "gemma3": write_tiny_gemma3,
}


@pytest.fixture(params=WRITERS.values(), ids=WRITERS.keys())
def path(request, tmp_path) -> Path:
    return request.param(tmp_path / "tiny.gguf")


def load(path: Path, forms: Forms) -> Stage:
    with Checkpoint.open(path) as checkpoint:
        return Stage.load(
            checkpoint, 0, int(checkpoint.metadata[f"{checkpoint.architecture}.block_count"]), forms=forms
        )


def run(stage: Stage) -> torch.Tensor:
    rows = stage.embed(torch.from_numpy(TOKENS))
    return stage.logits(stage.forward(rows, [Span(stage.new_cache(40), 0, 40)]))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_whole_layers_are_used_and_give_what_operations_give(path, library, monkeypatch):
    calls = 0
    original = Library.call

    def counted(self: Library, name: str, *arguments: object) -> None:
        nonlocal calls
        calls += name in ("kv_layers", "kv_attention_half")
        original(self, name, *arguments)

    fused = load(path, compiled(library))
    monkeypatch.setattr(Library, "call", counted)
    assert fused.kv_layout.panels
    got = run(fused)
    assert calls == 1  # the window's own experts are in it
    by_operations = load(path, Forms("native", compiled(library).linear))
    assert not by_operations.kv_layout.panels
    assert 0 < relative(got, run(by_operations)) < 2e-5


def test_experts_computed_elsewhere_give_the_same_bits_and_are_counted_alike(library, tmp_path):
    """The window in one call, and cut at every layer with experts: who computes them may change nothing."""
    path = WRITERS["llama, mixture"](tmp_path / "tiny.gguf")
    whole, halves = load(path, compiled(library)), load(path, compiled(library))
    rows = whole.embed(torch.from_numpy(TOKENS))
    one_call = whole.forward(rows, [Span(whole.new_cache(40), 0, 40)])
    cut = halves.forward(rows, [Span(halves.new_cache(40), 0, 40)], local_experts(halves.banks))
    assert torch.equal(one_call, cut)
    for layer, bank in whole.banks.items():
        assert bank.pairs.sum() == 40 * 2
        assert np.array_equal(bank.pairs, halves.banks[layer].pairs)


def test_layers_that_disagree_are_refused(path, library, monkeypatch, caplog):
    originals = Layers.forward, Layers.attention_half

    def wrong(self: Layers, x: torch.Tensor, *arguments: object) -> None:
        originals[0](self, x, *arguments)
        x[-1] *= 1.01

    def wrong_half(self: Layers, index: int, x: torch.Tensor, *arguments: object) -> torch.Tensor:
        normed = originals[1](self, index, x, *arguments)
        x[-1] *= 1.01
        return normed

    wanted = run(load(path, Forms("native", compiled(library).linear)))
    monkeypatch.setattr(Layers, "forward", wrong)
    monkeypatch.setattr(Layers, "attention_half", wrong_half)
    with caplog.at_level(logging.WARNING):
        refused = load(path, compiled(library))
    assert "differ" in caplog.text
    assert not refused.kv_layout.panels
    assert relative(run(refused), wanted) < 2e-5


def test_a_matrix_in_another_form_leaves_the_layers_to_torch(path, library, caplog):
    forms = compiled(library)

    def some(parts: list[Rows], device: str) -> object:
        return eager(parts, device) if parts[0].n_in == 96 else forms.linear(parts, device)

    with caplog.at_level(logging.INFO):
        stage = load(path, Forms("native", some, library))
    assert torch.isfinite(run(stage)).all()
    experts = bool(stage.banks)
    # Experts may be elsewhere anyway, so that a bank in another form costs the layers nothing else.
    assert stage.kv_layout.panels == experts
    assert ("torch computes" in caplog.text) == (not experts)
