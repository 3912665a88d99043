"""The serving loop in a real engine process: company, memory, kept prefixes, drafts and cancels change no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir_console.engine.process.client import DoneEvent, EngineClient, GenerateRequest, TokenEvent
from kvasir_console.errors import EngineError, RequestError
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire

import builders
from engines import EngineProcess, Splice, at_once, complete, connected, digest_of, engine, hold, idle, until

N_LAYER = 2
CHUNK = 256
TEXT = "the inner thread of the weather in there, as it were: "
CODE = "def weather(there):\n    return there + 1\n\n\ndef thread(there):\n    return there + 1\n\n\ndef "


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "dense.gguf"
    return builders.write_tiny_llama(path, n_layer=N_LAYER, seed=11, context_length=4096)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    return builders.write_tiny_llama(path, n_layer=N_LAYER, n_expert=4, n_expert_used=2, seed=12, context_length=4096)


async def load(process: EngineProcess, path: Path, **fields: Any) -> dict[str, Any]:
    return await process.client.load(path=str(path), model="tiny", role="stage", layers=[0, N_LAYER], **fields)


@pytest.fixture
async def served(dense: Path, tmp_path: Path) -> AsyncIterator[EngineProcess]:
    async with engine(tmp_path / "e", "e") as process:
        await load(process, dense)
        yield process


async def serving(process: EngineProcess) -> dict[str, Any]:
    stats: dict[str, Any] = (await process.client.stats())["serving"]
    return stats


def mixture(count: int, tokens: int = 40) -> list[GenerateRequest]:
    """Requests of all kinds: short and long prompts, greedy and sampled, with and without penalties. Each has a session
    of its own, so that none begins from what another left."""
    return [
        GenerateRequest(
            prompt=f"{n}: " + TEXT * (1 + 4 * n),
            max_tokens=tokens + 3 * n,
            temperature=0.0 if n % 3 == 0 else 0.5 + 0.1 * n,
            top_p=0.9 if n % 2 else 1.0,
            top_k=40 if n % 4 == 1 else 0,
            repetition_penalty=1.3 if n % 3 == 2 else 1.0,
            seed=n,
            ignore_eos=True,
            session=f"s{n}",
        )
        for n in range(count)
    ]


async def take(client: EngineClient, request: GenerateRequest, count: int) -> list[int]:
    """The first ``count`` tokens; then the request is cancelled."""
    tokens = []
    events = client.generate(request)
    async for event in events:
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        if len(tokens) == count:
            break
    await events.aclose()
    return tokens


@pytest.mark.parametrize("kind", ["dense", "moe"])
async def test_survivors_of_cancels_have_their_solo_tokens_and_memory_returns(
    kind: str, dense: Path, moe: Path, tmp_path: Path
) -> None:
    requests = mixture(8)
    path = dense if kind == "dense" else moe
    async with engine(tmp_path / "solo", "solo") as process:
        await load(process, path)
        alone = [await complete(process.client, replace(each, speculation="off")) for each in requests]
    async with engine(tmp_path / "together", "together") as process:
        await load(process, path)
        client = process.client
        for _ in range(2):
            cancelled = {1: 4, 3: 17, 6: 1}
            async with at_once(process):
                asking = asyncio.gather(
                    *(
                        take(client, each, cancelled[n]) if n in cancelled else complete(client, each)
                        for n, each in enumerate(requests)
                    )
                )
            results = await asking
            for n, result in enumerate(results):
                if isinstance(result, DoneEvent):
                    assert (result.tokens, result.text) == (alone[n].tokens, alone[n].text)
                else:
                    assert tuple(result) == alone[n].tokens[: cancelled[n]]
        after = await client.stats()
    stats = after["serving"]
    assert max(int(size) for size in stats["batch_sizes"]) >= 6
    assert stats["kv"]["reserved_bytes"] == 0
    assert (stats["running"], stats["queued"], after["active_requests"]) == (0, 0, 0)
    assert stats["kv"]["kept_bytes"] <= stats["kv"]["budget_bytes"] / 4


async def test_the_logits_of_a_request_do_not_depend_on_its_company(served: EngineProcess, dense: Path) -> None:
    request = GenerateRequest(prompt=TEXT * 8, max_tokens=24, trace=True, session="a")
    alone = await complete(served.client, request)
    others = [complete(served.client, each) for each in mixture(6)]
    together, *_ = await asyncio.gather(complete(served.client, replace(request, session="b")), *others)
    assert alone.trace_path is not None
    assert together.trace_path is not None
    assert np.array_equal(np.load(alone.trace_path), np.load(together.trace_path))
    assert alone.rows == together.rows == alone.prompt_tokens + 23


def kv_bytes(tokens: int) -> int:
    """Of a tiny dense model: 2 layers, keys and values of 2 heads of 16 values, f32, in blocks of 256."""
    return -(-tokens // CHUNK) * CHUNK * N_LAYER * 2 * 2 * 16 * 4


async def test_requests_wait_for_room_and_are_all_served(dense: Path, tmp_path: Path) -> None:
    requests = [replace(each, max_tokens=200, speculation="off") for each in mixture(5)]
    largest = max(kv_bytes(len(each.prompt or "") + 200) for each in requests)
    async with engine(tmp_path / "a", "a") as process:
        info = await load(process, dense, kv_budget_bytes=largest)
        assert info["kv_budget_bytes"] == largest
        peak, queued = 0, 0

        async def met() -> bool:
            """Whether a look met with requests that run, and with others that wait: on a busy machine none may."""
            nonlocal peak, queued
            async with at_once(process):
                running = [asyncio.create_task(complete(process.client, each)) for each in requests]
            while not all(each.done() for each in running):
                stats = await serving(process)
                peak, queued = max(peak, stats["kv"]["reserved_bytes"]), max(queued, stats["queued"])
                assert stats["kv"]["reserved_bytes"] + stats["kv"]["kept_bytes"] <= largest
            done = [each.result() for each in running]
            assert all(each.completion_tokens == 200 for each in done)
            assert max(each.queued_ms for each in done) > 0
            return peak > 0 and queued > 0

        await until(met)
    assert peak <= largest


async def test_what_can_never_be_served_is_refused_before_it_is_accepted(dense: Path, tmp_path: Path) -> None:
    async with engine(tmp_path / "a", "a") as process:
        await load(process, dense, kv_budget_bytes=kv_bytes(300), max_queue=2)
        with pytest.raises(RequestError) as refusal:
            await process.client.call("generate", prompt="the weather", max_tokens=600)
        assert refusal.value.code == "kv_budget_exceeded"
        request = GenerateRequest(prompt="the weather", max_tokens=400, ignore_eos=True)
        events = process.client.generate(request)
        await anext(events)
        async with at_once(process):  # one runs, two wait, and the others find the queue full
            asking = [asyncio.create_task(complete(process.client, request)) for _ in range(6)]
        await events.aclose()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        refused = [each.code for each in answers if isinstance(each, EngineError)]
        served = [each.completion_tokens for each in answers if isinstance(each, DoneEvent)]
        assert set(refused) == {"queue_full"}
        assert set(served) == {400}
        assert len(served) >= 2
        assert len(served) + len(refused) == 6
        assert (await serving(process))["kv"]["reserved_bytes"] == 0


async def test_a_kept_prefix_gives_the_bits_of_a_cold_run(served: EngineProcess) -> None:
    prompt = TEXT * 20
    cold = await complete(served.client, GenerateRequest(prompt=prompt, max_tokens=20, trace=True))
    warm = await complete(served.client, GenerateRequest(prompt=prompt, max_tokens=20, trace=True))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == (cold.prompt_tokens - 1) // CHUNK * CHUNK > 0
    assert warm.tokens == cold.tokens
    assert cold.trace_path is not None
    assert warm.trace_path is not None
    assert np.array_equal(np.load(cold.trace_path), np.load(warm.trace_path))
    assert warm.rows == cold.rows - warm.cached_tokens
    other = await complete(served.client, GenerateRequest(prompt=TEXT * 10 + "x" + TEXT * 10, max_tokens=20))
    assert other.cached_tokens == len(TEXT * 10) // CHUNK * CHUNK or other.cached_tokens < warm.cached_tokens
    stats = (await serving(served))["prefix"]
    assert stats["hits"] >= 1
    assert stats["tokens_reused"] == warm.cached_tokens + other.cached_tokens


async def test_a_prefix_is_kept_for_its_session_alone(served: EngineProcess) -> None:
    request = GenerateRequest(prompt=TEXT * 20, max_tokens=4)
    cached = [
        (await complete(served.client, replace(request, session=session))).cached_tokens
        for session in ("a", "b", "", "a", "b", "")
    ]
    assert cached[:3] == [0, 0, 0]
    assert len(set(cached[3:])) == 1
    assert cached[3] > 0


async def test_the_next_turn_of_a_conversation_begins_where_the_last_ended(served: EngineProcess, dense: Path) -> None:
    tokens = [5 + n % 200 for n in range(300)]
    first = await complete(served.client, GenerateRequest(prompt_tokens=tuple(tokens), max_tokens=300, ignore_eos=True))
    turn = (*tokens, *first.tokens, 7, 8, 9)
    warm = await complete(served.client, GenerateRequest(prompt_tokens=turn, max_tokens=30, ignore_eos=True))
    cold = await complete(
        served.client, GenerateRequest(prompt_tokens=turn, max_tokens=30, ignore_eos=True, session="cold")
    )
    assert warm.cached_tokens == 2 * CHUNK  # half of the second block was generated
    assert cold.cached_tokens == 0
    assert warm.tokens == cold.tokens


async def test_kept_prefixes_give_way_to_requests(dense: Path, tmp_path: Path) -> None:
    async with engine(tmp_path / "a", "a") as process:
        await load(process, dense, kv_budget_bytes=kv_bytes(4096))
        for n in range(6):
            await complete(process.client, GenerateRequest(prompt=f"{n} " + TEXT * 20, max_tokens=2))
        kept = (await serving(process))["kv"]["kept_bytes"]
        assert 0 < kept <= kv_bytes(4096) / 4
        large = GenerateRequest(prompt="the weather", max_tokens=4000, ignore_eos=True)

        async def has_all() -> bool:
            """Whether it was looked at while it ran: it ends some time."""
            events = process.client.generate(large)
            await anext(events)
            stats = await serving(process)
            if stats["running"]:
                assert stats["kv"]["reserved_bytes"] == kv_bytes(4096)
                assert stats["kv"]["kept_bytes"] == 0
            await events.aclose()
            return bool(stats["running"])

        await until(has_all)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_drafts_change_no_token(served: EngineProcess, temperature: float) -> None:
    accepted = drafted = 0
    for n, prompt in enumerate((TEXT, CODE, CODE * 4, "ab" * 90, TEXT * 9)):
        request = GenerateRequest(prompt=prompt, max_tokens=80, temperature=temperature, top_k=3, ignore_eos=True)
        plain = await complete(served.client, replace(request, speculation="off", session=f"off{n}"))
        for mode in ("on", "auto"):
            quick = await complete(served.client, replace(request, speculation=mode, session=f"{mode}{n}"))
            assert (quick.tokens, quick.text, quick.rows) == (plain.tokens, plain.text, plain.rows)
            assert quick.decode_steps + quick.accepted_tokens >= 79
            accepted, drafted = accepted + quick.accepted_tokens, drafted + quick.drafted_tokens
        assert (plain.drafted_tokens, plain.decode_steps) == (0, 79)
        assert plain.tokens_per_step == 1
    stats = (await serving(served))["speculation"]
    assert (stats["accepted"], stats["drafted"]) == (accepted, drafted)
    assert drafted > 0
    if temperature == 0:
        assert accepted > 0  # a greedy answer of a random model repeats itself
        assert stats["tokens_per_step"] > 1


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


async def test_logprobs_are_those_of_the_logits(served: EngineProcess) -> None:
    request = GenerateRequest(prompt=TEXT, max_tokens=12, temperature=0.8, logprobs=5, trace=True, ignore_eos=True)
    events = [event async for event in served.client.generate(request)]
    *tokens, done = events
    assert isinstance(done, DoneEvent)
    assert done.trace_path is not None
    expected = log_softmax(np.load(done.trace_path))
    for row, event in zip(expected, tokens, strict=True):
        assert isinstance(event, TokenEvent)
        assert event.logprob is not None
        assert event.top is not None
        assert event.logprob.token == event.token
        assert event.logprob.logprob == pytest.approx(row[event.token], abs=1e-9)
        best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:5]
        assert [each.token for each in event.top] == best
        assert [each.logprob for each in event.top] == pytest.approx(row[best].tolist(), abs=1e-9)
    assert bytes(b for event in tokens for b in event.logprob.piece).decode("utf-8", "replace") == done.text
    plain = [event async for event in served.client.generate(replace(request, logprobs=None, trace=False))]
    assert plain[0].logprob is None
    assert [event.token for event in plain[:-1]] == [event.token for event in tokens]


def penalized(logits: np.ndarray, history: Sequence[int], repeat: float, presence: float, frequency: float) -> int:
    """Greedy choice under penalties, by the definition (llama.cpp's), token by token."""
    values = logits.astype(np.float64)
    for token in set(history):
        values[token] = values[token] / repeat if values[token] > 0 else values[token] * repeat
        values[token] -= history.count(token) * frequency + presence
    return int(values.argmax())


async def test_penalties_are_applied_to_the_last_tokens_prompt_included(served: EngineProcess) -> None:
    prompt = [10, 20, 30, 40, 50] * 10
    for repeat, presence, frequency, last_n in ((1.5, 0.0, 0.0, 64), (1.0, 0.7, 0.3, 20), (1.2, -0.5, 0.5, -1)):
        done = await complete(
            served.client,
            GenerateRequest(
                prompt_tokens=tuple(prompt),
                max_tokens=40,
                repetition_penalty=repeat,
                presence_penalty=presence,
                frequency_penalty=frequency,
                penalty_last_n=last_n,
                ignore_eos=True,
                trace=True,
            ),
        )
        assert done.trace_path is not None
        history = list(prompt)
        for row, token in zip(np.load(done.trace_path), done.tokens, strict=True):
            window = history if last_n < 0 else history[-last_n:]
            assert token == penalized(row, window, repeat, presence, frequency)
            history.append(token)


async def test_a_stop_string_ends_a_request_and_is_not_shown(served: EngineProcess) -> None:
    request = GenerateRequest(prompt=TEXT, max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    whole = await complete(served.client, request)
    stop = whole.text[20:23]
    done = await complete(served.client, replace(request, stop=(stop,)))
    assert done.finish_reason == "stop"
    assert done.text == whole.text[: whole.text.index(stop)]
    assert done.tokens == whole.tokens[: len(done.tokens)]


async def test_each_request_is_told_its_own_pairs(moe: Path, tmp_path: Path) -> None:
    """Two of four run at once over the network, two locally: pairs are counted for whoever they belong to."""
    async with engine(tmp_path / "t", "t") as trunk, engine(tmp_path / "w", "w") as worker:
        await load(trunk, moe)
        await hold(worker, moe, 1, 1, 4)
        ends = [
            Preamble(kind, "x", "w", digest_of(moe), 1, 1, 4, wires=Wire.V2) for kind in (Kind.DISPATCH, Kind.EXPERTS)
        ]
        requests = [
            replace(each, experts="network" if n % 2 else "local") for n, each in enumerate(mixture(4, tokens=30))
        ]
        alone = [await complete(trunk.client, replace(each, experts="local")) for each in requests]
        async with Splice(trunk.data_socket, ends[0], worker.data_socket, ends[1]):
            await connected(trunk, 1)
            done: list[DoneEvent] = []
            remote: list[int] = []
            most: list[int] = []

            async def two_had_pairs() -> bool:
                """On a busy machine every answer to one of them may be late."""
                asks = [replace(each, session=f"{n}-{len(remote)}") for n, each in enumerate(requests)]
                done[:] = await asyncio.gather(*(complete(trunk.client, each) for each in asks))
                remote.extend(each.pairs_remote for each in done)
                most.extend(
                    each.pairs_local + each.pairs_remote
                    for each, ask in zip(done, asks, strict=True)
                    if ask.experts == "network"
                )
                return sum(each.pairs_remote > 0 for each in done) >= 2

            await until(two_had_pairs)
            await idle(trunk)
            (coverage,) = await trunk.client.coverage()
    for request, one, other in zip(requests, alone, done, strict=True):
        assert other.tokens == one.tokens
        assert other.pairs_local + other.pairs_remote == other.rows * N_LAYER * 2 == one.pairs_local
        assert (other.pairs_remote > 0) == (request.experts == "network")
    # An answer that came after its pairs were computed here is paid, and no request's.
    late = coverage["pairs"] - sum(remote)
    assert 0 <= late <= sum(most) - sum(remote)


@pytest.mark.model
async def test_a_real_model_serves_eight_streams_as_it_serves_one(smollm2_path: Path, tmp_path: Path) -> None:
    prompts = (
        "The capital of France is",
        "Water boils at a temperature of",
        "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
        "Once upon a time, in a village by the sea, there lived",
    )
    requests = [
        GenerateRequest(
            prompt=prompts[n % 4],
            max_tokens=12,
            temperature=0.0 if n < 4 else 0.8,
            top_p=0.95,
            seed=n,
            ignore_eos=True,
            session=f"{n}",
        )
        for n in range(8)
    ]
    async with engine(tmp_path / "e", "e") as process:
        client = process.client
        await client.load(path=str(smollm2_path), model="m", role="stage", layers=[0, 30], kv_budget_bytes=2**30)
        cancelled = {1: 4, 4: 7, 7: 3}
        alone = {
            n: await complete(client, replace(each, speculation="off"))
            for n, each in enumerate(requests)
            if n not in cancelled
        }
        level = (await client.stats())["rss_bytes"]

        async def memory_is_back() -> bool:
            """Keys and values of eight streams are 94 MB; a quarter of that would be two streams'."""
            rss_bytes: int = (await client.stats())["rss_bytes"]
            return rss_bytes - level < 24 * 2**20

        async with at_once(process):
            asking = asyncio.gather(
                *(
                    take(client, each, cancelled[n]) if n in cancelled else complete(client, each)
                    for n, each in enumerate(requests)
                )
            )
        results = await asking
        after = await client.stats()
        for n, result in enumerate(results):
            if isinstance(result, DoneEvent):
                assert (result.tokens, result.text) == (alone[n].tokens, alone[n].text)
            else:
                assert len(result) == cancelled[n]
        assert after["serving"]["kv"]["reserved_bytes"] == 0
        assert max(int(size) for size in after["serving"]["batch_sizes"]) == 8
        await until(memory_is_back)

        code = replace(requests[2], prompt=prompts[2] * 3, max_tokens=40)
        plain = await complete(client, replace(code, speculation="off"))
        quick = await complete(client, replace(code, speculation="on"))
        assert quick.tokens == plain.tokens
        assert quick.tokens_per_step is not None
        assert quick.tokens_per_step > 1.3

        long = GenerateRequest(prompt="The weather station recorded wind, rain and sun. " * 30, max_tokens=8)
        cold = await complete(client, long)
        warm = await complete(client, long)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, CHUNK)
        assert warm.tokens == cold.tokens
