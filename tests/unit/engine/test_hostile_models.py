"""Files that are legal, agree with themselves, and still cannot be computed: each is refused when it is loaded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf_draft import TEXT, Draft, Tensor, parsed

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.forms import EAGER, Forms
from kvasir_console.engine.linear import DenseLinear
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import ModelError

import builders


def refusal(path: Path, spoil: Callable[[Draft], None], forms: Forms) -> ModelError:
    draft = parsed(path.read_bytes())
    spoil(draft)
    path.write_bytes(draft.bytes())
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError) as caught:
        Stage.load(checkpoint, 0, 2, forms=forms)
    return caught.value


@pytest.mark.parametrize(
    "values", [[1.0], [1.0] * 16, [1.0] * 7 + [float("nan")], [1.0] * 7 + [0.0], [1.0] * 7 + [-1.0]]
)
def test_rope_factors_that_do_not_fit_the_pairs_are_refused(tmp_path: Path, forms: Forms, values: list[float]) -> None:
    def spoil(draft: Draft) -> None:
        stored = struct.pack(f"<{len(values)}f", *values)
        draft.tensors.append(Tensor(b"rope_freqs.weight", [len(values)], Quant.F32, stored))

    error = refusal(builders.write_tiny_llama(tmp_path / "tiny.gguf"), spoil, forms)
    assert error.code == "model_contradictory"
    assert "rope_freqs.weight" in error.message


def test_an_architecture_that_has_no_experts_refuses_them_by_naming_what_it_misses(
    tmp_path: Path, forms: Forms
) -> None:
    path = builders.write_tiny_llama(tmp_path / "tiny.gguf", n_expert=4, n_expert_used=2)

    def spoil(draft: Draft) -> None:
        for entry in draft.entries:
            entry.key = entry.key.replace(b"llama.", b"gemma3.")
        draft.put("general.architecture", TEXT, "gemma3")
        ones = struct.pack("<64f", *[1.0] * 64)
        for layer in range(2):
            for name, width in (("post_attention", 64), ("post_ffw", 64), ("attn_q", 16), ("attn_k", 16)):
                name = f"blk.{layer}.{name}_norm.weight".encode()
                draft.tensors.append(Tensor(name, [width], Quant.F32, ones[: 4 * width]))

    error = refusal(path, spoil, forms)
    assert error.code == "missing_tensor"
    assert "blk.0.ffn_gate.weight" in error.message


def test_a_table_of_integers_is_refused_before_a_token_is_looked_up(tmp_path: Path, forms: Forms) -> None:
    def spoil(draft: Draft) -> None:
        table = draft.tensor("token_embd.weight")
        assert table is not None
        table.type = Quant.I32

    error = refusal(builders.write_tiny_llama(tmp_path / "tiny.gguf"), spoil, forms)
    assert error.code == "unsupported_quant"


def test_weights_that_are_no_numbers_are_not_rounded_to_numbers(tmp_path: Path) -> None:
    path = builders.write_tiny_llama(tmp_path / "tiny.gguf", weight_type=Quant.F16)
    draft = parsed(path.read_bytes())
    matrix = draft.tensor("blk.0.attn_output.weight")
    assert matrix is not None
    matrix.data = b"\x00\x7e" + matrix.data[2:]
    path.write_bytes(draft.bytes())
    with Checkpoint.open(path) as checkpoint:
        stage = Stage.load(checkpoint, 0, 2, forms=EAGER)
    held = {name: holding.held for holding in stage.holdings for name in holding.names}["blk.0.attn_output.weight"]
    assert isinstance(held, DenseLinear)
    assert torch.isnan(held.weight).sum() == 1
