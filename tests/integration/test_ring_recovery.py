"""Rings whose parts are killed, stopped and cut while requests run: every request ends, and says what it says alone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_console.engine.process.client import DoneEvent, GenerateRequest, TokenEvent
from kvasir_console.errors import EngineError
from kvasir_console.node.gateway.backends import BackendInfo, RingBackend
from kvasir_console.node.gateway.plans import PlannedRing
from kvasir_console.node.placement.plan import Plan, PlannedStage

import builders
from engines import PATIENCE_S, complete, engine, until
from rings import Joint, Ring, Stage, ring

N_LAYER = 4
WINDOWS = [(0, 1), (1, 3), (3, 4)]
COUNT = 8
RECOVER_S = 10.0
"""Of rings that are to give up: longer than a busy machine holds one up that is whole."""
PLAN = Plan("r", "tiny", "0" * 64, N_LAYER, 1, tuple(PlannedStage(n, "w", *each) for n, each in enumerate(WINDOWS)))


def requests(count: int, max_tokens: int) -> list[GenerateRequest]:
    """Greedy and sampled, drafted and not, with penalties (which look at the history), short and of several chunks."""
    return [
        GenerateRequest(
            prompt=f"{n}: " + "the thread of the weather " * (1 + 13 * (n % 3)),
            max_tokens=max_tokens,
            temperature=0.0 if n % 2 else 0.9,
            top_p=0.9,
            seed=n,
            repetition_penalty=1.3 if n % 3 == 0 else 1.0,
            frequency_penalty=0.2 if n % 3 == 0 else 0.0,
            ignore_eos=True,
            speculation=("off", "on", "auto")[n % 3],
        )
        for n in range(count)
    ]


REQUESTS = requests(COUNT, 160)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.write_tiny_llama(
        tmp_path_factory.mktemp("model") / "dense.gguf", n_layer=N_LAYER, seed=5, context_length=1024
    )


@pytest.fixture(scope="module")
def alone(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> list[DoneEvent]:
    """What one process says, one request after the other."""

    async def ask() -> list[DoneEvent]:
        async with engine(tmp_path_factory.mktemp("whole"), "whole") as whole:
            await whole.client.load(path=str(dense), model="tiny", role="stage", layers=[0, N_LAYER])
            return [await complete(whole.client, replace(each, speculation="off")) for each in REQUESTS]

    return asyncio.run(ask())


@pytest.fixture
async def three(dense: Path, tmp_path: Path) -> AsyncIterator[Ring]:
    """No rank takes another for hung that a busy machine only holds up."""
    async with ring(tmp_path, dense, WINDOWS, N_LAYER, silence_s=PATIENCE_S) as made:
        yield made


@pytest.fixture
async def watchful(dense: Path, tmp_path: Path) -> AsyncIterator[Ring]:
    """Ranks that soon take a neighbour for hung, of a busy machine now and then without a reason."""
    async with ring(tmp_path, dense, WINDOWS, N_LAYER, silence_s=1.5) as made:
        yield made


class Client:
    """What the HTTP side of a gateway sees of its ring."""

    def __init__(self, network: Ring, **options: float) -> None:
        info = BackendInfo("tiny", "tiny", PlannedRing(PLAN, {}))
        self.backend = RingBackend(info, info.ring, network, **({"beat_s": 0.3, "silence_s": PATIENCE_S} | options))
        self.seen = [0] * COUNT
        self.answers: asyncio.Future[list[DoneEvent]] | None = None

    async def answer(self, number: int, request: GenerateRequest) -> DoneEvent:
        text, tokens = "", []
        async for event in self.backend.generate(request):
            if isinstance(event, DoneEvent):
                assert text + event.tail == event.text  # a stream without a gap or a repetition
                assert tuple(tokens) == event.tokens
                return event
            assert isinstance(event, TokenEvent)
            assert event.index == len(tokens)
            tokens.append(event.token)
            text += event.text
            self.seen[number] = len(tokens)
        raise AssertionError("the stream ended without a done event")

    async def start(self, at_least: int) -> None:
        """Send every request, and wait until each has answered so many tokens and none is done."""
        await self.backend.limits()
        self.answers = asyncio.gather(*(self.answer(n, each) for n, each in enumerate(REQUESTS)))
        await until(lambda: min(self.seen) >= at_least)
        self.in_flight()

    def in_flight(self) -> None:
        assert self.answers is not None
        assert not self.answers.done()
        assert max(self.seen) < REQUESTS[0].max_tokens

    async def end(self, alone: list[DoneEvent]) -> None:
        assert self.answers is not None
        done = await self.answers
        assert [each.tokens for each in done] == [each.tokens for each in alone]
        assert [each.text for each in done] == [each.text for each in alone]
        await self.backend.close()


async def run(network: Ring, alone: list[DoneEvent], fault: Callable[[], object], **options: float) -> list[dict]:
    """All requests, with a fault in their middle; the ranks' counters at their end."""
    client = Client(network, **options)
    await client.start(10)
    outcome = fault()
    if asyncio.iscoroutine(outcome):
        await outcome
    await client.end(alone)
    await network.whole()
    await network.empty()
    return await network.stats()


def rows_of(alone: list[DoneEvent]) -> int:
    return sum(each.rows for each in alone)


async def test_undisturbed_nothing_is_computed_twice(three: Ring, alone: list[DoneEvent]) -> None:
    stats = await run(three, alone, lambda: None)
    assert [each["recomputed_rows"] for each in stats] == [0, 0, 0]
    assert [each["cuts"] for each in stats] == [0, 0, 0]


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_rank_that_is_killed_is_filled_again_and_nobody_else(
    three: Ring, alone: list[DoneEvent], rank: int
) -> None:
    stats = await run(three, alone, lambda: three.stages[rank].signal(signal.SIGKILL))
    assert three.stages[rank].lives == 2
    again = [each["recomputed_rows"] for each in stats]
    prompts = sum(each.prompt_tokens for each in alone)
    assert again[rank] >= prompts
    assert again[rank] <= rows_of(alone)
    others = [count for number, count in enumerate(again) if number != rank]
    # At most a step of each sequence, a draft's rows included.
    assert max(others) <= 9 * COUNT


async def test_all_ranks_killed_one_after_the_other(three: Ring, alone: list[DoneEvent]) -> None:
    async def fault() -> None:
        for rank in (2, 0, 1):
            three.stages[rank].signal(signal.SIGKILL)
            await until(lambda rank=rank: three.stages[rank].lives == 2)

    await run(three, alone, fault)


async def test_two_ranks_killed_at_once(three: Ring, alone: list[DoneEvent]) -> None:
    def fault() -> None:
        for rank in (0, 1):
            three.stages[rank].signal(signal.SIGKILL)

    await run(three, alone, fault)
    assert [stage.lives for stage in three.stages] == [2, 2, 1]


async def test_a_rank_killed_while_prompts_are_read(three: Ring, alone: list[DoneEvent]) -> None:
    client = Client(three)
    await client.backend.limits()
    client.answers = asyncio.gather(*(client.answer(n, each) for n, each in enumerate(REQUESTS)))
    await until(lambda: max(client.seen) > 0)
    three.stages[1].signal(signal.SIGKILL)
    await client.end(alone)
    await three.empty()


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_rank_that_hangs_and_wakes(watchful: Ring, alone: list[DoneEvent], rank: int) -> None:
    """Longer than its neighbours wait: they cut it off, it wakes among ended edges, and takes part again."""
    before = [each["cuts"] for each in await watchful.stats()]

    async def fault() -> None:
        watchful.stages[rank].signal(signal.SIGSTOP)
        made = [joint.made for joint in watchful.joints]
        neighbours = (rank, (rank - 1) % 3)
        await until(lambda: all(watchful.joints[each].made > made[each] for each in neighbours))
        await asyncio.sleep(0.5)
        watchful.stages[rank].signal(signal.SIGCONT)

    stats = await run(watchful, alone, fault, silence_s=2.0)
    assert [stage.lives for stage in watchful.stages] == [1, 1, 1]
    # At most a step of each sequence for every time that an edge was cut; one hang cuts two.
    hangs = max(1, (sum(each["cuts"] for each in stats) - sum(before)) // 4)
    assert max(each["recomputed_rows"] for each in stats) <= 9 * COUNT * hangs


@pytest.mark.parametrize("edge", [0, 1, 2])
async def test_an_edge_that_is_cut_loses_nothing(three: Ring, alone: list[DoneEvent], edge: int) -> None:
    async def fault() -> None:
        for _ in range(5):
            made = three.joints[edge].made
            three.joints[edge].cut()
            await until(lambda made=made: three.joints[edge].made > made)
            await asyncio.sleep(0.02)

    stats = await run(three, alone, fault)
    assert sum(each["cuts"] for each in stats) >= 2
    assert max(each["recomputed_rows"] for each in stats) <= 9 * COUNT * 5


async def test_a_hub_that_dies_takes_every_edge_and_the_entry(three: Ring, alone: list[DoneEvent]) -> None:
    async def fault() -> None:
        for joint in three.joints:
            joint.held = True
        three.cut()
        await asyncio.sleep(0.5)
        for joint in three.joints:
            joint.held = False

    stats = await run(three, alone, fault)
    assert [stage.lives for stage in three.stages] == [1, 1, 1]
    assert max(each["recomputed_rows"] for each in stats) <= 9 * COUNT


async def asked(client: Client, keyed: list[GenerateRequest], at_least: int) -> list[asyncio.Task[DoneEvent]]:
    """Send requests through one gateway, and wait until each has answered so many tokens."""
    client.seen = [0] * len(keyed)
    await client.backend.limits()
    tasks = [asyncio.create_task(client.answer(n, each)) for n, each in enumerate(keyed)]
    await until(lambda: min(client.seen) >= at_least)
    return tasks


async def dies(client: Client, tasks: list[asyncio.Task[DoneEvent]]) -> None:
    """What is left of a gateway's process that was killed: it cancels nothing."""
    assert max(client.seen) < REQUESTS[0].max_tokens
    client.backend._client._writer.transport.abort()
    client.backend._beats.cancel()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_gateway_that_dies_is_asked_again_by_another(three: Ring, alone: list[DoneEvent]) -> None:
    """Callers send the same key again: the answers that are being given are told from their beginning."""
    first, second = Client(three), Client(three)
    keyed = [replace(each, key=1 + n) for n, each in enumerate(REQUESTS)]
    await dies(first, await asked(first, keyed, 10))
    second.answers = asyncio.gather(*(second.answer(n, each) for n, each in enumerate(keyed)))
    await second.end(alone)
    await three.empty()
    stats = await three.stats()
    assert [each["recomputed_rows"] for each in stats] == [0, 0, 0]


async def test_a_gateway_that_dies_after_rank_0_did_finds_every_answer(three: Ring, alone: list[DoneEvent]) -> None:
    """The new rank 0 was given the tokens until then: it tells those too, and begins nothing anew for them."""
    first, second = Client(three), Client(three)
    keyed = [replace(REQUESTS[n % COUNT], key=1 + n) for n in range(8 * COUNT)]
    tasks = await asked(first, keyed, 10)
    three.stages[0].signal(signal.SIGKILL)
    before = list(first.seen)
    await until(lambda: all(now >= then + 2 for now, then in zip(first.seen, before, strict=True)))
    assert three.stages[0].lives == 2
    await dies(first, tasks)
    admitted = await _admitted(three)
    rows = [each["recomputed_rows"] for each in await three.stats()]
    second.seen = [0] * len(keyed)
    answers = await asyncio.gather(*(second.answer(n, each) for n, each in enumerate(keyed)))
    assert [each.tokens for each in answers] == [alone[n % COUNT].tokens for n in range(len(keyed))]
    assert await _admitted(three) == admitted
    assert [each["recomputed_rows"] for each in await three.stats()] == rows
    await second.backend.close()
    await three.empty()


async def _admitted(network: Ring) -> int:
    """Requests that rank 0 has begun."""
    assert network.stages[0].client is not None
    return (await network.stages[0].client.stats())["serving"]["admitted"]


async def test_a_rank_that_was_replaced_wakes_up_and_can_do_nothing(
    three: Ring, dense: Path, alone: list[DoneEvent], tmp_path: Path
) -> None:
    """The plan names another engine for the hung rank's window; the others keep what they hold."""
    old = three.stages[1]
    new = Stage(tmp_path / "new", dense, WINDOWS[1], old.ring | {"epoch": 2})
    starting = asyncio.create_task(new.run())
    await until(lambda: new.client is not None)
    zombie = Joint(old, three.stages[2], three.joints[1].digest)

    async def fault() -> None:
        old.signal(signal.SIGSTOP)
        three.stages[1] = three.joints[0].right = three.joints[1].left = new
        for rank in (0, 2):
            stage = three.stages[rank]
            stage.ring = stage.ring | {"epoch": 2}
            await stage.client.call("replan", ring=stage.ring)
        await three.whole()
        old.signal(signal.SIGCONT)

    knocking = asyncio.create_task(zombie.run())
    try:
        stats = await run(three, alone, fault)
        assert [each["epoch"] for each in stats] == [2, 2, 2]
        assert stats[1]["recomputed_rows"] > 0
        assert max(stats[0]["recomputed_rows"], stats[2]["recomputed_rows"]) <= 9 * COUNT

        async def told() -> bool:
            return (await old.stats())["behind"]

        await until(told)
        assert not (await old.stats())["next_ready"]
        assert zombie.made > 1
    finally:
        for task in (starting, knocking):
            task.cancel()
        await asyncio.gather(starting, knocking, return_exceptions=True)
        old.signal(signal.SIGKILL)
        three.stages[1] = old


async def test_a_request_given_up_while_the_ring_is_broken_leaves_nothing(three: Ring, alone: list[DoneEvent]) -> None:
    client = Client(three)
    await client.start(5)
    three.joints[1].held = True
    three.joints[1].cut()
    client.answers.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.answers
    await until(lambda: _sequences(three, 0))
    three.joints[1].held = False
    await three.whole()
    await three.empty()
    done = await client.answer(1, REQUESTS[1])
    assert done.tokens == alone[1].tokens
    await client.backend.close()


async def _sequences(network: Ring, rank: int) -> bool:
    return (await network.stages[rank].stats())["sequences"] == 0


async def test_requests_of_a_ring_that_stays_broken_end_with_a_reason(dense: Path, tmp_path: Path) -> None:
    async with ring(tmp_path, dense, [(0, 2), (2, 4)], N_LAYER, recover_s=RECOVER_S) as two:
        client = Client(two)
        await client.start(5)
        two.stages[1].supervise.clear()
        two.stages[1].signal(signal.SIGKILL)
        with pytest.raises(EngineError) as caught:
            await client.answers
        assert caught.value.code == "ring_broken"
        with pytest.raises(EngineError) as refused:
            await client.answer(0, REQUESTS[0])
        assert refused.value.code == "ring_broken"
        await client.backend.close()


async def test_an_edge_between_other_ranks_that_stays_lost_ends_requests_with_a_reason(
    dense: Path, tmp_path: Path
) -> None:
    """Neither of rank 0's edges is touched, and its entry answers: it hears of the edge from its neighbours."""
    async with ring(tmp_path, dense, WINDOWS, N_LAYER, recover_s=RECOVER_S) as three:
        client = Client(three)
        await client.start(5)
        three.joints[1].held = True
        three.joints[1].cut()
        await until(lambda: client.backend.missing == "the edge between ranks 1 and 2 is lost")
        with pytest.raises(EngineError) as caught:
            await client.answers
        assert caught.value.code == "ring_broken"
        assert "between ranks 1 and 2" in caught.value.message
        first = await three.stages[0].stats()
        assert (first["next_ready"], first["prev_ready"]) == (True, True)
        with pytest.raises(EngineError) as refused:
            await client.answer(0, REQUESTS[0])
        assert refused.value.code == "ring_broken"
        three.joints[1].held = False
        await until(lambda: not client.backend.missing)
        assert len((await client.answer(0, REQUESTS[0])).tokens) == REQUESTS[0].max_tokens
        await client.backend.close()


async def test_rows_that_are_swallowed_on_their_way_end_requests_with_a_reason(dense: Path, tmp_path: Path) -> None:
    """Every edge stays, and every PING is answered: only that nothing comes back tells."""
    async with ring(tmp_path, dense, WINDOWS, N_LAYER, recover_s=RECOVER_S) as three:
        client = Client(three)
        await client.start(5)
        three.joints[1].swallows = True
        three.joints[1].cut()
        with pytest.raises(EngineError) as caught:
            await client.answers
        assert caught.value.code == "ring_broken"
        assert "nothing comes out of it" in caught.value.message
        assert all(each["next_ready"] and each["prev_ready"] for each in await three.stats())
        three.joints[1].swallows = False
        three.joints[1].cut()
        await three.whole()
        assert len((await client.answer(0, REQUESTS[0])).tokens) == REQUESTS[0].max_tokens
        await client.backend.close()
