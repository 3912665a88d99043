"""Kinds of processor to compile for, and random blocks of every type that can be packed."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from kvasir_console.engine.checkpoint.ggml_types import GGMLType

TARGETS = {
    "native": ("-march=native",),
    "avx2": ("-march=native", "-mno-avx512f", "-O1"),
    "portable": ("-O1",),
}
"""Flags by name; the first is what an owner's machine gets."""

_HALVES = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_NL: (0,),
    GGMLType.IQ4_XS: (0,),
}
"""Where the half-precision factors of a block stand (ggml-common.h)."""


def random_rows(ggml_type: GGMLType, n_out: int, n_in: int, *, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    """(n_out, row_bytes) uint8; ``size`` is the order of magnitude of the weights."""
    rng = np.random.default_rng(seed)
    if ggml_type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        values = (rng.standard_normal((n_out, n_in)) * size).astype(np.float32)
        if ggml_type == GGMLType.F16:
            raw = values.astype(np.float16).view(np.uint8)
        elif ggml_type == GGMLType.BF16:
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            raw = values.view(np.uint8)
        return torch.from_numpy(raw.copy())
    n_blocks = n_out * n_in // ggml_type.block_values
    blocks = rng.integers(0, 256, (n_blocks, ggml_type.block_bytes), dtype=np.uint8)
    for at in _HALVES.get(ggml_type, ()):
        factors = (rng.standard_normal(n_blocks) * 0.02 * size).astype(np.float16)
        blocks[:, at : at + 2] = factors.view(np.uint8).reshape(-1, 2)
    if ggml_type == GGMLType.MXFP4:
        blocks[:, 0] = rng.integers(118, 130, n_blocks)
    return torch.from_numpy(blocks.reshape(n_out, -1))


def with_every_bit(ggml_type: GGMLType, n_out: int, n_in: int, fill: int) -> torch.Tensor:
    """``random_rows`` with all bytes ``fill``, but for the half-precision factors (and the exponent of MXFP4)."""
    raw = random_rows(ggml_type, n_out, n_in)
    blocks = raw.view(-1, ggml_type.block_bytes)
    kept = [at + byte for at in _HALVES.get(ggml_type, ()) for byte in range(2)]
    if ggml_type == GGMLType.MXFP4:
        kept = [0]
    factors = blocks[:, kept].clone()
    blocks.fill_(fill)
    blocks[:, kept] = factors
    return raw


def weights(raw: torch.Tensor, ggml_type: GGMLType) -> torch.Tensor:
    """What the gguf package makes of them: (n_out, n_in) f32."""
    values = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(int(ggml_type)))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
