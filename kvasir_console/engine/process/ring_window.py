"""What one rank of a ring keeps and computes: the caches of admitted sequences, and passes over the rows of a frame.

A frame's items are rows of several sequences, computed in one pass. Consecutive items of one sequence are a token and
a draft after it. A draft's rows that were rejected are not announced: the sequence's next rows simply begin before its
end, and what lies there is forgotten.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvasir_console.engine.kvcache import KVCache
from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.pipeline import LOGIT_BYTES, MAX_SEQUENCES, as_engine_error
from kvasir_console.engine.process.router import Router
from kvasir_console.engine.process.speculate import MAX_DRAFT
from kvasir_console.engine.process.tally import StepTally
from kvasir_console.engine.sampling import SamplingParams, sample
from kvasir_console.engine.stage import ExpertCompute, Span, Stage
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.relay.wire import ring as wire

log = logging.getLogger(__name__)

WANT_TOKEN = 1
"""Item flag: the last rank samples after this item's last row."""


@dataclass(slots=True)
class _Held:
    """What a rank keeps for one sequence. ``history`` is the tokens so far, known to the first and last rank only."""

    cache: KVCache
    sampling: SamplingParams
    history: list[int]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """A frame's rows after this rank: ``items`` that went through with their ``hidden`` rows, tokens, refusals."""

    items: tuple[wire.Item, ...]
    hidden: Tensor  # (rows of items, D)
    tokens: list[tuple[wire.Item, int]]
    errors: list[tuple[wire.Item, KvasirError]]


@dataclass(slots=True)
class _Part:
    """An item with its place in the frame's rows, and what became of it."""

    item: wire.Item
    begin: int
    hidden: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + self.item.rows)


class RingWindow:
    """Admission belongs to the event loop, ``advance`` to the compute thread."""

    def __init__(self, stage: Stage, budget: KvBudget, *, samples: bool, router: Router | None = None) -> None:
        self._stage = stage
        self._router = router
        self.budget = budget
        self._samples = samples
        self._held: dict[int, _Held] = {}
        self._pass_items = MAX_DRAFT + 1 if stage.row_invariant else 1
        """Where a row's bits depend on its company, a draft's rows go through one by one."""
        self.rows = 0
        self.sampled = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._held

    def check(self, capacity: int) -> None:
        """Raises ``RequestError`` (``kv_budget_exceeded``) for a sequence that never fits here."""
        self.budget.check(self._stage.cache_bytes(capacity))

    def fits(self, capacity: int) -> bool:
        """Whether a sequence can be admitted now."""
        return len(self._held) < MAX_SEQUENCES and self.budget.fits(self._stage.cache_bytes(capacity))

    def admit(self, request_id: int, params: Mapping[str, Any], prompt_tokens: Sequence[int]) -> None:
        """Make room for a sequence.

        Raises:
            EngineError: ``ring_busy`` or ``kv_budget_full``: later there may be room.
            RequestError: ``kv_budget_exceeded``, ``context_length_exceeded``, ``bad_sampling``.
            wire.RingError: the parameters are not what an ADMIT holds.
        """
        if len(self._held) >= MAX_SEQUENCES:
            raise EngineError("ring_busy", f"The ring already runs {MAX_SEQUENCES} requests.", "Try again shortly.")
        try:
            sampling, capacity = SamplingParams(**params["sampling"]), int(params["capacity"])
        except (KeyError, TypeError, ValueError) as error:
            raise wire.RingError(f"an ADMIT frame is refused: {error}") from error
        cache, n_bytes = self._stage.new_cache(capacity), self._stage.cache_bytes(capacity)
        self.budget.check(n_bytes)
        self.budget.reserve(n_bytes)
        self.release(request_id)
        self._held[request_id] = _Held(cache, sampling, list(prompt_tokens), n_bytes)

    def release(self, request_id: int) -> bool:
        """Forget a sequence; rows of it that are still on their way are dropped when they come."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self.budget.release(held.n_bytes)
        return held is not None

    def clear(self) -> None:
        for request_id in list(self._held):
            self.release(request_id)

    def advance(self, items: Sequence[wire.Item], rows: Tensor) -> Advanced:
        """Run the window over a frame's rows (R, D); items of sequences that are not held are left out."""
        parts: list[_Part] = []
        begin = 0
        for item in items:
            if item.request_id in self._held:
                parts.append(_Part(item, begin))
            begin += item.rows
        errors: list[tuple[wire.Item, KvasirError]] = []
        for turn in self._turns(parts):
            self._run(turn, rows, errors)
        done = [part for part in parts if part.hidden is not None]
        tokens = self._sample(done, errors) if self._samples else []
        hidden = torch.cat([part.hidden for part in done if part.hidden is not None]) if done else rows[:0]
        return Advanced(tuple(part.item for part in done), hidden, tokens, errors)

    def _turns(self, parts: list[_Part]) -> Iterator[list[list[_Part]]]:
        """Passes: in each, a run of consecutive items of each sequence, as long as a pass may hold."""
        left: dict[int, list[_Part]] = defaultdict(list)
        for part in parts:
            left[part.item.request_id].append(part)
        while left:
            yield [mine[: self._pass_items] for mine in left.values()]
            left = {key: mine[self._pass_items :] for key, mine in left.items() if len(mine) > self._pass_items}

    def _run(self, runs: list[list[_Part]], rows: Tensor, errors: list[tuple[wire.Item, KvasirError]]) -> None:
        """One pass over all runs; if it fails, one for each, so that only the culprit is refused."""
        if len(runs) > 1:
            try:
                return self._pass(runs, rows)
            except Exception as error:
                log.warning("a pass over %d sequences failed (%r); they go on one by one", len(runs), error)
        for run in runs:
            try:
                self._pass([run], rows)
            except Exception as error:
                errors.append((run[0].item, as_engine_error(error)))

    def _pass(self, runs: list[list[_Part]], rows: Tensor) -> None:
        spans: list[Span] = []
        taken: list[Tensor] = []
        for run in runs:
            held = self._held.get(run[0].item.request_id)
            if held is None:
                raise EngineError("released", "The sequence was released.")
            position = run[0].item.position
            if position < held.cache.length:
                held.cache.truncate(position)
            spans.append(Span(held.cache, position, sum(part.item.rows for part in run)))
            taken += [rows[part.rows] for part in run]
        hidden = self._stage.forward(torch.cat(taken), spans, self._experts(sum(span.rows for span in spans)))
        self.rows += len(hidden)
        at = 0
        for run in runs:
            for part in run:
                part.hidden = hidden[at : at + part.item.rows]
                at += part.item.rows

    def _experts(self, rows: int) -> ExpertCompute | None:
        """Where the experts of a pass over ``rows`` rows are computed: by workers while any is joined."""
        if self._router is None or not self._router.live:
            return None
        return self._router.expert_compute(StepTally([True] * rows))

    def _sample(self, done: list[_Part], errors: list[tuple[wire.Item, KvasirError]]) -> list[tuple[wire.Item, int]]:
        wanted = [part for part in done if part.item.flags & WANT_TOKEN]
        last_rows = [part.hidden[-1:] for part in wanted if part.hidden is not None]
        if not last_rows:
            return []
        at_a_time = min(self._pass_items, max(1, LOGIT_BYTES // (4 * self._stage.shape.n_vocab)))
        groups = [last_rows[at : at + at_a_time] for at in range(0, len(last_rows), at_a_time)]
        logits = (row for group in groups for row in self._stage.logits(torch.cat(group)))
        tokens: list[tuple[wire.Item, int]] = []
        for part, row in zip(wanted, logits, strict=True):
            held = self._held.get(part.item.request_id)
            if held is None:
                continue
            position = part.item.position + part.item.rows
            del held.history[position:]  # choices after a draft that was rejected
            try:
                token = sample(row, held.sampling, position, held.history)
            except KvasirError as error:
                errors.append((part.item, error))
                continue
            held.history.append(token)
            tokens.append((part.item, token))
        self.sampled += len(tokens)
        return tokens
