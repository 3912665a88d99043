"""A summary of a checkpoint for a person, a planner or a script: what it is and what its parts weigh.

It needs no more than a legal GGUF with an architecture, so it also describes models that this program cannot run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.engine.checkpoint.digest import model_digest, source_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint, shown
from kvasir_console.engine.checkpoint.shape import ModelShape, stage_window
from kvasir_console.engine.checkpoint.shard_info import is_expert_shard, read_expert_shard
from kvasir_console.errors import ModelError

_BLOCK_NAME = re.compile(r"blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer weighs, as stored. ``expert_bytes`` is the weight of all its routed experts."""

    layer: int
    total_bytes: int
    expert_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint in numbers. ``None`` where the file does not say."""

    path: str
    architecture: str
    name: str
    holds: str
    """``model``, ``layers [a, b)`` of a stage file, or ``layer n experts [a, b)`` of an expert shard."""
    layers: int | None
    experts: int
    """Experts of each MoE layer of the model; 0 in a dense model."""
    experts_used: int
    embedding_length: int | None
    context_length: int | None
    vocabulary: int | None
    parameters: int
    quant_types: Mapping[str, int]
    """Tensor type to the number of tensors that have it."""
    layer_bytes: tuple[LayerBytes, ...]
    bytes_per_expert: int | None
    """One expert of the layer with the heaviest experts; ``None`` in a dense model."""
    tensor_bytes: int
    file_bytes: int
    files: int
    """More than one if the model is split."""
    model_digest: str
    source_digest: str
    refusal: str
    """Why this program cannot use the file as a model, stage or shard; empty if it can."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        fields["quant_types"] = dict(self.quant_types)
        fields["layer_bytes"] = [
            {"layer": each.layer, "total_bytes": each.total_bytes, "expert_bytes": each.expert_bytes}
            for each in self.layer_bytes
        ]
        return fields


def inspect(path: Path) -> Inspection:
    """Describe the GGUF file ``path``; only its header and both ends of its data are read.

    Raises:
        ModelError: it is not a legal GGUF, or names no architecture.
    """
    with Checkpoint.open(path) as checkpoint:
        return _describe(checkpoint)


def _describe(checkpoint: Checkpoint) -> Inspection:
    architecture = checkpoint.architecture
    tensors = checkpoint.tensors.values()
    return Inspection(
        path=shown(str(checkpoint.path), 4096),
        architecture=shown(architecture),
        name=shown(_text(checkpoint, "general.name"), 200),
        holds=_holds(checkpoint),
        layers=_number(checkpoint, f"{architecture}.block_count"),
        experts=_number(checkpoint, f"{architecture}.expert_count") or 0,
        experts_used=_number(checkpoint, f"{architecture}.expert_used_count") or 0,
        embedding_length=_number(checkpoint, f"{architecture}.embedding_length"),
        context_length=_number(checkpoint, f"{architecture}.context_length"),
        vocabulary=_vocabulary(checkpoint, architecture),
        parameters=sum(math.prod(tensor.dims) for tensor in tensors),
        quant_types=dict(Counter(tensor.type.name for tensor in tensors).most_common()),
        layer_bytes=_layer_bytes(checkpoint),
        bytes_per_expert=_bytes_per_expert(checkpoint),
        tensor_bytes=sum(tensor.n_bytes for tensor in tensors),
        file_bytes=checkpoint.file_bytes,
        files=len(checkpoint.parts),
        model_digest=model_digest(checkpoint).hex() if _has_digest(checkpoint) else "",
        source_digest=source_digest(checkpoint),
        refusal=_refusal(checkpoint),
    )


def _holds(checkpoint: Checkpoint) -> str:
    if is_expert_shard(checkpoint):
        shard = read_expert_shard(checkpoint)
        return f"layer {shard.layer} experts [{shard.begin}, {shard.end})"
    window = stage_window(checkpoint)
    return f"layers [{window[0]}, {window[1]})" if window else "model"


def _has_digest(checkpoint: Checkpoint) -> bool:
    # Expert shards of the public network carry no digest of their model.
    return "kvasir.model_digest" in checkpoint.metadata or not is_expert_shard(checkpoint)


def _refusal(checkpoint: Checkpoint) -> str:
    try:
        if is_expert_shard(checkpoint):
            read_expert_shard(checkpoint)
        else:
            ModelShape.of(checkpoint)
    except ModelError as error:
        return error.message
    return ""


def _number(checkpoint: Checkpoint, key: str) -> int | None:
    value = checkpoint.metadata.get(key)
    return value if type(value) is int else None


def _text(checkpoint: Checkpoint, key: str) -> str:
    value = checkpoint.metadata.get(key)
    return value if isinstance(value, str) else ""


def _vocabulary(checkpoint: Checkpoint, architecture: str) -> int | None:
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else _number(checkpoint, f"{architecture}.vocab_size")


def _layer_bytes(checkpoint: Checkpoint) -> tuple[LayerBytes, ...]:
    total: Counter[int] = Counter()
    expert: Counter[int] = Counter()
    for name, tensor in checkpoint.tensors.items():
        match = _BLOCK_NAME.match(name)
        if match:
            total[int(match[1])] += tensor.n_bytes
            expert[int(match[1])] += tensor.n_bytes if "_exps." in name else 0
    return tuple(LayerBytes(layer, total[layer], expert[layer]) for layer in sorted(total))


def _bytes_per_expert(checkpoint: Checkpoint) -> int | None:
    """The weight of one expert: bytes of each layer's expert tensors over their last dimension, the largest layer."""
    per_layer: Counter[int] = Counter()
    for name, tensor in checkpoint.tensors.items():
        match = _BLOCK_NAME.match(name)
        if match and "_exps." in name and len(tensor.dims) == 3:
            per_layer[int(match[1])] += tensor.n_bytes // tensor.dims[2]
    return max(per_layer.values(), default=None)
