"""A matrix whose weights stay packed: the file's quants and scales, regrouped, and nothing rounded anew.

Sixteen outputs lie side by side (see ``src/formats.h``), at the size they have in the file, within 4%. Products are in
f32, or of integer types exact sums of rows in 23-bit fixed point (see ``src/limbs.h``), and each output of each row is
summed in one fixed order, whatever the number of rows, threads and matrices stacked: a row has the same bits in any
company.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kvasir_console.engine.native.library import Library, MatrixView, SegmentView
from kvasir_console.errors import EngineError, ModelError

__all__ = ["FORMATS", "PANEL_ROWS", "NativeLinear", "block_rows", "check_rows"]

PANEL_ROWS: Final = 16
"""Outputs that lie side by side."""

FORMATS: dict[int, int] = {
    0: 0,  # F32
    1: 1,  # F16
    30: 2,  # BF16
    2: 3,  # Q4_0
    3: 4,  # Q4_1
    6: 5,  # Q5_0
    7: 6,  # Q5_1
    8: 7,  # Q8_0
    10: 8,  # Q2_K
    11: 9,  # Q3_K
    12: 10,  # Q4_K
    13: 11,  # Q5_K
    14: 12,  # Q6_K
    20: 13,  # IQ4_NL
    23: 14,  # IQ4_XS
    39: 15,  # MXFP4
}
"""``Format`` of formats.h by ggml type id: the types that can be packed."""

_BLOCK_VALUES = {0: 1, 1: 1, 30: 1, 10: 256, 11: 256, 12: 256, 13: 256, 14: 256, 23: 256}
"""Values per block, where it is not 32."""


class NativeLinear:
    """An (n_out, n_in) matrix, packed; called with rows (R, n_in) f32 it gives their products (R, n_out) f32.

    Its outputs may come from several tensors one below the other, each with a ggml type of its own.
    """

    kind: Final = "native"

    __slots__ = ("_data", "_first_bytes", "_library", "_matrix", "_pointer", "_segments", "n_in", "n_out")

    def __init__(self, parts: Sequence[tuple[int, int]], n_in: int, library: Library) -> None:
        """Room for ``parts``, (ggml type, outputs) of each; ``fill`` them before the first product.

        Raises:
            ModelError: ``unsupported_quant`` for a type that cannot be packed; ``partial_block`` when ``n_in`` is not a
                whole number of its blocks.
        """
        self.n_in, self.n_out = n_in, sum(n_out for _, n_out in parts)
        self._library = library
        self._segments = (SegmentView * len(parts))()
        column = offset = 0
        for segment, (ggml_type, n_out) in zip(self._segments, parts, strict=True):
            segment.format, segment.n_out, segment.column = _format_of(ggml_type, n_in), n_out, column
            segment.data = offset
            column += n_out
            offset += -(-n_out // PANEL_ROWS) * library.panel_bytes(segment.format, n_in)
        self._data = torch.empty(offset, dtype=torch.uint8)
        library.call("kv_large_pages", self._data.data_ptr(), offset)
        for segment in self._segments:
            segment.data = (segment.data or 0) + self._data.data_ptr()
        self._matrix = MatrixView(n_in, self.n_out, len(parts), self._segments)
        self._pointer = ctypes.addressof(self._matrix)

    @classmethod
    def pack(cls, parts: Sequence[tuple[Tensor, int, int]], n_in: int, library: Library) -> NativeLinear:
        """Pack whole tensors: (raw blocks, uint8; ggml type; outputs) of each."""
        matrix = cls([(ggml_type, n_out) for _, ggml_type, n_out in parts], n_in, library)
        for index, (raw, _, _) in enumerate(parts):
            matrix.fill(index, 0, raw)
        return matrix

    def fill(self, part: int, first: int, raw: Tensor) -> None:
        """Pack consecutive outputs of a part, from ``first`` on, a multiple of ``PANEL_ROWS``.

        Args:
            raw: their blocks, uint8 (bytes,), contiguous. A multiple of ``PANEL_ROWS`` outputs, unless they are the
                part's last.

        Raises:
            EngineError: ``wrong_rows``; they are not whole outputs of the part, or begin or end inside a panel.
        """
        segment = self._segments[part]
        count, rest = divmod(raw.numel(), self._library.row_bytes(segment.format, self.n_in))
        end = first + count
        if (
            raw.dtype != torch.uint8
            or not raw.is_contiguous()
            or rest
            or first % PANEL_ROWS
            or not 0 <= first <= end <= segment.n_out
            or (end % PANEL_ROWS and end != segment.n_out)
        ):
            raise EngineError("wrong_rows", f"{raw.numel()} bytes are no whole panels of outputs from {first} on.")
        place = segment.data + first // PANEL_ROWS * self._library.panel_bytes(segment.format, self.n_in)
        self._library.call("kv_pack", segment.format, raw.data_ptr(), count, self.n_in, place)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Products of rows with the matrix.

        Args:
            x: (R, n_in) f32 on the CPU; rows may lie apart, a row's values may not.
            out: (R, n_out) f32 to write to, under the same conditions; made if ``None``.

        Raises:
            EngineError: ``wrong_rows``; a tensor has another shape, type or layout.
        """
        check_rows(x, self.n_in)
        if out is None:
            out = torch.empty(x.shape[0], self.n_out)
        else:
            check_rows(out, self.n_out)
            if out.shape[0] != x.shape[0]:
                raise EngineError("wrong_rows", f"{x.shape[0]} rows do not fit a result of {out.shape[0]}.")
        self._library.call(
            "kv_linear", self._pointer, x.data_ptr(), x.shape[0], x.stride(0), out.data_ptr(), out.stride(0)
        )
        return out

    def rows(self, outputs: Tensor) -> Tensor:
        """Weights of some outputs, (count,) int64 to (count, n_in) f32: the bits ``quant.dequantize`` gives.

        Raises:
            EngineError: ``wrong_rows``; an output is not there.
        """
        outputs = outputs.to(device="cpu", dtype=torch.int64).contiguous().view(-1)
        count = outputs.numel()
        if count and not 0 <= int(outputs.min()) <= int(outputs.max()) < self.n_out:
            raise EngineError("wrong_rows", f"Outputs must be in [0, {self.n_out}).")
        out = torch.empty(count, self.n_in)
        self._library.call("kv_rows", self._pointer, outputs.data_ptr(), count, out.data_ptr())
        return out

    @property
    def pointer(self) -> int:
        """Address of the ``Matrix`` of linear.h; valid while this object lives."""
        return self._pointer

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        return self._data.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        """The storages held."""
        return (self._data,)


def block_rows(blocks: Tensor, ggml_type: int, ids: Tensor, library: Library) -> Tensor:
    """Some rows of a table that is held as its file stores it: the bits ``quant.dequantize`` gives, (count, n_in) f32.

    Args:
        blocks: (rows, row_bytes) uint8, contiguous, of a type in ``FORMATS``.
        ids: (count,) int64.

    Raises:
        EngineError: ``wrong_rows``; a row is not there.
    """
    ids = ids.to(device="cpu", dtype=torch.int64).contiguous().view(-1)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(blocks):
        raise EngineError("wrong_rows", f"Rows must be in [0, {len(blocks)}).")
    values = _BLOCK_VALUES.get(int(ggml_type), 32)
    number = FORMATS[int(ggml_type)]
    n_in = blocks.shape[1] // library.row_bytes(number, values) * values
    out = torch.empty(len(ids), n_in)
    library.call("kv_block_rows", number, blocks.data_ptr(), n_in, ids.data_ptr(), len(ids), out.data_ptr())
    return out


def check_rows(x: Tensor, width: int) -> None:
    """Refuse what is not (R, width) f32 on the CPU with the values of a row side by side.

    Raises:
        EngineError: ``wrong_rows``.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1 or x.device.type != "cpu":
        raise EngineError(
            "wrong_rows",
            f"Rows of {width} f32 values are needed; these are {list(x.shape)} {x.dtype} on {x.device}.",
        )


def _format_of(ggml_type: int, n_in: int) -> int:
    number = FORMATS.get(int(ggml_type))
    if number is None:
        raise ModelError("unsupported_quant", f"Tensors of ggml type {int(ggml_type)} have no packed form.")
    if n_in < 1 or n_in % _BLOCK_VALUES.get(int(ggml_type), 32):
        raise ModelError("partial_block", f"Rows of {n_in} values are no whole blocks of ggml type {int(ggml_type)}.")
    return number
