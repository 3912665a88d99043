"""Two stages as real processes, joined by real byte streams: the ring says what one process says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_console.engine.checkpoint.digest import model_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import write_stage
from kvasir_console.engine.process.client import EngineClient, GenerateRequest
from kvasir_console.errors import EngineError, RequestError
from kvasir_console.relay.wire.preamble import Kind, Preamble

import builders
from engines import PATIENCE_S, EngineProcess, Splice, at_once, complete, engine, until

N_LAYER = 4
REQUEST = GenerateRequest(prompt="the thread of the weather", max_tokens=20)
SAMPLED = GenerateRequest(prompt="the thread of the weather", max_tokens=20, temperature=0.9, seed=7, top_p=0.95)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.write_tiny_llama(tmp_path_factory.mktemp("model") / "dense.gguf", n_layer=N_LAYER, seed=5)


async def load_stage(
    process: EngineProcess, dense: Path, rank: int, size: int, begin: int, end: int, **fields: object
) -> dict:
    file = process.data_socket.parent / f"layers_{begin}-{end}.gguf"
    with Checkpoint.open(dense) as checkpoint:
        write_stage(checkpoint, file, model="tiny", begin=begin, end=end)
    ring = {"id": "r", "epoch": 1, "rank": rank, "size": size, "n_layer": N_LAYER}
    return await process.client.load(
        path=str(file), model="tiny", role="stage", layers=[begin, end], ring=ring, **fields
    )


def edge(dense: Path, kind: Kind) -> Preamble:
    with Checkpoint.open(dense) as checkpoint:
        return Preamble(kind, kind.name.lower(), model_digest=model_digest(checkpoint), epoch=1)


class Ring:
    """Stages joined in order, the closing edge included."""

    def __init__(self, stages: list[EngineProcess], infos: list[dict], edges: list[Splice]) -> None:
        self.stages, self.infos, self.edges = stages, infos, edges

    async def entry(self) -> EngineClient:
        reader, writer = await asyncio.open_unix_connection(str(self.stages[0].data_socket))
        writer.write(Preamble(Kind.ENTRY, "entry").encode())
        return EngineClient(reader, writer)


@pytest.fixture(params=[2, 3])
async def ring(request: pytest.FixtureRequest, dense: Path, tmp_path: Path) -> AsyncIterator[Ring]:
    windows = {2: [(0, 2), (2, 4)], 3: [(0, 1), (1, 3), (3, 4)]}[request.param]
    async with AsyncExitStack() as stack:
        starting = (stack.enter_async_context(engine(tmp_path / f"s{n}", "s")) for n in range(len(windows)))
        stages = await asyncio.gather(*starting)
        loading = (load_stage(stage, dense, rank, len(windows), *windows[rank]) for rank, stage in enumerate(stages))
        infos = await asyncio.gather(*loading)
        edges = await join(stack, stages, dense)
        yield Ring(stages, infos, edges)


async def join(stack: AsyncExitStack, stages: list[EngineProcess], dense: Path) -> list[Splice]:
    """Splice every edge of a ring and wait until all ranks have joined."""
    edges = []
    for rank, stage in enumerate(stages):
        successor = stages[(rank + 1) % len(stages)]
        joint = Splice(
            stage.data_socket, edge(dense, Kind.RING_NEXT), successor.data_socket, edge(dense, Kind.RING_PREV)
        )
        edges.append(await stack.enter_async_context(joint))

    async def ready() -> bool:
        rings = [(await stage.client.stats())["ring"] for stage in stages]
        return all(each["next_ready"] and each["prev_ready"] for each in rings)

    await until(ready)
    return edges


async def test_the_ring_says_what_one_process_says(ring: Ring, dense: Path, tmp_path: Path) -> None:
    async with engine(tmp_path / "whole", "whole") as whole:
        await whole.client.load(path=str(dense), model="tiny", role="stage", layers=[0, N_LAYER])
        alone = [await complete(whole.client, request) for request in (REQUEST, SAMPLED)]
        whole_bytes = (await whole.client.stats())["tensor_bytes"]
    entry = await ring.entry()
    together = [await complete(entry, request) for request in (REQUEST, SAMPLED)]
    await entry.close()
    assert [done.tokens for done in together] == [done.tokens for done in alone]
    assert together[0].text == alone[0].text
    assert together[0].rows == alone[0].rows
    held = [(await stage.client.stats())["tensor_bytes"] for stage in ring.stages]
    assert held == [info["tensor_bytes"] for info in ring.infos]
    assert all(each < whole_bytes for each in held)
    assert sum(held) == whole_bytes


async def test_several_requests_share_the_ring(ring: Ring) -> None:
    entry = await ring.entry()
    alone = await complete(entry, REQUEST)
    together = await asyncio.gather(*(complete(entry, REQUEST) for _ in range(4)))
    await entry.close()
    assert {done.tokens for done in together} == {alone.tokens}

    async def released() -> bool:
        rings = [(await stage.client.stats())["ring"] for stage in ring.stages]
        return all(each["sequences"] == 0 for each in rings)

    await until(released)


def mixture(count: int) -> list[GenerateRequest]:
    """Greedy and sampled requests of all lengths, some with penalties."""
    return [
        GenerateRequest(
            prompt=f"{n}: " + "the thread of the weather " * (1 + 3 * n),
            max_tokens=20 + n,
            temperature=0.0 if n % 2 else 0.8,
            top_p=0.9,
            seed=n,
            repetition_penalty=1.2 if n % 3 == 0 else 1.0,
            ignore_eos=True,
            speculation=("off", "on", "auto")[n % 3],
        )
        for n in range(count)
    ]


async def held(ring: Ring) -> list[int]:
    return [(await stage.client.stats())["ring"]["sequences"] for stage in ring.stages]


async def test_company_drafts_and_cancels_change_no_token_of_the_ring(ring: Ring, dense: Path, tmp_path: Path) -> None:
    requests = mixture(6)
    async with engine(tmp_path / "whole", "whole") as whole:
        await whole.client.load(path=str(dense), model="tiny", role="stage", layers=[0, N_LAYER])
        alone = [await complete(whole.client, replace(each, speculation="off")) for each in requests]
    entry = await ring.entry()

    async def leave(request: GenerateRequest) -> None:
        events = entry.generate(request)
        await anext(events)
        await anext(events)
        await events.aclose()

    async with at_once(ring.stages[0]):
        leaving = [asyncio.create_task(leave(replace(REQUEST, max_tokens=200, seed=n))) for n in range(3)]
        asking = asyncio.gather(*(complete(entry, each) for each in requests))
    together = await asking
    await asyncio.gather(*leaving)
    assert [done.tokens for done in together] == [done.tokens for done in alone]
    assert [done.rows for done in together] == [done.rows for done in alone]
    assert sum(done.accepted_tokens for done in together) > 0
    assert max(int(size) for size in (await ring.stages[0].client.stats())["serving"]["batch_sizes"]) > 1

    async def released() -> bool:
        return not any(await held(ring))

    await until(released)
    kv = [(await stage.client.stats())["ring"]["kv"]["reserved_bytes"] for stage in ring.stages]
    assert not any(kv)
    await entry.close()


async def test_a_cancelled_request_is_released_though_a_rank_hangs(ring: Ring) -> None:
    entry = await ring.entry()
    events = entry.generate(replace(REQUEST, max_tokens=400))
    await anext(events)
    os.kill(ring.stages[-1].pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await events.aclose()
        assert (await ring.stages[0].client.stats())["ring"]["sequences"] == 0
    finally:
        os.kill(ring.stages[-1].pid, signal.SIGCONT)
    alone = await complete(entry, REQUEST)
    assert alone.completion_tokens == 20
    await entry.close()


async def test_a_rank_with_less_memory_makes_requests_wait_or_refuses_them(dense: Path, tmp_path: Path) -> None:
    block = 256 * 2 * 2 * 2 * 16 * 4  # positions of a block, layers, keys and values, heads, their width, bytes
    async with AsyncExitStack() as stack:
        stages = [await stack.enter_async_context(engine(tmp_path / f"s{n}", "s")) for n in range(2)]
        await load_stage(stages[0], dense, 0, 2, 0, 2)
        await load_stage(stages[1], dense, 1, 2, 2, 4, kv_budget_bytes=block)
        edges = await join(stack, stages, dense)
        ring = Ring(stages, [], edges)
        entry = await ring.entry()
        done = await asyncio.gather(*(complete(entry, replace(REQUEST, seed=n)) for n in range(3)))
        assert {each.completion_tokens for each in done} == {20}
        assert len({each.tokens for each in done}) == 1
        with pytest.raises(RequestError) as refusal:
            await complete(entry, replace(REQUEST, max_tokens=400))
        assert refusal.value.code == "kv_budget_exceeded"
        again = await complete(entry, REQUEST)
        assert again.tokens == done[0].tokens
        await entry.close()


async def test_the_entry_takes_generation_verbs_only(ring: Ring) -> None:
    entry = await ring.entry()
    for verb in ("load", "stats", "exit", "quarantine", "drain"):
        with pytest.raises(EngineError) as caught:
            await entry.call(verb)
        assert caught.value.code == "unknown_verb"
    assert await entry.count_tokens(prompt="the weather") > 0
    with pytest.raises(RequestError) as refusal:
        await complete(entry, replace(REQUEST, logprobs=2))
    assert refusal.value.code == "no_logprobs_on_a_ring"
    await entry.close()


async def test_a_stage_of_another_model_is_not_joined(dense: Path, tmp_path: Path) -> None:
    other = builders.write_tiny_llama(tmp_path / "other.gguf", n_layer=N_LAYER, seed=6)
    async with engine(tmp_path / "a", "a") as one, engine(tmp_path / "b", "b") as two:
        await load_stage(one, dense, 0, 2, 0, 2)
        (tmp_path / "b").mkdir(exist_ok=True)
        builders.write_tiny_llama(tmp_path / "b" / "other.gguf", n_layer=N_LAYER, seed=6, rope_freq_base=5000.0)
        await load_stage(two, tmp_path / "b" / "other.gguf", 1, 2, 2, 4)
        assert other.exists()
        joint = Splice(one.data_socket, edge(dense, Kind.RING_NEXT), two.data_socket, edge(dense, Kind.RING_PREV))
        async with joint:

            async def closed() -> bool:
                rings = [(await each.client.stats())["ring"] for each in (one, two)]
                return joint.bytes_right > 0 and not any(each["next_ready"] or each["prev_ready"] for each in rings)

            await until(closed)
