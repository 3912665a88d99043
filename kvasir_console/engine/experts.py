"""A bank of experts of one layer: the SwiGLU networks that routed rows pass through, and their weighted sum.

The same code computes experts inside a stage and on a machine that holds nothing but them. A pair is one row sent to
one expert. Pairs are computed in groups, one per expert, by ascending expert and, inside a group, in the order given.
A group's rows are products of their own (see ``kernels``), so its outputs have the same bits wherever the same group
is computed, whatever other groups come with it. Weights are applied by a multiplication and an addition, each rounded,
in the order of the pairs: two holders with one pair of a row each give, added, the bits of one holder with both. With
three pairs or more of a row, the association of the additions differs, and with it the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.gguf import Checkpoint, TensorInfo
from kvasir_console.engine.checkpoint.shard_info import EXPERT_TENSORS
from kvasir_console.engine.checkpoint.window import expert_ranges
from kvasir_console.engine.forms import REFERENCE, Forms
from kvasir_console.engine.kernels import swiglu
from kvasir_console.engine.linear import Linear, Rows
from kvasir_console.engine.native import Library, NativeExperts, NativeLinear
from kvasir_console.engine.native.experts import weighted_sum
from kvasir_console.engine.weights import Holding, OnRead, stored_rows
from kvasir_console.errors import RequestError

ExpertCompute = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, x (T, D) f32, ids (T, K) int64 of the whole layer, weights (T, K) f32)`` to the weighted sum (T, D) f32."""


@dataclass(frozen=True, slots=True)
class RemoteExperts:
    """An ``ExpertCompute`` that is only needed for some ``layers``: the others' experts are the window's own."""

    compute: ExpertCompute
    layers: frozenset[int]

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.compute(layer, x, ids, weights)


Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Expert:
    """One SwiGLU network."""

    gate_up: Linear  # (2F, D)
    down: Linear  # (D, F)

    def __call__(self, x: Tensor) -> Tensor:
        """(R, D) to (R, D)."""
        return self.down(swiglu(self.gate_up(x)))


class ExpertBank:
    """The experts ``[begin, end)`` of one layer."""

    def __init__(
        self,
        layer: int,
        begin: int,
        end: int,
        experts: Sequence[Expert],
        device: torch.device | str = "cpu",
        library: Library | None = None,
    ) -> None:
        self.layer, self.begin, self.end = layer, begin, end
        self.n_embd, self.n_ff = experts[0].down.n_out, experts[0].down.n_in
        self.pairs = np.zeros(end - begin, dtype=np.int64)
        """Pairs that each expert has computed."""
        self._experts = experts
        self._device = device
        self._library = library
        self.compiled = None if library is None else _compiled(experts, library)
        """The experts as the compiled kernels take them, if all are in their form."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        layer: int,
        begin: int,
        end: int,
        *,
        forms: Forms = REFERENCE,
        device: torch.device | str = "cpu",
        on_read: OnRead | None = None,
    ) -> ExpertBank:
        """Read the experts ``[begin, end)`` of ``layer``, and nothing else, from a model, a stage or a shard of it.

        Raises:
            ModelError: the file does not hold them, or in a type that cannot be read.
        """
        gate, up, down = expert_ranges(checkpoint, layer, begin, end)

        def rows(which: tuple[TensorInfo, int, int], expert: int) -> Rows:
            tensor, first, last = which
            expert_bytes = (last - first) // (end - begin)
            at = first + expert * expert_bytes
            return stored_rows(checkpoint, tensor, at, at + expert_bytes, on_read)

        experts = [
            Expert(
                gate_up=forms.linear([rows(gate, expert), rows(up, expert)], device),
                down=forms.linear([rows(down, expert)], device),
            )
            for expert in range(end - begin)
        ]
        return cls(layer, begin, end, experts, device, forms.library)

    @property
    def holdings(self) -> list[Holding]:
        """What is held of the layer's three tensors, expert by expert."""
        gate, up, down = (f"blk.{self.layer}.{part}.weight" for part in EXPERT_TENSORS)
        each = [
            (
                Holding((gate, up), (self.n_ff, self.n_ff), expert.gate_up),
                Holding((down,), (self.n_embd,), expert.down),
            )
            for expert in self._experts
        ]
        return [holding for pair in each for holding in pair]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The storages of each expert in turn, by the names of the tensors in the file."""
        for holding in self.holdings:
            yield from holding.named_tensors()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of weights held."""
        return sum(holding.n_bytes for holding in self.holdings)

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
        rows = rows.to(self._device)
        self.pairs += np.bincount(pair_ids, minlength=len(self.pairs))
        if self.compiled is not None:
            return self.compiled.outputs(rows.contiguous(), torch.from_numpy(pair_rows), torch.from_numpy(pair_ids))
        if len(rows) == 1 and len(set(pair_ids.tolist())) == len(pair_ids):
            each = [self._experts[expert](rows) for expert in pair_ids.tolist()]
            return torch.cat(each) if each else rows.new_empty(0, self.n_embd)
        out = rows.new_empty(len(pair_ids), self.n_embd)
        for expert, pairs in _groups(pair_ids):
            out[torch.from_numpy(pairs)] = self._experts[expert](rows[torch.from_numpy(pair_rows[pairs])])
        return out

    def weighted_sum(self, rows: Tensor, row_idx: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """For each row, its pairs' outputs times their ``weights`` (P,), added to zero in the order of the pairs.

        Returns:
            (R, D) f32, on the bank's device; zeros for a row without pairs.

        Raises:
            RequestError: ``pair_out_of_range``.
        """
        terms = self.outputs(rows, row_idx, ids)
        if self._library is not None and self.compiled is not None:
            pair_rows = torch.from_numpy(_indices(row_idx))
            return weighted_sum(
                self._library, terms, pair_rows, weights.to(terms.device).float().contiguous(), rows.shape[0]
            )
        terms *= weights.to(terms.device).unsqueeze(1)
        return _sum_by_row(terms, _indices(row_idx), rows.shape[0])

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``ExpertCompute`` for a bank that holds the whole layer: (T, D), (T, K) and (T, K) to (T, D)."""
        T, K = ids.shape
        if T == 1 and self.compiled is None and x.device == weights.device == torch.device(self._device):
            chosen = [expert - self.begin for expert in ids[0].tolist()]  # decoding: the same, without its indices
            self.pairs[chosen] += 1
            terms = [self._experts[expert](x) * weight for expert, weight in zip(chosen, weights[0], strict=True)]
            total: Tensor = functools.reduce(torch.add, terms)
            return total
        row_idx = torch.arange(T).repeat_interleave(K)
        return self.weighted_sum(x, row_idx, ids.reshape(-1) - self.begin, weights.reshape(-1))


def local_experts(banks: Mapping[int, ExpertBank]) -> ExpertCompute:
    """Computes each layer's experts by its bank, which holds all of them; the sum is on the device of ``x``."""

    def compute(layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return banks[layer].routed(x, ids, weights).to(x.device)

    return compute


def _compiled(experts: Sequence[Expert], library: Library) -> NativeExperts | None:
    gate_up = [expert.gate_up for expert in experts if isinstance(expert.gate_up, NativeLinear)]
    down = [expert.down for expert in experts if isinstance(expert.down, NativeLinear)]
    if not len(gate_up) == len(down) == len(experts):
        return None
    return NativeExperts(gate_up, down, library)


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
    if n_rows == 1:  # a decode step of one sequence: the same additions without the indices
        for term in terms:
            out += term
        return out
    order = np.argsort(row_idx, kind="stable")
    by_row = row_idx[order]
    turns = np.arange(len(order)) - np.searchsorted(by_row, by_row)
    for turn in range(int(turns.max(initial=-1)) + 1):
        pairs = order[turns == turn]
        rows = torch.from_numpy(row_idx[pairs])
        out[rows] = out[rows] + terms[torch.from_numpy(pairs)]
    return out
