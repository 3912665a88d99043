"""Rank 0's side of a ring as a pipeline: sequences are admitted to every rank, and a step goes around once.

Several steps are under way at once, so that every rank has one to work on. A draft's tokens are rows of their own: the
last rank chooses after each, and here its choices are compared with the draft. A step waits for as long as the ring
needs to be whole again; nothing here knows that an edge was lost.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.pipeline import Choice, Feed, More, Outcome, SequenceParams
from kvasir_console.engine.process.ring import RingNode, ring_broken
from kvasir_console.engine.process.ring_log import AGAIN, Step
from kvasir_console.engine.process.ring_window import Advanced
from kvasir_console.engine.process.speculate import MAX_DRAFT, accepted
from kvasir_console.engine.process.tally import Tally
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import EngineError, KvasirError, RequestError
from kvasir_console.relay.wire import ring as wire
from kvasir_console.relay.wire.ring import Frame

MAX_GROUPS = 32
"""Most steps under way at once."""


@dataclass(slots=True, eq=False)
class RingSequence:
    """A request on its way around the ring. ``history`` is the prompt and every choice that was fed."""

    request_id: int
    params: SequenceParams
    history: list[int]
    reused: int = 0
    tally: Tally = field(default_factory=Tally)


class Walk:
    """How many groups of sequences keep the slowest of ``size`` ranks busy.

    A walk round the ring is every rank's time for a group and the network's. Were every rank as slow as the slowest,
    it would never wait with ``size + network / slowest`` groups under way.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._network_s = 0.0
        self._slowest_s = 0.0

    def record(self, walk_s: float, inside_s: float, slowest_s: float) -> None:
        """A step came back: what it took, of that in ranks (waiting included), and the longest that any computed."""
        network_s = max(0.0, walk_s - inside_s)
        self._network_s += (network_s - self._network_s) / (8 if self._network_s else 1)
        self._slowest_s += (slowest_s - self._slowest_s) / (8 if self._slowest_s else 1)

    @property
    def groups(self) -> int:
        if self._slowest_s <= 0:
            return self._size
        return max(2, min(MAX_GROUPS, self._size + round(self._network_s / self._slowest_s)))

    def stats(self) -> dict[str, float]:
        return {
            "groups": self.groups,
            "network_ms": round(self._network_s * 1e3, 3),
            "slowest_ms": round(self._slowest_s * 1e3, 3),
        }


class RingPipeline:
    """The sequences of a ring, as its first rank sees them."""

    interruptible = True

    def __init__(self, node: RingNode, stage: Stage, compute: Compute) -> None:
        self.walk = Walk(node.config.size)
        self._node = node
        self._stage = stage
        self._compute = compute
        self._ids = itertools.count(secrets.randbits(48) << 8)
        self._numbers = _numbers(secrets.randbits(32))
        self._sequences: dict[int, RingSequence] = {}
        self._asked: dict[int, float] = {}
        """When the steps of decoding sequences that are under way were asked for, by number."""
        node.known = self._known
        node.on_times = self._times

    @property
    def depth(self) -> int:
        return self.walk.groups

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
        """Admit a sequence to every rank; those that cannot be reached hear of it later.

        A rank that has no room says so by an error, which is the answer to the sequence's first step.

        Raises:
            EngineError: ``ring_broken``; the ring has not been whole for long. ``request_exists``.
        """
        node = self._node
        if node.broken:
            raise ring_broken(node.missing)
        request_id = params.key or next(self._ids)
        if request_id in self._sequences:
            raise EngineError("request_exists", "A request with this key runs already.", "Ask again.")
        history = [*params.prompt_tokens, *params.resumed]
        prompt_length = len(params.prompt_tokens)
        body = {
            "sampling": _sampling_fields(params.sampling),
            "capacity": params.capacity,
            "prompt_length": prompt_length,
        }
        node.window.admit(request_id, body, history)
        payload = wire.encode_admit(wire.Admit(params=body, prompt_tokens=tuple(history)))
        node.post_next(node.rows.admit(request_id, payload, prompt_length))
        sequence = self._sequences[request_id] = RingSequence(request_id, params, history)
        return sequence

    async def run(self, feeds: list[Feed], more: More) -> None:
        while feeds:
            feeds = more(await self._step(feeds))

    async def _step(self, feeds: list[Feed]) -> list[Outcome]:
        """Compute this rank's part of all feeds, send it on in one frame, and await the tokens."""
        node, loop = self._node, asyncio.get_running_loop()
        asked = loop.time()
        answers: list[asyncio.Future[list[int]]] = []
        items: list[wire.Item] = []
        numbers: list[int] = []
        for feed in feeds:
            sequence: RingSequence = feed.sequence
            final = feed.tokens[: len(feed.tokens) - feed.choices + 1] if feed.choices else feed.tokens
            sequence.history[feed.position : feed.position + len(final)] = final
            number = next(self._numbers)
            numbers.append(number)
            end = feed.position + len(feed.tokens)
            step = Step(number, feed.position, end, wants=feed.choices > 0, refill=feed.refill)
            items += step.items(sequence.request_id, len(sequence.params.prompt_tokens), AGAIN if feed.again else 0)
            answers.append(node.answers.expect(sequence.request_id, number, end - feed.choices + 1, feed.choices))
            if sequence.request_id not in self._sequences:
                node.answers.forget(sequence.request_id)
        if all(feed.choices == len(feed.tokens) for feed in feeds):  # no prompt among them: these measure the walk
            self._asked |= dict.fromkeys(numbers, asked)
        tokens = torch.tensor([token for feed in feeds for token in feed.tokens], dtype=torch.int64)
        took_s = 0.0

        def advance() -> Advanced:
            nonlocal took_s
            started = loop.time()
            advanced = node.window.advance(items, self._stage.embed(tokens))
            took_s = loop.time() - started
            return advanced

        advanced = await self._compute.run(advance)
        for item, error in advanced.errors:
            if item.request_id in self._sequences:  # else it was closed meanwhile, and nobody would ever hear of it
                node.answers.fail(item.request_id, error)
        node.pass_on(advanced, (math.ceil(took_s * 1e6), math.ceil((loop.time() - asked) * 1e6)))
        outcomes = [await _outcome(feed, answer) for feed, answer in zip(feeds, answers, strict=True)]
        for number in numbers:
            self._asked.pop(number, None)
        return outcomes

    def _times(self, frame: Frame) -> None:
        """A TOKEN frame tells what its walk was made of; one that was repeated tells nothing."""
        if not frame.slowest_us:
            return
        for item in frame.items:
            asked = self._asked.pop(item.step, None)
            if asked is not None:
                walk_s = asyncio.get_running_loop().time() - asked
                self.walk.record(walk_s, frame.inside_us / 1e6, frame.slowest_us / 1e6)
                break

    def _known(self) -> dict[int, wire.Known]:
        """For the last rank: what was chosen so far, and which answers are waited for."""
        known: dict[int, wire.Known] = {}
        for request_id, sequence in self._sequences.items():
            step, count = self._node.answers.waits(request_id) or (0, len(sequence.history))
            known[request_id] = wire.Known(step, count, tuple(sequence.history))
        return known

    async def close(self, sequence: RingSequence) -> str | None:
        """Free the sequence on every rank, in the middle of a step if need be."""
        self._sequences.pop(sequence.request_id, None)
        self._node.answers.forget(sequence.request_id)
        self._node.release(sequence.request_id)
        return None

    def stats(self) -> dict[str, Any]:
        return {"kv": self._node.kv_stats(), "walk": self.walk.stats()}


def _numbers(start: int) -> Iterator[int]:
    """Numbers of steps: 32 bits, never 0, beginning anywhere, so that those of a process before do not come again."""
    for number in itertools.count(start):
        if number % 2**32:
            yield number % 2**32


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
