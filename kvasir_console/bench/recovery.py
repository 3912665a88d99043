"""``kvasir-console bench recovery``: requests on a ring that is killed, stopped and cut while they run.

The same requests run twice on the same network of processes: undisturbed, then under a seeded schedule of faults
(``faults.py``). Every answer has to be complete and every token the same. ``recovery_ms`` of a fault is the time until
*every* request that ran when it struck has gone on; ``recovery_ms_p50`` and ``recovery_ms_max`` are over the SIGKILLs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvasir_console.bench.agreement import agreement
from kvasir_console.bench.faults import Fault, Kind, schedule
from kvasir_console.bench.models import Recipe, write_model
from kvasir_console.bench.network import Layout, RingNetwork
from kvasir_console.bench.strikes import Striker
from kvasir_console.errors import KvasirError
from kvasir_console.local.chat import Answer

Say = Callable[[str], None]
RECOVERY_TIMEOUT_S = 180.0
WORK_TIMEOUT_S = 60.0
MAX_RESENT = 240
RESEND_S = 0.5
_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. Four layers on three stages, experts of each layer on a worker of its own."""

    requests: int = 64
    tokens: int = 64
    faults: int = 16
    workers: int = 4
    rtt_ms: float = 20.0
    seed: int = 0
    windows: tuple[tuple[int, int], ...] = ((0, 1), (1, 3), (3, 4))
    recipe: Recipe = Recipe()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str
    sampling: dict[str, Any]


@dataclass(slots=True)
class Run:
    """One request while it runs."""

    request: Request
    pieces: int = 0
    """Of text, which is nearly one for each token."""
    over: bool = False
    tokens: tuple[int, ...] = ()
    rows: int = 0
    error: str = ""
    resent: int = 0
    """How often it was sent again because the gateway had died."""


@dataclass(slots=True)
class Event:
    """A fault and what came of it."""

    fault: Fault
    at_work: bool = False
    running: int = 0
    recovery_ms: float | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return self.fault.to_json() | {
            "work_in_flight": self.at_work,
            "requests_running": self.running,
            "recovery_ms": self.recovery_ms,
            **({"error": self.error} if self.error else {}),
        }


@dataclass(slots=True)
class Batch:
    """Requests that run together. ``moved`` is set at every piece of text."""

    runs: list[Run]
    name: str = ""
    """Not empty: requests are sent under keys that begin so, and again to a gateway that died in between."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pieces(self) -> int:
        return sum(run.pieces for run in self.runs)

    @property
    def running(self) -> list[Run]:
        return [run for run in self.runs if not run.over]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that only pieces of text change holds, or all requests are over."""
        while not condition() and self.running:
            self.moved.clear()
            await self.moved.wait()


def requests(plan: Plan) -> list[Request]:
    """Prompts of all lengths, most of them sampled: then one wrong row changes every token after it."""
    rng = random.Random(f"requests:{plan.seed}")  # noqa: S311 - prompts, no secrets
    made = []
    for number in range(plan.requests):
        words = " ".join(f"w{rng.randrange(1, 256):03d}" for _ in range(rng.randrange(1, 40)))
        sampling = {"temperature": 0.0 if number % 8 == 0 else 0.9, "top_p": 0.95, "seed": rng.randrange(2**31)}
        made.append(Request(f"{number}: {words}", sampling))
    return made


async def run(plan: Plan, say: Say, keep: Path | None = None) -> dict[str, Any]:
    """The report. Raises ``KvasirError`` if the network does not come up."""
    faults = schedule(plan.seed, plan.faults, stages=len(plan.windows), workers=plan.workers)
    made = requests(plan)
    async with network(plan, say, keep) as net:
        say(f"{len(made)} requests of {plan.tokens} tokens, undisturbed")
        calm = await undisturbed(net, made, plan.tokens)
        say(f"The same under {len(faults)} faults")
        async with RowCount(net) as rows:
            batch, events = await disturbed(net, made, plan.tokens, faults, say)
        say("Every link is cut once more; hub and nodes compare what they counted")
        counts = await agreement(net)
        return report(plan, calm, batch, events, rows) | {"counts": counts}


@contextlib.asynccontextmanager
async def network(plan: Plan, say: Say, keep: Path | None = None) -> AsyncIterator[RingNetwork]:
    """The network that a plan runs on, with a model made for it."""
    with tempfile.TemporaryDirectory(prefix="kvb-model-") as folder:
        async with RingNetwork(_layout(plan, write_model(Path(folder) / "ring.gguf", plan.recipe)), say, keep) as net:
            yield net


def _layout(plan: Plan, model: Path) -> Layout:
    return Layout(
        model=model,
        windows=plan.windows,
        workers=plan.workers,
        max_experts=max(1, plan.recipe.n_expert * 3 // 4),
        rtt_ms=plan.rtt_ms,
        max_requests=plan.requests,
        seed=plan.seed,
    )


async def undisturbed(net: RingNetwork, made: list[Request], tokens: int) -> Batch:
    """All requests at once. Raises what one of them was refused with."""
    batch = Batch([Run(request) for request in made])
    await asyncio.gather(*(_complete(net, batch, run, tokens) for run in batch.runs))
    if failed := next((run for run in batch.runs if run.error), None):
        raise KvasirError("undisturbed_failed", f"An undisturbed request failed: {failed.error}")
    return batch


async def disturbed(
    net: RingNetwork, made: list[Request], tokens: int, faults: tuple[Fault, ...], say: Say
) -> tuple[Batch, list[Event]]:
    """All requests at once, and the faults while they run."""
    batch = Batch([Run(request) for request in made], name=secrets.token_hex(8))
    events = [Event(fault) for fault in faults]
    striker = Striker(net)
    striking = asyncio.create_task(_strike_all(striker, batch, events, tokens, say), name="faults")
    try:
        await asyncio.gather(*(_complete(net, batch, run, tokens) for run in batch.runs))
        batch.moved.set()
        await striking
    finally:
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
        await striker.close()
    return batch, events


async def _complete(net: RingNetwork, batch: Batch, run: Run, tokens: int) -> None:
    """Run one request to its end, or until it fails though the gateway lived."""
    try:
        while True:
            deaths = net.gateway_deaths
            try:
                answer = await _once(net, batch, run, tokens)
            except KvasirError as error:
                if not batch.name or not await _died(net, deaths) or run.resent > MAX_RESENT:
                    run.error = f"{error.code}: {error.message} {error.hint}".strip()
                    return
                run.resent += 1
                continue
            run.tokens, run.rows = answer.tokens, int(answer.kvasir.get("stage_rows", 0))
            return
    finally:
        run.over = True
        batch.moved.set()


async def _once(net: RingNetwork, batch: Batch, run: Run, tokens: int) -> Answer:
    told = 0

    def moved() -> None:
        nonlocal told
        told += 1
        if told > run.pieces:  # an answer that is told again tells what was known first
            run.pieces = told
            batch.moved.set()

    key = f"{batch.name}-{batch.runs.index(run)}" if batch.name else ""
    return await net.client.complete(
        net.model_id, run.request.prompt, tokens, sampling=run.request.sampling, on_text=moved, idempotency_key=key
    )


async def _died(net: RingNetwork, deaths: int) -> bool:
    """Whether the gateway died since there were ``deaths``, or is just coming up again; waits until it is asked again.

    A connection may end before the death of its other end is seen.
    """
    await asyncio.sleep(RESEND_S)
    return net.gateway_deaths > deaths or not net.gateway_settled


async def _strike_all(striker: Striker, batch: Batch, events: list[Event], tokens: int, say: Say) -> None:
    """One fault after the other, each once the requests have gone on after the one before."""
    total = len(batch.runs) * tokens
    for event in events:
        due = event.fault.share * total
        await batch.until(partial(_reached, batch, due))
        fault = event.fault
        await striker.continued(fault.target)
        event.at_work = await _unless_over(batch, striker.at_work(fault, WORK_TIMEOUT_S))
        running = batch.running
        event.running = len(running)
        if not running:
            event.error = "no request ran any more"
            continue
        before = [run.pieces for run in running]
        try:
            struck = await striker.strike(fault)
        except (OSError, RuntimeError) as error:
            event.error = str(error)
            say(f"fault {fault.number}: {error}")
            continue
        say(f"fault {fault.number}: {fault.kind} {fault.target} ({fault.part}), {len(running)} requests run")
        try:
            async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                await batch.until(partial(_went_on, running, before))
        except TimeoutError:
            event.error = f"not every request went on within {RECOVERY_TIMEOUT_S:g} s"
            say(f"fault {fault.number}: {event.error}")
            continue
        event.recovery_ms = 1e3 * (asyncio.get_running_loop().time() - struck.at_s)
        say(f"fault {fault.number}: all went on after {event.recovery_ms:.0f} ms")


def _reached(batch: Batch, pieces: float) -> bool:
    return batch.pieces >= pieces


def _went_on(running: list[Run], before: list[int]) -> bool:
    """Whether each has a token that was not on its way before: its second piece since then, or its end."""
    return all(run.over or run.pieces >= count + 2 for run, count in zip(running, before, strict=True))


async def _unless_over(batch: Batch, looking: Any) -> bool:
    """The result of ``looking``; ``False`` once no request runs any more."""
    look = asyncio.ensure_future(looking)
    over = asyncio.ensure_future(batch.until(lambda: False))
    try:
        await asyncio.wait({look, over}, return_when=asyncio.FIRST_COMPLETED)
        return look.done() and bool(look.result())
    finally:
        for task in (look, over):
            task.cancel()
        await asyncio.gather(look, over, return_exceptions=True)


class RowCount:
    """Rows that stages computed again, over all lives of their engines: the counters are read while the block runs."""

    def __init__(self, net: RingNetwork) -> None:
        self._net = net
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}
        self._before: dict[tuple[str, int], tuple[int, int]] = {}

    async def __aenter__(self) -> RowCount:
        await self._read()
        self._before = dict(self._seen)
        self._reading = asyncio.create_task(self._read_on(), name="rows")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._read()

    @property
    def rows(self) -> int:
        return self._grown(0)

    @property
    def recomputed(self) -> int:
        return self._grown(1)

    def _grown(self, which: int) -> int:
        return sum(seen[which] - self._before.get(life, (0, 0))[which] for life, seen in self._seen.items())

    async def _read_on(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            await self._read()

    async def _read(self) -> None:
        for stage in self._net.stages:
            pid = self._net.engine_pid(stage.name)
            stats = await self._net.engine_stats(stage)
            if pid is not None and stats is not None and stats["ring"] is not None:
                ring = stats["ring"]
                self._seen[stage.name, pid] = int(ring["rows"]), int(ring.get("recomputed_rows", 0))


def report(plan: Plan, calm: Batch, batch: Batch, events: list[Event], rows: RowCount) -> dict[str, Any]:
    """The figures of a run against its undisturbed one."""
    done = [run for run in batch.runs if not run.error]
    kills = [each.recovery_ms for each in events if each.fault.kind is Kind.KILL and each.recovery_ms is not None]
    missed = sum(1 for each in events if each.fault.kind is Kind.KILL and each.recovery_ms is None)
    expected = [run.tokens for run in calm.runs]
    return {
        "seed": plan.seed,
        "rtt_ms": plan.rtt_ms,
        "requests": len(batch.runs),
        "completed": sum(1 for run in done if len(run.tokens) == plan.tokens),
        "identical": sum(1 for run, tokens in zip(batch.runs, expected, strict=True) if run.tokens == tokens != ()),
        "faults": sum(1 for each in events if not each.error),
        "faults_with_work_in_flight": sum(1 for each in events if each.at_work and not each.error),
        "kills": len(kills) + missed,
        "recovery_ms_p50": statistics.median(kills) if kills and not missed else None,
        "recovery_ms_max": max(kills) if kills and not missed else None,
        "resent": sum(run.resent for run in batch.runs),
        "rows": rows.rows,
        "recomputed_rows": rows.recomputed,
        "rows_from_scratch": sum(run.rows for run in calm.runs) * len(plan.windows),
        "schedule": [each.to_json() for each in events],
        "errors": [run.error for run in batch.runs if run.error],
    }


def describe(report: dict[str, Any]) -> str:
    """The report as a person reads it."""
    lines = [
        f"{report['requests']} requests, {report['completed']} complete, {report['identical']} with the tokens of the "
        f"undisturbed run; seed {report['seed']}, {report['rtt_ms']:g} ms to the hub",
        f"{report['faults']} faults, {report['faults_with_work_in_flight']} with work in flight; "
        f"{report['recomputed_rows']} of {report['rows']} rows computed again",
    ]
    if report["recovery_ms_p50"] is not None:
        lines.append(
            f"after a kill all requests went on within {report['recovery_ms_p50'] / 1e3:.1f} s (median of "
            f"{report['kills']}), {report['recovery_ms_max'] / 1e3:.1f} s at most"
        )
    if (counts := report.get("counts")) is not None:
        lines.append(
            f"hub and nodes count the same bytes in {counts['sessions_alike']} of {counts['sessions']} sessions "
            f"({counts['bytes_up'] + counts['bytes_down']} bytes, {counts['disputed_bytes']} disputed); "
            f"{counts['acknowledged']} of {counts['members']} nodes acknowledged their statements"
        )
        lines += [f"  refused: {why}" for why in counts["refused"]]
    for each in report["schedule"]:
        took = "not recovered" if each["recovery_ms"] is None else f"{each['recovery_ms'] / 1e3:6.2f} s"
        where = each["target"] if each["part"] == "link" else f"{each['target']} {each['part']}"
        lines.append(f"  {each['number']:>2}  {each['kind']:5} {where:18} {took}  {each.get('error', '')}".rstrip())
    return "\n".join([*lines, *report["errors"]])
