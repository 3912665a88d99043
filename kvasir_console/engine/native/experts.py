"""Gated networks, one or a bank of them, whose matrices stay packed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvasir_console.engine.native.library import Library, NetworkView
from kvasir_console.engine.native.linear import NativeLinear, check_rows
from kvasir_console.engine.native.ops import ACTIVATIONS
from kvasir_console.errors import EngineError

__all__ = ["NativeExperts", "network_view", "weighted_sum"]


def network_view(gate_up: NativeLinear, down: NativeLinear, activation: str) -> NetworkView:
    """down(activation(gate) * up) as the kernels take it; valid while its matrices live.

    Raises:
        EngineError: ``wrong_rows``; the matrices do not fit each other.
    """
    if gate_up.n_out != 2 * down.n_in:
        raise EngineError("wrong_rows", f"A network of {gate_up.n_out} outputs cannot feed one of {down.n_in} inputs.")
    return NetworkView(gate_up.pointer, down.pointer, ACTIVATIONS[activation])


class NativeExperts:
    """Networks of one shape, down(activation(gate) * up) each, by local id."""

    __slots__ = ("_down", "_gate_up", "_library", "_views", "n_embd", "n_ff")

    def __init__(
        self,
        gate_up: Sequence[NativeLinear],
        down: Sequence[NativeLinear],
        library: Library,
        *,
        activation: str = "silu",
    ) -> None:
        self._gate_up, self._down, self._library = tuple(gate_up), tuple(down), library
        self.n_embd, self.n_ff = self._gate_up[0].n_in, self._down[0].n_in
        for first, second in zip(self._gate_up, self._down, strict=True):
            if (first.n_in, second.n_in, second.n_out) != (self.n_embd, self.n_ff, self.n_embd):
                raise EngineError("wrong_rows", "The experts of a bank must have one shape.")
        views = [network_view(*pair, activation) for pair in zip(self._gate_up, self._down, strict=True)]
        self._views = (NetworkView * len(views))(*views)

    def __len__(self) -> int:
        return len(self._views)

    @property
    def views(self) -> ctypes.Array[NetworkView]:
        """The networks as the kernels take them; valid while this object lives."""
        return self._views

    def outputs(self, rows: Tensor, row_idx: Tensor, ids: Tensor) -> Tensor:
        """What each expert answers, without weights.

        Args:
            rows: (R, n_embd) f32.
            row_idx: (P,) int64, the row of each pair.
            ids: (P,) int64, the expert of each pair.

        Returns:
            (P, n_embd) f32.

        Raises:
            EngineError: ``wrong_rows``; a row or an expert that is not there.
        """
        check_rows(rows, self.n_embd)
        _check_indices(row_idx, rows.shape[0])
        _check_indices(ids, len(self))
        if row_idx.shape != ids.shape:
            raise EngineError("wrong_rows", f"{len(row_idx)} rows came with {len(ids)} experts.")
        out = torch.empty(len(ids), self.n_embd)
        self._library.call(
            "kv_expert_outputs", self._views, rows.data_ptr(), rows.stride(0), row_idx.data_ptr(), ids.data_ptr(),
            len(ids), out.data_ptr(),
        )  # fmt: skip
        return out

    def weighted_sum(self, rows: Tensor, row_idx: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """For each row, its pairs' outputs times their ``weights`` (P,) f32, added to zero in the order of the pairs,
        each step rounded: (R, n_embd)."""
        return weighted_sum(self._library, self.outputs(rows, row_idx, ids), row_idx, weights, rows.shape[0])


def weighted_sum(library: Library, terms: Tensor, row_idx: Tensor, weights: Tensor, n_rows: int) -> Tensor:
    """(P, D) to (n_rows, D): each row's terms times their weights, added to zero in order, each step rounded.

    Raises:
        EngineError: ``wrong_rows``.
    """
    pairs, width = terms.shape
    check_rows(terms, width)
    check_rows(weights.view(1, -1), pairs)
    _check_indices(row_idx, n_rows)
    if len(row_idx) != pairs or not terms.is_contiguous():
        raise EngineError("wrong_rows", f"{len(row_idx)} rows came with {pairs} terms.")
    out = torch.empty(n_rows, width)
    library.call(
        "kv_weighted_sum", terms.data_ptr(), row_idx.data_ptr(), weights.data_ptr(), pairs, width, n_rows,
        out.data_ptr(),
    )  # fmt: skip
    return out


def _check_indices(values: Tensor, limit: int) -> None:
    if values.dtype != torch.int64 or values.dim() != 1 or not values.is_contiguous() or values.device.type != "cpu":
        raise EngineError("wrong_rows", f"Indices must be int64 side by side, not {list(values.shape)} {values.dtype}.")
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < limit:
        raise EngineError("wrong_rows", f"An index lies outside [0, {limit}).")
