"""Raw ggml blocks to f32, one file per family: the same bits as ``gguf.quants.dequantize``, on any torch device.

    plain    F32 F16 BF16                legacy   Q4_0 Q4_1 Q5_0 Q5_1 Q8_0
    kquants  Q2_K Q3_K Q4_K Q5_K Q6_K    iquants  IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS
    ternary  TQ1_0 TQ2_0                 fp4      MXFP4 NVFP4

Each family is pure functions from a batch of blocks, uint8 (N, block_bytes), to values, f32 (N, block_values).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_console.engine.quant import fp4, iquants, kquants, legacy, plain, ternary
from kvasir_console.errors import ModelError

__all__ = ["CHUNK_VALUES", "FORMATS", "BlockFormat", "dequantize", "format_of"]

CHUNK_VALUES = 1 << 18
"""Values dequantised at a time. Scratch beside the result is at most 24 bytes per value of a chunk, about 6 MiB, and a
chunk's intermediates stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One ggml type: its name, values and bytes per block, and the function that takes a batch of blocks apart."""

    name: str
    block_values: int
    block_bytes: int
    values: Callable[[Tensor], Tensor]


FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, plain.f32_values),
    1: BlockFormat("F16", 1, 2, plain.f16_values),
    2: BlockFormat("Q4_0", 32, 18, legacy.q4_0),
    3: BlockFormat("Q4_1", 32, 20, legacy.q4_1),
    6: BlockFormat("Q5_0", 32, 22, legacy.q5_0),
    7: BlockFormat("Q5_1", 32, 24, legacy.q5_1),
    8: BlockFormat("Q8_0", 32, 34, legacy.q8_0),
    10: BlockFormat("Q2_K", 256, 84, kquants.q2_k),
    11: BlockFormat("Q3_K", 256, 110, kquants.q3_k),
    12: BlockFormat("Q4_K", 256, 144, kquants.q4_k),
    13: BlockFormat("Q5_K", 256, 176, kquants.q5_k),
    14: BlockFormat("Q6_K", 256, 210, kquants.q6_k),
    16: BlockFormat("IQ2_XXS", 256, 66, iquants.iq2_xxs),
    17: BlockFormat("IQ2_XS", 256, 74, iquants.iq2_xs),
    18: BlockFormat("IQ3_XXS", 256, 98, iquants.iq3_xxs),
    19: BlockFormat("IQ1_S", 256, 50, iquants.iq1_s),
    20: BlockFormat("IQ4_NL", 32, 18, iquants.iq4_nl),
    21: BlockFormat("IQ3_S", 256, 110, iquants.iq3_s),
    22: BlockFormat("IQ2_S", 256, 82, iquants.iq2_s),
    23: BlockFormat("IQ4_XS", 256, 136, iquants.iq4_xs),
    29: BlockFormat("IQ1_M", 256, 56, iquants.iq1_m),
    30: BlockFormat("BF16", 1, 2, plain.bf16_values),
    34: BlockFormat("TQ1_0", 256, 54, ternary.tq1_0),
    35: BlockFormat("TQ2_0", 256, 66, ternary.tq2_0),
    39: BlockFormat("MXFP4", 32, 17, fp4.mxfp4),
    40: BlockFormat("NVFP4", 64, 36, fp4.nvfp4),
}
"""By ggml type id (ggml.h). Ids that are absent were removed from ggml, hold integers, or are made only in memory."""


def format_of(ggml_type: int) -> BlockFormat:
    """Raises ``ModelError`` ``unsupported_quant`` for a type that is not in ``FORMATS``."""
    block_format = FORMATS.get(int(ggml_type))
    if block_format is None:
        raise ModelError(
            "unsupported_quant",
            f"tensors of ggml type {_type_name(int(ggml_type))} cannot be read by this engine.",
            "Use a file whose tensors are " + ", ".join(sorted(f.name for f in FORMATS.values())) + ".",
        )
    return block_format


def dequantize(raw: Tensor, ggml_type: int) -> Tensor:
    """Whole blocks, uint8 (bytes,), to their values, f32 (values,), on the device of ``raw``.

    The result never shares memory with ``raw``, which may be a read-only mapping of a file. Peak memory is the result
    and one chunk's scratch (``CHUNK_VALUES``).

    Raises:
        ModelError: ``unsupported_quant`` for a type that is not in ``FORMATS``; ``partial_block`` when ``raw`` does not
            hold a whole number of blocks.
    """
    block_format = format_of(ggml_type)
    n_blocks, rest = divmod(raw.numel(), block_format.block_bytes)
    if rest:
        raise ModelError(
            "partial_block",
            f"{raw.numel()} bytes are not a whole number of {block_format.name} blocks "
            f"of {block_format.block_bytes} bytes.",
            "The file is damaged or was cut in the middle of a row; fetch it again.",
        )
    blocks = raw.reshape(n_blocks, block_format.block_bytes)
    values = torch.empty((n_blocks, block_format.block_values), dtype=torch.float32, device=raw.device)
    step = max(1, CHUNK_VALUES // block_format.block_values)
    for begin in range(0, n_blocks, step):
        chunk = blocks[begin : begin + step]
        if chunk.data_ptr() % 4 or chunk.storage_offset() % 4:
            chunk = chunk.clone()  # wider views of bytes must begin on a word
        values[begin : begin + step] = block_format.values(chunk)
    return values.reshape(-1)


def _type_name(ggml_type: int) -> str:
    """The id with its name where the gguf package knows one."""
    from gguf import GGMLQuantizationType

    try:
        return f"{ggml_type} ({GGMLQuantizationType(ggml_type).name})"
    except ValueError:
        return str(ggml_type)
