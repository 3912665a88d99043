"""``kvasir-console bench recovery --soak-minutes N``: rounds of requests under faults, and whether anything creeps up.

Consoles live through the whole soak (only engines are killed), so what they do not give back is seen. Of every
process memory, open descriptors and, for a node, the round trip to the hub are sampled; *growth* is the median of the
last quarter over that of the second: the first is for warming up.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from kvasir_console.bench import recovery
from kvasir_console.bench.faults import HUB, Fault, Kind, Part, schedule
from kvasir_console.bench.network import RingNetwork

Say = Callable[[str], None]
SAMPLE_S = 5.0
STEADY_SAMPLES = 8
"""An engine that lived for fewer samples says nothing about creeping."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    process: str
    pid: int
    rss_mib: float
    descriptors: int


def soak_faults(seed: int, count: int) -> tuple[Fault, ...]:
    """A schedule that kills engines only; the hub, which has none, is cut in its place."""
    return tuple(_sparing(fault) for fault in schedule(seed, count))


def _sparing(fault: Fault) -> Fault:
    if fault.kind is not Kind.KILL:
        return fault
    if fault.target == HUB:
        return replace(fault, kind=Kind.CUT, part=Part.LINK)
    return replace(fault, part=Part.ENGINE)


async def run(plan: recovery.Plan, minutes: float, say: Say, keep: Path | None = None) -> dict[str, Any]:
    """The report. Rounds go on until the time is over; the last one is finished."""
    loop = asyncio.get_running_loop()
    made = recovery.requests(plan)
    async with recovery.network(plan, say, keep) as net:
        calm = await recovery.undisturbed(net, made, plan.tokens)
        ends = loop.time() + 60 * minutes
        rounds: list[dict[str, Any]] = []
        async with Sampler(net) as sampler, recovery.RowCount(net) as rows:
            while loop.time() < ends:
                faults = soak_faults(plan.seed + len(rounds), plan.faults)
                batch, events = await recovery.disturbed(net, made, plan.tokens, faults, say)
                rounds.append(recovery.report(plan, calm, batch, events, rows))
                last = rounds[-1]
                say(f"round {len(rounds)}: {last['completed']} complete, {last['identical']} identical")
        restarts = {name: kept.restarts for name, kept in net.kept.items() if kept.restarts}
    kills = [each["recovery_ms"] for one in rounds for each in one["schedule"] if each["kind"] == Kind.KILL]
    known = [each for each in kills if each is not None]
    return {
        "minutes": round((loop.time() - ends) / 60 + minutes, 1),
        "seed": plan.seed,
        "rounds": len(rounds),
        "restarted_consoles": restarts,
        **{
            key: sum(one[key] for one in rounds)
            for key in ("requests", "completed", "identical", "faults", "faults_with_work_in_flight")
        },
        "recovery_ms_p50": statistics.median(known) if known else None,
        "recovery_ms_max": max(known, default=None),
        "not_recovered": len(kills) - len(known),
        "recomputed_rows": rows.recomputed,
        "rows": rows.rows,
        "growth": growth(sampler.samples),
        "rtt_ms": rtt_growth(sampler.rtts_ms),
    }


class Sampler:
    """Looks at every process of a network while the block runs."""

    def __init__(self, net: RingNetwork) -> None:
        self._net = net
        self.samples: list[Sample] = []
        self.rtts_ms: list[float] = []

    async def __aenter__(self) -> Sampler:
        self._task = asyncio.create_task(self._look_on(), name="samples")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            for name in self._net.kept:
                pids = {f"{name} console": self._net.console_pid(name), f"{name} engine": self._net.engine_pid(name)}
                self.samples += [found for what, pid in pids.items() if pid and (found := _look(what, pid))]
            for member in self._net.members:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        snapshot = await member.snapshot()
                        relays = () if snapshot is None else snapshot.relays
                        self.rtts_ms += [relay.rtt_ms for relay in relays if relay.rtt_ms is not None]
            await asyncio.sleep(SAMPLE_S)


def _look(what: str, pid: int) -> Sample | None:
    try:
        process = psutil.Process(pid)
        return Sample(what, pid, process.memory_info().rss / 2**20, process.num_fds())
    except psutil.Error:
        return None


def growth(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """By process, of the life with most samples: memory and descriptors of its second and of its last quarter."""
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.process, sample.pid), []).append(sample)
    longest: dict[str, list[Sample]] = {}
    for (name, _), life in lives.items():
        if len(life) >= STEADY_SAMPLES and len(life) > len(longest.get(name, ())):
            longest[name] = life
    return {
        name: {
            "samples": len(life),
            "rss_mib": _quarters([sample.rss_mib for sample in life]),
            "descriptors": _quarters([float(sample.descriptors) for sample in life]),
        }
        for name, life in sorted(longest.items())
    }


def rtt_growth(rtts_ms: Sequence[float]) -> list[float] | None:
    """Medians of the second and of the last quarter; ``None`` for too few."""
    return _quarters(rtts_ms) if len(rtts_ms) >= STEADY_SAMPLES else None


def _quarters(values: Sequence[float]) -> list[float]:
    quarter = len(values) // 4
    return [
        round(statistics.median(part), 3) for part in (values[quarter : 2 * quarter], values[len(values) - quarter :])
    ]


def describe(report: dict[str, Any]) -> str:
    """The report as a person reads it."""
    p50, most = report["recovery_ms_p50"], report["recovery_ms_max"]
    lines = [
        f"{report['minutes']:g} minutes, {report['rounds']} rounds: {report['completed']} of {report['requests']} "
        f"requests complete, {report['identical']} identical; {report['faults']} faults, "
        f"{report['faults_with_work_in_flight']} with work in flight",
        "kills: " + ("none" if p50 is None else f"p50 {p50 / 1e3:.1f} s, {most / 1e3:.1f} s at most"),
        f"round trip to the hub, ms: {report['rtt_ms']}",
        f"{'process':22}{'samples':>8}  memory, MiB      descriptors",
    ]
    for name, grown in report["growth"].items():
        memory, files = grown["rss_mib"], grown["descriptors"]
        figures = f"{memory[0]:7.1f} {memory[1]:7.1f}  {files[0]:5.0f} {files[1]:5.0f}"
        lines.append(f"{name:22}{grown['samples']:>8}  {figures}")
    return "\n".join(lines)
