"""``kvasir-console bench equivalence`` as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Quant

import builders


def bench(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvasir_console", "bench", "equivalence", *arguments],
        env={**os.environ, "KVASIR_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = builders.write_tiny_llama(
        tmp_path / "tiny.gguf", n_expert=4, n_expert_used=2, weight_type=(Quant.Q4_0, Quant.Q8_0)
    )
    return str(path)


@pytest.mark.timeout(900)
def test_eager_kernels_differ_from_the_reference_by_what_their_forms_round(tmp_path: Path, model: str) -> None:
    done = bench(tmp_path, "--model", model, "--b", "eager", "--tokens", "4", "--prompts", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["a"] | {"threads": 0} == {
        "kernels": "reference", "chosen": "reference", "kv": "f32", "threads": 0, "device": "cpu"
    }  # fmt: skip
    assert report["b"]["chosen"] == "eager"
    assert report["operations"].keys() == {"Q4_0", "Q8_0", "F32"}
    assert 1e-4 < report["operations"]["Q4_0"]["rms"] < 2**-7  # rows and answers in bf16
    assert 0 < report["operations"]["Q8_0"]["rms"] < 2**-10  # weights in f16
    assert len(report["layers"]) == 2
    assert all(0 < layer["own_l2"] < 0.1 for layer in report["layers"])
    assert 0 < report["logits"]["kl_mean"] < 0.1
    assert not report["identical"]


@pytest.mark.timeout(900)
def test_a_person_reads_a_table(tmp_path: Path, model: str) -> None:
    done = bench(tmp_path, "--model", model, "--a", "eager:threads=1", "--b", "eager:threads=2", "--tokens", "2")
    assert done.returncode == 0, done.stderr
    assert "A  eager (eager), kv f32, 1 threads, cpu" in done.stdout
    assert "not a bit differs" in done.stdout
    assert "greedy texts of 2 tokens part at: never, never, never, never" in done.stdout


def test_what_cannot_be_compared_is_refused_with_its_exit_code(tmp_path: Path, model: str) -> None:
    for arguments, code, words in (
        (("--b", "fast"), 2, "no kernels"),
        (("--tokens", "0"), 2, "--tokens"),
        (("--b", "reference:kv=q8_0"), 6, "heads have 16"),
        (("--b-model", __file__), 5, "not a GGUF"),
    ):
        done = bench(tmp_path, "--model", model, *arguments)
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
