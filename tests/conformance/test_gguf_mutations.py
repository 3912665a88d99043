"""Two hundred spoiled model files in every run; two thousand in ``make soak``. And that the judge misses nothing."""

from __future__ import annotations

import faulthandler
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import gguf_mutants
import gguf_trials
import pytest

from kvasir_console.errors import ModelError

COUNT = 200


def test_spoiled_model_files_are_refused_by_name_or_computed() -> None:
    report = gguf_trials.run(COUNT)
    assert not report.failures, report.text()
    assert report.count == COUNT
    assert report.loaded > COUNT // 10  # mutations that nothing survives would test the first check only
    assert {"gguf_malformed", "model_contradictory", "bad_tokenizer"} <= report.refused.keys()
    assert len(report.bases) == 10
    assert {"eager", "reference"} <= report.kernels.keys()


def test_a_seed_gives_the_same_mutant_always(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first, second = gguf_mutants.bases(tmp_path), gguf_mutants.bases(tmp_path / "again")
    for seed in range(40):
        one, other = gguf_mutants.mutant(first, seed), gguf_mutants.mutant(second, seed)
        assert (one.what, one.data) == (other.what, other.data)


def _crash() -> str:
    faulthandler.disable()  # no news for whoever reads the log
    os.abort()


def _hang() -> str:
    while True:
        pass


def _sleep_forever() -> str:
    time.sleep(1000)
    return ""


def _allocate() -> str:
    bytearray(3 * 2**30)
    return ""


def _allocate_unseen() -> str:
    try:
        bytearray(3 * 2**30)
    except MemoryError as error:
        raise ModelError("bad_tokenizer", "the list is wrong.") from error
    return ""


def _grow() -> str:
    kept = [mmap.mmap(-1, 2**24) for _ in range(66)]  # not of a heap that the parent may have left large and empty
    return "" if kept else "nothing"


def _refuse() -> str:
    raise ModelError("gguf_malformed", "no.")


def _foreign() -> str:
    raise KeyError("blk.0.ffn_gate.weight")


@pytest.mark.parametrize(
    ("act", "code", "failure"),
    [
        (_crash, "", "died of SIGABRT"),
        (_hang, "", "took more than 1 s of processor time"),
        (_sleep_forever, "", "took more than 3 s"),
        (_allocate, "", "MemoryError"),
        (_allocate_unseen, "bad_tokenizer", "bad_tokenizer hides MemoryError"),
        (_grow, "", "the address space grew by"),
        (_foreign, "", "KeyError: 'blk.0.ffn_gate.weight'"),
        (_refuse, "gguf_malformed", ""),
        (str, "", ""),
    ],
)
def test_the_judge_sees_what_a_child_does(
    act: Callable[[], str], code: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_trials, "CPU_LIMIT_S", 1)
    # A second of processor time takes a busy machine many.
    monkeypatch.setattr(gguf_trials, "CLOCK_LIMIT_S", 3 if act is _sleep_forever else 240)
    verdict = gguf_trials.in_child(act)
    assert verdict.code == code
    assert verdict.failure.startswith(failure) and bool(verdict.failure) == bool(failure)  # noqa: PT018
