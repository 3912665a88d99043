"""Every quant type inside a network, dense and mixture, in windows, experts here and elsewhere, in every form.

The reference is transformers in float32 over weights that gguf-py dequantised.

A deviation is the largest difference of a logit, as a part of the largest logit. Stated bounds:

    reference  2e-5    f32 sums in another order
    native     2e-5    the same, over the values as stored; 2e-3 for types it holds in half precision
    eager      5e-2    rows, scales and answers of 4-bit matrices in bf16; 5e-3 for types in half precision
"""

from __future__ import annotations

import platform
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir_console.engine import native
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.forms import EAGER, REFERENCE, Forms, compiled
from kvasir_console.engine.native.linear import FORMATS
from kvasir_console.engine.quant.groups import FOUR_BIT
from kvasir_console.engine.stage import Span, Stage

from builders import EVERY_TYPE, Quant, write_tiny_llama
from reference import logits, reference_llama

N_LAYER = 3
TOKENS = np.random.default_rng(2).integers(0, 288, 24).tolist()


FORMS = ("reference", "eager", "native")


@pytest.fixture(scope="module")
def all_forms(model_cache) -> dict[str, Forms]:
    """Those that this machine has."""
    found = {"reference": REFERENCE}
    if platform.machine() == "x86_64":  # torch packs half precision nowhere else
        found["eager"] = EAGER
    library = native.load(model_cache / "kernels")
    if library is not None:
        found["native"] = compiled(library)
    return found


def bound(forms: Forms, kind: Quant) -> float:
    if forms.name == "native":
        return 2e-5 if kind in FORMATS else 2e-3
    if forms.name == "eager":
        return 5e-2 if kind in FOUR_BIT else 5e-3
    return 2e-5


@pytest.fixture(scope="module", params=EVERY_TYPE, ids=lambda kind: kind.name)
def kind(request) -> Quant:
    return request.param


@pytest.fixture(scope="module", params=["dense", "mixture"])
def case(request, kind, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A model and its logits by the reference."""
    path = tmp_path_factory.mktemp(kind.name) / f"{request.param}.gguf"
    sizes = {"n_layer": N_LAYER, "n_embd": 256, "n_ff": 256, "weight_type": kind, "seed": int(kind)}
    mixture = {"n_expert": 4, "n_expert_used": 2} if request.param == "mixture" else {}
    write_tiny_llama(path, **sizes, **mixture)
    return path, logits(reference_llama(path), TOKENS)


def elsewhere(path: Path, forms: Forms):
    """Each layer's experts in two banks of their own."""
    with Checkpoint.open(path) as checkpoint:
        banks = {
            layer: [ExpertBank.load(checkpoint, layer, begin, end, forms=forms) for begin, end in ((0, 3), (3, 4))]
            for layer in range(N_LAYER)
        }

    def compute(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        rows = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
        for bank in banks[layer]:
            mine = ((ids >= bank.begin) & (ids < bank.end)).reshape(-1)
            local = ids.reshape(-1)[mine] - bank.begin
            total += bank.weighted_sum(x, rows[mine], local, weights.reshape(-1)[mine])
        return total

    return compute


def run(path: Path, forms: Forms, ends: list[int], experts=None) -> torch.Tensor:
    with Checkpoint.open(path) as checkpoint:
        stages = [Stage.load(checkpoint, begin, end, forms=forms) for begin, end in pairwise([0, *ends])]
    hidden = stages[0].embed(torch.tensor(TOKENS))
    for stage in stages:
        hidden = stage.forward(hidden, [Span(stage.new_cache(len(TOKENS)), 0, len(TOKENS))], experts)
    return stages[-1].logits(hidden)


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_the_reference(case, kind, name, all_forms):
    if name not in all_forms:
        pytest.skip(f"this machine has no {name} form")
    path, wanted = case
    forms = all_forms[name]
    whole = run(path, forms, [3])
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < bound(forms, kind)
    for ends in ([1, 3], [1, 2, 3]):
        assert torch.equal(run(path, forms, ends), whole)
    if path.stem == "mixture":
        assert torch.equal(run(path, forms, [2, 3], elsewhere(path, forms)), whole)
