"""The real SmolLM2, dense and upcycled, against transformers in float32 over weights that gguf-py dequantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.stage import Stage
from kvasir_console.engine.tokens import Tokenizer

from reference import greedy

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
PROMPT_TOKENS = [504, 3575, 282, 4649, 314]
"""By llama.cpp's tokenizer."""
COUNT = 32
MOE_COUNT = 12


def generate(stages: list[Stage], prompt: list[int], count: int) -> list[int]:
    caches = [stage.new_cache(len(prompt) + count) for stage in stages]
    tokens: list[int] = []
    fed = prompt
    with torch.inference_mode():
        while len(tokens) < count:
            hidden = stages[0].embed(torch.tensor(fed))
            for stage, cache in zip(stages, caches, strict=True):
                hidden = stage.forward(hidden, cache, cache.length)
            fed = [int(stages[-1].logits(hidden[-1:])[0].argmax())]
            tokens += fed
    return tokens


@pytest.fixture(scope="module")
def reference_tokens(smollm2_path: Path) -> list[int]:
    return greedy(smollm2_path, PROMPT_TOKENS, COUNT)


@pytest.mark.parametrize("ends", [[30], [12, 30]], ids=["one stage", "two stages"])
def test_greedy_tokens_are_those_of_the_reference(smollm2_path, reference_tokens, ends):
    with Checkpoint.open(smollm2_path) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
        stages = [Stage.load(checkpoint, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    prompt = tokenizer.encode(PROMPT)
    assert prompt == PROMPT_TOKENS
    tokens = generate(stages, prompt, COUNT)
    assert tokens == reference_tokens
    assert tokenizer.decode(tokens).startswith(" Paris")


def test_greedy_tokens_of_the_mixture_are_those_of_the_reference(smollm2_moe_path):
    wanted = greedy(smollm2_moe_path, PROMPT_TOKENS, MOE_COUNT)
    with Checkpoint.open(smollm2_moe_path) as checkpoint:
        stage = Stage.load(checkpoint, 0, 30)
    assert sorted(stage.banks) == list(range(30))
    assert generate([stage], PROMPT_TOKENS, MOE_COUNT) == wanted
