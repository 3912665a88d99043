"""Causal attention of a batch's rows, each to the rows of its own sequence.

``Attention`` is made once for a forward pass and called for every layer. Rows of one sequence that lie in one KV block
are a *piece*, computed together; its products are over whole blocks, the later positions masked, and its rows are
padded to a multiple of ``ROW_TILE``. So a row's bits depend neither on the sequences it comes with nor on where its own
sequence was cut.

Dimensions: T rows of the batch, n of a piece (n' padded), H query heads, J key-value heads, G = H / J, h head_dim,
S positions in the blocks that a piece looks at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_console.engine.kernels import ROW_TILE, tile_rows
from kvasir_console.engine.kvcache import BLOCK_ROWS, KVCache, Span

_SCORES = 1 << 23
"""Scores computed at a time, unless one key-value head has more: 32 MiB."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``[at, at + rows)`` of the batch: positions from ``position`` on, all in one block of ``cache``."""

    cache: KVCache
    position: int
    at: int
    rows: int
    first_block: int
    last_block: int
    mask: Tensor  # (G n', S): 0 where a row may look, minus infinity elsewhere


class Attention:
    """Attention of the rows of ``spans``, H query heads over the J key-value heads of their caches.

    Args:
        scale: what scores are multiplied by before the softmax.
        window: a row sees this many positions, itself included; ``None`` for all before it.
    """

    def __init__(
        self, spans: Sequence[Span], n_head: int, scale: float, device: torch.device, *, window: int | None = None
    ) -> None:
        self._scale = scale
        self._pieces = [
            _piece(span, at, begin, end, n_head // span.cache.layout.n_head_kv, window, device)
            for span, at in zip(spans, _starts(spans), strict=True)
            for begin, end in block_cuts(span.position, span.position + span.rows)
        ]

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Keep the keys and values of ``layer`` (counted in the stage), and attend.

        Args:
            q: (T, H, h), rotated.
            kv: (T, 2, J, h), keys (rotated) before values.

        Returns:
            (T, H h).
        """
        for piece in self._pieces:
            piece.cache.write(layer, piece.position, kv[piece.at : piece.at + piece.rows])
        mixed = [self._attend(layer, piece, q[piece.at : piece.at + piece.rows]) for piece in self._pieces]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend(self, layer: int, piece: _Piece, q: Tensor) -> Tensor:
        """(n, H, h) to (n, H h)."""
        blocks = [block.read(layer) for block in piece.cache.blocks[piece.first_block : piece.last_block + 1]]
        J, h = blocks[0].shape[1], q.shape[2]
        q = tile_rows(q)
        rows, G = len(q), q.shape[1] // J
        # One product covers the G queries of each row, so G would decide which rows are few if they were not padded.
        q = q.view(rows, J, G, h).permute(1, 2, 0, 3).reshape(J, G * rows, h)
        heads = max(1, _SCORES // piece.mask.numel())
        mixed = [_mix(q[j : j + heads], [block[:, j : j + heads] for block in blocks], piece.mask, self._scale)
                 for j in range(0, J, heads)]  # fmt: skip
        whole = (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).view(J, G, rows, h)
        return whole[:, :, : piece.rows].permute(2, 0, 1, 3).reshape(piece.rows, J * G * h)


def _mix(q: Tensor, blocks: list[Tensor], mask: Tensor, scale: float) -> Tensor:
    """Queries (j, G n', h) over blocks of keys and values (2, j, 256, h) to (j, G n', h)."""
    masks = torch.split(mask, BLOCK_ROWS, dim=1)
    scores = [
        torch.baddbmm(part.expand(len(q), -1, -1), q, keys.mT, alpha=scale)
        for part, (keys, _) in zip(masks, blocks, strict=True)
    ]
    attention = (scores[0] if len(scores) == 1 else torch.cat(scores, dim=2)).softmax(dim=-1)
    mixed = torch.bmm(attention[:, :, :BLOCK_ROWS], blocks[0][1])
    for index, (_, values) in enumerate(blocks[1:], 1):
        mixed = mixed.baddbmm_(attention[:, :, index * BLOCK_ROWS : (index + 1) * BLOCK_ROWS], values)
    return mixed


def _piece(span: Span, at: int, begin: int, end: int, G: int, window: int | None, device: torch.device) -> _Piece:
    last_block = (end - 1) // BLOCK_ROWS
    # The same for every row of the block, so that a row has its bits in any piece.
    first_block = 0 if window is None else max(0, (last_block * BLOCK_ROWS - window + 1) // BLOCK_ROWS)
    count = end - begin + -(end - begin) % ROW_TILE
    rows = torch.arange(begin, begin + count, device=device).unsqueeze(1)
    seen = torch.arange(first_block * BLOCK_ROWS, (last_block + 1) * BLOCK_ROWS, device=device)
    hidden = seen > rows
    if window is not None:
        hidden |= seen <= rows - window
    mask = torch.zeros(count, len(seen), device=device).masked_fill_(hidden, -math.inf).repeat(G, 1)
    return _Piece(span.cache, begin, at + begin - span.position, end - begin, first_block, last_block, mask)


def _starts(spans: Sequence[Span]) -> Iterator[int]:
    at = 0
    for span in spans:
        yield at
        at += span.rows


def block_cuts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """``[begin, end)`` cut at multiples of ``BLOCK_ROWS``."""
    while begin < end:
        cut = min(end, (begin // BLOCK_ROWS + 1) * BLOCK_ROWS)
        yield begin, cut
        begin = cut
