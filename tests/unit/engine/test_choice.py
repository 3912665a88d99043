"""The choice of kernels: what was asked for, what can be had, and what was measured."""

from __future__ import annotations

import json

import pytest
import torch

from kvasir_console.engine import choice, native
from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.choice import Measurements, choose, fingerprint
from kvasir_console.engine.forms import EAGER, REFERENCE
from kvasir_console.engine.linear import DenseLinear, Rows
from kvasir_console.errors import EngineError

VALUES = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
PART = Rows(GGMLType.F32, 32, 64, lambda begin, end: VALUES[begin:end].view(torch.uint8).clone())


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(native, "load", lambda *_: None)


def test_what_is_asked_for_is_given(model_cache, library, tmp_path):
    assert choose("reference", cache=tmp_path, threads=1) is REFERENCE
    assert choose("eager", cache=tmp_path, threads=1) is EAGER
    forms = choose("native", cache=model_cache / "kernels", threads=2)
    assert forms.library is not None
    assert forms.library.threads == 2
    forms.library.set_threads(1)
    assert forms.linear([PART], "cpu").kind == "native"
    assert not list(tmp_path.iterdir())


def test_an_accelerator_computes_the_reference(tmp_path):
    assert choose("auto", device="cuda:0", cache=tmp_path, threads=1) is REFERENCE


def test_without_a_compiler_torch_does_it(no_compiler, tmp_path):
    assert choose("auto", cache=tmp_path, threads=1) is EAGER
    with pytest.raises(EngineError) as refusal:
        choose("native", cache=tmp_path, threads=1)
    assert refusal.value.code == "no_compiled_kernels"


def test_an_unknown_choice_is_refused(tmp_path):
    with pytest.raises(EngineError, match="fastest") as refusal:
        choose("fastest", cache=tmp_path, threads=1)
    assert refusal.value.code == "unknown_kernels"


class Timed:
    """A clock, and matrices that take a known time on it."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def linear(self, seconds: float) -> DenseLinear:
        timed = self

        class Slow(DenseLinear):
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                timed.now += seconds
                return super().__call__(x)

        return Slow(VALUES)


@pytest.mark.parametrize(("mine", "faster"), [(0.5, True), (1.2, True), (1.4, False)])
def test_the_faster_form_is_preferred_and_remembered(tmp_path, monkeypatch, mine, faster):
    timed = Timed()
    monkeypatch.setattr(choice, "eager", lambda *_: timed.linear(1.0))
    path = tmp_path / "new" / "kernels.json"
    assert Measurements(path, "box", timed.clock).prefers(timed.linear(mine), [PART]) is faster
    assert json.loads(path.read_text()) == {"box": {"F32": "native" if faster else "eager"}}
    # Another process believes it, on this machine only.
    before = timed.now
    assert Measurements(path, "box", timed.clock).prefers(timed.linear(9.0), [PART]) is faster
    assert timed.now == before
    assert not Measurements(path, "other box", timed.clock).prefers(timed.linear(9.0), [PART])
    assert json.loads(path.read_text()).keys() == {"box", "other box"}


@pytest.mark.parametrize("text", ["", "[]", '{"box": 3}', '{"box": {"F32": "fpga"}}', "\xff"])
def test_a_damaged_file_is_measured_anew(tmp_path, monkeypatch, text):
    timed = Timed()
    monkeypatch.setattr(choice, "eager", lambda *_: timed.linear(1.0))
    path = tmp_path / "kernels.json"
    path.write_bytes(text.encode("latin-1"))
    assert Measurements(path, "box", timed.clock).prefers(timed.linear(0.5), [PART])
    assert json.loads(path.read_text())["box"] == {"F32": "native"}


def test_the_fingerprint_changes_with_what_may_change_the_answer():
    prints = {fingerprint("a.so", 1), fingerprint("b.so", 1), fingerprint("a.so", 2)}
    assert len(prints) == 3
    assert fingerprint("a.so", 1) in prints
