"""F32, F16 and BF16: one value per block, no scale."""

from __future__ import annotations

import torch
from torch import Tensor


def f32_values(blocks: Tensor) -> Tensor:
    """(N, 4) bytes -> (N, 1)."""
    return blocks.view(torch.float32)


def f16_values(blocks: Tensor) -> Tensor:
    """(N, 2) bytes -> (N, 1)."""
    return blocks.view(torch.float16).to(torch.float32)


def bf16_values(blocks: Tensor) -> Tensor:
    """(N, 2) bytes -> (N, 1): the high half of a float32, moved into place so that even a NaN keeps its bits."""
    return (blocks.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
