"""Senseless arguments of ``kvasir-console bench`` are refused before anything is fetched, loaded or started."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_console import cli
from kvasir_console.errors import ExitCode

import builders


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("engine", "--pairs", "0"), "--pairs"),
        (("engine", "--threads", "-1"), "--threads"),
        (("engine", "--peer", "no-such-program --flag"), "no-such-program"),
        (("engine", "--peer", ""), "xllamacpp"),
        (("engine", "--model", "smollm3"), "smollm2-moe"),
        (("engine", "--model", "missing.gguf"), "missing.gguf"),
        (("experts", "--threads", "5000"), "--threads"),
        (("experts", "--layers-remote", "0"), "--layers-remote"),
        (("experts", "--rtt-ms", "nan"), "--rtt-ms"),
        (("relay", "--hidden", "0"), "--hidden"),
        (("relay", "--pairs", "-3"), "--pairs"),
        (("recovery", "--faults", "1"), "--faults"),
        (("recovery", "--tokens", "5000"), "--tokens"),
        (("recovery", "--soak-minutes", "-5"), "--soak-minutes"),
        (("recovery", "--soak-minutes", "nan"), "--soak-minutes"),
        (("ring", "--batch", "257"), "--batch"),
        (("ring", "--streams", "0"), "--streams"),
        (("ring", "--tokens", "7"), "--tokens"),
        (("ring", "--threads", "-2"), "--threads"),
        (("equivalence", "--prompts", "0"), "--prompts"),
        (("equivalence", "--a", "fast"), "KERNELS"),
        (("equivalence", "--threads", "-1"), "--threads"),
        (("equivalence", "--b-model", "missing.gguf", "--model", "missing.gguf"), "missing.gguf"),
    ],
)
def test_a_senseless_argument_is_named(
    arguments: tuple[str, ...], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert 1 <= len(err.splitlines()) <= 2
    assert word in err
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("experts", "layers_remote", "words"),
    [(0, "1", "has no experts"), (4, "3", "--layers-remote takes 1 to 2")],
)
def test_remote_layers_have_to_be_there(
    experts: int, layers_remote: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moe = {"n_expert": experts, "n_expert_used": 2} if experts else {}
    model = builders.write_tiny_llama(tmp_path / "tiny.gguf", **moe)
    code = cli.main(["bench", "experts", "--model", str(model), "--layers-remote", layers_remote])
    assert (code, words in capsys.readouterr().err) == (ExitCode.USAGE, True)


def test_more_stages_than_layers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = builders.write_tiny_llama(tmp_path / "tiny.gguf")
    assert cli.main(["bench", "ring", "--model", str(model), "--stages", "3"]) == ExitCode.USAGE
    assert "--stages takes 1 to 2" in capsys.readouterr().err
