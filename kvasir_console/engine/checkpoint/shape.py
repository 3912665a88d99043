"""The shape of a model: the sizes its metadata claims, checked against the tensors that are there.

Keys are ``<architecture>.<name>`` (GGUF specification). A block has the standard tensors of a pre-norm transformer:
attention with separate q, k, v and output projections, then either a gated feed-forward network or a bank of experts.
An architecture built of other tensors is refused by naming the first one that is missing; which of the accepted ones
can be computed is decided by ``engine.models``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from kvasir_console.engine.checkpoint.gguf import Checkpoint, shown
from kvasir_console.errors import ModelError

STAGE_PREFIX = "kvasir.stage."
MAX_LAYERS = 4096
MAX_WIDTH = 2**24
"""Largest size accepted for any one dimension that metadata claims."""

# Architectures whose router weights stay as the softmax gave them unless the file says otherwise. The others rescale
# the chosen experts' weights to a sum of one, as Mixtral's paper (arXiv 2401.04088, section 2.1) does.
_UNNORMALISED = frozenset({"qwen2moe", "olmoe", "deepseek", "deepseek2", "bailingmoe"})
_BLOCK_NAME = re.compile(r"blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model. A stage file has the shape of the whole model it was cut from."""

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    """Width of the dense feed-forward networks; 0 if the file holds none."""
    n_ff_expert: int
    """Width of one expert; 0 in a dense model."""
    n_vocab: int
    n_expert: int
    """Experts of each MoE layer; 0 in a dense model."""
    n_expert_used: int
    context_length: int
    rope_freq_base: float
    rope_dim: int
    norm_eps: float
    expert_weights_norm: bool
    """Whether the weights of the chosen experts are rescaled to a sum of one."""
    expert_weights_scale: float
    tied_output: bool
    """Whether the embedding table is also the output projection."""
    moe_layers: tuple[int, ...]
    """The layers of this file that hold routed experts."""
    sliding_window: int
    """How many positions a local layer sees, its own included; 0 if the architecture has none."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, window: tuple[int, int] | None = None) -> ModelShape:
        """Read the shape of ``checkpoint`` and check the tensors of ``window``.

        Args:
            checkpoint: a whole model, or a stage file.
            window: layers ``[begin, end)`` whose tensors must be complete; without it, every layer of the model, or
                the window that a stage file claims.

        Raises:
            ModelError: ``model_contradictory``; the message names the key or the tensor.
        """
        keys = _Keys(checkpoint)
        n_layer = keys.size("block_count", most=MAX_LAYERS)
        window = _checked_window(checkpoint, n_layer, window)
        shape = _claimed(checkpoint, keys, n_layer)
        _refuse_surplus_blocks(checkpoint, n_layer)
        for name, wanted in _required(checkpoint, shape, *window):
            _check(checkpoint, shape, name, wanted)
        return shape


def stage_window(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """The layers ``[begin, end)`` a stage file claims to hold; ``None`` for any other file. Raises ``ModelError``."""
    ends = [checkpoint.metadata.get(f"{STAGE_PREFIX}layer_{end}") for end in ("begin", "end")]
    if ends == [None, None]:
        return None
    begin, end = ends
    if type(begin) is not int or type(end) is not int or not 0 <= begin < end <= MAX_LAYERS:
        refuse(checkpoint, f"{STAGE_PREFIX}layer_begin and layer_end are {begin!r:.40} and {end!r:.40}")
    return begin, end


def refuse(checkpoint: Checkpoint, reason: str) -> NoReturn:
    """Raise the ``ModelError`` of a file that is legal GGUF but not the model it claims to be."""
    raise ModelError(
        "model_contradictory",
        f"{shown(checkpoint.path.name)} is refused: {reason}.",
        "The file is damaged, incomplete or of a kind this program does not know; fetch it again or choose another.",
    )


class _Keys:
    """Typed access to the keys of one architecture."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.architecture = checkpoint.architecture

    def name(self, key: str) -> str:
        return f"{shown(self.architecture)}.{key}"

    def get(self, key: str) -> Any:
        return self.checkpoint.metadata.get(f"{self.architecture}.{key}")

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_WIDTH) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            refuse(self.checkpoint, f"the metadata has no {self.name(key)}")
        if type(value) is not int:
            refuse(self.checkpoint, f"{self.name(key)} is a {type(value).__name__}, not one whole number")
        if not least <= value <= most:
            refuse(self.checkpoint, f"{self.name(key)} is {value}, outside [{least}, {most}]")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            refuse(self.checkpoint, f"the metadata has no {self.name(key)}")
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            refuse(self.checkpoint, f"{self.name(key)} is {value!r:.40}, not a finite number of at least 0")
        return float(value)


def _checked_window(checkpoint: Checkpoint, n_layer: int, asked: tuple[int, int] | None) -> tuple[int, int]:
    stored = stage_window(checkpoint)
    if stored and stored[1] > n_layer:
        refuse(checkpoint, f"{STAGE_PREFIX}layer_end is {stored[1]}, but block_count is {n_layer}")
    begin, end = asked or stored or (0, n_layer)
    if not 0 <= begin < end <= n_layer:
        refuse(checkpoint, f"the layers [{begin}, {end}) do not lie in its block_count of {n_layer}")
    if stored and not stored[0] <= begin < end <= stored[1]:
        refuse(checkpoint, f"the layers [{begin}, {end}) do not lie in the stage [{stored[0]}, {stored[1]}) it holds")
    return begin, end


def _claimed(checkpoint: Checkpoint, keys: _Keys, n_layer: int) -> ModelShape:
    n_embd = keys.size("embedding_length")
    n_head = keys.size("attention.head_count", most=65_536)
    n_head_kv = keys.size("attention.head_count_kv", n_head, most=n_head)
    if n_head % n_head_kv:
        refuse(checkpoint, f"{keys.name('attention.head_count')} {n_head} is no multiple of head_count_kv {n_head_kv}")
    if keys.get("attention.key_length") is None and n_embd % n_head:
        refuse(checkpoint, f"{keys.name('attention.head_count')} {n_head} does not divide embedding_length {n_embd}")
    head_dim = keys.size("attention.key_length", n_embd // n_head)
    if keys.size("attention.value_length", head_dim) != head_dim:
        refuse(checkpoint, f"{keys.name('attention.value_length')} differs from key_length, which is not supported")
    rope_dim = keys.size("rope.dimension_count", head_dim, most=head_dim)
    if rope_dim % 2:
        refuse(checkpoint, f"{keys.name('rope.dimension_count')} is odd: {rope_dim}")
    n_expert = keys.size("expert_count", 0, least=0, most=65_536)
    n_used = keys.size("expert_used_count", 0, least=0)
    if n_used > n_expert or (n_expert and not n_used):
        refuse(checkpoint, f"{keys.name('expert_used_count')} is {n_used}, but expert_count is {n_expert}")
    moe_layers = _moe_layers(checkpoint)
    if moe_layers and not n_expert:
        refuse(checkpoint, f"blk.{moe_layers[0]}.ffn_gate_exps.weight is there, but {keys.name('expert_count')} is 0")
    dense = any(name.endswith(".ffn_gate.weight") for name in checkpoint.tensors)
    n_ff = keys.size("feed_forward_length", None if dense or not n_expert else 0, least=0)
    n_ff_expert = keys.size("expert_feed_forward_length", n_ff or None) if n_expert else 0
    norm = keys.get("expert_weights_norm")
    if norm is not None and type(norm) is not bool:
        refuse(checkpoint, f"{keys.name('expert_weights_norm')} is not true or false")
    tied = checkpoint.metadata.get(f"{STAGE_PREFIX}tied_output")
    return ModelShape(
        architecture=keys.architecture,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=n_ff if dense else 0,
        n_ff_expert=n_ff_expert,
        n_vocab=_vocabulary(checkpoint, keys),
        n_expert=n_expert,
        n_expert_used=n_used,
        context_length=keys.size("context_length"),
        rope_freq_base=keys.real("rope.freq_base", 10_000.0),
        rope_dim=rope_dim,
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        expert_weights_norm=norm if norm is not None else keys.architecture not in _UNNORMALISED,
        # Converters write 0 where a model has no scale.
        expert_weights_scale=keys.real("expert_weights_scale", 1.0) or 1.0,
        tied_output=tied if isinstance(tied, bool) else "output.weight" not in checkpoint.tensors,
        moe_layers=moe_layers,
        sliding_window=keys.size("attention.sliding_window", 0, least=0) if keys.architecture == "gemma3" else 0,
    )


def _moe_layers(checkpoint: Checkpoint) -> tuple[int, ...]:
    layers = {
        int(match[1])
        for name in checkpoint.tensors
        if (match := _BLOCK_NAME.match(name)) and ("_exps." in name or ".ffn_gate_inp." in name)
    }
    return tuple(sorted(layers))


def _vocabulary(checkpoint: Checkpoint, keys: _Keys) -> int:
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        if not tokens:
            refuse(checkpoint, "tokenizer.ggml.tokens is empty")
        return len(tokens)
    for name in ("token_embd.weight", "output.weight"):
        tensor = checkpoint.tensors.get(name)
        if tensor and len(tensor.dims) == 2:
            return tensor.dims[1]
    return keys.size("vocab_size")


def _refuse_surplus_blocks(checkpoint: Checkpoint, n_layer: int) -> None:
    for name in checkpoint.tensors:
        match = _BLOCK_NAME.match(name)
        if match and int(match[1]) >= n_layer:
            refuse(checkpoint, f"it holds {name}, but its block_count is {n_layer}")


# A dimension with the words that say where it comes from.
_Wanted = tuple[tuple[int, str], ...]


def _required(checkpoint: Checkpoint, shape: ModelShape, begin: int, end: int) -> Iterator[tuple[str, _Wanted]]:
    """Every tensor that the layers ``[begin, end)`` need, with its dimensions, in the order of computation."""
    embd = (shape.n_embd, "embedding_length")
    vocab = (shape.n_vocab, "the vocabulary")
    if begin == 0:
        yield "token_embd.weight", (embd, vocab)
    for layer in range(begin, end):
        yield from _block(checkpoint, shape, layer, embd)
    if end == shape.n_layer:
        yield "output_norm.weight", (embd,)
        yield "token_embd.weight" if shape.tied_output else "output.weight", (embd, vocab)


def _block(
    checkpoint: Checkpoint, shape: ModelShape, layer: int, embd: tuple[int, str]
) -> Iterator[tuple[str, _Wanted]]:
    head = (shape.head_dim, "attention.key_length")
    queries = (shape.n_head * shape.head_dim, "head_count x key_length")
    keys = (shape.n_head_kv * shape.head_dim, "head_count_kv x key_length")
    block = f"blk.{layer}."
    yield block + "attn_norm.weight", (embd,)
    for part, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"{block}attn_{part}.weight", (embd, width)
        if f"{block}attn_{part}.bias" in checkpoint.tensors:
            yield f"{block}attn_{part}.bias", (width,)
    for part, width in (("q", queries), ("k", keys)):
        norm = checkpoint.tensors.get(f"{block}attn_{part}_norm.weight")
        if norm:
            # Most architectures normalise each head; OLMoE normalises all heads together.
            yield norm.name, (width if norm.dims == (width[0],) else head,)
    if shape.architecture == "gemma3":
        yield block + "attn_q_norm.weight", (head,)
        yield block + "attn_k_norm.weight", (head,)
        yield block + "post_attention_norm.weight", (embd,)
        yield block + "post_ffw_norm.weight", (embd,)
    yield block + "attn_output.weight", (queries, embd)
    yield block + "ffn_norm.weight", (embd,)
    if layer in shape.moe_layers or (shape.n_expert and f"{block}ffn_gate.weight" not in checkpoint.tensors):
        experts = (shape.n_expert, "expert_count")
        width = (shape.n_ff_expert, "expert_feed_forward_length")
        yield block + "ffn_gate_inp.weight", (embd, experts)
        yield block + "ffn_gate_exps.weight", (embd, width, experts)
        yield block + "ffn_up_exps.weight", (embd, width, experts)
        yield block + "ffn_down_exps.weight", (width, embd, experts)
    else:
        width = (shape.n_ff, "feed_forward_length")
        yield block + "ffn_gate.weight", (embd, width)
        yield block + "ffn_up.weight", (embd, width)
        yield block + "ffn_down.weight", (width, embd)


def _check(checkpoint: Checkpoint, shape: ModelShape, name: str, wanted: _Wanted) -> None:
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        refuse(
            checkpoint,
            f"the tensor {name} is missing from a {shown(shape.architecture)} of block_count {shape.n_layer}",
        )
    if tensor.dims != tuple(size for size, _ in wanted):
        origin = ", ".join(f"{size} ({source})" for size, source in wanted)
        refuse(checkpoint, f"the tensor {name} has the dimensions {list(tensor.dims)}, not [{origin}]")
