"""Trunk and workers as real processes: dispatched experts give local tokens, tampering shows, a kill costs nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir_console.engine.process.client import GenerateRequest
from kvasir_console.errors import EngineError, KvasirError, RequestError
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire

import builders
from engines import (
    PATIENCE_S,
    EngineProcess,
    Splice,
    complete,
    connected,
    digest_of,
    engine,
    expert_slice,
    hold,
    idle,
    unhurried,
    until,
)

N_LAYER, N_EXPERT, TOP_K, N_EMBD = 2, 4, 2, 64
WALLET = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
PROMPT = "the inner thread of the weather in there"
LOCAL = GenerateRequest(prompt=PROMPT, max_tokens=16, experts="local", trace=True)
NETWORK = GenerateRequest(prompt=PROMPT, max_tokens=16, experts="network", trace=True)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    return builders.write_tiny_llama(path, n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=TOP_K, seed=3)


@pytest.fixture
async def trunk(moe: Path, tmp_path: Path) -> AsyncIterator[EngineProcess]:
    async with engine(tmp_path / "trunk", "trunk") as process:
        await load(process, moe)
        yield process


async def load(process: EngineProcess, moe: Path, **policy: Any) -> None:
    fields = {"path": str(moe), "model": "tiny", "role": "stage", "layers": [0, N_LAYER]}
    await process.client.load(**fields, dispatch_timeout_s=PATIENCE_S, dispatch_policy={"seed": 11, **policy})


def session(moe: Path, name: str, layer: int, begin: int, end: int, kind: Kind = Kind.DISPATCH) -> Preamble:
    wires = Wire.V1 | Wire.V2 | Wire.V2F16
    return Preamble(kind, name, WALLET, digest_of(moe), layer, begin, end, wires=wires)


def splice(
    trunk: EngineProcess, worker: EngineProcess, moe: Path, name: str, layer: int, begin: int, end: int
) -> Splice:
    return Splice(
        trunk.data_socket,
        session(moe, name, layer, begin, end),
        worker.data_socket,
        session(moe, name, layer, begin, end, Kind.EXPERTS),
    )


def logits(path: str | None) -> np.ndarray:
    assert path is not None
    return np.load(path)


async def test_dispatched_experts_give_the_local_tokens_and_every_pair_is_counted(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one, engine(tmp_path / "b", "b") as two:
        await hold(one, moe, 0, 0, 2)
        await hold(two, moe, 1, 2, 4)
        async with splice(trunk, one, moe, "expert-a", 0, 0, 2), splice(trunk, two, moe, "expert-b", 1, 2, 4):
            await connected(trunk, 2)
            remote = await unhurried(trunk, NETWORK)
            coverage = {each["session"]: each for each in await trunk.client.coverage()}
        served = [(await each.client.stats())["served"] for each in (one, two)]
    assert remote.tokens == local.tokens
    assert len(remote.tokens) == 16
    # Two experts a token: regrouping their sum by holder is exact, so the logits are too.
    assert np.array_equal(logits(remote.trace_path), logits(local.trace_path))
    assert remote.pairs_remote > 0
    assert remote.pairs_local + remote.pairs_remote == remote.rows * N_LAYER * TOP_K
    assert local.pairs_remote == 0
    assert local.pairs_local == local.rows * N_LAYER * TOP_K
    # An answer that comes after its pairs were computed here too is counted for its worker, not for the request.
    # Nothing is counted that was not computed.
    assert remote.pairs_remote <= sum(each["pairs"] for each in coverage.values())
    assert all(
        computed["pairs"] >= coverage[name]["pairs"] > 0
        for computed, name in zip(served, ("expert-a", "expert-b"), strict=True)
    )
    for each in coverage.values():
        assert each["checked_pairs"] > 0
        # The pay of a slice's first pairs is held until enough of them were found right.
        assert each["paid_bytes"] + each["held_bytes"] == 2 * N_EMBD * each["rows"] + 10 * each["pairs"]
        assert bool(each["paid_bytes"]) == each["proven"] == (each["held_bytes"] == 0)


def shift_ids(data: bytes) -> bytes:
    """A v2 request in which every expert id is the next one (of two)."""
    marker, n_rows, n_pairs = struct.unpack_from("<iii", data)
    assert marker == -2
    at = 12 + 4 * N_EMBD * n_rows + 4 * n_pairs
    ids = (np.frombuffer(data, "<i4", n_pairs, at) + 1) % 2
    return data[:at] + ids.astype("<i4").tobytes() + data[at + 4 * n_pairs :]


async def test_ids_shifted_on_the_wire_are_seen(trunk: EngineProcess, moe: Path, tmp_path: Path) -> None:
    await load(trunk, moe, trial_pairs=0, check_share=0.0)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0, 0, 2)
        async with splice(trunk, one, moe, "expert-a", 0, 0, 2) as joint:
            joint.tamper = shift_ids
            await connected(trunk, 1)
            remote = await unhurried(trunk, NETWORK)
    assert remote.pairs_remote > 0
    assert remote.tokens != local.tokens
    assert np.abs(logits(remote.trace_path)[0] - logits(local.trace_path)[0]).max() > 1e-3


async def test_swapped_experts_are_seen(trunk: EngineProcess, moe: Path, tmp_path: Path) -> None:
    """A worker that serves experts 2 and 3 under the name of 0 and 1."""
    await load(trunk, moe, trial_pairs=0, check_share=0.0)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0, 2, 4)
        promised, held = session(moe, "expert-a", 0, 0, 2), session(moe, "expert-a", 0, 2, 4, Kind.EXPERTS)
        async with Splice(trunk.data_socket, promised, one.data_socket, held):
            await connected(trunk, 1)
            remote = await unhurried(trunk, NETWORK)
    assert remote.pairs_remote > 0
    assert remote.tokens != local.tokens


@pytest.mark.parametrize("wire", ["v1", "v2f16"])
async def test_the_other_wires_carry_the_same_computation(moe: Path, tmp_path: Path, wire: str) -> None:
    async with engine(tmp_path / "trunk", "trunk") as trunk, engine(tmp_path / "a", "a") as one:
        fields = {"path": str(moe), "model": "tiny", "role": "stage", "layers": [0, N_LAYER]}
        await trunk.client.load(**fields, dispatch_wire=wire, dispatch_timeout_s=PATIENCE_S)
        await hold(one, moe, 0, 0, 4)
        local = await complete(trunk.client, LOCAL)
        async with splice(trunk, one, moe, "expert-a", 0, 0, 4):
            await connected(trunk, 1)
            remote = await unhurried(trunk, NETWORK)
            (coverage,) = await trunk.client.coverage()
    a, b = (logits(done.trace_path)[0].astype(np.float64) for done in (remote, local))
    cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert coverage["wire"] == wire
    assert remote.pairs_remote == remote.pairs_local == remote.rows * TOP_K  # all of layer 0, of two
    assert cosine > (0.99999 if wire == "v2f16" else 0.9999999)


async def test_a_worker_killed_with_work_in_flight_changes_no_token(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0, 0, 4)
        async with splice(trunk, one, moe, "expert-a", 0, 0, 4):
            await connected(trunk, 1)
            await unhurried(trunk, NETWORK)
            await idle(trunk)
            pairs_before = (await trunk.client.coverage())[0]["pairs"]
            os.kill(one.pid, signal.SIGSTOP)
            running = asyncio.create_task(complete(trunk.client, NETWORK))

            async def in_flight() -> bool:
                return (await trunk.client.coverage())[0]["in_flight"] > 0

            await until(in_flight)
            os.kill(one.pid, signal.SIGKILL)
            done = await running
            await connected(trunk, 0)
            (coverage,) = await trunk.client.coverage()
    assert pairs_before > 0
    assert done.failovers > 0
    assert done.tokens == local.tokens
    assert done.finish_reason == "length"
    assert done.pairs_local + done.pairs_remote == done.rows * N_LAYER * TOP_K
    assert coverage["pairs"] == pairs_before  # what was never answered is never paid
    assert coverage["in_flight"] == 0
    assert coverage["failures"] == 1
    assert not coverage["connected"]


async def test_a_replica_takes_over_what_a_dead_worker_held(trunk: EngineProcess, moe: Path, tmp_path: Path) -> None:
    await load(trunk, moe, trial_pairs=0)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one, engine(tmp_path / "b", "b") as two:
        await hold(one, moe, 0, 0, 4)
        await hold(two, moe, 0, 0, 4)
        async with splice(trunk, one, moe, "expert-a", 0, 0, 4), splice(trunk, two, moe, "expert-b", 0, 0, 4):
            await connected(trunk, 2)
            os.kill(one.pid, signal.SIGSTOP)
            running = asyncio.create_task(complete(trunk.client, NETWORK))

            async def in_flight() -> bool:
                asked = {each["session"]: each["in_flight"] for each in await trunk.client.coverage()}
                return asked["expert-a"] > 0

            await until(in_flight)
            os.kill(one.pid, signal.SIGKILL)
            done = await running
            after = await unhurried(trunk, NETWORK)
    assert done.tokens == after.tokens == local.tokens
    assert done.failovers > 0
    assert after.pairs_remote == after.rows * TOP_K  # layer 0 stayed remote
    assert done.pairs_local + done.pairs_remote == done.rows * N_LAYER * TOP_K


async def test_a_session_for_another_model_or_range_is_refused(trunk: EngineProcess, moe: Path) -> None:
    for preamble in (
        session(moe, "wrong-range", 0, 2, 9),
        session(moe, "wrong-layer", 7, 0, 2),
        Preamble(Kind.DISPATCH, "wrong-model", WALLET, bytes(32), 0, 0, 2),
    ):
        reader, writer = await asyncio.open_unix_connection(str(trunk.data_socket))
        writer.write(preamble.encode())
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()
    assert await trunk.client.coverage() == []


async def test_bytes_nobody_asked_for_end_the_session_and_earn_nothing(trunk: EngineProcess, moe: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(str(trunk.data_socket))
    writer.write(session(moe, "pushy", 0, 0, 2).encode() + b"x" * 4096)
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    (coverage,) = await trunk.client.coverage()
    assert coverage["paid_bytes"] == 0


async def test_quarantine_ends_a_session_and_refuses_it_from_then_on(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0, 0, 2)
        async with splice(trunk, one, moe, "expert-a", 0, 0, 2):
            await connected(trunk, 1)
            assert (await trunk.client.call("quarantine", session="expert-a"))["quarantined"]
            await connected(trunk, 0)
        reader, writer = await asyncio.open_unix_connection(str(trunk.data_socket))
        writer.write(session(moe, "expert-a", 0, 0, 2).encode())
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()


async def test_a_prompt_longer_than_the_context_is_refused_before_any_work(trunk: EngineProcess) -> None:
    with pytest.raises(RequestError) as caught:
        await complete(trunk.client, GenerateRequest(prompt="a" * 600, max_tokens=16))
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message
    assert (await trunk.client.stats())["active_requests"] == 0


async def test_closing_a_generation_early_cancels_it(trunk: EngineProcess) -> None:
    events = trunk.client.generate(GenerateRequest(prompt=PROMPT, max_tokens=400))
    await anext(events)
    await events.aclose()
    assert (await trunk.client.stats())["active_requests"] == 0


async def test_one_engine_serves_experts_of_several_layers_and_counts_who_was_chosen(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    """Two slices in one process. The trunk's counts of a local pass, in which nobody had a part, are the measure."""
    local = await complete(trunk.client, LOCAL)
    before = (await trunk.client.stats(experts=True))["experts"]
    assert [sum(each["pairs"]) for each in before] == [local.rows * TOP_K] * N_LAYER
    assert all(each["pairs_remote"] == [0] * N_EXPERT for each in before)
    assert (await trunk.client.stats())["experts"] is None  # many numbers, so only on demand
    async with engine(tmp_path / "a", "a") as one:
        slices = [expert_slice(one, moe, *window) for window in ((0, 0, 2), (1, 1, 4))]
        info = await one.client.load(model="tiny", role="experts", slices=slices)
        assert [(each["layer"], each["experts"]) for each in info["slices"]] == [(0, [0, 2]), (1, [1, 4])]
        assert info["tensor_bytes"] == sum(each["tensor_bytes"] for each in info["slices"])
        # The second session asks for a part of the second slice.
        async with splice(trunk, one, moe, "expert-a", 0, 0, 2), splice(trunk, one, moe, "expert-b", 1, 2, 4):
            await connected(trunk, 2)
            async with asyncio.timeout(PATIENCE_S):
                for tries in itertools.count(1):  # noqa: B007 - a busy machine may make every answer late
                    begun = (await trunk.client.stats(experts=True))["experts"]
                    remote = await complete(trunk.client, NETWORK)
                    if remote.pairs_remote:
                        break
            after = (await trunk.client.stats(experts=True))["experts"]
            worker_counts = (await one.client.stats())["experts"]
    assert remote.tokens == local.tokens
    assert np.array_equal(logits(remote.trace_path), logits(local.trace_path))
    assert remote.pairs_remote > 0
    for alone, was, now in zip(before, begun, after, strict=True):
        here, there = (np.array(now[each]) - np.array(was[each]) for each in ("pairs", "pairs_remote"))
        assert (here + there).tolist() == alone["pairs"]
    assert [(each["layer"], each["begin"], each["end"]) for each in worker_counts] == [(0, 0, 2), (1, 1, 4)]
    for counts, was, now in zip(worker_counts, before, after, strict=True):
        offered = slice(counts["begin"], counts["end"])
        used, most = now["pairs_remote"][offered], [tries * pairs for pairs in was["pairs"][offered]]
        # On a busy machine an answer may be late: its pairs were computed there and are not counted as remote.
        assert all(low <= there <= high for low, there, high in zip(used, counts["pairs"], most, strict=True))
    assert after[1]["pairs_remote"][1] == 0  # held, but not offered to this trunk
    assert after[0]["pairs_remote"][2:] == [0, 0]


@pytest.mark.parametrize(("layer", "begin", "end"), [(0, 0, 3), (0, 1, 2), (1, 0, 2)], ids=["wide", "part", "layer"])
async def test_a_session_for_experts_that_are_not_held_is_not_served(
    moe: Path, tmp_path: Path, layer: int, begin: int, end: int
) -> None:
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0, 0, 2)
        reader, writer = await asyncio.open_unix_connection(str(one.data_socket))
        writer.write(session(moe, "x", layer, begin, end, Kind.EXPERTS).encode())
        served = (layer, begin) == (0, 1)
        async with asyncio.timeout(PATIENCE_S):
            if served:
                writer.write(struct.pack("<iii", -2, -1, 1))  # a request that is refused says that somebody read it
            assert await reader.read(1) == b""
        assert (await one.client.stats())["served"]["rejected"] == int(served)
        writer.close()


async def test_a_slice_that_is_not_there_loads_nothing(moe: Path, tmp_path: Path) -> None:
    async with engine(tmp_path / "a", "a") as one:
        slices = [{"layer": 0, "experts": [0, 2]}, {"layer": 1, "experts": [2, 5]}]
        with pytest.raises(KvasirError):
            await one.client.load(path=str(moe), model="tiny", role="experts", slices=slices)
        assert (await one.client.stats())["tensor_bytes"] == 0
        with pytest.raises(EngineError) as refusal:
            await one.client.load(path=str(moe), model="tiny", role="experts", slices=slices[:1] * 65)
        assert refusal.value.code == "too_many_slices"
        info = await one.client.load(path=str(moe), model="tiny", role="experts", slices=slices[:1] * 2)
        assert len(info["slices"]) == 2
