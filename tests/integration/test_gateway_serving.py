"""A gateway with a real engine behind its port: a budget for keys and values, and what the engine can do, by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvasir_console.config import Config, EngineConfig, GatewayConfig, ServedModel
from kvasir_console.engine.process.client import DoneEvent, EngineClient, GenerateRequest, TokenEvent
from kvasir_console.node.gateway.service import GatewayService
from kvasir_console.paths import Paths

import builders
from engines import PATIENCE_S, until

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
        engine = await EngineClient.connect(paths.runtime / "trunk0.ctl", timeout_s=PATIENCE_S)
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=PATIENCE_S) as client:

            async def healthy() -> bool:
                return (await client.get("/v1/health")).status_code == 200

            await until(healthy)
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
        most, waited = 0, 0

        async def met() -> bool:
            """Whether a look met with two that ran while others waited: on a busy machine none may."""
            nonlocal most, waited
            asking = [asyncio.create_task(served.ask(max_tokens=900, seed=n, temperature=1.0)) for n in range(7)]
            while not all(each.done() for each in asking):
                serving = (await served.engine.stats())["serving"]
                most = max(most, serving["kv"]["reserved_bytes"])
                waited = max(waited, serving["queued"])
                assert serving["kv"]["reserved_bytes"] + serving["kv"]["kept_bytes"] <= 2**20
            replies = [each.result() for each in asking]
            assert {reply.status_code for reply in replies} == {200}
            assert {reply.json()["usage"]["completion_tokens"] for reply in replies} == {900}
            return waited > 0 and most >= 2 * 4 * BLOCK_BYTES

        await until(met)
        assert most == 2 * 4 * BLOCK_BYTES  # each takes four blocks of eight
        assert (await served.kv())["reserved_bytes"] == 0
        # what nobody limits takes what there is
        unlimited = (await served.ask(messages=[{"role": "user", "content": "x" * 1500}])).json()["usage"]
        assert unlimited["total_tokens"] == BUDGET_TOKENS


async def test_a_client_that_leaves_the_queue_takes_nothing(model: Path, tmp_path: Path) -> None:
    async with gateway(tmp_path, model, kv_budget_mib=1) as served:
        asking: list[asyncio.Task[httpx.Response]] = []

        async def two_wait() -> bool:
            """One request has the budget to itself; on a busy machine it may end before the others have come."""
            missing = 4 - sum(not each.done() for each in asking)
            asking.extend(asyncio.create_task(served.ask(max_tokens=1900)) for _ in range(missing))
            return bool((await served.engine.stats())["serving"]["queued"] >= 2)

        await until(two_wait)
        for each in asking:
            each.cancel()

        async def all_is_back() -> bool:
            serving = (await served.engine.stats())["serving"]
            return (serving["queued"], serving["running"], serving["kv"]["reserved_bytes"]) == (0, 0, 0)

        await until(all_is_back)
        assert (await served.ask(max_tokens=5)).status_code == 200


def sdk(served: Served, **fields: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", **{"api_key": "none", "max_retries": 0, **fields})


async def test_the_official_client_gets_what_the_engine_can_do(model: Path, tmp_path: Path) -> None:
    """Whole and streamed; the engine itself, asked on its own socket, is the reference."""
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logprobs": True, "top_logprobs": 3}
    extra = {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1, "penalty_last_n": 32, "ignore_eos": True}
    request = GenerateRequest(
        messages=tuple(HELLO),
        max_tokens=24,
        temperature=0.8,
        top_p=0.9,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.1,
        penalty_last_n=32,
        ignore_eos=True,
        logprobs=3,
    )
    async with gateway(tmp_path, model) as served, sdk(served) as client:
        *tokens, done = [event async for event in served.engine.generate(request)]
        assert isinstance(done, DoneEvent)
        reply = await client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra, **options)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, extra_body=extra, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        stop = done.text[8:11]
        stopped = await client.chat.completions.create(
            model=MODEL, messages=HELLO, extra_body=extra, stop=[stop], **options
        )
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == (done.text, "length")
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    for entry, event in zip(entries, tokens, strict=True):
        assert isinstance(event, TokenEvent)
        assert event.logprob is not None
        assert (entry.logprob, tuple(entry.bytes or ())) == (event.logprob.logprob, event.logprob.piece)
        assert [each.logprob for each in entry.top_logprobs] == [each.logprob for each in event.top or ()]
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert [each.logprob for each in entry.top_logprobs] == sorted(
            (each.logprob for each in entry.top_logprobs), reverse=True
        )
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == done.text
    assert [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()] == entries
    assert chunks[-1].usage == reply.usage
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        done.text[: done.text.index(stop)],
        "stop",
    )


async def test_each_parameter_changes_the_answer(model: Path, tmp_path: Path) -> None:
    async with gateway(tmp_path, model) as served:

        async def text(**fields: Any) -> str:
            content = (await served.ask(max_tokens=60, **fields)).json()["choices"][0]["message"]["content"]
            return str(content)

        greedy = await text()
        assert await text() == greedy
        for field, value in (("presence_penalty", 2), ("frequency_penalty", 2), ("repetition_penalty", 1.5)):
            assert await text(**{field: value}) != greedy
            assert await text(**{field: value}, penalty_last_n=0) == greedy
        warm = {"temperature": 2.0, "seed": 5}
        for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.0}):
            assert await text(**warm, **narrow) == greedy
        assert await text(**warm) == await text(**warm) != greedy
        assert await text(**warm) != await text(temperature=2.0, seed=6)


async def test_a_conversation_reuses_its_own_prefix_and_says_so(model: Path, tmp_path: Path) -> None:
    long: list[Any] = [{"role": "user", "content": "the inner thread of the weather in there " * 20}]
    async with gateway(tmp_path, model) as served, sdk(served) as client, sdk(served, api_key="other") as other:

        async def cached(asker: openai.AsyncOpenAI, **fields: Any) -> int:
            reply = await asker.chat.completions.create(model=MODEL, messages=long, max_tokens=4, **fields)
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            return reply.usage.prompt_tokens_details.cached_tokens or 0

        assert [await cached(client, prompt_cache_key="talk") for _ in range(2)] == [0, 512]
        assert await cached(client, user="talk") == 0  # another kind of name
        assert await cached(other, prompt_cache_key="talk") == 0
        assert await cached(client) == 0  # those without a name share theirs with each other only
        assert await cached(other) == 512
        for field, value in (("min_p", 2), ("top_k", -5), ("repetition_penalty", 0)):
            with pytest.raises(openai.BadRequestError) as refused:
                await cached(client, extra_body={field: value})
            assert (refused.value.param, refused.value.code) == (field, "invalid_value")
