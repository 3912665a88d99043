"""A wallet made without anybody to ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir_console.errors import UsageError, WalletError
from kvasir_console.paths import Paths
from kvasir_console.wallet import commands, vault

PASSPHRASE = "correct horse battery"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.from_environment({"KVASIR_HOME": str(tmp_path / "home")})


@pytest.mark.parametrize("words", [12, 24])
def test_a_created_wallet_is_in_the_vault(paths, words):
    created = commands.create_wallet(paths, PASSPHRASE, words, "interactive")
    assert created.file == paths.vault_file
    assert len(created.phrase.split()) == words
    assert created.phrase not in repr(created)
    assert vault.public_accounts(paths.vault_file)[0].address == created.address
    with vault.open_vault(paths.vault_file, PASSPHRASE) as opened:
        assert opened.phrase == created.phrase
        with opened.key() as key:
            assert key.address == created.address
    header = json.loads(paths.vault_file.read_text())
    assert (header["kdf"]["ops"], header["kdf"]["mem_kib"]) == (2, 64 * 1024)


def test_a_second_wallet_needs_force(paths):
    first = commands.create_wallet(paths, PASSPHRASE, 12, "interactive")
    with pytest.raises(WalletError) as caught:
        commands.create_wallet(paths, PASSPHRASE, 12, "interactive")
    assert caught.value.code == "vault_exists"
    assert vault.public_accounts(paths.vault_file)[0].address == first.address
    second = commands.create_wallet(paths, PASSPHRASE, 12, "interactive", force=True)
    assert vault.public_accounts(paths.vault_file)[0].address == second.address != first.address


def test_other_lengths_and_levels_are_usage_errors(paths):
    for arguments in ((13, "interactive"), (12, "paranoid")):
        with pytest.raises(UsageError):
            commands.create_wallet(paths, PASSPHRASE, *arguments)
    assert not paths.vault_file.exists()
