"""The exact reference: transformers' models in float32 over weights that gguf-py dequantised.

Nothing of the product is used here, so an agreement means something.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


def reference_llama(path: Path) -> Any:
    """A ``LlamaForCausalLM``, or a ``MixtralForCausalLM`` if the GGUF has experts. Weights are held once."""
    reader = GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
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

    def weight(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=True))

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


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary) f32 for each position of ``ids``."""
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return result


def greedy(path: Path, ids: list[int], n: int) -> list[int]:
    """The ``n`` most probable next tokens, one after the other."""
    model = reference_llama(path)
    settings = {"do_sample": False, "max_new_tokens": n, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        whole = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **settings)
    tokens: list[int] = whole[0, len(ids) :].tolist()
    assert len(tokens) == n
    return tokens
