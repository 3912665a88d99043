"""``kvasir-console local``: the whole network on this machine, one pass of work through it, a report or a screen."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from kvasir_console import logs
from kvasir_console.errors import ExitCode, UsageError
from kvasir_console.local.network import MOE_MODEL, LocalNetwork, Models
from kvasir_console.node import catalogue
from kvasir_console.node.market import safe_name
from kvasir_console.node.models_command import ProgressLine
from kvasir_console.paths import Paths

MAX_EXPERT_NODES = 64


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.nodes <= MAX_EXPERT_NODES:
        raise UsageError("bad_node_count", f"--nodes takes 1 to {MAX_EXPERT_NODES}.")
    if arguments.max_tokens < 1:
        raise UsageError("bad_max_tokens", "--max-tokens takes 1 or more.")
    if not 0 <= arguments.port <= 65535:
        raise UsageError("bad_port", "--port takes 1 to 65535, or 0 for a free one.")
    paths = Paths.from_environment().ensure()
    logs.configure(paths.state / "local.log")
    models = _models(arguments, paths)
    directory = paths.data / f"local-{time.strftime('%Y%m%d-%H%M%S')}" if arguments.keep else None
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with_screens = interactive and not (arguments.headless or arguments.once or arguments.json)
    return asyncio.run(_local(arguments, models, directory, with_screens=with_screens))


def _models(arguments: argparse.Namespace, paths: Paths) -> Models:
    from kvasir_console.local.passage import load_models

    progress = ProgressLine()
    ring = catalogue.pull("smollm2", paths, progress)
    if arguments.model:
        file = Path(arguments.model).absolute()
        return load_models(ring, file, safe_name(file.stem.lower().replace(" ", "-")))
    return load_models(ring, catalogue.ensure_upcycled(paths, progress), MOE_MODEL)


class Steps:
    """Says each step with the seconds since the start, on stderr: stdout is the report's."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._started, 1)

    def __call__(self, line: str) -> None:
        print(f"[{self.seconds:5.1f} s] {line}", file=sys.stderr, flush=True)


async def _local(arguments: argparse.Namespace, models: Models, directory: Path | None, *, with_screens: bool) -> int:
    from kvasir_console.local.chat import Gateway
    from kvasir_console.local.passage import one_pass
    from kvasir_console.local.report import describe

    say = Steps()
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - asyncio.run made it
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        network = LocalNetwork(models, experts=arguments.nodes, port=arguments.port, directory=directory, say=say)
        async with network, Gateway(network) as gateway:
            if with_screens:
                from kvasir_console.local.console import run_console

                return await run_console(network, gateway, models, arguments)
            report = await one_pass(network, gateway, models, arguments.prompt, arguments.max_tokens, say)
            report["seconds_with_start"] = say.seconds
            print(json.dumps(report, indent=2) if arguments.json else describe(report))
            if arguments.headless and not arguments.once:
                say("The network stays up; stop it with SIGTERM or Ctrl-C")
                await asyncio.Event().wait()
            return ExitCode.OK if all(report["checks"].values()) else ExitCode.FAILURE
    except asyncio.CancelledError:
        say("Stopped")
        return ExitCode.INTERRUPTED
    finally:
        if directory is not None:
            say(f"Homes, wallets and logs are kept in {directory}")
