"""One rank's passes: batched or alone, drafted and rejected, a row's values and the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest
import torch

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.ring_log import REFILL, WANT_TOKEN
from kvasir_console.engine.process.ring_window import RingWindow
from kvasir_console.engine.sampling import SamplingParams
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import EngineError, RequestError
from kvasir_console.relay.wire.ring import Held, Item, RingError

import builders

PENALIZED = SamplingParams(0.8, seed=5, repetition_penalty=1.4, frequency_penalty=0.5)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Both the first and the last rank: embedding and head are at hand."""
    path = builders.write_tiny_llama(tmp_path_factory.mktemp("m") / "m.gguf", seed=8)
    with Checkpoint.open(path) as checkpoint, torch.inference_mode():
        return Stage.load(checkpoint, 0, 2)


@pytest.fixture(autouse=True)
def _without_autograd() -> Iterator[None]:
    with torch.inference_mode():
        yield


def window(stage: Stage, blocks: int = 50) -> RingWindow:
    return RingWindow(stage, KvBudget(blocks * stage.cache_bytes(1)), samples=True)


def admit(ring: RingWindow, request_id: int, prompt: list[int], sampling: SamplingParams = PENALIZED) -> None:
    ring.admit(request_id, {"sampling": asdict(sampling), "capacity": 100}, prompt)


def advance(ring: RingWindow, stage: Stage, *parts: tuple[int, int, list[int]], each: bool = False) -> list[list[int]]:
    """Pass (request, position, tokens) through; a token after the last row of each, or after ``each`` row."""
    items: list[Item] = []
    for request_id, position, tokens in parts:
        if each:
            items += [Item(request_id, 0, position + n, 1, WANT_TOKEN) for n in range(len(tokens))]
        else:
            items.append(Item(request_id, 0, position, len(tokens), WANT_TOKEN))
    rows = stage.embed(torch.tensor([token for _, _, tokens in parts for token in tokens]))
    advanced = ring.advance(items, rows)
    assert advanced.errors == []
    assert advanced.items == tuple(items)
    assert advanced.hidden.shape == (sum(item.rows for item in items), 64)
    return [[token for item, token in advanced.tokens if item.request_id == part[0]] for part in parts]


def decoded(stage: Stage, prompt: list[int], count: int) -> list[int]:
    """A sequence alone, token by token."""
    ring = window(stage)
    admit(ring, 1, prompt)
    tokens = [*prompt]
    (chosen,) = advance(ring, stage, (1, 0, prompt))
    for _ in range(count):
        tokens += chosen
        (chosen,) = advance(ring, stage, (1, len(tokens) - 1, tokens[-1:]))
    return tokens[len(prompt) :]


def test_sequences_of_one_frame_have_what_they_have_alone(stage: Stage) -> None:
    prompts = {n: list(range(5 * n, 5 * n + 3 + 7 * n)) for n in range(1, 5)}
    ring = window(stage)
    for n, prompt in prompts.items():
        admit(ring, n, prompt)
    tokens = {n: list(prompt) for n, prompt in prompts.items()}
    chosen = advance(ring, stage, *((n, 0, prompt) for n, prompt in prompts.items()))
    for _ in range(12):
        for n, token in zip(tokens, chosen, strict=True):
            tokens[n] += token
        chosen = advance(ring, stage, *((n, len(mine) - 1, mine[-1:]) for n, mine in tokens.items()))
    for n, prompt in prompts.items():
        assert tokens[n][len(prompt) :] == decoded(stage, prompt, 12)


@pytest.mark.parametrize("good", range(5))
def test_a_rejected_draft_leaves_nothing_behind(stage: Stage, good: int) -> None:
    """Penalties make the choice depend on the history, which must forget rejected choices too."""
    prompt = list(range(40, 60))
    alone = decoded(stage, prompt, 12)
    ring = window(stage)
    admit(ring, 1, prompt)
    assert advance(ring, stage, (1, 0, prompt)) == [[alone[0]]]
    at = len(prompt)
    draft = [*alone[1 : good + 1], *([7] * (5 - good))]
    (chosen,) = advance(ring, stage, (1, at, [alone[0], *draft]), each=True)
    assert chosen[: good + 1] == alone[1 : good + 2]
    (chosen,) = advance(ring, stage, (1, at + good + 1, alone[good + 1 : good + 4]), each=True)
    assert chosen == alone[good + 2 : good + 5]


def test_rows_of_a_sequence_that_is_gone_are_dropped(stage: Stage) -> None:
    ring = window(stage)
    admit(ring, 1, [5, 6])
    admit(ring, 2, [7, 8])
    assert ring.release(1)
    assert not ring.release(1)
    rows = stage.embed(torch.tensor([5, 6, 7, 8]))
    items = [Item(1, 0, 0, 2, WANT_TOKEN), Item(2, 0, 0, 2, WANT_TOKEN)]
    advanced = ring.advance(items, rows)
    assert advanced.items == (items[1],)
    assert [item for item, _ in advanced.tokens] == [items[1]]
    other = window(stage)
    admit(other, 2, [7, 8])
    assert np.array_equal(advanced.hidden, other.advance(items[1:], rows[2:]).hidden)


def test_a_sequence_that_skips_rows_is_refused_and_no_other(stage: Stage) -> None:
    ring = window(stage)
    for n in (1, 2):
        admit(ring, n, [5, 6])
    items = [Item(1, 0, 4, 1, WANT_TOKEN), Item(2, 0, 0, 1, WANT_TOKEN)]
    advanced = ring.advance(items, stage.embed(torch.tensor([5, 5])))
    assert [(item, error.code) for item, error in advanced.errors] == [(items[0], "wrong_position")]
    assert advanced.items == (items[1],)


def test_a_history_that_nobody_can_choose_after_ends_its_sequence_and_no_other(stage: Stage) -> None:
    ring = window(stage)
    admit(ring, 1, [5, 4_000_000_000])
    admit(ring, 2, [5, 6])
    items = [Item(1, 0, 0, 2, WANT_TOKEN), Item(2, 0, 0, 2, WANT_TOKEN)]
    advanced = ring.advance(items, stage.embed(torch.tensor([5, 6, 5, 6])))
    assert [item for item, _ in advanced.errors] == [items[0]]
    assert [item for item, _ in advanced.tokens] == [items[1]]


def refill(request_id: int, begin: int, end: int) -> Item:
    return Item(request_id, 0, begin, end - begin, REFILL | WANT_TOKEN)


def test_rows_that_come_again_make_the_history_and_say_nothing(stage: Stage) -> None:
    """A rank that comes back is filled with rows alone, and chooses as the one that was lost, penalties included."""
    prompt = list(range(40, 60))
    alone = decoded(stage, prompt, 12)
    ring = window(stage)
    admit(ring, 1, prompt)
    tokens = prompt + alone[:8]
    advanced = ring.advance([refill(1, 0, 20), refill(1, 20, 27)], stage.embed(torch.tensor(tokens[:27])))
    assert (advanced.errors, advanced.tokens) == ([], [])
    assert ring.recomputed_rows == ring.rows == 27
    assert ring.held() == {1: Held(0, 27, 27)}
    (chosen,) = advance(ring, stage, (1, 27, [tokens[27], *alone[8:11]]), each=True)
    assert chosen == alone[8:12]
    assert ring.recomputed_rows == 27


def test_what_rank_0_told_is_not_chosen_again(stage: Stage) -> None:
    prompt = list(range(40, 60))
    alone = decoded(stage, prompt, 12)
    ring = window(stage)
    lie = [(token + 1) % 99 for token in alone[:8]]
    ring.tell({1: prompt + lie, 2: prompt})  # before the sequence is here
    admit(ring, 1, prompt)
    ring.advance([refill(1, 0, 20), refill(1, 20, 27)], stage.embed(torch.tensor((prompt + alone)[:27])))
    assert ring._held[1].history[:28] == prompt + lie
    ring.tell({1: prompt + alone[:8]})
    assert ring._held[1].history[:28] == prompt + lie  # its first word is as good as any
    admitted = window(stage)
    params = {"sampling": asdict(PENALIZED), "capacity": 100, "prompt_length": 20}
    admitted.admit(1, params, prompt + alone[:8])
    admitted.advance([refill(1, 0, 20), refill(1, 20, 27)], stage.embed(torch.tensor((prompt + alone)[:27])))
    (chosen,) = advance(admitted, stage, (1, 27, alone[7:8]))
    assert chosen == alone[8:9]


def test_a_step_that_comes_twice_counts_as_computed_again(stage: Stage) -> None:
    prompt = list(range(40, 60))
    ring = window(stage)
    admit(ring, 1, prompt)
    rows = stage.embed(torch.tensor([*prompt, 7, 8]))
    ring.advance([Item(1, 5, 0, 20, WANT_TOKEN)], rows[:20])
    draft = [Item(1, 6, 20, 1, WANT_TOKEN), Item(1, 6, 21, 1, WANT_TOKEN)]
    first = ring.advance(draft, rows[20:])
    assert ring.held() == {1: Held(6, 20, 22)}
    assert ring.recomputed_rows == 0
    second = ring.advance(draft, rows[20:])
    assert second.tokens == first.tokens
    assert ring.recomputed_rows == 2
    ring.advance([Item(1, 7, 21, 1, WANT_TOKEN)], rows[21:])  # the draft was wrong: that is no loss
    assert ring.held() == {1: Held(7, 21, 22)}
    assert ring.recomputed_rows == 2


def test_memory_is_accounted_and_refusals_are_named(stage: Stage) -> None:
    ring = window(stage, blocks=2)
    admit(ring, 1, [5])
    admit(ring, 2, [5])
    with pytest.raises(EngineError) as full:
        admit(ring, 3, [5])
    assert full.value.code == "kv_budget_full"
    assert not ring.fits(100)
    ring.release(1)
    admit(ring, 3, [5])
    with pytest.raises(RequestError) as never:
        ring.check(513)
    assert never.value.code == "kv_budget_exceeded"
    ring.clear()
    assert (len(ring), ring.budget.reserved_bytes) == (0, 0)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"sampling": {}},
        {"sampling": {"colour": 1}, "capacity": 5},
        {"sampling": 5, "capacity": 5},
        {"sampling": {}, "capacity": 5, "prompt_length": 1},
    ],
)
def test_a_malformed_admission_is_an_error_of_the_ring(stage: Stage, params: dict[str, object]) -> None:
    with pytest.raises(RingError):
        window(stage).admit(1, params, [])
