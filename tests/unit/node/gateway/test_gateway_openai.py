"""The OpenAI surface, asked by the official client over a real port, and byte by byte where that client hides it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_parts import DENSE, Gateway, ScriptedBackend, gateway

from kvasir_console.config import ServedModel
from kvasir_console.errors import EngineError, NetworkError, RequestError
from kvasir_console.node.gateway.backends import BackendInfo
from kvasir_console.node.gateway.slots import MAX_CONCURRENT, MAX_WAITING

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = "/v1/chat/completions"


def scripted(**fields: Any) -> ScriptedBackend:
    return ScriptedBackend(BackendInfo("m1", "Model One"), **fields)


def sdk(served: Gateway, **fields: Any) -> openai.AsyncOpenAI:
    options = {"api_key": "none", "max_retries": 0, **fields}
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", **options)


async def recorded(served: Gateway, request_id: str) -> dict[str, Any]:
    """The request's row, once its generation has ended."""
    await served.generations.idle()
    row = served.store.request(request_id)
    assert row is not None
    return dict(row)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_the_official_client_chats(tmp_path: Path) -> None:
    backend = scripted(texts=("Par", "is", ""), tail=".")
    async with gateway(tmp_path, [backend]) as served, sdk(served) as client:
        reply = await client.chat.completions.create(model="m1", messages=HELLO, temperature=0, max_tokens=7)
        assert reply.choices[0].message.content == "Paris."
        assert reply.choices[0].message.role == "assistant"
        assert (reply.choices[0].finish_reason, reply.model, reply.object) == ("stop", "m1", "chat.completion")
        assert reply.id.startswith("chatcmpl-")
        assert len(reply.id) == len("chatcmpl-") + 24
        assert reply.usage is not None
        usage = reply.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 3, 8)
        row = await recorded(served, reply.id)
        assert (row["model"], row["finish"], row["prompt_tokens"], row["completion_tokens"]) == ("m1", "stop", 5, 3)
        assert json.loads(row["tokens"]) == [100, 101, 102]
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert (backend.requests[0].max_tokens, backend.requests[0].temperature) == (7, 0.0)
    assert backend.requests[0].messages == ({"role": "user", "content": "What is the capital of France?"},)


async def test_a_request_that_is_sent_again_is_the_same_one_and_booked_once(tmp_path: Path) -> None:
    backend = scripted(texts=("Par", "is"))
    again = {"idempotency-key": "once"}
    async with gateway(tmp_path, [backend]) as served, sdk(served) as client:
        replies = [
            await client.chat.completions.create(model="m1", messages=HELLO, max_tokens=7, extra_headers=headers)
            for headers in (again, again, {})
        ]
        ids = [reply.id for reply in replies]
        assert ids[0] == ids[1] != ids[2]
        keys = [request.key for request in backend.requests]
        assert keys[0] == keys[1] != keys[2]
        assert (await recorded(served, ids[0]))["finish"] == "stop"


async def test_a_request_that_failed_is_booked_anew_when_it_is_sent_again(tmp_path: Path) -> None:
    backend = scripted(texts=("Par", "is"), fail_at=1, error=EngineError("step_failed", "A step failed."))
    async with gateway(tmp_path, [backend]) as served, sdk(served) as client:
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(
                model="m1", messages=HELLO, stream=True, extra_headers={"idempotency-key": "twice"}
            ):
                pass
        await served.generations.idle()
        backend.error = None
        reply = await client.chat.completions.create(
            model="m1", messages=HELLO, extra_headers={"idempotency-key": "twice"}
        )
        assert (await recorded(served, reply.id))["finish"] == "stop"


async def test_the_official_client_streams(tmp_path: Path) -> None:
    backend = scripted(texts=("Par", "", "is"), tail=".", finish_reason="length")
    async with gateway(tmp_path, [backend]) as served, sdk(served) as client:
        stream = await client.chat.completions.create(model="m1", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Paris."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8


async def test_a_stream_has_the_contracts_shape(tmp_path: Path) -> None:
    async with gateway(tmp_path, [scripted(texts=("A", "B"))]) as served:
        reply = await served.client.post(CHAT, json={"model": "m1", "messages": HELLO, "stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(reply.text)
    assert done == "[DONE]"
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "A"}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "B"}, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        [],
    ]
    assert [("usage" in chunk, "kvasir" in chunk) for chunk in chunks] == [(False, False)] * 4 + [(True, True)]


async def test_log_probabilities_have_openais_shape(tmp_path: Path) -> None:
    backend = scripted(texts=("Par", "", "is"))
    async with gateway(tmp_path, [backend]) as served, sdk(served) as client:
        reply = await client.chat.completions.create(model="m1", messages=HELLO, logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            model="m1", messages=HELLO, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [each async for chunk in stream for choice in chunk.choices for each in told(choice)]
        bare = await client.chat.completions.create(model="m1", messages=HELLO, logprobs=True)
        plain = await client.chat.completions.create(model="m1", messages=HELLO)
    whole = told(reply.choices[0])
    assert [(each.token, each.logprob, bytes(each.bytes or ())) for each in whole] == [
        ("Par", -0.25, b"Par"),
        ("", -0.5, b""),
        ("is", -0.75, b"is"),
    ]
    assert [each.token for each in whole[0].top_logprobs] == ["Par", "\ufffd"]  # a part of a character
    assert whole[0].top_logprobs[1].bytes == [0xE2, 0x82]
    assert streamed == whole
    assert [each.top_logprobs for each in told(bare.choices[0])] == [[], [], []]
    assert plain.choices[0].logprobs is None
    assert [request.logprobs for request in backend.requests] == [2, 2, 0, None]


def told(choice: Any) -> list[Any]:
    return [] if choice.logprobs is None else list(choice.logprobs.content)


async def test_what_the_engine_boasts_of_its_cache_is_bounded_by_the_prompt(tmp_path: Path) -> None:
    for claimed, believed in ((10**9, 5), (-1, 0)):
        async with gateway(tmp_path / str(believed), [scripted(cached_tokens=claimed)]) as served:
            reply = (await served.client.post(CHAT, json={"model": "m1", "messages": HELLO})).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == believed


async def test_a_session_belongs_to_its_caller(tmp_path: Path) -> None:
    backend = scripted()
    async with gateway(tmp_path, [backend]) as served:
        for key in ("k1", "k1", "k2"):
            async with sdk(served, api_key=key) as client:
                await client.chat.completions.create(model="m1", messages=HELLO, prompt_cache_key="talk-1")
    first, again, other = (request.session for request in backend.requests)
    assert first == again != other
    assert "talk" not in first


async def test_a_reply_says_how_it_was_made(tmp_path: Path) -> None:
    async with gateway(tmp_path, [scripted()]) as served:
        reply = (await served.client.post(CHAT, json={"model": "m1", "messages": HELLO})).json()
    extension = reply["kvasir"]
    assert extension.pop("first_token_ms") > 0
    assert extension == {
        "engine": "kvasir-console",
        "request_id": reply["id"],
        "stage_rows": 7,
        "tokens": [100, 101, 102],
        "pairs_local": 7,
        "pairs_remote": 11,
        "failovers": 1,
        "queued_ms": 0.5,
        "decode_steps": 2,
        "drafted_tokens": 4,
        "accepted_tokens": 1,
        "trace_path": None,
    }


async def test_the_extension_is_for_the_operators_machines(tmp_path: Path) -> None:
    backend = scripted()
    body = {"model": "m1", "messages": HELLO, "kvasir": {"experts": "local", "trace": True}}
    async with gateway(tmp_path, [backend]) as served:
        refused = await served.client.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "service_token_needed")
        assert backend.requests == []
        reply = await served.client.post(CHAT, json=body, headers=served.service)
        assert reply.json()["kvasir"]["trace_path"] == "/runtime/trace-1.npy"
    assert (backend.requests[0].experts, backend.requests[0].trace) == ("local", True)


async def test_a_raw_prompt_overrides_the_messages(tmp_path: Path) -> None:
    backend = scripted()
    async with gateway(tmp_path, [backend]) as served:
        body = {"model": "m1", "messages": HELLO, "prompt": "Once upon"}
        assert (await served.client.post(CHAT, json=body)).status_code == 200
    assert (backend.requests[0].prompt, backend.requests[0].messages) == ("Once upon", None)


# -- models ----------------------------------------------------------------------------------------------------------


async def test_a_model_goes_by_id_qualified_id_or_name(tmp_path: Path) -> None:
    async with gateway(tmp_path, [scripted()]) as served, sdk(served) as client:
        listed = await client.models.list()
        assert [(model.id, model.owned_by) for model in listed.data] == [("m1", "kvasir")]
        (paid,) = (await served.client.get("/api/pay/models")).json()["models"]
        assert paid == {"id": f"{paid['id'][:8]}:m1", "name": "Model One"}
        int(paid["id"][:8], 16)
        for name in ("m1", paid["id"], "Model One"):
            reply = await client.chat.completions.create(model=name, messages=HELLO)
            assert reply.model == "m1"


async def test_a_name_that_two_models_share_names_neither(tmp_path: Path) -> None:
    backends = [ScriptedBackend(BackendInfo(model_id, "Same")) for model_id in ("m1", "m2")]
    async with gateway(tmp_path, backends) as served:
        reply = await served.client.post(CHAT, json={"model": "Same", "messages": HELLO})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "model_not_served")


async def test_an_unknown_model_is_400_or_503_when_nothing_is_served(tmp_path: Path) -> None:
    body = {"model": "gpt-x", "messages": HELLO}
    async with gateway(tmp_path / "a", [scripted()]) as served, sdk(served) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="gpt-x", messages=HELLO)
        assert caught.value.code == "model_not_served"
        other = await served.client.post(CHAT, json=body | {"model": "00000000:m1"})
        assert other.status_code == 400
    async with gateway(tmp_path / "b") as served:
        reply = await served.client.post(CHAT, json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["code"]) == (503, "hub_unavailable", "ring_recovering")
        assert "gateway.models is empty" in error["message"]
        assert error["detail"].startswith("no_model: ")
        health = await served.client.get("/v1/health")
        assert (health.status_code, health.json()["status"]) == (503, "no_model")
        assert "[[gateway.models]]" in health.json()["detail"]


async def test_health_looks_at_every_model(tmp_path: Path) -> None:
    first, second = (ScriptedBackend(BackendInfo(f"m{n}", f"M{n}"), ready=False) for n in (1, 2))
    async with gateway(tmp_path, [first, second]) as served:
        reply = await served.client.get("/v1/health")
        assert (reply.status_code, reply.json()) == (503, {"status": "unhealthy", "recovering": True})
        assert (await served.client.get("/api/pay/models")).json()["models"] == []
        second.ready = True
        reply = await served.client.get("/v1/health")
        assert (reply.status_code, reply.json()) == (200, {"status": "ok", "model": "m2", "name": "M2"})


# -- refusals --------------------------------------------------------------------------------------------------------


async def test_the_context_is_checked_before_anything_runs(tmp_path: Path) -> None:
    backend = scripted(context=20, prompt_tokens=15)
    async with gateway(tmp_path, [backend]) as served, sdk(served) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m1", messages=HELLO, max_tokens=6)
        assert caught.value.code == "context_length_exceeded"
        assert backend.requests == []
        await client.chat.completions.create(model="m1", messages=HELLO, max_tokens=5)
        await client.chat.completions.create(model="m1", messages=HELLO)  # no limit asked for: what fits
        assert [request.max_tokens for request in backend.requests] == [5, 5]
        backend.prompt_tokens = 20
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m1", messages=HELLO)


async def test_memory_for_keys_and_values_is_checked_before_anything_runs(tmp_path: Path) -> None:
    backend = scripted(context=20, kv_tokens=12, prompt_tokens=5)
    async with gateway(tmp_path, [backend]) as served, sdk(served) as client:
        for max_tokens, code, number in ((8, "kv_budget_exceeded", "12"), (16, "context_length_exceeded", "20")):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m1", messages=HELLO, max_tokens=max_tokens)
            assert caught.value.code == code
            assert number in caught.value.message
        assert backend.requests == []
        await client.chat.completions.create(model="m1", messages=HELLO)  # no limit asked for: what fits
        assert backend.requests[0].max_tokens == 7


@pytest.mark.parametrize("code", ["queue_full", "queue_timeout", "kv_budget_full"])
async def test_an_engine_that_is_full_is_busy_not_broken(tmp_path: Path, code: str) -> None:
    backend = scripted(fail_at=0, error=EngineError(code, "Others have the memory."))
    async with gateway(tmp_path, [backend]) as served:
        reply = await served.client.post(CHAT, json={"model": "m1", "messages": HELLO})
        error = reply.json()["error"]
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "10")
        assert (error["type"], error["code"]) == ("ring_busy", "ring_busy")
        assert "Others have the memory." in error["message"]


async def test_a_refused_parameter_is_named(tmp_path: Path) -> None:
    async with gateway(tmp_path, [scripted()]) as served:
        reply = await served.client.post(CHAT, json={"model": "m1", "messages": HELLO, "n": 2})
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["code"], error["param"]) == (
            400,
            "invalid_request_error",
            "unsupported_parameter",
            "n",
        )


async def test_what_the_engine_refuses_is_the_callers_400(tmp_path: Path) -> None:
    backend = scripted(fail_at=0, error=RequestError("no_chat_template", "This model has no chat template."))
    async with gateway(tmp_path, [backend]) as served:
        for stream in (False, True):
            reply = await served.client.post(CHAT, json={"model": "m1", "messages": HELLO, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_chat_template")


@pytest.mark.parametrize(
    "error",
    [EngineError("engine_gone", "The engine ended."), NetworkError("entry_not_connected", "No rank 0."), OSError("x")],
    ids=lambda error: type(error).__name__,
)
async def test_a_backend_that_fails_before_the_first_token_is_503(tmp_path: Path, error: Exception) -> None:
    async with gateway(tmp_path, [scripted(fail_at=0, error=error)]) as served, sdk(served) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="m1", messages=HELLO, stream=stream)
            assert caught.value.status_code == 503
            assert caught.value.code == "ring_recovering"
            assert caught.value.type == "hub_unavailable"
            assert len(caught.value.body["detail"]) <= 200


async def test_an_error_in_the_middle_of_a_stream_is_its_last_event(tmp_path: Path) -> None:
    backend = scripted(fail_at=2, error=EngineError("engine_gone", "The engine ended."))
    async with gateway(tmp_path, [backend]) as served:
        reply = await served.client.post(CHAT, json={"model": "m1", "messages": HELLO, "stream": True})
        *chunks, last = events(reply.text)
        assert reply.status_code == 200
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Paris"
        assert last["error"]["type"] == "engine_error"
        assert "The engine ended." in last["error"]["message"]
        row = await recorded(served, chunks[0]["id"])
        assert (row["finish"], row["completion_tokens"]) == ("engine_gone", 2)
        whole = await served.client.post(CHAT, json={"model": "m1", "messages": HELLO})
        assert whole.status_code == 503


async def test_bodies_are_bounded_and_must_be_json(tmp_path: Path) -> None:
    async with gateway(tmp_path, [scripted()]) as served:
        for content, status in ((b"{", 400), (b" " * 2_000_001, 413)):
            reply = await served.client.post(CHAT, content=content)
            assert reply.status_code == status
            assert set(reply.json()["error"]) == {"message", "type", "code"}


async def test_a_gateway_that_others_can_reach_asks_for_its_token(tmp_path: Path) -> None:
    async with gateway(tmp_path, [scripted()], open_access=False) as served:
        async with sdk(served) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m1", messages=HELLO)
        async with sdk(served, api_key=served.secrets.service_token) as client:
            await client.chat.completions.create(model="m1", messages=HELLO)


# -- leaving, and crowds ---------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_a_stream_cancels_its_request(tmp_path: Path) -> None:
    backend = scripted(hold_at=2)
    async with gateway(tmp_path, [backend]) as served, sdk(served) as client:
        stream = await client.chat.completions.create(model="m1", messages=HELLO, stream=True)
        seen = [await anext(stream) for _ in range(3)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in seen) == "Paris"
        await stream.close()
        await asyncio.wait_for(backend.cancelled.wait(), 120)
        row = await recorded(served, seen[0].id)
        assert (row["finish"], row["completion_tokens"], row["prompt_tokens"]) == ("cancelled", 2, 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_cancels_its_request(tmp_path: Path, stream: bool) -> None:
    backend = scripted(hold_at=0)
    async with gateway(tmp_path, [backend]) as served:
        body = {"model": "m1", "messages": HELLO, "stream": stream}
        asking = asyncio.create_task(served.client.post(CHAT, json=body))
        await asyncio.wait_for(backend.holding.wait(), 120)
        asking.cancel()
        await asyncio.wait_for(backend.cancelled.wait(), 120)


async def test_too_many_requests_wait_then_are_refused(tmp_path: Path) -> None:
    backend = scripted(hold_at=0)
    async with gateway(tmp_path, [backend]) as served:
        limits = httpx.Limits(max_connections=100)
        transport = httpx.AsyncHTTPTransport(uds=str(served.socket), limits=limits)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=120) as client:
            body = {"model": "m1", "messages": HELLO}
            asking = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(MAX_CONCURRENT + MAX_WAITING)]
            async with asyncio.timeout(120):
                while served.generations.running < MAX_CONCURRENT + MAX_WAITING:  # noqa: ASYNC110 - they come by socket
                    await asyncio.sleep(0.01)
            assert len(backend.requests) <= MAX_CONCURRENT
            refused = await client.post(CHAT, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert (refused.json()["error"]["type"], refused.json()["error"]["code"]) == ("ring_busy", "ring_busy")
            backend.go.set()
            replies = await asyncio.gather(*asking)
    assert {reply.status_code for reply in replies} == {200}
    assert len(backend.requests) == MAX_CONCURRENT + MAX_WAITING


async def test_stopping_the_gateway_ends_a_stream_with_an_error(tmp_path: Path) -> None:
    backend = scripted(hold_at=1)
    async with gateway(tmp_path, [backend]) as served:
        async with served.client.stream("POST", CHAT, json={"model": "m1", "messages": HELLO, "stream": True}) as reply:
            lines = reply.aiter_lines()
            await asyncio.wait_for(backend.holding.wait(), 120)
            await served.generations.close()
            text = "\n".join([line async for line in lines if line])
        assert "[DONE]" not in text
        assert json.loads(text.rpartition("data: ")[2])["error"]["type"] == "engine_error"


# -- what a ring earns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({}, 5 + 3 - 1),
        ({"texts": ()}, 5),
        ({"fail_at": 2, "error": EngineError("engine_gone", "gone")}, 5 + 2 - 1),
        ({"fail_at": 0, "error": EngineError("engine_gone", "gone")}, 0),
    ],
    ids=["whole", "ended at once", "broken off", "no token"],
)
async def test_a_ring_is_credited_the_rows_that_its_tokens_prove(
    tmp_path: Path, models: tuple[ServedModel, ...], fields: dict[str, Any], rows: int
) -> None:
    backend = ScriptedBackend(BackendInfo(DENSE, "Dense"), **fields)
    async with gateway(tmp_path, [backend], models) as served:
        backend.info = BackendInfo(DENSE, "Dense", served.rings[DENSE])
        await served.client.post(CHAT, json={"model": DENSE, "messages": HELLO})
        await served.generations.idle()
        reply = await served.client.get("/api/contributions", headers=served.service)
    found = {row["node_id"]: (row["micro_units"], row["rows"]) for row in reply.json()["contributions"]}
    # One of four layers, and three of four: a quarter and three quarters of 1000 micro-units a row.
    assert found == ({f"ring-{DENSE}-0": (rows * 250, rows), f"ring-{DENSE}-1": (rows * 750, rows)} if rows else {})
