"""What ranks tell each other of lost edges and of their progress, and how long rank 0 waits for what does not come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ring_faults import SIZE, Answer, Network, prompt, undisturbed

from kvasir_console.engine.process import ring_whole
from kvasir_console.engine.process.client import STUCK_S
from kvasir_console.engine.process.ring import RingNode
from kvasir_console.engine.process.ring_whole import Patience, Wholeness, Work
from kvasir_console.relay.wire import ring as wire
from kvasir_console.relay.wire.ring import Progress

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
            assert first.wholeness() == {"lost_edges": [], "waited_s": 0.0, "missing": ""}
        finally:
            await network.close()

    asyncio.run(tried())


# Progress


WORK = st.builds(Work, st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 1000))


@given(st.lists(WORK, min_size=1, max_size=7))
def test_rank_0_hears_how_far_the_last_has_come_and_who_is_at_one_frame_for_longest(ranks: list[Work]) -> None:
    said: Progress | None = None
    for rank, work in reversed(list(enumerate(ranks, start=1))):
        said = ring_whole.progress(rank, work, said)
    assert said is not None
    assert said.fresh == ranks[-1].fresh
    assert said.again == sum(each.again for each in ranks)
    assert said.busy_ms == max(int(each.busy_s * 1e3) for each in ranks)
    assert int(ranks[said.rank - 1].busy_s * 1e3) == said.busy_ms


class Waiting:
    """Rank 0's patience, and what it sees: twice a second, as a rank looks."""

    def __init__(self) -> None:
        self.patience = Patience(30.0, 0.0)
        self.now = 0.0
        self.said = Progress()

    def see(self, seconds: float, *, whole: bool = True, waiting: bool = True) -> float:
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.patience.look(self.now, self.said, whole=whole, waiting=waiting)
        return self.patience.spent_s


def test_a_ring_that_is_not_whole_takes_patience_until_something_new_comes_of_it() -> None:
    seen = Waiting()
    assert seen.see(100, whole=False) == 100.0
    assert seen.see(5) == 100.0  # it is whole again: that alone is no answer
    seen.said = Progress(fresh=1)
    assert seen.see(1) == 0.0
    seen.see(50, whole=False)
    seen.patience.anew()
    assert seen.see(5) == 0.0


def test_a_whole_ring_that_gives_nothing_back_takes_patience_after_a_while() -> None:
    seen = Waiting()
    assert seen.see(30) == 0.0
    assert not seen.patience.stalled
    assert seen.see(60) == 60.0
    assert seen.patience.stalled


def test_an_idle_ring_takes_none_and_what_it_is_asked_then_has_all_of_it() -> None:
    seen = Waiting()
    assert seen.see(1000, waiting=False) == 0.0
    assert seen.see(30) == 0.0
    seen.see(1000, whole=False, waiting=False)
    assert seen.see(0.5, waiting=False) == 0.0


def test_rows_that_are_computed_again_stop_it_for_as_long_as_they_take() -> None:
    seen = Waiting()
    seen.see(20, whole=False)
    for again in range(100):
        seen.said = Progress(again=256 * again)
        assert seen.see(20) == 20.0


def test_a_ring_that_is_lost_and_refilled_for_ever_comes_to_its_end() -> None:
    seen = Waiting()
    for again in range(1, 25):
        seen.see(5, whole=False)
        seen.said = Progress(again=256 * again)
        seen.see(20)
    assert seen.patience.spent_s == 120.0


def test_a_new_process_that_counts_from_nothing_is_no_progress() -> None:
    seen = Waiting()
    seen.said = Progress(fresh=500, again=500)
    seen.see(0.5)
    for _ in range(24):
        seen.see(5, whole=False)
        seen.said = Progress()
        seen.see(1)
    assert seen.patience.spent_s == 120.0


def test_a_process_that_was_stopped_does_not_blame_the_ring() -> None:
    for whole in (True, False):
        seen = Waiting()
        seen.see(25, whole=whole)
        before = seen.patience.spent_s
        seen.now += 1000.0
        seen.see(0.5, whole=whole)
        assert seen.patience.spent_s - before <= 2.0
        assert not seen.patience.stalled


def test_a_rank_that_takes_long_for_a_frame_has_time_and_one_that_is_stuck_has_not() -> None:
    seen = Waiting()
    while seen.now < STUCK_S:
        seen.said = Progress(rank=2, busy_ms=int(seen.now * 1e3) + 1)
        assert seen.see(0.5) == 0.0
    seen.said = Progress(rank=2, busy_ms=int(STUCK_S * 1e3) + 1)
    assert seen.see(10) == 10.0
    assert seen.patience.stalled


def test_progress_is_taken_from_a_successor_alone() -> None:
    async def tried() -> None:
        network = Network()
        for edge in range(SIZE):
            await network.join(edge)
        first, _, last = network.nodes
        try:
            await until(lambda: first.ready and last.ready)
            for node, edge in ((first, first._prev), (last, last._next)):
                assert edge is not None
                with pytest.raises(wire.RingError, match="takes no PROGRESS"):
                    await node._received(edge, wire.encode_progress(1, Progress()))
        finally:
            await network.close()

    asyncio.run(tried())


def test_a_word_outlives_its_edge_but_nobody_is_busy_behind_one_that_is_lost() -> None:
    whole = Wholeness(0, 2, 120.0, 0.0)
    assert whole.missing == "rank 1 is not connected"
    whole._said = Progress(5, 6, 1, 7000)
    whole.look(1.0, None, None, Work(), waiting=True, epoch=1)
    assert whole._said == Progress(5, 6, 1, 0)
    assert not whole.spent
    for look in range(1, 123):
        whole.look(float(look), None, None, Work(), waiting=True, epoch=1)
    assert whole.spent


class Told:
    """An edge that is joined, and what was said on it."""

    def __init__(self, name: str) -> None:
        self.name, self.ready = name, True
        self.said: frozenset[int] = frozenset()
        self.told: frozenset[int] = frozenset()
        self.told_progress: Progress | None = None
        self.progress: list[Progress] = []
        self.clogged = False

    def say(self, frame: wire.Frame) -> None:
        if frame.kind is wire.FrameKind.PROGRESS:
            self.progress.append(wire.decode_progress(frame, 3))


def test_a_middle_rank_that_is_started_again_and_again_is_no_progress() -> None:
    seen, last = Waiting(), wire.encode_progress(1, Progress(fresh=500, rank=2))
    seen.said = Progress(fresh=500)
    seen.see(0.5)
    for _ in range(24):
        middle = Wholeness(1, 3, 120.0, 0.0)
        prev: Any = Told("prev")
        next_: Any = Told("next")
        seen.see(5, whole=False)
        middle.look(seen.now, prev, None, Work(), waiting=False, epoch=1)
        middle.look(seen.now, prev, next_, Work(), waiting=False, epoch=1)
        middle.heard(next_, last)
        middle.look(seen.now, prev, next_, Work(again=1), waiting=False, epoch=1)
        for seen.said in prev.progress:
            seen.see(1)
        assert seen.said.fresh == 500
    assert seen.patience.spent_s == 120.0


def test_a_predecessor_that_reads_nothing_is_not_told_for_ever() -> None:
    whole, edge = Wholeness(2, 3, 120.0, 0.0), Told("prev")
    prev: Any = edge
    for edge.clogged in (False, True, False):
        for rows in range(3):
            whole.look(1.0, prev, None, Work(fresh=rows), waiting=False, epoch=1)
    assert [each.fresh for each in edge.progress] == [0, 1, 2, 0, 1, 2]


def test_a_step_of_rank_0_itself_may_take_as_long_as_one_of_any_other() -> None:
    whole = Wholeness(0, 3, 120.0, 0.0)
    prev: Any = Told("prev")
    next_: Any = Told("next")
    for second in range(int(STUCK_S)):
        whole.look(float(second), prev, next_, Work(busy_s=float(second)), waiting=True, epoch=1)
        assert (whole.missing, whole.patience.spent_s) == ("", 0.0)
    for second in range(int(STUCK_S), int(STUCK_S) + 125):
        whole.look(float(second), prev, next_, Work(busy_s=float(second)), waiting=True, epoch=1)
    assert whole.missing == "rank 0 does not come to the end of a step"
    assert whole.spent


class Stuck:
    """Never comes to an end of what it computes."""

    async def run(self, function: Any) -> Any:
        await asyncio.Event().wait()

    def freed(self) -> None:
        pass


def test_a_step_that_rank_0_computes_is_counted_for_as_long_as_it_computes() -> None:
    async def tried() -> None:
        network = Network()
        for edge in range(SIZE):
            await network.join(edge)
        first = network.nodes[0]
        await until(lambda: first.ready and not first.missing)
        first._compute.computing_s = 301.0  # type: ignore[misc]
        first.answers.expect(1, 1, 1, 1)
        first._whole.patience._grace_s = 0.0
        await until(lambda: first.missing == "rank 0 does not come to the end of a step")
        first._compute.computing_s = 299.0  # type: ignore[misc]
        await until(lambda: first.missing == "")
        await network.close()

    asyncio.run(tried())


@pytest.mark.parametrize(
    ("stuck_s", "said"),
    [(0.2, "rank 1 does not come to the end of a step"), (1e9, "")],
    ids=["a step too long", "a step that may take long"],
)
def test_a_rank_that_pings_and_computes_nothing_ends_requests_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, stuck_s: float, said: str
) -> None:
    monkeypatch.setattr(ring_whole, "STUCK_S", stuck_s)

    async def tried() -> None:
        network = Network(recover_s=2.0)
        for edge in range(SIZE):
            await network.join(edge)
        answers = [Answer(1000 + n, prompt(n, 40), 500, "off") for n in range(2)]
        for answer in answers:
            answer.begin()
            network.scheduler.submit(answer)
        await until(lambda: all(len(answer.tokens) > 5 for answer in answers), 60)
        network.nodes[1]._compute = Stuck()  # type: ignore[assignment]
        if not said:
            await asyncio.sleep(4.0)  # twice as long as a ring is waited for that gives no sign
            assert not any(answer.over.is_set() for answer in answers)
            assert network.nodes[0].missing == ""
            await network.close()
            return
        await until(lambda: network.nodes[0].missing == said, 60)
        assert network.nodes[0].ready
        await until(lambda: all(answer.over.is_set() for answer in answers), 60)
        for answer in answers:
            assert answer.error is not None
            assert answer.error.code == "ring_broken"
            assert said in answer.error.message
        await network.kill(1, [])
        await network.mend()
        await until(lambda: not network.nodes[0].broken, 60)
        again = Answer(2000, prompt(0, 40), 20, "off")
        again.begin()
        network.scheduler.submit(again)
        await until(again.over.is_set, 60)
        assert again.tokens == undisturbed(again.prompt, 20)
        await network.close()

    asyncio.run(tried())
