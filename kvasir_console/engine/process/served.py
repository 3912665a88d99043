"""What a worker serves, how a request is computed, and what is counted of it, whatever wire it came on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.process.link import F32Array
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.dispatch_v3 import HeldSlice

BLOCK_PAIRS = 8192
"""Pairs that are computed at a time: the outputs of all pairs of a request may take a thousand times its own bytes."""


@dataclass(slots=True)
class Served:
    """What this worker answered over its life."""

    requests: int = 0
    rows: int = 0
    pairs: int = 0
    rejected: int = 0
    """Requests refused, and connections closed for breaking the contract."""
    cancelled: int = 0

    def count(self, request: Request) -> None:
        self.requests += 1
        self.rows += request.n_rows
        self.pairs += request.n_pairs


@dataclass(frozen=True, slots=True)
class ServedSlice:
    """What a session may ask of a bank."""

    bank: ExpertBank
    held: HeldSlice


@dataclass(frozen=True, slots=True)
class HeldBank:
    """A bank, the model it is of, and the digest of the shard it was read from (zero: not known)."""

    bank: ExpertBank
    model_digest: bytes
    digest: bytes = bytes(32)

    def slice(self, model_digest: bytes, layer: int, begin: int, end: int) -> ServedSlice | None:
        """The experts [begin, end) of ``layer``, if they are held here."""
        bank = self.bank
        if (self.model_digest, bank.layer) != (model_digest, layer) or not bank.begin <= begin < end <= bank.end:
            return None
        whole = (bank.begin, bank.end) == (begin, end)
        return ServedSlice(bank, HeldSlice(layer, begin, end, self.digest if whole else bytes(32)))


def expert_reply(bank: ExpertBank, request: Request, begin: int) -> F32Array:
    """The reply's values: (pairs, D) raw outputs for v1, (rows, D) weighted sums otherwise; f32.

    ``begin`` is the expert of the layer that the request's ids count from.
    """
    rows = torch.from_numpy(np.array(request.rows, dtype=np.float32))
    row_idx = torch.from_numpy(request.row_idx.astype(np.int64))
    ids = torch.from_numpy(request.ids.astype(np.int64) + (begin - bank.begin))
    if request.weights is None:
        out = bank.outputs(rows, row_idx, ids)
    else:
        weights = torch.from_numpy(np.array(request.weights, dtype=np.float32))
        out = _weighted_sum(bank, rows, row_idx, ids, weights)
    values: F32Array = out.cpu().numpy()
    return values


def _weighted_sum(bank: ExpertBank, rows: Tensor, row_idx: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """``bank.weighted_sum``, of many pairs row after row: a row's are summed at once if a block holds them."""
    if len(ids) <= BLOCK_PAIRS:
        return bank.weighted_sum(rows, row_idx, ids, weights)
    order = torch.argsort(row_idx, stable=True)
    by_row = row_idx[order]
    out = torch.zeros(rows.shape[0], bank.n_embd)
    begin = 0
    while begin < len(order):
        end = min(begin + BLOCK_PAIRS, len(order))
        if end < len(order):
            cut = int(torch.searchsorted(by_row, by_row[end]))  # where the row begins that would be cut
            end = cut if cut > begin else end
        some = order[begin:end]
        first, last = int(by_row[begin]), int(by_row[end - 1]) + 1
        sums = bank.weighted_sum(rows[first:last], row_idx[some] - first, ids[some], weights[some])
        out[first:last] += sums.to(out.device)
        begin = end
    return out
