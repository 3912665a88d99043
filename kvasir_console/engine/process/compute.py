"""One thread computes; the event loop does I/O. A reply's latency is then the network's, never a step's."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

TRIM_AFTER_S = 1.0
"""Freed memory goes back to the system when nothing was computed for so long."""


class Compute:
    """The engine's compute thread. Work runs in the order it was asked for, without autograd."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._runs = 0
        self._begun = 0
        self._dropped = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the compute thread and await its value."""
        self._runs += 1
        future = self._pool.submit(self._run, function)
        future.add_done_callback(self._over)
        return await asyncio.wrap_future(future)

    @property
    def wanted(self) -> bool:
        """Whether other work waits for the thread; long work looks now and then, and queues anew."""
        return self._begun + self._dropped < self._runs

    def freed(self) -> None:
        """Much memory was freed. The allocator keeps it for the next request; if none comes, the system gets it."""
        asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim_if_idle, self._runs)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _over(self, future: Future[T]) -> None:
        if future.cancelled():  # before it began; it was the event loop that did it
            self._dropped += 1

    def _run(self, function: Callable[[], T]) -> T:
        self._begun += 1
        with torch.inference_mode():
            return function()

    def _trim_if_idle(self, runs: int) -> None:
        if runs == self._runs:
            with contextlib.suppress(RuntimeError):  # the thread is gone with its engine
                self._pool.submit(_trim)


def _trim() -> None:
    """``malloc_trim`` where the C library has it (glibc); others give memory back by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
