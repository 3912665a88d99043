"""``kvasir-console models``: list, pull, inspect, upcycle. Data on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from kvasir_console.errors import ExitCode, UsageError
from kvasir_console.paths import Paths


class ProgressLine:
    """One line that is rewritten on a terminal; without one, a line every ten percent."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._last = (-1, "")
        self._drawn = 0.0

    def __call__(self, done: int, total: int | None, what: str) -> None:
        percent = int(100 * done / total) if total else 0
        step = percent if self._tty else percent // 10 * 10
        if (step, what) == self._last or (self._tty and time.monotonic() - self._drawn < 0.1 and percent < 100):
            return
        self._last, self._drawn = (step, what), time.monotonic()
        size = f"{done / 1e6:7.1f} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:7.1f} MB"
        start, end = ("\r" if self._tty else ""), ("" if self._tty and percent < 100 else "\n")
        print(f"{start}{what}: {size} {percent:3d}%", end=end, file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace) -> int:
    from kvasir_console.node import catalogue

    paths = Paths.from_environment()
    match arguments.models_command:
        case "list":
            return _list(paths, as_json=arguments.json)
        case "pull":
            print(catalogue.pull(arguments.name, paths.ensure(), ProgressLine()))
        case "upcycle":
            if arguments.name != "smollm2":
                raise UsageError("cannot_upcycle", f"{arguments.name!r} has no recipe.", "Upcycle smollm2.")
            print(catalogue.ensure_upcycled(paths.ensure(), ProgressLine()))
        case "inspect":
            return _inspect(Path(arguments.file), as_json=arguments.json)
    return ExitCode.OK


def _list(paths: Paths, *, as_json: bool) -> int:
    from kvasir_console.node import catalogue

    entries = catalogue.list_models(paths)
    if as_json:
        print(json.dumps([entry.to_json() for entry in entries], indent=2))
        return ExitCode.OK
    for entry in entries:
        print(f"{entry.name:14} {entry.size_bytes / 1e6:8.1f} MB  {'here' if entry.present else '    '}  {entry.about}")
    return ExitCode.OK


def _inspect(file: Path, *, as_json: bool) -> int:
    from kvasir_console.engine.checkpoint.inspect import inspect

    inspection = inspect(file)
    print(json.dumps(inspection.to_json(), indent=2) if as_json else inspection.describe())
    return ExitCode.OK
