"""Pairs of a layer's step, and their sum such that no token depends on who computed which of them.

With one or two experts a token, a worker may add its own pairs of a row: however two terms are split, their sum is the
same. With more, the association of additions matters, so every pair travels as a row of its own and all terms are
added here, in the order in which the router chose them: the bits are those of the local computation for any number of
experts and any placement. It costs bytes only where one worker holds several of a row's experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_console.engine.experts import ExpertBank

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
EXACT_GROUPS = 2
"""So many terms have the same sum in any grouping."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Some of a step's pairs of one layer: (P,) each."""

    place: I64
    """Among the T K pairs of the step."""
    rows: I64
    """In the step's batch."""
    ids: I64
    """Experts of the whole layer."""
    weights: F32

    @classmethod
    def of(cls, ids: Tensor, weights: Tensor) -> Pairs:
        """All pairs of (T, K) experts and weights."""
        T, K = ids.shape
        place = np.arange(T * K)
        flat = np.ascontiguousarray(weights.reshape(-1).float().cpu().numpy())
        return cls(place, place // K, ids.reshape(-1).cpu().numpy().astype(np.int64), flat)

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, which: NDArray[np.bool_] | I64) -> Pairs:
        return Pairs(self.place[which], self.rows[which], self.ids[which], self.weights[which])

    def terms(self, bank: ExpertBank, x: Tensor) -> Tensor:
        """(P, D) weighted outputs, computed here; ``x`` are the rows that ``rows`` index."""
        outputs = bank.outputs(x, torch.from_numpy(self.rows), torch.from_numpy(self.ids - bank.begin))
        return outputs * torch.from_numpy(self.weights).to(outputs.device).unsqueeze(1)


class Sum(Protocol):
    """The weighted sum of a step's pairs as they come in."""

    def frame(self, pairs: Pairs) -> tuple[I64, I64]:
        """How to ask for ``pairs``: (R,) rows of the batch to send, and (P,) which of those each pair is of."""

    def local(self, bank: ExpertBank, x: Tensor, pairs: Pairs) -> None:
        """Compute ``pairs`` here and add them."""

    def remote(self, pairs: Pairs, sent: I64, values: F32) -> None:
        """Add an answer (R, D) to a frame of ``pairs`` whose rows were ``sent``."""

    def result(self) -> Tensor:
        """(T, D)"""


class GroupedSum:
    """Sums by holder, for at most two pairs a row."""

    def __init__(self, x: Tensor) -> None:
        self._out = torch.zeros_like(x)

    def frame(self, pairs: Pairs) -> tuple[I64, I64]:
        sent, row_idx = np.unique(pairs.rows, return_inverse=True)
        return sent, row_idx.astype(np.int64)

    def local(self, bank: ExpertBank, x: Tensor, pairs: Pairs) -> None:
        rows, ids = torch.from_numpy(pairs.rows), torch.from_numpy(pairs.ids - bank.begin)
        self._out += bank.weighted_sum(x, rows, ids, torch.from_numpy(pairs.weights)).to(self._out.device)

    def remote(self, pairs: Pairs, sent: I64, values: F32) -> None:  # noqa: ARG002 - the frame says it
        self._out[torch.from_numpy(sent)] += torch.from_numpy(values).to(self._out.device)

    def result(self) -> Tensor:
        return self._out


class PairedSum:
    """A term a pair, added in order at the end, for any number of pairs a row."""

    def __init__(self, x: Tensor, n_used: int) -> None:
        self._shape = (x.shape[0], n_used, x.shape[1])
        self._terms = x.new_zeros(x.shape[0] * n_used, x.shape[1])

    def frame(self, pairs: Pairs) -> tuple[I64, I64]:
        return pairs.rows, np.arange(len(pairs))

    def local(self, bank: ExpertBank, x: Tensor, pairs: Pairs) -> None:
        self._terms[torch.from_numpy(pairs.place)] = pairs.terms(bank, x).to(self._terms.device)

    def remote(self, pairs: Pairs, sent: I64, values: F32) -> None:  # noqa: ARG002 - the pairs say it
        self._terms[torch.from_numpy(pairs.place)] = torch.from_numpy(values).to(self._terms.device)

    def result(self) -> Tensor:
        terms = self._terms.view(self._shape)
        out = torch.zeros_like(terms[:, 0])
        for slot in range(self._shape[1]):
            out = out + terms[:, slot]
        return out


def empty_sum(x: Tensor, n_used: int) -> Sum:
    """For rows ``x`` (T, D) with ``n_used`` pairs each."""
    return GroupedSum(x) if n_used <= EXACT_GROUPS else PairedSum(x, n_used)
