"""Four-bit floats (E2M1) under a shared scale: MXFP4 (OCP Microscaling Formats v1.0) and NVFP4.

ggml keeps E2M1 values doubled, as whole numbers, and halves the scale instead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvasir_console.engine.quant.blocks import fields, to_f32

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each E2M1 code: sign bit on top; the code of minus zero is plain zero."""


def mxfp4(blocks: Tensor) -> Tensor:
    """(N, 17): E8M0 exponent, 16 nibble pairs -> (N, 32)."""
    scale = _half_e8m0(blocks[:, :1])
    return _e2m1(fields(blocks[:, 1:17], 4, 2).flatten(1)).mul_(scale)


def nvfp4(blocks: Tensor) -> Tensor:
    """(N, 36): four E4M3 scales, four times 8 nibble pairs -> (N, 64), 16 values per scale."""
    scale = _half_ue4m3(blocks[:, :4]).unsqueeze(-1)
    q = fields(blocks[:, 4:36].reshape(-1, 4, 8), 4, 2).flatten(2)
    return _e2m1(q).mul_(scale).flatten(1)


def _e2m1(codes: Tensor) -> Tensor:
    """Codes 0..15 to doubled values, f32, shape unchanged."""
    return _e2m1_table(codes.device)[codes.to(torch.int32)]


def _half_e8m0(exponent: Tensor) -> Tensor:
    """Half of 2^(e - 127) as f32; e of 0 and 1 give the subnormals 2^-128 and 2^-127."""
    e = exponent.to(torch.int32)
    bits = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1).clamp(min=0) << 23)
    return bits.view(torch.float32)


def _half_ue4m3(scale: Tensor) -> Tensor:
    """Half of an unsigned E4M3 number (bias 7; the sign bit is ignored), f32. The code 0x7F, its NaN, reads as zero."""
    exponent = (scale.to(torch.int32) >> 3) & 0xF
    mantissa = to_f32(scale & 0x7)
    power = ((exponent + (127 - 7)) << 23).view(torch.float32)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (1.0 + mantissa / 8.0) * power)
    return torch.where(scale == 0x7F, 0.0, value * 0.5)


@cache
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor(E2M1_DOUBLED, dtype=torch.float32, device=device)
