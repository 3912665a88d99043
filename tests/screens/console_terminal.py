"""A program on a real terminal: a pty of 80x24, its output, its keys."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
"""To the alternate screen and back."""
PATIENCE_S = 120.0
_SEQUENCES = re.compile(rb"\x1b\[[0-9;?>=<]*[a-zA-Z$]|\x1b\][^\x07]*\x07")


class Terminal:
    """A child on a pty of 80x24."""

    def __init__(self, argv: Sequence[str], **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TEXTUAL", "NO_COLOR"))}
        here = Path(__file__).parent
        path = os.pathsep.join([str(here), str(here.parents[1])])
        self.child = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**inherited, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PYTHONPATH": path, **environment},
        )
        os.close(slave)
        self.output = b""
        self._seen = 0

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
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.output:
            assert time.monotonic() < deadline, self.output[-2000:]
            self.read(0.2)

    def expect_text(self, *words: str) -> None:
        """Until each of ``words``, given without spaces, was written since the last call found something, or since
        ``forget``."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(each in (fresh := self._text(self.output[self._seen :])) for each in words):
            assert time.monotonic() < deadline, fresh[-2000:]
            self.read(0.2)
        self.forget()

    def forget(self) -> None:
        """What was written until now is not what ``expect_text`` looks for."""
        self._seen = len(self.output)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
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

    @property
    def text(self) -> str:
        """What was written, without escape sequences and spaces: cells come in any order and piecemeal."""
        return self._text(self.output)

    @staticmethod
    def _text(output: bytes) -> str:
        return "".join(_SEQUENCES.sub(b"", output).decode(errors="replace").split())
