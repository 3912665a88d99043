"""Bit fields of a batch of blocks: what every family's layout is taken apart with.

A batch is a uint8 tensor (N, block_bytes). Shifts and masks are scalars or made on the batch's device, so that the same
lines run on a CPU and on an accelerator without copying anything from the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def f16(blocks: Tensor, begin: int) -> Tensor:
    """The half at byte ``begin`` of each block, as f32 (N, 1)."""
    return blocks[:, begin : begin + 2].view(torch.float16).to(torch.float32)


def u16(data: Tensor) -> Tensor:
    """Little-endian pairs of bytes (N, 2k) as int32 (N, k), zero-extended."""
    return _aligned(data).view(torch.int16).to(torch.int32) & 0xFFFF


def u32(data: Tensor) -> Tensor:
    """Little-endian quadruples of bytes (N, 4k) as int64 (N, k), zero-extended."""
    return _aligned(data).view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def fields(data: Tensor, width: int, count: int) -> Tensor:
    """Split the low bits of each element into ``count`` fields of ``width`` bits, lowest first.

    (..., w) becomes (..., count, w), dtype unchanged: field by field, each over all w elements, which is how ggml lays
    out quants (the first half of a block in the low nibbles, the second in the high ones).
    """
    shift = torch.arange(0, width * count, width, dtype=data.dtype, device=data.device)
    return (data.unsqueeze(-2) >> shift.unsqueeze(-1)) & ((1 << width) - 1)


def element_fields(data: Tensor, width: int, count: int) -> Tensor:
    """Like ``fields`` with the fields of one element side by side: (..., w) becomes (..., w, count)."""
    shift = torch.arange(0, width * count, width, dtype=data.dtype, device=data.device)
    return (data.unsqueeze(-1) >> shift) & ((1 << width) - 1)


def to_f32(data: Tensor) -> Tensor:
    """Whole numbers as f32, in a fresh tensor that the caller may scale in place."""
    return data.to(torch.float32)


def _aligned(data: Tensor) -> Tensor:
    """A dense copy that begins on a word, which views as wider types require."""
    return data.clone(memory_format=torch.contiguous_format)
