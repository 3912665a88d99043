"""One thread computes at a time; the event loop does I/O. A reply's latency is then the network's, never a step's.

Work that waits for a network may let other work compute meanwhile (``released``). It goes on as soon as whoever
computes then pauses or ends, before work that has not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

TRIM_AFTER_S = 1.0
"""Freed memory goes back to the system when nothing was computed for so long."""


MAX_WAITING = 16
"""Most work that may be in the middle of waiting for a network at once."""


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    function: Callable[[], Any]
    future: Future[Any]


class Compute:
    """The engine's turn to compute. Work begins in the order it was asked for, and runs without autograd: on one
    thread, as long as none waits in the middle."""

    def __init__(self) -> None:
        self._first = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._more = ThreadPoolExecutor(max_workers=MAX_WAITING, thread_name_prefix="compute-more")
        """Whoever computes with OpenMP gets a team of threads for good, and with more threads than processors each team
        sleeps between two operations, not only an idle one. So the first thread does all it can."""
        self._first_away = False
        """Whether the first thread is at work, or waits in the middle of some."""
        self._turn = threading.Condition()
        self._busy = False
        self._began = 0.0
        self._returning = 0
        self._working = 0
        """Threads that compute or want to, not those that are released."""
        self._items: deque[_Item] = deque()
        self._runs = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on a compute thread and await its value."""
        self._runs += 1  # what ``freed`` looks at
        future: Future[T] = Future()
        with self._turn:
            self._items.append(_Item(function, future))
            self._hire()
        return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Inside the block, on a compute thread, others may compute."""
        with self._turn:
            self._busy = False
            self._working -= 1
            self._hire()
            self._turn.notify_all()
        try:
            yield
        finally:
            with self._turn:
                self._working += 1
                self._returning += 1
                self._turn.wait_for(lambda: not self._busy)
                self._returning -= 1
                self._begin()

    @property
    def wanted(self) -> bool:
        """Whether other work waits to begin; long work looks now and then, and queues anew."""
        return any(not item.future.cancelled() for item in list(self._items))

    @property
    def computing_s(self) -> float:
        """For how long whoever computes has done so, since its last step if it takes several; 0 while nobody does."""
        return time.monotonic() - self._began if self._busy else 0.0  # asked of a thread that hangs: takes no lock

    def stepped(self) -> None:
        """Work of several steps, on its thread, has come to the end of one."""
        self._began = time.monotonic()

    def freed(self) -> None:
        """Much memory was freed. The allocator keeps it for the next request; if none comes, the system gets it."""
        asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim_if_idle, self._runs)

    def close(self) -> None:
        with self._turn:
            items, self._items = list(self._items), deque()
        for item in items:
            item.future.cancel()
        self._first.shutdown(wait=False, cancel_futures=True)
        self._more.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        self._began = time.monotonic()  # first: ``computing_s`` may be asked in between
        self._busy = True

    def _hire(self) -> None:
        """See that somebody does the work that waits. Called with the turn's lock."""
        if self._items and not self._working:
            self._working += 1
            pool = self._more if self._first_away else self._first
            self._first_away = True
            pool.submit(self._work, pool is self._first)

    def _work(self, first: bool) -> None:
        """Do what has waited longest, until nothing waits; or, but for the first thread, another is there to do it."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._busy and not self._returning)
                if not self._items or (self._working > 1 and not first):
                    self._working -= 1
                    if first:
                        self._first_away = False
                    return
                self._begin()
                item = self._items.popleft()
            try:
                if item.future.set_running_or_notify_cancel():
                    _carry_out(item)
            finally:
                with self._turn:
                    self._busy = False
                    self._turn.notify_all()

    def _trim_if_idle(self, runs: int) -> None:
        if runs == self._runs:
            with contextlib.suppress(RuntimeError):  # the thread is gone with its engine
                self._first.submit(_trim)


def _carry_out(item: _Item) -> None:
    try:
        with torch.inference_mode():
            value = item.function()
    except BaseException as error:
        item.future.set_exception(error)
    else:
        item.future.set_result(value)


def _trim() -> None:
    """``malloc_trim`` where the C library has it (glibc); others give memory back by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
