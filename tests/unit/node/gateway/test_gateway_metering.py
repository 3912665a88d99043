"""From acknowledged work to credited KVR: counters that outlive engines, hubs and gateways, and nothing twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_parts import ALICE, BOB, CAROL, MOE, NOW, Clock, Gateway, entry, gateway

from kvasir_console.config import ServedModel
from kvasir_console.errors import ConfigError, LedgerError, NetworkError
from kvasir_console.node.gateway.census import Census, OfferedModel
from kvasir_console.node.gateway.coverage import parse_report
from kvasir_console.node.gateway.ledger import Ledger, Reading
from kvasir_console.node.gateway.metering import Meter, ring_contributions, worker_shard
from kvasir_console.node.gateway.quarantine import Quarantines
from kvasir_console.node.gateway.settle import Settler, parse_row, read_bonuses
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.placement.plan import Plan, PlannedStage
from kvasir_console.relay.counting import SessionCount
from kvasir_console.relay.wire.signed import canonical_json
from kvasir_console.relay.wire.statement import GENESIS

VECTORS = json.loads((Path(__file__).parents[3] / "data/conformance/settlement.json").read_text())


@pytest.fixture
def store(tmp_path: Path):
    opened = Store.open(f"sqlite:///{tmp_path / 'g.sqlite'}")
    yield opened
    opened.close()


@pytest.fixture
def census() -> Census:
    made = Census()
    made.offer([OfferedModel(MOE, 3, 64, 8, (1,), bytes(32))])
    return made


@pytest.fixture
def meter(store: Store, census: Census) -> Meter:
    made = Meter(store, census, Clock())
    made.admitted("expert-a", ALICE.address, "a", MOE, {"os": "linux"})
    made.admitted("expert-b", BOB.address, "b", MOE, {})
    return made


async def figures(meter: Meter) -> dict[tuple[str, str], int]:
    return {(row.run_id, row.worker_id): row.micro_units for row in await meter.contributions()}


async def test_acknowledged_bytes_are_micro_units(meter: Meter) -> None:
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1234), entry("expert-b", BOB.address, 5)])
    rows = {row.worker_id: row for row in await meter.contributions()}
    assert (rows["a"].micro_units, rows["a"].wallet, rows["a"].kind, rows["a"].run_id) == (
        1234,
        ALICE.address,
        "expert",
        "r1",
    )
    assert (rows["a"].requests, rows["a"].rows, rows["a"].pairs) == (1, 3, 6)
    assert rows["b"].micro_units == 5
    shown = rows["a"].to_json()
    assert (shown["node_id"], shown["owner"], shown["units"], shown["os"]) == ("a", ALICE.address, 0.001234, "linux")
    assert shown["perf_tps"] is None


async def test_the_hubs_bytes_stand_beside_and_are_not_paid(meter: Meter) -> None:
    count = SessionCount("expert-a", ALICE.address, 9000, 8000, True, 1, NOW, None)
    foreign = SessionCount("expert-a", BOB.address, 1, 1, True, 1, NOW, None)
    meter.watch_bytes(lambda: [count, foreign])
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 10)])
    (row,) = await meter.contributions()
    assert (row.micro_units, row.bytes_up, row.bytes_down) == (10, 9000, 8000)


async def test_a_worker_that_moved_to_another_window_keeps_its_work(meter: Meter) -> None:
    entries = [entry("expert-a", ALICE.address, 10), entry("expert-a", ALICE.address, 7, layer=2)]
    await meter.read_engine("r1", entries)
    assert await figures(meter) == {("r1", "a"): 17}


async def test_a_restarted_engine_counts_beside_its_past(meter: Meter) -> None:
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 100)])
    await meter.read_engine("r2", [entry("expert-a", ALICE.address, 30)])
    assert await figures(meter) == {("r1", "a"): 100, ("r2", "a"): 30}


async def test_what_was_metered_outlives_the_gateway(store: Store, census: Census, meter: Meter) -> None:
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 100)])
    assert await figures(Meter(store, census, Clock())) == {("r1", "a"): 100}


async def test_a_session_name_that_changes_hands_credits_each_its_own(meter: Meter) -> None:
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 100)])
    meter.admitted("expert-a", CAROL.address, "c", MOE, {})
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 100), entry("expert-a", CAROL.address, 1)])
    rows = {row.wallet: row.micro_units for row in await meter.contributions()}
    assert rows == {ALICE.address: 100, CAROL.address: 1}


async def test_a_counter_never_moves_to_another_worker_of_its_wallet(meter: Meter) -> None:
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 100)])
    meter.admitted("expert-a", ALICE.address, "renamed", MOE, {})
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 150)])
    assert await figures(meter) == {("r1", "a"): 150}


async def test_work_of_nobody_we_admitted_is_not_paid(meter: Meter) -> None:
    await meter.read_engine("r1", [entry("expert-x", ALICE.address, 100), entry("expert-b", ALICE.address, 100)])
    assert await figures(meter) == {}


def credit(store: Store, rows: Iterable[Any]) -> int:
    """What a settlement poll of these contributions credits, in micro-units."""
    ledger, before = Ledger(store), {}
    for row in rows:
        account = ledger.account(row.wallet, row.worker_id, row.kind)
        before[row.wallet, row.worker_id] = 0 if account is None else account.micro_units
        ledger.credit(Reading(row.wallet, row.worker_id, row.kind, row.run_id, row.micro_units), int(NOW))
    after = {(each.wallet, each.worker_id): each.micro_units for each in ledger.accounts()}
    return sum(after[key] - known for key, known in before.items())


async def test_a_quarantined_worker_keeps_what_was_credited_and_nothing_else(
    store: Store, census: Census, meter: Meter
) -> None:
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1000), entry("expert-b", BOB.address, 50)])
    assert credit(store, await meter.contributions()) == 1050
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1700), entry("expert-b", BOB.address, 90)])
    caught = entry("expert-a", ALICE.address, 1900, quarantined=True)
    await meter.read_engine("r1", [caught, entry("expert-b", BOB.address, 90)])
    assert await figures(meter) == {("r1", "a"): 1000, ("r1", "b"): 90}
    assert credit(store, await meter.contributions()) == 40
    # An engine that begins anew and knows nothing of it changes nothing, nor does another gateway on this database.
    for again in (meter, Meter(store, census, Clock())):
        assert again.quarantined(ALICE.address, "a")
        assert not again.quarantined(BOB.address, "b")
        assert not again.quarantined(BOB.address, "a")
    await meter.read_engine("r2", [entry("expert-a", ALICE.address, 500)])
    assert credit(store, await meter.contributions()) == 0


async def test_a_lifted_quarantine_is_told_to_the_engine_and_what_was_void_stays_void(
    store: Store, meter: Meter
) -> None:
    book = Quarantines(store)
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1000)])
    assert credit(store, await meter.contributions()) == 1000
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1400)])
    caught = {"quarantined": True, "convictions": 1, "fault": "off by 5%", "evidence": "/e/1.json"}
    assert await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1500, **caught)]) == ()
    (case,) = book.cases()
    assert (case.fault, case.evidence, case.session, case.caught_by) == ("off by 5%", "/e/1.json", "expert-a", "")
    assert [each.number for each in book.lift(ALICE.address, "a", int(NOW))] == [1]
    assert not meter.quarantined(ALICE.address, "a")
    # The engine is told as long as it still holds the case that was lifted, and not for another one.
    stale = [entry("expert-a", ALICE.address, 1500, **caught)]
    assert await meter.read_engine("r1", stale) == (("expert-a", ALICE.address),)
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1500, convictions=1)])
    assert credit(store, await meter.contributions()) == 0
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1730, convictions=1)])
    assert credit(store, await meter.contributions()) == 230
    again = {**caught, "convictions": 2}
    assert await meter.read_engine("r1", [entry("expert-a", ALICE.address, 1800, **again)]) == ()
    assert meter.quarantined(ALICE.address, "a")
    assert credit(store, await meter.contributions()) == 0
    assert [each.lifted_at for each in book.cases(lifted=True)] == [int(NOW), None]


async def test_runs_that_are_over_are_voided_with_the_worker(store: Store, meter: Meter) -> None:
    await meter.read_engine("r0", [entry("expert-a", ALICE.address, 300)])
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 10, quarantined=True)])
    assert await figures(meter) == {("r0", "a"): 0, ("r1", "a"): 0}


async def test_the_shard_that_a_worker_holds_now_is_kept_and_an_older_wire_names_none(
    store: Store, meter: Meter
) -> None:
    def held() -> str:
        with store.read() as connection:
            return worker_shard(connection, ALICE.address, "a")

    one = entry("expert-a", ALICE.address, 10, shard_digest="ab" * 32)
    assert held() == ""
    await meter.read_engine("r1", [one])
    assert held() == "ab" * 32
    moved = entry("expert-a", ALICE.address, 5, layer=2, shard_digest="cd" * 32)
    await meter.read_engine("r1", [{**one, "connected": False}, moved])
    assert held() == "cd" * 32
    await meter.read_engine("r1", [{**one, "connected": False}, {**moved, "connected": False}])
    assert held() == "cd" * 32
    await meter.read_engine("r1", [{**one, "shard_digest": ""}])
    assert held() == GENESIS


async def test_served_work_makes_a_replica(census: Census, meter: Meter) -> None:
    report = parse_report({"worker_id": "a", "model": MOE, "segments": [[1, 0, 8]]})
    census.report(ALICE.address, report, NOW)
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 0, rows=0)])
    assert [run.replicas for run in census.segments(NOW)[MOE, 1]] == [0]
    await meter.read_engine("r1", [entry("expert-a", ALICE.address, 10)])
    assert [run.replicas for run in census.segments(NOW)[MOE, 1]] == [1]


@pytest.mark.parametrize("case", VECTORS["ring_shares"]["cases"], ids=lambda case: case["name"])
def test_a_rings_rows_are_split_at_the_window_boundaries(case: dict[str, Any]) -> None:
    wallets = [ALICE.address, BOB.address, CAROL.address]
    stages = tuple(
        PlannedStage(rank, wallets[rank % 3], begin, end) for rank, (begin, end) in enumerate(case["windows"])
    )
    plan = Plan("r", "m", bytes(32).hex(), case["n_layers"], 4, stages)
    rows = ring_contributions(canonical_json(plan.to_dict()), case["token_rows"], 1, int(NOW))
    assert [row.micro_units for row in rows] == case["micro_units"]["boundary"]
    assert {row.run_id for row in rows} == {"ring:r:4"}
    assert len({row.worker_id for row in rows}) == len(stages)


# -- settlement over HTTP --------------------------------------------------------------------------------------------


@pytest.fixture
async def served(tmp_path: Path, models: tuple[ServedModel, ...]) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path, models=models) as running:
        running.meter.admitted("expert-a", ALICE.address, "a", MOE, {"os": "linux"})
        yield running


def settler(served: Gateway, token: str | None = None) -> Settler:
    token = served.secrets.service_token if token is None else token
    return Settler(served.client, token, served.ledger, poll_s=1.0, clock=served.clock)


async def test_polls_credit_what_grew(served: Gateway) -> None:
    poller = settler(served)
    assert await poller.poll() == 0
    await served.meter.read_engine("r1", [entry("expert-a", ALICE.address, 1_000_050)])
    assert await poller.poll() == 10_000
    assert await poller.poll() == 0
    await served.meter.read_engine("r1", [entry("expert-a", ALICE.address, 1_000_149)])
    assert await settler(served).poll() == 1  # a gateway that started again: 50 were carried, 99 came
    (account,) = served.ledger.accounts()
    assert (account.worker_id, account.kind, account.model, account.platform["os"]) == ("a", "expert", MOE, "linux")
    assert (account.credited_micro_kvr, account.carried) == (10_001, Fraction(49, 100))


async def test_a_wallet_with_a_bonus_earns_half_as_much_again_from_then_on(served: Gateway) -> None:
    await served.meter.read_engine("r1", [entry("expert-a", ALICE.address, 1_000_000)])
    assert await settler(served).poll() == 10_000
    rewarded = Settler(
        served.client,
        served.secrets.service_token,
        served.ledger,
        poll_s=1.0,
        bonuses=read_bonuses(f" {BOB.address}  {ALICE.address} "),
        clock=served.clock,
    )
    assert await rewarded.poll() == 0  # what was credited stays as it was
    await served.meter.read_engine("r1", [entry("expert-a", ALICE.address, 1_000_101)])
    assert await rewarded.poll() == 1
    (account,) = served.ledger.accounts()
    assert account.credited_micro_kvr + account.carried == Fraction(1_000_000, 100) + Fraction(101, 100) * Fraction(
        3, 2
    )
    assert served.ledger.audit() == ()


def test_a_bonus_for_what_is_no_wallet_is_refused() -> None:
    assert read_bonuses("") == {}
    with pytest.raises(ConfigError, match="'everyone' is no Solana address"):
        read_bonuses(f"{ALICE.address} everyone")


async def test_counters_that_stand_still_do_not_reach_the_database(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that are over stay listed for a month: a poll costs what moved, not what there ever was."""
    handed: list[str] = []
    credit = served.ledger.credit

    def counting(reading: Reading, now: int) -> int:
        handed.append(reading.run_id)
        return credit(reading, now)

    monkeypatch.setattr(served.ledger, "credit", counting)
    poller = settler(served)
    for run_id in ("r1", "r2"):
        await served.meter.read_engine(run_id, [entry("expert-a", ALICE.address, 700_000)])
    for _ in range(3):
        await poller.poll()
    assert sorted(handed) == ["r1", "r2"]
    await served.meter.read_engine("r2", [entry("expert-a", ALICE.address, 900_000)])
    await poller.poll()
    assert sorted(handed) == ["r1", "r2", "r2"]
    (account,) = served.ledger.accounts()
    assert account.micro_units == 1_600_000


async def test_an_engine_that_died_between_polls_loses_nothing_and_doubles_nothing(served: Gateway) -> None:
    poller = settler(served)
    await served.meter.read_engine("r1", [entry("expert-a", ALICE.address, 500_000)])
    await poller.poll()
    await served.meter.read_engine("r1", [entry("expert-a", ALICE.address, 700_000)])  # then it dies
    await served.meter.read_engine("r2", [entry("expert-a", ALICE.address, 900_000)])  # more than r1's baseline
    await poller.poll()
    await poller.poll()
    (account,) = served.ledger.accounts()
    assert (account.micro_units, account.credited_micro_kvr) == (1_600_000, 16_000)


async def test_a_refused_or_absent_hub_is_an_error_and_changes_nothing(served: Gateway) -> None:
    with pytest.raises(NetworkError) as caught:
        await settler(served, "wrong token, long enough").poll()
    assert caught.value.code == "hub_refused"

    def broken(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    async with httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url="http://hub") as client:
        with pytest.raises(NetworkError) as caught:
            await Settler(client, "t", served.ledger, poll_s=1.0).poll()
        assert caught.value.code == "hub_unreachable"
    assert served.ledger.accounts() == ()


async def _poll(ledger: Ledger, body: str) -> int:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body.encode()))
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as client:
        return await Settler(client, "t", ledger, poll_s=1.0, clock=Clock()).poll()


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"contributions": 1}', "{" * 2000])
async def test_a_malformed_reply_is_named(store: Store, body: str) -> None:
    with pytest.raises(NetworkError) as caught:
        await _poll(Ledger(store), body)
    assert caught.value.code == "hub_malformed"


async def test_one_bad_row_does_not_keep_the_others_from_their_pay(store: Store) -> None:
    """A public bridge's rows: decimal units, no run; and rows nobody can be paid for."""
    ledger = Ledger(store)
    good = {"node_id": "n", "owner": ALICE.address, "units": 1.277952, "perf_tps": 12.5}
    bad: Iterable[Any] = (
        7,
        {"node_id": "n", "units": 1},
        {"node_id": "n", "owner": "nobody", "units": 1},
        {"owner": BOB.address, "units": 1},
        {"node_id": "n", "owner": BOB.address, "units": "1"},
        {"node_id": "n", "owner": BOB.address, "units": True},
        {"node_id": "n", "owner": BOB.address, "micro_units": 1.5},
        {"node_id": "n", "owner": BOB.address, "micro_units": -1},
        {"node_id": "n", "owner": BOB.address, "micro_units": 2**63},
    )
    credited = await _poll(ledger, json.dumps({"contributions": [*bad, good]}))
    assert credited == 8945  # the first published remote session: 1.277952 units in tier C
    (account,) = ledger.accounts()
    assert (account.wallet, account.kind, account.micro_units, account.carried) == (
        ALICE.address,
        "legacy",
        1_277_952,
        Fraction(83, 125),
    )


@pytest.mark.parametrize("case", VECTORS["counter_text"], ids=lambda case: case["text"])
async def test_counters_are_read_as_decimals(store: Store, case: dict[str, Any]) -> None:
    body = f'{{"contributions": [{{"node_id": "n", "owner": "{ALICE.address}", "units": {case["text"]}}}]}}'
    await _poll(Ledger(store), body)
    total = sum(account.micro_units for account in Ledger(store).accounts())
    assert total == case["micro_units"]


def test_a_row_is_bounded() -> None:
    row = parse_row(
        {"node_id": "n" * 999, "owner": ALICE.address, "micro_units": 1, "run_id": "r" * 999, "os": "x" * 99}
    )
    assert (len(row.worker_id), len(row.run_id), len(row.platform["os"])) == (256, 160, 64)
    with pytest.raises(LedgerError):
        parse_row({"node_id": "", "owner": ALICE.address, "micro_units": 1})
