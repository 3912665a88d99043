"""Cutting a checkpoint: expert shards and stage files, with the quantised bytes copied unchanged.

An expert shard is laid out as the public network's shard server writes it (node contract, section 5). A stage file is
a legal GGUF with all of its source's metadata, so the tokenizer and the sampling defaults come with it. Both say which
model they were cut from and carry the SHA-256 of each tensor, so that whoever fetched one can check every byte of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvasir_console.engine.checkpoint import writer
from kvasir_console.engine.checkpoint.digest import MODEL_DIGEST_KEY, model_digest, source_digest, tensor_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint, TensorInfo, shown
from kvasir_console.engine.checkpoint.shape import STAGE_PREFIX, ModelShape, refuse, stage_window
from kvasir_console.engine.checkpoint.shard_info import SHARD_PREFIX, ShardInfo, is_expert_shard, read_expert_shard
from kvasir_console.engine.checkpoint.window import expert_ranges, stage_tensors
from kvasir_console.engine.checkpoint.writer import TensorPart, text_entry, u32_entry

__all__ = [
    "ShardInfo",
    "is_expert_shard",
    "read_expert_shard",
    "verify_shard",
    "verify_stage",
    "write_expert_shard",
    "write_stage",
]

_STEP_BYTES = 4 * 2**20


def write_expert_shard(source: Checkpoint, destination: Path, *, model: str, layer: int, begin: int, end: int) -> None:
    """Write the experts ``[begin, end)`` of ``layer`` as a file of three tensors.

    The bytes depend on nothing but the source and the arguments.

    Raises:
        ModelError: the layer has no routed experts, or not these.
        SystemResourceError: the disk refused; nothing is left behind.
    """
    shape = ModelShape.of(source, (layer, layer + 1))
    ranges = expert_ranges(source, layer, begin, end)
    parts = [_part(source, tensor, first, last, dims=(*tensor.dims[:2], end - begin)) for tensor, first, last in ranges]
    architecture = shape.architecture
    entries = [
        text_entry("general.architecture", architecture),
        u32_entry("general.alignment", writer.ALIGNMENT),
        text_entry(SHARD_PREFIX + "model", model),
        u32_entry(SHARD_PREFIX + "layer", layer),
        u32_entry(SHARD_PREFIX + "expert_begin", begin),
        u32_entry(SHARD_PREFIX + "expert_end", end),
        u32_entry(SHARD_PREFIX + "n_expert_total", shape.n_expert),
        u32_entry(SHARD_PREFIX + "n_embd", shape.n_embd),
        u32_entry(SHARD_PREFIX + "n_ff", shape.n_ff_expert),
        text_entry(SHARD_PREFIX + "source_digest", source_digest(source)),
        u32_entry(f"{architecture}.embedding_length", shape.n_embd),
        u32_entry(f"{architecture}.block_count", shape.n_layer),
        u32_entry(f"{architecture}.expert_count", shape.n_expert),
        text_entry(MODEL_DIGEST_KEY, model_digest(source).hex()),
        *(
            text_entry(f"{SHARD_PREFIX}sha256.{tensor.name}", tensor_digest(source, tensor, first, last).hex())
            for tensor, first, last in ranges
        ),
    ]
    writer.write_gguf(destination, entries, parts)


def write_stage(source: Checkpoint, destination: Path, *, model: str, begin: int, end: int) -> None:
    """Write the layers ``[begin, end)`` with all of the source's metadata.

    Raises:
        ModelError: the source does not hold these layers.
        SystemResourceError: the disk refused; nothing is left behind.
    """
    shape = ModelShape.of(source, (begin, end))
    tensors = stage_tensors(source, shape, begin, end)
    replaced = (STAGE_PREFIX, MODEL_DIGEST_KEY, "general.alignment")
    entries: list[writer.Buffer] = [
        *(source.metadata_bytes(key) for key in source.metadata if not key.startswith(replaced)),
        u32_entry("general.alignment", writer.ALIGNMENT),
        text_entry(STAGE_PREFIX + "model", model),
        u32_entry(STAGE_PREFIX + "layer_begin", begin),
        u32_entry(STAGE_PREFIX + "layer_end", end),
        # A stage in the middle holds no output tensor, which alone would read as a tied one.
        writer.bool_entry(STAGE_PREFIX + "tied_output", shape.tied_output),
        text_entry(STAGE_PREFIX + "source_digest", source_digest(source)),
        text_entry(MODEL_DIGEST_KEY, model_digest(source).hex()),
        *(text_entry(f"{STAGE_PREFIX}sha256.{tensor.name}", tensor_digest(source, tensor).hex()) for tensor in tensors),
    ]
    writer.write_gguf(destination, entries, [_part(source, tensor, 0, tensor.n_bytes) for tensor in tensors])


def verify_shard(
    checkpoint: Checkpoint,
    *,
    model: str,
    layer: int,
    begin: int,
    end: int,
    n_embd: int | None = None,
    model_digest: bytes | None = None,
    require_hashes: bool = False,
) -> ShardInfo:
    """Check that ``checkpoint`` is the shard that was asked for, down to every byte of its tensors.

    Args:
        n_embd: width of the hidden state the assignment named.
        model_digest: digest of the model it must be cut from.
        require_hashes: refuse a shard without per-tensor SHA-256. Public shard servers write none; if a shard has any,
            all three are needed and checked.

    Raises:
        ModelError: it is another shard, or damaged; the message names the key or tensor.
    """
    info = read_expert_shard(checkpoint)
    if info.layer != layer:
        refuse(checkpoint, f"it holds layer {info.layer}, not the layer {layer} that was asked for")
    if (info.begin, info.end) != (begin, end):
        refuse(
            checkpoint,
            f"it holds the experts [{info.begin}, {info.end}) (expert_begin, expert_end), not [{begin}, {end})",
        )
    if info.model and info.model != model:
        refuse(checkpoint, f"it is cut from the model {shown(info.model)}, not {shown(model)}")
    if n_embd is not None and info.n_embd != n_embd:
        refuse(checkpoint, f"its n_embd is {info.n_embd}, not {n_embd}")
    _verify_digests(checkpoint, SHARD_PREFIX, model_digest, require_hashes)
    return info


def verify_stage(
    checkpoint: Checkpoint, *, model: str, begin: int, end: int, model_digest: bytes | None = None
) -> ModelShape:
    """Check that ``checkpoint`` is the stage that was asked for, down to every byte of its tensors.

    Raises:
        ModelError: it is another stage, or damaged; the message names the key or tensor.
    """
    window = stage_window(checkpoint)
    if window != (begin, end):
        held = f"the layers [{window[0]}, {window[1]})" if window else "no stage"
        refuse(checkpoint, f"it holds {held} (layer_begin, layer_end), not the layers [{begin}, {end})")
    named = checkpoint.metadata.get(STAGE_PREFIX + "model")
    if named != model:
        refuse(checkpoint, f"{STAGE_PREFIX}model is {shown(str(named))}, not {shown(model)}")
    shape = ModelShape.of(checkpoint)
    _verify_digests(checkpoint, STAGE_PREFIX, model_digest, required=True)
    return shape


def _verify_digests(checkpoint: Checkpoint, prefix: str, wanted_model: bytes | None, required: bool) -> None:
    if wanted_model is not None and model_digest(checkpoint) != wanted_model:
        refuse(checkpoint, f"{MODEL_DIGEST_KEY} names another model than the one that was asked for")
    hashed = any(key.startswith(prefix + "sha256.") for key in checkpoint.metadata)
    if not (hashed or required):
        return
    for name, tensor in checkpoint.tensors.items():
        stated = checkpoint.metadata.get(f"{prefix}sha256.{name}")
        if stated is None:
            refuse(checkpoint, f"it states no SHA-256 for the tensor {name}")
        if tensor_digest(checkpoint, tensor).hex() != stated:
            refuse(checkpoint, f"the bytes of the tensor {name} do not have the SHA-256 it states")


def _part(
    source: Checkpoint, tensor: TensorInfo, begin: int, end: int, dims: Sequence[int] | None = None
) -> TensorPart:
    def contents() -> Iterator[memoryview]:
        for at in range(begin, end, _STEP_BYTES):
            yield source.raw(tensor, at, min(at + _STEP_BYTES, end))

    return TensorPart(tensor.name, tuple(dims or tensor.dims), tensor.type, end - begin, contents)
