"""The signer's rules with a fake clock, and the real process on a real socket."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from solders.hash import Hash
from solders.signature import Signature
from solders.transaction import VersionedTransaction

from kvasir_console.errors import ExitCode, KvasirError, UsageError, WalletError
from kvasir_console.relay.wire import control
from kvasir_console.relay.wire import signed as texts
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
from kvasir_console.wallet.signer_client import SignerClient, SignerStatus

DATA = Path(__file__).parents[2] / "data" / "conformance"
BRIDGE = next(
    case for case in json.loads((DATA / "signed_messages.json").read_text())["messages"] if case["name"] == "bridge_0"
)
PHRASE = json.loads((DATA / "wallet_derivation.json").read_text())["phrases"][0]["mnemonic"]
WALLET, HOST, PASSPHRASE = BRIDGE["signer"], "gate.example.net", "correct horse battery"
PARTICIPATION = intents.Participation(HOST, BRIDGE["text"], WALLET, BRIDGE["fields"]["nonce"])
LOCKED, UNLOCKED = SignerStatus(True, WALLET, HOST), SignerStatus(False, WALLET, HOST)


@pytest.fixture(scope="module")
def vault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("signer") / "wallet" / "vault.json"
    (account,) = vault.create_vault(file, PHRASE, PASSPHRASE, cost=vault.KdfCost(2, 19 * 1024))
    assert account.address == WALLET
    return file


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short private directory: a socket's path has at most 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="kv-"))
    yield directory
    shutil.rmtree(directory)


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


async def refusal(awaitable) -> KvasirError:
    with pytest.raises(KvasirError) as caught:
        await awaitable
    assert PASSPHRASE not in str(caught.value)
    return caught.value


# The rules, without a process


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
        assert proceed.wait(30)
        made.append(real(file, passphrase))
        return made[0]

    monkeypatch.setattr(signer_core, "_open", slow)
    target = signer.Signer(vault_file, HOST)
    unlocking = asyncio.create_task(ask(target, "unlock", passphrase=PASSPHRASE))
    assert await asyncio.to_thread(deriving.wait, 30)
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


# The process


def claim(issued: datetime, host: str = HOST) -> intents.ActionIntent:
    return intents.ActionIntent(
        host,
        texts.ActionKind.CLAIM,
        {"micro_kvr": 1_277_952},
        "c7926ef0444886b1f6d113b980986ed1",
        texts.rfc3339(issued),
        texts.rfc3339(issued + timedelta(minutes=5)),
    )


def arguments(vault_file: Path, path: Path) -> list[str]:
    return [
        sys.executable, "-m", "kvasir_console.wallet.signer",
        "--vault", str(vault_file), "--socket", str(path), "--host", HOST,
    ]  # fmt: skip


def spawn(argv: list[str], **pipes: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, **pipes)


@pytest.fixture
async def running(vault_file: Path, runtime: Path) -> AsyncIterator[SimpleNamespace]:
    path, log = runtime / "signer.sock", runtime / "log"
    with log.open("wb") as stderr:
        process = spawn(arguments(vault_file, path), stdout=stderr, stderr=stderr)
    client = SignerClient(path)
    try:
        assert await client.wait_ready(30) == LOCKED
        yield SimpleNamespace(process=process, client=client, path=path, log=log)
    finally:
        process.kill()
        process.wait(30)
    assert not [secret for secret in (PASSPHRASE, "wrong one", "abandon", "Traceback") if secret in log.read_text()]


async def test_from_unlock_to_lock(running):
    client = running.client
    assert (await refusal(client.sign(PARTICIPATION))).code == "wallet_locked"
    assert await client.unlock(PASSPHRASE) == UNLOCKED
    assert await client.sign(PARTICIPATION) == base64.b64decode(BRIDGE["signature_base64"])
    assert await client.lock() == LOCKED
    assert (await refusal(client.sign(PARTICIPATION))).code == "wallet_locked"
    assert "signed: Take part in the network at gate.example.net" in running.log.read_text()


async def test_a_wrong_passphrase_is_refused_and_the_next_try_has_to_wait(running):
    errors = [await refusal(running.client.unlock("wrong one")) for _ in range(2)]
    assert [error.code for error in errors] == ["wrong_passphrase", "unlock_throttled"]
    assert await running.client.status() == LOCKED


async def test_connections_are_bounded(running):
    held = [await asyncio.open_unix_connection(running.path) for _ in range(signer.MAX_CONNECTIONS)]
    for reader, writer in held:  # answered, so all of them are counted
        await control.write_message(writer, {"id": 1, "verb": "status"})
        await control.read_message(reader)
    assert (await refusal(running.client.status())).code == "signer_gone"
    for _, writer in held:
        writer.close()
    assert await running.client.wait_ready(30) == LOCKED


async def test_actions_are_signed_for_our_host_only(running):
    await running.client.unlock(PASSPHRASE)
    intent = claim(datetime.now(UTC))
    signature = await running.client.sign(intent)
    text = texts.action_text(HOST, "claim", WALLET, intent.details, intent.nonce, intent.issued_at, intent.expires_at)
    assert keys.verify(WALLET, text.encode(), signature)
    assert (await refusal(running.client.sign(claim(datetime.now(UTC), "evil.example.net")))).code == "other_host"
    assert (await refusal(running.client.sign(claim(datetime.now(UTC) - timedelta(hours=1))))).code == "action_expired"


async def test_several_clients_are_answered_while_one_unlocks(running):
    results = await asyncio.gather(
        running.client.unlock(PASSPHRASE), *(running.client.status() for _ in range(20)), running.client.status()
    )
    assert results[0] == UNLOCKED
    assert await running.client.status() == UNLOCKED


async def test_only_this_user_can_reach_the_socket(running):
    status = running.path.stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        struct.pack("<I", 2**31),
        struct.pack("<I", 3) + b"not",
        struct.pack("<I", 2) + b"[]",
        b"GET / HTTP",
    ],
)
async def test_garbage_closes_its_own_connection_only(running, garbage):
    reader, writer = await asyncio.open_unix_connection(running.path)
    writer.write(garbage)
    writer.write_eof()
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    assert await running.client.status() == LOCKED


async def test_one_connection_may_ask_several_times(running):
    reader, writer = await asyncio.open_unix_connection(running.path)
    for number in (1, 2):
        await control.write_message(writer, {"id": number, "verb": "status"})
        assert (await control.read_message(reader))["id"] == number
    writer.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, "exit"])
async def test_asked_to_stop_it_goes_at_once_and_leaves_nothing(running, how):
    await running.client.unlock(PASSPHRASE)
    _, idle = await asyncio.open_unix_connection(running.path)  # an open connection holds nothing up
    if how == "exit":
        await running.client.exit()
    else:
        running.process.send_signal(how)
    assert await asyncio.to_thread(running.process.wait, 10) == 0
    idle.close()
    assert not running.path.exists()
    assert (await refusal(running.client.status())).code == "signer_gone"


async def test_ctrl_c_on_the_console_does_not_take_the_signer_away(running):
    running.process.send_signal(signal.SIGINT)
    assert await running.client.status() == LOCKED


async def test_a_second_signer_does_not_take_the_first_ones_place(running, vault_file):
    second = await asyncio.to_thread(
        subprocess.run, arguments(vault_file, running.path), capture_output=True, text=True, timeout=60
    )
    assert second.returncode == ExitCode.RESOURCE
    assert "Another signer answers" in second.stderr
    assert await running.client.status() == LOCKED


async def test_a_killed_signers_socket_is_taken_over_locked(running, vault_file):
    await running.client.unlock(PASSPHRASE)
    running.process.kill()
    running.process.wait(30)
    assert running.path.exists()
    with running.log.open("ab") as stderr:
        successor = spawn(arguments(vault_file, running.path), stderr=stderr)
    try:
        assert await running.client.wait_ready(30) == LOCKED
    finally:
        successor.kill()
        successor.wait(30)


async def test_without_a_vault_it_ends_with_the_wallets_exit_code(runtime):
    ended = await asyncio.to_thread(
        subprocess.run,
        arguments(runtime / "vault.json", runtime / "signer.sock"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == ExitCode.WALLET
    assert "There is no wallet at" in ended.stderr


async def test_a_directory_others_may_enter_is_refused(vault_file, runtime):
    runtime.chmod(0o755)
    ended = await asyncio.to_thread(
        subprocess.run, arguments(vault_file, runtime / "signer.sock"), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == ExitCode.WALLET
    assert "chmod 700" in ended.stderr


async def test_an_orphaned_signer_ends(vault_file, runtime):
    path = runtime / "signer.sock"
    script = f"""
        import os, subprocess, sys
        run = [sys.executable, "-m", "kvasir_console.child", str(os.getpid()), "kvasir_console.wallet.signer"]
        print(subprocess.Popen(run + {arguments(vault_file, path)[3:]!r}).pid, flush=True)
        sys.stdin.read()
    """
    parent = spawn([sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    descriptor = os.pidfd_open(int(parent.stdout.readline()))
    client = SignerClient(path)
    await client.wait_ready(30)
    await client.unlock(PASSPHRASE)
    parent.communicate(timeout=30)
    async with asyncio.timeout(20):
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)
    assert not path.exists()


async def test_the_process_leaves_no_core(running):
    limits = Path(f"/proc/{running.process.pid}/limits").read_text()
    (line,) = [each.split() for each in limits.splitlines() if each.startswith("Max core file size")]
    assert line[4:6] == ["0", "0"]


async def test_nobody_at_the_socket_is_told(runtime):
    error = await refusal(SignerClient(runtime / "signer.sock").status())
    assert error.code == "signer_gone"
    assert (await refusal(SignerClient(runtime / "signer.sock").wait_ready(0.1))).code == "signer_gone"


async def test_a_passphrase_that_is_no_text_is_not_repeated(runtime):
    error = await refusal(SignerClient(runtime / "signer.sock").unlock("12345678\udcff"))
    assert error.code == "passphrase_text"
    assert "12345678" not in str(error)
