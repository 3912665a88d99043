"""A matrix that multiplies rows: what every architecture is made of, and the forms in which it can be held.

A ``Linear`` is a matrix (n_out, n_in), held once in one form, called with rows (R, n_in) f32 for products (R, n_out)
f32. It is packed from the blocks of a file, a few rows at a time. The forms that need nothing but torch:

    dense   f32 values: exact, the reference                                    4 bytes a weight
    half    f16 values, f32 rows and sums (FBGEMM, x86 only)                    2
    int4    4-bit groups of Q4_0, Q4_1, Q4_K as stored; bf16 rows and scales    0.625

and the one that needs a compiler is in ``native``. ``choice`` picks one.

Each gives a row the same bits in any company, as far as ``row_invariant`` can see on the machine at hand; between two
forms the last bits differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.kernels import ROW_TILE, tile_rows
from kvasir_console.engine.native.library import Library
from kvasir_console.engine.native.linear import FORMATS, block_rows
from kvasir_console.engine.quant import dequantize, format_of
from kvasir_console.engine.quant.groups import FOUR_BIT, GROUP

CHUNK_VALUES = 2**20
"""Values dequantised at a time, unless 16 rows have more."""
_PIECE_VALUES = 2**24
_INT4_ROWS = 64
"""Torch packs rows by so many; fewer at the end are filled up."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a stored tensor, read when asked for."""

    type: GGMLType
    count: int
    n_in: int
    read: Callable[[int, int], Tensor]
    """Rows ``[begin, end)`` as stored, uint8 (end - begin, row_bytes)."""

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """All rows as stored, a few at a time (a multiple of 16 but at the end), each with the index of its first."""
        step = 16 * max(1, CHUNK_VALUES // self.n_in // 16)
        for begin in range(0, self.count, step):
            yield begin, self.read(begin, min(begin + step, self.count))


@runtime_checkable
class Linear(Protocol):
    """A matrix (n_out, n_in) in some form."""

    n_in: int
    n_out: int

    @property
    def kind(self) -> str:
        """The form's name."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """(R, n_in) f32 to (R, n_out) f32."""

    def tensors(self) -> Iterable[Tensor]:
        """The storages it holds, as far as torch can show them."""

    @property
    def n_bytes(self) -> int:
        """Bytes held."""


@runtime_checkable
class Table(Protocol):
    """A matrix whose rows, of n_in values, are looked up."""

    def rows(self, ids: Tensor, /) -> Tensor:
        """(T,) to (T, n_in) f32."""

    def tensors(self) -> Iterable[Tensor]: ...
    @property
    def n_bytes(self) -> int: ...


class DenseLinear:
    """f32 values. They lie input-major, as the transpose of a contiguous (n_in, n_out), without which two or three rows
    would differ from one (see ``kernels``)."""

    kind = "dense"

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.n_out, self.n_in = weight.shape

    @classmethod
    def pack(cls, parts: Sequence[Rows], device: torch.device | str = "cpu") -> DenseLinear:
        weight = torch.empty(parts[0].n_in, sum(part.count for part in parts), device=device).t()
        for part, place in zip(parts, torch.split(weight, [part.count for part in parts]), strict=True):
            for begin, raw in part.chunks():
                values = dequantize(raw.to(device).view(-1), part.type)
                place[begin : begin + len(raw)] = values.view(len(raw), part.n_in)
        return cls(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(tile_rows(x), self.weight)[: x.shape[0]]

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)

    def tensors(self) -> Sequence[Tensor]:
        return (self.weight,)

    @property
    def n_bytes(self) -> int:
        return self.weight.nbytes


class HalfLinear:
    """f16 values in FBGEMM's packing, widened in registers: rows, products and sums are f32.

    Rounding a weight to f16 moves it by at most 2^-11 of itself. Several pieces, one below the other, bound the f32
    values that packing needs for a moment.
    """

    kind = "half"

    def __init__(self, pieces: Sequence[torch.ScriptObject], n_out: int, n_in: int) -> None:
        self._pieces = pieces
        self.n_out, self.n_in = n_out, n_in

    @staticmethod
    def available() -> bool:
        return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(
            torch.ops.quantized, "linear_prepack_fp16"
        )

    @classmethod
    def pack(cls, parts: Sequence[Rows]) -> HalfLinear:
        """Raises ``Unsuitable`` for a weight beyond the range of f16."""
        n_in, pieces = parts[0].n_in, []
        for weight in _dequantised(parts, max(1, _PIECE_VALUES // n_in)):
            if not weight.abs().max() <= torch.finfo(torch.float16).max:  # nor if it is no number
                raise UnsuitableError("a weight is beyond the range of f16")
            pieces.append(torch.ops.quantized.linear_prepack_fp16(weight, None))
        return cls(pieces, sum(part.count for part in parts), n_in)

    def __call__(self, x: Tensor) -> Tensor:
        multiply = torch.ops.quantized.linear_dynamic_fp16
        if len(self._pieces) == 1:
            product: Tensor = multiply(x, self._pieces[0])
            return product
        return torch.cat([multiply(x, piece) for piece in self._pieces], dim=1)

    def tensors(self) -> Sequence[Tensor]:
        return ()

    @property
    def n_bytes(self) -> int:
        return 2 * self.n_out * self.n_in


class Int4Linear:
    """4-bit values in groups of 32, each with a scale and an offset, exactly as the file groups them.

    Torch's kernel takes rows, scales and offsets in bf16 and answers in bf16; its sums are f32.
    """

    kind = "int4"

    def __init__(self, packed: Tensor, scales: Tensor, n_out: int) -> None:
        self._packed = packed  # (n_out', n_in / 2), in an order of torch's own for every 64 rows
        self._scales = scales  # (n_in / 32, n_out', 2) bf16: a scale, and the offset of the value 8
        self.n_out, self.n_in = n_out, GROUP * scales.shape[0]

    @staticmethod
    def suits(parts: Sequence[Rows]) -> bool:
        return all(part.type in FOUR_BIT for part in parts) and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")

    @classmethod
    def pack(cls, parts: Sequence[Rows]) -> Int4Linear:
        n_in, n_out = parts[0].n_in, sum(part.count for part in parts)
        padded = n_out + -n_out % _INT4_ROWS
        scales = torch.zeros(n_in // GROUP, padded, 2, dtype=torch.bfloat16)
        packed = torch.empty(padded, n_in // 2, dtype=torch.uint8)
        waiting = torch.empty(0, n_in, dtype=torch.uint8)
        taken = done = 0
        for part in parts:
            for _, raw in part.chunks():
                blocks = raw.view(-1, part.type.block_bytes)
                q, scale, offset = FOUR_BIT[part.type](blocks)
                place = scales[:, taken : taken + len(raw)]
                place[..., 0] = scale.view(len(raw), -1).t()
                place[..., 1] = offset.view(len(raw), -1).t()
                taken += len(raw)
                waiting = torch.cat((waiting, q.view(len(raw), n_in)))
                if taken == n_out:
                    waiting = F.pad(waiting, (0, 0, 0, padded - n_out))
                whole = len(waiting) // _INT4_ROWS * _INT4_ROWS
                if whole:
                    order = torch.ops.aten._convert_weight_to_int4pack_for_cpu(waiting[:whole].int(), 1)
                    packed[done : done + whole] = order
                    waiting, done = waiting[whole:], done + whole
        return cls(packed, scales, n_out)

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self._packed, GROUP, self._scales)
        return product[:, : self.n_out].float()

    def tensors(self) -> Sequence[Tensor]:
        return self._packed, self._scales

    @property
    def n_bytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes


class StoredTable:
    """A table as the file stores it; the rows that are looked up are dequantised."""

    def __init__(self, kind: GGMLType, blocks: Tensor, library: Library | None = None) -> None:
        """With ``library``, the compiled kernels read the rows, if they know the type."""
        self._type = kind
        self._blocks = blocks  # (count, row_bytes) uint8
        self._library = library if kind in FORMATS and blocks.device.type == "cpu" else None
        self.count = len(blocks)
        self.n_in = blocks.shape[1] // kind.block_bytes * kind.block_values

    @classmethod
    def pack(cls, rows: Rows, device: torch.device | str = "cpu", library: Library | None = None) -> StoredTable:
        """Raises ``ModelError`` for a type whose rows could not be read later."""
        format_of(rows.type)
        row_bytes = rows.n_in // rows.type.block_values * rows.type.block_bytes
        blocks = torch.empty(rows.count, row_bytes, dtype=torch.uint8, device=device)
        for begin, raw in rows.chunks():
            blocks[begin : begin + len(raw)] = raw
        return cls(rows.type, blocks, library)

    def rows(self, ids: Tensor) -> Tensor:
        if self._library is not None:
            return block_rows(self._blocks, self._type, ids, self._library)
        return dequantize(self._blocks.index_select(0, ids).view(-1), self._type).view(len(ids), self.n_in)

    def tensors(self) -> Sequence[Tensor]:
        return (self._blocks,)

    @property
    def n_bytes(self) -> int:
        return self._blocks.nbytes


class UnsuitableError(Exception):
    """A matrix cannot be held in a form, for a reason that only its values show."""


def _dequantised(parts: Sequence[Rows], most: int) -> Iterator[Tensor]:
    """The rows of all parts, one below the other, in tensors of at most ``most`` rows, f32."""
    pieces: list[Tensor] = []
    for part in parts:
        for _, raw in part.chunks():
            rows = dequantize(raw.view(-1), part.type).view(len(raw), part.n_in)
            while len(rows):
                room = most - sum(map(len, pieces))
                pieces.append(rows[:room])
                rows = rows[room:]
                if sum(map(len, pieces)) == most:
                    yield torch.cat(pieces)
                    pieces = []
    if pieces:
        yield torch.cat(pieces)


def row_invariant(linear: Linear, *, device: torch.device | str = "cpu") -> bool:
    """Whether ``linear`` gives a row the same bits in any company here: alone, among a few, among many."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6 * ROW_TILE, linear.n_in, generator=generator).to(device)
    alone = torch.cat([linear(row) for row in torch.split(x[:ROW_TILE], 1)])
    many = linear(x)
    return torch.equal(many[:ROW_TILE], alone) and all(
        torch.equal(linear(x[-T:]), many[-T:]) for T in (2, 3, ROW_TILE, ROW_TILE + 1, 2 * ROW_TILE, 5 * ROW_TILE)
    )
