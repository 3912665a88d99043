"""Forms: what each type becomes, and a compiled kernel that is wrong is never used."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.forms import EAGER, MAX_DEVIATION, REFERENCE, compiled, deviation
from kvasir_console.engine.linear import HalfLinear, Rows
from kvasir_console.engine.native import NativeLinear

from builders import EVERY_TYPE, Quant, stored

OTHER = "half" if HalfLinear.available() else "dense"


def part(kind: Quant, count: int = 33, n_in: int = 256, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((count, n_in)) / 16).astype(np.float32)
    raw = torch.from_numpy(np.ascontiguousarray(stored(values, kind, rng)).view(np.uint8)).view(count, -1)
    return Rows(GGMLType(int(kind)), count, n_in, lambda begin, end: raw[begin:end].clone())


@pytest.mark.parametrize("kind", EVERY_TYPE, ids=lambda kind: kind.name)
def test_every_type_has_a_form_everywhere(forms, kind):
    linear = forms.linear([part(kind)], "cpu")
    bound = {"reference": 1e-6, "eager": 2**-8, "native": 1e-6}[forms.name]
    if forms.name == "native" and kind.name.startswith(("IQ1", "IQ2", "IQ3", "TQ", "NVFP4")):
        bound = 2**-11  # held in half precision
    assert deviation(linear, [part(kind)]) < bound
    assert (linear.n_out, linear.n_in) == (33, 256)


@pytest.mark.parametrize(
    ("kinds", "form"),
    [
        ([Quant.Q4_0], "int4"),
        ([Quant.Q4_1, Quant.Q4_K], "int4"),
        ([Quant.Q4_0, Quant.Q8_0], OTHER),
        ([Quant.Q6_K], OTHER),
        ([Quant.F32], "dense"),
    ],
)
def test_torch_alone_takes_the_smallest_form_that_is_close(kinds, form):
    assert EAGER.linear([part(kind) for kind in kinds], "cpu").kind == form


def test_parts_of_several_types_become_one_matrix(forms):
    kinds = (Quant.Q4_1, Quant.Q8_0, Quant.IQ3_S, Quant.F32)
    parts = [part(kind, 20 + 16 * index, seed=index) for index, kind in enumerate(kinds)]
    linear = forms.linear(parts, "cpu")
    assert linear.n_out == sum(each.count for each in parts)
    assert deviation(linear, parts) < 2**-9


def test_values_too_large_for_half_precision_stay_single():
    large = part(Quant.F16)
    raw = torch.full((33, 256), 3e38).bfloat16().view(torch.uint8)
    huge = Rows(GGMLType.BF16, 33, 256, lambda begin, end: raw[begin:end].clone())
    assert EAGER.linear([large], "cpu").kind == OTHER
    assert EAGER.linear([huge], "cpu").kind == "dense"


def test_a_wrong_kernel_is_refused_by_type(library, monkeypatch, caplog):
    forms, original = compiled(library), NativeLinear.__call__

    def wrong(self: NativeLinear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        product = original(self, x, out)
        if self.n_out == 33:
            product[:, 3] += 0.01
        return product

    monkeypatch.setattr(NativeLinear, "__call__", wrong)
    with caplog.at_level(logging.WARNING):
        refused = forms.linear([part(Quant.Q8_0)], "cpu")
    assert refused.kind == OTHER
    assert "Q8_0" in caplog.text
    assert forms.linear([part(Quant.Q8_0, count=40)], "cpu").kind == OTHER  # its kernel is known to be wrong
    assert forms.linear([part(Quant.Q5_0, count=40)], "cpu").kind == "native"
    assert deviation(refused, [part(Quant.Q8_0)]) < 2**-9


def test_preference_is_asked_once_for_a_type(library):
    asked = []

    def prefer(matrix: NativeLinear, parts: list[Rows]) -> bool:
        asked.append([each.type.name for each in parts])
        return parts[0].type != GGMLType.Q8_0

    forms = compiled(library, prefer)
    kinds = [forms.linear([part(kind)], "cpu").kind for kind in (Quant.Q8_0, Quant.Q4_0, Quant.Q8_0, Quant.Q4_0)]
    assert kinds == [OTHER, "native", OTHER, "native"]
    assert asked == [["Q8_0"], ["Q4_0"]]


def test_deviation_sees_a_single_wrong_output():
    stored_rows = part(Quant.Q8_0)
    linear = REFERENCE.linear([stored_rows], "cpu")
    assert deviation(linear, [stored_rows]) < MAX_DEVIATION
    linear.weight[20, 100] += 0.01
    assert deviation(linear, [stored_rows]) > MAX_DEVIATION
    values = dequantize(stored_rows.read(0, 33).numpy(), Quant.Q8_0)
    assert np.array_equal(np.delete(linear.weight.numpy(), 20, 0), np.delete(values, 20, 0))
