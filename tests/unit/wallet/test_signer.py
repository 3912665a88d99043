"""The signer's rules, with a fake clock and without a process."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from signer_parts import HOST, PARTICIPATION, PASSPHRASE, PHRASE, WALLET, claim, refusal
from solders.hash import Hash
from solders.signature import Signature
from solders.transaction import VersionedTransaction

from kvasir_console.errors import KvasirError, UsageError, WalletError
from kvasir_console.wallet import (
    accounts,
    intents,
    keys,
    peer,
    private_file,
    signer,
    signer_core,
    transfers,
    twofactor,
    vault,
)


class Clock:
    def __init__(self) -> None:
        self.time_s = 1000.0

    def __call__(self) -> float:
        return self.time_s


async def ask(target: signer.Signer, verb: str, **fields: object) -> dict:
    answer = await target.handle({"id": 7, "verb": verb, **fields})
    assert answer["id"] == 7
    if "error" in answer:
        raise KvasirError.from_dict(answer["error"])
    return answer


async def test_wrong_passphrases_are_slowed_down_and_a_right_one_forgives(vault_file):
    clock = Clock()
    target = signer.Signer(vault_file, HOST, monotonic=clock)
    for delay_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert (await refusal(ask(target, "unlock", passphrase="wrong one"))).code == "wrong_passphrase"
        clock.time_s += delay_s - 0.5
        early = await refusal(ask(target, "unlock", passphrase=PASSPHRASE))
        assert early.code == "unlock_throttled"
        clock.time_s += 0.5
    await ask(target, "unlock", passphrase=PASSPHRASE)
    assert (await refusal(ask(target, "unlock", passphrase="wrong one"))).code == "wrong_passphrase"
    clock.time_s += 1
    assert (await ask(target, "unlock", passphrase=PASSPHRASE))["locked"] is False


async def test_a_vault_that_cannot_be_read_does_not_count_as_a_wrong_passphrase(vault_file, tmp_path):
    file = tmp_path / "v" / "vault.json"
    file.parent.mkdir(mode=0o700)
    shutil.copy(vault_file, file)
    file.chmod(0o600)
    target = signer.Signer(file, HOST, monotonic=Clock())
    file.chmod(0o644)
    for _ in range(3):
        assert (await refusal(ask(target, "unlock", passphrase=PASSPHRASE))).code == "vault_mode"
    file.chmod(0o600)
    assert (await ask(target, "unlock", passphrase=PASSPHRASE))["locked"] is False


async def test_an_idle_wallet_locks_itself(vault_file):
    clock = Clock()
    target = signer.Signer(vault_file, HOST, idle_lock_s=60, monotonic=clock)
    await ask(target, "unlock", passphrase=PASSPHRASE)
    clock.time_s += 59
    await ask(target, "sign", intent=PARTICIPATION.to_json())  # counts as use
    clock.time_s += 59
    await ask(target, "status")  # does not
    target.lock_if_left()
    assert (await ask(target, "status"))["locked"] is False
    clock.time_s += 1
    assert (await refusal(ask(target, "sign", intent=PARTICIPATION.to_json()))).code == "wallet_locked"
    assert (await ask(target, "status"))["locked"] is True


async def test_a_lock_wins_over_an_unlock_under_way(vault_file, monkeypatch):
    deriving, proceed, made = threading.Event(), threading.Event(), []
    real = signer_core._open

    def slow(file: Path, passphrase: str) -> signer_core.Unlocked:
        deriving.set()
        assert proceed.wait(120)
        made.append(real(file, passphrase))
        return made[0]

    monkeypatch.setattr(signer_core, "_open", slow)
    target = signer.Signer(vault_file, HOST)
    unlocking = asyncio.create_task(ask(target, "unlock", passphrase=PASSPHRASE))
    assert await asyncio.to_thread(deriving.wait, 120)
    await ask(target, "lock")
    proceed.set()
    assert (await refusal(unlocking)).code == "wallet_locked"
    assert (await ask(target, "status"))["locked"] is True
    with pytest.raises(WalletError, match="wiped"):
        made[0].key.sign(b"")


async def test_locking_and_unlocking_again_wipe_the_key(vault_file):
    target = signer.Signer(vault_file, HOST)
    await ask(target, "unlock", passphrase=PASSPHRASE)
    first = target._unlocked.key
    await ask(target, "unlock", passphrase=PASSPHRASE)
    second = target._unlocked.key
    await ask(target, "lock")
    for key in (first, second):
        with pytest.raises(WalletError, match="wiped"):
            key.sign(b"")


async def test_an_expired_action_is_judged_by_the_signers_own_clock(vault_file):
    now = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
    target = signer.Signer(vault_file, HOST, now=lambda: now)
    await ask(target, "unlock", passphrase=PASSPHRASE)
    intent = claim(now - timedelta(minutes=4))
    answer = await ask(target, "sign", intent=intent.to_json())
    assert keys.verify(WALLET, answer["text"].encode(), base64.b64decode(answer["signature"]))
    now += timedelta(minutes=1)
    assert (await refusal(ask(target, "sign", intent=intent.to_json()))).code == "action_expired"


async def test_a_machine_that_was_suspended_finds_its_wallet_locked(vault_file):
    asleep = Clock()
    target = signer.Signer(vault_file, HOST, suspended=asleep)
    await ask(target, "unlock", passphrase=PASSPHRASE)
    asleep.time_s += 1.9  # the two clocks may drift a little
    target.lock_if_left()
    assert (await ask(target, "status"))["locked"] is False
    asleep.time_s += 0.2
    assert (await refusal(ask(target, "sign", intent=PARTICIPATION.to_json()))).code == "wallet_locked"
    assert (await ask(target, "status"))["locked"] is True
    await ask(target, "unlock", passphrase=PASSPHRASE)  # the sleep before it no longer counts
    await ask(target, "sign", intent=PARTICIPATION.to_json())


def test_time_suspended_is_never_less_than_nothing():
    assert signer_core.suspended_s() >= -signer_core.SUSPEND_S


# Money


HOLDER = "GjJyeC1r2RgkuoCWMyPYkCWSGSGLcz266EaAkLA27AhL"
RECIPIENT, MINT = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX", "6cuJAmqtMuGzJ7s7eWQSqfJvEFRUdTiYR3cuMmiNoCPQ"
DEVNET = "EtWTRABZaYq6iMfeYKouRu166VU2xqa1wcaWoxPkrZBG"
BLOCKHASH = "9WzDXwBbmkg8ZTbNMqUxvQRAyrZzDsGYdLVL9zYtAWWM"
FACTOR = b"12345678901234567890"


def payment(amount: int = 1_500_000, *, sol: bool = False) -> dict:
    return intents.TransferIntent(DEVNET, "SOL" if sol else "KVR", RECIPIENT, amount, "thanks", BLOCKHASH).to_json()


async def opened(file: Path, **changes: object) -> signer.Signer:
    """A signer over a vault of its own with these contents, unlocked."""
    vault.create_vault(file, PHRASE, PASSPHRASE, cost=vault.KdfCost(2, 19 * 1024))
    vault.update(file, PASSPHRASE, lambda contents: replace(contents, **changes))
    target = signer.Signer(file, HOST, cluster=DEVNET, mint=MINT)
    await ask(target, "unlock", passphrase=PASSPHRASE)
    return target


async def test_a_transfer_is_signed_as_the_message_its_fields_make(tmp_path):
    target = await opened(tmp_path / "w" / "vault.json")
    answer = await ask(target, "sign", intent=payment())
    transfer = transfers.KvrTransfer(WALLET, RECIPIENT, MINT, 1_500_000, "thanks")
    message = transfers.transfer_message(transfer, Hash.from_string(BLOCKHASH))
    signature = Signature.from_bytes(base64.b64decode(answer["signature"]))
    assert VersionedTransaction.populate(message, [signature]).verify_with_results() == [True]
    assert answer["text"] == f"Send 1.500000 KVR to {RECIPIENT} on devnet\n  memo: thanks"


async def test_without_a_cluster_no_transfer_is_signed(vault_file):
    target = signer.Signer(vault_file, HOST)
    await ask(target, "unlock", passphrase=PASSPHRASE)
    assert (await refusal(ask(target, "sign", intent=payment()))).code == "other_cluster"


async def test_the_days_limit_holds_across_signers_and_days(tmp_path):
    file = tmp_path / "w" / "vault.json"
    target = await opened(file, limits={"KVR": 4_000_000})
    await ask(target, "sign", intent=payment())
    await ask(target, "sign", intent=payment(10**12, sol=True))  # another token, without a limit
    again = signer.Signer(file, HOST, cluster=DEVNET, mint=MINT)
    await ask(again, "unlock", passphrase=PASSPHRASE)
    await ask(again, "sign", intent=payment())
    error = await refusal(ask(target, "sign", intent=payment()))
    assert error.code == "daily_limit"
    assert "1.000000 KVR of 4.000000 KVR" in error.message
    await ask(target, "sign", intent=payment(amount=1_000_000))


async def test_a_payment_that_is_signed_again_is_counted_once_and_only_if_it_is_the_same(tmp_path):
    target = await opened(tmp_path / "w" / "vault.json", limits={"KVR": 2_000_000})
    named = {**payment(), "payment": "rent of May"}
    later = {**named, "blockhash": MINT, "priority_micro_lamports": 5}  # any 32 bytes are a blockhash here
    await ask(target, "sign", intent=named)
    await ask(target, "sign", intent=later)
    for other in ({**later, "amount": 1_500_001}, {**later, "recipient": HOLDER}, {**later, "memo": "x"}, payment()):
        assert (await refusal(ask(target, "sign", intent=other))).code == "daily_limit"
    await ask(target, "sign", intent=payment(amount=500_000))


async def test_an_enrolled_wallet_sends_with_a_code_only_and_each_code_once(tmp_path):
    file = tmp_path / "w" / "vault.json"
    target = await opened(file, second_factor=FACTOR)
    assert (await ask(target, "status"))["second_factor"] is True
    private_file.write(twofactor.state_file(file), json.dumps(twofactor.FactorState().to_json()).encode(), replace=True)
    assert (await refusal(ask(target, "sign", intent=payment()))).code == "second_factor_needed"
    assert (await refusal(ask(target, "sign", intent=payment(), code="000000"))).code == "second_factor_refused"
    code = twofactor.hotp(FACTOR, int(time.time()) // 30)
    await ask(target, "sign", intent=payment(), code=code)
    assert (await refusal(ask(target, "sign", intent=payment(), code=code))).code == "second_factor_refused"
    await ask(target, "sign", intent=PARTICIPATION.to_json())  # taking part needs none


async def test_a_code_is_not_spent_on_what_is_refused_anyway(tmp_path):
    file = tmp_path / "w" / "vault.json"
    target = await opened(file, second_factor=FACTOR)
    before = dict(payment(), cluster="mainnet-beta")
    assert (await refusal(ask(target, "sign", intent=before, code="123456"))).code == "other_cluster"
    assert not twofactor.state_file(file).exists()


async def test_the_address_book_is_known_while_unlocked(tmp_path):
    target = await opened(tmp_path / "w" / "vault.json", contacts={"the shop": RECIPIENT})
    assert (await ask(target, "contacts"))["contacts"] == {"the shop": RECIPIENT}
    await ask(target, "lock")
    assert (await refusal(ask(target, "contacts"))).code == "wallet_locked"


async def test_a_watched_address_cannot_be_unlocked(tmp_path):
    file = tmp_path / "w" / "vault.json"
    vault.create(file, accounts.watching(RECIPIENT), PASSPHRASE, cost=vault.KdfCost(2, 19 * 1024))
    target = signer.Signer(file, HOST)
    assert (await ask(target, "status"))["address"] == RECIPIENT
    assert (await refusal(ask(target, "unlock", passphrase=PASSPHRASE))).code == "watch_only"


@pytest.mark.parametrize("verb", ["sign_bytes", "export", "phrase", None, 7, ["status"]])
async def test_other_verbs_are_refused(vault_file, verb):
    error = await refusal(ask(signer.Signer(vault_file, HOST), verb))
    assert isinstance(error, UsageError)
    assert error.code == "unknown_verb"


@pytest.mark.parametrize("passphrase", [None, 7, ["x"], {"a": 1}])
async def test_what_is_no_passphrase_is_refused(vault_file, passphrase):
    target = signer.Signer(vault_file, HOST)
    assert (await refusal(ask(target, "unlock", passphrase=passphrase))).code == "passphrase_missing"


async def test_a_foreign_failure_tells_its_type_only(vault_file, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError(f"could not use {PASSPHRASE}")

    monkeypatch.setattr(signer_core, "_open", fails)
    error = await refusal(ask(signer.Signer(vault_file, HOST), "unlock", passphrase=PASSPHRASE))
    assert error.code == "signer_failed"
    assert "RuntimeError" in caplog.text
    assert PASSPHRASE not in caplog.text


def test_a_signer_needs_a_vault(tmp_path):
    with pytest.raises(WalletError) as caught:
        signer.Signer(tmp_path / "vault.json", HOST)
    assert caught.value.code == "vault_missing"


async def test_a_peer_of_another_user_is_refused(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        _, writer = await asyncio.open_unix_connection(sock=ours)
        peer.check_same_user(writer)
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
        with pytest.raises(WalletError) as caught:
            peer.check_same_user(writer)
        assert caught.value.code == "other_user"
        writer.close()
