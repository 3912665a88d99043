"""How many groups keep a ring busy, and the numbers of steps."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvasir_console.engine.process.answers import Answers
from kvasir_console.engine.process.pipeline import Feed, SequenceParams
from kvasir_console.engine.process.ring_pipeline import MAX_GROUPS, RingPipeline, Walk, _numbers
from kvasir_console.engine.process.ring_window import Advanced
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.errors import EngineError


def walk_of(size: int, network_s: float, slowest_s: float, waited_s: float = 0.0) -> Walk:
    walk = Walk(size)
    for _ in range(50):
        inside_s = size * slowest_s + waited_s
        walk.record(network_s + inside_s, inside_s, slowest_s)
    return walk


@pytest.mark.parametrize(
    ("size", "network_ms", "slowest_ms", "groups"),
    [
        (3, 0.0, 5.0, 3),  # no network: one group for each rank
        (2, 40.0, 10.0, 6),  # a walk of 60 ms: six groups of 10 ms
        (3, 60.0, 20.0, 6),
        (3, 60.0, 0.1, MAX_GROUPS),
    ],
)
def test_the_slowest_rank_never_waits(size: int, network_ms: float, slowest_ms: float, groups: int) -> None:
    walk = walk_of(size, network_ms / 1e3, slowest_ms / 1e3)
    assert walk.groups == groups
    if groups < MAX_GROUPS:
        assert groups * slowest_ms >= network_ms + size * slowest_ms


def test_groups_that_wait_for_each_other_are_not_taken_for_a_slow_network() -> None:
    assert walk_of(3, 0.060, 0.020, waited_s=0.5).groups == walk_of(3, 0.060, 0.020).groups


def test_before_anything_is_measured_every_rank_has_a_group() -> None:
    assert Walk(4).groups == 4


def test_numbers_of_steps_go_round_without_0() -> None:
    assert list(itertools.islice(_numbers(2**32 - 2), 4)) == [2**32 - 2, 2**32 - 1, 1, 2]


async def test_the_error_of_a_request_that_is_closed_in_the_middle_of_a_step_is_not_its_successors() -> None:
    """A request with a key that is cancelled while its rows are computed, and asked for again."""
    answers = Answers(10)
    nothing: Any = lambda *_: None  # noqa: E731
    node: Any = SimpleNamespace(
        config=SimpleNamespace(rank=0, size=2),
        answers=answers,
        broken=False,
        rows=SimpleNamespace(admit=nothing),
        window=SimpleNamespace(admit=nothing),
        post_next=nothing,
        pass_on=nothing,
        release=nothing,
    )
    stage: Any = SimpleNamespace(embed=lambda tokens: tokens)

    class Here:
        async def run(self, function: Any) -> Any:
            return function()

    compute: Any = Here()
    pipeline = RingPipeline(node, stage, compute)
    sequence = await pipeline.open(SequenceParams(SamplingParams(), 8, (1, 2), key=5))

    def advance(items: Any, rows: torch.Tensor) -> Advanced:
        with pytest.raises(StopIteration):  # it awaits nothing
            pipeline.close(sequence).send(None)
        return Advanced((), rows[:0], [], [(items[0], EngineError("released", "The sequence was released."))])

    node.window.advance = advance
    found: list[Any] = []
    await pipeline.run([Feed(sequence, [1, 2], 0, 1)], lambda outcomes: found.extend(outcomes) or [])
    assert isinstance(found[0], EngineError)
    await pipeline.open(SequenceParams(SamplingParams(), 8, (1, 2), key=5))
    assert not answers.expect(5, 1, 2, 1).done()
