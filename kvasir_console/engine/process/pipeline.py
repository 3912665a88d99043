"""How a request's tokens pass through the model: the seam between the generation loop and where layers live.

A ``Sequence`` takes token rows in order and returns a sampled token when asked. ``LocalPipeline`` computes all layers
here (the trunk); ``ring.RingPipeline`` computes this rank's window and hands the rest to its successors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from kvasir_console.engine.kvcache import KVCache
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.sampling import SamplingParams, sample
from kvasir_console.engine.stage import ExpertCompute, Stage

PREFILL_CHUNK = 256
"""Prompts are cut at multiples of this many rows, always, so that a replay meets the same matrix shapes."""


@dataclass(slots=True)
class Tally:
    """Work done for one request. Written by the compute thread only."""

    rows: int = 0
    pairs_local: int = 0
    pairs_remote: int = 0
    failovers: int = 0


@dataclass(frozen=True, slots=True)
class SequenceParams:
    sampling: SamplingParams
    capacity: int
    """Most positions this sequence can take: prompt plus ``max_tokens``."""
    experts: str = "network"
    trace: Path | None = None
    prompt_tokens: tuple[int, ...] = ()


class Sequence(Protocol):
    """One request inside the model."""

    tally: Tally

    async def step(self, tokens: list[int], position: int, *, want_token: bool) -> int | None:
        """Feed ``tokens`` at ``position``; return the token sampled after the last of them if wanted."""

    async def close(self) -> str | None:
        """Free everything it held; returns the trace file's path if a trace was asked for."""


class Pipeline(Protocol):
    async def open(self, params: SequenceParams) -> Sequence: ...


RouterFactory = Callable[[Tally], ExpertCompute]


@dataclass(slots=True)
class _LocalSequence:
    stage: Stage
    compute: Compute
    params: SequenceParams
    cache: KVCache
    experts: ExpertCompute
    tally: Tally
    logits: list[torch.Tensor] = field(default_factory=list)

    async def step(self, tokens: list[int], position: int, *, want_token: bool) -> int | None:
        return await self.compute.run(lambda: self._step(tokens, position, want_token))

    def _step(self, tokens: list[int], position: int, want_token: bool) -> int | None:
        hidden = self.stage.embed(torch.tensor(tokens, dtype=torch.int64))
        hidden = self.stage.forward(hidden, self.cache, position, self.experts)
        self.tally.rows += len(tokens)
        if not want_token:
            return None
        logits = self.stage.logits(hidden[-1:])[0]
        if self.params.trace is not None:
            self.logits.append(logits.clone())
        return sample(logits, self.params.sampling, position + len(tokens))

    async def close(self) -> str | None:
        if self.params.trace is None or not self.logits:
            return None
        path = self.params.trace
        await self.compute.run(lambda: np.save(path, torch.stack(self.logits).cpu().numpy()))
        return str(path)


class LocalPipeline:
    """A stage of [0, n): embedding, every layer and the head are here; experts may be elsewhere."""

    def __init__(self, stage: Stage, compute: Compute, network: RouterFactory, local: RouterFactory) -> None:
        self._stage = stage
        self._compute = compute
        self._factories = {"network": network, "local": local}

    async def open(self, params: SequenceParams) -> Sequence:
        tally = Tally()
        return _LocalSequence(
            stage=self._stage,
            compute=self._compute,
            params=params,
            cache=self._stage.new_cache(params.capacity),
            experts=self._factories[params.experts](tally),
            tally=tally,
        )
