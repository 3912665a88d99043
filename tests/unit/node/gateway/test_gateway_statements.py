"""Statements over HTTP: who may read and acknowledge them, and that chains survive the hub's restarts and new keys."""

from __future__ import annotations

import base64
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from gateway_parts import ALICE, BOB, MOE, Wallet, entry, gateway

from kvasir_console.errors import NetworkError
from kvasir_console.node.gateway import hubkey
from kvasir_console.node.gateway.identity import Identity, Secrets
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import statements as table
from kvasir_console.relay import hub as hub_module
from kvasir_console.relay.counting import Tally
from kvasir_console.relay.wire.statement import (
    Head,
    SignedStatement,
    Statement,
    acknowledgement_text,
    follow_rotations,
    verify_chain,
)
from kvasir_console.wallet.keys import verify

WORKER, SESSION, RUN = "box-1", "expert-box-1", "engine:tiny-moe:0001"


@dataclass
class Work:
    """One worker's bytes and rows, as hub and trunk would count them."""

    served: Any
    wallet: Wallet = ALICE
    worker: str = WORKER
    session: str = SESSION

    def __post_init__(self) -> None:
        self.tally = Tally(self.session, self.wallet.address, self.worker, "ab" * 32)
        self.served.hub.restore([self.tally])
        self.tally.enter(0.0)
        self.served.meter.admitted(self.session, self.wallet.address, self.worker, MOE, {})
        self.rows = 0

    async def do(self, up: int, down: int, rows: int) -> None:
        self.tally.add_ws2tcp(up)
        self.tally.add_tcp2ws(down)
        self.tally.confirm(self.tally.mark())
        self.rows += rows
        one = entry(self.session, self.wallet.address, 10 * self.rows, self.rows)
        await self.served.meter.read_engine(RUN, [one])
        self.served.clock.now += 60


async def page(served: Any, headers: dict[str, str], since: int = 0, worker: str = WORKER) -> dict[str, Any]:
    reply = await served.client.get(f"/api/statements?worker={worker}&since={since}", headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def checked(found: dict[str, Any], keys: tuple[str, ...], head: Head | None = None, wallet: Wallet = ALICE) -> Head:
    signed = [
        SignedStatement(Statement.parse(each["statement"]), base64.b64decode(each["signature"]))
        for each in found["statements"]
    ]
    return verify_chain(signed, keys, verify, wallet.address, WORKER, head or Head())


async def test_a_chain_states_bytes_rows_and_pairs_and_verifies(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        token, work = await served.token(ALICE), Work(served)
        await work.do(1000, 2000, 3)
        head = checked(await page(served, token), (served.identity.hub_key,))
        await work.do(1, 2, 4)
        found = await page(served, token, since=1)
        head = checked(found, (served.identity.hub_key,), head)
        stated = head.latest
        assert stated is not None
        assert (stated.sequence, stated.bytes_up, stated.bytes_down, stated.rows, stated.pairs) == (
            2,
            1001,
            2002,
            7,
            14,
        )
        assert (stated.model_digest, stated.wallet) == ("ab" * 32, ALICE.address)
        assert found["heads"] == {WORKER: {"sequence": 2, "hash": head.hash}}


async def test_nothing_new_makes_no_statement_and_time_makes_few(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        token, work = await served.token(ALICE), Work(served)
        assert (await page(served, token))["statements"] == []
        await work.do(1, 1, 1)
        for _ in range(3):
            assert len((await page(served, token))["statements"]) == 1
        work.tally.add_ws2tcp(1)
        assert len((await page(served, token))["statements"]) == 1  # within the same ten seconds
        served.clock.now += 11
        assert len((await page(served, token))["statements"]) == 2
        work.tally.add_ws2tcp(1)
        assert len((await page(served, token))["statements"]) == 2  # within the same ten seconds


async def test_only_the_wallets_own_statements_are_given_out(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        await Work(served).do(1, 1, 1)
        assert (await page(served, await served.token(BOB)))["statements"] == []
        reply = await served.client.get("/api/statements?since=0")
        assert reply.status_code == 401
        reply = await served.client.get("/api/statements?since=-1", headers=await served.token(ALICE))
        assert reply.status_code == 400


async def test_a_restarted_hub_goes_on_with_the_chain_and_the_counts(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        token, work = await served.token(ALICE), Work(served)
        await work.do(1000, 2000, 3)
        head = checked(await page(served, token), (served.identity.hub_key,))
        key = served.identity.hub_key
    async with gateway(tmp_path) as served:
        served.clock.now += 1000
        await served.statements.restore()
        [tally] = served.hub.tallies()
        assert (tally.count().ws2tcp, tally.count().confirmed) == (1000, 2000)
        before = tally.closed_at
        await served.statements.flush()
        again = await served.statements.recall(ALICE.address, SESSION)
        assert again is not None
        assert again.closed_at == before  # a restart is no news of a session
        tally.add_ws2tcp(5)
        head = checked(await page(served, await served.token(ALICE), since=1), (key,), head)
        assert head.latest is not None
        assert (head.sequence, head.latest.bytes_up, head.latest.rows) == (2, 1005, 3)


async def test_counts_that_left_the_memory_are_stated_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(tmp_path) as served:
        await served.statements.restore()
        monkeypatch.setattr(hub_module, "MAX_TALLIES", 1)
        token, work, other = await served.token(ALICE), Work(served), Work(served, BOB, "box-2", "expert-box-2")
        await work.do(1000, 2000, 3)
        work.tally.leave(1000, "")
        await served.statements.flush()
        assert served.hub.tallies() == [other.tally]
        assert await served.statements.names(ALICE.address) == {SESSION}
        head = checked(await page(served, token), (served.identity.hub_key,))
        assert head.latest is not None
        assert (head.latest.bytes_up, head.latest.bytes_down) == (1000, 2000)
        back = await served.statements.recall(ALICE.address, SESSION)
        assert back is not None
        assert (back.count(), back.state()) == (
            dataclasses.replace(work.tally.count(), opened_at=0.0, connects=0, last_close=None),
            work.tally.state(),
        )
        assert await served.statements.recall(ALICE.address, "expert-box-2") is None
        # What is not written yet stays, however many there are.
        other.tally.leave(1000, "")
        other.tally.add_ws2tcp(7)
        served.hub.restore([back])
        assert served.hub.trim(lambda tally: tally is back) == [(ALICE.address, SESSION)]


async def test_a_rotated_key_goes_on_with_the_chain(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        await Work(served).do(1000, 2000, 3)
        head = checked(await page(served, await served.token(ALICE)), (served.identity.hub_key,))
        old = served.identity.hub_key
    rotation = hubkey.rotate(tmp_path / "secrets", 1_790_000_000)
    async with gateway(tmp_path) as served:
        assert (rotation.old, rotation.new) == (old, served.identity.hub_key)
        served.clock.now += 1000
        await served.statements.restore()
        served.hub.tallies()[0].add_ws2tcp(5)
        config = (await served.client.get("/api/config")).json()["extensions"]
        assert config["hub_key"] == rotation.new
        assert config["hub_key_rotations"] == served.identity.hub_key_rotations
        keys = follow_rotations(old, rotation.new, served.secrets.rotations, verify)
        head = checked(await page(served, await served.token(ALICE), since=1), keys, head)
        assert head.latest is not None
        assert head.latest.key == rotation.new
        for file in (tmp_path / "secrets").iterdir():
            assert file.stat().st_mode & 0o077 == 0, file


def test_a_rotation_cut_short_is_finished_or_never_was(tmp_path: Path) -> None:
    first = Secrets.load(tmp_path)
    hubkey.rotate(tmp_path, 1)
    second = Secrets.load(tmp_path)
    (tmp_path / "hub-key.next").write_bytes(first.hub_seed)  # signed for by nobody
    (tmp_path / "hub-key.next").chmod(0o600)
    assert Secrets.load(tmp_path) == second
    assert not (tmp_path / "hub-key.next").exists()
    (tmp_path / "hub-key").write_bytes(first.hub_seed)  # a crash after the signature, before the renaming
    (tmp_path / "hub-key.next").write_bytes(second.hub_seed)
    (tmp_path / "hub-key.next").chmod(0o600)
    assert Secrets.load(tmp_path) == second


async def acknowledge(served: Any, wallet: Wallet, head: Head, **changes: Any) -> httpx.Response:
    body = {
        "worker": WORKER,
        "sequence": head.sequence,
        "hash": head.hash,
        "key": wallet.address,
        "signature": wallet.sign(acknowledgement_text(wallet.address, WORKER, head.sequence, head.hash)),
        **changes,
    }
    return await served.client.post("/api/statements/acknowledge", json=body, headers=await served.token(wallet))


async def test_an_acknowledgement_is_a_signature_over_that_statement_by_a_key_of_the_wallet(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        await Work(served).do(1, 1, 1)
        head = checked(await page(served, await served.token(ALICE)), (served.identity.hub_key,))
        other = Head(1, "11" * 32)
        for reply, status in (
            (await acknowledge(served, ALICE, head, signature=ALICE.sign("something else")), 401),
            (await acknowledge(served, ALICE, head, key=BOB.address), 401),
            (await acknowledge(served, ALICE, other), 404),
            (await acknowledge(served, BOB, head), 404),
            (await acknowledge(served, ALICE, head, sequence="1"), 400),
            (await acknowledge(served, ALICE, head, hash="x" * 64), 400),
        ):
            assert reply.status_code == status, reply.text
        reply = await acknowledge(served, ALICE, head)
        assert reply.json() == {"worker": WORKER, "acknowledged": 1}
        with served.store.read() as connection:
            row = connection.execute(sa.select(table)).one()
        assert row.acknowledged_by == ALICE.address
        text = acknowledgement_text(ALICE.address, WORKER, 1, head.hash)
        assert verify(ALICE.address, text.encode(), base64.b64decode(row.acknowledgement))


async def test_old_statements_go_only_once_a_later_one_was_acknowledged(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        work = Work(served)
        for _ in range(3):
            await work.do(1, 1, 1)
            found = await page(served, await served.token(ALICE))
        head = checked(found, (served.identity.hub_key,))
        served.clock.now += 100 * 86_400
        await served.statements.forget()
        assert len((await page(served, await served.token(ALICE)))["statements"]) == 3
        assert (await acknowledge(served, ALICE, head)).status_code == 200
        await served.statements.forget()
        [last] = (await page(served, await served.token(ALICE)))["statements"]
        assert Statement.parse(last["statement"]).sequence == 3


def test_a_database_of_version_two_gets_the_tables_of_statements(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.sqlite'}"
    store = Store.open(url)
    with store.write() as connection:
        connection.execute(sa.text("DROP TABLE statements"))
        connection.execute(sa.text("DROP TABLE relay_counts"))
        connection.execute(sa.text("UPDATE facts SET value = '2' WHERE name = 'schema_version'"))
    store.close()
    store = Store.open(url)
    with store.read() as connection:
        assert connection.execute(sa.select(table)).all() == []
    store.close()


def test_identity_announces_no_rotation_that_was_not_signed(tmp_path: Path) -> None:
    secrets = Secrets.load(tmp_path)
    store = Store.open(f"sqlite:///{tmp_path / 'gateway.sqlite'}")
    assert Identity(secrets, store).hub_key_rotations == []
    store.close()
    with pytest.raises(NetworkError):
        follow_rotations(ALICE.address, BOB.address, secrets.rotations, verify)
