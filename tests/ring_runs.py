"""Requests to a ring of real processes, followed token by token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from kvasir_console.bench.network import RingNetwork
from kvasir_console.bench.recovery import Batch, Request, Run
from kvasir_console.local.chat import Answer
from kvasir_console.local.members import Member

from engines import until


async def complete(net: RingNetwork, run: Run, tokens: int) -> Answer:
    """One request; ``run`` tells how far it is."""

    def moved() -> None:
        run.pieces += 1

    sampling = run.request.sampling
    answer = await net.client.complete(net.model_id, run.request.prompt, tokens, sampling=sampling, on_text=moved)
    run.over, run.tokens = True, answer.tokens
    return answer


async def all_of(net: RingNetwork, batch: Batch, tokens: int) -> list[Answer]:
    """All requests of a batch at once."""
    return await asyncio.gather(*(complete(net, run, tokens) for run in batch.runs))


def kill_console(net: RingNetwork, member: Member) -> list[psutil.Process]:
    """Kill a member's console outright; the processes that go with it, itself included."""
    pid = net.console_pid(member.name)
    assert pid is not None
    console = psutil.Process(pid)
    gone = [console, *console.children(recursive=True)]
    console.kill()
    return gone


async def struck(
    net: RingNetwork, made: Sequence[Request], tokens: int, victim: Member, kill: Callable[[], None]
) -> Batch:
    """All requests at once, and ``kill`` in their middle, when every one has begun and some surely still run: the
    victim's engine, not rank 0's, is stopped while rank 0 is asked. On a busy machine all may be over by the time that
    this process gets to it; then the requests are made again."""
    async with asyncio.timeout(240):
        while True:
            batch = Batch([Run(each) for each in made])
            answering = asyncio.create_task(all_of(net, batch, tokens))
            await until(lambda batch=batch: min(run.pieces for run in batch.runs) >= 4)
            pid = net.engine_pid(victim.name)
            assert pid is not None
            engine = psutil.Process(pid)
            engine.suspend()
            try:
                at_work = await _runs(net) and await _runs(net)  # twice: an end may have been on its way
                if at_work:
                    kill()
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.resume()
            await answering
            if at_work:
                return batch


async def _runs(net: RingNetwork) -> bool:
    """Whether rank 0 has requests that run."""
    await asyncio.sleep(0.2)
    return bool((await stats_of(net, net.stages[0]))["serving"]["running"])


async def stats_of(net: RingNetwork, member: Member) -> dict[str, Any]:
    """The counters of an engine that runs; it may be too busy to answer at once."""
    stats: dict[str, Any] | None = None

    async def answered() -> bool:
        nonlocal stats
        stats = await net.engine_stats(member)
        return stats is not None

    await until(answered)
    assert stats is not None
    return stats
