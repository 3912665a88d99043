"""Planted differences show where they were planted, and equal bits show nothing at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Quant
from gguf_draft import Draft, parsed

from kvasir_console.bench import equivalence
from kvasir_console.bench.equivalence import describe, divergence, greedy, relative
from kvasir_console.bench.side import Configuration, Side
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.errors import UsageError

import builders
import reference

EXACT = Configuration("reference")


def moe(folder: Path) -> Path:
    return builders.write_tiny_llama(
        folder / "moe.gguf", n_layer=3, n_expert=4, n_expert_used=2, weight_type=(Quant.F16, Quant.Q8_0)
    )


def compare(
    folder: Path, model: Path, a: Configuration = EXACT, b: Configuration = EXACT, *, tokens: int = 6,
    spoil: Callable[[Draft], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """B reads a spoiled copy of the model, if there is something to spoil."""
    other = None
    if spoil is not None:
        draft = parsed(model.read_bytes())
        spoil(draft)
        other = folder / "spoiled.gguf"
        other.write_bytes(draft.bytes())
    return equivalence.run(
        model, a, b, cache=folder / "kernels", tokens=tokens, prompts=2, b_model=other, say=lambda _: None
    )


def scaled(draft: Draft, name: str, factor: float) -> None:
    """Multiply a tensor of half-precision values."""
    tensor = draft.tensor(name)
    assert tensor is not None
    assert tensor.type == Quant.F16
    count = math.prod(tensor.dims) * 2
    values = np.frombuffer(tensor.data[:count], np.float16) * np.float16(factor)
    tensor.data = values.astype(np.float16).tobytes() + tensor.data[count:]


@pytest.mark.parametrize("kernels", ["reference", "eager"])
@pytest.mark.parametrize("write", [moe, lambda folder: builders.write_tiny_gemma3(folder / "g.gguf", n_layer=6)])
def test_a_side_compared_with_itself_differs_in_nothing(
    tmp_path: Path, write: Callable[[Path], Path], kernels: str
) -> None:
    side = Configuration(kernels)
    report = compare(tmp_path, write(tmp_path), side, side)
    assert report["identical"]
    assert all(each["rms"] == each["max"] == 0.0 for each in report["operations"].values())
    assert all(layer[name] == 0.0 for layer in report["layers"] for name in ("l2", "max", "own_l2", "own_max"))
    logits = report["logits"]
    assert logits["kl_mean"] == logits["kl_max"] == 0.0
    assert logits["cosine_mean"] == logits["cosine_min"] == logits["top1_agreement"] == 1.0
    assert [each["first_divergence"] for each in report["greedy"]] == [None, None]


def test_a_changed_matrix_shows_at_its_type_its_name_and_its_layer(tmp_path: Path) -> None:
    report = compare(tmp_path, moe(tmp_path), spoil=lambda draft: scaled(draft, "blk.1.attn_q.weight", 1.5))
    assert not report["identical"]
    assert report["operations"]["F16"]["worst"] == "blk.1.attn_q.weight"
    assert report["operations"]["F16"]["rms"] == pytest.approx(0.5, rel=1e-3)
    assert report["operations"]["Q8_0"]["max"] == report["operations"]["F32"]["max"] == 0.0
    before, there, after = report["layers"]
    assert before["l2"] == before["own_l2"] == 0.0
    assert there["l2"] == there["own_l2"] > 1e-3  # nothing came with it
    assert after["l2"] > 1e-3
    assert after["own_l2"] == after["own_max"] == 0.0
    assert before["routing"] == 1.0
    assert report["logits"]["kl_mean"] > 1e-6


def test_a_changed_router_sends_rows_elsewhere_in_its_own_layer(tmp_path: Path) -> None:
    def other_way_round(draft: Draft) -> None:
        router = draft.tensor("blk.1.ffn_gate_inp.weight")
        assert router is not None
        router.data = (-np.frombuffer(router.data, np.float32)).tobytes()

    report = compare(tmp_path, moe(tmp_path), spoil=other_way_round)
    assert [layer["routing"] == 1.0 for layer in report["layers"]][:2] == [True, False]
    # Of four experts the last two are chosen now: none is the same.
    assert report["layers"][1]["routing"] == 0.0
    rows = report["routing"]["rows"]
    assert rows == 3 * report["logits"]["places"]
    assert report["routing"]["agreement"] == pytest.approx(sum(each["routing"] for each in report["layers"]) / 3)


def test_a_changed_output_shows_in_logits_only(tmp_path: Path) -> None:
    def other_way_round(draft: Draft) -> None:
        table = draft.tensor("output.weight")
        assert table is not None
        table.data = (-np.frombuffer(table.data, np.float32)).tobytes()

    model = builders.write_tiny_llama(tmp_path / "dense.gguf")
    report = compare(tmp_path, model, spoil=other_way_round)
    assert all(layer["l2"] == 0.0 for layer in report["layers"])
    assert report["routing"] is None
    assert report["operations"]["F32"]["rms"] == pytest.approx(2.0)
    assert report["logits"]["cosine_mean"] == pytest.approx(-1.0)
    assert report["logits"]["top1_agreement"] == 0.0
    assert [each["first_divergence"] for each in report["greedy"]] == [0, 0]


def test_a_changed_table_shows_at_the_first_boundary_and_in_no_layer(tmp_path: Path) -> None:
    report = compare(tmp_path, moe(tmp_path), spoil=lambda draft: scaled(draft, "token_embd.weight", 2.0))
    assert report["embedding"]["l2"] == pytest.approx(1.0)
    assert all(layer["own_l2"] == 0.0 < layer["l2"] for layer in report["layers"])


def test_a_coarser_cache_is_an_error_of_every_layer_and_of_no_product(tmp_path: Path) -> None:
    model = builders.write_tiny_llama(tmp_path / "wide.gguf", n_embd=128, n_head=4)
    report = compare(tmp_path, model, b=Configuration("reference", kv="q8_0"))
    assert report["operations"]["F32"]["max"] == 0.0
    assert all(1e-5 < layer["own_l2"] < 1e-1 for layer in report["layers"])


def test_another_type_of_the_same_network_is_named_beside_the_first(tmp_path: Path) -> None:
    def quantised(draft: Draft) -> None:
        tensor = draft.tensor("blk.0.ffn_up.weight")
        assert tensor is not None
        values = np.frombuffer(tensor.data, np.float32).reshape(96, 64)
        tensor.type, tensor.data = Quant.Q4_0, builders.stored(values, Quant.Q4_0, np.random.default_rng(0)).tobytes()

    model = builders.write_tiny_llama(tmp_path / "dense.gguf")
    report = compare(tmp_path, model, spoil=quantised)
    assert report["operations"]["F32 / Q4_0"]["matrices"] == 1
    assert 0.01 < report["operations"]["F32 / Q4_0"]["rms"] < 0.3
    assert report["operations"]["F32"]["max"] == 0.0


def test_another_network_is_refused(tmp_path: Path) -> None:
    other = builders.write_tiny_llama(tmp_path / "other.gguf", n_layer=3)
    with pytest.raises(UsageError) as caught:
        equivalence.run(
            builders.write_tiny_llama(tmp_path / "one.gguf"), EXACT, EXACT, cache=tmp_path, tokens=1, prompts=1,
            b_model=other, say=lambda _: None,
        )  # fmt: skip
    assert caught.value.code == "different_models"


def test_greedy_tokens_are_those_of_an_independent_implementation(tmp_path: Path) -> None:
    model = moe(tmp_path)
    with torch.inference_mode(), Checkpoint.open(model) as checkpoint:
        side = Side.load(EXACT, checkpoint, tmp_path)
        assert greedy(side, [40, 7, 260, 99], 8) == reference.greedy(reference.reference(model), [40, 7, 260, 99], 8)


def test_logits_are_compared_as_torch_does_it() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 50, generator=generator), torch.randn(5, 50, generator=generator)
    found = equivalence.Distributions()
    found.add(a, b)
    p, q = a.double().log_softmax(1), b.double().log_softmax(1)
    assert found.kl == pytest.approx(F.kl_div(q, p, log_target=True, reduction="none").sum(1).tolist())
    assert found.cosine == pytest.approx(F.cosine_similarity(a.double(), b.double()).tolist())
    assert found.first == (a.argmax(1) == b.argmax(1)).tolist()


def test_differences_are_relative_and_what_is_no_number_is_not_hidden() -> None:
    assert relative(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])) == (0.2, 0.25)
    assert relative(torch.zeros(2), torch.zeros(2)) == (0.0, 0.0)
    assert relative(torch.zeros(2), torch.ones(2)) == (math.inf, math.inf)
    assert all(map(math.isnan, relative(torch.ones(2), torch.tensor([1.0, math.nan]))))


def test_weights_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    report = compare(tmp_path, moe(tmp_path), spoil=lambda draft: scaled(draft, "blk.1.attn_q.weight", math.nan))
    assert not report["identical"]
    assert report["operations"]["F16"]["worst"] == "blk.1.attn_q.weight"
    assert math.isnan(report["operations"]["F16"]["max"])
    assert report["layers"][0]["l2"] == 0.0
    assert math.isnan(report["layers"][1]["own_l2"])
    assert math.isnan(report["logits"]["kl_max"])
    assert "nan" in describe(report)


def test_a_divergence_is_the_first_place() -> None:
    assert divergence([1, 2, 3, 4], [1, 2, 5, 6]) == {"tokens": 4, "first_divergence": 2, "a": 3, "b": 5}
    assert divergence([1, 2], [1, 2]) == {"tokens": 2, "first_divergence": None}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("eager", Configuration("eager", threads=3)),
        ("native:threads=1", Configuration("native", threads=1)),
        ("reference:kv=q8_0:threads=2:device=cpu", Configuration("reference", "q8_0", 2, "cpu")),
        ("auto:device=cpu:0", Configuration("auto", threads=3, device="cpu:0")),
    ],
)
def test_a_configuration_is_read(text: str, wanted: Configuration) -> None:
    assert Configuration.parse(text, threads=3) == wanted
    assert Configuration.parse(str(wanted), threads=7) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "fast", "native:", "native:kv", "native:kv=q2", "native:threads=0", "native:threads=-1", "native:threads=x",
     "native:threads=1:threads=2", "native:kernels=eager", "native:device", "native:device=toaster", "native:3"],
)  # fmt: skip
def test_a_configuration_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Configuration.parse(text, threads=1)
    assert caught.value.code == "bad_configuration"


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(UsageError) as caught:
        Configuration.parse("reference:device=cuda:1", threads=1)
    assert caught.value.code == "no_such_device"
    assert "cuda:1" in caught.value.message
