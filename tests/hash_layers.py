"""Layers of a ring for tests: a row's value is a hash of itself and of every row before it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import torch

from kvasir_console.errors import EngineError

SIZE = 3
N_VOCAB = 6
PRIME = 16_777_213  # below 2^24: exact in f32


@dataclass(slots=True)
class Cache:
    length: int = 0
    hashes: list[int] = field(default_factory=lambda: [1])

    def truncate(self, position: int) -> None:
        self.length = position
        del self.hashes[position + 1 :]


class Shape:
    n_vocab, n_embd, n_layer = N_VOCAB, 2, SIZE


class Layers:
    """A stage of one layer: a row's value depends on every row before it."""

    row_invariant = True
    shape = Shape()

    def __init__(self, rank: int) -> None:
        self.begin, self.end = rank, rank + 1

    def new_cache(self, capacity: int) -> Cache:
        return Cache()

    def cache_bytes(self, capacity: int) -> int:
        return capacity

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([tokens.float() + 1, torch.zeros(len(tokens))], dim=1)

    def forward(self, rows: torch.Tensor, spans: Any, experts: Any = None) -> torch.Tensor:
        out: list[list[int]] = []
        values = iter(rows[:, 0].long().tolist())
        for span in spans:
            cache = span.cache
            if span.position != cache.length:
                raise EngineError("wrong_position", f"{span.position} after {cache.length}")
            for _ in range(span.rows):
                cache.hashes.append((cache.hashes[-1] * 31 + next(values) * 7919 + self.begin) % PRIME)
                cache.length += 1
                out.append([cache.hashes[-1], cache.length])
        return torch.tensor(out, dtype=torch.float32)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(rows[:, 0].long() // 97 % N_VOCAB, N_VOCAB).float()


class Inline:
    """Computes where it is asked, after a turn of the loop, so that frames and faults come in between."""

    computing_s = 0.0

    async def run(self, function: Any) -> Any:
        await asyncio.sleep(0)
        return function()

    def freed(self) -> None:
        pass
