"""``kvasir-console`` on a terminal, all real: a node with its engine and signer, unlocked through the screen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from console_terminal import ENTER, LEAVE, Terminal

PASSPHRASE = "seven words are not on this list"
COMMAND = [sys.executable, "-m", "kvasir_console"]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """A home with a wallet, and a gateway that is not there."""
    secret = tmp_path / "passphrase"
    secret.write_text(PASSPHRASE)
    secret.chmod(0o600)
    settings = {"KVASIR_WALLET_KDF": "interactive", "KVASIR_NETWORK_GATEWAY": "http://127.0.0.1:9"}
    words = str(tmp_path / "words")
    create = [*COMMAND, "wallet", "create", "--passphrase-file", str(secret), "--phrase-file", words]
    environment = {**os.environ, **settings, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(create, env=environment, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=240)
    return settings


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def opened(stack: ExitStack, settings: dict[str, str], *arguments: str) -> Terminal:
    terminal = Terminal([*COMMAND, *arguments], **settings)
    stack.callback(terminal.close)
    return terminal


def test_a_node_is_unlocked_watched_by_a_second_console_and_stopped(home: dict[str, str], stack: ExitStack) -> None:
    node = opened(stack, home)
    node.expect_text("FAILED", "○locked")  # nothing listens on the discard port
    node.type("u")
    node.expect_text("Unlockthewallet")
    node.type(PASSPHRASE + "\r")
    node.expect_text("●unlocked")

    watcher = opened(stack, home)
    watcher.expect_text("●unlocked")
    watcher.type("q")
    assert watcher.wait() == 0
    assert LEAVE in watcher.output
    assert node.child.poll() is None

    node.type("q")
    node.expect_text("Thenoderunsinthisconsole.")
    node.type("y")
    assert node.wait() == 0
    assert LEAVE in node.output
    for each in (node, watcher):
        assert PASSPHRASE.replace(" ", "") not in each.text


def test_what_a_running_node_does_not_follow_is_told_by_name(
    home: dict[str, str], stack: ExitStack, tmp_path: Path
) -> None:
    node = opened(stack, home, "--set", "node.name=box")
    node.expect_text("○locked")

    other = opened(stack, home, "--set", "node.name=other", "--set", "node.poll_s=7")
    assert other.wait() == 2
    assert "--setnode.name,node.poll_swouldhavenoeffect" in other.text
    assert LEAVE not in other.output

    same = opened(stack, home, "--set", "node.name=box")
    same.expect_text("○locked")
    assert "noeffect" not in same.text
    same.type("q")
    assert same.wait() == 0

    secret = str(tmp_path / "passphrase")
    watcher = opened(stack, {**home, "KVASIR_NODE_POLL_S": "7"}, "--passphrase-file", secret)
    watcher.expect_text("KVASIR_NODE_POLL_Shasnoeffectonit.--passphrase-filedoesnotunlockit.")
    watcher.expect_text("○locked")
    assert all(b"KVASIR_NODE_POLL_S" in each for each in watcher.output.split(ENTER))  # before the screens, and on them
    watcher.type("q")
    assert watcher.wait() == 0

    node.type("q")
    node.expect_text("Thenoderunsinthisconsole.")
    node.type("y")
    assert node.wait() == 0


def test_without_a_wallet_it_says_how_to_make_one(stack: ExitStack) -> None:
    console = opened(stack, {})
    assert console.wait() == 4
    assert "kvasir-consolewalletcreate" in console.text
    assert "Traceback" not in console.text
