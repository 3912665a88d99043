"""Any schedule of cut edges and lost ranks: every answer is complete, and the one of an undisturbed ring.

The ranks, links, edges, scheduler and sockets are real; the layers are a hash of the row and of all rows before it, so
that a row that is lost, doubled, stale or out of place changes every token after it.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hash_layers import N_VOCAB, PRIME, SIZE, Cache, Inline, Layers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.pipeline import Choice, SequenceParams
from kvasir_console.engine.process.ring import RingConfig, RingNode
from kvasir_console.engine.process.ring_pipeline import RingPipeline
from kvasir_console.engine.process.scheduler import Progress, Scheduler
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.errors import KvasirError


def undisturbed(prompt: list[int], count: int) -> list[int]:
    """The answer by the definition: all rows through all layers, each time."""
    layers = [Layers(rank) for rank in range(SIZE)]
    caches = [Cache() for _ in layers]
    tokens = list(prompt)

    @dataclass
    class Span:
        cache: Cache
        position: int
        rows: int

    fed = 0
    for _ in range(count):
        rows = layers[0].embed(torch.tensor(tokens[fed:]))
        for layer, cache in zip(layers, caches, strict=True):
            rows = layer.forward(rows, [Span(cache, fed, len(rows))])
        fed = len(tokens)
        tokens.append(int(layers[-1].logits(rows[-1:]).argmax()))
    return tokens[len(prompt) :]


class Answer:
    """A request; what it has seen outlives the rank 0 that said it."""

    def __init__(self, key: int, prompt: list[int], max_tokens: int, speculation: str) -> None:
        self.key, self.prompt, self.max_tokens, self.speculation = key, prompt, max_tokens, speculation
        self.tokens: list[int] = []
        self.progress = Progress()
        self.over = asyncio.Event()
        self.error: KvasirError | None = None

    @property
    def params(self) -> SequenceParams:
        return self._params

    def begin(self) -> None:
        capacity = len(self.prompt) + self.max_tokens
        prompt, resumed = tuple(self.prompt), tuple(self.tokens)
        self._params = SequenceParams(SamplingParams(), capacity, prompt, key=self.key, resumed=resumed)

    def admitted(self) -> None:
        pass

    def push(self, choice: Choice) -> bool:
        self.tokens.append(choice.token)
        return len(self.tokens) >= self.max_tokens

    def flush(self) -> None:
        pass

    def finish(self, error: KvasirError | None) -> None:
        self.error = error
        self.over.set()


class Network:
    """Three ranks in this process, joined by socket pairs."""

    def __init__(self, recover_s: float = 120.0) -> None:
        self.recover_s = recover_s
        self.tasks: dict[int, list[asyncio.Task[None]]] = {edge: [] for edge in range(SIZE)}
        self.recomputed = 0
        self.nodes = [self._node(rank) for rank in range(SIZE)]
        self._rank_0()

    def _node(self, rank: int) -> RingNode:
        layers: Any = Layers(rank)
        compute: Any = Inline()
        config = RingConfig("r", 1, rank, SIZE, SIZE, recover_s=self.recover_s)
        return RingNode(config, layers, bytes(32), compute, KvBudget(10**6))

    def _rank_0(self) -> None:
        layers: Any = Layers(0)
        compute: Any = Inline()
        self.scheduler = Scheduler(RingPipeline(self.nodes[0], layers, compute))

    async def join(self, edge: int) -> None:
        near, far = socket.socketpair()
        left, right = self.nodes[edge], self.nodes[(edge + 1) % SIZE]
        self.tasks[edge] = [
            asyncio.create_task(left.serve_next(*await asyncio.open_connection(sock=near))),
            asyncio.create_task(right.serve_prev(*await asyncio.open_connection(sock=far))),
        ]

    async def cut(self, edge: int) -> None:
        for task in self.tasks[edge]:
            task.cancel()
        await asyncio.gather(*self.tasks[edge], return_exceptions=True)
        self.tasks[edge] = []

    async def kill(self, rank: int, running: list[Answer]) -> None:
        for edge in (rank, (rank - 1) % SIZE):
            await self.cut(edge)
        node = self.nodes[rank]
        node.leave()
        self.recomputed += node.window.recomputed_rows
        if rank == 0:
            assert self.scheduler._task is not None
            for task in (self.scheduler._task, *self.scheduler._steps):
                task.cancel()
            await asyncio.gather(self.scheduler._task, *self.scheduler._steps, return_exceptions=True)
        self.nodes[rank] = self._node(rank)
        if rank == 0:
            self._rank_0()
            for answer in running:
                answer.begin()
                self.scheduler.submit(answer)

    async def mend(self) -> None:
        for edge, tasks in self.tasks.items():
            if not tasks or any(task.done() for task in tasks):
                await self.cut(edge)
                await self.join(edge)

    async def close(self) -> None:
        for edge in self.tasks:
            await self.cut(edge)
        await self.scheduler.close()
        for node in self.nodes:
            node.leave()
        self.recomputed += sum(node.window.recomputed_rows for node in self.nodes)


def prompt(key: int, length: int) -> list[int]:
    return [(key * 7 + n * n) % N_VOCAB for n in range(length)]


async def asked(lengths: list[int], max_tokens: int) -> tuple[Network, list[Answer]]:
    """A whole ring and requests on their way through it."""
    network = Network()
    for edge in range(SIZE):
        await network.join(edge)
    answers = [
        Answer(1000 + n, prompt(n, length), max_tokens, "on" if n % 2 else "off") for n, length in enumerate(lengths)
    ]
    for answer in answers:
        answer.begin()
        network.scheduler.submit(answer)
    return network, answers


async def answered(network: Network, answers: list[Answer]) -> int:
    """Wait for the ends, with every edge mended; how many rows were computed again."""
    await network.mend()
    async with asyncio.timeout(120):
        await asyncio.gather(*(answer.over.wait() for answer in answers))
    await network.close()
    return network.recomputed


async def answers_of(
    lengths: list[int], max_tokens: int, faults: list[tuple[int, str, int]]
) -> tuple[list[Answer], int]:
    """Run requests; each fault comes so many turns of the loop after the one before."""
    network, answers = await asked(lengths, max_tokens)
    for turns, kind, which in faults:
        for _ in range(turns):
            await asyncio.sleep(0)
        if kind == "cut":
            await network.cut(which)
        elif kind == "kill":
            await network.kill(which, [answer for answer in answers if not answer.over.is_set()])
        else:
            await network.mend()
    return answers, await answered(network, answers)


FAULT = st.tuples(st.integers(0, 60), st.sampled_from(["cut", "cut", "kill", "mend", "mend"]), st.integers(0, SIZE - 1))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([1, 3, 40, 256, 300, 520]), min_size=1, max_size=4), st.lists(FAULT, max_size=10))
def test_no_schedule_of_faults_changes_a_token(lengths: list[int], faults: list[tuple[int, str, int]]) -> None:
    answers, _ = asyncio.run(answers_of(lengths, 24, faults))
    for answer in answers:
        assert answer.error is None
        assert answer.tokens == undisturbed(answer.prompt, 24)


def test_without_a_fault_nothing_is_computed_twice() -> None:
    answers, recomputed = asyncio.run(answers_of([1, 40, 300], 24, []))
    assert [answer.tokens for answer in answers] == [undisturbed(answer.prompt, 24) for answer in answers]
    assert recomputed == 0


def test_only_what_was_lost_is_computed_again() -> None:
    """Rank 1 is lost in the middle of three answers: its rows come again, and next to none of the others'."""
    lengths = [40, 300, 520]

    async def lost() -> int:
        network, answers = await asked(lengths, 200)
        while min(len(answer.tokens) for answer in answers) < 20:  # noqa: ASYNC110 - every prompt has gone through then
            await asyncio.sleep(0)
        assert not any(answer.over.is_set() for answer in answers)
        await network.kill(1, answers)
        return await answered(network, answers)

    recomputed = asyncio.run(lost())
    assert sum(lengths) <= recomputed <= sum(lengths) + 3 * 200 + SIZE * 8 * len(lengths)


def test_the_hash_is_exact_in_f32() -> None:
    values = np.arange(PRIME - 1000, PRIME, dtype=np.int64)
    assert np.array_equal(values.astype(np.float32).astype(np.int64), values)
