"""Who may dial the hub: the wallet that registered a session, and the wallets that a plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_parts import ALICE, BOB, CAROL, DENSE, MOE, NOW, Clock, NoTrunks, Wallet

from kvasir_console.config import ServedModel
from kvasir_console.node.gateway.authority import HubAuthority
from kvasir_console.node.gateway.catalog import read_catalog
from kvasir_console.node.gateway.census import STALE_S, Census
from kvasir_console.node.gateway.coverage import parse_report
from kvasir_console.node.gateway.identity import Identity, Secrets
from kvasir_console.node.gateway.plans import make_rings
from kvasir_console.node.gateway.store import Store
from kvasir_console.relay.authority import Admission, Refused
from kvasir_console.relay.wire.preamble import Kind, Wire
from kvasir_console.relay.wire.signed import mint_node_token

ENGINE = Path("/run/trunk.data")


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.caught: set[tuple[str, ...]] = set()

    def admitted(self, session: str, wallet: str, worker_id: str, model: str, platform: Mapping[str, str]) -> None:
        self.seen.append((session, wallet, worker_id, model))

    def quarantined(self, wallet: str, worker_id: str, stage: str = "") -> bool:
        return bool({(wallet, worker_id), (wallet, worker_id, stage)} & self.caught)


class Hub:
    """An authority over real models, and what it is asked."""

    def __init__(self, tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
        self.clock = Clock()
        self.store = Store.open(f"sqlite:///{tmp_path / 'g.sqlite'}")
        self.secrets = Secrets.load(tmp_path / "secrets")
        identity = Identity(self.secrets, self.store, self.clock)
        self.catalog = read_catalog(models)
        self.census = Census()
        self.census.offer(offered for model in self.catalog.values() if (offered := model.offered))
        self.trunks = NoTrunks({MOE: ENGINE})
        self.sessions = Recorder()
        rings = make_rings(self.catalog.values(), self.store, identity)
        self.authority = HubAuthority(identity, self.census, rings, self.trunks, self.sessions, self.clock)

    def token(self, wallet: Wallet, expiry: int = int(NOW) + 1000) -> str:
        return mint_node_token(self.secrets.node_token_key, wallet.address, expiry)

    def report(self, wallet: Wallet, **fields: Any) -> None:
        body = {"worker_id": "w", "model": MOE, "segments": [[1, 8, 24]], **fields}
        self.census.report(wallet.address, parse_report(body), self.clock())

    async def expert(self, wallet: Wallet, session: str = "expert-w") -> Admission:
        return await self.authority.admit("/api/expert-relay", {"session": session}, self.token(wallet))

    async def ring(self, wallet: Wallet, edge: str, role: str, ring: str = DENSE) -> Admission:
        query = {"controller_id": ring, "edge": edge, "role": role}
        return await self.authority.admit("/api/ring-relay", query, self.token(wallet))


@pytest.fixture
def hub(tmp_path: Path, models: tuple[ServedModel, ...]):
    made = Hub(tmp_path, models)
    yield made
    made.store.close()


async def code(admission: Any) -> int:
    with pytest.raises(Refused) as caught:
        await admission
    return caught.value.close_code


async def test_a_worker_that_answered_wrongly_is_not_let_in_again(hub: Hub) -> None:
    hub.report(ALICE)
    assert (await hub.expert(ALICE)).wallet == ALICE.address
    hub.sessions.caught.add((ALICE.address, "w"))
    with pytest.raises(Refused, match="quarantined"):
        await hub.expert(ALICE)


async def test_the_registering_wallet_is_led_to_the_engine(hub: Hub) -> None:
    hub.report(ALICE, wires=["v1", "v2f16"])
    admission = await hub.expert(ALICE)
    assert (admission.key, admission.wallet, admission.engine_socket) == ("expert-w", ALICE.address, ENGINE)
    preamble = admission.preamble
    assert preamble is not None
    assert (preamble.kind, preamble.session, preamble.wallet) == (Kind.DISPATCH, "expert-w", ALICE.address)
    assert (preamble.layer, preamble.begin, preamble.end) == (1, 8, 24)
    assert preamble.wires == Wire.V1 | Wire.V2F16
    assert preamble.model_digest == hub.catalog[MOE].digest
    assert len(preamble.encode()) == 256
    assert hub.sessions.seen == [("expert-w", ALICE.address, "w", MOE)]


async def test_a_session_of_version_3_serves_all_windows_that_are_of_use(hub: Hub) -> None:
    segments = [[1, 8, 24], [2, 0, 4], [2, 0, 1000], [99, 0, 4]]
    hub.report(ALICE, wires=["v2"], segments=segments)
    preamble = (await hub.expert(ALICE)).preamble
    assert preamble is not None
    assert preamble.windows == ((1, 8, 24),)
    hub.report(ALICE, wires=["v2", "v3"], segments=segments)
    preamble = (await hub.expert(ALICE)).preamble
    assert preamble is not None
    assert preamble.windows == ((1, 8, 24), (2, 0, 4))


async def test_a_node_that_names_no_wires_speaks_v2(hub: Hub) -> None:
    hub.report(ALICE)
    preamble = (await hub.expert(ALICE)).preamble
    assert preamble is not None
    assert preamble.wires == Wire.V2


async def test_a_token_must_be_ours_and_alive(hub: Hub) -> None:
    hub.report(ALICE)
    for token in (None, "", "x", hub.token(ALICE, int(NOW) - 1), mint_node_token("other", ALICE.address, int(NOW) + 9)):
        assert await code(hub.authority.admit("/api/expert-relay", {"session": "expert-w"}, token)) == 4401


async def test_another_wallet_may_not_dial_the_session(hub: Hub) -> None:
    hub.report(ALICE)
    assert await code(hub.expert(BOB)) == 4403
    assert hub.sessions.seen == []


async def test_a_session_lives_as_long_as_its_reports(hub: Hub) -> None:
    assert await code(hub.expert(ALICE)) == 4404
    assert await code(hub.expert(ALICE, "")) == 4404
    hub.report(ALICE)
    await hub.expert(ALICE)
    hub.clock.now += STALE_S + 1
    assert await code(hub.expert(ALICE)) == 4404


async def test_nothing_to_dispatch_is_1011(hub: Hub) -> None:
    hub.report(ALICE, segments=[])
    assert await code(hub.expert(ALICE)) == 1011
    hub.report(ALICE, segments=[[1, 0, 1000]])
    assert await code(hub.expert(ALICE)) == 1011
    hub.report(ALICE)
    hub.trunks.sockets.clear()  # the engine is being started again
    assert await code(hub.expert(ALICE)) == 1011


async def test_a_ring_admits_whom_its_plan_names(hub: Hub) -> None:
    """Two ranks: edge 0 leads from rank 0 to rank 1, edge 1 closes the ring, the entry leads to rank 0."""
    for wallet, edge, role, peer in (
        (ALICE, "0", "P", "N"),
        (BOB, "0", "N", "P"),
        (BOB, "1", "P", "N"),
        (ALICE, "1", "N", "P"),
    ):
        admission = await hub.ring(wallet, edge, role)
        assert (admission.key, admission.peer_key) == (f"{DENSE}/{edge}/{role}", f"{DENSE}/{edge}/{peer}")
        assert admission.wallet == wallet.address
        other = BOB if wallet is ALICE else ALICE
        assert await code(hub.ring(other, edge, role)) == 4403
    entry = await hub.ring(ALICE, "entry", "N")
    assert (entry.key, entry.peer_key, entry.entry_model) == (f"{DENSE}/entry/N", None, DENSE)
    for wallet in (BOB, CAROL):
        assert await code(hub.ring(wallet, "entry", "N")) == 4403


async def test_edges_that_are_not_there_are_refused(hub: Hub) -> None:
    assert await code(hub.ring(ALICE, "0", "P", "other")) == 4404
    for edge in ("2", "-1", "", "00000", "x", "٢"):
        assert await code(hub.ring(ALICE, edge, "P")) == 4404
    for edge, role in (("0", ""), ("0", "p"), ("0", "X"), ("entry", "P")):
        assert await code(hub.ring(ALICE, edge, role)) == 1002


async def test_a_worker_of_a_ring_is_led_to_the_stage_that_holds_its_layer(
    tmp_path: Path, models: tuple[ServedModel, ...]
) -> None:
    """Three layers, of which the second and third are rank 1's; nobody but that rank's wallet waits for its workers."""
    moe = replace(models[0], placement="ring", ring=((ALICE.address, 0, 1), (BOB.address, 1, 3)))
    made = Hub(tmp_path, (moe,))
    made.trunks.sockets.clear()
    try:
        made.report(CAROL, segments=[[2, 0, 8]])
        worker = await made.expert(CAROL)
        assert (worker.star, worker.engine_socket) == (f"{MOE}/experts/1", None)
        assert worker.preamble is not None
        assert worker.preamble.layer == 2
        waiting = await made.ring(BOB, "experts-0", "P", MOE)
        assert (waiting.star, waiting.preamble, waiting.wallet) == (worker.star, None, BOB.address)
        other = await made.ring(BOB, "experts-1", "P", MOE)
        assert other.key != waiting.key
        assert (await made.ring(ALICE, "experts-0", "P", MOE)).star == f"{MOE}/experts/0"
        assert await code(made.ring(CAROL, "experts-0", "P", MOE)) == 4403
        # What a stage says of a worker keeps it away from that stage, and from no other.
        made.sessions.caught.add((CAROL.address, "w", ALICE.address))
        assert (await made.expert(CAROL)).star == worker.star
        made.sessions.caught.add((CAROL.address, "w", BOB.address))
        assert await code(made.expert(CAROL)) == 4403
        for edge in ("experts-", "experts-x", "experts--1", "experts-256", "experts-1000"):
            assert await code(made.ring(BOB, edge, "P", MOE)) == 4404
    finally:
        made.store.close()
