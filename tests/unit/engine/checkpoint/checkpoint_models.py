"""Small models with random weights, written by gguf-py, so that our reader and writer meet another implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

DENSE = {"n_layer": 3, "n_embd": 64, "n_ff": 96, "n_head": 4, "n_head_kv": 2, "n_vocab": 40}


def write_llama(path: Path, *, experts: int = 0, tied: bool = True, extra: dict[str, Any] | None = None) -> Path:
    """A llama model of three layers; F32 norms, Q8_0 embeddings, Q4_1 matrices."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_size_label("1K")
    writer.add_context_length(128)
    writer.add_embedding_length(DENSE["n_embd"])
    writer.add_block_count(DENSE["n_layer"])
    writer.add_feed_forward_length(DENSE["n_ff"])
    writer.add_head_count(DENSE["n_head"])
    writer.add_head_count_kv(DENSE["n_head_kv"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(DENSE["n_vocab"])])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    for key, value in (extra or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)

    def add_tensor(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    types = gguf.GGMLQuantizationType
    embd, ff = DENSE["n_embd"], DENSE["n_ff"]
    kv = embd // DENSE["n_head"] * DENSE["n_head_kv"]
    add_tensor("token_embd.weight", (DENSE["n_vocab"], embd), types.Q8_0)
    for layer in range(DENSE["n_layer"]):
        block = f"blk.{layer}."
        add_tensor(block + "attn_norm.weight", (embd,), types.F32)
        for part, rows in (("q", embd), ("k", kv), ("v", kv), ("output", embd)):
            add_tensor(f"{block}attn_{part}.weight", (rows, embd), types.Q4_1)
        add_tensor(block + "ffn_norm.weight", (embd,), types.F32)
        if experts:
            add_tensor(block + "ffn_gate_inp.weight", (experts, embd), types.F32)
            add_tensor(block + "ffn_gate_exps.weight", (experts, ff, embd), types.Q8_0)
            add_tensor(block + "ffn_up_exps.weight", (experts, ff, embd), types.Q8_0)
            add_tensor(block + "ffn_down_exps.weight", (experts, embd, ff), types.Q4_0)
        else:
            add_tensor(block + "ffn_gate.weight", (ff, embd), types.Q4_1)
            add_tensor(block + "ffn_up.weight", (ff, embd), types.Q4_1)
            add_tensor(block + "ffn_down.weight", (embd, ff), types.Q4_1)
    add_tensor("output_norm.weight", (embd,), types.F32)
    if not tied:
        add_tensor("output.weight", (DENSE["n_vocab"], embd), types.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def peer_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Dimensions, type name and stored bytes of every tensor, as gguf-py reads them."""
    return {
        tensor.name: (tuple(int(n) for n in tensor.shape), tensor.tensor_type.name, tensor.data.tobytes())
        for tensor in gguf.GGUFReader(path).tensors
    }


def peer_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key's value, as gguf-py reads it."""
    fields = gguf.GGUFReader(path).fields.items()
    return {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}
