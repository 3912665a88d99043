"""Compiles the kernels for this machine, once.

The library is kept under a name made of everything that shapes it: the sources, the flags, and the compiler's own
account of itself and of the processor it compiles for (its predefined macros). So a cache directory may be shared by
machines, and outlive compilers and upgrades.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvasir_console.errors import SystemResourceError
from kvasir_console.paths import private_directory

__all__ = ["COMPILERS", "NATIVE", "build"]

log = logging.getLogger(__name__)

COMPILERS = ("g++", "clang++", "c++")
_SOURCES = Path(__file__).parent / "src"
_FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-w"),
    *("-fno-math-errno", "-ffp-contract=off"),
)
"""No contraction and nothing of ``-ffast-math``: the order of every sum is part of the result.

Nothing is visible but the functions that Python calls: else the statics of inline functions would be one and the same
in all builds that a process loads, and their layouts differ.
"""
NATIVE = (("-march=native",), ("-mcpu=native",))
"""How compilers are told to use all this processor has; Apple's knows only the second."""
_TIMEOUT_S = 600.0


class _BuildError(Exception):
    """Why there is no library."""


def build(
    directory: Path,
    *,
    compilers: tuple[str, ...] = COMPILERS,
    targets: tuple[tuple[str, ...], ...] = NATIVE,
    timeout_s: float = _TIMEOUT_S,
) -> Path | None:
    """The compiled kernels in ``directory``, made now if they are not there yet; ``None`` if they cannot be made.

    Args:
        directory: created if missing, private to this user. Processes that build at once wait for the first.
        compilers: names looked for on the path, in this order.
        targets: flags that say what to compile for, the first that the compiler takes.
        timeout_s: for one compilation, and for another process that is at it.
    """
    started = time.monotonic()
    try:
        compiler = _find(compilers)
        flags, macros = _accepted_flags(compiler, targets, timeout_s)
        name = f"kernels-{_key(flags, macros)}.so"
        private_directory(directory)
        library = directory / name
        if library.exists():
            return library
        with _locked(directory / "build.lock", timeout_s):
            if not library.exists():
                _compile(compiler, flags, library, timeout_s)
                log.info("compiled the kernels with %s in %.1f s", compiler, time.monotonic() - started)
    except (_BuildError, SystemResourceError, OSError) as error:
        log.info("no compiled kernels: %s", error)
        return None
    return library


def _find(compilers: tuple[str, ...]) -> str:
    for name in compilers:
        found = shutil.which(name)
        if found is not None:
            return found
    raise _BuildError("no C++ compiler is on the path (" + ", ".join(compilers) + ")")


def _accepted_flags(
    compiler: str, targets: tuple[tuple[str, ...], ...], timeout_s: float
) -> tuple[tuple[str, ...], bytes]:
    """The flags this compiler takes, and what it then says of itself and its target."""
    for target in targets:
        flags = (*_FLAGS, *target)
        done = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull], timeout_s)
        if done.returncode == 0:
            return flags, done.stdout
    raise _BuildError(f"{compiler} compiles for none of {targets}: {_first_line(done.stderr)}")


def _key(flags: tuple[str, ...], macros: bytes) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(" ".join(flags).encode() + b"\0" + macros)
    return digest.hexdigest()[:24]


def _compile(compiler: str, flags: tuple[str, ...], library: Path, timeout_s: float) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        out = Path(folder) / "kernels.so"
        done = _run([compiler, *flags, str(_SOURCES / "kernels.cpp"), "-o", str(out)], timeout_s)
        if done.returncode != 0:
            raise _BuildError(f"{compiler} failed: {_first_line(done.stderr)}")
        out.replace(library)


def _run(argv: list[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Run a compiler; if it takes too long, end it and the programs it started."""
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise _BuildError(f"{argv[0]} took more than {timeout_s:.1f} s") from error
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, errors)


def _first_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[0][:200] if lines else "without a word"


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file; the system releases it should this process die."""
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise _BuildError(f"another process has held {path} for {timeout_s:.0f} s") from None
                time.sleep(0.05)
        yield
