"""A ring whose stages own the routers of their MoE layers: workers come and go, and the tokens stay."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import write_stage
from kvasir_console.engine.process.client import EngineClient, GenerateRequest
from kvasir_console.relay.wire.preamble import Kind, Preamble

import builders
from engines import EngineProcess, Splice, complete, connected, digest_of, engine, hold, idle, until

N_LAYER, N_EXPERT, TOP_K = 2, 4, 2
WALLET = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
REQUEST = GenerateRequest(prompt="the inner thread of the weather", max_tokens=24, temperature=0.9, seed=11)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    return builders.write_tiny_llama(path, n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=TOP_K, seed=3)


class WaitingSplice(Splice):
    """A stage's waiting session, joined to a worker: the stage's own preamble first, then the hub's."""

    async def __aenter__(self) -> Splice:
        left, told = self._ends[0]
        self._ends = ((left, _Both(told)), self._ends[1])  # type: ignore[arg-type]
        return await super().__aenter__()


class _Both:
    def __init__(self, told: Preamble) -> None:
        self._told = told

    def encode(self) -> bytes:
        return Preamble(Kind.ROUTER, "ring/experts/0").encode() + self._told.encode()


async def test_workers_of_both_stages_change_no_token_and_one_that_dies_neither(moe: Path, tmp_path: Path) -> None:
    digest = digest_of(moe)
    async with engine(tmp_path / "whole", "w") as whole:
        await whole.client.load(path=str(moe), model="tiny", role="stage", layers=[0, N_LAYER])
        alone = await complete(whole.client, REQUEST)
    async with AsyncExitStack() as stack:
        stages = [await stack.enter_async_context(engine(tmp_path / f"s{n}", "s")) for n in range(N_LAYER)]
        for rank, stage in enumerate(stages):
            await load_stage(stage, moe, rank)
        workers = [await stack.enter_async_context(engine(tmp_path / f"e{n}", "e")) for n in range(N_LAYER)]
        for layer, worker in enumerate(workers):
            await hold(worker, moe, layer, 0, 3)
            told = Preamble(Kind.DISPATCH, f"expert-{layer}", WALLET, digest, layer, 0, 3)
            serves = Preamble(Kind.EXPERTS, f"expert-{layer}", WALLET, digest, layer, 0, 3)
            joint = WaitingSplice(stages[layer].data_socket, told, worker.data_socket, serves)
            await stack.enter_async_context(joint)
        for rank, stage in enumerate(stages):
            after = stages[(rank + 1) % N_LAYER]
            ends = [
                Preamble(kind, kind.name, model_digest=digest, epoch=1) for kind in (Kind.RING_NEXT, Kind.RING_PREV)
            ]
            await stack.enter_async_context(Splice(stage.data_socket, ends[0], after.data_socket, ends[1]))
        await until(lambda: joined(stages))
        reader, writer = await asyncio.open_unix_connection(str(stages[0].data_socket))
        writer.write(Preamble(Kind.ENTRY, "entry").encode())
        entry = EngineClient(reader, writer)

        async def both_work() -> bool:
            """Newcomers whose answers are late have none counted."""
            assert (await complete(entry, REQUEST)).tokens == alone.tokens
            return all([await pairs(stage) for stage in stages])

        await until(both_work)
        for stage in stages:
            await idle(stage)
        before = [await pairs(stage) for stage in stages]

        running = [asyncio.create_task(complete(entry, replace(REQUEST, max_tokens=200))) for _ in range(2)]
        await until(lambda: more(stages[1], before[1]))
        os.kill(workers[1].pid, signal.SIGKILL)
        done = await asyncio.gather(*running)
        assert {each.tokens[:24] for each in done} == {alone.tokens}
        await connected(stages[1], 0)
        assert (await stages[0].client.coverage())[0]["connected"]
        await entry.close()


async def load_stage(stage: EngineProcess, moe: Path, rank: int) -> None:
    file = stage.data_socket.parent / f"stage{rank}.gguf"
    with Checkpoint.open(moe) as checkpoint:
        write_stage(checkpoint, file, model="tiny", begin=rank, end=rank + 1)
    ring = {"id": "r", "epoch": 1, "rank": rank, "size": N_LAYER, "n_layer": N_LAYER}
    await stage.client.load(path=str(file), model="tiny", role="stage", layers=[rank, rank + 1], ring=ring)


async def joined(stages: list[EngineProcess]) -> bool:
    rings = [(await stage.client.stats())["ring"] for stage in stages]
    live = [sum(each["connected"] for each in await stage.client.coverage()) for stage in stages]
    return all(each["next_ready"] and each["prev_ready"] for each in rings) and live == [1, 1]


async def pairs(stage: EngineProcess) -> int:
    return sum(int(each["pairs"]) for each in await stage.client.coverage())


async def more(stage: EngineProcess, than: int) -> bool:
    return await pairs(stage) > than
