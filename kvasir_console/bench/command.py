"""``kvasir-console bench``: speed and exactness, as ratios against a peer in the same run."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

import psutil

from kvasir_console.errors import ExitCode, UsageError
from kvasir_console.paths import Paths

MAX_THREADS = 1024
MAX_SOAK_MINUTES = 10_080
"""A week."""


def run(arguments: argparse.Namespace) -> int:
    commands = {
        "engine": _engine,
        "equivalence": _equivalence,
        "experts": _experts,
        "recovery": _recovery,
        "relay": _relay,
        "ring": _ring,
    }
    return commands[arguments.bench_command](arguments)


def _engine(arguments: argparse.Namespace) -> int:
    from kvasir_console.bench import engine

    _check_pairs(arguments)
    if arguments.peer is not None:
        engine.check_peer(arguments.peer)
    threads = _threads(arguments)
    report = asyncio.run(
        engine.run(
            _model(arguments.model),
            peer=arguments.peer,
            pairs=arguments.pairs,
            threads=threads,
            kernels=arguments.kernels,
            seed=arguments.seed,
            say=_say,
        )
    )
    print(json.dumps(report, indent=2) if arguments.json else _describe(report))
    return ExitCode.OK


def _experts(arguments: argparse.Namespace) -> int:
    from kvasir_console.bench import experts

    _check_pairs(arguments)
    if not 0 <= arguments.rtt_ms <= 1000 or not 1 <= arguments.streams <= 64 or arguments.layers_remote < 1:
        raise UsageError("bad_shape", "--rtt-ms takes 0 to 1000, --streams 1 to 64, --layers-remote 1 or more.")
    threads = _threads(arguments)
    options = experts.Options(
        _model(arguments.model),
        pairs=arguments.pairs,
        rtt_ms=arguments.rtt_ms,
        streams=arguments.streams,
        layers_remote=arguments.layers_remote,
        threads=threads,
        kernels=arguments.kernels,
        wire=arguments.wire,
        seed=arguments.seed,
    )
    report = asyncio.run(experts.run(options, _say))
    print(json.dumps(report, indent=2) if arguments.json else experts.describe(report))
    return ExitCode.OK


def _relay(arguments: argparse.Namespace) -> int:
    from kvasir_console.bench import relay

    _check_pairs(arguments)
    if not 0 <= arguments.rtt_ms <= 1000 or not 1 <= arguments.hidden <= 2**18:
        raise UsageError("bad_shape", "--rtt-ms takes 0 to 1000, --hidden 1 to 262144.")
    report = asyncio.run(
        relay.run(
            pairs=arguments.pairs,
            hidden=arguments.hidden,
            rtt_ms=arguments.rtt_ms,
            seed=arguments.seed,
            say=_say,
        )
    )
    print(json.dumps(report, indent=2) if arguments.json else relay.describe(report))
    return ExitCode.OK


def _recovery(arguments: argparse.Namespace) -> int:
    from kvasir_console.bench import recovery, soak
    from kvasir_console.bench.faults import MIN_FAULTS

    if not MIN_FAULTS <= arguments.faults <= 1000:
        raise UsageError("bad_faults", f"--faults takes {MIN_FAULTS} to 1000.")
    if not 1 <= arguments.requests <= 1000 or not 4 <= arguments.tokens <= 1024 or not 0 <= arguments.rtt_ms <= 1000:
        raise UsageError("bad_load", "--requests takes 1 to 1000, --tokens 4 to 1024, --rtt-ms 0 to 1000.")
    if not 0 <= arguments.soak_minutes <= MAX_SOAK_MINUTES:
        raise UsageError("bad_minutes", f"--soak-minutes takes 0 (no soak) to {MAX_SOAK_MINUTES}.")
    plan = recovery.Plan(
        requests=arguments.requests,
        tokens=arguments.tokens,
        faults=arguments.faults,
        rtt_ms=arguments.rtt_ms,
        seed=arguments.seed,
    )

    if arguments.soak_minutes:
        report = asyncio.run(soak.run(plan, arguments.soak_minutes, _say, _kept(arguments)))
        print(json.dumps(report, indent=2) if arguments.json else soak.describe(report))
        return ExitCode.OK if report["completed"] == report["identical"] == report["requests"] else ExitCode.FAILURE
    report = asyncio.run(recovery.run(plan, _say, _kept(arguments)))
    print(json.dumps(report, indent=2) if arguments.json else recovery.describe(report))
    whole = report["completed"] == report["identical"] == report["requests"]
    return ExitCode.OK if whole and report["faults"] == len(report["schedule"]) else ExitCode.FAILURE


def _ring(arguments: argparse.Namespace) -> int:
    from kvasir_console.bench import ring

    _check_pairs(arguments)
    if not all(1 <= count <= ring.MAX_STREAMS for count in (arguments.batch, arguments.streams)):
        raise UsageError("bad_load", f"--batch and --streams take 1 to {ring.MAX_STREAMS}, as many as a ring runs.")
    if arguments.tokens < 8:
        raise UsageError("bad_load", "--tokens takes 8 or more.")
    if not 0 <= arguments.rtt_ms <= 1000:
        raise UsageError("bad_load", "--rtt-ms takes 0 to 1000.")
    threads = _threads(arguments)
    plan = ring.Plan(
        model=_model(arguments.model),
        stages=arguments.stages,
        rtt_ms=arguments.rtt_ms,
        batch=arguments.batch,
        streams=arguments.streams,
        tokens=arguments.tokens,
        pairs=arguments.pairs,
        threads=threads,
        direct=arguments.direct,
        seed=arguments.seed,
    )
    report = asyncio.run(ring.run(plan, _say, _kept(arguments)))
    print(json.dumps(report, indent=2) if arguments.json else ring.describe(report))
    return ExitCode.OK


def _kept(arguments: argparse.Namespace) -> Path | None:
    return Path(arguments.keep).absolute() if arguments.keep else None


def _equivalence(arguments: argparse.Namespace) -> int:
    from kvasir_console.bench import equivalence
    from kvasir_console.bench.engine import TEXTS
    from kvasir_console.bench.side import Configuration

    if arguments.tokens < 1 or not 1 <= arguments.prompts <= len(TEXTS):
        raise UsageError("bad_count", f"--tokens takes 1 or more, --prompts 1 to {len(TEXTS)}.")
    sides = [Configuration.parse(text, threads=_threads(arguments)) for text in (arguments.a, arguments.b)]
    report = equivalence.run(
        _model(arguments.model),
        *sides,
        cache=Paths.from_environment().ensure().kernels,
        tokens=arguments.tokens,
        prompts=arguments.prompts,
        b_model=_model(arguments.b_model) if arguments.b_model else None,
        say=_say,
    )
    print(json.dumps(_plain(report), indent=2) if arguments.json else equivalence.describe(report))
    return ExitCode.OK


def _plain(value: Any) -> Any:
    """``value`` for JSON, which has no word for what is no number: ``null``."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _model(name: str) -> Path:
    """A file, a checkpoint of the catalogue, pulled, or ``random-1.1b``, made on the spot."""
    from kvasir_console.bench import random_llama
    from kvasir_console.node import catalogue

    if name == random_llama.NAME:
        file = Paths.from_environment().ensure().models / f"{name}.Q4_K.gguf"
        if not file.exists():
            _say(f"Making {file.name} (0.6 GB)")
            random_llama.write(file)
        return file
    if name in catalogue.CATALOGUE:
        return catalogue.pull(name, Paths.from_environment().ensure()).absolute()
    if not Path(name).is_file():
        raise UsageError(
            "no_such_model",
            f"{name} is neither a file nor a model of the catalogue.",
            f"The catalogue has {', '.join(catalogue.CATALOGUE)}; {random_llama.NAME} is made on the spot.",
        )
    return Path(name).absolute()


def _threads(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.threads <= MAX_THREADS:
        raise UsageError("bad_threads", f"--threads takes 1 to {MAX_THREADS}, or 0 for the physical cores.")
    return int(arguments.threads or psutil.cpu_count(logical=False) or 1)


def _check_pairs(arguments: argparse.Namespace) -> None:
    if arguments.pairs < 1:
        raise UsageError("bad_pairs", "--pairs takes 1 or more.")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _describe(report: dict[str, Any]) -> str:
    peer = report.get("peer")
    lines = [
        f"{report['model']}, {report['threads']} threads, kernels {report['kernels']}, {report['pairs']} measurements",
        f"{'':14}{'ours':>10}" + (f"{peer['name']:>12}{'ratio':>8}   95% of it" if peer else ""),
    ]
    for figure, label in (("decode", "decode tok/s"), ("prefill", "prefill tok/s"), ("batch8", "batch 8 tok/s")):
        row = f"{label:14}{report[f'{figure}_tps']:>10.1f}"
        if peer:
            low, high = report[f"{figure}_ratio_ci"]
            row += f"{peer[f'{figure}_tps']:>12.1f}{report[f'{figure}_ratio']:>8.2f}   {low:.2f} to {high:.2f}"
        lines.append(row)
    kl = f"KL from f32   {report['kl_vs_f32']:>10.2e}" + (f"{peer['kl_vs_f32']:>12.2e}" if peer else "")
    lines += [kl, f"first token   {report['ttft_ms']:>10.1f} ms", f"load          {report['load_s']:>10.2f} s"]
    lines.append(f"memory        {report['rss_mib']:>10.0f} MiB")
    return "\n".join(lines)
