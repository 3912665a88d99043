"""What a child process does first: die with its parent; for one that holds secrets, leave no core file.

``python -m kvasir_console.child PARENT_PID MODULE [ARGUMENT ...]`` runs a module of this program that way.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel for SIGTERM when the parent dies (Linux; elsewhere a no-op).

    ``parent_pid`` closes the gap between fork and this call: a parent already gone ends this process at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)


def forbid_core_dumps() -> None:
    """No core file, and (Linux) no ptrace attach by another process of this user."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
