"""The payout process against a real ledger, killed again and again: every claim is paid once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from solders.keypair import Keypair

from kvasir_console.node.gateway.ledger import ClaimState, Ledger, Reading
from kvasir_console.node.gateway.payout import TREASURY_FACT
from kvasir_console.node.gateway.store import Store
from kvasir_console.paths import Paths
from kvasir_console.wallet import commands, token
from kvasir_console.wallet.chain import Chain
from kvasir_console.wallet.localnet.bootstrap import bootstrap
from kvasir_console.wallet.vault import open_vault

from ledger_process import LedgerProcess

PASSPHRASE = "a passphrase for tests"


@dataclass
class Operator:
    """A treasury with KVR on a running ledger, and a store with claims."""

    ledger_process: LedgerProcess
    vault: Path
    passphrase_file: Path
    database: str
    mint: str
    treasury: str
    errors: Path

    def payout(self) -> subprocess.Popen[bytes]:
        argv = [
            *(sys.executable, "-m", "kvasir_console.node.gateway.payout", "--database", self.database),
            *("--rpc", self.ledger_process.url, "--rpc-auth-file", str(self.ledger_process.auth_file)),
            *("--mint", self.mint, "--treasury", str(self.vault), "--passphrase-file", str(self.passphrase_file)),
            *("--poll-s", "0.05"),
        ]
        with self.errors.open("ab") as stream:
            return subprocess.Popen(argv, stdout=stream, stderr=stream)

    def wait_until_said(self, words: str, times: int) -> None:
        """Until the payout processes said ``words`` so often, over all of their lives."""
        deadline = time.monotonic() + 120
        while self.errors.read_text().count(words) < times:
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.05)

    def chain(self) -> Chain:
        return Chain(self.ledger_process.url, self.ledger_process.auth)


@pytest.fixture
async def operator(tmp_path: Path):
    process = LedgerProcess(tmp_path).start()
    try:
        paths = Paths.from_environment({"KVASIR_HOME": str(tmp_path / "home")}).ensure()
        commands.create_wallet(paths, PASSPHRASE, words=12, kdf="interactive")
        passphrase_file = tmp_path / "passphrase"
        passphrase_file.touch(0o600)
        passphrase_file.write_text(PASSPHRASE)
        with open_vault(paths.vault_file, PASSPHRASE) as vault, vault.key() as key:
            keypair = key.keypair()
        async with Chain(process.url, process.auth) as chain:
            mint = await bootstrap(chain, keypair)
        yield Operator(
            process,
            paths.vault_file,
            passphrase_file,
            f"sqlite:///{tmp_path / 'gateway.sqlite'}",
            mint,
            str(keypair.pubkey()),
            tmp_path / "payout.log",
        )
    finally:
        process.stop()


@pytest.fixture
def store(operator: Operator) -> Iterator[Store]:
    opened = Store.open(operator.database)
    yield opened
    opened.close()


def reserve(ledger: Ledger, micro_kvr: int, seed: int) -> str:
    wallet = str(Keypair.from_seed(bytes([seed]) * 32).pubkey())
    ledger.credit(Reading(wallet, "w", "expert", f"run-{seed}-{micro_kvr}", micro_kvr * 100), int(time.time()))
    ledger.reserve(wallet, 1, int(time.time()))
    return wallet


def wait_for(ledger: Ledger, *states: ClaimState, timeout_s: float = 200.0) -> None:
    """Until some claim is in one of ``states``, or none is open."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        open_claims = ledger.open_claims()
        if not open_claims or any(claim.state in states for claim in open_claims):
            return
        time.sleep(0.002)
    raise AssertionError("the payout process does nothing")


async def test_claims_are_paid_once_though_the_payer_is_killed_at_every_step(operator: Operator, store: Store) -> None:
    ledger = Ledger(store)
    owed = {reserve(ledger, 1000 + seed, seed): 1000 + seed for seed in range(1, 7)}
    for state in (ClaimState.SIGNED, ClaimState.SENT, ClaimState.SIGNED):
        payer = operator.payout()
        wait_for(ledger, state)
        payer.kill()
        payer.wait()
    begun = operator.errors.read_text().count("paying from")
    last = operator.payout()
    wait_for(ledger)
    operator.wait_until_said("paying from", begun + 1)  # before that, a signal finds no handler
    last.send_signal(signal.SIGTERM)
    assert last.wait(timeout=120) == 0, operator.errors.read_text()
    assert {claim.state for claim in ledger.claims()} == {ClaimState.CONFIRMED}
    assert store.fact(TREASURY_FACT) == operator.treasury
    async with operator.chain() as chain:
        for claim in ledger.claims():
            assert await chain.balance_micro_kvr(claim.wallet, operator.mint) == owed[claim.wallet]
            (item,) = await chain.history(token.associated_token_address(claim.wallet, operator.mint))
            assert item.signature == claim.signature
            assert item.memo is not None
            assert f"kvasir:claim:{claim.claim_id}" in item.memo
    assert PASSPHRASE not in operator.errors.read_text()


def test_a_wrong_passphrase_ends_it_with_its_own_code(operator: Operator) -> None:
    operator.passphrase_file.write_text("not the passphrase")
    assert operator.payout().wait(timeout=120) == 4
    assert "not the passphrase" not in operator.errors.read_text()
    operator.passphrase_file.chmod(0o644)
    assert operator.payout().wait(timeout=120) == 4
    os.remove(operator.passphrase_file)
    assert operator.payout().wait(timeout=120) == 4
