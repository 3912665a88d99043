"""The operator's command: who is quarantined, and letting one back in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from gateway_parts import ALICE, BOB, CAROL, NOW, Operator

from kvasir_console import cli
from kvasir_console.errors import ExitCode
from kvasir_console.node.gateway import quarantine_command
from kvasir_console.node.gateway.quarantine import Case, Quarantines
from kvasir_console.node.gateway.store import Store
from kvasir_console.paths import Paths

from postgresql_server import PostgresqlServer


@pytest.fixture
def store():
    opened = Store.open(f"sqlite:///{Paths.from_environment().ensure().data / 'gateway.sqlite'}")
    book = Quarantines(opened)
    book.catch(Case(ALICE.address, "box-1", "", "engine:moe:1", "expert-box-1", 1, int(NOW), "off by 5%", "/e/1.json"))
    book.catch(Case(ALICE.address, "box-1", BOB.address, "stage:1", "expert-box-1", 1, int(NOW) + 5))
    yield opened
    opened.close()


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["quarantine", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_list_says_who_and_why(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "list")
    assert code == ExitCode.OK
    for word in (ALICE.address, "box-1", "off by 5%", "/e/1.json", "this gateway's engine", BOB.address):
        assert word in out
    code, out, _ = answer(capsys, "list", "--json")
    assert [each["caught_by"] for each in json.loads(out)] == ["", BOB.address]


def test_a_workers_name_gives_the_terminal_no_orders(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    name = "box\x9b2J\x85No worker is quarantined.\u202e"  # what a coverage report may call itself
    Quarantines(store).catch(Case(BOB.address, name, "", "engine:moe:1", "expert-box", 1, int(NOW)))
    _, out, _ = answer(capsys, "list")
    assert all(each.isprintable() for each in out.split("\n"))
    assert f"{BOB.address} box\\x9b2J\\x85No worker is quarantined.\\u202e" in out


def test_lift_needs_a_yes_and_lifts_every_case_of_the_worker(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine_command, "controlling_terminal", nobody)
    code, out, err = answer(capsys, "lift", ALICE.address, "box-1")
    assert (code, out) == (ExitCode.USAGE, "")
    assert "--yes" in err
    assert len(Quarantines(store).cases()) == 2
    code, out, _ = answer(capsys, "lift", ALICE.address, "box-1", "--yes", "--json")
    assert code == ExitCode.OK
    assert len(json.loads(out)["lifted"]) == 2
    assert Quarantines(store).cases() == ()
    assert answer(capsys, "list")[1] == "No worker is quarantined.\n"
    assert answer(capsys, "list", "--all")[1].count("lifted") == 2
    code, out, err = answer(capsys, "lift", ALICE.address, "box-1", "--yes")
    assert (code, out) == (ExitCode.LEDGER, "")
    assert "quarantine list" in err


def test_one_lift_lets_every_worker_of_a_wallet_back_and_lists_what_it_lifted(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Quarantines(store)
    book.catch(Case(ALICE.address, "box-2", "", "engine:moe:2", "expert-box-2", 1, int(NOW), "not finite"))
    book.catch(Case(BOB.address, "box-1", "", "engine:moe:2", "expert-bob", 1, int(NOW)))
    code, out, _ = answer(capsys, "lift", ALICE.address, "--yes")
    assert code == ExitCode.OK
    assert [word for word in ("box-1", "box-2", "off by 5%", "not finite", BOB.address) if word not in out] == []
    assert out.endswith("Lifted: 3 cases of 2 workers.\n")
    assert [case.wallet for case in book.cases()] == [BOB.address]
    code, _, err = answer(capsys, "lift", ALICE.address, "--yes")
    assert (code, "No worker of" in err) == (ExitCode.LEDGER, True)


def test_a_worker_without_a_name_is_not_every_worker(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys, "lift", ALICE.address, "", "--yes")  # as a script's "$WORKER" that is not set
    assert (code, out) == (ExitCode.USAGE, "")
    assert "leave it out" in err
    assert len(Quarantines(store).cases()) == 2


@pytest.mark.parametrize("named", [(), ("box-1",)], ids=["wallet", "worker"])
def test_what_came_after_the_question_was_shown_is_not_lifted_unseen(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
) -> None:
    book = Quarantines(store)
    worker = "box-1" if named else "box-2"
    late = Case(ALICE.address, worker, CAROL.address, "stage:2", "expert-late", 1, int(NOW) + 9)
    person = Operator("yes", lambda: book.catch(late))
    monkeypatch.setattr(quarantine_command, "controlling_terminal", lambda: person)
    code, out, err = answer(capsys, "lift", ALICE.address, *named)
    assert person.question == "Lift 2 cases of 1 worker? [y/N] "
    assert (code, out, "Nothing was lifted" in err) == (ExitCode.LEDGER, "", True)
    assert len(book.cases()) == 3
    code, out, _ = answer(capsys, "lift", ALICE.address, *named)
    assert CAROL.address in person.shown
    assert (code, out.startswith("Lifted: 3 cases of")) == (ExitCode.OK, True)
    assert book.cases() == ()


def test_a_case_that_a_gateway_enters_during_a_lift_is_not_lifted_unlisted(postgresql: PostgresqlServer) -> None:
    url = postgresql.url()
    mine, theirs = Store.open(url), Store.open(url)
    first, late = (Case(ALICE.address, name, "", "engine:moe:1", f"expert-{name}", 1, int(NOW)) for name in ("a", "b"))

    def enter(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE quarantines"):
            Quarantines(theirs).catch(late)

    try:
        Quarantines(mine).catch(first)
        sa.event.listen(mine._engine, "before_cursor_execute", enter)
        assert Quarantines(mine).lift(ALICE.address, "", int(NOW)) == (first,)
        assert Quarantines(theirs).cases() == (late,)
    finally:
        mine.close()
        theirs.close()


def test_without_a_gateways_database_that_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = answer(capsys, "list")
    assert (code, out) == (ExitCode.USAGE, "")
    assert "gateway.sqlite" in err
    assert not (Paths.from_environment().data / "gateway.sqlite").exists()


def test_a_mistyped_database_is_no_empty_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "folder" / "gatway.sqlite"
    code, out, err = answer(capsys, "list", "--set", f"gateway.database=sqlite:///{file}")
    assert (code, out) == (ExitCode.USAGE, "")
    assert str(file) in err
    assert not file.parent.exists()


class nobody:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
