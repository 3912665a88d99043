"""What is left behind in this process: how many objects of each type there are, and which became more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter

_SOME = 1000


async def forget_timers() -> None:
    """A loop keeps cancelled timers, with all they refer to, until more than a hundred and half of all are such."""
    loop = asyncio.get_running_loop()
    for timer in [loop.call_later(3600.0, print) for _ in range(_SOME)]:
        timer.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def counted() -> Counter[str]:
    """Objects that the garbage collector knows, by type, once what is unreachable is gone.

    Weak references to what is gone do not count: a connection of sqlite3 keeps those to its last 200 cursors.
    """
    for _ in range(3):
        gc.collect()
    objects = (each for each in gc.get_objects() if not (type(each) is weakref.ReferenceType and each() is None))
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)


def grown(before: Counter[str], after: Counter[str], least: int) -> dict[str, int]:
    """Types with at least so many objects more."""
    return {name: count - before[name] for name, count in after.items() if count - before[name] >= least}
