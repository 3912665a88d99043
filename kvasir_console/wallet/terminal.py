"""The person at the controlling terminal: questions and secrets go there, never through stdin, stdout or stderr."""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Iterator
from typing import Protocol

from kvasir_console.errors import UsageError

_ALTERNATE_SCREEN, _MAIN_SCREEN = "\x1b[?1049h\x1b[H", "\x1b[?1049l"
_NO_SCREENS = ("", "dumb", "unknown")


class Person(Protocol):
    """Whoever can be asked and shown something."""

    def ask(self, question: str) -> str:
        """One line, stripped; empty at the end of input."""
        ...

    def ask_secret(self, question: str) -> str:
        """One line, without an echo."""
        ...

    def size(self) -> tuple[int, int]:
        """Columns and lines that can be drawn on; zeros where nothing but plain text can be."""
        ...

    def show(self, text: str) -> None: ...

    def show_secret(self, text: str, question: str) -> None:
        """``text`` until the question is answered; where the terminal can, nothing of it stays on the screen."""
        ...


class Terminal:
    """``/dev/tty``."""

    def __init__(self, descriptor: int) -> None:
        self._tty = descriptor
        self._screens = os.environ.get("TERM", "") not in _NO_SCREENS

    def ask(self, question: str) -> str:
        self._write(question)
        line = b""
        while not line.endswith(b"\n") and len(line) < 4096 and (piece := os.read(self._tty, 1024)):
            line += piece
        return line.decode(errors="replace").strip()

    def ask_secret(self, question: str) -> str:
        try:
            return getpass.getpass(question)
        except EOFError:
            return ""

    def size(self) -> tuple[int, int]:
        if not self._screens:
            return 0, 0
        try:
            columns, lines = os.get_terminal_size(self._tty)
        except OSError:
            return 0, 0
        return columns, lines

    def show(self, text: str) -> None:
        self._write(text + "\n")

    def show_secret(self, text: str, question: str) -> None:
        if not self._screens:
            self.show(text)
            self.ask(question)
            return
        self._write(_ALTERNATE_SCREEN)
        try:
            self.show(text)
            self.ask(question)
        finally:
            self._write(_MAIN_SCREEN)

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._tty, data) :]


@contextlib.contextmanager
def controlling_terminal() -> Iterator[Person | None]:
    """The terminal of this session; ``None`` if there is none."""
    try:
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield Terminal(descriptor)
    finally:
        os.close(descriptor)


def require(person: Person | None, what: str, hint: str) -> Person:
    """Raises ``UsageError`` ``no_terminal`` when nobody is there."""
    if person is None:
        raise UsageError("no_terminal", f"{what} needs a terminal.", hint)
    return person


def confirm(person: Person, question: str) -> bool:
    return person.ask(f"{question} [y/N] ").lower() in ("y", "yes")
