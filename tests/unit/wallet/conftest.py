"""Fixtures of the wallet's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import signer_parts
from vault_parts import CHEAP, PASSPHRASE, PHRASE

from kvasir_console.wallet import vault

from ledger_process import LedgerProcess, RpcProxy


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A vault of one phrase that opens fast."""
    path = tmp_path / "wallet" / "vault.json"
    vault.create_vault(path, PHRASE, PASSPHRASE, cost=CHEAP)
    return path


@pytest.fixture(scope="module")
def vault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The signer's vault."""
    file = tmp_path_factory.mktemp("signer") / "wallet" / "vault.json"
    (account,) = vault.create_vault(file, signer_parts.PHRASE, PASSPHRASE, cost=CHEAP)
    assert account.address == signer_parts.WALLET
    return file


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    """A ledger for tests that leave it running; a blockhash expires in nine seconds."""
    yield from _ledger(tmp_path_factory.mktemp("ledger"), 60)


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    """Another, whose blockhashes expire in a second."""
    yield from _ledger(tmp_path_factory.mktemp("quick"), 5)


def _ledger(directory: Path, slot_ms: int) -> Iterator[LedgerProcess]:
    ledger = LedgerProcess(directory, slot_ms=slot_ms).start()
    yield ledger
    assert ledger.stop() == 0


@pytest.fixture
async def public(process: LedgerProcess) -> AsyncIterator[RpcProxy]:
    """A second RPC of the same cluster, which asks for no header."""
    async with RpcProxy(process.url, auth=process.auth) as proxy:
        yield proxy
