"""The router against real workers that lie, stall, are slow or come new: nobody is paid for a wrong answer, nobody is
waited for, and no token depends on any of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.process.client import DoneEvent, GenerateRequest
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire

import builders
from engines import (
    PATIENCE_S,
    EngineProcess,
    Splice,
    at_once,
    complete,
    connected,
    digest_of,
    engine,
    hold,
    idle,
    unhurried,
    until,
)

N_LAYER, N_EXPERT, TOP_K, N_EMBD = 2, 8, 2, 64
ALICE = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
BOB = "4zvwRjXUKGfvwnParsHAS3HuSVzV5cA4McphgmoCtajS"
PROMPT = "the inner thread of the weather in there"
LOCAL = GenerateRequest(prompt=PROMPT, max_tokens=24, experts="local", trace=True, ignore_eos=True)
NETWORK = GenerateRequest(prompt=PROMPT, max_tokens=24, trace=True, ignore_eos=True)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    return builders.write_tiny_llama(path, n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=TOP_K, seed=3)


async def load(trunk: EngineProcess, moe: Path, *, wire: str = "v2", **policy: Any) -> None:
    await trunk.client.load(
        path=str(moe),
        model="tiny",
        role="stage",
        layers=[0, N_LAYER],
        dispatch_wire=wire,
        dispatch_timeout_s=PATIENCE_S,
        dispatch_policy={"seed": 11, **policy},
        evidence_directory=str(evidence_of(trunk)),
    )


def evidence_of(trunk: EngineProcess) -> Path:
    return trunk.data_socket.parent / "evidence"


def join(
    trunk: EngineProcess,
    worker: EngineProcess,
    model: Path,
    name: str,
    *,
    wallet: str = ALICE,
    layer: int = 0,
    begin: int = 0,
    end: int = N_EXPERT,
) -> Splice:
    digest = digest_of(model)

    def preamble(kind: Kind) -> Preamble:
        return Preamble(kind, name, wallet, digest, layer, begin, end, wires=Wire.V1 | Wire.V2 | Wire.V2F16)

    return Splice(trunk.data_socket, preamble(Kind.DISPATCH), worker.data_socket, preamble(Kind.EXPERTS))


async def account(trunk: EngineProcess, name: str) -> dict[str, Any]:
    return next((each for each in await trunk.client.coverage() if each["session"] == name), {})


async def becomes(trunk: EngineProcess, name: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    async def reached() -> bool:
        return bool(holds(await account(trunk, name)))

    await until(reached)
    return await account(trunk, name)


async def works(trunk: EngineProcess, name: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Request after request, until ``holds`` of what the trunk says of a worker: one answer may always be late."""

    async def reached() -> bool:
        await complete(trunk.client, NETWORK)
        return bool(holds(await account(trunk, name)))

    await until(reached)
    return await account(trunk, name)


async def prove(trunk: EngineProcess, *names: str) -> None:
    """Work until all of them are proven."""
    for name in names:
        await works(trunk, name, lambda each: each["proven"])


def logits(done: DoneEvent) -> np.ndarray:
    assert done.trace_path is not None
    return np.load(done.trace_path)


def crooked(moe: Path, path: Path, expert: int, gain: float) -> Path:
    """The model with one expert's output scaled in layer 0; its header, and so its digest, is the same."""
    data = bytearray(moe.read_bytes())
    with Checkpoint.open(moe) as checkpoint:
        tensor = checkpoint.tensors["blk.0.ffn_down_exps.weight"]
        begin = tensor.offset
        size = tensor.n_bytes // N_EXPERT
    at = begin + expert * size
    values = np.frombuffer(data, "<f4", size // 4, at) * np.float32(gain)
    data[at : at + size] = values.astype("<f4").tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("wire", ["v2", "v2f16"])
async def test_a_newcomer_with_one_expert_off_by_five_percent_is_caught_before_it_is_paid(
    trunk: EngineProcess, moe: Path, tmp_path: Path, wire: str
) -> None:
    await load(trunk, moe, wire=wire, trial_pairs=400)
    local = await complete(trunk.client, LOCAL)
    heard: list[dict[str, Any]] = []
    trunk.client.on_event = heard.append
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, crooked(moe, tmp_path / "crooked.gguf", expert=2, gain=1.05), 0)
        async with join(trunk, one, moe, "liar"):
            await becomes(trunk, "liar", lambda each: each.get("connected"))

            async def told_apart() -> bool:
                """A newcomer whose answer is late is not looked at."""
                done = await complete(trunk.client, NETWORK)
                if wire == "v2":
                    assert done.tokens == local.tokens
                return (await account(trunk, "liar"))["quarantined"]

            await until(told_apart)
            caught = await becomes(trunk, "liar", lambda each: not each["connected"])
    assert caught["quarantined"]
    assert caught["mismatches"] == 1
    assert caught["paid_bytes"] == caught["held_bytes"] == 0
    await until(lambda: heard)
    (event,) = heard
    assert (event["event"], event["session"], event["wallet"], event["layer"]) == ("quarantined", "liar", ALICE, 0)
    assert event["voided_bytes"] == caught["voided_bytes"]
    # Anybody can see again, from what was kept, that the answer was wrong, and which expert's it was.
    facts = json.loads(Path(event["evidence"]).read_text())
    kept = np.load(Path(event["evidence"]).with_suffix(".npz"))
    assert facts["fault"] == event["fault"]
    honest = np.zeros_like(kept["answered"])
    np.add.at(honest, kept["row_idx"], kept["terms"])
    off = np.abs(kept["answered"] - honest).max(axis=1) > 2e-3 * np.abs(honest).max()
    assert off.any()
    assert all((kept["ids"][kept["row_idx"] == row] == 2).any() for row in np.flatnonzero(off))
    npz = Path(event["evidence"]).with_suffix(".npz").read_bytes()
    assert (caught["convictions"], caught["fault"], caught["evidence"]) == (1, event["fault"], event["evidence"])
    assert caught["evidence_digest"] == hashlib.sha256(npz).hexdigest()
    # It is not let in again, until its operator says so; then it has everything to prove.
    async with engine(tmp_path / "b", "b") as again:
        await hold(again, moe, 0)
        async with join(trunk, again, moe, "liar") as refused:
            await asyncio.wait_for(refused.ended(), PATIENCE_S)
            assert not (await account(trunk, "liar"))["connected"]
        assert not await trunk.client.pardon("liar", "somebody else")
        assert await trunk.client.pardon("liar", ALICE)
        assert not await trunk.client.pardon("liar", ALICE)
        async with join(trunk, again, moe, "liar"):
            back = await becomes(trunk, "liar", lambda each: each["connected"])
            assert (back["quarantined"], back["proven"], back["checked_pairs"]) == (False, False, 0)
            paid = await works(trunk, "liar", lambda each: each["checked_pairs"] > 0)
            assert (paid["voided_bytes"], paid["convictions"]) == (caught["voided_bytes"], 1)


async def test_a_proven_worker_that_begins_to_lie_in_one_value_is_caught_by_the_random_share(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    await load(trunk, moe, check_share=0.1)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0)
        async with join(trunk, one, moe, "expert-a") as joint:
            await becomes(trunk, "expert-a", lambda each: each.get("connected"))
            await prove(trunk, "expert-a")
            await idle(trunk)
            honest = await account(trunk, "expert-a")
            assert honest["paid_bytes"] > 0
            assert honest["mismatches"] == 0

            def lie(data: bytes) -> bytes:
                values = np.frombuffer(data, "<f4").copy()
                values[7::N_EMBD] += 3.0
                return values.tobytes()

            joint.tamper_left = lie
            caught = await works(trunk, "expert-a", lambda each: each["quarantined"])
    assert caught["quarantined"]
    assert caught["mismatches"] == 1
    # 1 / share pairs are expected until the first check; the seed is fixed.
    assert caught["pairs"] - honest["pairs"] < 100
    local = await complete(trunk.client, LOCAL)
    assert (await complete(trunk.client, NETWORK)).tokens == local.tokens


async def test_a_stalled_worker_is_hedged_within_the_step_and_both_are_paid(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    await load(trunk, moe, hedge_share=1.0)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one, engine(tmp_path / "b", "b") as two:
        await hold(one, moe, 0)
        await hold(two, moe, 0)
        async with join(trunk, one, moe, "expert-a"), join(trunk, two, moe, "expert-b", wallet=BOB) as slower:
            slower.delay_left_s = 0.02  # so that a is asked first
            await becomes(trunk, "expert-a", lambda each: each.get("connected"))
            await becomes(trunk, "expert-b", lambda each: each.get("connected"))
            await prove(trunk, "expert-a", "expert-b")

            async def sums() -> tuple[int, int]:
                await idle(trunk)
                a, b = [await account(trunk, name) for name in ("expert-a", "expert-b")]
                return a["pairs"], b["pairs"]

            async def a_is_asked() -> bool:
                """It may have been held up while it was measured."""
                was = await sums()
                await complete(trunk.client, NETWORK)
                now = await sums()
                return now[0] - was[0] > 4 * (now[1] - was[1])

            await until(a_is_asked)
            before = {name: await account(trunk, name) for name in ("expert-a", "expert-b")}
            os.kill(one.pid, signal.SIGSTOP)
            done = await complete(trunk.client, NETWORK)
            taken_over = await becomes(trunk, "expert-b", lambda each: each["pairs"] > before["expert-b"]["pairs"])
            stalled = await account(trunk, "expert-a")
            assert stalled["connected"]  # nobody waited until it counts as dead
            assert stalled["hedges"] > before["expert-a"]["hedges"]
            assert stalled["pairs"] == before["expert-a"]["pairs"]
            assert taken_over["connected"]
            os.kill(one.pid, signal.SIGCONT)
            # What it was asked before it stalled it answers now, in time: that is paid too.
            paid = await becomes(trunk, "expert-a", lambda each: each["pairs"] > stalled["pairs"])
            assert paid["paid_bytes"] > stalled["paid_bytes"]
            assert not paid["quarantined"]
    assert done.tokens == local.tokens
    assert np.array_equal(logits(done), logits(local))
    assert done.failovers > 0
    assert done.pairs_local + done.pairs_remote == done.rows * N_LAYER * TOP_K


async def test_without_a_replica_a_late_answer_is_computed_here(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    await load(trunk, moe)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0)
        async with join(trunk, one, moe, "expert-a"):
            await becomes(trunk, "expert-a", lambda each: each.get("connected"))
            await prove(trunk, "expert-a")
            os.kill(one.pid, signal.SIGSTOP)
            done = await complete(trunk.client, NETWORK)
            os.kill(one.pid, signal.SIGCONT)
    assert done.tokens == local.tokens
    assert np.array_equal(logits(done), logits(local))


async def test_the_worker_that_answers_sooner_is_asked(trunk: EngineProcess, moe: Path, tmp_path: Path) -> None:
    async with engine(tmp_path / "a", "a") as one, engine(tmp_path / "b", "b") as two:
        await hold(one, moe, 0)
        await hold(two, moe, 0)

        async def b_is_asked() -> bool:
            """Measured anew each time: on a busy machine b may have been held up for longer than a's delay."""
            await load(trunk, moe)
            async with join(trunk, one, moe, "expert-a") as slow, join(trunk, two, moe, "expert-b", wallet=BOB):
                slow.delay_left_s = 0.1
                await becomes(trunk, "expert-a", lambda each: each.get("connected"))
                await becomes(trunk, "expert-b", lambda each: each.get("connected"))
                await prove(trunk, "expert-a", "expert-b")
                await idle(trunk)
                before = {name: (await account(trunk, name))["pairs"] for name in ("expert-a", "expert-b")}
                await complete(trunk.client, NETWORK)
                await idle(trunk)
                after = {name: (await account(trunk, name))["pairs"] for name in ("expert-a", "expert-b")}
            return after["expert-b"] - before["expert-b"] > 4 * (after["expert-a"] - before["expert-a"])

        await until(b_is_asked)


async def test_a_quiet_trunk_keeps_its_experts_and_a_saturated_one_streams_them(
    trunk: EngineProcess, moe: Path, tmp_path: Path
) -> None:
    await load(trunk, moe, dispatch="elastic", busy_streams=3)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0)
        async with join(trunk, one, moe, "expert-a"):
            await becomes(trunk, "expert-a", lambda each: each.get("connected"))
            quiet = await complete(trunk.client, NETWORK)
            assert quiet.pairs_remote == 0

            async def streams() -> bool:
                """Whether the trunk was still saturated when it was asked, and not every answer was late."""
                async with at_once(trunk):
                    asking = asyncio.gather(*(complete(trunk.client, NETWORK) for _ in range(4)))
                busy = await asking
                assert {done.tokens for done in [quiet, *busy]} == {local.tokens}
                saturated = (await trunk.client.stats())["router"]["saturated"]
                return saturated and sum(done.pairs_remote for done in busy) > 0

            await until(streams)
            await until(lambda: everything_is_held(trunk))


async def everything_is_held(trunk: EngineProcess) -> bool:
    """Also by whoever may be asked now: not while an answer is late."""
    held: dict[str, Any] = (await trunk.client.stats())["router"]["coverage"][0]
    return held == {"layer": 0, "held": N_EXPERT, "of": N_EXPERT, "fewest": 1}


async def test_with_four_experts_a_token_the_logits_do_not_depend_on_who_computed(
    trunk: EngineProcess, tmp_path: Path
) -> None:
    path = builders.write_tiny_llama(
        tmp_path / "top4.gguf", n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=4, seed=5
    )
    await load(trunk, path, trial_pairs=0)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one, engine(tmp_path / "b", "b") as two:
        await hold(one, path, 0, 1, 4)
        await hold(two, path, 0, 3, 8)
        async with join(trunk, one, path, "expert-a", begin=1, end=4), join(trunk, two, path, "expert-b", begin=3):
            await becomes(trunk, "expert-a", lambda each: each.get("connected"))
            await becomes(trunk, "expert-b", lambda each: each.get("connected"))
            split = await unhurried(trunk, NETWORK)
        await connected(trunk, 0)
        async with join(trunk, two, path, "expert-b", begin=3):
            await becomes(trunk, "expert-b", lambda each: each["connected"])
            other = await unhurried(trunk, NETWORK)
    assert split.pairs_remote > other.pairs_remote > 0
    assert np.array_equal(logits(split), logits(local))
    assert np.array_equal(logits(other), logits(local))


async def test_the_hottest_experts_stay_here(trunk: EngineProcess, moe: Path, tmp_path: Path) -> None:
    await load(trunk, moe, trial_pairs=0, hot_experts=2)
    local = await complete(trunk.client, LOCAL)
    async with engine(tmp_path / "a", "a") as one:
        await hold(one, moe, 0)
        async with join(trunk, one, moe, "expert-a"):
            await becomes(trunk, "expert-a", lambda each: each.get("connected"))
            done = await unhurried(trunk, NETWORK)
    assert done.tokens == local.tokens
    assert 0 < done.pairs_remote < done.rows * TOP_K * 0.75 + 1


def test_the_splice_sees_whole_replies_of_small_frames() -> None:
    """The lie above changes value 7 of every row: replies of these sizes come in one piece, whole rows each."""
    assert dispatch.reply_bytes(Wire.V2, N_EMBD, 64, 128) <= 65536
