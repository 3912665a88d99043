"""A whole node with its real children, against a small gateway on loopback that needs no more experts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from nacl.signing import SigningKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvasir_console.config import Config, NetworkConfig, NodeConfig, WalletConfig
from kvasir_console.errors import LedgerError, NetworkError, WalletError
from kvasir_console.node.holding import ExpertHolding, RingHolding
from kvasir_console.node.hubpin import HubPin
from kvasir_console.node.market import Assignment
from kvasir_console.node.node import Node
from kvasir_console.node.phase import Phase
from kvasir_console.node.placement.plan import Plan, PlannedStage, sign_plan
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.paths import Paths
from kvasir_console.relay.wire.signed import bridge_challenge_text, check_node_token, mint_node_token
from kvasir_console.relay.wire.statement import Rotation
from kvasir_console.wallet import commands
from kvasir_console.wallet.keys import encode_address, verify

SECRET, PASSPHRASE = "a gateway's secret", "correct horse battery"


class Gateway:
    """The participation routes of the contract; ``extensions`` is what ``/api/config`` adds."""

    def __init__(self) -> None:
        self.extensions: dict[str, Any] = {}
        self.revoked: set[str] = set()
        self.minted: list[str] = []
        self.reports: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []
        self.url = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/api/config", self.config),
                Route("/api/auth/challenge", self.challenge, methods=["POST"]),
                Route("/api/auth/node-token", self.token, methods=["POST"]),
                Route("/api/expert-demand", self.demand),
                Route("/api/expert-volunteer", self.volunteer, methods=["POST"]),
                Route("/api/expert-coverage", self.coverage, methods=["POST"]),
                Route("/api/placement", self.placement),
                Route("/api/node/status/{wallet}", self.status),
                Route("/api/node/claims/{wallet}", self.claims),
            ]
        )

    def _admitted(self, request: Request) -> bool:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        return token not in self.revoked and bool(check_node_token(SECRET, token, time.time()))

    async def config(self, _: Request) -> JSONResponse:
        return JSONResponse({"mint": "M", "minimumClaimMicroKvr": 1, **self.extensions})

    async def challenge(self, request: Request) -> JSONResponse:
        wallet = (await request.json())["wallet"]
        return JSONResponse({"nonce": "0" * 32, "message": bridge_challenge_text(wallet, "0" * 32)})

    async def token(self, request: Request) -> JSONResponse:
        body = await request.json()
        text = bridge_challenge_text(body["wallet"], body["nonce"]).encode()
        if not verify(body["wallet"], text, base64.b64decode(body["signature"])):
            return JSONResponse({"error": "bad signature"}, 401)
        self.minted.append(mint_node_token(SECRET, body["wallet"], int(time.time()) + 3600 + len(self.minted)))
        return JSONResponse({"node_token": self.minted[-1], "wallet": body["wallet"], "expires_in": 3600})

    async def demand(self, request: Request) -> JSONResponse:
        return JSONResponse({"models": []}) if self._admitted(request) else JSONResponse({"error": "revoked"}, 401)

    async def volunteer(self, request: Request) -> JSONResponse:
        self.asked.append(await request.json())
        return JSONResponse({"assigned": False, "reason": "Every slice has its replicas."})

    async def coverage(self, request: Request) -> JSONResponse:
        self.reports.append(await request.json())
        return JSONResponse({"ok": True, "workers": 1, "wired": False})

    async def placement(self, _: Request) -> JSONResponse:
        return JSONResponse({"plans": self.plans})

    async def status(self, _: Request) -> JSONResponse:
        return JSONResponse({"totals": {"pendingMicroKvr": 0, "microUnits": 0}})

    async def claims(self, _: Request) -> JSONResponse:
        return JSONResponse({"claims": []})


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gate = Gateway()
    server = uvicorn.Server(uvicorn.Config(gate.app(), port=0, log_config=None, lifespan="off", timeout_keep_alive=600))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    gate.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield gate
    server.should_exit = True
    await task


@pytest.fixture
def paths() -> Paths:
    found = Paths.from_environment().ensure()
    commands.create_wallet(found, PASSPHRASE, kdf="interactive")
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - other processes set no event of ours
            await asyncio.sleep(0.01)


class Running:
    def __init__(self, gateway: Gateway, paths: Paths, **node: Any) -> None:
        settings = NodeConfig(**{"name": "Test Box", "poll_s": 60.0, "retry_s": 60.0, **node})
        config = Config(
            network=NetworkConfig(gateway=gateway.url), node=settings, wallet=WalletConfig(rpc_url="http://127.0.0.1:1")
        )
        self.node = Node(config, paths)
        self.phases: list[Phase] = []
        self.node.listen(lambda snapshot: self.phases.append(snapshot.state.phase))

    @contextlib.asynccontextmanager
    async def up(self, passphrase: str | None = None) -> AsyncIterator[Node]:
        task = asyncio.create_task(self.node.run(passphrase))
        try:
            yield self.node
        finally:
            self.node.stop()
            await task

    def phase(self) -> Phase:
        return self.node.snapshot().state.phase


def alive(pid: int | None) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid or 0, 0)
        return True
    return False


async def test_a_locked_node_waits_and_goes_on_at_once_when_it_is_unlocked(gateway, paths):
    running = Running(gateway, paths)
    async with running.up() as node:
        await until(lambda: running.phase() is Phase.LOCKED)
        locked = node.snapshot()
        assert locked.wallet_locked
        assert "nlock" in locked.state.next_action
        assert gateway.minted == []
        await node.unlock(PASSPHRASE)  # every pause is a minute long: only the unlock can wake it
        await until(lambda: running.phase() is Phase.VOLUNTEERING and gateway.reports)
        snapshot = node.snapshot()
        assert not snapshot.wallet_locked
        assert snapshot.state.why == "Every slice has its replicas."
        assert snapshot.worker_id == f"server-{node.wallet[:8]}-test-box"
        assert NodeSnapshot.from_json(snapshot.to_json()) == snapshot
        assert check_node_token(SECRET, gateway.minted[0], time.time()) == node.wallet
        await until(lambda: node.snapshot().engine_pid)
        engine = node.snapshot().engine_pid
    assert running.phase() is Phase.STOPPED
    assert running.phases == [
        Phase.AUTHENTICATING,
        Phase.LOCKED,
        Phase.AUTHENTICATING,
        Phase.VOLUNTEERING,
        Phase.DRAINING,
        Phase.STOPPED,
    ]
    assert not alive(engine)
    assert not (paths.runtime / "signer.sock").exists()
    (report,) = gateway.reports
    assert report["worker_id"] == f"server-{node.wallet[:8]}-test-box"
    assert (report["segments"], report["owner"], report["os"]) == ([], node.wallet, report["os"].lower())
    assert "wires" not in report
    assert gateway.asked == [{"max_experts": 64}]


async def test_a_kept_token_serves_a_locked_node_until_it_is_revoked(gateway, paths):
    first = Running(gateway, paths)
    async with first.up(PASSPHRASE):
        await until(lambda: first.phase() is Phase.VOLUNTEERING)
    second = Running(gateway, paths)
    async with second.up():
        await until(lambda: second.phase() is Phase.VOLUNTEERING)
    assert len(gateway.minted) == 1
    gateway.revoked.add(gateway.minted[0])
    third = Running(gateway, paths)
    async with third.up(PASSPHRASE):
        await until(lambda: third.phase() is Phase.VOLUNTEERING)
    assert len(gateway.minted) == 2


async def test_a_wrong_passphrase_ends_the_run_before_anything_is_served(gateway, paths):
    running = Running(gateway, paths)
    with pytest.raises(WalletError) as caught:
        await running.node.run("not the passphrase")
    assert caught.value.code == "wrong_passphrase"
    assert running.phases == []
    assert not (paths.runtime / "signer.sock").exists()


async def test_a_gateway_that_is_gone_is_named_with_the_next_step(gateway, paths):
    gateway.url = "http://127.0.0.1:1"
    running = Running(gateway, paths)
    async with running.up(PASSPHRASE) as node:
        await until(lambda: running.phase() is Phase.FAILED)
        state = node.snapshot().state
        assert "http://127.0.0.1:1 cannot be reached" in state.why
        assert "network.gateway" in state.next_action


async def test_a_node_told_to_serve_nothing_asks_for_nothing(gateway, paths):
    running = Running(gateway, paths, serve="nothing")
    async with running.up(PASSPHRASE) as node:
        await until(lambda: "serve nothing" in node.snapshot().state.why)
        with pytest.raises(LedgerError):
            await node.verbs()["claim"]({})
        snapshot = (await node.verbs()["status"]({}))["snapshot"]
        assert snapshot["wallet"] == node.wallet
    assert gateway.minted == []


def planned(node: Node, hub: SigningKey) -> tuple[Plan, dict[str, Any]]:
    """A plan that gives the node's wallet a window, and as its hub signs it."""
    plan = Plan("r", "r", "cd" * 32, 3, 4, (PlannedStage(0, node.wallet, 0, 3),))
    return plan, sign_plan(plan, lambda text: bytes(hub.sign(text).signature))


def announced(hub: SigningKey, *rotations: Rotation) -> dict[str, Any]:
    listed = [{"text": each.text(), "signature": base64.b64encode(each.signature).decode()} for each in rotations]
    key = encode_address(bytes(hub.verify_key))
    return {"extensions": {"placement": 1, "hub_key": key, "hub_key_rotations": listed}}


async def engine_is_up(node: Node) -> None:
    node._loaded = await node._engine.connected()


HUB, NEXT = SigningKey(b"\x01" * 32), SigningKey(b"\x02" * 32)


@pytest.fixture
def no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node claims nothing by itself: the test does one step of it."""

    async def stay(_: Node) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Node, "_walk", stay)


@pytest.mark.usefixtures("no_walk")
async def test_a_node_that_serves_experts_does_what_a_plan_says_once_one_names_its_wallet(gateway, paths):
    gateway.extensions = announced(HUB)
    running = Running(gateway, paths)
    async with running.up(PASSPHRASE) as node:
        await engine_is_up(node)
        await node._learn()
        holding = ExpertHolding(Assignment("moe", 1, 0, 8, 64, 3, 8), node.worker_id, node.wallet)
        node._holding = holding
        _, signed = planned(node, HUB)
        gateway.plans = [signed]
        with pytest.raises(NetworkError) as caught:
            async with asyncio.timeout(120):
                await node._serve(holding, node._info)
        assert caught.value.code == "plan_changed"
        assert node._holding is None
        assert [report["model"] for report in gateway.reports] == ["moe"]


@pytest.mark.usefixtures("no_walk")
async def test_a_stage_follows_the_plans_of_a_hub_whose_key_was_exchanged(gateway, paths):
    gateway.extensions = announced(HUB)
    running = Running(gateway, paths)
    async with running.up(PASSPHRASE) as node:
        await engine_is_up(node)
        await node._learn()
        plan, signed = planned(node, NEXT)
        node._holding = holding = RingHolding(plan, node.wallet, 64)
        session = holding.sessions(gateway.url)[0]
        node._sessions._uplinks[node._sessions._uplink(session, holding, node._info, lambda _: None)] = (
            asyncio.create_task(asyncio.sleep(0))
        )
        HubPin(node._pin_file).keep(node._info.hub_key)
        serving = asyncio.create_task(node._serve(holding, node._info))
        bare = Rotation(node._info.hub_key, encode_address(bytes(NEXT.verify_key)), 5)
        rotation = replace(bare, signature=bytes(HUB.sign(bare.text().encode()).signature))
        gateway.extensions, gateway.plans = announced(NEXT, rotation), [signed]
        await until(lambda: node._info.hub_key == bare.new)
        asked = len(gateway.reports)
        node._wake.set()
        await until(lambda: len(gateway.reports) > asked)
        assert node._holding is holding
        assert HubPin(node._pin_file).key == bare.new
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
