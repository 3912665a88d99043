"""Model files made on the spot: tiny llama checkpoints with random weights and a complete byte-level tokenizer.

They are written with gguf-py, so that the product never reads only what it wrote itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFWriter, TokenType
from gguf.quants import quantize

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "Ġ th", "Ġth e", "i n", "e r")
MIN_VOCAB = 256 + len(SPECIAL_TOKENS) + len(MERGES)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a GPT-2 vocabulary: printable ones stand for themselves, the others
    for the code points from 256 on, in order (Radford et al., 2019)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


def write_tiny_llama(
    path: Path,
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    n_vocab: int = 288,
    n_expert: int = 0,
    n_expert_used: int = 0,
    weight_type: Quant | Sequence[Quant] = Quant.F32,
    seed: int = 0,
    tied: bool = False,
    context_length: int = 512,
    rope_freq_base: float = 10000.0,
    extra: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write a llama-architecture GGUF, dense or (``n_expert`` > 0) MoE in every layer; the same arguments give the
    same bytes.

    ``weight_type`` is one ggml type for all matrices, or several that take turns, tensor by tensor; norms and routers
    are F32. Block types need ``n_embd`` and ``n_ff`` to be multiples of 32. Weights have a deviation of
    1/sqrt(inputs), which keeps activations near one. Token ids: 0 ends text, 1 and 2 are the chat marks, then the 256
    bytes, the merged tokens, and unused ones up to ``n_vocab``; 2 ends a turn. ``extra`` may add keys and tensors.
    """
    if n_vocab < MIN_VOCAB:
        raise ValueError(f"n_vocab must be at least {MIN_VOCAB}")
    rng = np.random.Generator(np.random.PCG64(seed))
    types = [weight_type] if isinstance(weight_type, Quant) else list(weight_type)
    head_dim = n_embd // n_head
    writer = GGUFWriter(path, "llama")
    writer.add_name(f"tiny random llama, seed {seed}")
    writer.add_block_count(n_layer)
    writer.add_context_length(context_length)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_rope_freq_base(rope_freq_base)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    if n_expert:
        writer.add_expert_count(n_expert)
        writer.add_expert_used_count(n_expert_used)
    _add_tokenizer(writer, n_vocab)

    written = 0

    def matrix(name: str, *shape: int, scale: float = 1.0) -> None:
        nonlocal written
        kind = types[written % len(types)]
        written += 1
        values = (rng.standard_normal(shape, dtype=np.float32) * (scale / np.sqrt(shape[-1]))).astype(np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, (1 + 0.1 * rng.standard_normal(n_embd)).astype(np.float32))

    matrix("token_embd.weight", n_vocab, n_embd, scale=np.sqrt(n_embd))
    for layer in range(n_layer):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm.weight")
        matrix(f"{block}.attn_q.weight", n_head * head_dim, n_embd)
        matrix(f"{block}.attn_k.weight", n_head_kv * head_dim, n_embd)
        matrix(f"{block}.attn_v.weight", n_head_kv * head_dim, n_embd)
        matrix(f"{block}.attn_output.weight", n_embd, n_head * head_dim)
        norm(f"{block}.ffn_norm.weight")
        if n_expert:
            router = rng.standard_normal((n_expert, n_embd)) * (2 / np.sqrt(n_embd))
            writer.add_tensor(f"{block}.ffn_gate_inp.weight", router.astype(np.float32))
            matrix(f"{block}.ffn_gate_exps.weight", n_expert, n_ff, n_embd)
            matrix(f"{block}.ffn_up_exps.weight", n_expert, n_ff, n_embd)
            matrix(f"{block}.ffn_down_exps.weight", n_expert, n_embd, n_ff)
        else:
            matrix(f"{block}.ffn_gate.weight", n_ff, n_embd)
            matrix(f"{block}.ffn_up.weight", n_ff, n_embd)
            matrix(f"{block}.ffn_down.weight", n_embd, n_ff)
    norm("output_norm.weight")
    if not tied:
        matrix("output.weight", n_vocab, n_embd)
    if extra is not None:
        extra(writer)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), *merged]
    kinds = [TokenType.CONTROL] * len(SPECIAL_TOKENS) + [TokenType.NORMAL] * (256 + len(merged))
    unused = range(n_vocab - len(tokens))
    tokens += [f"<|unused_{index}|>" for index in unused]
    kinds += [TokenType.UNUSED for _ in unused]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
