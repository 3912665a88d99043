"""A bank of experts of one layer: the SwiGLU networks that routed rows pass through, and their weighted sum.

The same code computes experts inside a stage and on a machine that holds nothing but them. A pair is one row sent to
one expert. Pairs are computed in groups, one per expert, by ascending expert and, inside a group, in the order given.
A group's rows are products of their own (see ``kernels``), so its outputs have the same bits wherever the same group
is computed, whatever other groups come with it. Weights are applied by a multiplication and an addition, each rounded,
in the order of the pairs: two holders with one pair of a row each give, added, the bits of one holder with both. With
three pairs or more of a row, the association of the additions differs, and with it the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.window import expert_ranges
from kvasir_console.engine.kernels import linear, pad_rows, swiglu
from kvasir_console.engine.weights import OnRead, read_rows, storage_bytes
from kvasir_console.errors import RequestError

ExpertCompute = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, x (T, D) f32, ids (T, K) int64 of the whole layer, weights (T, K) f32)`` to the weighted sum (T, D) f32."""

Indices = np.ndarray[Any, np.dtype[np.int64]]


class ExpertBank:
    """The experts ``[begin, end)`` of one layer, in float32."""

    __slots__ = ("_down", "_gate_up", "begin", "end", "layer", "n_embd", "n_ff")

    def __init__(self, layer: int, begin: int, end: int, gate_up: Tensor, down: Tensor) -> None:
        self.layer, self.begin, self.end = layer, begin, end
        self.n_embd, self.n_ff = down.shape[1], down.shape[2]
        self._gate_up = gate_up  # (E, 2F, D)
        self._down = down  # (E, D, F)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layer: int,
        begin: int,
        end: int,
        *,
        device: torch.device | str = "cpu",
        on_read: OnRead | None = None,
    ) -> ExpertBank:
        """Read the experts ``[begin, end)`` of ``layer``, and nothing else, from a model, a stage or a shard of it.

        Raises:
            ModelError: the file does not hold them, or in a type that cannot be read.
        """
        gate, up, down = expert_ranges(checkpoint, layer, begin, end)
        n_embd, n_ff = gate[0].dims[:2]
        count = end - begin
        # Input-major, like every matrix that multiplies rows (see ``weights``).
        weights_in = torch.empty(count, n_embd, 2 * n_ff, dtype=torch.float32, device=device).mT
        weights_out = torch.empty(count, n_ff, n_embd, dtype=torch.float32, device=device).mT
        for (tensor, first, last), place in (
            (gate, weights_in[:, :n_ff]),
            (up, weights_in[:, n_ff:]),
            (down, weights_out),
        ):
            expert_bytes = (last - first) // count
            for expert in range(count):
                at = first + expert * expert_bytes
                read_rows(checkpoint, tensor, place[expert], first_byte=at, on_read=on_read)
        return cls(layer, begin, end, weights_in, weights_out)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The three tensors by their names in the file: gate and up (E, F, D), down (E, D, F)."""
        yield f"blk.{self.layer}.ffn_gate_exps.weight", self._gate_up[:, : self.n_ff]
        yield f"blk.{self.layer}.ffn_up_exps.weight", self._gate_up[:, self.n_ff :]
        yield f"blk.{self.layer}.ffn_down_exps.weight", self._down

    @property
    def tensor_bytes(self) -> int:
        """Bytes of weights held."""
        return storage_bytes((self._gate_up, self._down))

    def outputs(self, rows: Tensor, row_idx: Tensor, ids: Tensor) -> Tensor:
        """What each expert answers, without weights.

        Args:
            rows: (R, D) f32.
            row_idx: (P,) the row of each pair, in [0, R).
            ids: (P,) the expert of each pair, counted from ``begin``.

        Returns:
            (P, D) f32, on the bank's device.

        Raises:
            RequestError: ``pair_out_of_range``; a row or an expert that is not there.
        """
        pair_rows, pair_ids = _indices(row_idx), _indices(ids)
        _check_range("row", pair_rows, rows.shape[0])
        _check_range("expert", pair_ids, self.end - self.begin)
        rows = rows.to(self._down.device)
        out = rows.new_empty(len(pair_ids), self.n_embd)
        for expert, pairs in _groups(pair_ids):
            x = pad_rows(rows[torch.from_numpy(pair_rows[pairs])])  # (n', D)
            hidden = swiglu(linear(x, self._gate_up[expert]))  # (n', F)
            out[torch.from_numpy(pairs)] = linear(hidden, self._down[expert])[: len(pairs)]
        return out

    def weighted_sum(self, rows: Tensor, row_idx: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """For each row, its pairs' outputs times their ``weights`` (P,), added to zero in the order of the pairs.

        Returns:
            (R, D) f32, on the bank's device; zeros for a row without pairs.

        Raises:
            RequestError: ``pair_out_of_range``.
        """
        terms = self.outputs(rows, row_idx, ids)
        terms *= weights.to(terms.device).unsqueeze(1)
        return _sum_by_row(terms, _indices(row_idx), rows.shape[0])

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``ExpertCompute`` for a bank that holds the whole layer: (T, D), (T, K) and (T, K) to (T, D)."""
        T, K = ids.shape
        row_idx = torch.arange(T).repeat_interleave(K)
        return self.weighted_sum(x, row_idx, ids.reshape(-1) - self.begin, weights.reshape(-1))


def _indices(values: Tensor) -> Indices:
    return values.to(device="cpu", dtype=torch.int64).numpy()


def _check_range(what: str, values: Indices, limit: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= limit):
        raise RequestError("pair_out_of_range", f"A pair names a {what} outside [0, {limit}).")


def _groups(ids: Indices) -> Iterator[tuple[int, Indices]]:
    """Each distinct id, ascending, with the places where it stands, ascending."""
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    for pairs in np.split(order, starts[1:]) if len(ids) else ():
        yield int(ids[pairs[0]]), pairs


def _sum_by_row(terms: Tensor, row_idx: Indices, n_rows: int) -> Tensor:
    """(P, D) to (n_rows, D). The first terms of all rows are added at once, then the second ones, and so on: no two of
    a turn share a row, so nothing depends on a scatter's order."""
    out = terms.new_zeros(n_rows, terms.shape[1])
    order = np.argsort(row_idx, kind="stable")
    by_row = row_idx[order]
    turns = np.arange(len(order)) - np.searchsorted(by_row, by_row)
    for turn in range(int(turns.max(initial=-1)) + 1):
        pairs = order[turns == turn]
        rows = torch.from_numpy(row_idx[pairs])
        out[rows] = out[rows] + terms[torch.from_numpy(pairs)]
    return out
