"""Model files made on the spot: tiny checkpoints with random weights and a complete byte-level tokenizer.

They are written with gguf-py, so that the product never reads only what it wrote itself. Of types that gguf-py cannot
quantise to, they hold random blocks that are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter, TokenType
from gguf import GGMLQuantizationType as Quant
from gguf.quants import dequantize, quantize

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "Ġ th", "Ġth e", "i n", "e r")
MIN_VOCAB = 256 + len(SPECIAL_TOKENS) + len(MERGES)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


QUANTISED = (Quant.F32, Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0,
             Quant.TQ1_0, Quant.TQ2_0, Quant.MXFP4)  # fmt: skip
"""What gguf-py can write."""
_HALVES: dict[Quant, tuple[tuple[int, float], ...]] = {
    Quant.Q2_K: ((80, 1), (82, 1.5)),
    Quant.Q3_K: ((108, 1),),
    Quant.Q4_K: ((0, 1), (2, 7.5)),
    Quant.Q5_K: ((0, 1), (2, 15.5)),
    Quant.Q6_K: ((208, 1),),
    Quant.IQ2_XXS: ((0, 1),),
    Quant.IQ2_XS: ((0, 1),),
    Quant.IQ2_S: ((0, 1),),
    Quant.IQ3_XXS: ((0, 1),),
    Quant.IQ3_S: ((0, 1),),
    Quant.IQ1_S: ((0, 1),),
    Quant.IQ4_NL: ((0, 1),),
    Quant.IQ4_XS: ((0, 1),),
}
"""Where the halves of a block lie, and their sizes relative to each other (ggml-common.h)."""
EVERY_TYPE = (*QUANTISED, *_HALVES, Quant.IQ1_M, Quant.NVFP4)
"""Every type whose values gguf-py can read."""


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
    are F32. Block types need ``n_embd`` and ``n_ff`` to be multiples of their blocks. Weights have a deviation of
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
        writer.add_tensor(name, stored(values, kind, rng), raw_dtype=kind)

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


def write_tiny_gemma3(
    path: Path,
    *,
    n_layer: int = 7,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff: int = 96,
    n_vocab: int = 288,
    weight_type: Quant | Sequence[Quant] = Quant.F32,
    sliding_window: int = 16,
    context_length: int = 512,
    seed: int = 0,
) -> Path:
    """Write a gemma3 GGUF whose sixth layer is global and whose others look back ``sliding_window`` positions; the rest
    as ``write_tiny_llama`` has it."""
    rng = np.random.Generator(np.random.PCG64(seed))
    types = [weight_type] if isinstance(weight_type, Quant) else list(weight_type)
    writer = GGUFWriter(path, "gemma3")
    writer.add_name(f"tiny random gemma3, seed {seed}")
    writer.add_block_count(n_layer)
    writer.add_context_length(context_length)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(sliding_window)
    _add_tokenizer(writer, n_vocab)
    written = 0

    def matrix(name: str, n_out: int, n_in: int) -> None:
        nonlocal written
        kind = types[written % len(types)]
        written += 1
        values = (rng.standard_normal((n_out, n_in), dtype=np.float32) / np.sqrt(n_in)).astype(np.float32)
        writer.add_tensor(name, stored(values, kind, rng), raw_dtype=kind)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(name, (1 + 0.1 * rng.standard_normal(width)).astype(np.float32))

    matrix("token_embd.weight", n_vocab, n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            norm(f"{block}.{name}.weight", n_embd)
        for part, heads in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv)):
            matrix(f"{block}.attn_{part}.weight", heads * head_dim, n_embd)
        for part in "qk":
            norm(f"{block}.attn_{part}_norm.weight", head_dim)
        matrix(f"{block}.attn_output.weight", n_embd, n_head * head_dim)
        matrix(f"{block}.ffn_gate.weight", n_ff, n_embd)
        matrix(f"{block}.ffn_up.weight", n_ff, n_embd)
        matrix(f"{block}.ffn_down.weight", n_embd, n_ff)
    norm("output_norm.weight", n_embd)
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


def stored(values: np.ndarray, kind: Quant, rng: np.random.Generator) -> np.ndarray:
    """``values`` (..., n) f32 as ``kind``, or, if gguf-py cannot quantise to that, random blocks of their deviation."""
    if kind in QUANTISED:
        return quantize(values, kind)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    count = values.size // block_values
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    _scale(blocks, kind, 2.0**-6)
    deviation = float(dequantize(blocks, kind).std())
    _scale(blocks, kind, 2.0**-6 * float(values.std()) / deviation)
    return blocks.reshape(*values.shape[:-1], -1)


def _scale(blocks: np.ndarray, kind: Quant, size: float) -> None:
    if kind == Quant.NVFP4:  # four unsigned floats of 4 + 3 bits
        blocks[:, :4] = np.clip(8 * (7 + round(np.log2(size))), 8, 0x77)
    elif kind == Quant.IQ1_M:  # the highest four bits of four words are one half
        half = int(np.float16(size).view(np.uint16))
        for word in range(4):
            high = blocks[:, 49 + 2 * word]
            high[:] = (high & 0x0F) | ((half >> (4 * word) & 0xF) << 4)
    else:
        for at, part in _HALVES[kind]:
            blocks[:, at : at + 2] = np.frombuffer(np.float16(size * part).tobytes(), dtype=np.uint8)
