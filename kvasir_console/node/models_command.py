"""``kvasir-console models``: list, pull, inspect, upcycle. Data on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir_console.errors import ExitCode, UsageError
from kvasir_console.paths import Paths

if TYPE_CHECKING:
    from kvasir_console.engine.checkpoint.inspect import Inspection


class ProgressLine:
    """One line that is rewritten on a terminal; without one, a line every ten percent."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._last = (-1, "")
        self._drawn = 0.0

    def __call__(self, done: int, total: int | None, what: str) -> None:
        percent = int(100 * done / total) if total else 0
        step = percent if self._tty else percent // 10 * 10
        task = what.split(":", 1)[0]  # "making FILE: tensor" is one task, whatever tensor it is at
        if (step, task) == self._last or (self._tty and time.monotonic() - self._drawn < 0.1 and percent < 100):
            return
        self._last, self._drawn = (step, task), time.monotonic()
        size = f"{done / 1e6:7.1f} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:7.1f} MB"
        start, end = ("\r" if self._tty else ""), ("" if self._tty and percent < 100 else "\n")
        print(f"{start}{task}: {size} {percent:3d}%", end=end, file=sys.stderr, flush=True)


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

    listings = catalogue.list_models(paths)
    if as_json:
        print(json.dumps([{**asdict(each), "path": str(each.path)} for each in listings], indent=2))
        return ExitCode.OK
    for each in listings:
        print(f"{each.name:12} {each.n_bytes / 1e6:7.1f} MB  {each.state.value:9}  {each.title}")
    return ExitCode.OK


def _inspect(file: Path, *, as_json: bool) -> int:
    from kvasir_console.engine.checkpoint.inspect import inspect

    inspection = inspect(file)
    if as_json:
        print(json.dumps(inspection.to_json(), indent=2))
    else:
        print(describe(inspection))
    return ExitCode.OK


def describe(found: Inspection) -> str:
    """An inspection for a person: one fact a line, then the bytes of each layer."""
    kinds = ", ".join(f"{name} x {count}" for name, count in found.quant_types.items())
    experts = f"{found.experts} a layer, {found.experts_used} used" if found.experts else "none (dense)"
    parts = f" in {found.files} files" if found.files > 1 else ""
    lines = [
        f"file            {found.path} ({found.file_bytes / 1e6:.1f} MB{parts})",
        f"model           {found.name or '(no name)'}: {found.architecture}, {found.parameters / 1e6:.1f} M parameters",
        f"holds           {found.holds}",
        f"layers          {_or_unknown(found.layers)}, width {_or_unknown(found.embedding_length)}",
        f"experts         {experts}",
        f"context         {_or_unknown(found.context_length)} tokens, vocabulary {_or_unknown(found.vocabulary)}",
        f"types           {kinds}",
        f"weights         {found.tensor_bytes / 1e6:.1f} MB",
    ]
    if found.bytes_per_expert is not None:
        lines.append(f"one expert      {found.bytes_per_expert / 1e6:.3f} MB in one layer")
    lines += [f"model digest    {found.model_digest}", f"source digest   {found.source_digest}"]
    if found.refusal:
        lines.append(f"cannot be run   {found.refusal}")
    lines += [
        f"layer {each.layer:<9} {each.total_bytes / 1e6:.3f} MB"
        + (f", of which experts {each.expert_bytes / 1e6:.3f} MB" if each.expert_bytes else "")
        for each in found.layer_bytes
    ]
    return "\n".join(lines)


def _or_unknown(value: int | None) -> str:
    return "N/A" if value is None else str(value)
