"""The few operations whose rounding depends on how rows are grouped, and how they are kept from depending on it.

A float32 matrix product on a CPU adds in another order when rows come alone, in a group of three, or at the edge of
another thread's share, because the library picks another kernel; a row's last bits then depend on its company. So
there are two classes of company and nothing in between:

* *few* rows, fewer than ``ROW_TILE``: decode. Each row has the bits it has alone.
* *many* rows: prefill. They are padded to a multiple of ``ROW_TILE``, and each row has the bits it has in any other
  such company.

Within a class a row is worth the same bits for any number of threads, in any batch and on any holder of an expert;
between the two the last bits differ, so a replay must feed few rows where few were fed. Matrices lie input-major
(see ``weights``), without which two or three rows would differ from one. All this was measured with MKL on AVX-512 and
AVX2; ``row_invariant`` tests it on the machine at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 4
_TESTED_OUTPUTS = 4096
_UNSPLIT_VALUES = 32_768
"""An elementwise operation on more values is split between threads, anywhere, and torch computes what is left at the
end of a share with another exponential function than the rest (``at::internal::GRAIN_SIZE``)."""


def pad_rows(x: Tensor) -> Tensor:
    """(T, ...) to (T', ...): rows of zeros are added to many rows until ``T'`` is a multiple of ``ROW_TILE``."""
    return x if x.shape[0] < ROW_TILE else tile_rows(x)


def tile_rows(x: Tensor) -> Tensor:
    """(T, ...) to (T', ...) as ``pad_rows``, few rows too: what makes them pass for many."""
    missing = -x.shape[0] % ROW_TILE
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(T', n_in) by (n_out, n_in) to (T', n_out); the rows come from ``pad_rows``."""
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
    """Whether products with ``weight`` (n_out, n_in) give a row the same bits in any company of its class here.

    At most ``_TESTED_OUTPUTS`` of the outputs are computed, which takes milliseconds.
    """
    weight = weight[:_TESTED_OUTPUTS]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16 * ROW_TILE, weight.shape[1], generator=generator).to(weight.device)
    few = torch.cat([linear(row, weight) for row in torch.split(x[:ROW_TILE], 1)])
    many = linear(x, weight)
    return all(torch.equal(linear(x[:T], weight), few[:T]) for T in range(1, ROW_TILE)) and all(
        torch.equal(linear(x[-T:], weight), many[-T:]) for T in (ROW_TILE, 2 * ROW_TILE, 3 * ROW_TILE, 5 * ROW_TILE)
    )
