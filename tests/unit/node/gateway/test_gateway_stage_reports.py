"""A ring's stage reports what its workers did: who is believed, how far, and what it comes to in the books."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from gateway_parts import ALICE, BOB, CAROL, N_EMBD, N_EXPERT, NOW, Clock, Gateway, Wallet, entry, gateway
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.config import ServedModel
from kvasir_console.errors import NetworkError
from kvasir_console.node.gateway.census import Census, OfferedModel
from kvasir_console.node.gateway.ledger import Ledger, Reading
from kvasir_console.node.gateway.metering import STAGE_LISTED_S, Meter
from kvasir_console.node.gateway.quarantine import Quarantines, Standing
from kvasir_console.node.gateway.settle import Settler
from kvasir_console.node.gateway.stage_reports import MAX_RUNS, TELL_S, Booking, book
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import stage_bytes
from kvasir_console.relay.counting import Joint, Tally
from kvasir_console.relay.wire.stage_report import SliceWork, StageReport
from kvasir_console.relay.wire.statement import GENESIS, Statement, held_digest

from postgresql_server import PostgresqlServer

RING = "moe-ring"
WORKER, SESSION = "box-1", "expert-box-1"
RUN = "0a" * 16
KEY = Wallet("a session key of alice")
DIGEST = "5d" * 32


def bytes_of(rows: int, pairs: int) -> int:
    """The v2f16 size (design, section 5)."""
    return 2 * N_EMBD * rows + 10 * pairs


@pytest.fixture
def ring(models: tuple[ServedModel, ...]) -> tuple[ServedModel, ...]:
    """The mixture of experts as a ring: Alice holds layer 0, Bob layers 1 and 2."""
    stages = ((ALICE.address, 0, 1), (BOB.address, 1, 3))
    return (ServedModel(RING, models[0].path, "ring", stages),)


def report_of(hub: str, digest: str, rows: int, pairs: int, sequence: int, **changes: Any) -> StageReport:
    made = StageReport(
        hub=hub,
        stage=ALICE.address,
        key=ALICE.address,
        ring=RING,
        epoch=1,
        run=RUN,
        sequence=sequence,
        model_digest=digest,
        wallet=CAROL.address,
        session=SESSION,
        requests=sequence,
        slices=(SliceWork(changes.pop("layer", 0), 0, 8, rows, pairs, DIGEST, live=True),),
        quarantined=False,
        convictions=0,
        fault="",
        evidence=GENESIS,
    )
    return dataclasses.replace(made, **changes)


class Stage:
    """Alice's stage at a gateway, with one worker of Carol's."""

    def __init__(self, served: Gateway, token: dict[str, str]) -> None:
        self.served, self.token = served, token
        self.joint = Joint(f"{RING}/experts/0", ALICE.address, CAROL.address, SESSION, WORKER)
        served.hub.restore((), [self.joint])

    def report(self, rows: int, pairs: int, sequence: int = 1, **changes: Any) -> StageReport:
        digest = self.served.rings[RING].plan.model_digest
        hub = changes.pop("hub", self.served.identity.hub_key)
        return report_of(hub, digest, rows, pairs, sequence, **changes)

    def carried(self, down: int, up: int) -> None:
        """What the hub counts between the two, from now on."""
        self.joint.down, self.joint.up = down, up

    async def send(self, *reports: StageReport, by: Wallet = ALICE) -> list[dict[str, Any]]:
        signed = [{"text": each.text(), "signature": by.sign(each.text())} for each in reports]
        reply = await self.served.client.post("/api/stage-reports", json={"reports": signed}, headers=self.token)
        assert reply.status_code == 200, reply.text
        return reply.json()["results"]

    async def refused(self, report: StageReport, by: Wallet = ALICE) -> str:
        """The code of a refusal that changed nothing."""
        before = await figures(self.served)
        (answer,) = await self.send(report, by=by)
        assert answer["accepted"] is False
        assert await figures(self.served) == before
        return answer["code"]


async def figures(served: Gateway) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(micro-units, rows, pairs) by run and worker."""
    rows = await served.meter.contributions()
    return {(row.run_id, row.worker_id): (row.micro_units, row.rows, row.pairs) for row in rows}


async def earned(served: Gateway) -> int:
    """Settle, and say what Carol's worker was credited with, in micro-units."""
    await Settler(served.client, served.secrets.service_token, served.ledger, poll_s=1.0, clock=served.clock).poll()
    assert served.ledger.audit() == ()
    return sum(each.micro_units for each in served.ledger.accounts(CAROL.address))


@pytest.fixture
async def stage(tmp_path: Path, ring: tuple[ServedModel, ...]) -> AsyncIterator[Stage]:
    async with gateway(tmp_path, models=ring) as served:
        made = Stage(served, await served.token(ALICE))
        made.carried(10**6, 10**6)
        yield made


async def test_a_worker_of_a_stage_is_paid_for_exactly_what_is_reported(stage: Stage) -> None:
    assert await stage.send(stage.report(10, 20)) == [{"accepted": True, "lifted": False}]
    assert await figures(stage.served) == {(f"stage:{ALICE.address}:{RUN}", WORKER): (bytes_of(10, 20), 10, 20)}
    assert await earned(stage.served) == bytes_of(10, 20)
    await stage.send(stage.report(15, 29, 2))
    assert await earned(stage.served) == bytes_of(15, 29)
    (row,) = await stage.served.meter.contributions()
    assert (row.wallet, row.kind, row.bytes_down, row.bytes_up) == (CAROL.address, "expert", 10**6, 10**6)
    (account,) = stage.served.ledger.accounts()
    assert (account.wallet, account.worker_id, account.kind, account.model) == (CAROL.address, WORKER, "expert", RING)


async def test_replayed_and_reordered_reports_are_refused_by_name(stage: Stage) -> None:
    first, second, third = stage.report(10, 20, 1), stage.report(12, 24, 2), stage.report(19, 30, 3)
    await stage.send(first, third)
    for again in (first, second, third, stage.report(500, 500, 3)):
        assert await stage.refused(again) == "report_replayed"
    assert await stage.refused(stage.report(18, 30, 4)) == "report_shrunk"
    assert await stage.refused(
        stage.report(0, 0, 4, layer=0, slices=(SliceWork(0, 8, 16, 900, 900, DIGEST, True),))
    ) == ("report_shrunk")
    assert await earned(stage.served) == bytes_of(19, 30)


async def test_refused_reports_do_not_fill_the_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    good = stage.report(10, 20)
    await stage.send(good)
    for _ in range(20):
        assert await stage.refused(good) == "report_replayed"
    stage.served.clock.now += TELL_S
    assert await stage.refused(good) == "report_replayed"
    told = [record for record in caplog.records if "a report of the stage" in record.getMessage()]
    assert len(told) == 2
    assert ALICE.address in told[0].getMessage()


async def test_nobody_else_signs_for_a_stage(stage: Stage) -> None:
    assert await stage.refused(stage.report(10, 20), by=BOB) == "report_forged"
    assert await stage.refused(stage.report(10, 20, key=BOB.address), by=BOB) == "delegation_unknown"
    assert await stage.refused(stage.report(10, 20, stage=BOB.address)) == "report_forged"
    assert await stage.refused(stage.report(10, 20, key=KEY.address), by=KEY) == "delegation_unknown"
    good = stage.report(10, 20)
    text = good.text().replace('"epoch":1', '"epoch":1 ')
    body = {"reports": [{"text": text, "signature": ALICE.sign(text)}, {"text": good.text()}, 7, {}]}
    reply = await stage.served.client.post("/api/stage-reports", json=body, headers=stage.token)
    assert {each["code"] for each in reply.json()["results"]} == {"report_malformed"}
    tampered = dataclasses.replace(good, slices=(SliceWork(0, 0, 8, 11, 20, DIGEST, True),))
    signed = {"text": tampered.text(), "signature": ALICE.sign(good.text())}
    reply = await stage.served.client.post("/api/stage-reports", json={"reports": [signed]}, headers=stage.token)
    assert reply.json()["results"][0]["code"] == "report_forged"
    assert await figures(stage.served) == {}


async def test_a_session_key_of_the_stage_signs_for_it_until_its_wallet_takes_that_back(stage: Stage) -> None:
    stage.served.store.delegate(ALICE.address, KEY.address, int(NOW) + 1000, int(NOW))
    (answer,) = await stage.send(stage.report(10, 20, key=KEY.address), by=KEY)
    assert answer["accepted"]
    stage.served.store.delegate(ALICE.address, KEY.address, 0, int(NOW))
    assert await stage.refused(stage.report(11, 20, 2, key=KEY.address), by=KEY) == "delegation_unknown"


async def test_only_the_stage_that_the_plan_names_now_is_believed_and_only_about_its_layers(stage: Stage) -> None:
    for changes, code in (
        ({"epoch": 0}, "report_old_epoch"),
        ({"epoch": 2}, "report_old_epoch"),
        ({"ring": "other"}, "report_unknown_ring"),
        ({"model_digest": "00" * 32}, "report_other_model"),
        ({"hub": BOB.address}, "report_other_hub"),
        ({"layer": 1}, "report_outside_window"),
        ({"slices": (SliceWork(0, 0, N_EXPERT + 1, 1, 1, DIGEST, True),)}, "report_outside_window"),
        ({"session": "expert-never-joined"}, "report_unknown_worker"),
        ({"wallet": BOB.address}, "report_unknown_worker"),
    ):
        assert await stage.refused(stage.report(1, 1, **changes)) == code
    stage.token = await stage.served.token(CAROL)
    nobody = stage.report(1, 1, stage=CAROL.address, key=CAROL.address)
    assert await stage.refused(nobody, by=CAROL) == "report_not_in_plan"
    stage.token = await stage.served.token(BOB)
    other = stage.report(1, 1, stage=BOB.address, key=BOB.address, layer=1)
    assert await stage.refused(other, by=BOB) == "report_unknown_worker"


async def test_a_stage_and_a_worker_that_agree_are_paid_no_more_than_passed_between_them(stage: Stage) -> None:
    stage.carried(bytes_of(10, 20), 2 * N_EMBD * 10)
    assert await stage.refused(stage.report(10, 21)) == "report_over_counted"
    assert await stage.refused(stage.report(11, 9)) == "report_over_counted"
    (answer,) = await stage.send(stage.report(10, 20))
    assert answer["accepted"]
    # Another run has no other bytes, and what the worker pushed unasked is only one of the two directions.
    stage.carried(bytes_of(10, 20), 10**9)
    assert await stage.refused(stage.report(1, 0, run="0b" * 16)) == "report_over_counted"
    stage.carried(10**9, 2 * N_EMBD * 10)
    assert await stage.refused(stage.report(1, 0, run="0b" * 16)) == "report_over_counted"
    # What the hub carried for the worker elsewhere is no bound of this stage.
    elsewhere = Joint(f"{RING}/experts/1", BOB.address, CAROL.address, SESSION, WORKER, 10**9, 10**9)
    stage.served.hub.restore((), [elsewhere])
    assert await stage.refused(stage.report(11, 20, 2)) == "report_over_counted"
    stage.carried(bytes_of(13, 24), 2 * N_EMBD * 13)
    await stage.send(stage.report(3, 4, run="0b" * 16))
    assert await earned(stage.served) == bytes_of(13, 24)


async def test_a_run_is_paid_for_one_rank_only(stage: Stage) -> None:
    """A wallet that serves another rank now, or another ring with wider rows, brings no totals along."""
    await stage.send(stage.report(10, 20))
    wide = OfferedModel("wide", 3, 16 * N_EMBD, N_EXPERT, (0,), bytes(32))
    other = Joint("wide/experts/0", ALICE.address, CAROL.address, SESSION, WORKER, 10**9, 10**9)
    before = await figures(stage.served)
    for sequence, run, code in ((2, RUN, "report_other_rank"), (3, "0b" * 16, "")):
        refused = ""
        try:
            book(stage.served.store, Booking(stage.report(1, 1, sequence, run=run), "", other, wide, {}), int(NOW))
        except NetworkError as error:
            refused = error.code
        assert refused == code
    paid = {(f"stage:{ALICE.address}:{'0b' * 16}", WORKER): (2 * 16 * N_EMBD + 10, 1, 1)}
    assert await figures(stage.served) == before | paid


async def test_runs_of_stages_do_not_fill_what_the_settlement_reads(stage: Stage) -> None:
    for number in range(3):
        await stage.send(stage.report(number, number, run=f"{number:032x}"))
    assert len(await figures(stage.served)) == 3
    stage.served.clock.now += STAGE_LISTED_S + 1
    assert len(await figures(stage.served)) == 2  # they are not credited yet, however late that is
    assert await earned(stage.served) == bytes_of(3, 3)
    assert await figures(stage.served) == {}
    await stage.send(stage.report(4, 4, 2, run=f"{2:032x}"))
    assert await earned(stage.served) == bytes_of(5, 5)


def test_a_report_and_the_hubs_counts_may_enter_a_new_pair_at_once(postgresql: PostgresqlServer) -> None:
    store = Store.open(postgresql.url())
    joint = Joint(f"{RING}/experts/0", ALICE.address, CAROL.address, SESSION, WORKER, 10**6, 10**6)
    offered = OfferedModel(RING, 3, N_EMBD, N_EXPERT, (0,), bytes(32))
    booking = Booking(report_of(BOB.address, "00" * 32, 10, 20, 1), "", joint, offered, {})
    try:
        with ThreadPoolExecutor(1) as pool:
            with store.write() as connection:
                names = {name: getattr(joint, name) for name in ("star", "stage", "wallet", "session")}
                counts = {"worker_id": WORKER, "down": 7, "up": 5}
                connection.execute(stage_bytes.insert().values(**names, **counts))
                second = pool.submit(book, store, booking, int(NOW))
                waits = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
                while not connection.scalar(waits):
                    assert not second.done(), second.result()
            second.result()
        with store.read() as connection:
            (row,) = connection.execute(sa.select(stage_bytes)).all()
        assert (row.down, row.up) == (10**6, 10**6)
    finally:
        store.close()


async def test_runs_cannot_be_opened_without_end(stage: Stage) -> None:
    for number in range(MAX_RUNS):
        (answer,) = await stage.send(stage.report(0, 0, run=f"{number:032x}"))
        assert answer["accepted"]
    assert await stage.refused(stage.report(0, 0, run="ff" * 16)) == "report_too_many_runs"
    stage.served.clock.now += 3601
    (answer,) = await stage.send(stage.report(0, 0, run="ff" * 16))
    assert answer["accepted"]


async def test_a_hub_that_was_killed_pays_nothing_twice_and_goes_on(
    tmp_path: Path, ring: tuple[ServedModel, ...]
) -> None:
    async with gateway(tmp_path, models=ring) as served:
        stage = Stage(served, await served.token(ALICE))
        stage.carried(5000, 5000)
        await served.stage_reports.flush()
        stage.carried(9000, 9000)
        first = stage.report(20, 40)
        await stage.send(first)  # what it is bounded by is written with it
        assert await earned(served) == bytes_of(20, 40)
        stage.carried(20000, 20000)  # and this is lost
    async with gateway(tmp_path, models=ring) as served:
        (joint,) = served.hub.joints()
        assert (joint.down, joint.up, joint.worker) == (9000, 9000, WORKER)
        stage = Stage.__new__(Stage)
        stage.served, stage.token, stage.joint = served, await served.token(ALICE), joint
        assert await stage.refused(first) == "report_replayed"
        assert await stage.refused(stage.report(90, 180, 2)) == "report_over_counted"
        stage.carried(30000, 30000)
        await stage.send(stage.report(90, 180, 2))
        assert await earned(served) == bytes_of(90, 180)


async def test_a_stages_quarantine_voids_its_own_reports_and_is_kept_with_what_was_signed(stage: Stage) -> None:
    served = stage.served
    served.meter.admitted(SESSION, CAROL.address, WORKER, RING, {})
    trunk = entry(SESSION, CAROL.address, 777, layer=1)
    await served.meter.read_engine("engine:1", [trunk])
    await stage.send(stage.report(10, 20))
    assert await earned(served) == 777 + bytes_of(10, 20)
    await served.meter.read_engine("engine:1", [{**trunk, "paid_bytes": 800}])
    await stage.send(stage.report(50, 90, 2))
    fault = "an expert's gain is off by 0.05 (at most 0.02 is rounding)"
    caught = stage.report(51, 92, 3, quarantined=True, convictions=1, fault=fault, evidence="e1" * 32)
    assert await stage.send(caught) == [{"accepted": True, "lifted": False}]
    # What was credited stays, what its reports claimed since is void, and what others owe the worker is not touched.
    assert await earned(served) == 800 + bytes_of(10, 20)
    assert served.meter.quarantined(CAROL.address, WORKER, ALICE.address)
    assert not served.meter.quarantined(CAROL.address, WORKER, BOB.address)
    assert not served.meter.quarantined(CAROL.address, WORKER)
    (case,) = Quarantines(served.store).cases()
    assert (case.caught_by, case.fault, case.evidence_digest) == (ALICE.address, fault, "e1" * 32)
    assert StageReport.parse(case.report) == caught
    assert case.signature == ALICE.sign(caught.text())
    # Convictions without end are one case.
    for number in (2, 3):
        await stage.send(dataclasses.replace(caught, sequence=3 + number, convictions=number))
    assert Quarantines(served.store).cases() == (case,)
    # A restarted engine of the stage knows nothing of it; its reports still earn nothing.
    await stage.send(stage.report(30, 60, run="0b" * 16))
    assert await earned(served) == 800 + bytes_of(10, 20)


async def test_a_lifted_quarantine_is_told_to_the_stage_and_pays_only_what_comes_after(stage: Stage) -> None:
    served, book_ = stage.served, Quarantines(stage.served.store)
    await stage.send(stage.report(10, 20))
    assert await earned(served) == bytes_of(10, 20)
    caught = {"quarantined": True, "convictions": 1, "fault": "wrong"}
    await stage.send(stage.report(14, 28, 2, **caught))
    assert len(book_.lift(CAROL.address, WORKER, int(NOW))) == 1
    assert book_.lift(CAROL.address, WORKER, int(NOW)) == ()
    assert not served.meter.quarantined(CAROL.address, WORKER, ALICE.address)
    # The stage's engine still holds it for quarantined, until it is told.
    assert await stage.send(stage.report(14, 28, 3, **caught)) == [{"accepted": True, "lifted": True}]
    assert await earned(served) == bytes_of(10, 20)
    await stage.send(stage.report(20, 40, 4, convictions=1, fault="wrong"))
    assert await earned(served) == bytes_of(10, 20) + bytes_of(6, 12)
    again = stage.report(21, 42, 5, quarantined=True, convictions=2, fault="wrong again")
    assert await stage.send(again) == [{"accepted": True, "lifted": False}]
    assert served.meter.quarantined(CAROL.address, WORKER, ALICE.address)
    assert await earned(served) == bytes_of(10, 20) + bytes_of(6, 12)


async def test_one_lift_is_of_every_run_of_the_stage_that_caught_the_worker(stage: Stage) -> None:
    served, book_ = stage.served, Quarantines(stage.served.store)
    first = {"quarantined": True, "convictions": 1, "fault": "wrong", "evidence": "e1" * 32}
    second = {**first, "fault": "wrong once more", "evidence": "e2" * 32, "run": "0b" * 16}
    await stage.send(stage.report(1, 1, **first), stage.report(2, 2, **second))
    (listed,) = book_.cases()
    assert listed.evidence_digest == "e1" * 32
    against = book_.against(CAROL.address, WORKER)
    assert [each.evidence_digest for each in against] == ["e1" * 32, "e2" * 32]
    assert book_.against(CAROL.address, "another") == book_.against(BOB.address) == ()
    assert book_.lift(CAROL.address, WORKER, int(NOW)) == against
    # The engine of the second run still holds it for quarantined, and hears that it was lifted.
    assert await stage.send(stage.report(2, 2, 2, **second)) == [{"accepted": True, "lifted": True}]
    assert not served.meter.quarantined(CAROL.address, WORKER, ALICE.address)
    assert book_.cases() == ()
    assert {each.lifted_at for each in book_.cases(lifted=True)} == {int(NOW)}
    assert book_.lift(CAROL.address, WORKER, int(NOW)) == ()


async def test_what_was_shown_is_lifted_whatever_a_stage_adds_to_it_meanwhile(stage: Stage) -> None:
    """A stage must not hold up a lift by convicting the worker over and over."""
    book_ = Quarantines(stage.served.store)
    caught = {"quarantined": True, "convictions": 1, "fault": "wrong"}
    await stage.send(stage.report(1, 1, **caught))
    shown = book_.against(CAROL.address, WORKER)
    await stage.send(stage.report(2, 2, 2, **{**caught, "convictions": 2}), stage.report(2, 2, run="0b" * 16, **caught))
    assert len(book_.lift(CAROL.address, WORKER, int(NOW), shown)) == 3
    assert book_.against(CAROL.address) == ()


async def test_what_the_worker_announced_stands_in_its_statements(stage: Stage) -> None:
    served = stage.served
    tally = Tally(SESSION, CAROL.address, WORKER, "ab" * 32)
    served.hub.restore([tally])
    tally.enter(0.0)
    tally.add_ws2tcp(100)
    token = await served.token(CAROL)

    async def stated() -> str:
        served.clock.now += 60
        reply = await served.client.get(f"/api/statements?worker={WORKER}", headers=token)
        return Statement.parse(reply.json()["statements"][-1]["statement"]).shard_digest

    assert await stated() == GENESIS
    await stage.send(stage.report(10, 20))
    assert await stated() == DIGEST
    two = tuple(SliceWork(0, begin, begin + 8, 10, 20, digest, True) for begin, digest in ((0, DIGEST), (8, "6e" * 32)))
    await stage.send(stage.report(0, 0, 2, slices=two))
    assert await stated() == held_digest([(0, 0, 8, DIGEST), (0, 8, 16, "6e" * 32)]) not in (GENESIS, DIGEST)
    unknown = (two[0], dataclasses.replace(two[1], rows=11, shard_digest=GENESIS))
    await stage.send(stage.report(0, 0, 3, slices=unknown))
    assert await stated() == GENESIS


# -- the books under any history ---------------------------------------------------------------------------------------

work = st.tuples(st.integers(0, 5), st.integers(0, 9))
events = st.one_of(
    st.tuples(st.just("serve"), st.integers(0, 1), work),  # a run does work, and the hub carries it on an f32 wire
    st.tuples(st.just("claim"), st.integers(0, 1), work),  # so much more is claimed than was ever done
    st.tuples(st.just("replay"), st.integers(0, 1), work),
    st.tuples(st.just("caught"), st.integers(0, 1), work),
    st.tuples(st.just("lift"), st.integers(0, 1), work),
    st.tuples(st.just("settle"), st.integers(0, 1), work),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(events, max_size=25))
def test_whatever_is_reported_no_pair_is_paid_twice_none_that_did_not_pass_and_none_that_was_void(
    history: list[tuple[str, int, tuple[int, int]]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Store.open(f"sqlite:///{directory}/g.sqlite")
        try:
            Books(store).play(history)
        finally:
            store.close()


class Books:
    """Plays a history against the books, beside a model of it in whole numbers."""

    def __init__(self, store: Store) -> None:
        self.store, self.ledger, self.quarantines = store, Ledger(store), Quarantines(store)
        self.meter = Meter(store, Census(), Clock())
        self.offered = OfferedModel(RING, 3, N_EMBD, N_EXPERT, (0,), bytes(32))
        self.joint = Joint(f"{RING}/experts/0", ALICE.address, CAROL.address, SESSION, WORKER)
        self.told = [(0, 0), (0, 0)]
        """(rows, pairs) that each run's last accepted report said, honest or not."""
        self.convictions, self.held = [0, 0], [False, False]
        self.sequence = 0
        self.last = [0, 0]
        self.payable = self.credited = 0
        """Micro-units that may be paid once settled, and that were."""

    def play(self, history: list[tuple[str, int, tuple[int, int]]]) -> None:
        for kind, run, (rows, pairs) in history:
            match kind:
                case "serve":
                    self.joint.down += 4 * N_EMBD * rows + 8 * pairs + 24
                    self.joint.up += 4 * N_EMBD * rows + 24
                    self.report(run, rows, pairs)
                case "claim":
                    self.report(run, 1000 * rows + 1, pairs)
                case "replay":
                    if self.last[run]:
                        self.refused(self.made(run, 5, 5, max(1, self.last[run] - rows)), "report_replayed")
                case "caught":
                    self.convictions[run] += not self.held[run]
                    self.held[run] = True
                    self.report(run, 0, 0)
                case "lift":
                    self.quarantines.lift(CAROL.address, WORKER, int(NOW))
                    self.held = [False, False]
                case "settle":
                    self.settle()
        self.settle()
        assert self.ledger.audit() == ()

    def made(self, run: int, rows: int, pairs: int, sequence: int) -> Booking:
        before = self.told[run]
        report = report_of(
            BOB.address,
            "00" * 32,
            before[0] + rows,
            before[1] + pairs,
            sequence,
            run=f"{run:032x}",
            requests=self.sequence,
            quarantined=self.held[run],
            convictions=self.convictions[run],
        )
        return Booking(report, "", self.joint, self.offered, {})

    def report(self, run: int, rows: int, pairs: int) -> None:
        self.sequence += 1
        booking = self.made(run, rows, pairs, self.sequence)
        claimed = [sum(each) for each in zip(*self.told, strict=True)]
        fits = bytes_of(claimed[0] + rows, claimed[1] + pairs) <= self.joint.down
        if not fits or 2 * N_EMBD * (claimed[0] + rows) > self.joint.up:
            self.refused(booking, "report_over_counted")
            return
        standing = book(self.store, booking, int(NOW))
        self.last[run] = self.sequence
        self.told[run] = (self.told[run][0] + rows, self.told[run][1] + pairs)
        if any(self.held) and self.quarantines.quarantined(CAROL.address, WORKER, ALICE.address):
            self.payable = self.credited
        else:
            self.payable += bytes_of(rows, pairs)
        assert (standing is not None) == self.held[run]
        assert standing is not Standing.LIFTED

    def refused(self, booking: Booking, code: str) -> None:
        with pytest.raises(NetworkError) as caught:
            book(self.store, booking, int(NOW))
        assert caught.value.code == code

    def settle(self) -> None:
        for row in self.meter._read():
            self.ledger.credit(Reading(row.wallet, row.worker_id, row.kind, row.run_id, row.micro_units), int(NOW))
        self.credited = self.payable
        assert sum(each.micro_units for each in self.ledger.accounts()) == self.credited <= self.joint.down
