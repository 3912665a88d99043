"""I-quants: groups of 4 or 8 values are one index into a fixed grid of lattice points, with signs and scales apart.

The grids, the sign patterns and the non-linear four-bit values are taken from the installed gguf package, unpacked once
per device on first use. The non-linear types (IQ4) look up single values. Scales follow ``gguf.quants`` step by step.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvasir_console.engine.quant.blocks import element_fields, f16, fields, to_f32, u16, u32

IQ1_DELTA = 0.125
"""How far IQ1 moves a whole group off the grid, up or down."""


def iq2_xxs(blocks: Tensor) -> Tensor:
    """(N, 66): f16 d, per 32 values four grid bytes and a word of four 7-bit signs and a 4-bit scale -> (N, 256)."""
    packed = blocks[:, 2:66].reshape(-1, 8, 8)
    word = u32(packed[..., 4:])  # (N, 8, 1)
    scale = _scale(blocks, (word >> 28).flatten(1), 0.25)
    signs = _sign_patterns(_seven_bits(word))
    return _grid("IQ2_XXS", packed[..., :4]).mul_(scale[..., None, None]).mul_(signs).flatten(1)


def iq2_xs(blocks: Tensor) -> Tensor:
    """(N, 74): f16 d, 32 words of a 9-bit grid index and a 7-bit sign, 16 scale nibbles -> (N, 256)."""
    words = u16(blocks[:, 2:66]).reshape(-1, 16, 2)
    scale = _scale(blocks, element_fields(blocks[:, 66:74], 4, 2).flatten(1), 0.25)
    grid = _grid("IQ2_XS", words & 511)
    return grid.mul_(scale[..., None, None]).mul_(_sign_patterns(words >> 9)).flatten(1)


def iq2_s(blocks: Tensor) -> Tensor:
    """(N, 82): f16 d, 32 grid bytes, 32 sign masks, 32 pairs of high grid bits, 16 scale nibbles -> (N, 256)."""
    high = element_fields(blocks[:, 66:74], 2, 4).flatten(1).to(torch.int32)
    index = blocks[:, 2:34].to(torch.int32) | (high << 8)
    scale = _scale(blocks, element_fields(blocks[:, 74:82], 4, 2).flatten(1), 0.25)
    grid = _grid("IQ2_S", index.reshape(-1, 16, 2)).mul_(scale[..., None, None])
    return grid.mul_(_signs(blocks[:, 34:66].reshape(-1, 16, 2))).flatten(1)


def iq3_xxs(blocks: Tensor) -> Tensor:
    """(N, 98): f16 d, 64 grid bytes, 8 words of four 7-bit signs and a 4-bit scale -> (N, 256)."""
    words = u32(blocks[:, 66:98]).unsqueeze(-1)  # (N, 8, 1)
    scale = _scale(blocks, (words >> 28).flatten(1), 0.5)
    grid = _grid("IQ3_XXS", blocks[:, 2:66]).reshape(-1, 8, 4, 8)
    return grid.mul_(scale[..., None, None]).mul_(_sign_patterns(_seven_bits(words))).flatten(1)


def iq3_s(blocks: Tensor) -> Tensor:
    """(N, 110): f16 d, 64 grid bytes, 64 ninth grid bits, 32 sign masks, 8 scale nibbles -> (N, 256)."""
    ninth = element_fields(blocks[:, 66:74], 1, 8).flatten(1).to(torch.int32)
    index = blocks[:, 2:66].to(torch.int32) | (ninth << 8)
    scale = to_f32(element_fields(blocks[:, 106:110], 4, 2).flatten(1)).mul_(2).add_(1).mul_(f16(blocks, 0))
    grid = _grid("IQ3_S", index).reshape(-1, 8, 4, 8).mul_(scale[..., None, None])
    return grid.mul_(_signs(blocks[:, 74:106].reshape(-1, 8, 4))).flatten(1)


def iq1_s(blocks: Tensor) -> Tensor:
    """(N, 50): f16 d, 32 grid bytes, 8 words of four 3-bit high indices, a 3-bit scale and a shift -> (N, 256)."""
    words = u16(blocks[:, 34:50])  # (N, 8)
    scale = to_f32((words >> 12) & 7).mul_(2).add_(1).mul_(f16(blocks, 0))
    shift = to_f32(words >> 15).mul_(-2 * IQ1_DELTA).add_(IQ1_DELTA)
    index = blocks[:, 2:34].to(torch.int32) | (element_fields(words, 3, 4).flatten(1) << 8)
    grid = _grid("IQ1_S", index).reshape(-1, 8, 32)
    return grid.add_(shift.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).flatten(1)


def iq1_m(blocks: Tensor) -> Tensor:
    """(N, 56): 32 grid bytes, 32 nibbles of three high index bits and a shift, 16 three-bit scales -> (N, 256).

    The half-precision scale has no bytes of its own: its four nibbles are the top ones of the four scale words.
    """
    words = u16(blocks[:, 48:56])  # (N, 4)
    top = words >> 12
    bits = top[:, 0] | (top[:, 1] << 4) | (top[:, 2] << 8) | (top[:, 3] << 12)
    d = bits.to(torch.int16).view(torch.float16).to(torch.float32).unsqueeze(-1)
    scale = to_f32(element_fields(words, 3, 4).flatten(1)).mul_(2).add_(1).mul_(d)  # (N, 16)
    high = element_fields(blocks[:, 32:48], 4, 2).flatten(1).to(torch.int32)  # (N, 32)
    shift = to_f32(high >> 3).mul_(-2 * IQ1_DELTA).add_(IQ1_DELTA)
    grid = _grid("IQ1_M", blocks[:, :32].to(torch.int32) | ((high & 7) << 8)).add_(shift.unsqueeze(-1))
    return grid.reshape(-1, 16, 16).mul_(scale.unsqueeze(-1)).flatten(1)


def iq4_nl(blocks: Tensor) -> Tensor:
    """(N, 18): f16 d, 16 nibble pairs -> (N, 32)."""
    return _non_linear(fields(blocks[:, 2:18], 4, 2).flatten(1)).mul_(f16(blocks, 0))


def iq4_xs(blocks: Tensor) -> Tensor:
    """(N, 136): f16 d, 8 high scale pairs, 8 low scale nibbles, 256 nibbles -> (N, 256), d * (s - 32) * value."""
    high = fields(u16(blocks[:, 2:4]), 2, 8).flatten(1)
    low = element_fields(blocks[:, 4:8], 4, 2).flatten(1).to(torch.int32)
    scale = to_f32(low | (high << 4)).sub_(32).mul_(f16(blocks, 0))
    q = fields(blocks[:, 8:136].reshape(-1, 8, 16), 4, 2).flatten(2)
    return _non_linear(q).mul_(scale.unsqueeze(-1)).flatten(1)


def _scale(blocks: Tensor, scale: Tensor, factor: float) -> Tensor:
    """d * (0.5 + s) * factor, with d at the head of the block and s (N, k) -> (N, k)."""
    return to_f32(scale).add_(0.5).mul_(f16(blocks, 0)).mul_(factor)


def _seven_bits(words: Tensor) -> Tensor:
    """Four 7-bit sign indices of each word: (N, k, 1) -> (N, k, 4)."""
    return element_fields(words, 7, 4).flatten(2)


def _signs(masks: Tensor) -> Tensor:
    """Bit masks (N, a, b) to factors 1 and -1, f32 (N, a, b, 8)."""
    return to_f32(element_fields(masks, 1, 8)).mul_(-2).add_(1)


def _sign_patterns(index: Tensor) -> Tensor:
    """Indices into the 128 patterns of even parity to factors: (N, a, b) -> f32 (N, a, b, 8)."""
    return _sign_table(index.device)[index]


def _grid(name: str, index: Tensor) -> Tensor:
    """Grid points of a type: indices (..., ) -> f32 (..., 4 or 8), fresh."""
    return _grid_table(name, index.device)[index.to(torch.int32)]


def _non_linear(codes: Tensor) -> Tensor:
    return _non_linear_table(codes.device)[codes.to(torch.int32)]


@cache
def _grid_table(name: str, device: torch.device) -> Tensor:
    """(points, 4 or 8) f32."""
    from gguf import quants

    cls = getattr(quants, name)
    cls.init_grid()
    return torch.from_numpy(cls.grid.reshape(cls.grid_shape)).to(device)


@cache
def _sign_table(device: torch.device) -> Tensor:
    """(128, 8) f32: bit j of pattern i set means value j is negative."""
    from gguf import quants

    masks = torch.tensor(list(quants.IQ2_XXS.ksigns), dtype=torch.uint8, device=device)
    return to_f32(element_fields(masks, 1, 8)).mul_(-2).add_(1)


@cache
def _non_linear_table(device: torch.device) -> Tensor:
    """(16,) f32."""
    from gguf import quants

    return torch.tensor(quants.IQ4_NL.kvalues, dtype=torch.float32, device=device)
