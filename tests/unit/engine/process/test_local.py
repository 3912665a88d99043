"""The trunk's pipeline over a tiny model: one bad sequence, and what a step leaves in caches and counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.local import LocalPipeline
from kvasir_console.engine.process.pipeline import PREFILL_CHUNK, Feed, SequenceParams
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import KvasirError

import builders

PARAMS = SequenceParams(SamplingParams(), 600, tuple(range(5, 35)))


@pytest.fixture(scope="module", params=["f32", "f16"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    path = builders.write_tiny_llama(tmp_path_factory.mktemp("m") / "m.gguf", seed=4, context_length=1024)
    with Checkpoint.open(path) as checkpoint, torch.inference_mode():
        return Stage.load(checkpoint, 0, 2, kv_type=request.param)


@pytest.fixture
def compute() -> Iterator[Compute]:
    thread = Compute()
    yield thread
    thread.close()


def made(stage: Stage, compute: Compute, blocks: int = 100) -> LocalPipeline:
    return LocalPipeline(stage, compute, KvBudget(blocks * stage.cache_bytes(PREFILL_CHUNK)))


async def step(pipeline: LocalPipeline, feeds: list[Feed]) -> list[Any]:
    """One step and no more."""
    taken: list[Any] = []

    def take(outcomes: list[Any]) -> list[Feed]:
        taken.extend(outcomes)
        return []

    await pipeline.run(feeds, take)
    return taken


async def begun(pipeline: LocalPipeline, params: SequenceParams = PARAMS) -> tuple[Any, int]:
    sequence = await pipeline.open(params)
    ((choice,),) = await step(pipeline, [Feed(sequence, list(params.prompt_tokens), 0, 1)])
    return sequence, choice.token


async def test_a_draft_is_kept_as_far_as_it_is_right(stage: Stage, compute: Compute) -> None:
    pipeline = made(stage, compute)
    sequence, token = await begun(pipeline)
    right, at = [token], len(PARAMS.prompt_tokens)
    for place in range(5):
        ((choice,),) = await step(pipeline, [Feed(sequence, [right[-1]], at + place, 1)])
        right.append(choice.token)
    for good in range(5):
        wrong = (right[good + 1] + 1) % 288
        tokens = [*right[: good + 1], wrong, *right[good + 2 : 5]]
        other, _ = await begun(pipeline)
        (choices,) = await step(pipeline, [Feed(other, tokens, at, len(tokens))])
        assert [choice.token for choice in choices] == right[1 : good + 2]
        assert other.cache.length == at + good + 1
        assert other.tally.rows == at + good + 1
        ((choice,),) = await step(pipeline, [Feed(other, [right[good + 1]], at + good + 1, 1)])
        if good < 4:
            assert choice.token == right[good + 2]
        await pipeline.close(other)


async def test_one_that_cannot_go_on_takes_nobody_with_it(stage: Stage, compute: Compute) -> None:
    pipeline = made(stage, compute)
    short = replace(PARAMS, capacity=len(PARAMS.prompt_tokens))
    (full, a), (fine, b), (alone, c) = [await begun(pipeline, each) for each in (short, PARAMS, PARAMS)]
    at = len(PARAMS.prompt_tokens)
    refused, choices = await step(pipeline, [Feed(full, [a], at, 1), Feed(fine, [b], at, 1)])
    assert isinstance(refused, KvasirError)
    assert refused.code == "context_length_exceeded"
    (expected,) = await step(pipeline, [Feed(alone, [c], at, 1)])
    assert choices == expected
    assert fine.tally.rows == alone.tally.rows == at + 1
    assert (fine.cache.length, full.cache.length) == (at + 1, at)


async def test_many_steps_in_a_row_are_not_one_without_end(stage: Stage, compute: Compute) -> None:
    """A long answer with no company is computed in one go: what is taken for stuck is a step, not all of them."""
    pipeline = made(stage, compute)
    sequence, token = await begun(pipeline)
    computing_s: list[float] = []

    def more(outcomes: list[Any]) -> list[Feed]:
        computing_s.append(compute.computing_s)
        compute._began -= 1000  # as if this one had taken so long
        ((choice,),) = outcomes
        return [Feed(sequence, [choice.token], sequence.cache.length, 1)] if len(computing_s) < 3 else []

    await pipeline.run([Feed(sequence, [token], len(PARAMS.prompt_tokens), 1)], more)
    assert len(computing_s) == 3
    assert max(computing_s) < 1000


async def test_closing_gives_back_what_opening_took(stage: Stage, compute: Compute) -> None:
    pipeline = made(stage, compute, blocks=7)
    sequences = [await pipeline.open(PARAMS) for _ in range(2)]
    assert not pipeline.fits(PARAMS)
    assert pipeline.stats()["kv"]["reserved_bytes"] == 2 * stage.cache_bytes(600)
    for sequence in sequences:
        await pipeline.close(sequence)
    assert pipeline.stats()["kv"]["reserved_bytes"] == 0
    assert pipeline.fits(PARAMS)
    with pytest.raises(KvasirError) as refusal:
        pipeline.check(replace(PARAMS, capacity=7 * PREFILL_CHUNK + 1))
    assert refusal.value.code == "kv_budget_exceeded"


async def test_a_request_that_comes_in_the_middle_of_another_begins_from_its_blocks(
    stage: Stage, compute: Compute
) -> None:
    pipeline = made(stage, compute)
    params = replace(PARAMS, prompt_tokens=tuple(5 + n % 250 for n in range(PREFILL_CHUNK + 40)))
    first = await pipeline.open(params)
    assert first.reused == 0
    assert await step(pipeline, [Feed(first, list(params.prompt_tokens[:PREFILL_CHUNK]), 0, 0)]) == [[]]
    second = await pipeline.open(params)
    assert second.reused == PREFILL_CHUNK
    rest = list(params.prompt_tokens[PREFILL_CHUNK:])
    one, other = await step(pipeline, [Feed(each, rest, PREFILL_CHUNK, 1) for each in (first, second)])
    assert one == other
    assert (first.tally.rows, second.tally.rows) == (PREFILL_CHUNK + 40, 40)


async def test_of_a_prompt_that_is_kept_whole_the_last_block_is_computed_again(stage: Stage, compute: Compute) -> None:
    pipeline = made(stage, compute)
    params = replace(PARAMS, prompt_tokens=tuple(5 + n % 250 for n in range(2 * PREFILL_CHUNK)))
    chosen = []
    for reused in (0, PREFILL_CHUNK):
        sequence = await pipeline.open(params)
        assert sequence.reused == reused
        for begin in range(reused, 2 * PREFILL_CHUNK, PREFILL_CHUNK):
            tokens = list(params.prompt_tokens[begin : begin + PREFILL_CHUNK])
            (choices,) = await step(pipeline, [Feed(sequence, tokens, begin, int(begin > 0))])
        chosen.append(choices)
        await pipeline.close(sequence)
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 1
