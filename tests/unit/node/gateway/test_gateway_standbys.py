"""A gateway moves windows: the next plan, who may dial then, what a restart remembers, what an operator sees."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from gateway_parts import ALICE, BOB, CAROL, DENSE, DOMAIN, NOW, Clock, Operator, Wallet, tiny_models

from kvasir_console import cli
from kvasir_console.config import ServedModel
from kvasir_console.errors import ExitCode, LedgerError, UsageError
from kvasir_console.node.gateway import rings_command
from kvasir_console.node.gateway.app import make_app
from kvasir_console.node.gateway.catalog import read_catalog
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.coverage import parse_report
from kvasir_console.node.gateway.httpserver import serving
from kvasir_console.node.gateway.identity import Identity, Secrets
from kvasir_console.node.gateway.plans import make_rings
from kvasir_console.node.gateway.rings_command import describe
from kvasir_console.node.gateway.standbys import READY_S, Standbys
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.placement.plan import verify_plan
from kvasir_console.paths import Paths
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.hub import SessionCount

GRACE_S = 60.0
DAVE = Wallet("dave")


def session(key: str, wallet: Wallet) -> SessionCount:
    return SessionCount(key, wallet.address, 0, 0, True, 1, NOW, None)


@dataclass
class Relay:
    """Which sessions there are, and which were ended; at the seam ``Sessions``."""

    live: list[SessionCount] = field(default_factory=list)
    ended: list[tuple[str | None, str | None, int]] = field(default_factory=list)

    def sessions(self) -> list[SessionCount]:
        return self.live

    async def close_sessions(
        self, *, wallet: str | None = None, key: str | None = None, code: int = 1000, reason: str = ""
    ) -> int:
        self.ended.append((wallet, key, code))
        return 1


class Gateway:
    def __init__(self, directory: Path, models: tuple[ServedModel, ...]) -> None:
        self.clock, self.relay, self.census = Clock(), Relay(), Census()
        self.secrets = Secrets.load(directory / "secrets")
        self.store = Store.open(f"sqlite:///{directory / 'g.sqlite'}")
        self.identity = Identity(self.secrets, self.store, self.clock)
        self.identity.domains = (DOMAIN,)
        self.rings = make_rings(read_catalog(models).values(), self.store, self.identity)
        self.standbys = Standbys(
            self.rings,
            self.store,
            self.identity,
            self.census,
            self.relay,
            grace_s=GRACE_S,
            missing=lambda ring: f"rank 1 of {ring} is not connected",
            clock=self.clock,
            monotonic=self.clock,
        )
        self.connected(ALICE, BOB)

    def connected(self, *wallets: Wallet) -> None:
        self.relay.live = [session(f"{DENSE}/0/{'PN'[n]}", wallet) for n, wallet in enumerate(wallets)]

    def reports(self, wallet: Wallet, *, stands_by: bool = True) -> None:
        body = {"worker_id": f"of-{wallet.label}", "model": DENSE, "segments": [], "stands_by": stands_by}
        self.census.report(wallet.address, parse_report(body), self.clock())

    @property
    def plan(self) -> Any:
        return self.rings[DENSE].plan

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(make_app(self.standbys.routes()))
        headers = {"X-Kvasir-Service-Token": self.secrets.service_token}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
            yield client


@pytest.fixture
def ring(tmp_path: Path) -> tuple[ServedModel, ...]:
    _, dense = tiny_models(tmp_path)
    return (replace(dense, replicas=((), (CAROL.address, DAVE.address))),)


@pytest.fixture
def gateway(tmp_path: Path, ring: tuple[ServedModel, ...]):
    made = Gateway(tmp_path, ring)
    yield made
    made.store.close()


async def test_a_window_whose_node_stays_away_goes_to_who_stands_by(gateway: Gateway) -> None:
    assert gateway.plan.generation == 1
    await gateway.standbys.look()
    gateway.connected(ALICE)
    await gateway.standbys.look()
    gateway.clock.now += GRACE_S + 1
    gateway.reports(CAROL, stands_by=False)  # it has not fetched the window yet
    await gateway.standbys.look()
    assert gateway.plan.generation == 1
    gateway.reports(CAROL)
    await gateway.standbys.look()
    assert gateway.plan.generation == 2
    assert gateway.plan.stage_of(CAROL.address).rank == 1
    assert gateway.plan.stages[1].replicas == (DAVE.address, BOB.address)
    assert verify_plan(gateway.rings[DENSE].signed, gateway.identity.hub_key) == gateway.plan
    await gateway.standbys.look()
    assert gateway.plan.generation == 2


async def test_who_came_and_left_between_two_looks_is_gone_and_who_came_before_the_start_is_waited_for(
    gateway: Gateway,
) -> None:
    left = replace(session(f"{DENSE}/0/N", BOB), connected=False, last_close=(1006, ""))
    for opened_at, generation in ((NOW - 1, 1), (NOW, 2)):
        gateway.relay.live = [session(f"{DENSE}/0/P", ALICE), replace(left, opened_at=opened_at)]
        await gateway.standbys.look()
        gateway.clock.now += GRACE_S + 1
        gateway.reports(CAROL)
        await gateway.standbys.look()
        assert gateway.plan.generation == generation


async def test_whose_edges_go_past_the_relay_is_there_as_long_as_it_says_so(gateway: Gateway) -> None:
    def says(**fields: object) -> None:
        body = {"worker_id": "of-bob", "model": DENSE, "segments": [], **fields}
        gateway.census.report(BOB.address, parse_report(body), gateway.clock())

    gateway.connected(ALICE)
    for _ in range(4):
        gateway.clock.now += GRACE_S / 2
        says(direct_live=True)
        gateway.reports(CAROL)
        await gateway.standbys.look()
        assert gateway.standbys.rings()[0]["stages"][1]["connected"]
    for _ in range(5):
        gateway.clock.now += GRACE_S / 2
        says()
        gateway.reports(CAROL)
        await gateway.standbys.look()
    assert gateway.plan.stage_of(CAROL.address).rank == 1


async def test_who_reported_long_ago_is_passed_over_and_who_was_replaced_is_cut_off(gateway: Gateway) -> None:
    gateway.reports(CAROL)
    gateway.clock.now += READY_S + 1
    gateway.reports(DAVE)
    move = await gateway.standbys.move(DENSE, 1, DAVE.address, "a test")
    assert (move.old, move.new, move.generation) == (BOB.address, DAVE.address, 2)
    assert gateway.relay.ended == [(BOB.address, f"{DENSE}/0/N", CloseCode.FORBIDDEN)]
    (shown,) = gateway.standbys.rings()
    assert shown["stages"][1]["replicas"] == [
        {"wallet": CAROL.address, "ready": False},
        {"wallet": BOB.address, "ready": False},
    ]


async def test_a_restart_goes_on_with_the_moved_plan_and_a_changed_configuration_begins_anew(
    gateway: Gateway, tmp_path: Path, ring: tuple[ServedModel, ...]
) -> None:
    first = gateway.plan
    await gateway.standbys.move(DENSE, 1, CAROL.address, "a test")
    moved = gateway.plan
    gateway.store.close()
    again = Gateway(tmp_path, ring)
    assert again.plan == moved
    again.store.close()
    (model,) = ring
    changed = Gateway(tmp_path, (replace(model, replicas=((), (DAVE.address,))),))
    assert changed.plan.generation == 3
    assert changed.plan.stages[1].wallet == BOB.address
    changed.store.close()
    back = Gateway(tmp_path, ring)  # what he wrote, not what was made of it once
    assert (back.plan.generation, back.plan.stages) == (4, first.stages)
    back.store.close()


async def test_a_move_that_the_store_did_not_take_is_none_after_a_restart_either(
    gateway: Gateway, tmp_path: Path, ring: tuple[ServedModel, ...]
) -> None:
    before = gateway.plan
    with gateway.store.write() as connection:  # the last thing that a move writes
        connection.execute(sa.text("ALTER TABLE plans RENAME TO away"))
    with pytest.raises(LedgerError):
        await gateway.standbys.move(DENSE, 1, CAROL.address, "a test")
    assert gateway.plan == before
    with gateway.store.write() as connection:
        connection.execute(sa.text("ALTER TABLE away RENAME TO plans"))
    again = Gateway(tmp_path, ring)
    assert again.plan == before
    again.store.close()


async def test_who_was_seen_before_a_restart_is_gone_after_it_and_who_never_was_is_waited_for(
    gateway: Gateway, tmp_path: Path, ring: tuple[ServedModel, ...]
) -> None:
    async def restarted(connected: Wallet, generation: int) -> None:
        again = Gateway(tmp_path, ring)
        again.connected(connected)
        await again.standbys.restore()
        await again.standbys.look()
        again.clock.now += GRACE_S + 1
        again.reports(CAROL)
        await again.standbys.look()
        assert again.plan.generation == generation
        again.store.close()

    await restarted(ALICE, 1)
    await gateway.standbys.look()  # Bob is there, for the first time
    await restarted(ALICE, 2)


async def test_the_operator_sees_and_moves_with_the_service_token_only(gateway: Gateway) -> None:
    await gateway.standbys.look()
    gateway.connected(ALICE)
    await gateway.standbys.look()
    gateway.clock.now += 12
    async with gateway.http() as client:
        assert (await client.get("/api/rings", headers={"X-Kvasir-Service-Token": "no"})).status_code == 403
        body = {"ring": DENSE, "rank": 1, "wallet": CAROL.address}
        refused = await client.post("/api/rings/move", json=body, headers={"X-Kvasir-Service-Token": "no"})
        assert refused.status_code == 403
        before = (await client.get("/api/rings")).json()
        stage = before["rings"][0]["stages"][1]
        assert (stage["wallet"], stage["connected"], stage["gone_s"]) == (BOB.address, False, 12)
        assert f"gone for 12 s\n    stands by: {CAROL.address} (not ready)" in describe(before)
        assert f"{DENSE}, generation 1; rank 1 of {DENSE} is not connected" in describe(before)
        assert (await client.post("/api/rings/move", json=body)).status_code == 200
        after = (await client.get("/api/rings")).json()
        assert after["rings"][0]["stages"][1]["wallet"] == CAROL.address
        assert [each["why"] for each in after["moves"]] == ["the operator asked for it"]
        assert f" {DENSE} rank 1 moved from" in describe(after)
        assert f"moved from {BOB.address} to {CAROL.address}, generation 2" in describe(after)
        assert json.loads(gateway.rings[DENSE].text)["generation"] == 2


@pytest.mark.parametrize(
    ("ring_id", "rank", "wallet", "code"),
    [
        ("other", 1, CAROL.address, "unknown_ring"),
        (DENSE, 2, CAROL.address, "unknown_rank"),
        (DENSE, -1, CAROL.address, "unknown_rank"),
        (DENSE, 1, BOB.address, "serves_already"),
        (DENSE, 1, ALICE.address, "serves_already"),
        (DENSE, 1, "nobody", "bad_wallet"),
    ],
)
async def test_a_move_that_cannot_be_is_refused(
    gateway: Gateway, ring_id: str, rank: int, wallet: str, code: str
) -> None:
    with pytest.raises(UsageError) as caught:
        await gateway.standbys.move(ring_id, rank, wallet, "a test")
    assert caught.value.code == code
    assert gateway.plan.generation == 1


# The operator's command, against a gateway that answers on its socket.


async def told(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Exit code and what is said, on stdout or, refused, on stderr."""
    socket = Paths.from_environment().ensure().runtime / "gateway.http"
    token = f"gateway.service_token_file={tmp_path / 'secrets' / 'service-token'}"
    async with serving(make_app(gateway.standbys.routes()), socket):
        code = await asyncio.to_thread(cli.main, ["--set", token, "rings", *arguments])
    out, err = capsys.readouterr()
    assert bool(out) != bool(err)
    return code, out or err


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("utc")
async def test_the_command_tells_who_is_gone_who_is_awaited_and_what_moved_when(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.connected(ALICE)
    await gateway.standbys.look()
    gateway.clock.now += 12
    code, out = await told(gateway, tmp_path, capsys)
    assert (code, "awaited for 12 s" in out) == (ExitCode.OK, True)
    code, out = await told(gateway, tmp_path, capsys, "--move", "1", "--to", CAROL.address, "--yes")
    assert code == ExitCode.OK
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(gateway.clock.now))
    assert f"{moment} {DENSE} rank 1 moved from {BOB.address} to {CAROL.address}" in out
    assert "gone for 0 s" in out
    code, out = await told(gateway, tmp_path, capsys, "--json")
    assert (code, json.loads(out)["rings"][0]["generation"]) == (ExitCode.OK, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--move", "7", "--to", CAROL.address), ("ranks 0 to 1", "kvasir-console rings")),
        (("--move", "1", "--to", "nobody"), ("'nobody' is not a wallet", "kvasir-console rings")),
        (("--move", "1", "--to", BOB.address), ("serves a window", "kvasir-console rings")),
        (("--move", "1", "--to", CAROL.address, "--ring", "other"), ("'other'", DENSE)),
        (("--move", "1"), ("--to WALLET",)),
        (("--to", CAROL.address), ("--move RANK",)),
        (("--ring", DENSE), ("--move",)),
        (("--yes",), ("--move",)),
    ],
)
async def test_the_command_says_why_nothing_moved(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str]
) -> None:
    code, err = await told(gateway, tmp_path, capsys, *arguments)
    assert (code, len(err.splitlines())) == (ExitCode.USAGE, 2)
    assert [word for word in words if word not in err] == []
    assert gateway.plan.generation == 1


MOVE = ("--move", "1", "--to", CAROL.address)


async def test_a_move_is_told_and_asked_before_it_is_made(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.standbys.look()
    gateway.connected(ALICE)
    await gateway.standbys.look()
    gateway.clock.now += 12
    unsure = Operator("")
    monkeypatch.setattr(rings_command, "controlling_terminal", lambda: unsure)
    assert await told(gateway, tmp_path, capsys, *MOVE) == (
        ExitCode.USAGE,
        "kvasir-console: Nothing was moved.\n",
    )
    assert gateway.plan.generation == 1
    assert gateway.relay.ended == []
    assert f"{DENSE}, rank 1, layers 1 to 3" in unsure.shown
    assert f"from {BOB.address}  gone for 12 s\n" in unsure.shown
    assert f"to   {CAROL.address}  stands by, but has not said lately" in unsure.shown
    assert "two minutes" in unsure.shown
    assert "gateway.standby_grace_s" in unsure.shown
    assert unsure.question == "Move it? [y/N] "
    gateway.reports(CAROL)
    sure = Operator("y")
    monkeypatch.setattr(rings_command, "controlling_terminal", lambda: sure)
    code, out = await told(gateway, tmp_path, capsys, *MOVE)
    assert (code, f"moved from {BOB.address} to {CAROL.address}, generation 2" in out) == (ExitCode.OK, True)
    assert f"to   {CAROL.address}  stands by with these layers\n" in sure.shown
    assert "gateway.standby_grace_s" not in sure.shown


async def test_with_nobody_to_ask_a_window_moves_with_yes_only(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings_command, "controlling_terminal", lambda: Operator(None))
    code, err = await told(gateway, tmp_path, capsys, *MOVE)
    assert (code, "--yes" in err) == (ExitCode.USAGE, True)
    assert gateway.plan.generation == 1
    code, _ = await told(gateway, tmp_path, capsys, *MOVE, "--yes")
    assert (code, gateway.plan.generation) == (ExitCode.OK, 2)


async def test_what_was_agreed_to_is_not_done_to_another_plan(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    def another_moves_it() -> None:
        asyncio.run_coroutine_threadsafe(gateway.standbys.move(DENSE, 1, DAVE.address, "a test"), loop).result(10)

    late = Operator("yes", another_moves_it)
    monkeypatch.setattr(rings_command, "controlling_terminal", lambda: late)
    code, err = await told(gateway, tmp_path, capsys, *MOVE)
    assert (code, "another plan by now, generation 2" in err) == (ExitCode.USAGE, True)
    assert gateway.plan.stages[1].wallet == DAVE.address


async def test_another_service_token_is_named_as_the_cause(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secrets" / "service-token").write_text("another-token-of-thirty-two-letters")
    code, err = await told(gateway, tmp_path, capsys)
    assert (code, "gateway.service_token_file" in err) == (ExitCode.USAGE, True)


async def test_a_gateway_that_hangs_is_not_one_that_does_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings_command, "TIMEOUT_S", 0.1)
    listener = await asyncio.start_unix_server(
        lambda *_: None, Paths.from_environment().ensure().runtime / "gateway.http"
    )
    assert await asyncio.to_thread(cli.main, ["rings"]) == ExitCode.NETWORK
    assert "has not answered for 0.1 s" in capsys.readouterr().err
    listener.close()


def test_without_a_gateway_the_command_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rings", "--json"]) == ExitCode.NETWORK
    out, err = capsys.readouterr()
    assert (out, "kvasir-console gateway" in err) == ("", True)
