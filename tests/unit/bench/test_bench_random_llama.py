"""The random llama: its weights are what llama.cpp's own block reader says they are, and our loader takes the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kvasir_console.bench.random_llama import Recipe, blocks, write
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape


def test_weights_are_centred_and_keep_the_size_of_what_passes_through():
    weights = dequantize(blocks(np.random.Generator(np.random.PCG64(1)), 256, 2048), GGMLQuantizationType.Q4_K)
    assert weights.shape == (256, 2048)
    assert weights.std() * 2048**0.5 == pytest.approx(1, abs=0.02)
    assert abs(weights.mean()) * 2048**0.5 < 0.1


def test_a_file_of_the_same_seed_has_the_same_bytes_and_is_a_llama(tmp_path: Path):
    recipe = Recipe(n_layer=1, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=512, context_length=64)
    one, two = write(tmp_path / "a.gguf", recipe), write(tmp_path / "b.gguf", recipe)
    assert one.read_bytes() == two.read_bytes()
    with Checkpoint.open(one) as checkpoint:
        shape = ModelShape.of(checkpoint)
        kinds = {tensor.type.name for tensor in checkpoint.tensors.values()}
    assert (shape.architecture, shape.n_layer, shape.n_embd, shape.n_vocab) == ("llama", 1, 256, 512)
    assert kinds == {"F32", "Q4_K"}
