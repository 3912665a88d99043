"""The console on a real terminal (a pty): it starts, stays silent while nothing changes, and restores on every exit."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from console_terminal import ENTER, LEAVE, PATIENCE_S, Terminal

PROGRAM = """
import asyncio, sys, time
from console_fakes import FakeSource, Clock
from kvasir_console.errors import KvasirError
from kvasir_console.screens import app as screens
try:
    clock = time.time if sys.argv[2] == "moving" else Clock()
    app = screens.ConsoleApp([FakeSource()], clock=clock, interval_s=0.02, quit_warning=sys.argv[1])
    code = asyncio.run(screens.run_app(app))
except KvasirError as error:
    print(error, file=sys.stderr)
    code = int(error.exit_code)
raise SystemExit(code)
"""


@pytest.fixture
def terminal() -> Iterator[type[Terminal]]:
    opened: list[Terminal] = []

    class Opened(Terminal):
        def __init__(self, warning: str = "", *, moving: bool = False, **environment: str) -> None:
            clock = "moving" if moving else "still"
            super().__init__([sys.executable, "-c", PROGRAM, warning, clock], **environment)
            opened.append(self)

    yield Opened
    for each in opened:
        each.close()


def falls_silent(console: Terminal) -> bool:
    """Whether it writes nothing for longer than any clock on the screen takes to change; a busy box may need time."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if console.read(2.5) == b"":
            return True
    return False


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
    assert falls_silent(console)
    console.type("q")
    assert console.wait() == 0


def test_under_a_dialog_nothing_is_painted(terminal: type[Terminal]) -> None:
    console = terminal(moving=True)
    console.expect(b"SERVING")
    console.type("?")
    console.expect(b"escape closes")
    assert falls_silent(console)
    console.forget()
    console.type("q")
    console.expect_text("SERVING")  # the dashboard, bright again
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
    assert falls_silent(console)
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
    assert falls_silent(console)
    shown = re.sub(rb"\x1b\[[0-9;?>=<]*[a-zA-Z]", b"", console.output)
    assert b"+-" in shown
    assert max(shown) < 128
    console.type("q")
    assert console.wait() == 0
