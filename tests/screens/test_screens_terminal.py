"""The console on a real terminal (a pty): it starts, stays silent while nothing changes, and restores on every exit."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from console_fakes import FakeSource, Clock
from kvasir_console.errors import KvasirError
from kvasir_console.screens import app as screens
try:
    app = screens.ConsoleApp([FakeSource()], clock=Clock(), interval_s=0.02, quit_warning=sys.argv[1])
    code = asyncio.run(screens.run_app(app))
except KvasirError as error:
    print(error, file=sys.stderr)
    code = int(error.exit_code)
raise SystemExit(code)
"""
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A child on a pty of 80x24."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TEXTUAL", "NO_COLOR"))}
        here = Path(__file__).parent
        path = os.pathsep.join([str(here), str(here.parents[1])])
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *(arguments or ("",))],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**inherited, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PYTHONPATH": path, **environment},
        )
        os.close(slave)
        self.output = b""

    def read(self, seconds: float) -> bytes:
        """What comes within ``seconds``, at most one chunk."""
        if not select.select([self.master], [], [], seconds)[0]:
            return b""
        try:
            chunk = os.read(self.master, 65_536)
        except OSError:  # the child is gone: Linux says EIO
            return b""
        self.output += chunk
        return chunk

    def expect(self, words: bytes) -> None:
        deadline = time.monotonic() + 30
        while words not in self.output:
            assert time.monotonic() < deadline, self.output[-2000:]
            self.read(0.2)

    def settle(self) -> None:
        """Until the terminal was silent for a fifth of a second."""
        deadline = time.monotonic() + 30
        while self.read(0.2):
            assert time.monotonic() < deadline

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait(self) -> int:
        deadline = time.monotonic() + 30
        while self.child.poll() is None:
            assert time.monotonic() < deadline, self.output[-2000:]
            self.read(0.1)
        while self.read(0.1):
            pass
        return self.child.returncode

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[type[Terminal]]:
    opened: list[Terminal] = []

    class Opened(Terminal):
        def __init__(self, *arguments: str, **environment: str) -> None:
            super().__init__(*arguments, **environment)
            opened.append(self)

    yield Opened
    for each in opened:
        each.close()


def test_it_starts_shows_the_node_and_quits(terminal: type[Terminal]) -> None:
    console = terminal()
    console.expect(b"SERVING")
    assert ENTER in console.output
    console.type("q")
    assert console.wait() == 0
    assert LEAVE in console.output


def test_an_unchanged_node_costs_the_terminal_nothing(terminal: type[Terminal]) -> None:
    console = terminal()
    console.expect(b"SERVING")
    console.settle()
    written = len(console.output)
    assert console.read(0.5) == b""  # some twenty rounds of reading
    assert len(console.output) == written
    console.type("q")
    assert console.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order_even_over_a_dialog(terminal: type[Terminal], number: signal.Signals) -> None:
    console = terminal("This stops the node.")
    console.expect(b"SERVING")
    console.type("q")
    console.expect(b"This stops the node.")
    console.child.send_signal(number)
    assert console.wait() == 0
    assert LEAVE in console.output


def test_no_color_sends_greys_only(terminal: type[Terminal]) -> None:
    console = terminal(NO_COLOR="1", COLORTERM="truecolor")
    console.expect(b"SERVING")
    console.settle()
    colours = re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)", console.output)
    assert colours
    assert all(red == green == blue for red, green, blue in colours)
    console.type("q")
    assert console.wait() == 0


def test_a_dumb_terminal_is_refused_with_the_next_step(terminal: type[Terminal]) -> None:
    console = terminal(TERM="dumb")
    assert console.wait() == 2
    assert b"--headless" in console.output
    assert ENTER not in console.output


def test_without_a_utf8_locale_everything_is_ascii(terminal: type[Terminal]) -> None:
    console = terminal(LC_ALL="POSIX", PYTHONUTF8="1")
    console.expect(b"SERVING")
    console.settle()
    shown = re.sub(rb"\x1b\[[0-9;?>=<]*[a-zA-Z]", b"", console.output)
    assert b"+-" in shown
    assert max(shown) < 128
    console.type("q")
    assert console.wait() == 0
