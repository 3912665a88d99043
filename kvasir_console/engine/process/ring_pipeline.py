"""Rank 0's side of a ring as a pipeline: sequences are admitted to every rank, and a step goes around once.

Several steps are under way at once, so that every rank has one to work on. A draft's tokens are rows of their own: the
last rank chooses after each, and here its choices are compared with the draft.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.pipeline import Choice, Feed, More, Outcome, SequenceParams
from kvasir_console.engine.process.ring import RingNode, ring_broken
from kvasir_console.engine.process.ring_window import WANT_TOKEN
from kvasir_console.engine.process.speculate import MAX_DRAFT, accepted
from kvasir_console.engine.process.tally import Tally
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import EngineError, KvasirError, RequestError
from kvasir_console.relay.wire import ring as wire


@dataclass(slots=True, eq=False)
class RingSequence:
    """A request on its way around the ring."""

    request_id: int
    params: SequenceParams
    reused: int = 0
    tally: Tally = field(default_factory=Tally)


class RingPipeline:
    """The sequences of a ring, as its first rank sees them."""

    interruptible = True

    def __init__(self, node: RingNode, stage: Stage, compute: Compute) -> None:
        self.depth = node.config.size
        self._node = node
        self._stage = stage
        self._compute = compute
        self._ids = itertools.count(secrets.randbits(48) << 8)

    def check(self, params: SequenceParams) -> None:
        if self._node.config.rank != 0:
            raise EngineError("not_the_first_rank", f"Rank {self._node.config.rank} of a ring takes no requests.")
        if params.trace is not None:
            raise RequestError("no_trace_on_a_ring", "A ring's logits stay on its last rank; trace a trunk instead.")
        if params.logprobs is not None:
            raise RequestError("no_logprobs_on_a_ring", "A ring's logits stay on its last rank; ask a trunk instead.")
        self._node.window.check(params.capacity)

    def fits(self, params: SequenceParams) -> bool:
        return self._node.window.fits(params.capacity)

    def draft_limit(self, params: SequenceParams) -> int:  # noqa: ARG002 - other pipelines look at them
        return MAX_DRAFT

    def network_bound(self, params: SequenceParams) -> bool:  # noqa: ARG002 - a ring's experts are its ranks'
        return False

    async def open(self, params: SequenceParams) -> RingSequence:
        """Admit a sequence to every rank. Raises ``EngineError`` while the ring is not joined.

        A rank that has no room says so by an error, which is the answer to the sequence's first step.
        """
        if not self._node.ready:
            raise ring_broken("its ranks are not all connected")
        sequence = RingSequence(next(self._ids), params)
        body = {"sampling": _sampling_fields(params.sampling), "capacity": params.capacity}
        self._node.window.admit(sequence.request_id, body, params.prompt_tokens)
        payload = wire.encode_admit(wire.Admit(params=body, prompt_tokens=params.prompt_tokens))
        try:
            self._node.post_next(self._node.frame(wire.FrameKind.ADMIT, (_item(sequence.request_id),), payload))
        except KvasirError:
            self._node.window.release(sequence.request_id)
            raise
        return sequence

    async def run(self, feeds: list[Feed], more: More) -> None:
        while feeds:
            feeds = more(await self._step(feeds))

    async def _step(self, feeds: list[Feed]) -> list[Outcome]:
        """Compute this rank's part of all feeds, send it on in one frame, and await the tokens."""
        node = self._node
        answers: list[asyncio.Future[list[int]]] = []
        for feed in feeds:
            request_id = feed.sequence.request_id
            answers.append(node.answers.expect(request_id, feed.choices))
            if request_id not in node.window:
                node.answers.fail(request_id, ring_broken("an edge was lost while the request ran"))
        items = [item for feed in feeds for item in _items(feed)]
        tokens = torch.tensor([token for feed in feeds for token in feed.tokens], dtype=torch.int64)
        advanced = await self._compute.run(lambda: node.window.advance(items, self._stage.embed(tokens)))
        for item, error in advanced.errors:
            node.answers.fail(item.request_id, error)
        try:
            await node.pass_on(advanced)
        except (KvasirError, OSError) as error:
            for feed in feeds:
                node.answers.fail(feed.sequence.request_id, ring_broken(str(error)))
        return [await _outcome(feed, answer) for feed, answer in zip(feeds, answers, strict=True)]

    async def close(self, sequence: RingSequence) -> str | None:
        """Free the sequence on every rank, in the middle of a step if need be."""
        self._node.answers.forget(sequence.request_id)
        if self._node.window.release(sequence.request_id):
            self._compute.freed()
            with contextlib.suppress(KvasirError):
                self._node.post_next(self._node.frame(wire.FrameKind.RELEASE, (_item(sequence.request_id),)))
        return None

    def stats(self) -> dict[str, Any]:
        return {"kv": self._node.kv_stats()}


async def _outcome(feed: Feed, answer: asyncio.Future[list[int]]) -> Outcome:
    try:
        chosen = await answer
    except KvasirError as error:
        return error
    if feed.choices > 1:
        chosen = chosen[: accepted(feed.tokens[1:], chosen) + 1]
    feed.sequence.tally.rows += len(feed.tokens) - feed.choices + len(chosen)
    return [Choice(token) for token in chosen]


def _sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults: a rank that knows fewer parameters still takes a sequence that has none."""
    defaults = asdict(SamplingParams())
    return {key: value for key, value in asdict(sampling).items() if value != defaults[key]}


def _item(request_id: int) -> wire.Item:
    return wire.Item(request_id=request_id, sequence=0, position=0, rows=0, flags=0)


def _items(feed: Feed) -> list[wire.Item]:
    """A feed's rows as items: each row after which a token is chosen ends one."""
    plain = len(feed.tokens) - feed.choices
    ends = [*range(plain + 1, len(feed.tokens) + 1)] if feed.choices else [len(feed.tokens)]
    begins = [0, *ends[:-1]]
    flags = WANT_TOKEN if feed.choices else 0
    return [
        wire.Item(feed.sequence.request_id, 0, feed.position + begin, end - begin, flags)
        for begin, end in zip(begins, ends, strict=True)
    ]
