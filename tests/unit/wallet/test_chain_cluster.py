"""The cluster a wallet lives on is remembered; another is refused until a person says that it is meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvasir_console.errors import KvasirError, LedgerError
from kvasir_console.wallet.chain import Chain
from kvasir_console.wallet.chain_cluster import ClusterPin, cluster_name

from ledger_process import LedgerProcess

ALICE, BOB = "A" * 40, "B" * 40
DEVNET = "EtWTRABZaYq6iMfeYKouRu166VU2xqa1wcaWoxPkrZBG"
MAINNET = "5eykt4UsFv8P8NJdTREpY1vzqKqZKvdpKuc147dw2N9d"
URL = "https://rpc.example/v2/a-key-that-nobody-should-see?api-key=nor-this"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "cluster.json"


def test_the_first_cluster_is_kept_and_no_other_is_taken(file: Path) -> None:
    pin = ClusterPin(file, ALICE)
    assert pin.pinned is None
    pin.check(DEVNET, URL)
    pin.check(DEVNET, URL)
    with pytest.raises(LedgerError) as error:
        pin.check(MAINNET, URL)
    assert error.value.code == "cluster_changed"
    for word in ("devnet", "mainnet-beta", "rpc.example"):
        assert word in error.value.message
    assert "key" not in str(error.value)
    assert "wallet cluster --accept" in error.value.hint
    assert ClusterPin(file, ALICE).pinned == DEVNET


def test_the_way_out(file: Path) -> None:
    pin = ClusterPin(file, ALICE)
    pin.check(DEVNET, URL)
    pin.accept(MAINNET)
    pin.check(MAINNET, URL)
    with pytest.raises(LedgerError):
        pin.check(DEVNET, URL)


def test_each_wallet_has_its_own(file: Path) -> None:
    ClusterPin(file, ALICE).check(DEVNET, URL)
    ClusterPin(file, BOB).check(MAINNET, URL)
    ClusterPin(file, ALICE).check(DEVNET, URL)


def test_the_file_is_private(file: Path) -> None:
    ClusterPin(file, ALICE).check(DEVNET, URL)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_of_two_that_come_first_one_wins(file: Path) -> None:
    def first(genesis: str) -> bool:
        try:
            ClusterPin(file, ALICE).check(genesis, URL)
        except LedgerError:
            return False
        return True

    hashes = [DEVNET, MAINNET] * 8
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(first, hashes))
    kept = ClusterPin(file, ALICE).pinned
    assert [genesis for genesis, good in zip(hashes, taken, strict=True) if good] == [kept] * 8


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"version": 2, "genesis": {ALICE: DEVNET}}).encode(),
        json.dumps({"version": 1}).encode(),
        json.dumps({"version": 1, "genesis": {ALICE: 5}}).encode(),
        b" " * (2 << 20),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused_and_left_alone(file: Path, content: bytes) -> None:
    ClusterPin(file, BOB).check(DEVNET, URL)
    file.write_bytes(content)
    with pytest.raises(KvasirError):
        ClusterPin(file, ALICE).check(DEVNET, URL)
    assert file.read_bytes() == content


def test_a_file_that_others_may_write_is_refused(file: Path) -> None:
    ClusterPin(file, ALICE).check(DEVNET, URL)
    file.chmod(0o666)
    with pytest.raises(KvasirError) as error:
        ClusterPin(file, ALICE).check(DEVNET, URL)
    assert "chmod 600" in error.value.hint


def test_names_of_clusters() -> None:
    assert cluster_name(MAINNET) == "mainnet-beta"
    assert cluster_name("4uhcVJyU9pJkvQyS88uRDiswHXSCkY3zQawwpjk2NsNY") == "testnet"
    assert cluster_name("9" * 44) == "the cluster 99999999…"


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[tuple[LedgerProcess, LedgerProcess]]:
    pair = LedgerProcess(tmp_path / "one").start(), LedgerProcess(tmp_path / "two").start()
    yield pair
    for each in pair:
        each.stop()


async def test_a_chain_refuses_to_be_led_to_another_cluster(
    ledgers: tuple[LedgerProcess, LedgerProcess], file: Path
) -> None:
    one, two = ledgers
    pin = ClusterPin(file, ALICE)
    wallet = "11111111111111111111111111111111"
    async with Chain(one.url, one.auth, pin=pin) as chain:
        await chain.balance_lamports(wallet)
        assert pin.pinned == one.genesis
    async with Chain(two.url, two.auth, pin=pin) as chain:
        with pytest.raises(LedgerError) as error:
            await chain.balance_lamports(wallet)
        assert error.value.code == "cluster_changed"
        pin.accept(two.genesis)
        await chain.balance_lamports(wallet)
