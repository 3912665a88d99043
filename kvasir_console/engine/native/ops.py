"""The operations between products, over rows (R, ...) f32. Each row is computed by itself, in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir_console.engine.native.library import Library
from kvasir_console.engine.native.linear import check_rows
from kvasir_console.errors import EngineError

__all__ = ["ACTIVATIONS", "check_vector", "gated", "rms_norm", "rotate", "route"]

ACTIVATIONS = {"silu": 0, "gelu": 1}
"""``Activation`` of experts.h by name; gelu in its tanh form."""


def rms_norm(library: Library, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """(R, D) divided by its root mean square over D, times (D,) (Zhang and Sennrich, arXiv 1910.07467)."""
    rows, width = x.shape
    check_rows(x, width)
    check_vector(weight, width)
    out = torch.empty(rows, width)
    library.call(
        "kv_rms_norm", x.data_ptr(), rows, x.stride(0), _address(weight), width, eps, out.data_ptr(), out.stride(0)
    )
    return out


def gated(library: Library, gate_up: Tensor, activation: str) -> Tensor:
    """(R, 2F), gate beside up, to activation(gate) * up, (R, F) (Shazeer, arXiv 2002.05202)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    check_rows(gate_up, 2 * width)
    out = torch.empty(rows, width)
    library.call(
        "kv_gated", ACTIVATIONS[activation], gate_up.data_ptr(), rows, gate_up.stride(0), width, out.data_ptr()
    )
    return out


def rotate(library: Library, heads: Tensor, turns: Tensor, *, halves: bool) -> None:
    """Turn pairs of each head in place (Su et al., arXiv 2104.09864): neighbours, or values half a rotation apart.

    Args:
        heads: (R, n_heads, head_dim) f32; rows may lie apart, a row's values may not.
        turns: complex64, as many values per row as a head has pairs to turn.
    """
    rows, n_heads, head_dim = heads.shape
    dim = 2 * turns.numel() // rows if rows else 0
    if (
        heads.dtype != torch.float32
        or heads.device.type != "cpu"
        or heads.stride()[1:] != (head_dim, 1)
        or turns.dtype != torch.complex64
        or not turns.is_contiguous()
        or turns.numel() != rows * dim // 2
        or dim > head_dim
    ):
        raise EngineError("wrong_rows", f"Turns of shape {list(turns.shape)} do not fit heads of {list(heads.shape)}.")
    library.call(
        "kv_rotate", heads.data_ptr(), rows, heads.stride(0), n_heads, head_dim, turns.data_ptr(), dim, int(halves)
    )


def route(library: Library, logits: Tensor, used: int, *, normalised: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The most probable experts of each row, the lowest id first among equals, and their weights.

    Args:
        logits: (R, E) f32, contiguous.
        used: K, how many are chosen.
        normalised: whether the weights are divided by their sum.

    Returns:
        ids (R, K) int64 and weights (R, K) f32.
    """
    rows, n = logits.shape
    check_rows(logits, n)
    if not 1 <= used <= n or not logits.is_contiguous():
        raise EngineError("wrong_rows", f"{used} of {n} experts cannot be chosen.")
    ids, weights = torch.empty(rows, used, dtype=torch.int64), torch.empty(rows, used)
    library.call(
        "kv_route", logits.data_ptr(), rows, n, used, int(normalised), scale, ids.data_ptr(), weights.data_ptr()
    )
    return ids, weights


def check_vector(vector: Tensor | None, width: int) -> None:
    """Refuse what is neither ``None`` nor ``width`` f32 values side by side on the CPU.

    Raises:
        EngineError: ``wrong_rows``.
    """
    if vector is not None and (
        vector.dtype != torch.float32
        or vector.numel() != width
        or not vector.is_contiguous()
        or vector.device.type != "cpu"
    ):
        raise EngineError("wrong_rows", f"{width} f32 values are needed, not {list(vector.shape)} {vector.dtype}.")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
