"""Keys and values of one sequence, for the layers of one stage, in blocks of 256 positions.

A block is allocated when a row needs it and never moved, so memory follows the rows, growth copies nothing, and
sequences with a common beginning can share its whole blocks. A block is one tensor (n_layer, 2, J, 256, h), keys before
values: what one head reads lies together. J is ``n_head_kv``, h ``head_dim``.

Kinds of a stored value: ``f32``, the reference; ``f16`` and ``bf16`` at half the bytes; ``q8_0``, whole numbers of 8
bits with a half-precision scale for every 32 of a head, as ggml has it, at a little more than a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_console.errors import EngineError, RequestError

BLOCK_ROWS = 256
"""Rows are allocated, and attended to, in blocks of this many positions."""
KV_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.int8}
_Q8_GROUP = 32


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one position of a sequence holds."""

    n_layer: int
    n_head_kv: int
    head_dim: int
    kv_type: str = "f32"
    panels: bool = False
    """Whether keys lie as the compiled kernels have them (``native.attention``), who never look past the last row."""

    def __post_init__(self) -> None:
        if self.kv_type not in KV_TYPES:
            raise EngineError(
                "unknown_kv_type",
                f"{self.kv_type!r:.40} is no kind of KV cache.",
                "Choose " + ", ".join(KV_TYPES) + ".",
            )
        if self.kv_type == "q8_0" and self.head_dim % _Q8_GROUP:
            raise EngineError(
                "unsupported_kv_type",
                f"q8_0 groups {_Q8_GROUP} values, but this model's heads have {self.head_dim}.",
                "Choose f16.",
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in all layers."""
        values = self.n_layer * 2 * self.n_head_kv * self.head_dim
        scales = 2 * (values // _Q8_GROUP) if self.kv_type == "q8_0" else 0
        return values * KV_TYPES[self.kv_type].itemsize + scales

    def capacity_bytes(self, capacity: int) -> int:
        """Bytes that a sequence of ``capacity`` positions takes at most."""
        return blocks_end(capacity) * self.row_bytes


class KVBlock:
    """``BLOCK_ROWS`` positions: ``values`` (n_layer, 2, J, 256, h), with ``scales`` (..., h / 32) f16 in q8_0."""

    __slots__ = ("panels", "scales", "values")

    def __init__(self, layout: KVLayout, device: torch.device | str) -> None:
        self.panels = layout.panels
        shape = layout.n_layer, 2, layout.n_head_kv, BLOCK_ROWS
        self.values = torch.zeros(*shape, layout.head_dim, dtype=KV_TYPES[layout.kv_type], device=device)
        self.scales: Tensor | None = None
        if layout.kv_type == "q8_0":
            self.scales = torch.zeros(*shape, layout.head_dim // _Q8_GROUP, dtype=torch.float16, device=device)

    def copy(self) -> KVBlock:
        copy = KVBlock.__new__(KVBlock)
        copy.panels = self.panels
        copy.values = self.values.clone()
        copy.scales = None if self.scales is None else self.scales.clone()
        return copy

    def clear(self, begin: int, end: int = BLOCK_ROWS) -> None:
        """Zero rows that are forgotten, so that masking them is enough."""
        if self.panels:
            return
        self.values[..., begin:end, :] = 0
        if self.scales is not None:
            self.scales[..., begin:end, :] = 0

    def write(self, layer: int, row: int, kv: Tensor) -> None:
        """Put rows (n, 2, J, h) f32 at ``row``; not for panels, nor is ``read``."""
        place = self.values[layer, :, :, row : row + len(kv)]  # (2, J, n, h)
        rows = kv.permute(1, 2, 0, 3)
        if self.scales is None:
            place.copy_(rows)
            return
        groups = torch.unflatten(rows, -1, (-1, _Q8_GROUP))  # (2, J, n, h / 32, 32)
        scale = (groups.abs().amax(-1) / 127).half()
        self.scales[layer, :, :, row : row + len(kv)] = scale
        steps = scale.float().unsqueeze(-1)
        place.copy_((groups / steps.where(steps > 0, 1)).round_().clamp_(-127, 127).flatten(-2))

    def read(self, layer: int) -> Tensor:
        """Keys and values of a layer, (2, J, 256, h) f32."""
        values = self.values[layer]
        if self.scales is None:
            return values.float()
        return (torch.unflatten(values, -1, (-1, _Q8_GROUP)) * self.scales[layer].float().unsqueeze(-1)).flatten(-2)


class KVCache:
    """Rows ``[0, length)`` of keys and values, up to ``capacity`` positions.

    A forward pass reserves its rows, writes them layer by layer, and commits them at its end. Rows past ``length`` are
    zero or left from an attempt that failed: attention masks them, so they only have to be finite.
    """

    __slots__ = ("_device", "_shared", "blocks", "capacity", "layout", "length")

    def __init__(self, layout: KVLayout, capacity: int, *, device: torch.device | str = "cpu") -> None:
        if capacity < 1:
            raise RequestError("bad_capacity", f"A sequence of {capacity} positions cannot be opened.")
        self.layout = layout
        self.capacity = capacity
        self.length = 0
        self.blocks: list[KVBlock] = []
        self._device = device
        self._shared = 0
        """How many leading blocks belong to other caches too; nothing may be written there."""

    @property
    def n_bytes(self) -> int:
        """Bytes allocated now, shared blocks included."""
        return len(self.blocks) * BLOCK_ROWS * self.layout.row_bytes

    def fork(self, length: int, capacity: int) -> KVCache:
        """A cache that begins with the first ``length`` rows of this one. Whole blocks are shared, not copied.

        Raises:
            EngineError: ``wrong_position``; this cache holds fewer rows.
            RequestError: ``bad_capacity``, ``context_length_exceeded``.
        """
        self._check_cut(length)
        other = KVCache(self.layout, capacity, device=self._device)
        other._check_room(length)
        whole, rest = divmod(length, BLOCK_ROWS)
        other.blocks = self.blocks[:whole]
        if rest:
            partial = self.blocks[whole].copy()
            partial.clear(rest)
            other.blocks.append(partial)
        other.length = length
        self._shared, other._shared = max(self._shared, whole), whole
        return other

    def reserve(self, position: int, count: int) -> None:
        """Make room for ``count`` rows at ``position``, which must be where the sequence ends.

        Raises:
            RequestError: ``context_length_exceeded``; the rows do not fit ``capacity``.
            EngineError: ``wrong_position``; rows would be skipped or written twice.
        """
        if position != self.length:
            raise EngineError(
                "wrong_position",
                f"Rows came for position {position} of a sequence that holds {self.length}.",
                "Truncate the cache to replay a sequence.",
            )
        self._check_room(position + count)
        while len(self.blocks) * BLOCK_ROWS < position + count:
            self.blocks.append(KVBlock(self.layout, self._device))

    def write(self, layer: int, position: int, kv: Tensor) -> None:
        """Put rows (n, 2, J, h) f32, keys before values, at ``position``; they were reserved and lie in one block."""
        self.blocks[position // BLOCK_ROWS].write(layer, position % BLOCK_ROWS, kv)

    def commit(self, count: int) -> None:
        """``count`` more rows are complete in every layer."""
        self.length += count

    def truncate(self, position: int) -> None:
        """Forget the rows from ``position`` on; a replay goes on from there."""
        self._check_cut(position)
        whole, rest = divmod(position, BLOCK_ROWS)
        del self.blocks[whole + (rest > 0) :]
        if rest and position < self.length:
            if whole < self._shared:
                self.blocks[whole] = self.blocks[whole].copy()
            self.blocks[whole].clear(rest, min(self.length - whole * BLOCK_ROWS, BLOCK_ROWS))
        self._shared = min(self._shared, whole)
        self.length = position

    def discard(self) -> None:
        """Clear what an attempt that failed may have written after the last row."""
        whole, rest = divmod(self.length, BLOCK_ROWS)
        del self.blocks[whole + (rest > 0) :]
        if rest:
            self.blocks[whole].clear(rest)

    def _check_cut(self, position: int) -> None:
        if not 0 <= position <= self.length:
            raise EngineError("wrong_position", f"A sequence of {self.length} positions cannot be cut at {position}.")

    def _check_room(self, end: int) -> None:
        if end > self.capacity:
            raise RequestError(
                "context_length_exceeded",
                f"The sequence would have {end} positions; {self.capacity} were reserved for it.",
                "Shorten the prompt or ask for fewer tokens.",
            )


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one sequence inside a batch: positions ``[position, position + rows)`` of ``cache``."""

    cache: KVCache
    position: int
    rows: int


def positions(spans: Sequence[Span]) -> Tensor:
    """The position of each row of ``spans``, (T,) int64."""
    each = [torch.arange(span.position, span.position + span.rows) for span in spans]
    return each[0] if len(each) == 1 else torch.cat(each)


def blocks_end(position: int) -> int:
    """``position`` rounded up to whole blocks."""
    return -(-position // BLOCK_ROWS) * BLOCK_ROWS
