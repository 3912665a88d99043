"""What one rank of a ring keeps and computes: the caches of admitted sequences, and passes over the rows of a frame.

A frame's items are rows of several sequences, computed in one pass. Consecutive items of one sequence are a token and
a draft after it. A draft's rows that were rejected are not announced: the sequence's next rows simply begin before its
end, and what lies there is forgotten. Rows that come again after a loss (``ring_log.REFILL``) give keys and values and,
at the last rank, the history that was not told; no token is returned for them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvasir_console.engine.kvcache import KVCache, blocks_end
from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.pipeline import LOGIT_BYTES, MAX_RING_SEQUENCES, as_engine_error
from kvasir_console.engine.process.ring_log import AGAIN, REFILL, WANT_TOKEN
from kvasir_console.engine.process.router import Router
from kvasir_console.engine.process.speculate import MAX_DRAFT
from kvasir_console.engine.process.tally import StepTally
from kvasir_console.engine.sampling import SamplingParams, sample
from kvasir_console.engine.stage import ExpertCompute, Span, Stage
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.relay.wire import ring as wire

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """What a rank keeps for one sequence. ``history`` is the tokens so far, known to the first and last rank only;
    ``known`` of them are rank 0's word."""

    cache: KVCache
    sampling: SamplingParams
    history: list[int]
    prompt_length: int
    known: int
    n_bytes: int
    step: int = 0
    final: int = 0

    def tell(self, tokens: Sequence[int]) -> None:
        """Take rank 0's word for what was chosen."""
        if len(tokens) > self.known:
            self.history[: len(tokens)] = tokens
            self.known = len(tokens)

    def took(self, item: wire.Item) -> None:
        """The rows of an item are in the cache."""
        end = item.position + item.rows
        if item.flags & REFILL:
            self.final = end
        elif item.step != self.step or not item.step:
            self.final = max(item.position, min(end, self.prompt_length))
        self.step = item.step


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
        self._log_row_bytes = 0 if samples else 4 * stage.shape.n_embd
        self._told: dict[int, tuple[int, ...]] = {}
        """What rank 0 said of sequences that are not here yet."""
        self.rows = 0
        self.recomputed_rows = 0
        """Of ``rows``: those that came a second time, or that replace what another process had computed."""
        self.sampled = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._held

    def check(self, capacity: int) -> None:
        """Raises ``RequestError`` (``kv_budget_exceeded``) for a sequence that never fits here."""
        self.budget.check(self.n_bytes(capacity))

    def fits(self, capacity: int) -> bool:
        """Whether a sequence can be admitted now."""
        return len(self._held) < MAX_RING_SEQUENCES and self.budget.fits(self.n_bytes(capacity))

    def n_bytes(self, capacity: int) -> int:
        """Bytes that a sequence takes at most: its keys and values, and the log of its rows that go on."""
        return self._stage.cache_bytes(capacity) + blocks_end(capacity) * self._log_row_bytes

    def held(self) -> dict[int, wire.Held]:
        """What is here of every sequence; not while ``advance`` runs."""
        return {
            key: wire.Held(each.step, min(each.final, each.cache.length), each.cache.length)
            for key, each in self._held.items()
        }

    def prompt_length(self, request_id: int) -> int:
        return self._held[request_id].prompt_length

    def tell(self, known: Mapping[int, Sequence[int]]) -> None:
        """Rank 0 says what was chosen so far, of all its sequences; not while ``advance`` runs."""
        self._told = {key: tuple(tokens) for key, tokens in known.items() if key not in self._held}
        for key, tokens in known.items():
            if (held := self._held.get(key)) is not None:
                held.tell(tokens)

    def admit(self, request_id: int, params: Mapping[str, Any], tokens: Sequence[int]) -> None:
        """Make room for a sequence. ``tokens`` are its prompt and what was chosen before.

        Raises:
            EngineError: ``ring_busy`` or ``kv_budget_full``: later there may be room.
            RequestError: ``kv_budget_exceeded``, ``context_length_exceeded``, ``bad_sampling``.
            wire.RingError: the parameters are not what an ADMIT holds.
        """
        if len(self._held) >= MAX_RING_SEQUENCES and request_id not in self._held:
            raise EngineError(
                "ring_busy", f"The ring already runs {MAX_RING_SEQUENCES} requests.", "Try again shortly."
            )
        try:
            sampling, capacity = SamplingParams(**params["sampling"]), int(params["capacity"])
            prompt_length = int(params.get("prompt_length", len(tokens)))
            if not 0 <= prompt_length <= len(tokens):
                raise ValueError(f"a prompt of {prompt_length} tokens in a history of {len(tokens)}")
        except (KeyError, TypeError, ValueError) as error:
            raise wire.RingError(f"an ADMIT frame is refused: {error}") from error
        cache, n_bytes = self._stage.new_cache(capacity), self.n_bytes(capacity)
        self.budget.check(n_bytes)
        self.release(request_id)
        self.budget.reserve(n_bytes)
        held = _Held(cache, sampling, list(tokens), prompt_length, len(tokens), n_bytes)
        held.tell(self._told.pop(request_id, ()))
        self._held[request_id] = held

    def release(self, request_id: int) -> bool:
        """Forget a sequence; rows of it that are still on their way are dropped when they come."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self.budget.release(held.n_bytes)
        return held is not None

    def clear(self) -> None:
        for request_id in list(self._held):
            self.release(request_id)

    def keep(self, living: set[int]) -> list[int]:
        """Let go of all sequences but these; returns which."""
        gone = [request_id for request_id in self._held if request_id not in living]
        for request_id in gone:
            self.release(request_id)
        return gone

    def advance(self, items: Sequence[wire.Item], rows: Tensor) -> Advanced:
        """Run the window over a frame's rows (R, D); items of sequences that are not held are left out."""
        parts: list[_Part] = []
        begin = 0
        for item in items:
            if (held := self._held.get(item.request_id)) is not None:
                pieces = self._pieces(item, held.prompt_length)
                parts += [_Part(each, begin + each.position - item.position) for each in pieces]
            begin += item.rows
        errors: list[tuple[wire.Item, KvasirError]] = []
        for turn in self._turns(parts):
            self._run(turn, rows, errors)
        done = [part for part in parts if part.hidden is not None]
        tokens = self._sample(done, errors) if self._samples else []
        hidden = torch.cat([part.hidden for part in done if part.hidden is not None]) if done else rows[:0]
        return Advanced(tuple(part.item for part in done), hidden, tokens, errors)

    def _pieces(self, item: wire.Item, prompt_length: int) -> list[wire.Item]:
        """An item as it may be computed: where a row's bits depend on its company, generated rows come one by one."""
        end = item.position + item.rows
        alone = max(item.position, prompt_length)
        if self._pass_items > 1 or item.rows == 1 or alone >= end:
            return [item]
        pieces = [replace(item, position=row, rows=1) for row in range(alone, end)]
        if alone > item.position:
            pieces.insert(0, replace(item, rows=alone - item.position))
        return pieces

    def _turns(self, parts: list[_Part]) -> Iterator[list[list[_Part]]]:
        """Passes: in each, a run of consecutive items of each sequence, as long as a pass may hold."""
        left: dict[int, list[_Part]] = defaultdict(list)
        for part in parts:
            left[part.item.request_id].append(part)
        while left:
            runs = {key: _run_of(mine, self._pass_items) for key, mine in left.items()}
            yield list(runs.values())
            left = {key: mine[len(runs[key]) :] for key, mine in left.items() if len(mine) > len(runs[key])}

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
        again = 0
        for run in runs:
            held = self._held.get(run[0].item.request_id)
            if held is None:
                raise EngineError("released", "The sequence was released.")
            position = run[0].item.position
            again += _again(held, run)
            if position < held.cache.length:
                held.cache.truncate(position)
            spans.append(Span(held.cache, position, sum(part.item.rows for part in run)))
            taken += [rows[part.rows] for part in run]
        hidden = self._stage.forward(torch.cat(taken), spans, self._experts(sum(span.rows for span in spans)))
        self.rows += len(hidden)
        self.recomputed_rows += again
        at = 0
        for run in runs:
            held = self._held.get(run[0].item.request_id)
            for part in run:
                if held is not None:
                    held.took(part.item)
                part.hidden = hidden[at : at + part.item.rows]
                at += part.item.rows

    def _experts(self, rows: int) -> ExpertCompute | None:
        """Where the experts of a pass over ``rows`` rows are computed: by workers while any is joined."""
        if self._router is None or not self._router.live:
            return None
        return self._router.expert_compute(StepTally([True] * rows))

    def _sample(self, done: list[_Part], errors: list[tuple[wire.Item, KvasirError]]) -> list[tuple[wire.Item, int]]:
        wanted = [(part.item, row) for part in done for row in self._wanted(part)]
        if not wanted:
            return []
        at_a_time = min(self._pass_items, max(1, LOGIT_BYTES // (4 * self._stage.shape.n_vocab)))
        groups = [wanted[at : at + at_a_time] for at in range(0, len(wanted), at_a_time)]
        logits = (logit for group in groups for logit in self._stage.logits(torch.cat([row for _, (_, row) in group])))
        tokens: list[tuple[wire.Item, int]] = []
        failed: set[int] = set()
        for (item, (position, _)), row in zip(wanted, logits, strict=True):
            held = self._held.get(item.request_id)
            if held is None or item.request_id in failed:
                continue
            del held.history[position:]  # choices after a draft that was rejected
            try:
                token = sample(row, held.sampling, position, held.history)
            except Exception as error:  # what rank 0 told of this sequence may be anything
                errors.append((item, as_engine_error(error)))
                failed.add(item.request_id)
                continue
            held.history.append(token)
            if not item.flags & REFILL:
                tokens.append((item, token))
        self.sampled += len(tokens)
        return tokens

    def _wanted(self, part: _Part) -> list[tuple[int, Tensor]]:
        """Positions to choose a token for after this part, with the row (1, D) that says which."""
        item = part.item
        end = item.position + item.rows
        held = self._held.get(item.request_id)
        if part.hidden is None or held is None:
            return []
        if not item.flags & REFILL:
            return [(end, part.hidden[-1:])] if item.flags & WANT_TOKEN else []
        first = max(item.position + 1, held.prompt_length, held.known)
        return [(at, part.hidden[at - 1 - item.position : at - item.position]) for at in range(first, end + 1)]


def _again(held: _Held, run: list[_Part]) -> int:
    """How many rows of a run are computed again because something was lost."""
    count = 0
    for item in (part.item for part in run):
        if item.flags & (REFILL | AGAIN):
            count += item.rows
        elif item.step == held.step and item.step:
            count += max(0, min(item.rows, held.cache.length - item.position))
    return count


def _run_of(parts: list[_Part], most: int) -> list[_Part]:
    """The first parts of a sequence, at most so many, whose rows follow each other."""
    run = parts[:1]
    for part in parts[1:most]:
        if part.item.position != run[-1].item.position + run[-1].item.rows:
            break
        run.append(part)
    return run
