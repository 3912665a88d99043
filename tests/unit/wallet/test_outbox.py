"""The outbox on a real file: what is stored before it is sent, and what may follow what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solders.keypair import Keypair

from kvasir_console.errors import KvasirError, LedgerError, SystemResourceError, UsageError
from kvasir_console.wallet.chain_signing import PreparedTransfer
from kvasir_console.wallet.outbox import Outbox, Send, SendState
from kvasir_console.wallet.transfers import KvrTransfer, SolTransfer

NOW = 1_800_000_000
GENESIS, OTHER_GENESIS = "G" * 44, "H" * 44
ALICE, BOB, MINT = (str(Keypair.from_seed(bytes([seed]) * 32).pubkey()) for seed in (1, 2, 3))
PAYMENT = KvrTransfer(ALICE, BOB, MINT, 2**64 - 1, "wages")


def signed(name: str) -> PreparedTransfer:
    return PreparedTransfer(f"raw {name}".encode(), f"sig-{name}", 1000, 900)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "outbox.sqlite"


@pytest.fixture
def outbox(file: Path) -> Iterator[Outbox]:
    with Outbox.open(file) as opened:
        yield opened


def add(outbox: Outbox, name: str = "a", intent: Any = PAYMENT, genesis: str = GENESIS) -> Send:
    send, stored = outbox.add(name, intent, genesis, signed(name), NOW)
    assert stored
    return send


@pytest.mark.parametrize("intent", [PAYMENT, SolTransfer(ALICE, BOB, 2**63 + 1), SolTransfer(ALICE, BOB, 1, "ü☃")])
def test_what_was_stored_is_read_back_by_another_process(file: Path, outbox: Outbox, intent: Any) -> None:
    send = add(outbox, intent=intent)
    assert send == Send("a", GENESIS, intent, SendState.SIGNED, signed("a"), "", NOW, NOW)
    with Outbox.open(file) as other:
        assert other.get("a") == send
        assert other.sends() == (send,)
        assert other.undecided(GENESIS) == (send,)
        assert other.signatures("a") == (("sig-a", "signed"),)
        assert other.get("b") is None


def test_one_id_is_one_payment(outbox: Outbox) -> None:
    first = add(outbox)
    again, stored = outbox.add("a", PAYMENT, GENESIS, signed("second"), NOW + 1)
    assert (again, stored) == (first, False)
    assert outbox.signatures("a") == (("sig-a", "signed"),)
    for intent, genesis in ((replace(PAYMENT, micro_kvr=1), GENESIS), (PAYMENT, OTHER_GENESIS)):
        with pytest.raises(UsageError) as error:
            outbox.add("a", intent, genesis, signed("third"), NOW)
        assert error.value.code == "request_id_used"


def test_one_transaction_is_one_send(outbox: Outbox) -> None:
    add(outbox)
    with pytest.raises(LedgerError) as error:
        outbox.add("b", PAYMENT, GENESIS, signed("a"), NOW)
    assert error.value.code == "signature_used"
    assert outbox.get("b") is None


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a\nb", "\x1b[2J"])
def test_an_id_is_short_and_printable(outbox: Outbox, request_id: str) -> None:
    with pytest.raises(UsageError):
        outbox.add(request_id, PAYMENT, GENESIS, signed("a"), NOW)


def test_of_many_that_begin_the_same_payment_one_is_stored(file: Path, outbox: Outbox) -> None:
    def begin(number: int) -> tuple[str, bool]:
        with Outbox.open(file) as mine:
            send, stored = mine.add("a", PAYMENT, GENESIS, signed(str(number)), NOW)
            return send.prepared.signature, stored

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(begin, range(16)))
    assert sum(stored for _, stored in results) == 1
    assert len({signature for signature, _ in results}) == 1


def test_a_twin_is_an_equal_payment_that_is_not_decided(outbox: Outbox) -> None:
    send = add(outbox)
    assert outbox.twin(replace(PAYMENT, memo="another memo"), GENESIS) == send
    for other in (
        replace(PAYMENT, micro_kvr=1),
        replace(PAYMENT, recipient=ALICE, source=BOB),
        SolTransfer(ALICE, BOB, PAYMENT.micro_kvr),
    ):
        assert outbox.twin(other, GENESIS) is None
    assert outbox.twin(PAYMENT, OTHER_GENESIS) is None
    for state in (SendState.CONFIRMED, SendState.FAILED, SendState.EXPIRED):
        name = str(state)
        ended = outbox.advance(add(outbox, name, replace(PAYMENT, micro_kvr=len(name))), state, NOW)
        assert outbox.twin(ended.intent, GENESIS) is None


def test_only_what_expired_is_signed_again_and_only_once(file: Path, outbox: Outbox) -> None:
    send = add(outbox)
    assert outbox.sign_again(send, signed("b"), NOW) is None
    sent = outbox.advance(send, SendState.SENT, NOW)
    assert outbox.sign_again(sent, signed("b"), NOW) is None
    expired = outbox.advance(sent, SendState.EXPIRED, NOW)
    with Outbox.open(file) as other:
        again = other.sign_again(expired, signed("b"), NOW + 5)
    assert again is not None
    assert (again.state, again.prepared) == (SendState.SIGNED, signed("b"))
    assert outbox.sign_again(expired, signed("c"), NOW) is None
    assert outbox.signatures("a") == (("sig-a", "expired"), ("sig-b", "signed"))
    # Who still thinks of the old transaction changes nothing.
    assert outbox.advance(sent, SendState.CONFIRMED, NOW).state is SendState.SIGNED
    with pytest.raises(LedgerError):
        outbox.sign_again(outbox.advance(again, SendState.EXPIRED, NOW), signed("a"), NOW)


def test_what_landed_after_all_is_no_longer_expired(outbox: Outbox) -> None:
    expired = outbox.advance(add(outbox), SendState.EXPIRED, NOW)
    landed = outbox.advance(expired, SendState.CONFIRMED, NOW)
    assert landed.state is SendState.CONFIRMED
    assert outbox.sign_again(expired, signed("b"), NOW) is None


FINAL = (SendState.CONFIRMED, SendState.FAILED)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.booleans(), st.sampled_from([*SendState, "sign"])), max_size=12))
def test_what_is_final_stays_and_each_signature_has_one_end(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, Any]]
) -> None:
    """Two processes with views of different age do anything in any order."""
    file = tmp_path_factory.mktemp("outbox") / "o.sqlite"
    file.parent.chmod(0o700)
    with Outbox.open(file) as outbox:
        old = fresh = add(outbox)
        final: SendState | None = None
        for number, (stale, step) in enumerate(steps):
            view = old if stale else fresh
            if step == "sign":
                again = outbox.sign_again(view, signed(str(number)), NOW)
                if again is not None:
                    assert final is None
                    old, fresh = fresh, again
            else:
                old, fresh = fresh, outbox.advance(view, step, NOW)
            now = outbox.get("a")
            assert now is not None
            if final is not None:
                assert now.state is final
            final = now.state if now.state in FINAL else None
        ends = dict(outbox.signatures("a"))
        current = outbox.get("a")
        assert current is not None
        assert ends.pop(current.prepared.signature) == current.state
        assert set(ends.values()) <= {"expired"}  # every one that was replaced can land no more


def test_the_file_is_private_and_its_link_is_not_followed(file: Path, tmp_path: Path) -> None:
    Outbox.open(file).close()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    link = file.with_name("link.sqlite")
    link.symlink_to(elsewhere)
    with pytest.raises(SystemResourceError):
        Outbox.open(link)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda file: file.write_bytes(b"not a database" * 1000), "outbox_damaged"),
        (lambda file: _execute(file, "PRAGMA user_version = 2"), "outbox_version"),
        (lambda file: (file.unlink(), file.mkdir()), "outbox_unavailable"),
    ],
)
def test_a_damaged_or_newer_file_is_refused_by_name(file: Path, damage: Any, code: str) -> None:
    Outbox.open(file).close()
    damage(file)
    with pytest.raises(KvasirError) as error:
        Outbox.open(file)
    assert error.value.code == code


def _execute(file: Path, statement: str) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute(statement)
        db.commit()


def test_a_disk_that_refuses_is_said_before_anything_is_sent(outbox: Outbox) -> None:
    outbox._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(SystemResourceError) as error:
        outbox.add("a", replace(PAYMENT, memo="m" * 10_000), GENESIS, signed("a"), NOW)
    assert error.value.code == "outbox_unwritable"
    assert outbox.get("a") is None
