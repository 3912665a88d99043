"""Balances: exact to the last fraction, credited once, and never paid twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from gateway_parts import ALICE, BOB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from kvasir_console.errors import LedgerError
from kvasir_console.node.gateway import tables
from kvasir_console.node.gateway.ledger import Claim, ClaimState, Ledger, Reading
from kvasir_console.node.gateway.settle import parse_row
from kvasir_console.node.gateway.store import Store

VECTORS = json.loads((Path(__file__).parents[3] / "data/conformance/settlement.json").read_text())
NOW = 1_790_000_000
# Measured speeds that give each tier, from the vectors' own table.
SPEED = {case["tier"]: case["tokens_per_second"] for case in VECTORS["tiers"]}


@pytest.fixture
def store(url: str):
    opened = Store.open(url)
    yield opened
    opened.close()


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store)


def reading(micro_units: int, run_id: str = "run", **fields: Any) -> Reading:
    values: dict[str, Any] = {"wallet": ALICE.address, "worker_id": "w", "kind": "expert", **fields}
    return Reading(run_id=run_id, micro_units=micro_units, **values)


def balance(ledger: Ledger, **fields: str) -> tuple[int, int, Fraction]:
    key = {"wallet": ALICE.address, "worker_id": "w", "kind": "expert", **fields}
    account = ledger.account(**key)
    return (
        (0, 0, Fraction(0))
        if account is None
        else (
            account.micro_units,
            account.credited_micro_kvr,
            account.carried,
        )
    )


# -- credits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VECTORS["amounts"], ids=lambda case: case["name"])
def test_an_amount_is_credited_exactly(ledger: Ledger, case: dict[str, Any]) -> None:
    work = reading(case["micro_units"], perf_tps=SPEED[case["tier"]], bonus=Fraction(case["bonus"]))
    credited = ledger.credit(work, NOW)
    assert ledger.audit() == ()
    assert credited == case["micro_kvr"]
    assert balance(ledger) == (
        case["micro_units"],
        case["micro_kvr"],
        Fraction(case["carried_micro_kvr"]),
    ) or (case["micro_units"] == 0 and ledger.accounts() == ())


@pytest.mark.parametrize("case", VECTORS["carry"], ids=lambda case: case["name"])
def test_remainders_are_carried(ledger: Ledger, case: dict[str, Any]) -> None:
    total = 0
    for step in case["steps"]:
        total += step["bytes"]
        assert ledger.credit(reading(total, perf_tps=SPEED[step["tier"]]), NOW) == step["credit_micro_kvr"]
        assert balance(ledger)[2] == Fraction(step["carried_micro_kvr"])


@pytest.mark.parametrize("case", VECTORS["counter_polls"], ids=lambda case: case["name"])
def test_a_source_that_names_no_run_follows_the_contracts_rule(store: Store, case: dict[str, Any]) -> None:
    """A reading below the last one begins at zero; the reader is told nothing, and may restart itself."""
    ledger, refusals = Ledger(store), set()
    for step in case["events"]:
        if step["event"] == "poll":
            row = {"owner": ALICE.address, "node_id": "w", "kind": "expert", "micro_units": step["micro_units"]}
            try:
                ledger.credit(parse_row(row), NOW)
            except LedgerError as error:
                refusals.add(error.code)
            assert balance(ledger)[0] == step["credited_total"], step
        elif step["event"] == "reader_restarts":
            ledger = Ledger(store)
        else:
            assert step["event"] in ("source_restarts", "poll_fails")
    assert refusals <= {"counter_malformed", "counter_implausible"}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_is_lost_or_doubled_however_runs_are_read(emptied: Callable[[], Store], data: st.DataObject) -> None:
    """Readings of several runs, in any order, late and repeated: each run's largest reading is credited, once, and
    ``credited + carried`` is the exact amount."""
    ledger = Ledger(emptied())
    largest: dict[str, int] = {}
    readings = data.draw(st.lists(st.tuples(st.sampled_from(["r1", "r2", "r3"]), st.integers(0, 10**12)), max_size=12))
    credited = 0
    for run_id, micro_units in readings:
        credited += ledger.credit(reading(micro_units, run_id), NOW)
        largest[run_id] = max(largest.get(run_id, 0), micro_units)
    units, in_account, carried = balance(ledger)
    assert units == sum(largest.values())
    assert in_account == credited
    assert 0 <= carried < 1
    assert in_account + carried == Fraction(units) / 100


def test_rows_are_kept_apart_by_wallet_worker_and_kind(ledger: Ledger) -> None:
    ledger.credit(reading(1_000_000), NOW)
    ledger.credit(reading(2_000_000, wallet=BOB.address), NOW)
    ledger.credit(reading(3_000_000, worker_id="v"), NOW)
    ledger.credit(reading(4_000_000, kind="ring"), NOW)
    assert [
        balance(ledger, **key)[1] for key in ({}, {"wallet": BOB.address}, {"worker_id": "v"}, {"kind": "ring"})
    ] == [
        10_000,
        20_000,
        30_000,
        40_000,
    ]


@pytest.mark.parametrize("micro_units", [-1, 2**62 + 1])
def test_an_implausible_counter_changes_nothing(ledger: Ledger, micro_units: int) -> None:
    with pytest.raises(LedgerError) as caught:
        ledger.credit(reading(micro_units), NOW)
    assert caught.value.code == "counter_implausible"
    assert ledger.accounts() == ()


def test_a_reading_is_credited_once_by_any_number_of_pollers(url: str) -> None:
    stores = [Store.open(url) for _ in range(4)]
    barrier = threading.Barrier(8)

    def poll(index: int) -> int:
        ledger = Ledger(stores[index % 4])
        barrier.wait()
        return sum(ledger.credit(reading(step * 1_000_000), NOW) for step in range(1, 6))

    with ThreadPoolExecutor(8) as pool:
        credited = list(pool.map(poll, range(8)))
    assert sum(credited) == 50_000
    assert balance(Ledger(stores[0]))[:2] == (5_000_000, 50_000)
    for each in stores:
        each.close()


# -- claims ----------------------------------------------------------------------------------------------------------


def earn(ledger: Ledger, micro_kvr: int, **fields: Any) -> None:
    ledger.credit(reading(micro_kvr * 100, **fields), NOW)


@pytest.mark.parametrize("case", VECTORS["claims"], ids=lambda case: str(case["pending_micro_kvr"]))
def test_the_minimum_payout(ledger: Ledger, case: dict[str, Any]) -> None:
    earn(ledger, case["pending_micro_kvr"])
    minimum = VECTORS["rule"]["minimum_claim_micro_kvr"]
    if case["claimable"]:
        claim = ledger.reserve(ALICE.address, minimum, NOW)
        assert (claim.micro_kvr, claim.state) == (case["pending_micro_kvr"], ClaimState.RESERVED)
    else:
        with pytest.raises(LedgerError) as caught:
            ledger.reserve(ALICE.address, minimum, NOW)
        assert caught.value.code == ("below_minimum" if case["pending_micro_kvr"] else "nothing_pending")
        assert ledger.claims() == ()


def test_a_claim_takes_all_rows_of_its_wallet_and_no_others(ledger: Ledger) -> None:
    earn(ledger, 700)
    earn(ledger, 300, kind="ring")
    earn(ledger, 0, worker_id="idle")
    earn(ledger, 5_000, wallet=BOB.address)
    claim = ledger.reserve(ALICE.address, 1, NOW)
    assert claim.micro_kvr == 1_000
    assert [row.pending_micro_kvr for row in ledger.accounts(ALICE.address)] == [0, 0]
    assert [row.pending_micro_kvr for row in ledger.accounts(BOB.address)] == [5_000]


def test_what_is_earned_after_a_claim_is_the_next_claims(ledger: Ledger) -> None:
    earn(ledger, 700)
    ledger.reserve(ALICE.address, 1, NOW)
    with pytest.raises(LedgerError, match="nothing"):
        ledger.reserve(ALICE.address, 1, NOW)
    earn(ledger, 1_000)  # the counter's total: 300 more
    assert ledger.reserve(ALICE.address, 1, NOW).micro_kvr == 300
    assert [claim.micro_kvr for claim in ledger.claims(ALICE.address)] == [700, 300]


def test_claims_that_race_pay_what_there_was_once(url: str) -> None:
    stores = [Store.open(url) for _ in range(4)]
    earn(Ledger(stores[0]), 12_345)
    barrier = threading.Barrier(8)
    refusals: list[str] = []

    def race(index: int) -> int:
        ledger = Ledger(stores[index % 4])
        barrier.wait()
        try:
            return ledger.reserve(ALICE.address, 1, NOW).micro_kvr
        except LedgerError as error:
            refusals.append(error.code)
            return 0

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert sorted(won) == [0] * 7 + [12_345]
    assert refusals == ["nothing_pending"] * 7
    assert Ledger(stores[0]).accounts()[0].claimed_micro_kvr == 12_345
    for each in stores:
        each.close()


def signed(ledger: Ledger, claim: Claim, signature: str = "sig-1") -> Claim:
    attempt = ledger.record_attempt(claim.claim_id, signature, b"raw", 99, NOW)
    assert attempt is not None
    return attempt


def test_a_claim_walks_to_confirmed(ledger: Ledger) -> None:
    earn(ledger, 500)
    claim = signed(ledger, ledger.reserve(ALICE.address, 1, NOW))
    assert (claim.state, claim.signature, claim.raw, claim.last_valid_block_height) == (
        ClaimState.SIGNED,
        "sig-1",
        b"raw",
        99,
    )
    assert ledger.advance(claim, ClaimState.SENT, NOW)
    assert ledger.advance(claim, ClaimState.CONFIRMED, NOW)
    assert ledger.open_claims() == ()
    assert ledger.paid_micro_kvr(ALICE.address) == 500
    assert not ledger.advance(claim, ClaimState.FAILED, NOW)  # the end is the end
    assert not ledger.advance(claim, ClaimState.EXPIRED, NOW)
    assert ledger.accounts()[0].pending_micro_kvr == 0


def test_a_claim_that_failed_on_chain_is_pending_again(ledger: Ledger) -> None:
    earn(ledger, 500)
    earn(ledger, 200, kind="ring")
    claim = signed(ledger, ledger.reserve(ALICE.address, 1, NOW))
    assert ledger.advance(claim, ClaimState.FAILED, NOW, "insufficient funds")
    assert sorted(row.pending_micro_kvr for row in ledger.accounts()) == [200, 500]
    assert not ledger.advance(claim, ClaimState.FAILED, NOW)
    assert sorted(row.pending_micro_kvr for row in ledger.accounts()) == [200, 500]
    assert ledger.reserve(ALICE.address, 1, NOW).micro_kvr == 700
    assert ledger.paid_micro_kvr(ALICE.address) == 0


def test_an_expired_claim_is_signed_anew_and_keeps_its_history(ledger: Ledger) -> None:
    earn(ledger, 500)
    first = signed(ledger, ledger.reserve(ALICE.address, 1, NOW))
    assert ledger.record_attempt(first.claim_id, "sig-2", b"raw", 99, NOW) is None  # not before it expired
    assert ledger.advance(first, ClaimState.EXPIRED, NOW)
    second = signed(ledger, first, "sig-2")
    assert not ledger.advance(first, ClaimState.CONFIRMED, NOW)  # a late word about the old transaction
    assert ledger.advance(second, ClaimState.CONFIRMED, NOW)
    assert ledger.attempts(first.claim_id) == (("sig-1", "expired"), ("sig-2", "confirmed"))
    assert ledger.paid_micro_kvr(ALICE.address) == 500


def test_one_of_two_payers_signs_a_claim(ledger: Ledger) -> None:
    earn(ledger, 500)
    claim = ledger.reserve(ALICE.address, 1, NOW)
    assert ledger.record_attempt(claim.claim_id, "sig-1", b"a", 99, NOW) is not None
    assert ledger.record_attempt(claim.claim_id, "sig-2", b"b", 99, NOW) is None
    assert ledger.claim(claim.claim_id).signature == "sig-1"
    assert ledger.attempts(claim.claim_id) == (("sig-1", "signed"),)


def test_a_signature_serves_one_claim(ledger: Ledger) -> None:
    earn(ledger, 500)
    signed(ledger, ledger.reserve(ALICE.address, 1, NOW))
    earn(ledger, 900)
    other = ledger.reserve(ALICE.address, 1, NOW)
    with pytest.raises(IntegrityError):
        ledger.record_attempt(other.claim_id, "sig-1", b"raw", 99, NOW)
    assert ledger.claim(other.claim_id).state is ClaimState.RESERVED


def test_a_note_is_written_beside_an_open_claim(ledger: Ledger) -> None:
    earn(ledger, 500)
    claim = ledger.reserve(ALICE.address, 1, NOW)
    ledger.note(claim, "the treasury is empty", NOW + 1)
    assert ledger.open_claims()[0].error == "the treasury is empty"
    attempt = signed(ledger, claim)
    assert attempt.error == ""
    ledger.advance(attempt, ClaimState.CONFIRMED, NOW)
    ledger.note(claim, "too late", NOW)
    assert ledger.claim(claim.claim_id).error == ""


def test_the_database_itself_refuses_to_pay_out_more_than_was_credited(store: Store, ledger: Ledger) -> None:
    earn(ledger, 500)
    with pytest.raises(IntegrityError), store.write() as connection:
        connection.execute(tables.accounts.update().values(claimed_micro_kvr=501))
    with pytest.raises(IntegrityError), store.write() as connection:
        connection.execute(
            tables.claim_items.insert().values(claim_id="no such", wallet="w", worker_id="w", kind="k", micro_kvr=1)
        )


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["earn", "claim", "confirm", "fail", "expire"]), st.integers(1, 10**6)), max_size=25
    )
)
def test_money_is_conserved_whatever_happens(emptied: Callable[[], Store], steps: list[tuple[str, int]]) -> None:
    """Credited = paid + open claims + pending, at every step; no claim is paid by two transactions."""
    store = emptied()
    ledger = Ledger(store)
    counter, refusals = 0, set()
    for number, (step, amount) in enumerate(steps):
        open_claims = ledger.open_claims()
        if step == "earn":
            counter += amount
            ledger.credit(reading(counter), NOW)
        elif step == "claim":
            try:
                ledger.reserve(ALICE.address, 1, NOW)
            except LedgerError as error:
                refusals.add(error.code)
        elif open_claims:
            claim = open_claims[amount % len(open_claims)]
            if claim.state in (ClaimState.RESERVED, ClaimState.EXPIRED):
                claim = signed(ledger, claim, f"sig-{number}")
            end = {"confirm": ClaimState.CONFIRMED, "fail": ClaimState.FAILED, "expire": ClaimState.EXPIRED}[step]
            assert ledger.advance(claim, end, NOW)
        accounts = ledger.accounts()
        credited = sum(row.credited_micro_kvr for row in accounts)
        pending = sum(row.pending_micro_kvr for row in accounts)
        waiting = sum(claim.micro_kvr for claim in ledger.open_claims())
        assert credited == ledger.paid_micro_kvr(ALICE.address) + waiting + pending
        assert credited == counter // 100
        assert all(row.pending_micro_kvr >= 0 for row in accounts)
    assert refusals <= {"nothing_pending"}
    with store.read() as connection:
        confirmed = connection.execute(
            sa.select(tables.attempts.c.claim_id, sa.func.count())
            .where(tables.attempts.c.outcome == "confirmed")
            .group_by(tables.attempts.c.claim_id)
        ).all()
    assert all(count == 1 for _, count in confirmed)


# -- the books -------------------------------------------------------------------------------------------------------


def books(ledger: Ledger) -> Claim:
    """Two rows with changing tiers, a paid claim, one that failed and one under way; the last one."""
    for total, speed in ((1_000_001, None), (2_000_003, 95.0), (3_000_004, 10.0), (3_000_007, 95.0)):
        ledger.credit(reading(total, perf_tps=speed), NOW)
    ledger.advance(signed(ledger, ledger.reserve(ALICE.address, 1, NOW), "s1"), ClaimState.CONFIRMED, NOW)
    earn(ledger, 77_777, kind="ring")
    ledger.advance(signed(ledger, ledger.reserve(ALICE.address, 1, NOW), "s2"), ClaimState.FAILED, NOW)
    return signed(ledger, ledger.reserve(ALICE.address, 1, NOW), "s3")


def test_books_that_are_right_have_nothing_against_them(ledger: Ledger) -> None:
    claim = books(ledger)
    assert ledger.audit() == ()
    ledger.advance(claim, ClaimState.EXPIRED, NOW)
    assert ledger.audit() == ()
    ledger.advance(signed(ledger, claim, "s4"), ClaimState.CONFIRMED, NOW)
    assert ledger.audit() == ()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE accounts SET credited_micro_kvr = credited_micro_kvr + 1 WHERE kind = 'expert'", "credited"),
        ("UPDATE accounts SET carry_num = '0' WHERE kind = 'expert'", "carried 0"),
        ("UPDATE credited_units SET micro_units = micro_units - 1 WHERE multiplier = '3/2'", "earned"),
        ("UPDATE credited_units SET multiplier = '2/1' WHERE multiplier = '3/2'", "earned"),
        ("UPDATE accounts SET micro_units = micro_units + 1 WHERE kind = 'ring'", "micro-units"),
        ("UPDATE accounts SET claimed_micro_kvr = claimed_micro_kvr - 1 WHERE kind = 'expert'", "claimed"),
        ("UPDATE claims SET micro_kvr = micro_kvr + 1 WHERE signature = 's1'", "took"),
        ("DELETE FROM claim_items WHERE kind = 'ring'", "took 0"),
        ("UPDATE attempts SET outcome = 'sent' WHERE signature = 's1'", "paid by 0"),
        ("UPDATE attempts SET outcome = 'confirmed' WHERE signature = 's2'", "failed, paid by 1"),
        ("UPDATE claims SET state = 'failed' WHERE signature = 's1'", "paid by 1"),
    ],
)
def test_any_figure_that_was_touched_is_found(store: Store, ledger: Ledger, statement: str, says: str) -> None:
    books(ledger)
    with store.write() as connection:
        connection.execute(sa.text(statement))
    found = ledger.audit()
    assert found
    assert any(says in each for each in found)


FORMULA_TIERS = {
    "S": Fraction(3, 2),
    "A": Fraction(5, 4),
    "B": Fraction(1),
    "C": Fraction(7, 10),
    "unrated": Fraction(1),
}
"""Gateway contract, 3.2."""


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    works=st.lists(
        st.tuples(
            st.sampled_from(["w1", "w2"]),
            st.sampled_from(["run1", "run2"]),
            st.integers(0, 10**9),
            st.sampled_from(sorted(FORMULA_TIERS)),
            st.sampled_from([Fraction(1), Fraction(3, 2)]),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_credited_and_carried_are_the_formula_whatever_tiers_and_bonuses_a_worker_goes_through(
    emptied: Callable[[], Store], works: list[tuple[str, str, int, str, Fraction, bool]]
) -> None:
    """Work of several runs, each piece at the tier and bonus of its reading, with claims in between."""
    ledger, exact, counters = Ledger(emptied()), dict[str, Fraction](), dict[tuple[str, str], int]()
    for worker, run_id, grown, tier, bonus, claims in works:
        counters[worker, run_id] = counters.get((worker, run_id), 0) + grown
        work = reading(counters[worker, run_id], run_id, worker_id=worker, perf_tps=SPEED[tier], bonus=bonus)
        ledger.credit(work, NOW)
        exact[worker] = exact.get(worker, Fraction(0)) + Fraction(grown, 100) * FORMULA_TIERS[tier] * bonus
        for account in ledger.accounts():
            assert account.credited_micro_kvr + account.carried == exact[account.worker_id]
            assert 0 <= account.carried < 1
        if claims and any(account.pending_micro_kvr for account in ledger.accounts()):
            ledger.reserve(ALICE.address, 1, NOW)
        assert ledger.audit() == ()
    assert sum(claim.micro_kvr for claim in ledger.claims()) == sum(row.claimed_micro_kvr for row in ledger.accounts())


def test_work_that_would_not_fit_a_column_is_refused_and_nothing_of_it_is_kept(ledger: Ledger) -> None:
    """SQLite would go on with floats, and be wrong from then on."""
    ledger.credit(reading(2**62, "one"), NOW)
    with pytest.raises(LedgerError) as caught:
        ledger.credit(reading(2**62, "two"), NOW)
    assert caught.value.code == "counter_implausible"
    assert balance(ledger)[0] == 2**62
    assert ledger.audit() == ()


def test_a_claim_that_would_not_fit_a_column_is_refused_and_takes_nothing(ledger: Ledger) -> None:
    """Two rows that fit, and a sum that does not."""
    for worker in ("v", "w"):
        ledger.credit(reading(2**62, worker_id=worker, bonus=Fraction(199)), NOW)  # 1.99 micro-KVR a micro-unit
    pending = [account.pending_micro_kvr for account in ledger.accounts()]
    assert sum(pending) > 2**63 - 1
    with pytest.raises(LedgerError) as caught:
        ledger.reserve(ALICE.address, 1, NOW)
    assert caught.value.code == "claim_too_large"
    assert [account.pending_micro_kvr for account in ledger.accounts()] == pending
    assert ledger.audit() == ()
