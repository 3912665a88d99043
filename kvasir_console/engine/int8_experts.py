"""A bank's SwiGLU networks where every matrix is held as ``int8``: rows become digits once for all their experts.

The products are those of ``Int8Linear``, whose bits depend on nothing but their row; what lies between them is done for
all pairs at once. For one row, two experts are four products and about twenty small operations in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvasir_console.engine.int8 import Digits, Int8Linear, join
from kvasir_console.engine.kernels import swiglu
from kvasir_console.engine.linear import Linear


class Int8Experts:
    """The experts of one bank, gate beside up, and down."""

    def __init__(self, experts: Sequence[tuple[Int8Linear, Int8Linear]]) -> None:
        self._experts = experts

    @classmethod
    def of(cls, experts: Sequence[tuple[Linear, Linear]]) -> Int8Experts | None:
        """``None`` if a matrix is held in another form."""
        held = [(a, b) for a, b in experts if isinstance(a, Int8Linear) and isinstance(b, Int8Linear)]
        return cls(held) if len(held) == len(experts) else None

    def of_row(self, row: Tensor, chosen: Sequence[int]) -> Tensor:
        """(1, D) to what each of the ``chosen`` K experts answers, (K, D)."""
        digits = Digits.of(row)
        gate_up = torch.cat([self._experts[expert][0].products(digits) for expert in chosen])
        inner = Digits.of(swiglu(join(gate_up).mul_(digits.unit)))
        down = [self._experts[expert][1].products(inner[k : k + 1]) for k, expert in enumerate(chosen)]
        return join(torch.cat(down)).mul_(inner.unit)

    def outputs(self, rows: Tensor, row_idx: np.ndarray, groups: Sequence[tuple[int, np.ndarray]]) -> Tensor:
        """What each expert answers to each pair, (P, D).

        Args:
            rows: (R, D) f32.
            row_idx: (P,) int64, the row of each pair.
            groups: each expert once, with the places of its pairs; all P places together.
        """
        out = rows.new_empty(len(row_idx), self._experts[0][1].n_out)
        digits = Digits.of(rows)
        for expert, places in groups:
            gate_up, down = self._experts[expert]
            mine = digits[torch.from_numpy(row_idx[places])]
            inner = Digits.of(swiglu(join(gate_up.products(mine)).mul_(mine.unit)))
            out[torch.from_numpy(places)] = join(down.products(inner)).mul_(inner.unit)
        return out
