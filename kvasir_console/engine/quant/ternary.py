"""Ternary types: 256 values of -1, 0 or 1 under one half-precision scale."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir_console.engine.quant.blocks import f16, fields, to_f32


def tq1_0(blocks: Tensor) -> Tensor:
    """(N, 54): 48 bytes of five trits, 4 bytes of four, f16 d -> (N, 256).

    A byte is a fraction of 256 written in base 3: multiplying by 3^k modulo 256 drops the first k trits, and the next
    one is the integer part of three times what is left. The bytes come in runs of 32, 16 and 4, trit by trit.
    """
    runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    trits = torch.cat([_trits(blocks[:, begin:end], count) for begin, end, count in runs], dim=1)
    return to_f32(trits).sub_(1).mul_(f16(blocks, 52))


def tq2_0(blocks: Tensor) -> Tensor:
    """(N, 66): 256 two-bit trits, f16 d -> (N, 256), d * (q - 1)."""
    q = fields(blocks[:, :64].reshape(-1, 2, 32), 2, 4).flatten(1)
    return to_f32(q).sub_(1).mul_(f16(blocks, 64))


def _trits(data: Tensor, count: int) -> Tensor:
    """(N, w) bytes -> (N, count * w) digits 0..2, the first trit of every byte first."""
    rest = data.to(torch.int16)
    digits = []
    for _ in range(count):
        digits.append((rest * 3) >> 8)
        rest = (rest * 3) & 0xFF
    return torch.cat(digits, dim=1)
