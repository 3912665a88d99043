"""Requests to a ring of real processes, followed token by token."""

from __future__ import annotations

import asyncio

from kvasir_console.bench.network import RingNetwork
from kvasir_console.bench.recovery import Batch, Run
from kvasir_console.local.chat import Answer


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
