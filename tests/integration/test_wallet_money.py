"""``kvasir-console wallet`` with real money of the embedded ledger: fund, send, watch, and refuse."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kvasir_console.errors import ExitCode
from kvasir_console.paths import Paths
from kvasir_console.wallet import commands, private_file, twofactor, vault
from kvasir_console.wallet.chain import Chain
from kvasir_console.wallet.limits import Spending, spending_file, today_utc
from kvasir_console.wallet.localnet.bootstrap import bootstrap
from kvasir_console.wallet.twofactor import FactorState, state_file

from ledger_process import LedgerProcess

PASSPHRASE = "a passphrase for tests"
FACTOR = b"12345678901234567890"


@dataclass
class Owner:
    """A home with a wallet, and the command line over it."""

    home: Path
    secret: Path
    address: str
    phrase: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> Paths:
        return Paths.from_environment({"KVASIR_HOME": str(self.home)})

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "kvasir_console", "wallet", *words]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, **self.environment, "KVASIR_HOME": str(self.home)}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words), capture_output=True, text=True, timeout=240, start_new_session=True, env=self.env
        )

    def data(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def given(self) -> tuple[str, ...]:
        return ("--passphrase-file", str(self.secret))

    def send(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("send", *words, "--yes", "--json", *self.given())

    def balance(self) -> tuple[int, int]:
        (account,) = self.data("balance")["accounts"]
        return account["micro_kvr"], account["lamports"]


@dataclass
class World:
    ledger: LedgerProcess
    treasury: Owner
    alice: Owner


def owner(directory: Path, name: str, environment: dict[str, str]) -> Owner:
    secret = directory / f"{name}-passphrase"
    secret.touch(0o600)
    secret.write_text(PASSPHRASE)
    home = directory / name
    made = commands.create_wallet(
        Paths.from_environment({"KVASIR_HOME": str(home)}).ensure(), PASSPHRASE, words=12, kdf="interactive"
    )
    return Owner(home, secret, made.address, made.phrase, environment)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    ledger = LedgerProcess(tmp_path, slot_ms=120).start()  # what is signed lives longer than most stalls of a machine
    try:
        environment = {
            "KVASIR_WALLET_RPC_URL": ledger.url,
            "KVASIR_WALLET_RPC_AUTH_FILE": str(ledger.auth_file),
            "KVASIR_NETWORK_GATEWAY": "http://127.0.0.1:9",
        }
        treasury = owner(tmp_path, "treasury", environment)
        with vault.open_vault(treasury.paths.vault_file, PASSPHRASE) as opened, opened.key() as key:
            keypair = key.keypair()
        async with Chain(ledger.url, ledger.auth) as chain:
            environment["KVASIR_WALLET_MINT"] = await bootstrap(chain, keypair)
        yield World(ledger, treasury, owner(tmp_path, "alice", environment))
    finally:
        if ledger.process is not None:
            ledger.stop()


def failed(done: subprocess.CompletedProcess[str], code: ExitCode, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


def test_from_nothing_to_a_paid_friend(world):
    alice, treasury = world.alice, world.treasury
    assert alice.balance() == (0, 0)

    dropped = alice.data("airdrop", "1")
    assert dropped["lamports"] == 10**9
    until(lambda: alice.balance() == (0, 10**9))

    paid = treasury.send(alice.address, "12.5", "--memo", "for the work")
    assert paid.returncode == 0, paid.stderr
    receipt = json.loads(paid.stdout)
    assert (receipt["state"], receipt["amount"], receipt["recipient"]) == ("confirmed", 12_500_000, alice.address)
    assert "fee: 0.000005000 SOL" in paid.stderr
    assert alice.balance() == (12_500_000, 10**9)

    (line,) = [each for each in alice.data("history")["movements"] if each["micro_kvr"]]
    assert line["signature"] == receipt["signature"]
    assert (line["micro_kvr"], line["counterparties"], line["memos"]) == (
        12_500_000,
        [treasury.address],
        ["for the work"],
    )

    book = ("contacts", "add", "the bank", treasury.address, *alice.given())
    assert alice.run(*book).returncode == 0
    back = alice.send("the bank", "0.25", "SOL")
    assert back.returncode == 0, back.stderr
    assert alice.balance() == (12_500_000, 10**9 - 250_000_000 - 5000)
    shown = alice.run("history").stdout
    assert "-0.250000000 SOL" in shown
    assert treasury.address in shown
    assert alice.data("cluster")["genesis"] == world.ledger.genesis


def test_what_cannot_be_paid_is_said_before_anything_is_signed(world):
    alice, treasury = world.alice, world.treasury
    failed(alice.send(treasury.address, "1"), ExitCode.LEDGER, "would fail")
    failed(treasury.send(alice.address, "1.0000001"), ExitCode.USAGE, "at most 6 decimals")
    failed(treasury.send(treasury.address, "1"), ExitCode.USAGE, "same wallet")
    failed(treasury.send("nobody", "1"), ExitCode.USAGE, "address book")
    mint = treasury.environment["KVASIR_WALLET_MINT"]
    failed(treasury.send(mint, "1"), ExitCode.USAGE, "mint")
    asked = treasury.run("send", alice.address, "1", *treasury.given())
    failed(asked, ExitCode.USAGE, "--yes")
    log = (treasury.paths.state / "signer.log").read_text()
    assert "signed:" not in log
    assert alice.balance() == (0, 0)


def test_the_same_id_pays_once(world):
    alice, treasury = world.alice, world.treasury
    first = treasury.send(alice.address, "3", "--id", "rent of May")
    again = treasury.send(alice.address, "3", "--id", "rent of May")
    assert json.loads(first.stdout) == json.loads(again.stdout)
    assert alice.balance()[0] == 3_000_000
    failed(treasury.send(alice.address, "4", "--id", "rent of May"), ExitCode.USAGE, "another payment")
    assert treasury.send(alice.address, "3").returncode == 0
    assert alice.balance()[0] == 6_000_000


def test_killed_at_any_moment_a_payment_is_made_at_most_once_and_can_be_finished(world):
    alice, treasury = world.alice, world.treasury
    words = ("send", alice.address, "1", "--yes", "--json", "--id", "killed", *treasury.given())
    for pause_s in (0.2, 0.5, 0.7, 0.8, 0.9, 1.0):
        process = subprocess.Popen(
            treasury.argv(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=treasury.env
        )
        try:
            process.wait(pause_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(120)
    finished = treasury.run(*words)
    assert finished.returncode == 0, finished.stderr
    assert alice.balance()[0] == 1_000_000
    assert treasury.data("history")["pending"] == []


def test_the_second_factor_and_the_days_limit_stand_before_money(world):
    alice, treasury = world.alice, world.treasury
    file = treasury.paths.vault_file
    assert treasury.run("limit", "--kvr", "5", *treasury.given()).returncode == 0
    today = Spending(today_utc() + timedelta(days=2))  # midnight may come before the end
    private_file.write(spending_file(file), json.dumps(today.to_json()).encode(), replace=True)
    assert treasury.send(alice.address, "4").returncode == 0
    failed(treasury.send(alice.address, "1.000001"), ExitCode.WALLET, "limit")
    vault.update(file, PASSPHRASE, lambda contents: replace(contents, second_factor=FACTOR))
    private_file.write(state_file(file), json.dumps(FactorState().to_json()).encode(), replace=True)
    failed(treasury.send(alice.address, "1"), ExitCode.WALLET, "one-time code")
    failed(treasury.send(alice.address, "1", "--code", "000000"), ExitCode.WALLET, "wrong")
    code = sent_with_a_code(treasury, alice.address, "1")
    failed(treasury.send(alice.address, "0.5", "SOL", "--code", code), ExitCode.WALLET, "used already")
    assert alice.balance()[0] == 5_000_000


def sent_with_a_code(sender: Owner, *words: str) -> str:
    """Send; the code that was taken. It is good for a minute at least; on a machine so busy that it came too late, the
    next one is given."""
    while True:
        step = int(time.time()) // twofactor.STEP_S + 1
        code = twofactor.hotp(FACTOR, step)
        done = sender.send(*words, "--code", code)
        if done.returncode == 0 or int(time.time()) // twofactor.STEP_S <= step + twofactor.WINDOW_STEPS:
            assert done.returncode == 0, done.stderr
            return code


def test_another_cluster_is_refused_until_it_is_meant(world, tmp_path):
    alice = world.alice
    alice.balance()
    other_directory = tmp_path / "other"
    other_directory.mkdir()
    other = LedgerProcess(other_directory).start()
    try:
        alice.environment |= {
            "KVASIR_WALLET_RPC_URL": other.url,
            "KVASIR_WALLET_RPC_AUTH_FILE": str(other.auth_file),
        }
        for words in (("balance",), ("history",), ("airdrop", "1")):
            failed(alice.run(*words), ExitCode.LEDGER, "cluster")
        failed(alice.send(world.treasury.address, "1"), ExitCode.LEDGER, "cluster")
        assert alice.data("cluster")["genesis"] == world.ledger.genesis
        assert alice.data("cluster", "--accept")["genesis"] == other.genesis
        assert alice.balance() == (0, 0)
    finally:
        other.stop()


def test_an_import_shows_what_lies_at_each_address(world, tmp_path):
    alice = world.alice
    assert world.treasury.send(alice.address, "2").returncode == 0
    for number in range(20):
        heir = Owner(tmp_path / f"heir-{number}", alice.secret, "", "", alice.environment)
        done = subprocess.run(
            heir.argv("import", *heir.given()),
            input=alice.phrase + "\n",
            capture_output=True,
            text=True,
            timeout=240,
            start_new_session=True,
            env=heir.env | {"KVASIR_WALLET_KDF": "interactive"},
            check=True,
        )
        if "balances are not known" not in done.stderr:  # a person is not kept waiting for a ledger that is held up
            break
    lines = {line.split()[1 + line.startswith("*")]: line for line in done.stderr.splitlines() if "KVR" in line}
    assert re.search(r"2\.000000 KVR", lines[alice.address])
    assert sum("0.000000 KVR, 0.000000000 SOL" in line for line in lines.values()) == len(lines) - 1


def test_no_secret_is_left_in_anything_that_was_written(world):
    """The canary: words and key of a wallet that was used, in every spelling, in every file but the vault."""
    treasury = world.treasury
    assert treasury.send(world.alice.address, "1", "--memo", "hello").returncode == 0
    treasury.data("history")
    treasury.run("send", world.alice.address, "nonsense", *treasury.given())
    with vault.open_vault(treasury.paths.vault_file, PASSPHRASE) as opened, opened.key() as key:
        keypair = key.keypair()
    seed, both = keypair.secret(), bytes(keypair)
    canaries = [treasury.phrase.encode(), PASSPHRASE.encode(), seed, seed.hex().encode(), str(keypair).encode()]
    canaries += [json.dumps(list(both))[1:-1].encode(), ",".join(map(str, both)).encode()]
    canaries += [base64.b64encode(seed)[:40], base64.b64encode(both)[:80]]
    words = [word.encode() for word in treasury.phrase.split()]
    looked_at = 0
    for file in treasury.home.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            looked_at += 1
            assert not [canary for canary in canaries if canary in content], file
            assert sum(word in content for word in words) < len(words) // 2, file
    assert looked_at >= 4


def until(condition) -> None:
    """The faucet's transfer lands within a few slots."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
