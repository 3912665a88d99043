from __future__ import annotations

import pytest
from checkpoint_models import write_llama

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.errors import ModelError


def shape_of(path, window=None) -> ModelShape:
    with Checkpoint.open(path) as checkpoint:
        return ModelShape.of(checkpoint, window)


def test_a_dense_llama_gets_the_defaults_of_the_gguf_specification(tmp_path) -> None:
    shape = shape_of(write_llama(tmp_path / "dense.gguf"))
    assert (shape.n_layer, shape.n_embd, shape.n_ff, shape.n_vocab) == (3, 64, 96, 40)
    assert (shape.n_head, shape.n_head_kv, shape.head_dim, shape.rope_dim) == (4, 2, 16, 16)
    assert (shape.rope_freq_base, shape.context_length) == (10_000.0, 128)
    assert shape.norm_eps == pytest.approx(1e-5)
    assert (shape.n_expert, shape.n_ff_expert, shape.moe_layers) == (0, 0, ())
    assert shape.tied_output


def test_a_mixtral_style_llama_rescales_its_experts_weights_and_shares_the_dense_width(tmp_path) -> None:
    shape = shape_of(write_llama(tmp_path / "moe.gguf", experts=4, tied=False))
    assert (shape.n_expert, shape.n_expert_used, shape.n_ff_expert) == (4, 2, 96)
    assert (shape.n_ff, shape.moe_layers) == (0, (0, 1, 2))
    assert shape.expert_weights_norm
    assert shape.expert_weights_scale == 1.0
    assert not shape.tied_output


def test_keys_win_over_defaults(tmp_path) -> None:
    extra = {
        "llama.rope.freq_base": 500_000.0,
        "llama.rope.dimension_count": 8,
        "llama.expert_weights_norm": False,
        "llama.expert_weights_scale": 2.5,
    }
    shape = shape_of(write_llama(tmp_path / "keys.gguf", experts=4, extra=extra))
    assert (shape.rope_freq_base, shape.rope_dim) == (500_000.0, 8)
    assert (shape.expert_weights_norm, shape.expert_weights_scale) == (False, 2.5)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("llama.attention.key_length", 32, "attn_q"),
        ("llama.attention.value_length", 8, "value_length"),
        ("llama.rope.dimension_count", 7, "dimension_count"),
        ("llama.rope.dimension_count", 64, "dimension_count"),
        ("llama.rope.freq_base", float("inf"), "freq_base"),
        ("llama.rope.freq_base", "10000", "freq_base"),
        ("llama.expert_count", 4, "expert_used_count"),
        ("llama.expert_feed_forward_length", 95, None),
    ],
)
def test_a_key_that_cannot_be_is_named(tmp_path, key: str, value: object, named: str | None) -> None:
    path = write_llama(tmp_path / "odd.gguf", extra={key: value})
    if named is None:  # a dense model does not read the width of its experts
        assert shape_of(path).n_ff_expert == 0
        return
    with pytest.raises(ModelError, match=named):
        shape_of(path)


@pytest.mark.parametrize("window", [(0, 4), (-1, 2), (2, 2), (3, 4)])
def test_a_window_outside_the_model_is_refused(tmp_path, window: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match="block_count of 3"):
        shape_of(write_llama(tmp_path / "dense.gguf"), window)
