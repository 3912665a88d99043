"""What is left behind in this process: how many objects of each type there are, and which became more."""

from __future__ import annotations

import gc
from collections import Counter


def counted() -> Counter[str]:
    """Objects that the garbage collector knows, by type, once what is unreachable is gone."""
    for _ in range(3):
        gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def grown(before: Counter[str], after: Counter[str], least: int) -> dict[str, int]:
    """Types with at least so many objects more."""
    return {name: count - before[name] for name, count in after.items() if count - before[name] >= least}
