"""What a child process does first: die with its parent; for one that holds secrets, leave no core file.

``python -m kvasir_console.child PARENT_PID MODULE [ARGUMENT ...]`` runs a module of this program that way; the engine,
the signer and the payout process are all started so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
PARENT_POLL_S = 1.0


def die_with_parent(parent_pid: int | None = None) -> None:
    """SIGTERM to this process when its parent dies: from the kernel on Linux, elsewhere from a thread that looks.

    The kernel's comes when the *thread* that started this process ends; children are started from the loop's thread,
    which lives as long as its process. ``parent_pid`` closes the gap between fork and this call: a parent already gone
    ends this process at once.
    """
    parent = os.getppid() if parent_pid is None else parent_pid
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
    else:
        threading.Thread(target=_end_after, args=(parent,), name="parent", daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def forbid_core_dumps() -> None:
    """No core file, and (Linux) no ptrace attach by another process of this user. Best effort."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
