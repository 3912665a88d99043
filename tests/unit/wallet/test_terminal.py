"""A person at a real terminal: questions reach it past all redirections, secrets leave no trace on it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
from pathlib import Path

import pytest

from kvasir_console.errors import UsageError
from kvasir_console.wallet.terminal import confirm, controlling_terminal, require

SCRIPT = """
import sys
sys.stdin, sys.stdout, sys.stderr = open("/dev/null"), open("/dev/null", "w"), open("/dev/null", "w")
from kvasir_console.wallet.terminal import controlling_terminal
with controlling_terminal() as person:
    person.show("hello")
    name = person.ask("Name: ")
    secret = person.ask_secret("Secret: ")
    person.show_secret("the words", "Press Enter. ")
    person.show(f"{name}/{len(secret)}/{person.size()}/end")
"""


def on_terminal(typed: list[bytes], term: str) -> str:
    """Run the script on a terminal of its own, answer each question, and return what the terminal was sent."""
    child, terminal = pty.fork()
    if child == 0:
        environment = {**os.environ, "TERM": term, "PYTHONPATH": str(Path(__file__).parents[3])}
        os.execve(sys.executable, [sys.executable, "-c", SCRIPT], environment)  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 50, 90, 0, 0))
    shown, answers = b"", list(typed)
    try:
        while select.select([terminal], [], [], 120)[0]:
            shown += os.read(terminal, 1024)
            if shown.endswith((b": ", b". ")) and answers:
                os.write(terminal, answers.pop(0))
    except OSError:  # the terminal is gone with its last process
        pass
    os.waitpid(child, 0)
    os.close(terminal)
    return shown.decode()


def test_a_person_is_reached_whatever_is_redirected():
    shown = on_terminal([b" Ada \n", b"swordfish\n", b"\n"], "dumb")
    assert "hello" in shown
    assert "Ada/9/(0, 0)/end" in shown  # nothing is drawn there
    assert "swordfish" not in shown


def test_secrets_stand_on_a_screen_of_their_own_that_is_left_again():
    shown = on_terminal([b"Ada\n", b"swordfish\n", b"\n"], "xterm-256color")
    before, _, rest = shown.partition("\x1b[?1049h")
    secret, _, after = rest.partition("\x1b[?1049l")
    assert "the words" in secret
    assert "the words" not in before + after
    assert "Ada/9/(90, 50)/end" in after


def test_without_a_terminal_nobody_is_there():
    child = os.fork()
    if child == 0:
        os.setsid()
        with controlling_terminal() as person:
            os._exit(7 if person is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(UsageError) as caught:
        require(None, "Showing a secret", "Give --out FILE.")
    assert caught.value.code == "no_terminal"


@pytest.mark.parametrize(
    ("answer", "wanted"), [("y", True), ("YES", True), ("", False), ("n", False), ("yesterday", False)]
)
def test_only_a_yes_is_a_yes(answer, wanted):
    class Person:
        def ask(self, question: str) -> str:
            assert question == "Sure? [y/N] "
            return answer

    assert confirm(Person(), "Sure?") is wanted
