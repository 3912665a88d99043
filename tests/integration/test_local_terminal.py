"""The console in a real terminal: tmux draws it, keys are typed, the screen is read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import builders

pytestmark = [
    pytest.mark.network,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


class Terminal:
    """One tmux server of its own, of a given size."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self._socket = folder / "tmux"
        self._size = ("-x", str(columns), "-y", str(rows))

    def start(self, command: str, environment: dict[str, str]) -> None:
        ours = [name for name in os.environ if name.startswith(("KVASIR_", "TMUX")) and name != "KVASIR_KERNELS"]
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        subprocess.run(
            ["tmux", "-S", str(self._socket), "-f", os.devnull, "new-session", "-d", *self._size, command],
            env={**inherited, **environment, "TERM": "xterm-256color"},
            check=True,
        )

    def keys(self, *keys: str) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "send-keys", *keys], check=True)

    def screen(self) -> str:
        shown = subprocess.run(
            ["tmux", "-S", str(self._socket), "capture-pane", "-p"], capture_output=True, text=True, check=False
        )
        return shown.stdout

    def until(self, pattern: str, timeout_s: float = 240.0) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            screen = self.screen()
            if re.search(pattern, screen):
                return screen
            time.sleep(0.2)
        raise AssertionError(f"{pattern!r} never appeared:\n{self.screen()}")

    def stop(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], check=False)


@pytest.fixture(params=[(80, 24), (140, 40)], ids=["80x24", "140x40"])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, *request.param)
    yield terminal
    terminal.stop()


@pytest.mark.model
def test_local_opens_the_dashboard_takes_a_prompt_and_ends(
    terminal: Terminal, tmp_path: Path, model_cache: Path, smollm2_path: Path
) -> None:
    moe = builders.write_tiny_llama(tmp_path / "moe.gguf", n_layer=2, n_expert=4, n_expert_used=2, seed=3)
    command = f"{sys.executable} -m kvasir_console local --model {moe}; echo ended with $?; sleep 1800"
    terminal.start(command, {"KVASIR_HOME": str(tmp_path / "home"), "KVASIR_CACHE": str(model_cache)})
    terminal.until(r"(?i)serving")
    terminal.until("expert-0")
    terminal.keys("p")
    terminal.until("a prompt for the experts")
    terminal.keys("the weather", "Enter")
    terminal.until("done: ")
    terminal.keys("Escape")
    terminal.until("q Quit")  # a key right behind Escape would be a Meta key to the terminal
    terminal.until(r"rows +[1-9]")  # the work of the prompt is counted on the screen
    terminal.keys("2")
    terminal.until("expert-1")
    terminal.keys("q")
    terminal.until("(?i)quitting stops")
    terminal.keys("y")
    terminal.until("ended with 0")
