"""A dense llama of ordinary size and random Q4_K weights: as many bytes and operations as a real one, made on the spot.

gguf-py cannot quantise to K-quants, so blocks are drawn: random quants and 6-bit scales, and the two half-precision
scales of a block (ggml-common.h, ``block_q4_K``) chosen so that weights have mean zero and a layer keeps the size of
what passes through it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFWriter

NAME = "random-1.1b"
BYTES = 256
"""Tokens of a vocabulary that stand for bytes."""
_VALUES, _BYTES = 256, 144
_SPREAD = 255.0
"""Deviation of ``sc * q - 7.5 * m`` for uniform 6-bit ``sc``, ``m`` and 4-bit ``q``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of TinyLlama 1.1B."""

    n_layer: int = 22
    n_embd: int = 2048
    n_head: int = 32
    n_head_kv: int = 4
    n_ff: int = 5632
    n_vocab: int = 32_000
    context_length: int = 2048
    seed: int = 0


def write(path: Path, recipe: Recipe = Recipe()) -> Path:
    """Write the checkpoint under a temporary name and move it to ``path`` once it is whole; 0.6 GB by default."""
    from gguf import GGMLQuantizationType, GGUFWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    rng = np.random.Generator(np.random.PCG64(recipe.seed))
    head = recipe.n_embd // recipe.n_head
    writer = GGUFWriter(part, "llama")
    writer.add_name(f"random llama, seed {recipe.seed}")
    writer.add_block_count(recipe.n_layer)
    writer.add_context_length(recipe.context_length)
    writer.add_embedding_length(recipe.n_embd)
    writer.add_feed_forward_length(recipe.n_ff)
    writer.add_head_count(recipe.n_head)
    writer.add_head_count_kv(recipe.n_head_kv)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocabulary(writer, ["th", *(f"<{number}>" for number in range(recipe.n_vocab - BYTES - 1))])

    def matrix(name: str, n_out: int, n_in: int) -> None:
        writer.add_tensor(name, blocks(rng, n_out, n_in), raw_dtype=GGMLQuantizationType.Q4_K)

    def norm(name: str) -> None:
        values: npt.NDArray[np.float32] = (1 + 0.1 * rng.standard_normal(recipe.n_embd)).astype(np.float32)
        writer.add_tensor(name, values)

    matrix("token_embd.weight", recipe.n_vocab, recipe.n_embd)
    for layer in range(recipe.n_layer):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm.weight")
        matrix(f"{block}.attn_q.weight", recipe.n_embd, recipe.n_embd)
        matrix(f"{block}.attn_k.weight", recipe.n_head_kv * head, recipe.n_embd)
        matrix(f"{block}.attn_v.weight", recipe.n_head_kv * head, recipe.n_embd)
        matrix(f"{block}.attn_output.weight", recipe.n_embd, recipe.n_embd)
        norm(f"{block}.ffn_norm.weight")
        matrix(f"{block}.ffn_gate.weight", recipe.n_ff, recipe.n_embd)
        matrix(f"{block}.ffn_up.weight", recipe.n_ff, recipe.n_embd)
        matrix(f"{block}.ffn_down.weight", recipe.n_embd, recipe.n_ff)
    norm("output_norm.weight")
    matrix("output.weight", recipe.n_vocab, recipe.n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)
    return path


def blocks(rng: np.random.Generator, n_out: int, n_in: int) -> npt.NDArray[np.uint8]:
    """Q4_K blocks of an (n_out, n_in) matrix, uint8 (n_out, n_in / 256 * 144), of weights of deviation n_in ** -0.5."""
    count = n_out * n_in // _VALUES
    raw = np.frombuffer(rng.bytes(count * _BYTES), np.uint8).reshape(count, _BYTES).copy()
    scale = 1 / (_SPREAD * np.sqrt(n_in))
    raw[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    return raw.reshape(n_out, -1)


def add_vocabulary(writer: GGUFWriter, words: Sequence[str]) -> None:
    """256 bytes, then ``words``, the first of them "th": a vocabulary of this kind has at least one merge."""
    from gguf import TokenType

    tokens = [*byte_characters(), *words]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["t h"])
    writer.add_add_bos_token(False)


def byte_characters() -> list[str]:
    """The 256 characters that stand for bytes in a GPT-2 vocabulary (Radford et al., 2019), by byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]
