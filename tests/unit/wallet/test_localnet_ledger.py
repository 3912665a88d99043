"""The ledger's rules, on a real runtime and a real SQLite file, with the clock in the test's hand."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nacl import bindings
from solders.clock import MAX_PROCESSING_AGE
from solders.hash import Hash
from solders.keypair import Keypair
from solders.message import Message, MessageV0, to_bytes_versioned
from solders.pubkey import Pubkey
from solders.signature import Signature
from solders.system_program import ID as SYSTEM_PROGRAM_ID
from solders.system_program import TransferParams, transfer
from solders.sysvar import CLOCK
from solders.transaction import VersionedTransaction

from kvasir_console.errors import ExitCode, LedgerError, SystemResourceError
from kvasir_console.wallet.localnet.faucet import LAMPORTS_PER_SOL, FaucetLimits
from kvasir_console.wallet.localnet.ledger import LEDGER_FILE, Commitment, Ledger, RejectedError
from kvasir_console.wallet.localnet.slots import SlotClock

FEE = 5000
"""Lamports for one signature on every public cluster."""
SLOT_S = 0.4
SOL = LAMPORTS_PER_SOL


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s

    def slots(self, count: int) -> None:
        self.now_s += count * SLOT_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    with closing(Ledger.open(tmp_path / "ledger", now_s=clock)) as opened:
        yield opened


@pytest.fixture
def rich(ledger: Ledger) -> Keypair:
    keypair = Keypair()
    ledger.airdrop(keypair.pubkey(), 10 * SOL)
    return keypair


def payment(
    payer: Keypair, recipient: Pubkey, lamports: int, blockhash: Hash, *, legacy: bool = False
) -> VersionedTransaction:
    instructions = [transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=recipient, lamports=lamports))]
    if legacy:
        return VersionedTransaction(Message.new_with_blockhash(instructions, payer.pubkey(), blockhash), [payer])
    return VersionedTransaction(MessageV0.try_compile(payer.pubkey(), instructions, [], blockhash), [payer])


def balance(ledger: Ledger, address: Pubkey) -> int:
    account = ledger.account(address)
    return 0 if account is None else account.lamports


def pay(ledger: Ledger, payer: Keypair, recipient: Pubkey, lamports: int) -> VersionedTransaction:
    tx = payment(payer, recipient, lamports, ledger.latest_blockhash()[0])
    ledger.submit(tx, preflight=Commitment.PROCESSED)
    return tx


@pytest.mark.parametrize("legacy", [False, True])
def test_a_transfer_moves_the_amount_and_the_fee_exactly(ledger: Ledger, rich: Keypair, legacy: bool) -> None:
    recipient = Keypair().pubkey()
    tx = payment(rich, recipient, 3 * SOL, ledger.latest_blockhash()[0], legacy=legacy)
    assert ledger.submit(tx, preflight=Commitment.PROCESSED) == tx.signatures[0]
    assert balance(ledger, recipient) == 3 * SOL
    assert balance(ledger, rich.pubkey()) == 7 * SOL - FEE
    landed = ledger.landed(tx.signatures[0])
    assert landed is not None
    assert landed.err is None
    assert landed.meta["preBalances"][:2] == [10 * SOL, 0]
    assert landed.meta["postBalances"][:2] == [7 * SOL - FEE, 3 * SOL]
    assert landed.raw == bytes(tx)


def test_a_transaction_is_rejected_again_after_200_others_and_a_restart(tmp_path: Path, clock: Clock) -> None:
    payer, recipient = Keypair(), Keypair().pubkey()
    with closing(Ledger.open(tmp_path / "l", now_s=clock)) as ledger:
        ledger.airdrop(payer.pubkey(), 10 * SOL)
        first = pay(ledger, payer, recipient, SOL)
        for lamports in range(200):
            pay(ledger, payer, recipient, SOL // 1000 + lamports)
        paid = balance(ledger, recipient)
        for preflight in (Commitment.PROCESSED, Commitment.FINALIZED):
            with pytest.raises(RejectedError, match="AlreadyProcessed"):
                ledger.submit(first, preflight=preflight)
        ledger.submit(first, preflight=None)  # a cluster takes it and drops it
        assert balance(ledger, recipient) == paid == SOL + sum(SOL // 1000 + each for each in range(200))
    with closing(Ledger.open(tmp_path / "l", now_s=clock)) as ledger:
        assert ledger.blockhash_slot(first.message.recent_blockhash) is not None
        with pytest.raises(RejectedError, match="AlreadyProcessed"):
            ledger.submit(first, preflight=Commitment.PROCESSED)
        assert balance(ledger, recipient) == paid


def test_a_message_signed_again_with_another_nonce_does_not_pay_twice(ledger: Ledger, rich: Keypair) -> None:
    recipient = Keypair().pubkey()
    tx = pay(ledger, rich, recipient, SOL)
    twin = VersionedTransaction.populate(tx.message, [resign(rich, to_bytes_versioned(tx.message))])
    assert twin.signatures != tx.signatures
    assert twin.verify_with_results() == [True]
    with pytest.raises(RejectedError, match="AlreadyProcessed"):
        ledger.submit(twin, preflight=Commitment.PROCESSED)
    assert balance(ledger, recipient) == SOL


def resign(keypair: Keypair, message: bytes) -> Signature:
    """A valid ed25519 signature with a random nonce instead of RFC 8032's."""
    public, expanded = bytes(keypair.pubkey()), bindings.crypto_hash_sha512(keypair.secret())
    clamped = bytearray(expanded[:32])
    clamped[0] &= 248
    clamped[31] = clamped[31] & 127 | 64
    secret = bindings.crypto_core_ed25519_scalar_reduce(bytes(clamped) + bytes(32))
    nonce = bindings.crypto_core_ed25519_scalar_reduce(bindings.randombytes(64))
    point = bindings.crypto_scalarmult_ed25519_base_noclamp(nonce)
    challenge = bindings.crypto_core_ed25519_scalar_reduce(bindings.crypto_hash_sha512(point + public + message))
    product = bindings.crypto_core_ed25519_scalar_mul(challenge, secret)
    return Signature.from_bytes(point + bindings.crypto_core_ed25519_scalar_add(nonce, product))


def test_a_blockhash_is_usable_for_as_many_slots_as_on_a_cluster(ledger: Ledger, rich: Keypair, clock: Clock) -> None:
    recipient = Keypair().pubkey()
    blockhash, slot = ledger.latest_blockhash()
    assert ledger.blockhash_slot(blockhash) == slot
    clock.slots(MAX_PROCESSING_AGE)
    ledger.submit(payment(rich, recipient, SOL, blockhash), preflight=Commitment.PROCESSED)
    clock.slots(1)
    with pytest.raises(RejectedError, match="BlockhashNotFound"):
        ledger.submit(payment(rich, recipient, 2 * SOL, blockhash), preflight=Commitment.PROCESSED)
    late = payment(rich, recipient, 2 * SOL, blockhash)
    assert ledger.submit(late, preflight=None) == late.signatures[0]
    assert ledger.landed(late.signatures[0]) is None
    assert balance(ledger, recipient) == SOL


def test_preflight_knows_only_the_blockhashes_of_its_own_commitment(
    ledger: Ledger, rich: Keypair, clock: Clock
) -> None:
    clock.slots(100)
    newest, _ = ledger.latest_blockhash(Commitment.PROCESSED)
    with pytest.raises(RejectedError, match="BlockhashNotFound"):
        ledger.submit(payment(rich, Keypair().pubkey(), SOL, newest), preflight=Commitment.FINALIZED)
    final, slot = ledger.latest_blockhash(Commitment.FINALIZED)
    assert slot == ledger.slot() - Commitment.FINALIZED
    ledger.submit(payment(rich, Keypair().pubkey(), SOL, final), preflight=Commitment.FINALIZED)


def test_a_transaction_for_one_ledger_is_worth_nothing_on_another(tmp_path: Path, clock: Clock) -> None:
    with (
        closing(Ledger.open(tmp_path / "a", now_s=clock)) as one,
        closing(Ledger.open(tmp_path / "b", now_s=clock)) as other,
    ):
        payer = Keypair()
        for each in (one, other):
            each.airdrop(payer.pubkey(), SOL)
        assert one.genesis_hash != other.genesis_hash
        tx = pay(one, payer, Keypair().pubkey(), SOL // 2)
        with pytest.raises(RejectedError, match="BlockhashNotFound"):
            other.submit(tx, preflight=Commitment.PROCESSED)
        assert balance(other, payer.pubkey()) == SOL


def test_equal_airdrops_in_one_slot_all_arrive(ledger: Ledger) -> None:
    recipient = Keypair().pubkey()
    signatures = {ledger.airdrop(recipient, SOL) for _ in range(3)}
    assert len(signatures) == 3
    assert balance(ledger, recipient) == 3 * SOL


def test_the_faucet_keeps_its_limits_over_a_restart(tmp_path: Path, clock: Clock) -> None:
    limits = FaucetLimits(per_request=3 * SOL, per_address=4 * SOL, total=6 * SOL)
    first, second = Keypair().pubkey(), Keypair().pubkey()
    with closing(Ledger.open(tmp_path / "l", now_s=clock, limits=limits)) as ledger:
        with pytest.raises(LedgerError, match="one request"):
            ledger.airdrop(first, 3 * SOL + 1)
        ledger.airdrop(first, 3 * SOL)
    with closing(Ledger.open(tmp_path / "l", now_s=clock, limits=limits)) as ledger:
        with pytest.raises(LedgerError, match="one address"):
            ledger.airdrop(first, SOL + 1)
        ledger.airdrop(first, SOL)
        with pytest.raises(LedgerError, match="all addresses"):
            ledger.airdrop(second, 2 * SOL + 1)
        ledger.airdrop(second, 2 * SOL)
        assert (balance(ledger, first), balance(ledger, second)) == (4 * SOL, 2 * SOL)


def test_without_preflight_a_failing_transaction_lands_and_pays_only_its_fee(ledger: Ledger, rich: Keypair) -> None:
    recipient = Keypair().pubkey()
    tx = payment(rich, recipient, 1000 * SOL, ledger.latest_blockhash()[0])
    with pytest.raises(RejectedError) as rejected:
        ledger.submit(tx, preflight=Commitment.PROCESSED)
    assert rejected.value.err == {"InstructionError": [0, {"Custom": 1}]}
    assert ledger.landed(tx.signatures[0]) is None
    ledger.submit(tx, preflight=None)
    landed = ledger.landed(tx.signatures[0])
    assert landed is not None
    assert landed.err == {"InstructionError": [0, {"Custom": 1}]}
    assert balance(ledger, rich.pubkey()) == 10 * SOL - FEE
    assert balance(ledger, recipient) == 0
    with pytest.raises(RejectedError, match="AlreadyProcessed"):
        ledger.submit(tx, preflight=Commitment.PROCESSED)


def test_bad_signatures_and_malformed_messages_are_refused_with_and_without_preflight(
    ledger: Ledger, rich: Keypair
) -> None:
    good = payment(rich, Keypair().pubkey(), SOL, ledger.latest_blockhash()[0])
    flipped = bytearray(bytes(good.signatures[0]))
    flipped[40] ^= 1
    cases = {
        "SignatureFailure": [Signature.from_bytes(bytes(flipped))],
        "SanitizeFailure": [],
    }
    for err, signatures in cases.items():
        for preflight in (None, Commitment.PROCESSED):
            with pytest.raises(RejectedError, match=err):
                ledger.submit(VersionedTransaction.populate(good.message, signatures), preflight=preflight)
    assert balance(ledger, rich.pubkey()) == 10 * SOL


def test_a_write_that_fails_leaves_nothing_behind(
    ledger: Ledger, rich: Keypair, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipient = Keypair().pubkey()
    tx = payment(rich, recipient, SOL, ledger.latest_blockhash()[0])

    def disk_full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ledger._store, "land", disk_full)
        with pytest.raises(sqlite3.OperationalError):
            ledger.submit(tx, preflight=Commitment.PROCESSED)
    assert balance(ledger, recipient) == 0
    assert balance(ledger, rich.pubkey()) == 10 * SOL
    assert ledger.landed(tx.signatures[0]) is None
    ledger.submit(tx, preflight=Commitment.PROCESSED)
    assert balance(ledger, recipient) == SOL


def test_a_panic_of_the_runtime_is_an_error_and_the_ledger_goes_on(ledger: Ledger, rich: Keypair) -> None:
    with pytest.raises(LedgerError) as error:
        ledger._guarded(lambda: Keypair.from_seed_and_derivation_path(bytes(64), ""))
    assert error.value.code == "runtime_panic"
    recipient = Keypair().pubkey()
    pay(ledger, rich, recipient, SOL)
    assert balance(ledger, recipient) == SOL


def test_history_lists_newest_first_between_two_signatures(ledger: Ledger, rich: Keypair, clock: Clock) -> None:
    recipient = Keypair().pubkey()
    sent = [bytes(pay(ledger, rich, recipient, SOL + each).signatures[0]) for each in range(5)]

    def listed(**bounds: object) -> list[bytes]:
        found = ledger.history(recipient, commitment=Commitment.PROCESSED, **{"limit": 1000, **bounds})  # type: ignore[arg-type]
        return [each.signature for each in found]

    as_signature = Signature.from_bytes
    assert listed() == sent[::-1]
    assert listed(limit=2) == [sent[4], sent[3]]
    assert listed(before=as_signature(sent[3])) == [sent[2], sent[1], sent[0]]
    assert listed(before=as_signature(sent[4]), until=as_signature(sent[1])) == [sent[3], sent[2]]
    assert listed(before=Signature.new_unique()) == []
    assert ledger.history(recipient, commitment=Commitment.CONFIRMED, limit=10) == []
    clock.slots(1)
    assert len(ledger.history(recipient, commitment=Commitment.CONFIRMED, limit=10)) == 5
    assert ledger.history(recipient, commitment=Commitment.FINALIZED, limit=10) == []
    clock.slots(31)
    assert len(ledger.history(recipient, commitment=Commitment.FINALIZED, limit=10)) == 5


def test_an_account_is_read_as_it_was_at_the_commitment_asked_for(tmp_path: Path, clock: Clock) -> None:
    payer, recipient = Keypair(), Keypair().pubkey()
    ledger = Ledger.open(tmp_path / "l", now_s=clock)
    ledger.airdrop(payer.pubkey(), 10 * SOL)
    clock.slots(40)

    def seen() -> list[int]:
        return [0 if (found := ledger.account(recipient, each)) is None else found.lamports for each in Commitment]

    assert seen() == [0, 0, 0]
    pay(ledger, payer, recipient, SOL)
    pay(ledger, payer, recipient, 2 * SOL)  # in the same slot
    assert seen() == [3 * SOL, 0, 0]
    clock.slots(1)
    assert seen() == [3 * SOL, 3 * SOL, 0]
    pay(ledger, payer, recipient, 4 * SOL)
    assert seen() == [7 * SOL, 3 * SOL, 0]
    last = ledger.slot()
    ledger._store.close()  # as a killed process leaves it
    with closing(Ledger.open(tmp_path / "l", now_s=clock)) as ledger:
        clock.slots(last + 31 - ledger.slot())
        assert seen()[1:] == [7 * SOL, 3 * SOL]
        clock.slots(32)
        assert seen() == [7 * SOL] * 3
        assert dict(ledger.program_accounts(SYSTEM_PROGRAM_ID))[recipient].lamports == 7 * SOL


def test_an_account_that_was_emptied_is_still_there_at_the_older_commitment(
    ledger: Ledger, rich: Keypair, clock: Clock
) -> None:
    clock.slots(40)
    pay(ledger, rich, Keypair().pubkey(), 10 * SOL - FEE)
    by_owner = {each: dict(ledger.program_accounts(SYSTEM_PROGRAM_ID, each)) for each in Commitment}
    assert ledger.account(rich.pubkey()) is None
    assert rich.pubkey() not in by_owner[Commitment.PROCESSED]
    for commitment in (Commitment.CONFIRMED, Commitment.FINALIZED):
        assert by_owner[commitment][rich.pubkey()].lamports == 10 * SOL
        assert ledger.account(rich.pubkey(), commitment) == by_owner[commitment][rich.pubkey()]


def test_the_clock_of_the_chain_goes_with_the_slots(ledger: Ledger, clock: Clock) -> None:
    clock.slots(1000)
    for commitment in Commitment:
        account = ledger.account(CLOCK, commitment)
        assert account is not None
        slot, unix_timestamp = struct.unpack("<Q24xq", account.data)
        assert slot == ledger.slot() - commitment
        assert abs(unix_timestamp - clock.now_s) < 1


def test_a_block_names_its_transactions_and_its_parent(ledger: Ledger, rich: Keypair, clock: Clock) -> None:
    clock.slots(10)
    slot = ledger.slot()
    signatures = [bytes(pay(ledger, rich, Keypair().pubkey(), SOL).signatures[0]) for _ in range(2)]
    clock.slots(5)
    block, next_one = ledger.block(slot), ledger.block(slot + 1)
    assert [each.signature for each in block.landed] == signatures
    assert next_one.landed == ()
    assert next_one.previous == block.blockhash
    assert 0 <= next_one.time - block.time <= 1
    assert [ledger.transaction_count(each) for each in Commitment] == [3, 3, 1 if slot > 32 else 0]


def test_a_file_of_the_first_version_is_brought_up_to_date(tmp_path: Path, clock: Clock) -> None:
    payer, recipient = Keypair(), Keypair().pubkey()
    with closing(Ledger.open(tmp_path / "l", now_s=clock)) as ledger:
        ledger.airdrop(payer.pubkey(), 10 * SOL)
        genesis = ledger.genesis_hash
    _execute(tmp_path / "l" / LEDGER_FILE, "DROP TABLE past")
    _execute(tmp_path / "l" / LEDGER_FILE, "DROP INDEX tx_slot")
    _execute(tmp_path / "l" / LEDGER_FILE, "PRAGMA user_version = 1")
    for _ in range(2):
        with closing(Ledger.open(tmp_path / "l", now_s=clock)) as ledger:
            assert ledger.genesis_hash == genesis
            clock.slots(1)
            pay(ledger, payer, recipient, SOL)
    with closing(Ledger.open(tmp_path / "l", now_s=clock)) as ledger:
        assert balance(ledger, recipient) == 2 * SOL


def test_slots_never_go_back_with_the_wall_clock_nor_over_a_restart(tmp_path: Path, clock: Clock) -> None:
    ledger = Ledger.open(tmp_path / "l", now_s=clock)
    clock.slots(1000)
    assert ledger.slot() == 1001
    clock.now_s -= 3600
    assert ledger.slot() == 1001
    clock.slots(5)
    assert ledger.slot() == 1006
    ledger._store.close()  # as a killed process leaves it
    with closing(Ledger.open(tmp_path / "l", now_s=clock)) as again:
        assert again.slot() >= 1006


@given(st.lists(st.floats(min_value=-1e6, max_value=1e6), max_size=50))
def test_the_slot_clock_is_monotonic_whatever_the_wall_clock_does(steps: list[float]) -> None:
    clock = Clock()
    slots = SlotClock(clock, int(clock.now_s * 1000), 400)
    seen = [slots.slot()]
    for step in steps:
        clock.now_s += step
        seen.append(slots.slot())
    assert seen == sorted(seen)
    assert seen[0] == 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 12 * SOL), st.sampled_from("pprx")), max_size=30
    )
)
def test_no_lamport_appears_or_is_lost(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int, str]]
) -> None:
    """Transfers good and bad, replays and restarts: balances follow a plain sum, and history tells the same."""
    directory, clock = tmp_path_factory.mktemp("ledger"), Clock()
    ledger = Ledger.open(directory, now_s=clock)
    people = [Keypair() for _ in range(4)]
    expected = [10 * SOL] * 4
    for person in people:
        ledger.airdrop(person.pubkey(), 10 * SOL)
    sent: list[VersionedTransaction] = []
    for number, (source, target, lamports, kind) in enumerate(steps):
        clock.slots(number % 3)
        if kind == "r":
            ledger._store.close()
            ledger = Ledger.open(directory, now_s=clock)
        elif kind == "x" and sent:
            ledger.submit(sent[number % len(sent)], preflight=None)
        else:
            blockhash, _ = ledger.latest_blockhash()
            tx = payment(people[source], people[target].pubkey(), lamports, blockhash)
            known = ledger.landed(tx.signatures[0]) is not None
            ledger.submit(tx, preflight=None)
            landed = ledger.landed(tx.signatures[0])
            if landed is not None and not known:
                sent.append(tx)
                expected[source] -= FEE
                if landed.err is None:
                    expected[source] -= lamports
                    expected[target] += lamports
    assert [balance(ledger, person.pubkey()) for person in people] == expected
    for person, lamports in zip(people, expected, strict=True):
        history = ledger.history(person.pubkey(), commitment=Commitment.PROCESSED, limit=1000)
        changes = 0
        for landed in history:
            keys = VersionedTransaction.from_bytes(landed.raw).message.account_keys
            place = keys.index(person.pubkey())
            changes += landed.meta["postBalances"][place] - landed.meta["preBalances"][place]
        assert changes == lamports
    ledger.close()


def test_a_second_ledger_on_the_same_file_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(SystemResourceError) as error:
        Ledger.open(tmp_path / "ledger")
    assert error.value.code == "ledger_in_use"
    assert error.value.exit_code == ExitCode.RESOURCE


def test_the_file_is_private(ledger: Ledger, tmp_path: Path) -> None:
    for file in (tmp_path / "ledger").iterdir():
        assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda file: file.write_bytes(b"not a database" * 1000), "ledger_damaged"),
        (lambda file: _execute(file, "PRAGMA user_version = 99"), "ledger_version"),
        (lambda file: _execute(file, "DELETE FROM kv WHERE key = 'faucet'"), "ledger_damaged"),
    ],
)
def test_a_damaged_or_newer_file_is_refused_by_name(tmp_path: Path, clock: Clock, damage, code: str) -> None:
    Ledger.open(tmp_path / "l", now_s=clock).close()
    damage(tmp_path / "l" / LEDGER_FILE)
    with pytest.raises(LedgerError) as error:
        Ledger.open(tmp_path / "l", now_s=clock)
    assert error.value.code == code


def _execute(file: Path, statement: str) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute(statement)
        db.commit()
