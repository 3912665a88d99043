"""Four-bit types taken apart without dequantising: whole numbers, and a scale and an offset for every 32 of them.

A value is ``scale * (q - 8) + offset`` for q in [0, 16). Regrouping is exact but for one rounding of the offset to f32,
where the type stores the minimum of a group and not its middle.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvasir_console.engine.quant import kquants
from kvasir_console.engine.quant.blocks import f16, fields, to_f32

GROUP = 32

Groups = tuple[Tensor, Tensor, Tensor]
"""Of N blocks: q uint8 (N, g, 32), scale f32 (N, g), offset f32 (N, g)."""


def q4_0(blocks: Tensor) -> Groups:
    q = fields(blocks[:, 2:18], 4, 2).reshape(-1, 1, GROUP)
    scale = f16(blocks, 0)
    return q, scale, torch.zeros_like(scale)


def q4_1(blocks: Tensor) -> Groups:
    q = fields(blocks[:, 4:20], 4, 2).reshape(-1, 1, GROUP)
    scale = f16(blocks, 0)
    return q, scale, f16(blocks, 2).add_(scale, alpha=8)


def q4_k(blocks: Tensor) -> Groups:
    q = fields(blocks[:, 16:144].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, GROUP)
    small_scale, small_offset = kquants.scales_and_offsets(blocks)
    scale = to_f32(small_scale).mul_(f16(blocks, 0))
    return q, scale, to_f32(small_offset).mul_(f16(blocks, 2)).neg_().add_(scale, alpha=8)


FOUR_BIT: dict[int, Callable[[Tensor], Groups]] = {2: q4_0, 3: q4_1, 12: q4_k}
"""By ggml type id."""
