"""Attention over the blocks of KV caches, with keys in panels.

A block's storage has the size and the order of dimensions that ``kvcache.KVBlock`` gives it, (n_layer, 2, J, 256, h),
but inside a key-value head the keys lie as (16, h, 16): sixteen positions beside each other for every dimension. In
q8_0 the scales of keys, (256, h / 32), likewise lie as (16, h / 32, 16). ``keys_in_order`` shows them by position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kvasir_console.engine.native.library import BatchView, Library, SpanView
from kvasir_console.engine.native.linear import check_rows
from kvasir_console.errors import EngineError

__all__ = ["BLOCK_ROWS", "Batch", "BatchSpan", "attend", "keys_in_order", "write_kv"]

BLOCK_ROWS: Final = 256
_PANEL: Final = 16
_GROUP: Final = 32
_KV_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""``KVType`` of attention.h."""

BatchSpan = tuple[int, int, Sequence[Tensor], Sequence[Tensor]]
"""Rows of one sequence: its position, their number, the sequence's blocks from position 0 on, and, if the blocks are
int8, their scales."""


class Batch:
    """Rows of one or several sequences, and where their keys and values are kept. Blocks must hold all of the rows.

    Raises:
        EngineError: ``wrong_blocks``; a block has another shape, type or layout, or there are too few.
    """

    __slots__ = ("_keep", "_view", "head_dim", "n_head_kv", "n_layer", "pointer", "rows")

    def __init__(self, spans: Sequence[BatchSpan], *, n_layer: int, n_head_kv: int, head_dim: int) -> None:
        self.n_layer, self.n_head_kv, self.head_dim = n_layer, n_head_kv, head_dim
        self.rows = sum(rows for _, rows, _, _ in spans)
        shape = (n_layer, 2, n_head_kv, BLOCK_ROWS, head_dim)
        kind = spans[0][2][0].dtype if spans and spans[0][2] else torch.float32
        if (
            min(n_layer, n_head_kv, head_dim) < 1
            or kind not in _KV_TYPES
            or head_dim % (_GROUP if kind == torch.int8 else _PANEL)
        ):
            raise EngineError("wrong_blocks", f"Heads of {head_dim} values cannot be kept as {kind} here.")
        views = (SpanView * len(spans))()
        self._keep: list[object] = [views]
        for view, (position, rows, blocks, scales) in zip(views, spans, strict=True):
            if position < 0 or rows < 0 or len(blocks) * BLOCK_ROWS < position + rows:
                raise EngineError("wrong_blocks", f"{len(blocks)} blocks do not hold {rows} rows from {position} on.")
            view.position, view.rows = position, rows
            view.blocks = self._addresses(blocks, shape, kind)
            if kind == torch.int8:
                if len(scales) != len(blocks):
                    raise EngineError("wrong_blocks", f"{len(blocks)} blocks came with {len(scales)} of scales.")
                view.scales = self._addresses(scales, (*shape[:-1], head_dim // _GROUP), torch.float16)
        self._view = BatchView(_KV_TYPES[kind], n_layer, n_head_kv, head_dim, self.rows, len(spans), views)
        self.pointer = ctypes.addressof(self._view)

    def _addresses(
        self, tensors: Sequence[Tensor], shape: Sequence[int], kind: torch.dtype
    ) -> ctypes.Array[ctypes.c_void_p]:
        for tensor in tensors:
            if tensor.dtype != kind or tensor.shape != shape or not tensor.is_contiguous() or tensor.is_cuda:
                raise EngineError(
                    "wrong_blocks", f"A block is {list(tensor.shape)} {tensor.dtype}, not {list(shape)} {kind}."
                )
        addresses = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        self._keep += (addresses, tuple(tensors))
        return addresses


def write_kv(library: Library, batch: Batch, layer: int, kv: Tensor) -> None:
    """Keep keys and values of a layer, kv (R, 2, J, h) f32, keys before values; rows may lie apart."""
    J, h = batch.n_head_kv, batch.head_dim
    if (
        kv.dtype != torch.float32
        or kv.shape != (batch.rows, 2, J, h)
        or kv.stride()[1:] != (J * h, h, 1)
        or kv.device.type != "cpu"
    ):
        raise EngineError("wrong_rows", f"Keys and values of shape {list(kv.shape)} do not fit their batch.")
    _check_layer(batch, layer)
    keys = kv.data_ptr()
    library.call("kv_write", batch.pointer, layer, keys, keys + 4 * J * h, kv.stride(0))


def attend(library: Library, batch: Batch, layer: int, q: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Attention of all rows to their sequences up to themselves, whose keys and values were written before.

    Args:
        q: (R, H, h) f32, rotated; rows may lie apart.
        scale: what queries are multiplied by.
        window: a row sees this many positions, itself included; ``None`` for all before it.

    Returns:
        (R, H h) f32.
    """
    n_head, h = q.shape[1], batch.head_dim
    if (
        q.dtype != torch.float32
        or q.shape != (batch.rows, n_head, h)
        or q.stride()[1:] != (h, 1)
        or q.device.type != "cpu"
        or not n_head
        or n_head % batch.n_head_kv
        or (window is not None and window < 1)
    ):
        raise EngineError("wrong_rows", f"Queries of shape {list(q.shape)} do not fit their batch.")
    _check_layer(batch, layer)
    out = torch.empty(batch.rows, n_head * h)
    check_rows(out, n_head * h)
    library.call(
        "kv_attend", batch.pointer, layer, n_head, window or 0, scale, q.data_ptr(), q.stride(0), out.data_ptr()
    )
    return out


def keys_in_order(keys: Tensor) -> Tensor:
    """Keys of a block, or their scales, (..., 256, h) as they are stored, to (..., 256, h) by position."""
    *outer, rows, width = keys.shape
    return keys.reshape(*outer, rows // _PANEL, width, _PANEL).transpose(-1, -2).reshape(keys.shape)


def _check_layer(batch: Batch, layer: int) -> None:
    if not 0 <= layer < batch.n_layer:
        raise EngineError("wrong_blocks", f"The caches have {batch.n_layer} layers, and no layer {layer}.")
