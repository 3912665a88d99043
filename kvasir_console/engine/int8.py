"""Matrices of whole numbers in 8 bits, one scale a row, multiplied as integers by torch's FBGEMM (x86).

A row x of activations, with m its largest magnitude, is written in two digits of base 126, each between -63 and 63:

    x = m / 63 * (high + low / 126), to 2^-14 of m

Both digits are rows of one product, whose sums are whole numbers in 32 bits: exact in any order. So a row has the same
bits in any company, and a single row costs as much with two digits as with one, because reading the matrix is what
takes time. Seven bits a digit, not eight: where the processor adds pairs of products in 16 bits (AVX2), two of
127 * 127 are the most that fit.

What is rounded is the weights, to 1/254 of the largest of their row at most, where Q8_0 has a scale every 32. That is
taken for Q8_0 alone, which is read the most where it is used at all: heads and experts.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.linear import PIECE_VALUES, Rows, UnsuitableError, dequantised

_DIGIT = 63
_BASE = 2 * _DIGIT
_ZERO = 64
"""What stands for 0 among the unsigned digits that the kernel makes."""
_WEIGHT = 127
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Digits:
    """Rows (R, n_in) in two digits, for any number of products."""

    values: Tensor
    """(R, 2, n_in) f32, whole numbers but for the low digit, which the product rounds."""
    unit: Tensor
    """(R, 1) f32, what 1 in the high digit is worth."""

    @classmethod
    def of(cls, x: Tensor) -> Digits:
        """(R, n_in) f32."""
        unit = x.abs().amax(1, keepdim=True).clamp_min_(_TINY).div_(_DIGIT)
        values = x.new_empty(x.shape[0], 2, x.shape[1])
        high, low = values.unbind(1)
        torch.div(x, unit, out=low)
        torch.round(low, out=high)
        low.sub_(high).mul_(_BASE)
        return cls(values, unit)

    def __getitem__(self, rows: Tensor | slice) -> Digits:
        return Digits(self.values[rows], self.unit[rows])


class Int8Linear:
    """A matrix (n_out, n_in) of 8-bit numbers with a scale for each row (see the module)."""

    kind = "int8"

    def __init__(self, pieces: Sequence[torch.ScriptObject], n_out: int, n_in: int) -> None:
        self._pieces = pieces
        self.n_out, self.n_in = n_out, n_in
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    @staticmethod
    def suits(parts: Sequence[Rows]) -> bool:
        """Whether all parts are of the type that is 8 bits in the file, and this machine multiplies digits exactly."""
        return all(part.type == GGMLType.Q8_0 for part in parts) and available()

    @classmethod
    def pack(cls, parts: Sequence[Rows]) -> Int8Linear:
        """Raises ``UnsuitableError`` for a weight that is no number."""
        n_in = parts[0].n_in
        pieces = [_packed(weight) for weight in dequantised(parts, max(1, PIECE_VALUES // n_in))]
        return cls(pieces, sum(part.count for part in parts), n_in)

    def __call__(self, x: Tensor) -> Tensor:
        digits = Digits.of(x)
        return join(self.products(digits)).mul_(digits.unit)

    def products(self, digits: Digits) -> Tensor:
        """(2 R, n_out): of each row's high digit, then of its low one."""
        rows = digits.values.view(-1, self.n_in)
        each = [self._multiply(rows, 1.0, _ZERO, piece) for piece in self._pieces]
        return each[0] if len(each) == 1 else torch.cat(each, dim=1)

    def tensors(self) -> Sequence[Tensor]:
        return ()

    @property
    def n_bytes(self) -> int:
        return self.n_out * (self.n_in + 4)


def join(products: Tensor) -> Tensor:
    """(2 R, n_out) of both digits to (R, n_out), in the rows' units."""
    high, low = torch.unflatten(products, 0, (-1, 2)).unbind(1)
    return torch.add(high, low, alpha=1 / _BASE)


@functools.cache
def available() -> bool:
    """Whether torch has the kernel here, and it is exact where sums are largest."""
    names = ("linear_prepack", "linear_with_input_q_dq_qweight_dq_output_fp32")
    if torch.backends.quantized.engine not in ("x86", "fbgemm") or not all(
        hasattr(torch.ops.quantized, name) for name in names
    ):
        return False
    n_in = 128
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(n_in // 2)
    weight = torch.stack([torch.ones(n_in), signs, -signs, -torch.ones(n_in)]).repeat(8, 1)
    x = torch.stack([torch.ones(n_in), signs, -signs, -torch.ones(n_in)])
    try:
        product = Int8Linear([_packed(weight)], len(weight), n_in)(x)
    except RuntimeError:
        return False
    return bool(torch.allclose(product, x @ weight.t(), rtol=1e-5, atol=1e-5 * n_in))


def _packed(weight: Tensor) -> torch.ScriptObject:
    """(n, n_in) f32 in FBGEMM's order."""
    largest = weight.abs().amax(1)
    if not bool(largest.isfinite().all()):
        raise UnsuitableError("a weight is no number")
    scales = largest.clamp_min_(_TINY).div_(_WEIGHT).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop this type some day; ``available`` will say so
        quantised = torch.quantize_per_channel(
            weight, scales, torch.zeros(len(scales), dtype=torch.int64), 0, torch.qint8
        )
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantised, None)
    return packed
