"""Which tensors, and which of their bytes, a window of layers or a range of experts needs.

Pure functions of a checked header: nothing is read here.
"""

from __future__ import annotations

import re

from kvasir_console.engine.checkpoint.gguf import Checkpoint, TensorInfo
from kvasir_console.engine.checkpoint.shape import ModelShape, refuse
from kvasir_console.engine.checkpoint.shard_info import EXPERT_TENSORS, is_expert_shard, read_expert_shard

_BLOCK_NAME = re.compile(r"blk\.(\d{1,9})\.")


def stage_tensors(
    checkpoint: Checkpoint, shape: ModelShape, begin: int, end: int, *, experts: bool = True
) -> tuple[TensorInfo, ...]:
    """The tensors of the layers ``[begin, end)``, in the order of the file's directory.

    The first stage also holds the embedding table, the last one the final norm and the output projection, so both hold
    the table of a model that ties them. Tensors of no block and no end of the model (RoPE factors) go to every stage.

    Args:
        experts: whether the routed experts belong to it; the router always does.
    """
    first, last = begin == 0, end == shape.n_layer

    def wanted(name: str) -> bool:
        match = _BLOCK_NAME.match(name)
        if match:
            return begin <= int(match[1]) < end and (experts or "_exps." not in name)
        if name.startswith("token_embd."):
            return first or (last and shape.tied_output)
        if name.startswith("token_"):
            return first
        if name.startswith("output"):
            return last
        return True

    return tuple(tensor for name, tensor in checkpoint.tensors.items() if wanted(name))


def expert_ranges(
    checkpoint: Checkpoint, layer: int, begin: int, end: int
) -> tuple[tuple[TensorInfo, int, int], tuple[TensorInfo, int, int], tuple[TensorInfo, int, int]]:
    """Where the experts ``[begin, end)`` of ``layer`` lie in its gate, up and down tensors.

    The expert is the outermost dimension, so a range of experts is one range of bytes. Ids are those of the model,
    also when ``checkpoint`` is an expert shard that holds only some of them.

    Returns:
        For gate, up and down, in this order: the tensor and the range ``[begin, end)`` of its bytes.

    Raises:
        ModelError: the layer holds no routed experts, or not these.
    """
    first = 0
    if is_expert_shard(checkpoint):
        shard = read_expert_shard(checkpoint)
        first = shard.begin
        if shard.layer != layer:
            refuse(checkpoint, f"the expert shard holds layer {shard.layer}, not layer {layer}")
    gate, up, down = (
        _expert_range(checkpoint, f"blk.{layer}.{part}.weight", first, begin, end) for part in EXPERT_TENSORS
    )
    return gate, up, down


def _expert_range(checkpoint: Checkpoint, name: str, first: int, begin: int, end: int) -> tuple[TensorInfo, int, int]:
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        refuse(checkpoint, f"the tensor {name} is missing, so the layer has no routed experts here")
    if len(tensor.dims) != 3:
        refuse(checkpoint, f"the tensor {name} has {len(tensor.dims)} dimensions, not the three of a bank of experts")
    stored = tensor.dims[2]
    if not first <= begin < end <= first + stored:
        refuse(checkpoint, f"the experts [{begin}, {end}) do not lie in the [{first}, {first + stored}) of {name}")
    expert_bytes = tensor.n_bytes // stored
    return tensor, (begin - first) * expert_bytes, (end - first) * expert_bytes
