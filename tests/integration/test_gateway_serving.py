"""A gateway with a real engine behind its port: a budget for keys and values, and what the engine can do, by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir_console.config import Config, EngineConfig, GatewayConfig, ServedModel
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.node.gateway.service import GatewayService
from kvasir_console.paths import Paths

import builders
from engines import until

MODEL = "tiny"
N_LAYER = 2
BLOCK_BYTES = 256 * N_LAYER * 2 * 2 * 16 * 4
"""256 positions of two layers: keys and values of two heads of 16 values, f32."""
BUDGET_TOKENS = 2**20 // BLOCK_BYTES * 256
HELLO: list[Any] = [{"role": "user", "content": "the inner thread of the weather in there"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "dense.gguf"
    return builders.write_tiny_llama(path, n_layer=N_LAYER, seed=11, context_length=4096)


class Served:
    """A gateway's port, and the control socket of its engine beside it."""

    def __init__(self, service: GatewayService, client: httpx.AsyncClient, engine: EngineClient) -> None:
        self.url = f"http://127.0.0.1:{service.port}"
        self.client = client
        self.engine = engine

    async def ask(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": HELLO, "ignore_eos": True, "temperature": 0, **fields}
        return await self.client.post(CHAT, json=body)

    async def kv(self) -> dict[str, int]:
        kv: dict[str, int] = (await self.engine.stats())["serving"]["kv"]
        return kv


@asynccontextmanager
async def gateway(home: Path, model: Path, **fields: Any) -> AsyncIterator[Served]:
    """The whole service, its engine a supervised child, all by its configuration."""
    paths = Paths.from_environment({"KVASIR_HOME": str(home)})
    models = (ServedModel(MODEL, str(model), "trunk"),)
    config = Config(engine=EngineConfig(threads=1, **fields), gateway=GatewayConfig(port=0, models=models))
    async with GatewayService(config, paths) as service:
        base = f"http://127.0.0.1:{service.port}"
        engine = await EngineClient.connect(paths.runtime / "trunk0.ctl", timeout_s=60)
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:

            async def healthy() -> bool:
                return (await client.get("/v1/health")).status_code == 200

            await until(healthy, 60)
            yield Served(service, client, engine)
        await engine.close()


async def test_requests_beyond_the_budget_wait_or_are_refused_and_none_fails_late(model: Path, tmp_path: Path) -> None:
    async with gateway(tmp_path, model, kv_budget_mib=1) as served:
        assert (await served.kv())["budget_bytes"] == 2**20
        for stream in (False, True):
            refused = await served.ask(max_tokens=BUDGET_TOKENS, stream=stream)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "kv_budget_exceeded")
            assert str(BUDGET_TOKENS) in error["message"]
        asking = [asyncio.create_task(served.ask(max_tokens=900, seed=n, temperature=1.0)) for n in range(7)]
        most, waited = 0, 0
        while not all(each.done() for each in asking):
            serving = (await served.engine.stats())["serving"]
            most = max(most, serving["kv"]["reserved_bytes"])
            waited = max(waited, serving["queued"])
            assert serving["kv"]["reserved_bytes"] + serving["kv"]["kept_bytes"] <= 2**20
        replies = [each.result() for each in asking]
        assert {reply.status_code for reply in replies} == {200}
        assert {reply.json()["usage"]["completion_tokens"] for reply in replies} == {900}
        assert most == 2 * 4 * BLOCK_BYTES  # each takes four blocks of eight
        assert waited > 0
        assert (await served.kv())["reserved_bytes"] == 0
        # what nobody limits takes what there is
        unlimited = (await served.ask(messages=[{"role": "user", "content": "x" * 1500}])).json()["usage"]
        assert unlimited["total_tokens"] == BUDGET_TOKENS


async def test_a_client_that_leaves_the_queue_takes_nothing(model: Path, tmp_path: Path) -> None:
    async with gateway(tmp_path, model, kv_budget_mib=1) as served:
        asking = [asyncio.create_task(served.ask(max_tokens=1900)) for _ in range(3)]

        async def two_wait() -> bool:
            return bool((await served.engine.stats())["serving"]["queued"] == 2)

        await until(two_wait)
        for each in asking:
            each.cancel()

        async def all_is_back() -> bool:
            serving = (await served.engine.stats())["serving"]
            return (serving["queued"], serving["running"], serving["kv"]["reserved_bytes"]) == (0, 0, 0)

        await until(all_is_back)
        assert (await served.ask(max_tokens=5)).status_code == 200
