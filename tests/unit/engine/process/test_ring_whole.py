"""What ranks tell each other of lost edges: rank 0 always hears of one, whatever is lost, and of nothing else."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ring_faults import SIZE, Network

from kvasir_console.engine.process import ring_whole
from kvasir_console.engine.process.ring import RingNode

from engines import until


def settled(size: int, lost: frozenset[int]) -> frozenset[int]:
    """What rank 0 knows once every rank has told its neighbours all it knows, over the edges that are there."""
    behind = dict.fromkeys(range(size), ring_whole.NONE)
    before = dict(behind)
    for _ in range(size):
        for rank in range(1, size):
            behind[rank] = ring_whole.behind(rank, rank not in lost, behind[(rank + 1) % size])
        for rank in range(1, size):
            before[rank] = ring_whole.before(rank, size, rank - 1 not in lost, before[rank - 1])
    first = ring_whole.behind(0, 0 not in lost, behind[1 % size])
    return first | ring_whole.before(0, size, size - 1 not in lost, before[size - 1])


@given(st.integers(2, 8).flatmap(lambda size: st.tuples(st.just(size), st.frozensets(st.integers(0, size - 1)))))
def test_rank_0_hears_of_the_first_lost_edge_each_way(case: tuple[int, frozenset[int]]) -> None:
    size, lost = case
    known = settled(size, lost)
    assert known == (frozenset({min(lost), max(lost)}) if lost else ring_whole.NONE)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ([], "every rank is connected"),
        ([1], "the edge between ranks 1 and 2 is lost"),
        ([3], "the edge between ranks 3 and 0 is lost"),
        ([1, 2], "rank 2 is not connected"),
        ([0, 2], "ranks 1 to 2 are not connected"),
    ],
)
def test_who_is_missed_is_said_in_words(lost: list[int], said: str) -> None:
    assert ring_whole.describe(lost, 0, 4) == said


def test_another_rank_names_the_edges() -> None:
    assert ring_whole.describe([3, 0], 2, 4) == "the edges 0, 3 are lost"


def test_an_edge_between_two_other_ranks_is_missed_by_rank_0_and_comes_back() -> None:
    """Edge 1 joins ranks 1 and 2: both of rank 0's own edges stay as they are."""

    async def tried() -> None:
        network = Network()
        for edge in range(SIZE):
            await network.join(edge)
        first: RingNode = network.nodes[0]
        try:
            await until(lambda: first.ready and not first.missing)
            await network.cut(1)
            await until(lambda: first.missing == "the edge between ranks 1 and 2 is lost")
            assert first.ready
            await network.mend()
            await until(lambda: not first.missing)
            assert first.wholeness() == {"lost_edges": [], "lost_s": 0.0, "missing": ""}
        finally:
            await network.close()

    asyncio.run(tried())
