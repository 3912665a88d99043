"""What a vault holds: accounts of every kind, a second factor, limits, an address book; and what version 1 held."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from vault_parts import CASE, CHEAP, OTHER, PASSPHRASE, PHRASE, edit, left_beside, refusal

from kvasir_console.errors import KvasirError, WalletError
from kvasir_console.wallet import accounts, keys, vault
from kvasir_console.wallet.formats import Phrase, RawKey

SEED = bytes.fromhex(CASE["keys"][1]["seed32_hex"])
RAW = RawKey(SEED, CASE["keys"][1]["address"])


def test_accounts_of_every_kind_live_in_one_vault(file):
    vault.update(file, PASSPHRASE, lambda contents: accounts.add_key(contents, RAW))
    vault.update(file, PASSPHRASE, lambda contents: accounts.add_watched(contents, OTHER))
    after = vault.update(file, PASSPHRASE, lambda contents: accounts.add_derived(contents, "m/44'/501'/1'/0'"))
    expected = next(key for key in CASE["keys"] if key["path"] == "m/44'/501'/1'/0'")
    assert [str(each.kind) for each in after] == ["phrase", "key", "watch", "phrase"]
    assert after[3].address == expected["address"]
    assert vault.public_accounts(file) == after
    with vault.open_vault(file, PASSPHRASE) as opened:
        with opened.key(1) as key:
            assert key.keypair().secret() == SEED
        with opened.key(3) as key:
            assert key.address == expected["address"]
        with pytest.raises(WalletError) as caught:
            opened.key(2)
        assert caught.value.code == "watch_only"
    document = file.read_text()
    assert RAW.address in document
    assert base64.b64encode(SEED).decode() not in document


def test_a_vault_of_one_raw_key_has_no_phrase(tmp_path):
    file = tmp_path / "v" / "vault.json"
    vault.create(file, accounts.of_secret(RAW), PASSPHRASE, cost=CHEAP)
    with vault.open_vault(file, PASSPHRASE) as opened:
        with opened.key() as key:
            assert key.address == RAW.address
        with pytest.raises(WalletError) as caught:
            _ = opened.phrase
        assert caught.value.code == "vault_no_phrase"


def test_a_watching_vault_signs_nothing(tmp_path):
    file = tmp_path / "v" / "vault.json"
    vault.create(file, accounts.watching(OTHER), PASSPHRASE, cost=CHEAP)
    assert vault.public_accounts(file)[0].address == OTHER
    with vault.open_vault(file, PASSPHRASE) as opened, pytest.raises(WalletError, match="only watched"):
        opened.key()


def test_a_secret_of_the_second_factor_is_sealed_and_announced(file):
    factor = b"12345678901234567890"
    vault.update(file, PASSPHRASE, lambda contents: replace(contents, second_factor=factor))
    assert vault.second_factor_enrolled(file)
    assert json.loads(file.read_text())["second_factor"] is True
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert opened.second_factor == factor
    edit(file, second_factor=False)  # taking it off in the file does not take it off
    assert refusal(file).code == "wrong_passphrase"


def test_limits_and_the_address_book_are_sealed(file):
    limits, book = {"KVR": 5_000_000}, {"the shop": OTHER}
    vault.update(file, PASSPHRASE, lambda contents: replace(contents, limits=limits, contacts=book))
    assert OTHER not in file.read_text()
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert (opened.contents().limits, opened.contents().contacts) == (limits, book)


def test_a_change_that_fails_changes_nothing(file):
    before = file.read_bytes()
    for change in (
        lambda contents: accounts.add_derived(contents, keys.KVASIR_PATH),
        lambda contents: accounts.add_watched(contents, "no address"),
        lambda contents: accounts.remove(contents, "1"),
        lambda contents: accounts.use(contents, "2"),
        lambda contents: accounts.add_phrase(contents, Phrase("legal " * 11 + "will"), None),
        lambda contents: replace(contents, accounts=contents.accounts * 2),
        lambda contents: replace(contents, accounts=()),
    ):
        with pytest.raises(KvasirError):
            vault.update(file, PASSPHRASE, change)
        assert file.read_bytes() == before


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A vault as version 1 wrote it."""
    file = tmp_path / "old" / "vault.json"
    file.parent.mkdir(mode=0o700)
    shutil.copy(Path(__file__).parents[2] / "data" / "vault_v1.json", file)
    file.chmod(0o600)
    return file


def test_an_old_vault_is_read_as_it_stands(old):
    before = old.read_bytes()
    expected = [next(key for key in CASE["keys"] if key["path"] == path) for path in (keys.KVASIR_PATH, None)]
    assert [each.address for each in vault.public_accounts(old)] == [key["address"] for key in expected]
    with vault.open_vault(old, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE
        assert opened.second_factor is None
        with opened.key(1) as key:
            assert key.address == expected[1]["address"]
    assert refusal(old, "not the passphrase").code == "wrong_passphrase"
    assert old.read_bytes() == before


def test_an_old_vault_becomes_a_new_one_when_it_changes_and_is_kept_beside_it(old):
    before = old.read_bytes()
    known = vault.public_accounts(old)
    after = vault.update(old, PASSPHRASE, lambda contents: accounts.add_watched(contents, OTHER))
    assert after[:2] == known
    assert json.loads(old.read_text())["version"] == 2
    with vault.open_vault(old, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE
    (kept,) = left_beside(old)
    assert (old.parent / kept).read_bytes() == before


def test_a_new_passphrase_renews_the_version_and_leaves_nothing_under_the_old_one(old):
    vault.change_passphrase(old, PASSPHRASE, "a new passphrase", cost=CHEAP)
    assert json.loads(old.read_text())["version"] == 2
    assert refusal(old).code == "wrong_passphrase"
    assert left_beside(old) == set()


def test_an_old_header_cannot_be_exchanged_either(old):
    edit(old, accounts=[{"address": OTHER, "path": keys.KVASIR_PATH}])
    assert refusal(old).code == "wrong_passphrase"
