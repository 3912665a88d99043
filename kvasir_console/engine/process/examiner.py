"""Looks at answers with the local experts: the references of drawn rows, verdicts, disputes between workers.

On the compute thread, but ``compare``, which leaves word for it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir_console.engine.process import checks, evidence
from kvasir_console.engine.process.accounts import Accounts
from kvasir_console.engine.process.star import Part
from kvasir_console.engine.process.sums import F32, I64, Pairs
from kvasir_console.engine.process.worker import Worker
from kvasir_console.engine.stage import Stage
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Wire

log = logging.getLogger(__name__)

MAX_DISPUTES = 16

Caught = Callable[[Worker, dict[str, Any]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """One row's worth of an answer that is in doubt."""

    worker: Worker
    values: F32
    """(C, D)"""
    owed: dispatch.Request | None = None
    """Paid if the answer turns out right; ``None`` if it was paid."""


@dataclass(frozen=True, slots=True, eq=False)
class _Dispute:
    layer: int
    request: dispatch.Request
    answers: tuple[Answered, ...]


class Examiner:
    """
    Args:
        caught: told, on the compute thread, whom it caught and the facts.
    """

    def __init__(
        self,
        stage: Stage,
        model_digest: bytes,
        accounts: Accounts,
        *,
        share: float,
        seed: int | None,
        evidence_directory: Path | None,
        caught: Caught,
    ) -> None:
        self._stage = stage
        self._digest = model_digest
        self._accounts = accounts
        self._share = share
        self._seed = seed
        self._evidence = evidence_directory
        self._caught = caught
        self._samplers: dict[str, checks.Sampler] = {}
        self._disputes: deque[_Dispute] = deque(maxlen=MAX_DISPUTES)
        self.checked_pairs = 0
        self.mismatches = 0
        self.disputes = 0

    def draw(self, key: str, worker: Worker, layer: int, row_idx: I64, n_rows: int) -> I64:
        """The rows of a frame to look at: all of them until the slice is proven."""
        if not worker.stats[layer].proven:
            return np.arange(n_rows)
        drawn: I64 = np.unique(row_idx[self._sampler(key).draw(len(row_idx))])
        return drawn

    def prepare(self, part: Part, worker: Worker) -> None:
        """Compute the references of the drawn rows, from the rows as ``worker`` sees them."""
        if len(part.drawn):
            self._reference(part, worker)

    def passes(self, key: str, worker: Worker, part: Part, values: F32) -> int | None:
        """How many pairs of an answer were found right; ``None``, and its session is quarantined, if one was not."""
        if not len(part.drawn):
            return 0
        terms, row_idx = self._reference(part, worker)
        verdict = checks.judge(values[part.drawn], terms, row_idx, dtype_of(worker))
        if verdict.fault is not None:
            self._convict(worker, part.layer, some_rows(part, part.drawn), values[part.drawn], terms, verdict.fault)
            return None
        if not verdict.pairs and worker.stats[part.layer].proven:
            self._sampler(key).missed += 1
        self.checked_pairs += verdict.pairs
        return verdict.pairs

    def compare(self, part: Part, rows: I64, one: Answered, other: Answered | None) -> bool:
        """Two answers to the same rows: whether they agree. If not, the first doubtful row is computed here at the next
        occasion, and whoever is wrong is caught. Without another (it was computed here, and is gone) the first row is.

        Args:
            rows: (C,) rows of the part's frame that the answers are to.
        """
        if other is None:
            at = 0
        else:
            apart = np.flatnonzero(
                checks.differ(one.values, other.values, dtype_of(one.worker), dtype_of(other.worker))
            )
            if not len(apart):
                return True
            at = int(apart[0])
        answers = tuple(
            Answered(each.worker, each.values[at : at + 1], each.owed) for each in (one, other) if each is not None
        )
        if other is None:
            answers = (Answered(one.worker, one.values[:1]),)
        self._disputes.append(_Dispute(part.layer, some_rows(part, rows[at : at + 1]), answers))
        return other is None

    def arbitrate(self) -> None:
        """Settle what is in doubt."""
        while self._disputes:
            dispute = self._disputes.popleft()
            self.disputes += 1
            for answered in dispute.answers:
                worker, stats = answered.worker, answered.worker.stats[dispute.layer]
                terms = self._terms(dispute.layer, dispute.request, worker)
                row_idx = dispute.request.row_idx.astype(np.int64)
                verdict = checks.judge(answered.values, terms, row_idx, dtype_of(worker))
                if verdict.fault is not None:
                    self._convict(worker, dispute.layer, dispute.request, answered.values, terms, verdict.fault)
                    continue
                self.checked_pairs += verdict.pairs
                if answered.owed is not None:
                    self._accounts.pay(stats, answered.owed, verdict.pairs)

    def _sampler(self, key: str) -> checks.Sampler:
        if key not in self._samplers:
            seed = secrets.token_hex(16) if self._seed is None else f"{self._seed}:{key}"
            self._samplers[key] = checks.Sampler(seed, self._share)
        return self._samplers[key]

    def _reference(self, part: Part, worker: Worker) -> tuple[F32, I64]:
        seen = (worker.wire, worker.dtype)
        if part.reference is None or part.reference[0] != seen:
            request = some_rows(part, part.drawn)
            terms = self._terms(part.layer, request, worker)
            part.reference = (seen, terms, request.row_idx.astype(np.int64))
        return part.reference[1:]

    def _terms(self, layer: int, request: dispatch.Request, worker: Worker) -> F32:
        """(P, D) weighted outputs of a request's pairs, computed here from what arrives at the worker."""
        rows, weights = as_received(worker, request)
        pairs = Pairs(
            np.arange(request.n_pairs), request.row_idx.astype(np.int64), request.ids.astype(np.int64), weights
        )
        terms: F32 = pairs.terms(self._stage.banks[layer], torch.from_numpy(rows)).float().cpu().numpy()
        return terms

    def _convict(
        self, worker: Worker, layer: int, request: dispatch.Request, values: F32, terms: F32, fault: checks.Fault
    ) -> None:
        self.mismatches += 1
        worker.stats[layer].mismatches += 1
        voided = self._accounts.convict(worker.name, worker.wallet) or 0
        rows, weights = as_received(worker, request)
        case = evidence.Case(
            session=worker.name,
            wallet=worker.wallet,
            layer=layer,
            wire=(worker.wire.name or "").lower(),
            model_digest=self._digest.hex(),
            fault=str(fault),
            at_unix_s=time.time(),
            rows=rows,
            row_idx=request.row_idx.astype(np.int64),
            ids=request.ids.astype(np.int64),
            weights=weights,
            answered=values,
            terms=terms,
        )
        path = None if self._evidence is None else evidence.keep(self._evidence, case)
        log.warning("session %s is quarantined: %s; evidence: %s", worker.name, fault, path)
        facts = {
            "session": worker.name,
            "wallet": worker.wallet,
            "layer": layer,
            "fault": str(fault),
            "voided_bytes": voided,
            "evidence": None if path is None else str(path),
        }
        self._caught(worker, facts)


def some_rows(part: Part, rows: I64) -> dispatch.Request:
    """The request that asks for some ``rows`` (ascending) of a part's frame, with all their pairs."""
    which = np.flatnonzero(np.isin(part.row_idx, rows))
    request = part.request
    return dispatch.Request(
        request.wire,
        np.ascontiguousarray(request.rows[rows]),
        np.searchsorted(rows, part.row_idx[which]).astype(np.int32),
        request.ids[which],
        None if request.weights is None else request.weights[which],
    )


def dtype_of(worker: Worker) -> str:
    """Of a reply's values on the wire."""
    return str(getattr(worker, "dtype", "f16" if worker.wire is Wire.V2F16 else "f32"))


def as_received(worker: Worker, request: dispatch.Request) -> tuple[F32, F32]:
    """Rows and weights as they arrive at the worker."""
    if request.weights is None:
        raise ValueError("a request without weights has no weighted sums")
    if hasattr(worker, "as_received"):
        rows, weights = worker.as_received(request)
        return rows, weights
    if worker.wire is Wire.V2F16 and dispatch.fits_f16(request):
        return request.rows.astype(np.float16).astype(np.float32), request.weights.astype(np.float16).astype(np.float32)
    return request.rows, request.weights
