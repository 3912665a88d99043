"""Checkpoints that a benchmark of the network makes for itself: small, random, and the same bytes for the same seed.

What they say is noise, and that serves: with nearly flat distributions and sampling, one wrong row changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvasir_console.bench.random_llama import BYTES, add_vocabulary

_WORDS = 256


@dataclass(frozen=True, slots=True)
class Recipe:
    """A llama-architecture mixture of experts. Matrices are Q8_0, so widths are multiples of 32."""

    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 256
    n_expert: int = 8
    n_expert_used: int = 2
    context_length: int = 2048
    seed: int = 0


def write_model(path: Path, recipe: Recipe = Recipe()) -> Path:
    """Write the checkpoint; token ids are 256 bytes, then words that print, and no token ends a text."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    rng = np.random.Generator(np.random.PCG64(recipe.seed))
    width, heads = recipe.n_embd, recipe.n_head
    head = width // heads
    words = ["th", *(f"Ġw{number:03d}" for number in range(1, _WORDS))]
    writer = GGUFWriter(path, "llama")
    writer.add_name(f"random mixture of experts, seed {recipe.seed}")
    writer.add_block_count(recipe.n_layer)
    writer.add_context_length(recipe.context_length)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(recipe.n_ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(recipe.n_head_kv)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(recipe.n_expert)
    writer.add_expert_used_count(recipe.n_expert_used)
    add_vocabulary(writer, words)

    def matrix(name: str, *shape: int, scale: float = 1.0) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale / np.sqrt(shape[-1]))
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        values: npt.NDArray[np.float32] = (1 + 0.1 * rng.standard_normal(width)).astype(np.float32)
        writer.add_tensor(name, values)

    matrix("token_embd.weight", BYTES + len(words), width, scale=float(np.sqrt(width)))
    for layer in range(recipe.n_layer):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm.weight")
        matrix(f"{block}.attn_q.weight", width, width)
        matrix(f"{block}.attn_k.weight", recipe.n_head_kv * head, width)
        matrix(f"{block}.attn_v.weight", recipe.n_head_kv * head, width)
        matrix(f"{block}.attn_output.weight", width, width)
        norm(f"{block}.ffn_norm.weight")
        router = rng.standard_normal((recipe.n_expert, width)) * (2 / np.sqrt(width))
        writer.add_tensor(f"{block}.ffn_gate_inp.weight", router.astype(np.float32))
        matrix(f"{block}.ffn_gate_exps.weight", recipe.n_expert, recipe.n_ff, width)
        matrix(f"{block}.ffn_up_exps.weight", recipe.n_expert, recipe.n_ff, width)
        matrix(f"{block}.ffn_down_exps.weight", recipe.n_expert, width, recipe.n_ff)
    norm("output_norm.weight")
    matrix("output.weight", BYTES + len(words), width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
