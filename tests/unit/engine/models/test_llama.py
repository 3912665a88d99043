"""The llama architecture against transformers in float32 over weights that gguf-py dequantised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.stage import Span, Stage
from kvasir_console.errors import ModelError

from builders import Quant, write_tiny_llama
from reference import logits, reference_llama

MIXED = (Quant.F32, Quant.F16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1)
MODELS = {
    "dense": {},
    "dense, tied, mixed types": {"tied": True, "weight_type": MIXED},
    "dense, one kv head": {"n_head_kv": 1, "n_layer": 3},
    "dense, as many kv heads as heads": {"n_head_kv": 4, "rope_freq_base": 500_000.0},
    "moe top-2, mixed types": {"n_expert": 4, "n_expert_used": 2, "weight_type": MIXED, "n_layer": 3},
    "moe top-3": {"n_expert": 4, "n_expert_used": 3},
}


def load(path: Path) -> Stage:
    with Checkpoint.open(path) as checkpoint:
        return Stage.load(checkpoint, 0, int(checkpoint.metadata["llama.block_count"]))


def run(stage: Stage, tokens: list[int], *, step: int) -> torch.Tensor:
    """(tokens, vocabulary): the logits of every position, fed ``step`` tokens at a time."""
    cache = stage.new_cache(len(tokens))
    rows = [
        stage.forward(stage.embed(torch.tensor(tokens[at : at + step])), [Span(cache, at, len(tokens[at : at + step]))])
        for at in range(0, len(tokens), step)
    ]
    return stage.logits(torch.cat(rows))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("arguments", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("step", [300, 1], ids=["prefill", "decode"])
def test_logits_are_those_of_the_reference(tmp_path, arguments, step):
    path = write_tiny_llama(tmp_path / "tiny.gguf", seed=7, **arguments)
    tokens = np.random.default_rng(1).integers(0, 288, 300 if step > 1 else 20).tolist()
    ours, theirs = run(load(path), tokens, step=step), logits(reference_llama(path), tokens)
    assert ours.shape == theirs.shape
    assert relative(ours, theirs) < 1e-5


def test_a_wrong_rotation_would_be_seen(tmp_path):
    # The comparison above must not be blind to positions: another base moves the logits far beyond its bound.
    first, second = (
        run(load(write_tiny_llama(tmp_path / f"{base}.gguf", rope_freq_base=base)), list(range(40)), step=40)
        for base in (10_000.0, 20_000.0)
    )
    assert relative(first, second) > 1e-2


@pytest.mark.parametrize("kind", ["linear scaling", "factors"])
def test_rope_scaling_slows_the_turns(tmp_path, kind):
    factors = np.linspace(1, 9, 8, dtype=np.float32)

    def extra(writer: GGUFWriter) -> None:
        if kind == "factors":
            writer.add_tensor("rope_freqs.weight", factors)
        else:
            writer.add_string("llama.rope.scaling.type", "linear")
            writer.add_float32("llama.rope.scaling.factor", 4.0)

    path = write_tiny_llama(tmp_path / "tiny.gguf", extra=extra)
    tokens = list(range(50))
    reference = reference_llama(path)
    unscaled = logits(reference, tokens)
    reference.model.rotary_emb.inv_freq /= torch.from_numpy(factors) if kind == "factors" else 4.0
    ours = run(load(path), tokens, step=50)
    assert relative(ours, logits(reference, tokens)) < 1e-5
    assert relative(ours, unscaled) > 1e-2


def test_an_unknown_rope_scaling_is_refused(tmp_path):
    path = write_tiny_llama(
        tmp_path / "tiny.gguf", extra=lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")
    )
    with pytest.raises(ModelError, match="yarn") as refusal:
        load(path)
    assert refusal.value.code == "unsupported_rope_scaling"


def test_a_tensor_that_would_not_be_computed_is_refused(tmp_path):
    path = write_tiny_llama(
        tmp_path / "tiny.gguf",
        extra=lambda writer: writer.add_tensor("blk.1.attn_q.bias", np.ones(64, dtype=np.float32)),
    )
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.bias") as refusal:
        load(path)
    assert refusal.value.code == "unsupported_tensor"


class Routes:
    """An ``ExpertCompute`` that keeps what the router asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.clone(), ids.clone(), weights.clone()))
        return torch.zeros_like(x)


def test_equal_experts_are_taken_by_the_lowest_id(tmp_path):
    stage = load(write_tiny_llama(tmp_path / "tiny.gguf", n_layer=1, n_expert=5, n_expert_used=3))
    dict(stage.named_tensors())["blk.0.ffn_gate_inp.weight"].zero_()
    routes = Routes()
    stage.forward(stage.embed(torch.arange(6)), [Span(stage.new_cache(8), 0, 6)], routes)
    ((_, ids, weights),) = routes.seen
    assert ids.tolist() == [[0, 1, 2]] * 6
    assert torch.allclose(weights, torch.full((6, 3), 1 / 3))


def test_weights_follow_the_file_when_it_says_not_to_rescale(tmp_path):
    def extra(writer: GGUFWriter) -> None:
        writer.add_expert_weights_norm(False)
        writer.add_expert_weights_scale(2.5)

    stage = load(write_tiny_llama(tmp_path / "tiny.gguf", n_layer=1, n_expert=6, n_expert_used=2, extra=extra))
    router = dict(stage.named_tensors())["blk.0.ffn_gate_inp.weight"].double().numpy()
    routes = Routes()
    stage.forward(stage.embed(torch.arange(40)), [Span(stage.new_cache(40), 0, 40)], routes)
    ((x, ids, weights),) = routes.seen
    scores = np.exp(x.double().numpy() @ router.T)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    best = np.argsort(-probabilities, axis=1)[:, :2]
    assert ids.numpy().tolist() == best.tolist()
    assert np.allclose(weights, 2.5 * np.take_along_axis(probabilities, best, axis=1), rtol=1e-5)
