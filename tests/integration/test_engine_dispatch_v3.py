"""Version 3 between real processes: slices of two layers on one session, every dtype measured on real logits, greeting
checks and draining."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir_console.engine.process.client import DoneEvent, GenerateRequest
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
    unhurried,
    until,
)

N_LAYER, N_EXPERT, TOP_K, N_EMBD = 2, 4, 2, 64
WALLET = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
PROMPT = "the inner thread of the weather in there"
LOCAL = GenerateRequest(prompt=PROMPT, max_tokens=16, experts="local", trace=True, ignore_eos=True)
NETWORK = GenerateRequest(prompt=PROMPT, max_tokens=16, experts="network", trace=True, ignore_eos=True)
ALL = [(layer, 0, N_EXPERT) for layer in range(N_LAYER)]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    return builders.write_tiny_llama(path, n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=TOP_K, seed=3)


async def load(trunk: EngineProcess, moe: Path, dtype: str = "f32") -> None:
    await trunk.client.load(
        path=str(moe),
        model="tiny",
        role="stage",
        layers=[0, N_LAYER],
        dispatch_wire="v3",
        dispatch_dtype=dtype,
        dispatch_timeout_s=PATIENCE_S,
    )


async def hold(process: EngineProcess, model: Path, windows: list[tuple[int, int, int]] = ALL) -> dict[str, Any]:
    slices = [expert_slice(process, model, *window) for window in windows]
    return await process.client.load(model="tiny", role="experts", slices=slices)


def join(
    trunk: EngineProcess,
    worker: EngineProcess,
    moe: Path,
    windows: list[tuple[int, int, int]] = ALL,
    name: str = "a",
    held: list[tuple[int, int, int]] | None = None,
) -> Splice:
    """Splice a session that the hub admitted with ``windows`` to a worker whose node says it is for ``held``."""
    digest = digest_of(moe)
    ends = [
        Preamble(kind, f"expert-{name}", WALLET, digest, *of[0], wires=Wire.V2 | Wire.V3, more=tuple(of[1:]))
        for kind, of in ((Kind.DISPATCH, windows), (Kind.EXPERTS, held or windows))
    ]
    return Splice(trunk.data_socket, ends[0], worker.data_socket, ends[1])


def first_logits(done: DoneEvent) -> np.ndarray:
    assert done.trace_path is not None
    return np.load(done.trace_path)[0].astype(np.float64)


def divergence(reference: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """KL(reference || other) of the next-token distributions, nats, and the cosine of the logits."""
    p, q = (logits - logits.max() for logits in (reference, other))
    log_p, log_q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    cosine = float(reference @ other / np.linalg.norm(reference) / np.linalg.norm(other))
    return float((np.exp(log_p) * (log_p - log_q)).sum()), cosine


@pytest.mark.parametrize(
    ("dtype", "kl", "cosine"),
    [("f32", 0.0, 1.0), ("f16", 1e-6, 0.999999), ("bf16", 1e-4, 0.9999), ("int8", 1e-3, 0.999)],
)
async def test_slices_of_two_layers_on_one_session_compute_what_the_trunk_would(
    trunk: EngineProcess, moe: Path, tmp_path: Path, dtype: str, kl: float, cosine: float
) -> None:
    await load(trunk, moe, dtype)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        info = await hold(one, moe)
        async with join(trunk, one, moe):
            await connected(trunk, N_LAYER)
            remote = await unhurried(trunk, NETWORK)
            coverage = await trunk.client.coverage()
    assert [(each["layer"], *each["experts"]) for each in info["slices"]] == ALL
    assert remote.pairs_remote == remote.rows * N_LAYER * TOP_K
    assert remote.pairs_local == 0
    got_kl, got_cosine = divergence(first_logits(local), first_logits(remote))
    print(f"\n{dtype}: KL {got_kl:.3g} nats, cosine {got_cosine:.9f}")
    if dtype == "f32":
        assert remote.tokens == local.tokens
        assert np.array_equal(np.load(str(remote.trace_path)), np.load(str(local.trace_path)))
    else:
        assert 0 < got_kl <= kl
        assert got_cosine >= cosine
    for each, held in zip(coverage, info["slices"], strict=True):
        assert (each["wire"], each["dtype"], each["shard_digest"]) == ("v3", dtype, held["shard_digest"])
        assert each["paid_bytes"] + each["held_bytes"] == 2 * N_EMBD * each["rows"] + 10 * each["pairs"] > 0
        assert each["ping_ms"] > 0


def replayed(data: bytes) -> bytes:
    return data + data


def pushed(data: bytes) -> bytes:
    return data + struct.pack("<IBBHQ", 8 + 4 * N_EMBD, 3, 0, 0, 10**6) + bytes(8 + 4 * N_EMBD)


def unasked_error(data: bytes) -> bytes:
    return data + struct.pack("<IBBHQH", 2, 4, 0, 0, 10**6, 7)


@pytest.mark.parametrize("tamper", [replayed, pushed, unasked_error])
async def test_what_nobody_asked_for_ends_the_session_and_earns_nothing(
    trunk: EngineProcess, moe: Path, tmp_path: Path, tamper: Callable[[bytes], bytes]
) -> None:
    await load(trunk, moe)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe)
        async with join(trunk, one, moe) as joint:
            await connected(trunk, N_LAYER)
            first = await unhurried(trunk, NETWORK)
            joint.tamper_left = tamper
            done = await complete(trunk.client, NETWORK)
            await connected(trunk, 0)
            coverage = await trunk.client.coverage()
        served = (await one.client.stats())["served"]
    assert done.tokens == local.tokens
    assert done.pairs_remote < first.pairs_remote
    # What came late, or for a request before these, is counted too; what was never computed is not.
    assert first.pairs_remote + done.pairs_remote <= sum(each["pairs"] for each in coverage) <= served["pairs"]
    for each in coverage:
        assert each["paid_bytes"] == 2 * N_EMBD * each["rows"] + 10 * each["pairs"]


@pytest.mark.parametrize("how", ["other experts", "other bytes"])
async def test_a_worker_that_holds_something_else_is_refused_before_it_is_asked(
    trunk: EngineProcess, moe: Path, tmp_path: Path, how: str
) -> None:
    await load(trunk, moe)
    other = moe
    if how == "other bytes":  # the same model by its header, other weights
        other = builders.write_tiny_llama(
            tmp_path / "other.gguf", n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=TOP_K, seed=4
        )
    held = (0, 2, 4) if how == "other experts" else (0, 0, 2)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, other, [held])
        async with join(trunk, one, moe, [(0, 0, 2)], held=[held]) as joint:
            await asyncio.wait_for(joint.ended(), PATIENCE_S)
        coverage = await trunk.client.coverage()
        done = await complete(trunk.client, NETWORK)
    assert coverage == []
    assert done.pairs_remote == 0


async def test_a_drained_worker_leaves_without_a_failure(trunk: EngineProcess, moe: Path, tmp_path: Path) -> None:
    await load(trunk, moe)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one, engine(tmp_path / "b", "b") as two:
        await hold(one, moe)
        await hold(two, moe)
        async with join(trunk, one, moe, name="a"), join(trunk, two, moe, name="b"):
            await connected(trunk, 2 * N_LAYER)
            running = asyncio.create_task(complete(trunk.client, NETWORK))

            async def busy() -> bool:
                return any(each["pairs"] for each in await trunk.client.coverage() if each["session"] == "expert-a")

            await until(busy)
            assert (await one.client.call("drain", timeout_s=PATIENCE_S))["drained"]
            await connected(trunk, N_LAYER)
            done = await running
            after = await unhurried(trunk, NETWORK)
            coverage = await trunk.client.coverage()
    assert done.tokens == after.tokens == local.tokens
    assert all(each["failures"] == 0 for each in coverage)
    assert after.pairs_remote == after.rows * N_LAYER * TOP_K


async def test_a_stopped_worker_costs_no_token_and_is_given_up_by_its_silence(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    await load(trunk, moe)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe)
        async with join(trunk, one, moe):
            await connected(trunk, N_LAYER)
            await complete(trunk.client, NETWORK)
            os.kill(one.pid, signal.SIGSTOP)
            try:
                await connected(trunk, 0)  # nobody asks it for anything: a PING finds out
                done = await complete(trunk.client, NETWORK)
            finally:
                os.kill(one.pid, signal.SIGCONT)
    assert done.tokens == local.tokens
