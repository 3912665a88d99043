"""The first ggml families: 32 values that share one scale (``_0``) or a scale and an offset (``_1``).

Q4 and Q5 keep values 0..15 of a block in the low nibbles and 16..31 in the high ones; the fifth bits of Q5 are a 32-bit
mask, bit i for value i. ``_0`` centres the quants on zero, ``_1`` adds the block's minimum. The product and the sum are
two roundings (no fused multiply-add), as in ``gguf.quants``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir_console.engine.quant.blocks import element_fields, f16, fields, to_f32


def q4_0(blocks: Tensor) -> Tensor:
    """(N, 18): f16 d, 16 nibble pairs -> (N, 32), d * (q - 8)."""
    q = fields(blocks[:, 2:18], 4, 2).flatten(1)
    return to_f32(q).sub_(8).mul_(f16(blocks, 0))


def q4_1(blocks: Tensor) -> Tensor:
    """(N, 20): f16 d, f16 m, 16 nibble pairs -> (N, 32), d * q + m."""
    q = fields(blocks[:, 4:20], 4, 2).flatten(1)
    return to_f32(q).mul_(f16(blocks, 0)).add_(f16(blocks, 2))


def q5_0(blocks: Tensor) -> Tensor:
    """(N, 22): f16 d, 32 high bits, 16 nibble pairs -> (N, 32), d * (q - 16)."""
    return to_f32(_five_bits(blocks, 2)).sub_(16).mul_(f16(blocks, 0))


def q5_1(blocks: Tensor) -> Tensor:
    """(N, 24): f16 d, f16 m, 32 high bits, 16 nibble pairs -> (N, 32), d * q + m."""
    return to_f32(_five_bits(blocks, 4)).mul_(f16(blocks, 0)).add_(f16(blocks, 2))


def q8_0(blocks: Tensor) -> Tensor:
    """(N, 34): f16 d, 32 signed bytes -> (N, 32), d * q."""
    return to_f32(blocks[:, 2:34].view(torch.int8)).mul_(f16(blocks, 0))


def _five_bits(blocks: Tensor, begin: int) -> Tensor:
    """The quants 0..31 of Q5 (N, 32), their high-bit mask at byte ``begin``."""
    high = element_fields(blocks[:, begin : begin + 4], 1, 8).flatten(1)
    return fields(blocks[:, begin + 4 : begin + 20], 4, 2).flatten(1) | (high << 4)
