"""K-quants: super-blocks of 256 values in groups of 16 or 32, each group with a small scale of its own.

The group scales are themselves quantised (4, 6 or 8 bits) under one or two half-precision factors of the super-block.
Every factor is applied in the order ``gguf.quants`` does, (d * scale) * q - (dmin * min), each step rounded to f32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir_console.engine.quant.blocks import f16, fields, to_f32


def q2_k(blocks: Tensor) -> Tensor:
    """(N, 84): 16 scale nibbles and 16 min nibbles, 256 two-bit quants, f16 d, f16 dmin -> (N, 256)."""
    scales = blocks[:, :16]
    scale = to_f32(scales & 0xF).mul_(f16(blocks, 80))
    offset = to_f32(scales >> 4).mul_(f16(blocks, 82))
    q = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16)
    return to_f32(q).mul_(scale.unsqueeze(-1)).sub_(offset.unsqueeze(-1)).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    """(N, 110): 256 third bits, 256 two-bit quants, 16 six-bit scales, f16 d -> (N, 256), d * (s - 32) * q.

    A third bit that is *clear* subtracts 4. The twelve scale bytes hold 16 low nibbles and then 16 high pairs.
    """
    low = fields(blocks[:, 96:104], 4, 2).flatten(1)
    high = fields(blocks[:, 104:108], 2, 4).flatten(1)
    scale = to_f32(low | (high << 4)).sub_(32).mul_(f16(blocks, 108))
    low_bits = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16)
    third = fields(blocks[:, :32], 1, 8).reshape(-1, 16, 16)
    return to_f32(low_bits | (third << 2)).sub_(4).mul_(scale.unsqueeze(-1)).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    """(N, 144): f16 d, f16 dmin, 8 six-bit scales and mins, 256 nibbles -> (N, 256)."""
    q = fields(blocks[:, 16:144].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return _scale_and_shift(blocks, q)


def q5_k(blocks: Tensor) -> Tensor:
    """(N, 176): f16 d, f16 dmin, 8 six-bit scales and mins, 256 fifth bits, 256 nibbles -> (N, 256)."""
    low = fields(blocks[:, 48:176].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    high = fields(blocks[:, 16:48], 1, 8)
    return _scale_and_shift(blocks, low | (high << 4))


def q6_k(blocks: Tensor) -> Tensor:
    """(N, 210): 256 nibbles, 256 high pairs, 16 signed byte scales, f16 d -> (N, 256), d * s * (q - 32)."""
    scale = to_f32(blocks[:, 192:208].view(torch.int8)).mul_(f16(blocks, 208))
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4, 2).reshape(-1, 16, 16)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16)
    return to_f32(low | (high << 4)).sub_(32).mul_(scale.unsqueeze(-1)).flatten(1)


def scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight six-bit scales and mins of a Q4_K or Q5_K super-block, uint8 (N, 8) each.

    Scales and mins 0..3 are the low six bits of bytes 0..3 and 4..7; of 4..7, the low nibbles are in bytes 8..11 (scale
    low, min high) and the two high bits sit above scales and mins 0..3.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat((first & 0x3F, (third & 0xF) | ((first >> 2) & 0x30)), dim=-1)
    offset = torch.cat((second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)), dim=-1)
    return scale, offset


def _scale_and_shift(blocks: Tensor, q: Tensor) -> Tensor:
    """Q4_K and Q5_K share their head: quants (N, 8, 32) -> (N, 256)."""
    scale, offset = scales_and_offsets(blocks)
    scale_f32 = to_f32(scale).mul_(f16(blocks, 0))
    offset_f32 = to_f32(offset).mul_(f16(blocks, 2))
    return to_f32(q).mul_(scale_f32.unsqueeze(-1)).sub_(offset_f32.unsqueeze(-1)).flatten(1)
