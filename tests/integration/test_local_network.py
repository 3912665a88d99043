"""The whole network on one machine: real processes over wss, from a prompt to a payment read back from the ledger."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import psutil
import pytest

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.shard import write_expert_shard
from kvasir_console.engine.checkpoint.window import stage_tensors
from kvasir_console.errors import EngineError, RequestError
from kvasir_console.local.chat import Answer, Gateway
from kvasir_console.local.network import RING_MODEL, LocalNetwork, Models
from kvasir_console.local.passage import load_models, one_pass, ready
from kvasir_console.node.holding import ExpertHolding
from kvasir_console.node.market import USER_AGENT, Market
from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import StatementView
from kvasir_console.node.worker_id import worker_id
from kvasir_console.relay.uplink import Uplink
from kvasir_console.wallet import phrase
from kvasir_console.wallet.keys import KVASIR_PATH, Key, derive

import builders
from engines import PATIENCE_S, engine, until

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

PROMPT = "the inner thread of the weather"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Random weights: a dense model for the ring and a mixture of experts, two experts a token."""
    folder = tmp_path_factory.mktemp("models")
    ring = builders.write_tiny_llama(folder / "dense.gguf", n_layer=4, seed=5)
    moe = builders.write_tiny_llama(folder / "moe.gguf", n_layer=3, n_expert=8, n_expert_used=2, seed=3)
    return load_models(ring, moe, "tiny-moe")


@pytest.fixture
async def network(tiny: Models, tmp_path: Path) -> AsyncIterator[LocalNetwork]:
    async with LocalNetwork(tiny, experts=2, port=0, directory=tmp_path / "net", say=print) as running:
        yield running


@pytest.fixture
async def gateway(network: LocalNetwork) -> AsyncIterator[Gateway]:
    async with Gateway(network) as client:
        yield client


async def test_one_pass_on_random_weights(network: LocalNetwork, gateway: Gateway, tiny: Models) -> None:
    report = await one_pass(network, gateway, tiny, PROMPT, 16, print)
    assert report["checks"] == dict.fromkeys(report["checks"], True)
    assert len(report["ring"]["tokens"]) == 16
    assert report["moe"]["identical_to_local"]
    assert report["moe"]["max_abs_logit_diff"] == 0.0
    assert report["moe"]["pairs_remote"] > 0
    ranges = {(each["layer"], *each["range"]) for each in report["experts"]}
    assert len(ranges) == 2  # different experts
    # What each stage holds, asked of its process, is its window's tensors in f32 and nothing else.
    with Checkpoint.open(tiny.ring) as checkpoint:
        shape = ModelShape.of(checkpoint)
        for stage in report["ring"]["stages"]:
            tensors = stage_tensors(checkpoint, shape, *stage["layers"])
            values = sum(_values(tensor.dims) for tensor in tensors)
            assert stage["tensor_bytes"] == 4 * values
            assert psutil.pid_exists(stage["pid"])
    rows = report["ledger"]["rows"]
    assert {row["kind"] for row in rows} == {"expert", "ring"}
    for row in rows:  # the formula, written out here: 0.01 KVR a unit, nobody's speed was measured
        worth = Fraction(row["micro_units"], 100)
        assert Fraction(row["multiplier"]) == 1
        assert row["credited_micro_kvr"] + Fraction(row["carried_micro_kvr"]) == worth
    paid = {claim["wallet"]: claim["amount"] for claim in report["ledger"]["claims"]}
    assert set(paid) == {row["wallet"] for row in rows if row["credited_micro_kvr"]}
    token_rows = 16 - 1 + (await gateway.complete(RING_MODEL, PROMPT, 1)).prompt_tokens
    assert sum(row["micro_units"] for row in rows if row["kind"] == "ring") == 1000 * token_rows


def _values(dims: tuple[int, ...]) -> int:
    count = 1
    for dim in dims:
        count *= dim
    return count


async def test_an_expert_worker_killed_with_work_in_flight_costs_no_token_and_serves_again(
    network: LocalNetwork, gateway: Gateway, tiny: Models
) -> None:
    await network.wait_ready(lambda: ready(network, gateway, tiny), "a model is not served")
    local = await gateway.complete(tiny.moe_id, PROMPT, 24, experts="local", trace=True)
    before = await remotely(gateway, tiny)
    victim = await network.snapshot(network.experts[0])
    assert victim is not None
    assert victim.engine_pid is not None
    os.kill(victim.engine_pid, signal.SIGSTOP)  # its next request stays in flight, and is late
    during = await gateway.complete(tiny.moe_id, PROMPT, 24, trace=True)
    os.kill(victim.engine_pid, signal.SIGKILL)
    assert during.kvasir["failovers"] > 0
    assert during.tokens == before.tokens == local.tokens

    async def serves_again() -> bool:
        snapshot = await network.snapshot(network.experts[0])
        again = snapshot is not None and snapshot.state.phase is Phase.SERVING
        return again and snapshot.engine_pid not in (None, victim.engine_pid) and await ready(network, gateway, tiny)

    await until(serves_again, 240)
    after = await remotely(gateway, tiny)
    assert after.tokens == local.tokens


async def remotely(gateway: Gateway, tiny: Models) -> Answer:
    """An answer of which no pair came late. A busy machine makes some late, and then it is asked again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await gateway.complete(tiny.moe_id, PROMPT, 24, trace=True)
            if answer.kvasir["pairs_remote"] > 0 and not answer.kvasir["failovers"]:
                return answer
            await asyncio.sleep(0.2)


async def test_what_the_hub_states_is_what_each_node_counted(
    network: LocalNetwork, gateway: Gateway, tiny: Models
) -> None:
    """Also after an engine was killed in the middle, which breaks its session. Pings keep bytes moving, so that two
    counts are never looked at in one moment: what is stated reaches what a node had counted before, and is never more
    than what it has counted since."""
    await network.wait_ready(lambda: ready(network, gateway, tiny), "a model is not served")
    await remotely(gateway, tiny)
    victim = await network.snapshot(network.experts[0])
    assert victim is not None
    assert victim.engine_pid is not None
    os.kill(victim.engine_pid, signal.SIGKILL)
    await network.wait_ready(lambda: ready(network, gateway, tiny), "the killed engine does not serve again")
    await remotely(gateway, tiny)
    await gateway.complete(RING_MODEL, PROMPT, 8)
    members = [*network.experts, *network.ring]

    async def views() -> list[StatementView]:
        return [snapshot.statements for member in members if (snapshot := await network.snapshot(member)) is not None]

    before = await views()
    assert len(before) == len(members)

    async def followed() -> bool:
        stated, since = await views(), await views()
        assert all(view.disputed_bytes == 0 and view.refused == "" for view in since)
        whole = len(stated) == len(since) == len(members) and all(view.sequence for view in stated)
        return whole and all(
            first.mine_bytes_up <= then.stated_bytes_up <= now.mine_bytes_up
            and first.mine_bytes_down <= then.stated_bytes_down <= now.mine_bytes_down
            and now.acknowledged >= then.sequence
            for first, then, now in zip(before, stated, since, strict=True)
        )

    await network.wait_ready(followed, "a node and the hub count differently")
    for member in network.experts:
        snapshot = await network.snapshot(member)
        assert snapshot is not None
        view = snapshot.statements
        assert view.stated_pairs is not None
        assert 0 < view.stated_pairs <= view.mine_pairs


@pytest.mark.parametrize("wire", ["v2", "v3"])
async def test_a_worker_that_swaps_experts_changes_no_token_and_earns_nothing(
    tiny: Models, tmp_path: Path, wire: str
) -> None:
    """A dishonest node: it follows the public contract but computes other experts than it was given. On v2 its first
    answer convicts it; on v3 it is refused by its greeting."""
    async with (
        LocalNetwork(tiny, experts=1, port=0, directory=tmp_path / "net", say=print) as network,
        Gateway(network) as gateway,
    ):
        await network.wait_ready(lambda: ready(network, gateway, tiny), "a model is not served")
        honest = await one_pass(network, gateway, tiny, PROMPT, 16, print)
        async with _liar(network, tiny, tmp_path / "liar", wire) as liar:
            report = await one_pass(network, gateway, tiny, PROMPT, 16, print)

            async def found_out() -> bool:
                """A newcomer whose answer is late is not looked at, so that it may take more than one request."""
                await gateway.complete(tiny.moe_id, PROMPT, 16)
                return liar.uplink.snapshot().last_close is not None

            await until(found_out)
        contributions = (await gateway.get("/api/contributions"))["contributions"]
        assert liar.holding.assignment.end - liar.holding.assignment.begin >= 2
    assert honest["moe"]["identical_to_local"]
    assert report["moe"]["identical_to_local"]
    assert report["checks"]["tokens_identical"]
    assert [row["micro_units"] for row in contributions if row["owner"] == liar.holding.wallet] in ([], [0])


class _Key:
    """Signs a participation challenge with a key of its own, as any wallet would."""

    def __init__(self) -> None:
        self.key = Key(derive(phrase.seed(phrase.generate(12)), KVASIR_PATH))

    async def prove_participation(self, host: str, wallet: str, nonce: str, message: str) -> bytes:
        return self.key.sign(message.encode())


class _liar:
    """Volunteers, downloads nothing, and serves the wrong experts of the right layer from its own file."""

    def __init__(self, network: LocalNetwork, models: Models, folder: Path, wire: str) -> None:
        self._network, self._models, self._folder, self._wire = network, models, folder, wire

    async def __aenter__(self) -> _liar:
        signer = _Key()
        wallet = signer.key.address
        self._market = Market(self._network.url, ca_file=str(self._network.certificates.authority))
        challenge = await self._market.challenge(wallet)
        signature = await signer.prove_participation("", wallet, challenge.nonce, challenge.message)
        token = (await self._market.node_token(wallet, challenge.nonce, signature, time.time())).value
        assignment = await self._market.volunteer(token, model="", max_experts=4)
        assert not isinstance(assignment, str), assignment
        holding = self.holding = ExpertHolding(assignment, worker_id(wallet, "liar"), wallet)
        self._engine = engine(self._folder, "liar")
        process = await self._engine.__aenter__()
        begin = (assignment.begin + 4) % assignment.n_expert
        wrong = self._folder / "wrong.gguf"
        with Checkpoint.open(self._models.moe) as checkpoint:
            write_expert_shard(
                checkpoint, wrong, model=assignment.model, layer=assignment.layer, begin=begin, end=begin + 4
            )
        holding.info = await process.client.load(
            path=str(wrong), model=assignment.model, role="experts", layer=assignment.layer, experts=[begin, begin + 4]
        )
        report = {"worker_id": holding.worker_id, "owner": wallet, **holding.coverage(), "wires": [self._wire]}
        assert (await self._market.report(token, report)).wired
        (session,) = holding.sessions(self._network.url)

        async def provide(*, refresh: bool) -> str:
            return token

        self.uplink = Uplink(
            session.url,
            session.name,
            provide,
            token_in_header=True,
            ssl_context=self._market.ssl_context,
            engine_socket=process.data_socket,
            preamble=replace(session.preamble, begin=begin, end=begin + 4),  # its own engine has to believe it
            user_agent=USER_AGENT,
            redial_min_s=0.2,
        )
        self._task = asyncio.create_task(self.uplink.run())
        await until(lambda: self.uplink.snapshot().connects > 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.uplink.close()
        await self._task
        await self._engine.__aexit__(None, None, None)
        await self._market.close()


async def test_a_prompt_longer_than_the_context_is_refused_with_its_size(
    network: LocalNetwork, gateway: Gateway, tiny: Models
) -> None:
    await network.wait_ready(lambda: ready(network, gateway, tiny), "a model is not served")
    for model in (RING_MODEL, tiny.moe_id):
        with pytest.raises(RequestError) as caught:
            await gateway.complete(model, "word " * 400, 8)
        assert caught.value.code == "context_length_exceeded"
        assert "512" in caught.value.message
        assert caught.value.exit_code == 6
    with pytest.raises(EngineError):
        await gateway.complete("no-such-model", "hello", 8)


async def test_nothing_is_left_running_when_the_network_ends(tiny: Models, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}  # of tests before this one
    async with LocalNetwork(tiny, experts=1, port=0, directory=tmp_path / "net", say=print):
        started = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert len(started) > 8

    def gone() -> bool:
        return not any(psutil.pid_exists(pid) and _alive(pid) for pid in started)

    await until(gone)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.model
def test_the_command_prints_the_report_and_its_text_is_the_reference(
    smollm2_path: Path, smollm2_moe_path: Path, model_cache: Path, tmp_path: Path
) -> None:
    """``kvasir-console local --headless --once --json`` as a person would run it, against transformers in f32."""
    import reference

    environment = {**os.environ, "KVASIR_HOME": str(tmp_path / "home"), "KVASIR_CACHE": str(model_cache)}
    command = [sys.executable, "-m", "kvasir_console", "local", "--headless", "--once", "--json"]
    done = subprocess.run(
        [*command, "--prompt", "The capital of France is"], env=environment, capture_output=True, timeout=800
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    report = json.loads(done.stdout)
    assert report["checks"] == dict.fromkeys(report["checks"], True)
    assert report["ring"]["text"].startswith(" Paris")
    assert len(report["ring"]["tokens"]) == 32
    prompt = report_prompt(smollm2_path)
    assert report["ring"]["tokens"] == reference.greedy(reference.reference(smollm2_path), prompt, 32)
    first, second = report["ring"]["stages"]
    assert (first["layers"], second["layers"]) == ([0, 15], [15, 30])
    moe = report["moe"]
    assert moe["pairs_expected"] == (len(prompt) + 31) * 30 * 2
    assert moe["pairs_remote"] + moe["pairs_local"] == moe["pairs_expected"]
    assert replace(load_models(smollm2_path, smollm2_moe_path, "m"), moe_id=moe["model"]).ring_layers == 30


def report_prompt(path: Path) -> list[int]:
    from kvasir_console.engine.tokens import Tokenizer

    with Checkpoint.open(path) as checkpoint:
        return Tokenizer.from_metadata(checkpoint.metadata).encode("The capital of France is")
