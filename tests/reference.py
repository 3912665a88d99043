"""The exact reference: transformers' models in float32 over weights that gguf-py dequantised.

Nothing of the product is used here, so an agreement means something.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)


class _File:
    """A GGUF by gguf-py: its keys, and its tensors as f32."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.keys = {n: field.contents() for n, field in reader.fields.items() if not n.startswith("tokenizer.")}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def weight(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=True))


def reference(path: Path) -> Any:
    """The model of a GGUF, by its architecture."""
    architecture = GGUFReader(path).fields["general.architecture"].contents()
    return {"llama": reference_llama, "gemma3": reference_gemma3}[architecture](path)


def reference_llama(path: Path) -> Any:
    """A ``LlamaForCausalLM``, or a ``MixtralForCausalLM`` if the GGUF has experts. Weights are held once."""
    file = _File(path)
    keys, tensors, weight = file.keys, file.tensors, file.weight
    n_expert = keys.get("llama.expert_count", 0)
    n_head, n_head_kv = keys["llama.attention.head_count"], keys["llama.attention.head_count_kv"]
    n_embd, n_vocab = (int(size) for size in tensors["token_embd.weight"].shape)
    common = {
        "vocab_size": n_vocab,
        "hidden_size": n_embd,
        "intermediate_size": keys["llama.feed_forward_length"],
        "num_hidden_layers": keys["llama.block_count"],
        "num_attention_heads": n_head,
        "num_key_value_heads": n_head_kv,
        "head_dim": n_embd // n_head,
        "rms_norm_eps": keys["llama.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": keys["llama.context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": keys["llama.rope.freq_base"]},
        "tie_word_embeddings": "output.weight" not in tensors,
        "attn_implementation": "eager",
    }

    def unpermuted(name: str, heads: int) -> torch.Tensor:
        rows = weight(name)
        halves = rows.view(heads, n_embd // n_head // 2, 2, n_embd).transpose(1, 2)
        return halves.reshape(rows.shape)

    with torch.device("meta"):
        model: Any = (
            MixtralForCausalLM(
                MixtralConfig(
                    **common,
                    num_local_experts=n_expert,
                    num_experts_per_tok=keys["llama.expert_used_count"],
                    sliding_window=None,
                    experts_implementation="eager",
                )
            )
            if n_expert
            else LlamaForCausalLM(LlamaConfig(**common))
        )
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    state = {
        "model.embed_tokens.weight": weight("token_embd.weight"),
        "model.norm.weight": weight("output_norm.weight"),
    }
    state["lm_head.weight"] = (
        weight("output.weight") if "output.weight" in tensors else state["model.embed_tokens.weight"]
    )
    for layer in range(keys["llama.block_count"]):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        state[f"{theirs}.input_layernorm.weight"] = weight(f"{ours}.attn_norm.weight")
        state[f"{theirs}.self_attn.q_proj.weight"] = unpermuted(f"{ours}.attn_q.weight", n_head)
        state[f"{theirs}.self_attn.k_proj.weight"] = unpermuted(f"{ours}.attn_k.weight", n_head_kv)
        state[f"{theirs}.self_attn.v_proj.weight"] = weight(f"{ours}.attn_v.weight")
        state[f"{theirs}.self_attn.o_proj.weight"] = weight(f"{ours}.attn_output.weight")
        state[f"{theirs}.post_attention_layernorm.weight"] = weight(f"{ours}.ffn_norm.weight")
        if n_expert:
            halves = [weight(f"{ours}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            state[f"{theirs}.mlp.gate.weight"] = weight(f"{ours}.ffn_gate_inp.weight")
            state[f"{theirs}.mlp.experts.gate_up_proj"] = torch.cat(halves, dim=1)
            state[f"{theirs}.mlp.experts.down_proj"] = weight(f"{ours}.ffn_down_exps.weight")
        else:
            for part in ("gate", "up", "down"):
                state[f"{theirs}.mlp.{part}_proj.weight"] = weight(f"{ours}.ffn_{part}.weight")
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def reference_gemma3(path: Path) -> Any:
    """A ``Gemma3ForCausalLM``. A GGUF's norm weights have the one added that the network adds to them."""
    file = _File(path)
    keys, weight = file.keys, file.weight
    n_layer, head_dim = keys["gemma3.block_count"], keys["gemma3.attention.key_length"]
    n_embd, n_vocab = (int(size) for size in file.tensors["token_embd.weight"].shape)
    config = Gemma3TextConfig(
        vocab_size=n_vocab,
        hidden_size=n_embd,
        intermediate_size=keys["gemma3.feed_forward_length"],
        num_hidden_layers=n_layer,
        num_attention_heads=keys["gemma3.attention.head_count"],
        num_key_value_heads=keys["gemma3.attention.head_count_kv"],
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        rms_norm_eps=keys["gemma3.attention.layer_norm_rms_epsilon"],
        max_position_embeddings=keys["gemma3.context_length"],
        sliding_window=keys["gemma3.attention.sliding_window"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": keys["gemma3.rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(n_layer)],
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model: Any = Gemma3ForCausalLM(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(float(n_embd) ** 0.5)
    table = weight("token_embd.weight")
    state = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    state["model.norm.weight"] = weight("output_norm.weight") - 1
    matrices = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    norms = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }
    for layer in range(n_layer):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        state |= {f"{theirs}.{there}.weight": weight(f"{ours}.{here}.weight") for there, here in matrices.items()}
        state |= {f"{theirs}.{there}.weight": weight(f"{ours}.{here}.weight") - 1 for there, here in norms.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def logits(model: Any, ids: list[int], positions: Sequence[int] | None = None) -> torch.Tensor:
    """(positions, vocabulary) f32 for the ``positions`` of ``ids`` (``None``: all of them)."""
    keep = torch.arange(len(ids)) if positions is None else torch.tensor(positions)
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=torch.tensor([ids]), logits_to_keep=keep).logits[0]
    return result


def greedy(model: Any, ids: list[int], n: int) -> list[int]:
    """The ``n`` most probable next tokens, one after the other."""
    settings = {"do_sample": False, "max_new_tokens": n, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        whole = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **settings)
    tokens: list[int] = whole[0, len(ids) :].tolist()
    assert len(tokens) == n
    return tokens
