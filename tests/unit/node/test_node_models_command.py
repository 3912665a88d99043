"""``kvasir-console models``: data on stdout, talk on stderr, one message for each failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir_console import cli
from kvasir_console.errors import ExitCode
from kvasir_console.node.models_command import ProgressLine

from builders import write_tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny.gguf", n_expert=4, n_expert_used=2)


def test_the_catalogue_is_listed_for_people_and_programs(capsys):
    assert cli.main(["models", "list"]) == ExitCode.OK
    people = capsys.readouterr()
    assert cli.main(["models", "list", "--json"]) == ExitCode.OK
    programs = capsys.readouterr()
    entries = json.loads(programs.out)
    assert {entry["name"] for entry in entries} >= {"smollm2", "gemma3", "smollm2-moe"}
    assert all(entry["name"] in people.out for entry in entries)
    assert people.err == programs.err == ""


def test_a_file_is_inspected(model, capsys):
    assert cli.main(["models", "inspect", str(model), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["layers"], found["experts"]) == ("llama", 2, 4)
    assert cli.main(["models", "inspect", str(model)]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "llama" in text
    assert "4 a layer, 2 used" in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "gone.gguf"], ExitCode.MODEL),
        (["inspect", __file__], ExitCode.MODEL),
        (["pull", "nothing-of-that-name"], None),
        (["upcycle", "gemma3"], ExitCode.USAGE),
    ],
)
def test_a_failure_is_one_message_with_its_code(arguments, code, capsys):
    result = cli.main(["models", *arguments])
    assert result not in (ExitCode.OK, ExitCode.FAILURE)
    assert code in (None, result)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvasir-console: ")
    assert "Traceback" not in captured.err


def test_without_a_terminal_progress_is_a_line_every_ten_percent(capsys):
    progress = ProgressLine()
    for done in range(1001):
        progress(done, 1000, "smollm2")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0].endswith("0%")
    assert lines[-1].endswith("100%")


def test_progress_without_a_known_end_says_so_once(capsys):
    progress = ProgressLine()
    for done in (0, 10, 10**6):
        progress(done, None, "smollm2")
    assert len(capsys.readouterr().err.splitlines()) == 1
