"""Workers of a ring's stages are paid: real processes, TLS, and the reports that the stages' nodes sign."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from ring_runs import stats_of

from kvasir_console.bench.models import Recipe, write_model
from kvasir_console.bench.network import Layout, RingNetwork
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.local.members import Member
from kvasir_console.node.gateway.ledger import Ledger
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import stage_reports, statements
from kvasir_console.node.session_key import SessionKey, read_session_key
from kvasir_console.relay.tls import client_context
from kvasir_console.relay.wire.stage_report import StageReport
from kvasir_console.relay.wire.statement import GENESIS, Statement, held_digest

from engines import until

RECIPE = Recipe(n_layer=2, n_embd=64, n_ff=64, n_head=2, n_head_kv=1, n_expert=4)
N_EMBD = RECIPE.n_embd
WAIT_S = 200


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[RingNetwork]:
    model = write_model(tmp_path / "ring.gguf", RECIPE)
    layout = Layout(model, windows=((0, 1), (1, 2)), workers=2, max_experts=3)
    async with RingNetwork(layout, print, tmp_path / "net") as network:
        yield network


class Books:
    """The gateway's database, and what every process says beside it."""

    def __init__(self, net: RingNetwork) -> None:
        self.net = net
        self.store = Store.open(f"sqlite:///{net.operator.paths.data / 'gateway.sqlite'}")

    async def paid(self) -> dict[str, int]:
        """Micro-units metered for each worker's wallet, over all runs."""
        rows = (await self.net.client.get("/api/contributions"))["contributions"]
        wallets = {member.address: 0 for member in self.net.workers}
        for row in rows:
            if row["kind"] == "expert":
                wallets[row["owner"]] += row["micro_units"]
        return wallets

    async def acknowledged(self) -> dict[str, int]:
        """What the engines of the stages that live now say they owe, in bytes, by the worker's wallet."""
        owed = {member.address: 0 for member in self.net.workers}
        for each in await covered(self.net):
            assert each["paid_bytes"] == 2 * N_EMBD * each["paid_rows"] + 10 * each["paid_pairs"]
            owed[each["wallet"]] += each["paid_bytes"]
        return owed

    async def settled(self) -> bool:
        """Whether all are credited what they are owed, and each is owed something: a worker that a busy machine held up
        was not proven by the requests until now, and has more."""
        owed = await self.acknowledged()
        if min(owed.values()) == 0:
            await generate(self.net)
            return False
        return owed == await self.paid() == self.credited()

    async def served(self, worker: Member) -> int:
        """The most that a worker's own engine says it did can be worth."""
        stats = (await stats_of(self.net, worker))["served"]
        return 2 * N_EMBD * stats["rows"] + 10 * stats["pairs"]

    def credited(self) -> dict[str, int]:
        """Micro-units that were credited."""
        ledger = Ledger(self.store)
        assert ledger.audit() == ()
        return {each.wallet: each.micro_units for each in ledger.accounts() if each.kind == "expert"}

    def latest(self, stage: str) -> tuple[StageReport, str]:
        """A stage's latest report as it was accepted, and its signature."""
        with self.store.read() as connection:
            rows = connection.execute(sa.select(stage_reports).where(stage_reports.c.stage == stage)).all()
        found = max(rows, key=lambda row: StageReport.parse(row.text).sequence)
        return StageReport.parse(found.text), found.signature


async def covered(net: RingNetwork) -> list[dict[str, Any]]:
    """What the stages say of their workers, once both answer: an engine may be too busy, or be starting."""
    found: list[dict[str, Any]] = []

    async def complete() -> bool:
        found[:] = await net.coverage()
        return {each["stage"] for each in found} == {0, 1}

    await until(complete, WAIT_S)
    return found


async def generate(net: RingNetwork, requests: int = 3, tokens: int = 40) -> None:
    asks = [
        net.client.complete(net.model_id, f"w{number:03d} w005", tokens, sampling={"temperature": 0.9, "seed": number})
        for number in range(requests)
    ]
    await asyncio.gather(*asks)


async def post(net: RingNetwork, stage: Member, report: StageReport, key: SessionKey) -> dict[str, Any]:
    """Hand in a report with everything that the stage's machine has: its token and its session key."""
    token = json.loads((stage.paths.state / "node-token.json").read_text())["value"]
    text = report.text()
    body = {"reports": [{"text": text, "signature": base64.b64encode(key.sign(text.encode())).decode()}]}
    async with httpx.AsyncClient(verify=client_context(net.certificates.authority), trust_env=False) as client:
        reply = await client.post(
            f"{net.url}/api/stage-reports", json=body, headers={"Authorization": f"Bearer {token}"}
        )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()["results"][0]
    return answer


def key_of(net: RingNetwork, number: int) -> SessionKey:
    stage = net.stages[number]
    file = stage.paths.state / "session-key.json"
    key = read_session_key(file, f"https://127.0.1.{number + 1}:{net.port}", stage.address)
    assert key is not None
    return key


async def quarantine(net: RingNetwork, *arguments: str) -> Any:
    """The operator's command, in the gateway's home."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvasir_console", "quarantine", *arguments, "--json"),
        stdout=subprocess.PIPE,
        env={**os.environ, **net.operator.environment},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)


@pytest.mark.network
async def test_workers_of_stages_are_credited_what_they_served_and_lies_are_refused(net: RingNetwork) -> None:
    books = Books(net)
    await generate(net)
    one, other = (member.address for member in net.workers)

    await until(books.settled, WAIT_S)
    for worker in net.workers:
        assert 0 < books.credited()[worker.address] <= await books.served(worker)

    # The shard that each worker announced stands in its statements.
    def stated() -> dict[str, str]:
        with books.store.read() as connection:
            rows = connection.execute(sa.select(statements).order_by(statements.c.sequence)).all()
        return {row.wallet: Statement.parse(row.text).shard_digest for row in rows}

    held = {
        each["wallet"]: held_digest([(each["layer"], each["begin"], each["end"], each["shard_digest"])])
        for each in await covered(net)
    }
    await until(lambda: {wallet: stated().get(wallet) for wallet in held} == held, WAIT_S)
    assert GENESIS not in held.values()

    # Whoever has everything that the stage has can say no more than what passed, and nothing twice.
    stage, key = net.stages[0], key_of(net, 0)
    last, signature = books.latest(stage.address)
    assert last.key == key.address
    before = await books.paid()
    (work,) = last.slices
    inflated = dataclasses.replace(last, sequence=last.sequence + 1000, slices=(dataclasses.replace(work, rows=10**9),))
    anew = dataclasses.replace(inflated, run="ab" * 16)
    assert base64.b64decode(signature) == key.sign(last.text().encode())
    for lie, code in (
        (inflated, "report_over_counted"),
        (anew, "report_over_counted"),
        (last, "report_replayed"),
        (dataclasses.replace(last, epoch=last.epoch - 1), "report_old_epoch"),
        (dataclasses.replace(last, wallet=other if last.wallet == one else one), "report_unknown_worker"),
    ):
        assert (await post(net, stage, lie, key))["code"] == code
    foreign = dataclasses.replace(inflated, key=key_of(net, 1).address)
    assert (await post(net, stage, foreign, key_of(net, 1)))["code"] == "delegation_unknown"
    assert await books.paid() == before == books.credited()

    # A stage's engine that is killed begins a new run; what was reported of the old one stays, once.
    pid = net.engine_pid(stage.name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await net.wait_until(net.whole, "the ring does not become whole")
    await generate(net)

    async def goes_on() -> bool:
        owed, paid = await books.acknowledged(), await books.paid()
        mine = last.wallet
        rest = other if mine == one else one
        if owed[mine] == 0:  # its worker has to be proven anew
            await generate(net)
            return False
        grown = owed[mine] > 0 and paid[mine] == before[mine] + owed[mine]
        return grown and paid[rest] == owed[rest] and books.credited() == paid

    await until(goes_on, WAIT_S)
    for worker in net.workers:
        assert books.credited()[worker.address] <= await books.served(worker)

    # A gateway that is killed with work it has not heard of yet goes on from what it wrote; again nothing twice.
    await generate(net)
    pid = net.console_pid(net.operator.name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await net.wait_until(net.whole, "the ring does not become whole")
    await generate(net)
    await until(goes_on, WAIT_S)


@pytest.mark.network
async def test_a_quarantine_at_a_stage_reaches_the_books_and_the_operator_lifts_it(net: RingNetwork) -> None:
    books = Books(net)
    await generate(net)

    await until(books.settled, WAIT_S)
    stage = net.stages[0]
    caught = next(each for each in await covered(net) if each["stage"] == 0)
    engine = await EngineClient.connect(stage.paths.runtime / "node.ctl", timeout_s=60)
    try:
        await engine.call("quarantine", session=caught["session"], wallet=caught["wallet"])
    finally:
        await engine.close()
    listed: list[dict[str, Any]] = []

    async def known() -> bool:
        listed[:] = await quarantine(net, "list")
        return bool(listed)

    await until(known, WAIT_S)
    (case,) = listed
    assert (case["wallet"], case["caught_by"], case["session"]) == (
        caught["wallet"],
        stage.address,
        caught["session"],
    )
    signed = StageReport.parse(case["report"])
    assert (signed.quarantined, signed.wallet) == (True, caught["wallet"])

    async def account() -> dict[str, Any]:
        return next(each for each in await covered(net) if each["stage"] == 0)

    await generate(net)
    assert not (await account())["connected"]
    before = await books.paid()
    assert before[caught["wallet"]] == books.credited()[caught["wallet"]]

    lifted = await quarantine(net, "lift", case["wallet"], case["worker_id"], "--yes")
    assert [each["session"] for each in lifted["lifted"]] == [case["session"]]
    assert await quarantine(net, "list") == []

    async def back() -> bool:
        return (await account())["connected"]

    await until(back, WAIT_S)
    await generate(net, requests=4, tokens=60)

    async def earns() -> bool:
        paid, owed = await books.paid(), await books.acknowledged()
        wallet = caught["wallet"]
        if owed[wallet] == 0:
            await generate(net)
            return False
        return paid[wallet] > before[wallet] and paid == owed == books.credited()

    await until(earns, WAIT_S)
