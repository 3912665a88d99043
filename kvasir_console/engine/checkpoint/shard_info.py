"""What an expert shard says about itself, checked against its tensors.

A shard holds the experts ``[begin, end)`` of one layer: a gate, an up and a down tensor whose last dimension counts the
experts it holds. Its keys are ``kvasir.expert_shard.*``; files of an older generation use ``linkcpp.expert_shard.*``,
with signed integers and without the layer, which is then read from the tensor names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvasir_console.engine.checkpoint.gguf import Checkpoint, shown
from kvasir_console.engine.checkpoint.shape import refuse

EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SHARD_PREFIX = "kvasir.expert_shard."
OLDER_SHARD_PREFIX = "linkcpp.expert_shard."
_EXPERT_NAME = re.compile(r"blk\.(\d{1,9})\.ffn_(?:gate|up|down)_exps\.weight")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """An expert shard: the experts ``[begin, end)`` of ``n_expert_total`` in ``layer`` of ``model``."""

    model: str
    """Empty in files of the older generation."""
    layer: int
    begin: int
    end: int
    n_expert_total: int
    n_embd: int
    n_ff: int
    source_digest: str
    """Identity of the checkpoint it was cut from; empty if the file does not say."""


def is_expert_shard(checkpoint: Checkpoint) -> bool:
    """Whether the file says that it is an expert shard."""
    return any(f"{prefix}expert_begin" in checkpoint.metadata for prefix in (SHARD_PREFIX, OLDER_SHARD_PREFIX))


def read_expert_shard(checkpoint: Checkpoint) -> ShardInfo:
    """Read and check a shard's keys and the shapes of its three tensors.

    Raises:
        ModelError: ``model_contradictory``; a key is missing, or contradicts another one or a tensor.
    """
    older = not any(key.startswith(SHARD_PREFIX) for key in checkpoint.metadata)
    prefix = OLDER_SHARD_PREFIX if older else SHARD_PREFIX

    def number(key: str, default: int | None = None) -> int:
        value = checkpoint.metadata.get(prefix + key)
        if value is None:
            value = default
        if value is None:
            refuse(checkpoint, f"the expert shard has no {prefix}{key}")
        if type(value) is not int or not 0 <= value < 2**24:
            refuse(checkpoint, f"{prefix}{key} is not a number that a shard can have: {value!r:.40}")
        return value

    begin, end = number("expert_begin"), number("expert_end")
    total = number("n_expert_global" if older else "n_expert_total", _declared_experts(checkpoint))
    if not begin < end <= total:
        refuse(checkpoint, f"{prefix}expert_begin {begin} and expert_end {end} do not lie in n_expert_total {total}")
    layer = number("layer", _layer_of_tensors(checkpoint))
    gate, up, down = (_tensor_dims(checkpoint, layer, part) for part in EXPERT_TENSORS)
    n_embd, n_ff = number("n_embd", gate[0]), number("n_ff", gate[1])
    matrix, transposed = (n_embd, n_ff, end - begin), (n_ff, n_embd, end - begin)
    for part, dims, wanted in zip(EXPERT_TENSORS, (gate, up, down), (matrix, matrix, transposed), strict=True):
        if dims != wanted:
            refuse(
                checkpoint,
                f"blk.{layer}.{part}.weight has the dimensions {list(dims)}, but n_embd, n_ff and the experts "
                f"[{begin}, {end}) make them {list(wanted)}",
            )
    return ShardInfo(
        model=_text(checkpoint, prefix + "model"),
        layer=layer,
        begin=begin,
        end=end,
        n_expert_total=total,
        n_embd=n_embd,
        n_ff=n_ff,
        source_digest=_text(checkpoint, prefix + "source_digest"),
    )


def _declared_experts(checkpoint: Checkpoint) -> Any:
    return checkpoint.metadata.get(f"{checkpoint.architecture}.expert_count")


def _layer_of_tensors(checkpoint: Checkpoint) -> int | None:
    layers = {int(match[1]) for name in checkpoint.tensors if (match := _EXPERT_NAME.fullmatch(name))}
    return layers.pop() if len(layers) == 1 else None


def _tensor_dims(checkpoint: Checkpoint, layer: int, part: str) -> tuple[int, int, int]:
    name = f"blk.{layer}.{part}.weight"
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        refuse(checkpoint, f"the expert shard of layer {layer} has no tensor {name}")
    if len(tensor.dims) != 3:
        refuse(checkpoint, f"{name} has the dimensions {list(tensor.dims)}, not the three of a bank of experts")
    n_in, n_out, n_expert = tensor.dims
    return n_in, n_out, n_expert


def _text(checkpoint: Checkpoint, key: str) -> str:
    value = checkpoint.metadata.get(key, "")
    if not isinstance(value, str) or len(value) > 1024 or not (value.isprintable() or not value):
        refuse(checkpoint, f"{key} is not a short text: {shown(str(value))}")
    return value
