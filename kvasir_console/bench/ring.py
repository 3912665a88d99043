"""``kvasir-console bench ring``: what it costs to spread a model over machines, through the hub.

One network of real processes serves the same model twice: as a ring whose stages reach the hub over links with a round
trip each, and whole, by the gateway's own engine. Both are asked over HTTPS, in turn, for the same tokens; the same
cores compute both. Three comparisons, each of pairs of measurements taken one after the other:

* ``loopback_ratio``: tokens a second of ``batch`` requests at once, ring without delay over one process.
* ``added_ms_per_token``: one stream, ring with the round trip less ring without.
* ``aggregate_ratio``: tokens a second of ``streams`` requests at once, ring with the round trip over ring without.

With ``direct`` the stages reach each other past the hub, and past the delays of its links: only the first remains.

A verdict is judged on the worse bound of the 95% interval.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.bench.network import Layout, RingNetwork
from kvasir_console.bench.stats import Interval, paired_difference, paired_ratio
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.errors import UsageError
from kvasir_console.local.chat import Answer

Say = Callable[[str], None]
LOOPBACK_BAR, AGGREGATE_BAR, ADDED_BAR_MS = 0.95, 0.9, 2.0
MAX_STREAMS = 256
"""As many sequences as a ring runs at once."""
_WORDS = ("river", "stone", "bridge", "winter", "harvest", "letter", "window", "garden", "engine", "mountain", "signal")


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    stages: int = 2
    rtt_ms: float = 20.0
    batch: int = 8
    streams: int = 256
    """As many as a ring runs at once: fewer do not fill the wait for a network."""
    tokens: int = 48
    pairs: int = 9
    threads: int = 2
    """Of the one process; the stages share as many."""
    direct: bool = False
    """The stages listen for each other."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rate:
    """What one measurement of requests at once gave."""

    tokens_per_s: float
    """All of them, their prompts included."""
    ms_per_token: float
    """Of the slowest, after its first token."""


def layout(plan: Plan) -> Layout:
    """Windows of nearly equal length. Raises ``UsageError`` for more stages than layers."""
    with Checkpoint.open(plan.model) as checkpoint:
        layers = ModelShape.of(checkpoint).n_layer
    if not 1 <= plan.stages <= layers:
        raise UsageError("bad_stages", f"--stages takes 1 to {layers}, the layers of this model.")
    ends = [layers * (rank + 1) // plan.stages for rank in range(plan.stages)]
    return Layout(
        model=plan.model,
        windows=tuple(zip([0, *ends], ends, strict=False)),
        threads=max(1, plan.threads // plan.stages),
        whole_threads=plan.threads,
        max_requests=max(plan.batch, plan.streams),
        direct=plan.direct,
        seed=plan.seed,
    )


async def run(plan: Plan, say: Say, keep: Path | None = None) -> dict[str, Any]:
    """The report. Raises ``KvasirError`` if the network does not come up or refuses a request."""
    shape = layout(plan)
    async with RingNetwork(shape, say, keep) as net:
        bench = _Bench(net, plan, say)
        if plan.direct:
            await net.wait_until(net.all_direct, "the edges do not go past the hub")
        loopback = await bench.loopback()
        added = {} if plan.direct else await bench.added()
        aggregate = {} if plan.direct else await bench.aggregate()
        busy = [((await net.engine_stats(stage)) or {}).get("ring") for stage in net.stages]
    bar_ms = plan.stages * plan.rtt_ms + ADDED_BAR_MS
    bars: dict[str, Any] = {
        "loopback_ratio": {"bar": LOOPBACK_BAR, "met": loopback["loopback_ratio_ci"][0] >= LOOPBACK_BAR}
    }
    if not plan.direct:
        bars |= {
            "added_ms_per_token": {"bar": bar_ms, "met": added["added_ms_per_token_ci"][1] <= bar_ms},
            "aggregate_ratio": {"bar": AGGREGATE_BAR, "met": aggregate["aggregate_ratio_ci"][0] >= AGGREGATE_BAR},
        }
    return {
        "model": plan.model.name,
        "stages": [list(window) for window in shape.windows],
        "rtt_ms": plan.rtt_ms,
        "pairs": plan.pairs,
        "threads": {"whole": shape.whole_threads, "stage": shape.threads},
        "batch": plan.batch,
        "streams": plan.streams,
        "direct": plan.direct,
        **loopback,
        **added,
        **aggregate,
        "bars": bars,
        "ring": busy,
    }


class _Bench:
    def __init__(self, net: RingNetwork, plan: Plan, say: Say) -> None:
        self._net = net
        self._plan = plan
        self._say = say
        self._rng = random.Random(f"ring:{plan.seed}")  # noqa: S311 - prompts, no secrets

    async def loopback(self) -> dict[str, Any]:
        ring, whole = await self._pairs(
            "batch", self._plan.batch, lambda: self._ring(0.0), self._whole, of="tokens_per_s"
        )
        return {
            **_figure("loopback_ratio", paired_ratio(ring, whole, self._plan.seed)),
            "samples_loopback": {"ring_tps": ring, "whole_tps": whole},
        }

    async def added(self) -> dict[str, Any]:
        far, near = await self._pairs(
            "one stream", 1, lambda: self._ring(self._plan.rtt_ms), lambda: self._ring(0.0), of="ms_per_token"
        )
        return {
            **_figure("added_ms_per_token", paired_difference(far, near, self._plan.seed)),
            "samples_added": {"far_ms": far, "near_ms": near},
        }

    async def aggregate(self) -> dict[str, Any]:
        far, near = await self._pairs(
            "streams",
            self._plan.streams,
            lambda: self._ring(self._plan.rtt_ms),
            lambda: self._ring(0.0),
            of="tokens_per_s",
        )
        return {
            **_figure("aggregate_ratio", paired_ratio(far, near, self._plan.seed)),
            "samples_aggregate": {"far_tps": far, "near_tps": near},
        }

    async def _pairs(
        self, what: str, count: int, one: Callable[[], Any], other: Callable[[], Any], *, of: str
    ) -> tuple[list[float], list[float]]:
        """Measurements of two sides, whose turn to go first alternates; a first pair warms up and is thrown away."""
        sides: tuple[list[float], list[float]] = ([], [])
        for number in range(self._plan.pairs + 1):
            prompts = [self._prompt() for _ in range(count)]
            seeds = [self._rng.randrange(2**31) for _ in range(count)]
            for side in (0, 1) if number % 2 else (1, 0):
                model = await (one, other)[side]()
                rate = await self._measure(model, prompts, seeds)
                if number:
                    sides[side].append(getattr(rate, of))
            if number:
                self._say(f"{what}, pair {number} of {self._plan.pairs}: {sides[0][-1]:.2f} and {sides[1][-1]:.2f}")
        return sides

    async def _ring(self, rtt_ms: float) -> str:
        """The ring with this round trip on every link; its name. What it learned of the network before is forgotten
        by one request that is not measured."""
        for stage in self._net.stages:
            await self._net.links.set(stage.name, rtt_ms=rtt_ms)
        await self._measure(self._net.model_id, [self._prompt()], [0], tokens=8)
        return self._net.model_id

    async def _whole(self) -> str:
        return self._net.whole_id

    async def _measure(self, model: str, prompts: list[str], seeds: list[int], tokens: int | None = None) -> Rate:
        tokens = tokens or self._plan.tokens
        loop = asyncio.get_running_loop()
        started = loop.time()
        answers: list[Answer] = await asyncio.gather(
            *(
                self._net.client.complete(model, prompt, tokens, sampling={"temperature": 1.0, "seed": seed})
                for prompt, seed in zip(prompts, seeds, strict=True)
            )
        )
        elapsed_s = loop.time() - started
        slowest = min(answer.tokens_per_s for answer in answers)
        return Rate(sum(len(answer.tokens) for answer in answers) / elapsed_s, 1e3 / slowest if slowest else 0.0)

    def _prompt(self) -> str:
        return " ".join(self._rng.choices(_WORDS, k=12))


def _figure(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.median, f"{name}_ci": [interval.low, interval.high]}


def describe(report: dict[str, Any]) -> str:
    """The report as a person reads it."""
    threads = report["threads"]
    lines = [
        f"{report['model']}, {len(report['stages'])} stages with {threads['stage']} threads each against one process "
        f"with {threads['whole']}{', past the hub' if report['direct'] else ''}; {report['pairs']} pairs"
    ]
    for name, label in (
        ("loopback_ratio", f"batch {report['batch']}, no delay, ring over one process"),
        ("added_ms_per_token", f"one stream, {report['rtt_ms']:g} ms to the hub, added ms a token"),
        ("aggregate_ratio", f"{report['streams']} streams, {report['rtt_ms']:g} ms over no delay"),
    ):
        if name not in report:
            continue
        low, high = report[f"{name}_ci"]
        bar = report["bars"][name]
        verdict = "met" if bar["met"] else "MISSED"
        lines.append(f"{label:58} {report[name]:7.2f}  {low:.2f} to {high:.2f}  bar {bar['bar']:g} {verdict}")
    return "\n".join(lines)
