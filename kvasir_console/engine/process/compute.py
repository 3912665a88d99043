"""One thread computes; the event loop does I/O. A reply's latency is then the network's, never a step's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Compute:
    """The engine's compute thread. Work runs in the order it was asked for, without autograd."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the compute thread and await its value."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, _without_autograd, function)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _without_autograd(function: Callable[[], T]) -> T:
    with torch.inference_mode():
        return function()
