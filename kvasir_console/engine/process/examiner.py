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
        self._rows = checks.generator(secrets.token_hex(16) if seed is None else f"{seed}:rows")
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
        """How many pairs of an answer were found right; ``None`` if it is not to be used.

        If one was wrong, its session is quarantined. Where the reference itself is not finite (rows of a ring come from
        a stranger, who may send anything), no answer can be right or wrong.
        """
        if not len(part.drawn):
            return 0
        terms, seen = self._reference(part, worker)
        if not np.isfinite(terms).all():
            return None
        verdict = checks.judge(values[part.drawn], terms, seen.row_idx.astype(np.int64), worker.dtype)
        if verdict.fault is not None:
            self._convict(worker, part.layer, seen, values[part.drawn], terms, verdict.fault)
            return None
        if not verdict.pairs and worker.stats[part.layer].proven:
            self._sampler(key).missed += 1
        self.checked_pairs += verdict.pairs
        return verdict.pairs

    def compare(self, part: Part, rows: I64, one: Answered, other: Answered | None) -> bool:
        """Two answers to the same rows: whether they agree. If not, the first doubtful row is computed here at the next
        occasion, and whoever is wrong is caught. Without another (it was computed here, and is gone) some row is, which
        nobody can foresee: who is late on purpose would else compute just that one.

        Args:
            rows: (C,) rows of the part's frame that the answers are to.
        """
        at = int(self._rows.integers(len(one.values)))
        if other is not None:
            apart = np.flatnonzero(checks.differ(one.values, other.values, one.worker.dtype, other.worker.dtype))
            if not len(apart):
                return True
            at = int(apart[0])
        if not dispatch.fits_f16(part.request):
            return other is None  # a half-precision wire then carries f32: one row does not show which it was
        answers = [Answered(one.worker, one.values[at : at + 1], None if other is None else one.owed)]
        if other is not None:
            answers.append(Answered(other.worker, other.values[at : at + 1], other.owed))
        self._disputes.append(_Dispute(part.layer, some_rows(part.request, rows[at : at + 1]), tuple(answers)))
        return other is None

    def arbitrate(self) -> None:
        """Settle what is in doubt."""
        while self._disputes:
            dispute = self._disputes.popleft()
            self.disputes += 1
            for answered in dispute.answers:
                worker, stats = answered.worker, answered.worker.stats[dispute.layer]
                seen = as_received(worker, dispute.request)
                terms = self._terms(dispute.layer, seen)
                verdict = checks.judge(answered.values, terms, seen.row_idx.astype(np.int64), worker.dtype)
                if verdict.fault is not None:
                    self._convict(worker, dispute.layer, seen, answered.values, terms, verdict.fault)
                    continue
                self.checked_pairs += verdict.pairs
                if answered.owed is not None:
                    self._accounts.pay(stats, answered.owed, verdict.pairs)

    def _sampler(self, key: str) -> checks.Sampler:
        if key not in self._samplers:
            seed = secrets.token_hex(16) if self._seed is None else f"{self._seed}:{key}"
            self._samplers[key] = checks.Sampler(seed, self._share)
        return self._samplers[key]

    def _reference(self, part: Part, worker: Worker) -> tuple[F32, dispatch.Request]:
        """The terms of the drawn rows' pairs, and the request for them as it arrives at the worker."""
        wire = (worker.wire, worker.dtype)
        if part.reference is None or part.reference[0] != wire:
            seen = some_rows(as_received(worker, part.request), part.drawn)
            part.reference = (wire, self._terms(part.layer, seen), seen)
        return part.reference[1:]

    def _terms(self, layer: int, seen: dispatch.Request) -> F32:
        """(P, D) weighted outputs of a request's pairs, computed here."""
        row_idx, ids = seen.row_idx.astype(np.int64), seen.ids.astype(np.int64)
        pairs = Pairs(np.arange(seen.n_pairs), row_idx, ids, _weights(seen))
        bank = self._stage.banks[layer]
        terms: F32 = pairs.terms(bank, torch.from_numpy(seen.rows)).float().cpu().numpy()
        bank.pairs -= np.bincount(ids - bank.begin, minlength=len(bank.pairs))  # looked at, not chosen to be here
        return terms

    def _convict(
        self, worker: Worker, layer: int, seen: dispatch.Request, values: F32, terms: F32, fault: checks.Fault
    ) -> None:
        self.mismatches += 1
        worker.stats[layer].mismatches += 1
        seen, values, terms = _around(seen, values, terms, fault.row)
        case = evidence.Case(
            session=worker.name,
            wallet=worker.wallet,
            layer=layer,
            wire=(worker.wire.name or "").lower(),
            model_digest=self._digest.hex(),
            fault=str(fault),
            at_unix_s=time.time(),
            rows=seen.rows,
            row_idx=seen.row_idx.astype(np.int64),
            ids=seen.ids.astype(np.int64),
            weights=_weights(seen),
            answered=values,
            terms=terms,
        )
        kept = None if self._evidence is None else evidence.keep(self._evidence, case)
        path, digest = kept or (None, "")
        # Before the verdict: whoever reads that it is quarantined reads why.
        self._accounts.keep_case(worker.name, worker.wallet, str(fault), str(path or ""), digest)
        voided = self._accounts.convict(worker.name, worker.wallet) or 0
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


def some_rows(request: dispatch.Request, rows: I64) -> dispatch.Request:
    """The request for some ``rows`` (ascending) of another, with all their pairs."""
    which = np.flatnonzero(np.isin(request.row_idx, rows))
    return dispatch.Request(
        request.wire,
        np.ascontiguousarray(request.rows[rows]),
        np.searchsorted(rows, request.row_idx[which]).astype(np.int32),
        request.ids[which],
        _weights(request)[which],
    )


def _around(seen: dispatch.Request, values: F32, terms: F32, row: int) -> tuple[dispatch.Request, F32, F32]:
    """As much of a judged request as is kept: the guilty row and those after it."""
    kept = np.arange(row, min(row + evidence.MAX_ROWS, len(values)))
    return some_rows(seen, kept), values[kept], terms[np.isin(seen.row_idx, kept)]


def as_received(worker: Worker, request: dispatch.Request) -> dispatch.Request:
    """A request with rows and weights as they arrive at a worker."""
    rows, weights = worker.as_received(request)
    return dispatch.Request(request.wire, rows, request.row_idx, request.ids, weights)


def _weights(request: dispatch.Request) -> F32:
    if request.weights is None:
        raise ValueError("a request without weights has no weighted sums")
    return request.weights
