"""The gemma3 architecture against transformers in float32 over weights that gguf-py dequantised."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.stage import Span, Stage
from kvasir_console.errors import ModelError

from builders import Quant, write_tiny_gemma3
from reference import logits, reference_gemma3

N_LAYER = 7
MIXED = (Quant.Q8_0, Quant.Q5_0, Quant.Q4_1, Quant.F16)
TOKENS = np.random.default_rng(6).integers(0, 288, 300).tolist()


@pytest.fixture(scope="module", params=["f32", "mixed types"])
def path(request, tmp_path_factory) -> Path:
    kinds = {"f32": Quant.F32, "mixed types": MIXED}[request.param]
    return write_tiny_gemma3(tmp_path_factory.mktemp("gemma3") / "tiny.gguf", weight_type=kinds, seed=3)


@pytest.fixture(scope="module")
def wanted(path) -> torch.Tensor:
    return logits(reference_gemma3(path), TOKENS)


def run(path: Path, forms, ends: list[int], cuts: list[int], tokens: list[int] = TOKENS) -> torch.Tensor:
    """Logits of every position, through windows up to ``ends`` in turn, fed in pieces up to ``cuts``."""
    with Checkpoint.open(path) as checkpoint:
        stages = [Stage.load(checkpoint, begin, end, forms=forms) for begin, end in pairwise([0, *ends])]
    caches = [stage.new_cache(len(tokens)) for stage in stages]
    rows = []
    for begin, end in pairwise([0, *cuts]):
        hidden = stages[0].embed(torch.tensor(tokens[begin:end]))
        for stage, cache in zip(stages, caches, strict=True):
            hidden = stage.forward(hidden, [Span(cache, begin, end - begin)])
        rows.append(hidden)
    return stages[-1].logits(torch.cat(rows))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_logits_are_those_of_the_reference(path, forms, wanted):
    ours = run(path, forms, [N_LAYER], [300])
    assert ours.shape == wanted.shape
    assert relative(ours, wanted) < {"reference": 2e-5, "native": 2e-5, "eager": 5e-2}[forms.name]


@pytest.mark.parametrize("ends", [[2, 7], [1, 6, 7]], ids=str)
def test_windows_and_cuts_change_no_bit(path, forms, ends):
    cuts = [10, 255, 257, 258, 259, 262, 300]
    assert torch.equal(run(path, forms, ends, cuts), run(path, forms, [N_LAYER], [300]))


def test_the_window_and_the_global_layer_matter(tmp_path, forms):
    """The comparison must not be blind to what makes this architecture: another window changes far positions, but
    positions that it does not reach keep their bits."""
    first, second = (
        run(write_tiny_gemma3(tmp_path / f"{window}.gguf", sliding_window=window), forms, [N_LAYER], [300])
        for window in (16, 24)
    )
    assert torch.equal(first[:16], second[:16])
    assert relative(first[40:], second[40:]) > 1e-2


def test_a_missing_norm_is_named(tmp_path):
    path = write_tiny_gemma3(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.3.post_ffw_norm.weight", b"blk.3.post_ffx_norm.weight"))
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=r"blk\.3\.post_ffw_norm"):
        Stage.load(checkpoint, 0, N_LAYER)
