"""``kvasir-console bench recovery``: requests on a ring that is killed, stopped and cut while they run.

The same requests run twice on the same network of processes: undisturbed, then under a seeded schedule of faults
(``faults.py``). Every answer has to be complete and every token the same. ``recovery_ms`` of a fault is the time until
*every* request that ran when it struck has gone on; ``recovery_ms_p50`` and ``recovery_ms_max`` are over the SIGKILLs.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir_console.bench.faults import Fault, Kind, schedule
from kvasir_console.bench.models import Recipe, write_model
from kvasir_console.bench.network import Layout, RingNetwork
from kvasir_console.bench.strikes import Striker
from kvasir_console.errors import KvasirError

Say = Callable[[str], None]
RECOVERY_TIMEOUT_S = 180.0
WORK_TIMEOUT_S = 60.0
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
    latest_s: float = 0.0
    """When its latest piece of text came, on the event loop's clock."""
    over: bool = False
    tokens: tuple[int, ...] = ()
    rows: int = 0
    error: str = ""


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
    async with network(plan, say, keep) as net:
        made = requests(plan)
        say(f"{len(made)} requests of {plan.tokens} tokens, undisturbed")
        calm = await undisturbed(net, made, plan.tokens)
        say(f"The same under {len(faults)} faults")
        rows = RowCount(net)
        async with rows:
            batch, events = await disturbed(net, made, plan.tokens, faults, say)
        return _report(plan, calm, batch, events, rows.recomputed)


def network(plan: Plan, say: Say, keep: Path | None = None) -> RingNetwork:
    """The network that a plan runs on; its model is made now."""
    import tempfile

    model = write_model(Path(tempfile.mkdtemp(prefix="kvb-model-")) / "ring.gguf", plan.recipe)
    layout = Layout(
        model=model,
        windows=plan.windows,
        workers=plan.workers,
        max_experts=max(1, plan.recipe.n_expert * 3 // 4),
        rtt_ms=plan.rtt_ms,
        max_requests=plan.requests,
        seed=plan.seed,
    )
    return RingNetwork(layout, say, keep)


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
    batch = Batch([Run(request) for request in made])
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
    def moved() -> None:
        run.pieces += 1
        run.latest_s = asyncio.get_running_loop().time()
        batch.moved.set()

    try:
        answer = await net.client.complete(
            net.model_id, run.request.prompt, tokens, sampling=run.request.sampling, on_text=moved
        )
        run.tokens, run.rows = answer.tokens, int(answer.kvasir.get("stage_rows", 0))
    except KvasirError as error:
        run.error = f"{error.code}: {error.message} {error.hint}".strip()
    finally:
        run.over = True
        run.latest_s = asyncio.get_running_loop().time()
        batch.moved.set()


async def _strike_all(striker: Striker, batch: Batch, events: list[Event], tokens: int, say: Say) -> None:
    """One fault after the other, each once the requests have gone on after the one before."""
    total = len(batch.runs) * tokens
    for event in events:
        due = event.fault.share * total
        await batch.until(lambda due=due: batch.pieces >= due)  # type: ignore[misc]
        fault = event.fault
        await striker.continued(fault.target)
        event.at_work = await _unless_over(batch, striker.at_work(fault, WORK_TIMEOUT_S))
        running = batch.running
        event.running = len(running)
        try:
            struck = await striker.strike(fault)
        except (OSError, RuntimeError) as error:
            event.error = str(error)
            say(f"fault {fault.number}: {error}")
            continue
        say(f"fault {fault.number}: {fault.kind} {fault.target} ({fault.part}), {len(running)} requests run")
        try:
            async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                await batch.until(lambda at=struck.at_s: all(run.latest_s > at for run in running))  # type: ignore[misc]
        except TimeoutError:
            event.error = f"not every request went on within {RECOVERY_TIMEOUT_S:g} s"
            say(f"fault {fault.number}: {event.error}")
            continue
        if running:
            event.recovery_ms = 1e3 * (max(_went_on(run, struck.at_s) for run in running) - struck.at_s)
            say(f"fault {fault.number}: all went on after {event.recovery_ms:.0f} ms")


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
