"""Rows of hidden states as bytes: f32, f16, bf16, or int8 with one f32 scale a row (pure functions, little-endian).

    dtype   code  a row of E values                         its scales, sent before all rows
    f32        0  E f32                                     none
    f16        1  E f16, rounded to nearest, ties to even   none
    bf16       2  E u16: the upper half of an f32, rounded  none
                  to nearest, ties to even
    int8       3  E i8 in [-127, 127]; value = i8 * scale   one f32: the row's largest magnitude / 127, 0 for zeros

A row's bytes depend on that row alone, so a row means the same whatever else is in its batch. int8's error is at most
half a scale for each value: 1/254 of the row's largest magnitude.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32Array = NDArray[np.float32]
_F16_MAX = np.float32(65504.0)
_BF16_MAX = np.float32(3.3895314e38)
_INT8_MAX = np.float32(127.0)


class Dtype(IntEnum):
    """How values of a frame are written."""

    F32 = 0
    F16 = 1
    BF16 = 2
    INT8 = 3

    @property
    def bit(self) -> int:
        """Its place in the mask of dtypes that a HELLO offers."""
        return 1 << self


_STORED: dict[Dtype, np.dtype[Any]] = {
    Dtype.F32: np.dtype("<f4"),
    Dtype.F16: np.dtype("<f2"),
    Dtype.BF16: np.dtype("<u2"),
    Dtype.INT8: np.dtype("i1"),
}
ALL_DTYPES = sum(dtype.bit for dtype in Dtype)


def values_bytes(dtype: Dtype, n_rows: int, n_embd: int) -> int:
    """Size of ``n_rows`` rows, their scales included."""
    return n_rows * (n_embd * _STORED[dtype].itemsize + (4 if dtype is Dtype.INT8 else 0))


def carries(dtype: Dtype, rows: F32Array) -> bool:
    """Whether ``dtype`` holds every value as a finite one. A row that is not finite itself is for f32 only."""
    if dtype is Dtype.F32:
        return True
    largest = np.max(np.abs(rows), initial=np.float32(0.0))  # NaN and infinity survive a maximum
    return bool(largest <= (_F16_MAX if dtype is Dtype.F16 else _BF16_MAX))


def encode_rows(dtype: Dtype, rows: F32Array) -> list[memoryview]:
    """The bytes of (R, E) f32 ``rows``: scales if there are any, then values. ``carries`` must be true of them."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if dtype is Dtype.INT8:
        scales = np.max(np.abs(rows), axis=1, initial=np.float32(0.0)) / _INT8_MAX
        # The smallest subnormals have no 127th: their scale is 0, and they are sent as zeros.
        inverse = np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales > np.float32(1e-38))
        scales = np.where(inverse > 0, scales, np.float32(0.0))
        quants = np.clip(np.rint(rows * inverse[:, None]), -127, 127).astype("i1")
        return [_bytes(scales.astype("<f4")), _bytes(quants)]
    if dtype is Dtype.BF16:
        bits = rows.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += bits
        rounded += 0x7FFF
        rounded >>= 16
        return [_bytes(rounded.astype("<u2"))]
    return [_bytes(np.ascontiguousarray(rows, dtype=_STORED[dtype]))]


def decode_rows(dtype: Dtype, data: bytes | bytearray | memoryview, offset: int, n_rows: int, n_embd: int) -> F32Array:
    """The (R, E) f32 rows that stand at ``offset``. ``data`` must hold ``values_bytes`` from there.

    f32 rows are a view of ``data`` where they are aligned.
    """
    count = n_rows * n_embd
    if dtype is Dtype.INT8:
        scales = np.frombuffer(data, "<f4", n_rows, offset)
        quants = np.frombuffer(data, "i1", count, offset + 4 * n_rows).reshape(n_rows, n_embd)
        with np.errstate(invalid="ignore", over="ignore"):  # a hostile scale gives what is not finite, and is seen
            return quants * scales[:, None].astype(np.float32)
    stored = np.frombuffer(data, _STORED[dtype], count, offset).reshape(n_rows, n_embd)
    if dtype is Dtype.BF16:
        wide = np.zeros((n_rows, n_embd), "<u4")
        wide.view("<u2")[:, 1::2] = stored
        return wide.view("<f4").astype(np.float32, copy=False)
    return np.require(stored.astype(np.float32, copy=False), requirements="A")


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")
