"""What the wallet commands leave on the disk and show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir_console.errors import UsageError, WalletError
from kvasir_console.paths import Paths
from kvasir_console.wallet import commands, vault
from kvasir_console.wallet.keys import KVASIR_PATH

CASES = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "wallet_derivation.json").read_text())[
    "phrases"
]
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
    assert commands.address(paths) == created.address
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
    assert commands.address(paths) == first.address
    second = commands.create_wallet(paths, PASSPHRASE, 12, "interactive", force=True)
    assert commands.address(paths) == second.address != first.address


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_candidates_are_the_addresses_other_wallets_show(case):
    shown = {account.path: account.address for account in commands.candidate_accounts(case["mnemonic"])}
    assert {key["path"]: key["address"] for key in case["keys"]}.items() <= shown.items()
    assert next(iter(shown)) == KVASIR_PATH


@pytest.mark.parametrize("key", CASES[2]["keys"], ids=lambda key: str(key["path"]))
def test_a_phrase_is_imported_at_the_path_that_was_chosen(paths, key):
    account = commands.import_phrase(paths, CASES[2]["mnemonic"], PASSPHRASE, path=key["path"], kdf="interactive")
    assert (account.address, account.path) == (key["address"], key["path"])
    assert commands.accounts(paths) == (account,)


def test_a_bad_phrase_leaves_nothing(paths):
    with pytest.raises(WalletError) as caught:
        commands.import_phrase(paths, "abandon " * 11, PASSPHRASE, kdf="interactive")
    assert caught.value.code == "phrase_length"
    assert not paths.vault_file.exists()


def test_other_lengths_and_levels_are_usage_errors(paths):
    for arguments in ((13, "interactive"), (12, "paranoid")):
        with pytest.raises(UsageError):
            commands.create_wallet(paths, PASSPHRASE, *arguments)
    assert not paths.vault_file.exists()


def test_without_a_wallet_the_next_step_is_told(paths):
    with pytest.raises(WalletError) as caught:
        commands.address(paths)
    assert "wallet create" in caught.value.hint
