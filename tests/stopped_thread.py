"""One thread of another process, stopped as a hung driver stops it, while the others go on (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import pytest

SEIZE, INTERRUPT, DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000
"""Requests of ptrace(2), and the flag of waitpid(2) for threads."""


class StoppedThread:
    """Of the threads of ``pid`` beside the first, the one that has used most processor time, stopped."""

    def __init__(self, pid: int) -> None:
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        others = {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - {pid}
        self.tid = max(others, key=lambda tid: _used(pid, tid))
        if libc.ptrace(SEIZE, self.tid, 0, 0) or libc.ptrace(INTERRUPT, self.tid, 0, 0):
            pytest.skip(f"this system lets nobody trace: {os.strerror(ctypes.get_errno())}")

    def go_on(self) -> None:
        os.waitpid(self.tid, WALL)
        assert self._libc.ptrace(DETACH, self.tid, 0, 0) == 0

    def reap(self) -> None:
        """Let a process that was killed end: it waits until whoever traces one of its threads has seen it end."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.tid, os.WNOHANG | WALL)


def _used(pid: int, tid: int) -> int:
    fields = Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
