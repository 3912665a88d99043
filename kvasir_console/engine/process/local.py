"""A stage of [0, n) as a pipeline: embedding, every layer and the head are here; experts may be elsewhere.

A step is one forward pass over the rows of all its sequences. Keys and values are accounted before they exist
(``budget``), and whole blocks of them are kept for prompts that begin alike (``prefix``).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir_console.engine.kvcache import KVCache
from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.groups import Groups
from kvasir_console.engine.process.pipeline import (
    LOGIT_BYTES,
    Choice,
    Feed,
    More,
    Outcome,
    SequenceParams,
    as_engine_error,
)
from kvasir_console.engine.process.prefix import PREFILL_CHUNK, PrefixStore
from kvasir_console.engine.process.router import Router
from kvasir_console.engine.process.speculate import MAX_DRAFT
from kvasir_console.engine.process.tally import StepTally, Tally
from kvasir_console.engine.sampling import log_probabilities, sample
from kvasir_console.engine.stage import Span, Stage

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LocalSequence:
    """A sequence of the trunk."""

    params: SequenceParams
    cache: KVCache
    reused: int
    reserved_bytes: int
    history: list[int]
    tally: Tally = field(default_factory=Tally)
    logits: list[Tensor] = field(default_factory=list)
    failed: bool = False


class LocalPipeline:
    """All layers in this process. Its state belongs to whoever drives it: the event loop or, while that awaits
    ``run``, the compute thread."""

    interruptible = False

    def __init__(
        self,
        stage: Stage,
        compute: Compute,
        budget: KvBudget,
        router: Router | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._stage = stage
        self._compute = compute
        self._budget = budget
        self._router = router
        self._groups = groups or Groups()
        self._open = 0
        self._books = threading.Lock()
        """Over the store and the budget: with several groups, sequences come and go while others compute."""
        self._store = PrefixStore()
        self._block_bytes = stage.cache_bytes(PREFILL_CHUNK)
        self._pairs_per_row = len(stage.banks) * stage.shape.n_expert_used
        # Where a row's bits depend on its company, each is computed as it would be alone, as far as that goes.
        self._exact = stage.row_invariant
        self._logit_rows = max(1, LOGIT_BYTES // (4 * stage.shape.n_vocab)) if self._exact else 1
        self._max_draft = MAX_DRAFT if self._exact else 0

    @property
    def depth(self) -> int:
        """As many steps as there are groups, while experts are elsewhere."""
        return self._groups.count if self._router is not None and self._router.live else 1

    def check(self, params: SequenceParams) -> None:
        self._budget.check(self._stage.cache_bytes(params.capacity))

    def fits(self, params: SequenceParams) -> bool:
        return self._budget.fits(self._stage.cache_bytes(params.capacity))

    def draft_limit(self, params: SequenceParams) -> int:
        return self._max_draft if params.trace is None else 0

    def network_bound(self, params: SequenceParams) -> bool:  # noqa: ARG002 - the seam has it
        """Never: a drafted row that is wrong costs its pay, a step without drafts costs a round trip for each token.
        Steps are measured with their round trips, so drafts get longer where those are long."""
        return False

    async def open(self, params: SequenceParams) -> LocalSequence:
        n_bytes = self._stage.cache_bytes(params.capacity)
        # The last token's row is always computed: something has to be chosen after it.
        with self._books:
            found = self._store.find(list(params.prompt_tokens[:-1]), params.session)
            if found is None:
                cache, reused = self._stage.new_cache(params.capacity), 0
            else:
                kept, reused = found
                cache = kept.fork(reused, params.capacity)
            self._budget.reserve(n_bytes)
            self._shrink_store()
        self._open += 1
        return LocalSequence(params, cache, reused, n_bytes, [*params.prompt_tokens, *params.resumed])

    async def run(self, feeds: list[Feed], more: More) -> None:
        while feeds and self.depth > 1:
            feeds = more(await self._compute.run(functools.partial(self._step, feeds)))
        while feeds:
            feeds = await self._compute.run(functools.partial(self._steps, feeds, more))

    async def close(self, sequence: LocalSequence) -> str | None:
        self._open -= 1
        if self._exact and not sequence.failed:
            # Generated rows too: here a row has the same bits decoded as it has in a prompt.
            tokens = sequence.history[: sequence.cache.length]
            with self._books:
                missing = self._store.missing(tokens, sequence.params.session)
            if missing:
                self._keep(sequence, missing)
        del sequence.cache
        with self._books:
            self._budget.release(sequence.reserved_bytes)
        self._compute.freed()
        path = sequence.params.trace
        if path is None or not sequence.logits:
            return None
        await self._compute.run(lambda: np.save(path, torch.stack(sequence.logits).cpu().numpy()))
        return str(path)

    def stats(self) -> dict[str, Any]:
        with self._books:  # else a block may be seen while it gives way
            return {
                "groups": self.depth,
                "kv": {
                    "budget_bytes": self._budget.total_bytes,
                    "reserved_bytes": self._budget.reserved_bytes,
                    "kept_bytes": self._budget.kept_bytes,
                },
                "prefix": {
                    "blocks": len(self._store),
                    "lookups": self._store.lookups,
                    "hits": self._store.hits,
                    "tokens_reused": self._store.tokens_reused,
                },
            }

    def _steps(self, feeds: list[Feed], more: More) -> list[Feed]:
        """On the compute thread: step after step, until there are no more or somebody else wants the thread."""
        while feeds:
            feeds = more(self._step(feeds))
            self._compute.stepped()
            if self._compute.wanted:
                break
        return feeds

    def _step(self, feeds: list[Feed]) -> list[Outcome]:
        """One pass for all; if it fails, one for each, so that only the culprit's ends."""
        if len(feeds) > 1:
            try:
                return self._pass(feeds)
            except Exception as error:
                log.warning("a step of %d sequences failed (%r); they go on one by one", len(feeds), error)
        return [outcome for feed in feeds for outcome in self._step_alone(feed)]

    def _step_alone(self, feed: Feed) -> list[Outcome]:
        try:
            return self._pass([feed])
        except Exception as error:
            feed.sequence.failed = True
            return [as_engine_error(error)]

    def _pass(self, feeds: list[Feed]) -> list[Outcome]:
        hidden = self._stage.embed(torch.tensor([token for feed in feeds for token in feed.tokens], dtype=torch.int64))
        spans = [Span(feed.sequence.cache, feed.position, len(feed.tokens)) for feed in feeds]
        tally = StepTally(
            [feed.sequence.params.experts == "network" for feed in feeds for _ in range(len(feed.tokens))]
        )
        if self._router is not None:
            self._router.observe(self._open)
        started = time.perf_counter()
        if self._router is not None and self._router.live and tally.network.any():
            hidden = self._stage.forward(hidden, spans, self._router.expert_compute(tally))
            tally.rest_local(len(self._stage.banks), self._stage.shape.n_expert_used)
        else:
            hidden = self._stage.forward(hidden, spans)
            tally.local_everywhere(self._pairs_per_row)
        if all(feed.choices == len(feed.tokens) for feed in feeds):
            computed_s = time.perf_counter() - started - tally.spent_s
            self._groups.record(computed_s, tally.waited_s, self._open)
        ends = np.cumsum([len(feed.tokens) for feed in feeds])
        wanted = [row for feed, end in zip(feeds, ends, strict=True) for row in range(end - feed.choices, end)]
        logits = self._logits(hidden, wanted)
        outcomes: list[Outcome] = []
        for feed, end in zip(feeds, ends, strict=True):
            begin = int(end) - len(feed.tokens)
            rows = len(feed.tokens)
            try:
                choices = _choose(feed, [next(logits) for _ in range(feed.choices)])
            except Exception as error:
                feed.sequence.failed = True
                outcomes.append(as_engine_error(error))
                continue
            if feed.choices > 1 and (rejected := feed.choices - len(choices)):
                rows -= rejected
                feed.sequence.cache.truncate(feed.position + rows)
            tally.credit(feed.sequence.tally, slice(begin, begin + rows))
            outcomes.append(choices)
            if len(feed.tokens) == PREFILL_CHUNK and feed.position % PREFILL_CHUNK == 0:
                self._keep(feed.sequence, range(feed.position // PREFILL_CHUNK, feed.position // PREFILL_CHUNK + 1))
        return outcomes

    def _logits(self, hidden: Tensor, wanted: list[int]) -> Iterator[Tensor]:
        """(V,) logits after each of the ``wanted`` rows, a bounded number at a time."""
        for at in range(0, len(wanted), self._logit_rows):
            yield from self._stage.logits(hidden[wanted[at : at + self._logit_rows]])

    def _keep(self, sequence: LocalSequence, blocks: range) -> None:
        """Keep whole blocks of a sequence for others that begin like it."""
        ends = {index: (index + 1) * PREFILL_CHUNK for index in blocks}
        forks = {index: sequence.cache.fork(end, end) for index, end in ends.items()}
        tokens = sequence.history[: ends[blocks[-1]]]
        with self._books:
            self._store.put(tokens, sequence.params.session, forks, self._block_bytes)
            self._shrink_store()

    def _shrink_store(self) -> None:
        self._budget.kept_bytes = self._store.n_bytes
        self._store.drop(self._budget.excess_bytes)
        self._budget.kept_bytes = self._store.n_bytes


def _choose(feed: Feed, logits: list[Tensor]) -> list[Choice]:
    """The choices after the feed's last rows, up to the first that its draft did not foresee."""
    sequence = feed.sequence
    params: SequenceParams = sequence.params
    draft = feed.tokens[len(feed.tokens) - feed.choices + 1 :] if feed.choices > 1 else []
    choices: list[Choice] = []
    for index, row in enumerate(logits):
        token = sample(row, params.sampling, len(sequence.history), sequence.history)
        logprob: float | None = None
        top: list[tuple[int, float]] = []
        if params.logprobs is not None:
            logprob, top = log_probabilities(row, token, params.logprobs)
        if params.trace is not None:
            sequence.logits.append(row.clone())
        choices.append(Choice(token, logprob, tuple(top)))
        sequence.history.append(token)
        if index < len(draft) and draft[index] != token:
            break
    return choices
