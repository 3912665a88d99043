"""How fast the pairs of rotary embedding turn (Su et al., arXiv 2104.09864), as the file's metadata say."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.weights import WindowReader
from kvasir_console.errors import ModelError

_FACTORS = "rope_freqs.weight"


def geometric(base: float, rope_dim: int) -> Tensor:
    """Angle per position of each pair, (rope_dim / 2,) f64: from 1 down to almost 1 / base."""
    even = torch.arange(0, rope_dim, 2, dtype=torch.float64)
    return base ** (-even / rope_dim)


def frequencies(read: WindowReader, shape: ModelShape) -> Tensor:
    """Angle per position of each pair, (rope_dim / 2,) f64, with the file's linear scaling and per-pair factors.

    Raises:
        ModelError: ``unsupported_rope_scaling``; ``model_contradictory`` for factors that do not fit the pairs.
    """
    plain = geometric(shape.rope_freq_base, shape.rope_dim) / _linear_scaling(read, shape.architecture)
    if _FACTORS not in read:
        return plain
    factors = read.vector(_FACTORS).cpu().double()
    if len(factors) != len(plain) or not bool(((factors > 0) & factors.isfinite()).all()):
        raise ModelError(
            "model_contradictory",
            f"{_FACTORS} holds {len(factors)} values, not the {len(plain)} finite ones above 0 of "
            f"{shape.architecture}.rope.dimension_count {shape.rope_dim}.",
            "The file is damaged; fetch it again.",
        )
    return plain / factors


def _linear_scaling(read: WindowReader, architecture: str) -> float:
    """The divisor of positions. Raises ``ModelError`` for a kind of scaling that is not linear."""
    key = f"{architecture}.rope"
    kind = read.metadata.get(f"{key}.scaling.type", "linear")
    factor = read.metadata.get(f"{key}.scaling.factor", read.metadata.get(f"{key}.scale_linear", 1.0))
    if kind == "none":
        return 1.0
    if kind != "linear" or not isinstance(factor, float | int) or not 1 <= factor <= 1e6:
        raise ModelError(
            "unsupported_rope_scaling",
            f"{key}.scaling of type {kind!r:.40} and factor {factor!r:.40} is not computed by this engine.",
            "Choose a checkpoint without it.",
        )
    return float(factor)
