"""Real checkpoints against transformers in float32 over weights that gguf-py dequantised."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir_console.engine import native
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.forms import EAGER, REFERENCE, Forms, compiled
from kvasir_console.engine.stage import Span, Stage
from kvasir_console.engine.tokens import Tokenizer

from reference import greedy, logits, reference

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"
PROMPT_TOKENS = [504, 3575, 282, 4649, 314]
"""By llama.cpp's tokenizer."""
LONG_PROMPT = np.random.default_rng(0).integers(5, 200_000, 700).tolist()
LONG_POSITIONS = range(500, 700)
LAYERS = {"smollm2": 30, "gemma3": 18}
COUNT = 32
MOE_COUNT = 12
TEXT = (
    "The river rises in the hills north of the town and runs for forty kilometres before it meets the sea. In summer "
    "it is shallow enough to wade across, but after the first storms of autumn it carries whole trees. In 1894 a flood "
    "destroyed the mill and two bridges. def area(radius): return 3.14159 * radius ** 2"
)


@pytest.fixture(scope="module", params=["reference", "native", "eager"])
def forms(request, model_cache) -> Forms:
    if request.param == "native":
        library = native.load(model_cache / "kernels")
        if library is None:
            pytest.skip("there is no C++ compiler here")
        return compiled(library)
    return {"reference": REFERENCE, "eager": EAGER}[request.param]


def load(path: Path, forms: Forms, ends: list[int]) -> list[Stage]:
    with Checkpoint.open(path) as checkpoint:
        return [Stage.load(checkpoint, begin, end, forms=forms) for begin, end in pairwise([0, *ends])]


def generate(stages: list[Stage], prompt: list[int], count: int) -> list[int]:
    caches = [stage.new_cache(len(prompt) + count) for stage in stages]
    tokens: list[int] = []
    fed = prompt
    with torch.inference_mode():
        while len(tokens) < count:
            hidden = stages[0].embed(torch.tensor(fed))
            for stage, cache in zip(stages, caches, strict=True):
                hidden = stage.forward(hidden, [Span(cache, cache.length, len(fed))])
            fed = [int(stages[-1].logits(hidden[-1:])[0].argmax())]
            tokens += fed
    return tokens


def ours(stage: Stage, tokens: list[int], positions: Sequence[int]) -> torch.Tensor:
    """The logits of some positions."""
    with torch.inference_mode():
        rows = stage.embed(torch.tensor(tokens))
        hidden = stage.forward(rows, [Span(stage.new_cache(len(tokens)), 0, len(tokens))])
        return stage.logits(hidden[torch.tensor(positions)])


def divergence(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence from the exact distributions, in nats."""
    wanted, got = exact.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


DIVERGENCE = {"reference": 1e-9, "native": 1e-9, "eager": 1e-3}
"""Bounds. llama.cpp, which rounds activations to 8 bits, is at 4e-3 on this text."""


@dataclass(frozen=True, slots=True)
class Exact:
    """What the reference says of a checkpoint: the distributions of ``TEXT`` and of a long prompt's last positions, and
    the greedy tokens after a short one. Building it takes longer than anything else here, so it is built once."""

    path: Path
    text: list[int]
    text_logits: torch.Tensor
    prompt: list[int]
    greedy: list[int]
    long_logits: torch.Tensor | None = None

    @classmethod
    def of(cls, path: Path, prompt: list[int], long: bool = False) -> Exact:
        with Checkpoint.open(path) as checkpoint:
            text = Tokenizer.from_metadata(checkpoint.metadata).encode(TEXT)
        model = reference(path)
        return cls(
            path,
            text,
            logits(model, text),
            prompt,
            greedy(model, prompt, COUNT),
            logits(model, LONG_PROMPT, LONG_POSITIONS) if long else None,
        )


@pytest.fixture(scope="module")
def smollm2_exact(smollm2_path: Path) -> Exact:
    return Exact.of(smollm2_path, PROMPT_TOKENS)


@pytest.fixture(scope="module")
def gemma3_exact(gemma3_path: Path) -> Exact:
    return Exact.of(gemma3_path, LONG_PROMPT[:20], long=True)


@pytest.mark.parametrize("ends", [[30], [12, 30]], ids=["one stage", "two stages"])
def test_greedy_tokens_are_those_of_the_reference(smollm2_path, smollm2_exact, forms, ends):
    if forms.name == "eager":
        pytest.skip("its rounding may turn a token; its divergence is bounded below")
    with Checkpoint.open(smollm2_path) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    prompt = tokenizer.encode(PROMPT)
    assert prompt == PROMPT_TOKENS
    tokens = generate(load(smollm2_path, forms, ends), prompt, COUNT)
    assert tokens == smollm2_exact.greedy
    assert tokenizer.decode(tokens).startswith(" Paris")


def test_greedy_tokens_of_the_mixture_are_those_of_the_reference(smollm2_moe_path, model_cache):
    wanted = greedy(reference(smollm2_moe_path), PROMPT_TOKENS, MOE_COUNT)
    library = native.load(model_cache / "kernels")
    for forms in [REFERENCE] if library is None else [compiled(library), REFERENCE]:
        (stage,) = load(smollm2_moe_path, forms, [30])
        assert sorted(stage.banks) == list(range(30))
        assert generate([stage], PROMPT_TOKENS, MOE_COUNT) == wanted
        assert sum(int(bank.pairs.sum()) for bank in stage.banks.values()) == 2 * 30 * (
            len(PROMPT_TOKENS) + MOE_COUNT - 1
        )


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_distributions_are_those_of_the_reference(request, name, forms):
    exact: Exact = request.getfixturevalue(f"{name}_exact")
    (stage,) = load(exact.path, forms, [LAYERS[name]])
    rows = ours(stage, exact.text, range(len(exact.text)))
    assert divergence(rows, exact.text_logits) < DIVERGENCE[forms.name]


def test_gemma3_is_the_reference_past_its_window(gemma3_exact, forms):
    """The last of 700 tokens, where local layers see 512; and the greedy tokens after a short prompt."""
    (stage,) = load(gemma3_exact.path, forms, [LAYERS["gemma3"]])
    rows, exact = ours(stage, LONG_PROMPT, LONG_POSITIONS), gemma3_exact.long_logits
    assert divergence(rows, exact) < 10 * DIVERGENCE[forms.name]
    if forms.name != "eager":
        assert float((rows - exact).abs().max() / exact.abs().max()) < 1e-4
        assert generate([stage], gemma3_exact.prompt, COUNT) == gemma3_exact.greedy


WINDOW = (0, 15)
MEMORY_PROGRAM = """
import json, sys
import torch, numpy
import psutil
from pathlib import Path
resident = lambda: psutil.Process().memory_info().rss
empty = resident()
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.choice import choose
from kvasir_console.engine.stage import Span, Stage
path, cache, kernels, begin, end = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(1)
with torch.inference_mode():
    with Checkpoint.open(path) as checkpoint:
        stage = Stage.load(checkpoint, begin, end, forms=choose(kernels, cache=cache, threads=1))
        stored = sum(checkpoint.tensors[name].n_bytes for name in stage.tensor_names)
    held = resident()
    rows = stage.forward(stage.embed(torch.arange(100, 140)), [Span(stage.new_cache(40), 0, 40)])
print(json.dumps({"stored": stored, "grown": held - empty, "rows": rows.flatten().tolist()}))
"""


def measured(path: Path, cache: Path, kernels: str) -> dict[str, object]:
    arguments = [str(path), str(cache), kernels, *map(str, WINDOW)]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("kernels", ["auto", "eager"])
def test_a_window_takes_its_own_bytes_and_reads_no_others(smollm2_path, model_cache, kernels, tmp_path):
    """In a process of its own; then again over a copy of the file with every byte outside the window replaced."""
    first = measured(smollm2_path, model_cache / "kernels", kernels)
    assert first["grown"] <= 1.1 * first["stored"] + 64 * 2**20
    with Checkpoint.open(smollm2_path) as checkpoint:
        copy = tmp_path / "poisoned.gguf"
        content = bytearray(smollm2_path.read_bytes())
        for name, tensor in checkpoint.tensors.items():
            inside = name == "token_embd.weight" or (name.startswith("blk.") and int(name.split(".")[1]) < WINDOW[1])
            if not inside:
                content[tensor.offset : tensor.offset + tensor.n_bytes] = b"\xff" * tensor.n_bytes
        copy.write_bytes(content)
    assert measured(copy, model_cache / "kernels", kernels)["rows"] == first["rows"]
