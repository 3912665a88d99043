"""The operator's database: single-use nonces, numbered plans, and a request store that counts each request once."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from gateway_parts import ALICE, BOB

from kvasir_console.errors import LedgerError
from kvasir_console.node.gateway import tables
from kvasir_console.node.gateway.ledger import Ledger, Reading
from kvasir_console.node.gateway.quarantine import Quarantines
from kvasir_console.node.gateway.store import (
    NONCE_TTL_S,
    NONCES_PER_ADDRESS,
    NONCES_PER_WALLET,
    NONCES_TOTAL,
    SCHEMA_VERSION,
    RequestRecord,
    Store,
)

NOW = 1_790_000_000
PURPOSE = "node-token"


@pytest.fixture
def store(url: str):
    opened = Store.open(url)
    yield opened
    opened.close()


def test_a_nonce_serves_once(store: Store) -> None:
    nonce = store.issue_nonce(ALICE.address, PURPOSE, NOW)
    assert len(bytes.fromhex(nonce)) == 16
    assert store.consume_nonce(nonce, ALICE.address, PURPOSE, NOW)
    assert not store.consume_nonce(nonce, ALICE.address, PURPOSE, NOW)


@pytest.mark.parametrize(
    ("wallet", "purpose", "later_s"),
    [(BOB.address, PURPOSE, 0), (ALICE.address, "action:claim", 0), (ALICE.address, PURPOSE, NONCE_TTL_S)],
    ids=["foreign wallet", "other purpose", "expired"],
)
def test_a_nonce_is_spent_even_when_it_is_refused(store: Store, wallet: str, purpose: str, later_s: int) -> None:
    nonce = store.issue_nonce(ALICE.address, PURPOSE, NOW)
    assert not store.consume_nonce(nonce, wallet, purpose, NOW + later_s)
    assert not store.consume_nonce(nonce, ALICE.address, PURPOSE, NOW)


def test_a_nonce_lives_for_its_whole_time(store: Store) -> None:
    nonce = store.issue_nonce(ALICE.address, PURPOSE, NOW)
    assert store.consume_nonce(nonce, ALICE.address, PURPOSE, NOW + NONCE_TTL_S - 1)


def test_an_unknown_nonce_is_refused(store: Store) -> None:
    assert not store.consume_nonce("00" * 16, ALICE.address, PURPOSE, NOW)


def test_one_of_many_threads_gets_a_nonce(url: str, store: Store) -> None:
    nonce = store.issue_nonce(ALICE.address, PURPOSE, NOW)
    stores = [Store.open(url) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: stores[i % 4].consume_nonce(nonce, ALICE.address, PURPOSE, NOW), range(16)))
    assert sum(won) == 1
    for each in stores:
        each.close()


def test_the_oldest_nonce_of_a_wallet_gives_way(store: Store) -> None:
    """A refusal would let anyone lock a wallet out by asking in its name."""
    issued = [store.issue_nonce(ALICE.address, PURPOSE, NOW + second) for second in range(NONCES_PER_WALLET + 1)]
    later = NOW + NONCES_PER_WALLET
    assert not store.consume_nonce(issued[0], ALICE.address, PURPOSE, later)
    assert all(store.consume_nonce(nonce, ALICE.address, PURPOSE, later) for nonce in issued[1:])


def test_an_address_with_too_many_outstanding_is_refused_and_others_are_not(store: Store) -> None:
    _fill(store, NONCES_PER_ADDRESS, "203.0.113.1")
    with pytest.raises(LedgerError) as caught:
        store.issue_nonce(ALICE.address, PURPOSE, NOW, address="203.0.113.1")
    assert caught.value.code == "too_many_nonces"
    assert store.issue_nonce(ALICE.address, PURPOSE, NOW, address="203.0.113.2")
    assert store.issue_nonce(ALICE.address, PURPOSE, NOW + NONCE_TTL_S, address="203.0.113.1")


def test_the_total_is_bounded(store: Store) -> None:
    _fill(store, NONCES_TOTAL, "")
    with pytest.raises(LedgerError) as caught:
        store.issue_nonce(ALICE.address, PURPOSE, NOW, address="203.0.113.2")
    assert caught.value.code == "too_many_nonces"
    assert store.issue_nonce(ALICE.address, PURPOSE, NOW + NONCE_TTL_S)


def _fill(store: Store, count: int, address: str) -> None:
    row = {"purpose": PURPOSE, "issued_at": NOW, "expires_at": NOW + NONCE_TTL_S, "address": address}
    rows = [{"nonce": f"{index:032x}", "wallet": f"w{index}", **row} for index in range(count)]
    with store.write() as connection:
        connection.execute(tables.nonces.insert(), rows)


def test_a_plan_gets_a_new_generation_only_when_it_changes(url: str, store: Store) -> None:
    assert store.plan_generation("ring", "a") == 1
    assert store.plan_generation("ring", "a") == 1
    assert store.plan_generation("other", "a") == 1
    assert store.plan_generation("ring", "b") == 2
    assert store.plan_generation("ring", "a") == 3
    store.close()
    reopened = Store.open(url)
    assert reopened.plan_generation("ring", "a") == 3
    reopened.close()


def _record(request_id: str, **fields: object) -> RequestRecord:
    values = {"prompt_tokens": 5, "completion_tokens": 2, "finish": "stop", "tokens": (7, 8), **fields}
    return RequestRecord(request_id=request_id, **values)


def _ring_rows(store: Store) -> dict[tuple[str, int], tuple[int, int]]:
    with store.read() as connection:
        rows = connection.execute(sa.select(tables.ring_totals)).all()
    return {(row.ring, row.generation): (row.token_rows, row.requests) for row in rows}


def test_a_request_is_recorded_with_what_it_saw(store: Store) -> None:
    store.begin_request("r1", "m", NOW)
    assert store.request("r1")["finished"] is None
    store.finish_request(_record("r1"), NOW + 3)
    row = store.request("r1")
    assert (row["model"], row["created"], row["finished"]) == ("m", NOW, NOW + 3)
    assert (row["prompt_tokens"], row["completion_tokens"], row["finish"], row["tokens"]) == (5, 2, "stop", "[7,8]")
    assert store.request("r2") is None


def test_a_request_that_is_begun_again_stays_as_it_is(store: Store) -> None:
    store.begin_request("r1", "m", NOW)
    store.begin_request("r1", "m", NOW + 1)
    assert store.request("r1")["created"] == NOW
    store.finish_request(_record("r1"), NOW + 3)
    store.begin_request("r1", "m", NOW + 4)
    assert store.request("r1")["finished"] == NOW + 3


def test_a_ring_is_counted_once_for_each_request(store: Store) -> None:
    for request_id in ("r1", "r2"):
        store.begin_request(request_id, "m", NOW)
    record = _record("r1", ring="ring", generation=1, plan="{}", token_rows=6)
    store.finish_request(record, NOW)
    store.finish_request(record, NOW)
    store.finish_request(_record("never begun", ring="ring", generation=1, plan="{}", token_rows=6), NOW)
    assert _ring_rows(store) == {("ring", 1): (6, 1)}
    store.finish_request(_record("r2", ring="ring", generation=1, plan="{}", token_rows=4), NOW)
    assert _ring_rows(store) == {("ring", 1): (10, 2)}


def test_a_new_generation_counts_for_itself(store: Store) -> None:
    for generation in (1, 2):
        store.begin_request(f"r{generation}", "m", NOW)
        store.finish_request(
            _record(f"r{generation}", ring="ring", generation=generation, plan="{}", token_rows=generation), NOW
        )
    assert _ring_rows(store) == {("ring", 1): (1, 1), ("ring", 2): (2, 1)}


def test_old_answers_are_erased_and_their_accounting_stays(store: Store) -> None:
    store.begin_request("old", "m", NOW - 31 * 86_400)
    store.finish_request(_record("old"), NOW - 31 * 86_400)
    store.begin_request("new", "m", NOW)
    store.finish_request(_record("new"), NOW)
    assert store.forget_content(NOW) == 1
    assert store.request("old")["tokens"] is None
    assert store.request("old")["completion_tokens"] == 2
    assert store.request("new")["tokens"] == "[7,8]"
    assert store.forget_content(NOW) == 0


def test_facts_are_kept(url: str, store: Store) -> None:
    assert store.fact("treasury") is None
    store.set_fact("treasury", "a")
    store.set_fact("treasury", "b")
    assert store.remember("treasury", "c") == "b"
    store.close()
    reopened = Store.open(url)
    assert reopened.fact("treasury") == "b"
    reopened.close()


def test_sqlite_is_set_up_for_several_processes(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'g.sqlite'}")
    with store.read() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
        }
    store.close()
    assert pragmas == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 10_000, "synchronous": 2}


def test_a_writer_holds_sqlites_lock_from_the_start(tmp_path: Path) -> None:
    """A transaction that reads before it writes must not find out half-way that another was faster."""
    path = tmp_path / "g.sqlite"
    store = Store.open(f"sqlite:///{path}")
    with store.write():
        other = sqlite3.connect(path, timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("INSERT INTO facts VALUES ('a', 'b')")
        assert other.execute("SELECT count(*) FROM facts").fetchone() == (1,)  # readers go on
        other.close()
    store.close()


def test_an_error_inside_leaves_nothing(store: Store) -> None:
    def half_way() -> None:
        with store.write() as connection:
            connection.execute(tables.facts.insert().values(name="x", value="1"))
            raise KeyError("half way")

    with pytest.raises(KeyError):
        half_way()
    assert store.fact("x") is None


def test_a_database_of_a_newer_version_is_refused(url: str, store: Store) -> None:
    store.set_fact("schema_version", str(SCHEMA_VERSION + 1))
    store.close()
    with pytest.raises(LedgerError) as caught:
        Store.open(url)
    assert caught.value.code == "store_version"
    assert f"version {SCHEMA_VERSION + 1}" in caught.value.message


def test_a_database_of_the_first_version_is_brought_up_to_date_with_all_it_holds(url: str, store: Store) -> None:
    ledger = Ledger(store)
    ledger.credit(Reading(ALICE.address, "w", "expert", "run", 123_456), NOW)
    claim = ledger.reserve(ALICE.address, 1, NOW)
    assert ledger.record_attempt(claim.claim_id, "sig", b"raw", 99, NOW) is not None
    with store.write() as connection:  # what the first version did not have
        connection.execute(sa.text("DROP TABLE credited_units"))
        connection.execute(sa.text("ALTER TABLE claims DROP COLUMN slot"))
    store.set_fact("schema_version", "1")
    store.close()
    for _ in range(2):
        upgraded = Store.open(url)
        ledger = Ledger(upgraded)
        assert ledger.audit() == ()
        assert [(row.micro_units, row.credited_micro_kvr) for row in ledger.accounts()] == [(123_456, 1234)]
        (kept,) = ledger.open_claims()
        assert (kept.signature, kept.raw, kept.slot) == ("sig", b"raw", 0)
        upgraded.close()


def test_quarantines_of_an_older_version_are_cases_now(url: str, store: Store) -> None:
    old = {"wallet": ALICE.address, "worker_id": "w", "run_id": "engine:moe:1", "at": NOW}
    with store.write() as connection:  # as version 3 left it
        for name in ("quarantines", "stage_bytes", "stage_reports"):
            connection.execute(sa.text(f"DROP TABLE {name}"))
        for name in ("voided", "shard_digest"):
            connection.execute(sa.text(f"ALTER TABLE meter DROP COLUMN {name}"))
    store.set_fact("quarantine:0123", json.dumps(old))
    store.set_fact("schema_version", "3")
    store.close()
    for _ in range(2):
        upgraded = Store.open(url)
        book = Quarantines(upgraded)
        assert book.quarantined(ALICE.address, "w")
        assert not book.quarantined(BOB.address, "w")
        (case,) = book.cases()
        assert (case.run_id, case.at, case.caught_by, case.number) == ("engine:moe:1", NOW, "", 1)
        assert upgraded.fact("quarantine:0123") is None
        upgraded.close()


def test_gateways_that_start_at_once_make_one_database(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda _: Store.open(url), range(4)))
    stores[0].set_fact("who", "first")
    assert {each.fact("who") for each in stores} == {"first"}
    for each in stores:
        each.close()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("nonsense", "no database's URL"),
        ("sqlite:////proc/none/x.sqlite", "No such file"),
        ("nodatabase://x", "no driver"),
        ("postgresql://kvasir:hunter2@127.0.0.1:1/x", "efused"),
        ("postgresql://kvasir@127.0.0.1:1/x?password=hunter2&sslmode=odd", "sslmode"),
    ],
)
def test_a_database_that_cannot_be_opened_is_told_with_its_cause(bad: str, why: str) -> None:
    with pytest.raises(LedgerError) as caught:
        Store.open(bad)
    assert caught.value.code == "store_unavailable"
    assert why in caught.value.message
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_no_database_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear reader, " * 100)
    with pytest.raises(LedgerError, match="not a database"):
        Store.open(f"sqlite:///{tmp_path / 'letter'}")


def test_what_a_database_cannot_hold_is_an_error_of_ours(store: Store, url: str) -> None:
    """PostgreSQL takes no NUL in a text; SQLite takes anything."""
    try:
        store.set_fact("nul", "a\0b")
    except LedgerError as error:
        refused = error.code
    else:
        refused = ""
    assert refused == ("store_value" if url.startswith("postgresql") else "")
