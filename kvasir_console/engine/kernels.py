"""The small operations of a network in plain torch, kept from depending on how rows are grouped.

A float32 matrix product on a CPU adds in another order when rows come alone, in a group of three, or at the edge of
another thread's share, because the library picks another kernel; a row's last bits then depend on its company. Products
of a multiple of ``ROW_TILE`` rows do not (measured with MKL on AVX-512 and AVX2), so rows are padded to one wherever a
product is made; ``linear.row_invariant`` tests it on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 4
_UNSPLIT_VALUES = 32_768
"""An elementwise operation on more values is split between threads, anywhere, and torch computes what is left at the
end of a share with another exponential function than the rest (``at::internal::GRAIN_SIZE``)."""


def tile_rows(x: Tensor) -> Tensor:
    """(T, ...) to (T', ...): rows of zeros are added until ``T'`` is a multiple of ``ROW_TILE``."""
    missing = -x.shape[0] % ROW_TILE
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """(..., D) divided by its root mean square over D, times (D,) (Zhang and Sennrich, arXiv 1910.07467)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """(T, 2F), gate beside up, to silu(gate) * up, (T, F) (Shazeer, arXiv 2002.05202)."""
    return _gated(gate_up, F.silu)


def geglu(gate_up: Tensor) -> Tensor:
    """(T, 2F), gate beside up, to gelu(gate) * up, (T, F), with the tanh form of gelu (Hendrycks, arXiv 1606.08415)."""
    return _gated(gate_up, lambda gate: F.gelu(gate, approximate="tanh"))


def _gated(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    T, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    step = max(1, _UNSPLIT_VALUES // width)
    if step >= T:
        return activation(gate) * up
    return torch.cat([activation(gate[at : at + step]) * up[at : at + step] for at in range(0, T, step)])


def turns(positions: Tensor, frequencies: Tensor) -> Tensor:
    """The turn of each pair at each position, (T, 1, rope_dim / 2) complex64, for (T,) and (rope_dim / 2,) f64.

    In double precision up to the end: at position 8192 an angle in single precision is off by half a thousandth.
    """
    angles = torch.outer(positions.double(), frequencies)
    return torch.complex(angles.cos().float(), angles.sin().float()).unsqueeze(1)


def rotate_pairs(x: Tensor, turns: Tensor) -> None:
    """Turn the pairs (2i, 2i + 1) of (T, heads, rope_dim) in place (Su et al., arXiv 2104.09864)."""
    torch.view_as_complex(torch.unflatten(x, -1, (-1, 2))).mul_(turns)


def rotate_halves(x: Tensor, turns: Tensor) -> None:
    """Turn the pairs (i, i + rope_dim / 2) of (T, heads, rope_dim) in place: the form of GPT-NeoX."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second).mul_(turns)
    first.copy_(turned.real)
    second.copy_(turned.imag)
