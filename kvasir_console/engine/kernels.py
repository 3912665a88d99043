"""The few operations whose rounding depends on how rows are grouped, and how they are kept from depending on it.

A float32 matrix product on a CPU gives a row other last bits when it comes alone, in a group of three, or at the edge
of another thread's share: the library picks another kernel, which adds in another order. So rows come in multiples of
``ROW_TILE``: measured with MKL on AVX-512, every such count takes the same chain of additions per value, for any number
of threads. A row is then worth the same bits in prefill, in decode, in a replay, in any batch and on any holder of an
expert. ``row_invariant`` tests that claim on the machine at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 4
"""Rows of a matrix product come in multiples of this."""
_TESTED_OUTPUTS = 4096
_UNSPLIT_VALUES = 32_768
"""An elementwise operation on more values is split between threads, anywhere, and torch computes what is left at the
end of a share with another exponential function than the rest (``at::internal::GRAIN_SIZE``)."""


def pad_rows(x: Tensor) -> Tensor:
    """(T, D) to (T', D): rows of zeros are added until ``T'`` is a multiple of ``ROW_TILE``."""
    missing = -x.shape[0] % ROW_TILE
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(T', n_in) by (n_out, n_in) to (T', n_out), where ``T'`` is a multiple of ``ROW_TILE``."""
    return F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(T, D) divided by its root mean square over D, times (D,) (Zhang and Sennrich, arXiv 1910.07467)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """(T, 2F), gate beside up, to silu(gate) * up, (T, F) (Shazeer, arXiv 2002.05202)."""
    T, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    step = max(1, _UNSPLIT_VALUES // width)
    if step >= T:
        return F.silu(gate) * up
    return torch.cat([F.silu(gate[at : at + step]) * up[at : at + step] for at in range(0, T, step)])


def row_invariant(weight: Tensor) -> bool:
    """Whether products with ``weight`` (n_out, n_in) give a row the same bits in any company on this machine.

    At most ``_TESTED_OUTPUTS`` of the outputs are computed, which takes milliseconds.
    """
    weight = weight[:_TESTED_OUTPUTS]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, weight.shape[1], generator=generator).to(weight.device)
    whole = linear(x, weight)
    return all(
        torch.equal(linear(x[at : at + count].clone(), weight), whole[at : at + count])
        for count in (ROW_TILE, 2 * ROW_TILE, 3 * ROW_TILE, 5 * ROW_TILE)
        for at in (0, 64 - count)
    )
