"""The command line: names, options and help. Each command's work lives where its subject does.

stdout is data, stderr is talk, and every failure ends with one message, its next step and a documented exit code
(``errors.ExitCode``). Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvasir_console import __version__
from kvasir_console.errors import ExitCode, KvasirError, SystemResourceError, UsageError

if TYPE_CHECKING:
    from kvasir_console.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        code = int(_run(arguments, parser))
        sys.stdout.flush()
        return code
    except KvasirError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing is left to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _fail(SystemResourceError("system", f"The system refused: {error.strerror or error}{where}."))
    except Exception as error:
        return _fail(_unexpected(error))


def _fail(error: KvasirError) -> int:
    print(f"kvasir-console: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  {error.hint}", file=sys.stderr)
    return int(error.exit_code)


def _unexpected(error: Exception) -> KvasirError:
    """A defect of this program: its traceback goes to the log, masked; a person gets one line."""
    import logging

    from kvasir_console import logs
    from kvasir_console.paths import Paths

    file = Paths.from_environment().log_file
    with contextlib.suppress(KvasirError):
        logs.configure(file)
        logging.getLogger(__name__).error("unexpected", exc_info=error)
    return KvasirError("unexpected", f"Something unforeseen happened ({type(error).__name__}).", f"{file} has details.")


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.set and arguments.command in ("local", "models", "bench", "status"):
        raise UsageError("set_without_effect", f"--set has no effect on {arguments.command}.", "Leave it out.")
    match arguments.command:
        case None:
            return _console(arguments)
        case "local":
            from kvasir_console.local import command as local

            return local.run(arguments)
        case "models":
            from kvasir_console.node import models_command

            return models_command.run(arguments)
        case "bench":
            from kvasir_console.bench import command as bench

            return bench.run(arguments)
        case "wallet":
            return _wallet(arguments)
        case "gateway":
            from kvasir_console import headless

            if arguments.rotate_hub_key:
                return headless.rotate_hub_key()
            return headless.run_gateway(_load(arguments))
        case "rings":
            from kvasir_console.node.gateway import rings_command

            return rings_command.run(arguments, _load(arguments))
        case "quarantine":
            from kvasir_console.node.gateway import quarantine_command

            return quarantine_command.run(arguments, _load(arguments))
        case "status":
            from kvasir_console import headless

            return headless.print_status(as_json=arguments.json)
    parser.error(f"unknown command {arguments.command}")


def _console(arguments: argparse.Namespace) -> int:
    """The node itself: on a terminal with its screens, with ``--headless`` without."""
    if arguments.headless:
        from kvasir_console import headless

        return headless.run_node(_load(arguments), arguments)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "no_terminal",
            "The console's screens need a terminal on stdin and stdout.",
            "Run kvasir-console --headless on a server.",
        )
    from kvasir_console.screens import app

    return app.run_console(_load(arguments), arguments)


def _wallet(arguments: argparse.Namespace) -> int:
    """What concerns a running node goes to its socket; the rest is done on the vault's file."""
    if arguments.wallet_command in ("unlock", "lock", "claim"):
        from kvasir_console import headless

        return headless.ask_node(arguments.wallet_command, arguments, _load(arguments))
    from kvasir_console.wallet import command

    return command.run(arguments, _load(arguments))


def _load(arguments: argparse.Namespace) -> Config:
    from kvasir_console import config
    from kvasir_console.headless import settings_of
    from kvasir_console.paths import Paths

    flags = {}
    for setting in settings_of(arguments):
        name, separator, value = setting.partition("=")
        if not separator:
            raise UsageError("bad_setting", f"--set {setting}: write it as section.key=value.")
        flags[name] = value
    return config.load(Paths.from_environment().config_file, flags=flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvasir-console",
        description="A node of the Kvasir network: it serves a slice of an open model and earns KVR for the work.",
        epilog="Exit codes: 0 ok, 1 failure, 2 usage or configuration, 3 network, 4 wallet, 5 model file, "
        "6 engine, 7 ledger, 8 port, disk or memory, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"kvasir-console {__version__}")
    parser.add_argument("--headless", action="store_true", help="run the node without screens, one line per change")
    _setting_option(parser)
    _passphrase_options(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _local_parser(commands.add_parser("local", help="the whole network on this machine, with real parts"))
    _models_parser(commands.add_parser("models", help="list, pull, inspect and make checkpoints"))
    _wallet_parser(commands.add_parser("wallet", help="make, import, guard and use the wallet"))
    _bench_parser(commands.add_parser("bench", help="measure engine, relay, experts, rings and recovery here"))
    gateway = commands.add_parser("gateway", help="run the gateway, hub and front port (operators)")
    gateway.add_argument(
        "--rotate-hub-key",
        action="store_true",
        help="give the stopped hub a new signing key that the old one signs for",
    )
    _setting_option(gateway, dest="command_set", default=argparse.SUPPRESS)
    rings = commands.add_parser("rings", help="who serves the rings of this home's gateway (operators)")
    _json_option(rings)
    rings.add_argument("--move", type=int, metavar="RANK", help="give a window to another wallet, after a question")
    rings.add_argument("--to", metavar="WALLET", help="the wallet that it moves to")
    rings.add_argument("--ring", default="", metavar="ID", help="whose window moves, if the gateway serves several")
    rings.add_argument("--yes", action="store_true", help="do not ask before it moves")
    _setting_option(rings, dest="command_set", default=argparse.SUPPRESS)
    _quarantine_parser(commands.add_parser("quarantine", help="workers caught with wrong answers (operators)"))
    status = commands.add_parser("status", help="the state of the node that runs with this KVASIR_HOME")
    status.add_argument("--json", action="store_true", help="print the whole snapshot as JSON")
    return parser


# A command's own option of the same name must not reset what stood before the command: hence the suppressed defaults.


def _setting_option(parser: argparse.ArgumentParser, dest: str = "set", default: str | None = None) -> None:
    parser.add_argument(
        "--set",
        action="append",
        dest=dest,
        default=default,
        metavar="SECTION.KEY=VALUE",
        help="override one configuration value",
    )


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def _passphrase_options(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--passphrase-file", metavar="FILE", default=default, help="file with the vault's passphrase (mode 0600)"
    )
    parser.add_argument(
        "--passphrase-fd", type=int, metavar="FD", default=default, help="file descriptor to read it from"
    )


def _local_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--headless", action="store_true", default=argparse.SUPPRESS, help="no screens, even on a terminal"
    )
    parser.add_argument("--once", action="store_true", help="one pass through everything, then stop")
    parser.add_argument("--prompt", default="The capital of France is", help="raw prompt of the pass")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="tokens to generate (default 32)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="expert nodes (default 2)")
    parser.add_argument(
        "--model", metavar="FILE", help="a mixture-of-experts GGUF to serve instead of the upcycled one"
    )
    parser.add_argument("--port", type=int, default=0, help="the gateway's port (default: a free one)")
    parser.add_argument("--keep", action="store_true", help="keep homes, wallets and logs for a look afterwards")


def _quarantine_parser(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="quarantine_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="who is quarantined, by whom, and why")
    listing.add_argument("--all", action="store_true", help="those too that were lifted")
    lift = commands.add_parser("lift", help="let a worker serve again; what was void stays void")
    lift.add_argument("wallet", help="the worker's wallet, as list prints it")
    lift.add_argument("worker", nargs="?", help="its worker id, as list prints it (left out: all of them)")
    lift.add_argument("--yes", action="store_true", help="do not ask before it is lifted")
    for each in (listing, lift):
        _json_option(each)
        _setting_option(each, dest="command_set", default=argparse.SUPPRESS)


def _models_parser(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="models_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="the catalogue, and what is here already")
    _json_option(listing)
    pull = commands.add_parser("pull", help="fetch a checkpoint, verified against its pinned digest")
    pull.add_argument("name", metavar="NAME", help="as list prints it")
    inspect = commands.add_parser("inspect", help="what a GGUF file holds")
    inspect.add_argument("file", metavar="FILE")
    _json_option(inspect)
    upcycle = commands.add_parser("upcycle", help="make the mixture-of-experts checkpoint out of a dense one")
    upcycle.add_argument("name", metavar="NAME", help="the dense one: smollm2")


def _wallet_parser(parser: argparse.ArgumentParser) -> None:
    from kvasir_console.wallet import arguments

    arguments.add_commands(
        parser,
        lambda command: _passphrase_options(command, default=argparse.SUPPRESS),
        lambda command: _setting_option(command, dest="command_set", default=argparse.SUPPRESS),
    )


_KERNELS = ("auto", "native", "eager", "reference")
_PROMPTS = "of the prompts"


def _bench_parser(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench_command", metavar="BENCH", required=True)
    engine = commands.add_parser("engine", help="decode, prefill and batch rates, memory and exactness")
    engine.add_argument(
        "--model", metavar="FILE|NAME", default="smollm2", help="a GGUF, a name of models list, or random-1.1b"
    )
    engine.add_argument("--peer", metavar="xllamacpp|native|CMD", help="measure this one too, alternately")
    engine.add_argument("--pairs", type=int, default=9, metavar="N", help="measurements of each side (default 9)")
    engine.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (0: physical cores)")
    engine.add_argument("--kernels", default="auto", choices=_KERNELS, help="how it multiplies (default auto)")
    engine.add_argument("--seed", type=int, default=0, metavar="N", help=_PROMPTS)
    _json_option(engine)
    experts = commands.add_parser("experts", help="what remote experts cost: batches, streams, one stream, drafts")
    experts.add_argument("--model", metavar="FILE|NAME", default="smollm2-moe", help="a mixture of experts")
    experts.add_argument("--pairs", type=int, default=9, metavar="N", help="measurements of each side (default 9)")
    experts.add_argument("--rtt-ms", type=float, default=13.0, metavar="MS", help="of the link between node and hub")
    experts.add_argument("--streams", type=int, default=32, metavar="N", help="requests at once (default 32)")
    experts.add_argument("--layers-remote", type=int, default=1, metavar="N", help="with their experts (default 1)")
    experts.add_argument("--threads", type=int, default=0, metavar="N", help="of each engine (0: physical cores)")
    experts.add_argument("--kernels", default="auto", choices=_KERNELS, help="how it multiplies (default auto)")
    experts.add_argument("--wire", default="v3", choices=("v1", "v2", "v2f16", "v3"), help="of dispatch (default v3)")
    experts.add_argument("--seed", type=int, default=0, metavar="N", help=_PROMPTS)
    _json_option(experts)
    relay = commands.add_parser("relay", help="what the relay adds to a remote layer, and how much it carries")
    relay.add_argument("--pairs", type=int, default=9, metavar="N", help="measurements of each side (default 9)")
    relay.add_argument("--hidden", type=int, default=2048, metavar="N", help="width of the hidden state")
    relay.add_argument("--rtt-ms", type=float, default=0.0, metavar="MS", help="of the link between node and hub")
    relay.add_argument("--seed", type=int, default=0, metavar="N", help="of the payloads and the link's chances")
    _json_option(relay)
    recovery = commands.add_parser("recovery", help="requests on a ring that is killed, stopped and cut meanwhile")
    recovery.add_argument("--requests", type=int, default=64, metavar="N", help="at once (default 64)")
    recovery.add_argument("--tokens", type=int, default=64, metavar="N", help="of each (default 64)")
    recovery.add_argument("--faults", type=int, default=16, metavar="N", help="of the schedule (default 16)")
    recovery.add_argument("--rtt-ms", type=float, default=20.0, metavar="MS", help="of each node's link to the hub")
    recovery.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed replays the same faults")
    recovery.add_argument(
        "--soak-minutes", type=float, default=0.0, metavar="N", help="go on for so long, and watch memory and the like"
    )
    recovery.add_argument("--keep", metavar="DIR", help="keep homes and logs there")
    _json_option(recovery)
    ring = commands.add_parser("ring", help="a model over several machines against one process")
    ring.add_argument("--model", metavar="FILE|NAME", default="smollm2", help="a GGUF, or a name of models list")
    ring.add_argument("--stages", type=int, default=2, metavar="N", help="machines (default 2)")
    ring.add_argument("--rtt-ms", type=float, default=20.0, metavar="MS", help="of each node's link to the hub")
    ring.add_argument("--batch", type=int, default=8, metavar="N", help="requests at once without delay (default 8)")
    ring.add_argument("--streams", type=int, default=256, metavar="N", help="requests at once with delay (default 256)")
    ring.add_argument("--direct", action="store_true", help="stages reach each other past the hub: without delay only")
    ring.add_argument("--tokens", type=int, default=48, metavar="N", help="of each request (default 48)")
    ring.add_argument("--pairs", type=int, default=9, metavar="N", help="measurements of each side (default 9)")
    ring.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (0: physical cores)")
    ring.add_argument("--seed", type=int, default=0, metavar="N", help=_PROMPTS)
    ring.add_argument("--keep", metavar="DIR", help="keep homes and logs there")
    _json_option(ring)
    same = commands.add_parser("equivalence", help="how far two ways to compute a model are apart, layer by layer")
    same.add_argument("--model", metavar="FILE|NAME", default="smollm2", help="a GGUF, or a name of models list")
    form = "KERNELS[:kv=TYPE][:threads=N][:device=D]"
    same.add_argument("--a", metavar=form, default="reference", help="the one to compare with (default reference)")
    same.add_argument("--b", metavar=form, default="auto", help="the one compared (default auto)")
    same.add_argument("--b-model", metavar="FILE|NAME", help="what B reads instead: the same network otherwise stored")
    same.add_argument("--tokens", type=int, default=32, metavar="N", help="greedy tokens after each text (default 32)")
    same.add_argument("--prompts", type=int, default=4, metavar="N", help="texts, 1 to 8 (default 4)")
    same.add_argument("--threads", type=int, default=0, metavar="N", help="of a side that names none")
    _json_option(same)
