"""Whether a ring is whole, as far as one of its ranks can know. Pure functions over numbers of edges.

Edge i leads from rank i to the next, round to rank 0. A rank sees its own two edges; of the others it hears from its
neighbours, in LOST frames. They are told away from the edge that is lost: from its predecessor back to rank 0, from its
successor on to rank 0. So rank 0 hears of the first lost edge in either direction, and nothing goes round twice.
"""

from __future__ import annotations

from collections.abc import Iterable

Edges = frozenset[int]
NONE: Edges = frozenset()


def behind(rank: int, next_ready: bool, said: Iterable[int]) -> Edges:
    """Lost edges that a rank tells its predecessor of: its own next one, or what its successor ``said``."""
    return frozenset(said) if next_ready else frozenset({rank})


def before(rank: int, size: int, prev_ready: bool, said: Iterable[int]) -> Edges:
    """Lost edges that a rank tells its successor of: its own previous one, or what its predecessor ``said``."""
    return frozenset(said) if prev_ready else frozenset({(rank - 1) % size})


def describe(lost: Iterable[int], rank: int, size: int) -> str:
    """In words. Rank 0 is there itself: nobody is heard of between the first lost edge and the last."""
    edges = sorted(set(lost))
    if not edges:
        return "every rank is connected"
    first, last = edges[0] + 1, edges[-1]
    if len(edges) == 1:
        return f"the edge between ranks {edges[0]} and {first % size} is lost"
    if rank:
        return f"the edges {', '.join(map(str, edges))} are lost"
    return f"rank {first} is not connected" if first == last else f"ranks {first} to {last} are not connected"
