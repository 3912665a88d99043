"""Keys and values of one sequence, for the layers of one stage."""

from __future__ import annotations

import torch
from torch import Tensor

from kvasir_console.errors import EngineError, RequestError

BLOCK_ROWS = 256
"""Rows are allocated, and attended to, in blocks of this many positions."""


class KVCache:
    """Rows ``[0, length)`` of keys and values, up to ``capacity`` positions; memory grows by the block.

    A forward pass reserves its rows, writes them layer by layer, and commits them at its end. Rows past ``length`` are
    zero or left from an attempt that failed: attention masks them, so they only have to be finite.
    """

    __slots__ = ("_device", "_keys", "_values", "_width", "capacity", "length")

    def __init__(
        self, n_layer: int, n_head_kv: int, head_dim: int, capacity: int, *, device: torch.device | str = "cpu"
    ) -> None:
        if capacity < 1:
            raise RequestError("bad_capacity", f"A sequence of {capacity} positions cannot be opened.")
        self.capacity = capacity
        self.length = 0
        self._width = (n_head_kv, head_dim)
        self._device = device
        empty = torch.empty(0, n_head_kv, head_dim, dtype=torch.float32, device=device)
        self._keys = [empty] * n_layer
        self._values = [empty] * n_layer

    @property
    def n_bytes(self) -> int:
        """Bytes allocated now."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

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
        end = position + count
        if end > self.capacity:
            raise RequestError(
                "context_length_exceeded",
                f"The sequence would have {end} positions; {self.capacity} were reserved for it.",
                "Shorten the prompt or ask for fewer tokens.",
            )
        rows = blocks_end(end)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                if len(old) < rows:
                    tensors[layer] = torch.zeros(rows, *self._width, dtype=torch.float32, device=self._device)
                    tensors[layer][: self.length] = old[: self.length]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows (T, J, h) after the committed ones; returns keys and values (S, J, h) of all blocks so far.

        ``layer`` counts from the stage's first; J is ``n_head_kv``, h ``head_dim``, and S the positions up to the end
        of the last row's block.
        """
        end = self.length + len(keys)
        self._keys[layer][self.length : end] = keys
        self._values[layer][self.length : end] = values
        rows = blocks_end(end)
        return self._keys[layer][:rows], self._values[layer][:rows]

    def commit(self, count: int) -> None:
        """``count`` more rows are complete in every layer."""
        self.length += count

    def truncate(self, position: int) -> None:
        """Forget the rows from ``position`` on; a replay goes on from there."""
        if not 0 <= position <= self.length:
            raise EngineError("wrong_position", f"A sequence of {self.length} positions cannot be cut at {position}.")
        for tensor in (*self._keys, *self._values):
            tensor[position:] = 0
        self.length = position


def blocks_end(position: int) -> int:
    """``position`` rounded up to whole blocks."""
    return -(-position // BLOCK_ROWS) * BLOCK_ROWS
