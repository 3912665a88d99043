"""The vault: what opens it, what is refused before anything is derived, and what an interrupted write leaves."""

from __future__ import annotations

import base64
import json

import pytest
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from nacl.secret import Aead
from vault_parts import CASE, CHEAP, OTHER, PASSPHRASE, PHRASE, edit, entry, refusal

from kvasir_console.errors import SystemResourceError, UsageError, WalletError
from kvasir_console.wallet import keys, vault


def test_a_vault_gives_its_phrase_and_keys_back(tmp_path):
    file = tmp_path / "new" / "vault.json"
    paths = [key["path"] for key in CASE["keys"]]
    accounts = vault.create_vault(file, f"  {PHRASE.upper()}\n", PASSPHRASE, paths=paths, cost=CHEAP)
    assert [(each.address, each.path) for each in accounts] == [(key["address"], key["path"]) for key in CASE["keys"]]
    assert vault.public_accounts(file) == accounts
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE
        assert opened.accounts == accounts
        for index, expected in enumerate(CASE["keys"]):
            with opened.key(index) as key:
                assert key.keypair().secret().hex() == expected["seed32_hex"]


def test_the_file_is_what_its_description_says(file):
    document = json.loads(file.read_bytes())
    ciphertext = base64.b64decode(document.pop("ciphertext"))
    assert document["kdf"]["name"] == "argon2id"
    assert (document["kdf"]["ops"], document["kdf"]["mem_kib"]) == (CHEAP.ops, CHEAP.mem_kib)
    key = Argon2id(
        salt=base64.b64decode(document["kdf"]["salt"]), length=32, iterations=CHEAP.ops, lanes=1, memory_cost=19 * 1024
    ).derive(PASSPHRASE.encode())
    header = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    plaintext = Aead(key).decrypt(ciphertext, header, base64.b64decode(document["aead"]["nonce"]))
    assert json.loads(plaintext) == {
        "phrase": PHRASE,
        "keys": {},
        "second_factor": None,
        "limits": {},
        "contacts": {},
    }


def test_no_word_of_the_phrase_stands_in_clear(file):
    text = file.read_text()
    assert not [word for word in PHRASE.split() if f'"{word}"' in text or f" {word} " in text]


def test_a_wrong_passphrase_is_told_with_the_next_step(file):
    error = refusal(file, "correct horse batterY")
    assert error.code == "wrong_passphrase"
    assert "recovery phrase" in error.hint


def test_a_passphrase_is_the_same_however_its_letters_are_composed(tmp_path):
    file = tmp_path / "v" / "vault.json"
    vault.create_vault(file, PHRASE, "p\u00e9niche \ufb01nale", cost=CHEAP)
    with vault.open_vault(file, "pe\u0301niche finale") as opened:
        assert opened.phrase == PHRASE


@pytest.mark.parametrize("passphrase", ["", "seven77", "e\u0301" * 7])
def test_short_passphrases_are_refused(tmp_path, passphrase):
    with pytest.raises(WalletError) as caught:
        vault.create_vault(tmp_path / "v" / "vault.json", PHRASE, passphrase, cost=CHEAP)
    assert caught.value.code == "passphrase_short"
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize("passphrase", ["x" * 4097, "12345678\udcff"])
def test_passphrases_that_are_no_text_are_refused(tmp_path, passphrase):
    with pytest.raises(WalletError) as caught:
        vault.create_vault(tmp_path / "v" / "vault.json", PHRASE, passphrase, cost=CHEAP)
    assert caught.value.code == "passphrase_text"
    assert caught.value.__cause__ is None


def test_a_bad_phrase_makes_no_vault(tmp_path):
    with pytest.raises(WalletError) as caught:
        vault.create_vault(tmp_path / "v" / "vault.json", "abandon " * 12, PASSPHRASE, cost=CHEAP)
    assert caught.value.code == "phrase_checksum"
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"accounts": [entry(OTHER)]},
        {"accounts": [entry(CASE["keys"][0]["address"], path=None)]},
        {"accounts": [entry(CASE["keys"][0]["address"], "watch", None)]},
        {"second_factor": True},
        {"created": "2001-01-01T00:00:00Z"},
        {"kdf__ops": 3},
        {"kdf__mem_kib": 20 * 1024},
        {"kdf__salt": base64.b64encode(bytes(16)).decode()},
        {"aead__nonce": base64.b64encode(bytes(24)).decode()},
        {"ciphertext": base64.b64encode(bytes(200)).decode()},
    ],
    ids=str,
)
def test_nothing_that_stands_in_clear_can_be_exchanged(file, change):
    edit(file, **change)
    assert refusal(file).code == "wrong_passphrase"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"kdf__mem_kib": 19 * 1024 - 1}, "vault_kdf"),
        ({"kdf__mem_kib": 2**20 + 1}, "vault_kdf"),
        ({"kdf__ops": 3, "kdf__mem_kib": 2**20}, "vault_kdf"),
        ({"kdf__mem_kib": 2**80}, "vault_kdf"),
        ({"kdf__mem_kib": -65536}, "vault_kdf"),
        ({"kdf__ops": 0}, "vault_kdf"),
        ({"kdf__ops": 1}, "vault_kdf"),
        ({"kdf__ops": 17}, "vault_kdf"),
        ({"kdf__ops": 2**32 - 1}, "vault_kdf"),
        ({"kdf__ops": True}, "vault_malformed"),
        ({"kdf__ops": 3.0}, "vault_malformed"),
        ({"kdf__ops": "3"}, "vault_malformed"),
        ({"kdf__name": "argon2i"}, "vault_malformed"),
        ({"kdf__lanes": 4}, "vault_malformed"),
        ({"kdf__salt": "AAAA"}, "vault_malformed"),
        ({"kdf__salt": "*" * 24}, "vault_malformed"),
        ({"kdf__salt": "A" * 21 + "B=="}, "vault_malformed"),
        ({"kdf": None}, "vault_malformed"),
        ({"aead__name": "aes-256-gcm"}, "vault_malformed"),
        ({"aead__nonce": base64.b64encode(bytes(12)).decode()}, "vault_malformed"),
        ({"kdf__ops": 16, "kdf__mem_kib": 2**17 + 1}, "vault_kdf"),
        ({"version": 3}, "vault_newer"),
        ({"version": 1}, "vault_malformed"),
        ({"version": 0}, "vault_malformed"),
        ({"version": True}, "vault_malformed"),
        ({"format": "keystore"}, "vault_malformed"),
        ({"created": "yesterday"}, "vault_malformed"),
        ({"note": "hello"}, "vault_malformed"),
        ({"ciphertext": ""}, "vault_malformed"),
        ({"ciphertext": base64.b64encode(bytes(16)).decode()}, "vault_malformed"),
        ({"accounts": []}, "vault_malformed"),
        ({"accounts": ["x"]}, "vault_malformed"),
        ({"accounts": [{"address": OTHER, "path": None}]}, "vault_malformed"),
        ({"accounts": [entry(OTHER, path="m/44")]}, "vault_malformed"),
        ({"accounts": [entry(OTHER[:-1] + "0")]}, "vault_malformed"),
        ({"accounts": [entry(OTHER, "spare")]}, "vault_malformed"),
        ({"accounts": [entry(OTHER, "watch")]}, "vault_malformed"),
        ({"accounts": [entry(OTHER), entry(OTHER, path=None)]}, "vault_malformed"),
        ({"accounts": [entry(OTHER, path=f"m/{index}'") for index in range(33)]}, "vault_malformed"),
        ({"second_factor": 1}, "vault_malformed"),
    ],
    ids=str,
)
def test_bad_headers_are_refused_before_anything_is_derived(file, monkeypatch, change, code):
    monkeypatch.setattr(vault.argon2id, "kdf", lambda *_: pytest.fail("derived"))
    edit(file, **change)
    assert refusal(file).code == code
    with pytest.raises(WalletError) as caught:
        vault.public_accounts(file)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"format": "kvasir-vault", "version": ' + b"9" * 5000 + b"}",
        b'{"format": "kvasir-vault", "version": NaN}',
        b'{"format": "kvasir-vault", "format": "kvasir-vault"}',
        b" " * (64 * 1024 + 1),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_files_that_are_no_vault_are_refused(file, content):
    file.write_bytes(content)
    assert refusal(file).code == "vault_malformed"


def test_a_newer_vault_is_named_by_its_version(file):
    edit(file, version=7)
    error = refusal(file)
    assert "version 7" in error.message
    assert "Update" in error.hint


def test_a_vault_whose_phrase_gives_another_address_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "v" / "vault.json"
    monkeypatch.setattr(vault, "derive_accounts", lambda *_: (vault.Account(OTHER, keys.KVASIR_PATH),))
    vault.create_vault(file, PHRASE, PASSPHRASE, cost=CHEAP)
    with vault.open_vault(file, PASSPHRASE) as opened, pytest.raises(WalletError) as caught:
        opened.key()
    assert caught.value.code == "vault_key"


def test_an_open_vault_does_not_show_and_can_be_wiped(file):
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert PHRASE.split()[0] not in repr(opened)
        buffer = opened._plaintext
        assert PHRASE.encode() in buffer
    assert not any(buffer)


def test_levels_are_those_of_libsodium_but_for_the_dearest():
    assert vault.choose_cost("interactive", 2**34) == vault.KdfCost(2, 64 * 1024)
    assert vault.choose_cost("moderate", 2**34) == vault.KdfCost(3, 256 * 1024)
    assert vault.choose_cost("sensitive", 2**34) == vault.KdfCost(2, 1024 * 1024)


@pytest.mark.parametrize(("free_mib", "mem_mib"), [(512, 256), (511, 128), (256, 128), (255, 64), (64, 64), (8, 64)])
def test_moderate_comes_down_with_the_memory_but_not_below_its_floor(free_mib, mem_mib):
    cost = vault.choose_cost("moderate", free_mib * 2**20)
    assert cost == vault.KdfCost(3, mem_mib * 1024)
    assert cost.mem_kib >= vault.FLOOR_COST.mem_kib
    assert cost.ops >= vault.FLOOR_COST.ops


def test_sensitive_is_refused_rather_than_weakened():
    with pytest.raises(SystemResourceError) as caught:
        vault.choose_cost("sensitive", 512 * 2**20)
    assert caught.value.code == "memory_short"


def test_an_unknown_level_is_a_usage_error():
    with pytest.raises(UsageError, match="interactive, moderate, sensitive"):
        vault.choose_cost("paranoid")
