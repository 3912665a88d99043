"""Chooses the forms of this process's matrices: what the owner asked for, or what is faster on this box.

``auto`` takes the compiled kernels where they can be built and, of each type, where they are not slower than torch.
That is measured on the first matrix of a type that is ever loaded on a machine, and kept in the cache directory under a
fingerprint of whatever may change it: processor, threads, torch, and the kernels' own name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvasir_console.engine import native
from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.forms import EAGER, REFERENCE, Forms, compiled, eager
from kvasir_console.engine.linear import Linear, Rows
from kvasir_console.errors import EngineError

log = logging.getLogger(__name__)

CHOICES = ("auto", "native", "eager", "reference")
_ROWS = (1, 32)
"""Measured with one row, the decode step, and with a small batch."""
_REPEATS = 7
_WHOLE_LAYERS = 1.25
"""How much slower a compiled product may be: only compiled ones make whole layers, without Python between them."""


def choose(kernels: str, *, device: torch.device | str = "cpu", cache: Path, threads: int) -> Forms:
    """The forms for ``kernels``, one of ``CHOICES``; on an accelerator always the reference.

    Args:
        cache: directory of compiled kernels and of measurements (``Paths.kernels``).
        threads: that the compiled kernels may use.

    Raises:
        EngineError: ``unknown_kernels``; ``no_compiled_kernels`` if ``native`` was asked for and cannot be had.
    """
    if kernels not in CHOICES:
        raise EngineError(
            "unknown_kernels", f"{kernels!r:.40} are no kernels of this engine.", f"Choose one of {', '.join(CHOICES)}."
        )
    if kernels == "reference" or torch.device(device).type != "cpu":
        return REFERENCE
    library = None if kernels == "eager" else native.load(cache)
    if library is None:
        if kernels == "native":
            raise EngineError(
                "no_compiled_kernels",
                "The compiled kernels were asked for and cannot be built here; the log says why.",
                'Install a C++ compiler, or set kernels = "auto".',
            )
        return EAGER
    library.set_threads(threads)
    if kernels == "native":
        return compiled(library)
    return compiled(library, Measurements(cache / "kernels.json", fingerprint(library.path.name, threads)).prefers)


def fingerprint(library: str, threads: int) -> str:
    """Names everything that may change which form is faster."""
    facts = [_processor(), torch.backends.cpu.get_cpu_capability(), torch.__version__, library, str(threads)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


class Measurements:
    """Which form was faster, by ggml type, on the machine of a fingerprint; kept in a small JSON file."""

    def __init__(self, path: Path, machine: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._path = path
        self._machine = machine
        self._clock = clock

    def prefers(self, matrix: Linear, parts: Sequence[Rows]) -> bool:
        """Whether ``matrix``, packed from ``parts``, is about as fast as torch's form of the same, or faster."""
        name = "+".join(sorted({GGMLType(part.type).name for part in parts}))
        known = self._read().get(self._machine, {}).get(name)
        if known in ("native", "eager"):
            return bool(known == "native")
        other = eager(parts, "cpu")
        x = [torch.randn(rows, matrix.n_in) for rows in _ROWS]
        mine, theirs = (sum(self._seconds(form, each) for each in x) for form in (matrix, other))
        log.info("%s: compiled %.0f us, torch (%s) %.0f us", name, 1e6 * mine, other.kind, 1e6 * theirs)
        form = "native" if mine <= _WHOLE_LAYERS * theirs else "eager"
        self._keep(name, form)
        return form == "native"

    def _seconds(self, linear: Linear, x: Tensor) -> float:
        """Per row; the fastest of several, since other programs only ever make it slower."""
        linear(x)
        runs = []
        for _ in range(_REPEATS):
            started = self._clock()
            linear(x)
            runs.append(self._clock() - started)
        return min(runs) / len(x)

    def _keep(self, name: str, form: str) -> None:
        measured = self._read()
        measured.setdefault(self._machine, {})[name] = form
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(measured, indent=1, sort_keys=True))
            fresh.replace(self._path)
        except OSError as error:
            log.info("the measurement is not kept: %s", error)

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            read = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) and all(isinstance(each, dict) for each in read.values()) else {}


def _processor() -> str:
    """Its model's name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"
