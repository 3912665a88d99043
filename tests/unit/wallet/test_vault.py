"""The vault: what opens it, what is refused before anything is derived, and what an interrupted write leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nacl.secret import Aead

from kvasir_console.errors import KvasirError, SystemResourceError, UsageError, WalletError
from kvasir_console.wallet import accounts, keys, vault
from kvasir_console.wallet.formats import Phrase, RawKey

CASE = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "wallet_derivation.json").read_text())[
    "phrases"
][2]
PHRASE, PASSPHRASE = CASE["mnemonic"], "correct horse battery"
CHEAP = vault.KdfCost(2, 19 * 1024)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "wallet" / "vault.json"
    vault.create_vault(path, PHRASE, PASSPHRASE, cost=CHEAP)
    return path


def refusal(file: Path, passphrase: str = PASSPHRASE) -> KvasirError:
    with pytest.raises(KvasirError) as caught:
        vault.open_vault(file, passphrase)
    assert PHRASE.split()[0] not in str(caught.value)
    assert passphrase not in str(caught.value)
    return caught.value


def left_beside(file: Path) -> set[str]:
    """Names in the vault's directory besides its own and its lock's."""
    return {each.name for each in file.parent.iterdir()} - {file.name, f".{file.name}.lock"}


def edit(file: Path, **changes: object) -> None:
    """Change fields; ``kdf__ops`` is ``ops`` in ``kdf``."""
    document = json.loads(file.read_text())
    for name, value in changes.items():
        *tables, last = name.split("__")
        table = document
        for each in tables:
            table = table[each]
        table[last] = value
    file.write_text(json.dumps(document))


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


def test_files_are_private(file):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [each.name for each in file.parent.iterdir()] == ["vault.json"]


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


OTHER = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"


def entry(address: str, kind: str = "phrase", path: str | None = keys.KVASIR_PATH) -> dict[str, str | None]:
    return {"address": address, "kind": kind, "path": path}


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


def unopened(file: Path, damaged: bytes) -> None:
    """``damaged`` is refused by name and left as it is."""
    whole = file.read_bytes()
    file.write_bytes(damaged)
    try:
        assert refusal(file).code.startswith(("vault_", "wrong_", "memory_"))
        assert file.read_bytes() == damaged
        assert left_beside(file) == set()
    finally:
        file.write_bytes(whole)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(file, data):
    whole = file.read_bytes()
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    unopened(file, whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_exchanged_byte_goes_unnoticed(file, data):
    whole = file.read_bytes()
    place = data.draw(st.sampled_from([place for place, byte in enumerate(whole) if not chr(byte).isspace()]))
    byte = data.draw(st.integers(0x21, 0x7E).filter(lambda byte: byte != whole[place]))
    unopened(file, whole[:place] + bytes([byte]) + whole[place + 1 :])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_truncation_goes_unnoticed(file, data):
    whole = file.read_bytes()
    unopened(file, whole[: data.draw(st.integers(0, len(whole.rstrip()) - 1))])


def test_no_byte_of_the_whole_file_can_have_a_flipped_bit(tmp_path, monkeypatch):
    """Every byte. The derivation, which takes a second, is exchanged for one that takes none."""
    monkeypatch.setattr(vault, "_derive_key", lambda text, header: hashlib.sha256(header.salt + text.encode()).digest())
    file = tmp_path / "v" / "vault.json"
    vault.create_vault(file, PHRASE, PASSPHRASE, cost=CHEAP)
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE
    whole = file.read_bytes()
    for place in range(len(whole) - 1):  # the last one is the line's end
        unopened(file, whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])


@pytest.mark.parametrize(("name", "mode"), [("vault.json", 0o640), ("vault.json", 0o604), (".", 0o750), (".", 0o701)])
def test_looser_modes_are_refused_with_the_command_that_helps(file, name, mode):
    loose = file.parent / name
    loose.chmod(mode)
    error = refusal(file)
    assert error.code == "vault_mode"
    assert str(loose) in error.message
    subprocess.run(["sh", "-c", error.hint.removeprefix("Close it with: ")], check=True)
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE


def test_a_file_of_another_user_is_refused(file, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert refusal(file).code == "vault_mode"


def test_a_directory_may_be_reached_by_a_link_of_ones_own_but_not_by_anothers(file, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    with vault.open_vault(link / file.name, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE
    real = os.lstat

    def foreign(path, **options):
        status = list(real(path, **options))
        status[4] = 65534 if str(path) == str(link) else status[4]
        return os.stat_result(status)

    monkeypatch.setattr(Path, "lstat", foreign)
    error = refusal(link / file.name)
    assert (error.code, "link" in error.message) == ("vault_mode", True)


def test_a_vault_that_is_a_link_is_not_followed(file, tmp_path):
    moved = tmp_path / "elsewhere.json"
    file.rename(moved)
    file.symlink_to(moved)
    assert refusal(file).code == "file_unavailable"


def test_a_second_name_of_the_file_keeps_the_old_vault_and_not_the_new_one(file, tmp_path):
    """A hard link made before a change of passphrase shows what a copy would: the old file, under the old one."""
    other = tmp_path / "other"
    other.mkdir(0o700)
    os.link(file, other / "vault.json")
    vault.change_passphrase(file, PASSPHRASE, "another passphrase", cost=CHEAP)
    assert refusal(other / "vault.json", "another passphrase").code == "wrong_passphrase"
    with vault.open_vault(other / "vault.json", PASSPHRASE) as opened:
        assert opened.phrase == PHRASE


def test_what_is_no_regular_file_is_refused(file):
    content = file.read_bytes()
    file.unlink()
    os.mkfifo(file, 0o600)
    assert refusal(file).code == "vault_malformed"
    file.unlink()
    file.mkdir()
    assert refusal(file).code == "file_unavailable"
    file.rmdir()
    (file.parent / "real.json").write_bytes(content)
    file.symlink_to("real.json")
    assert refusal(file).code == "file_unavailable"


def test_no_vault_is_told_with_the_next_step(tmp_path):
    for missing in (tmp_path / "vault.json", tmp_path / "nowhere" / "vault.json"):
        error = refusal(missing)
        assert error.code == "vault_missing"
        assert "wallet create" in error.hint


def test_a_vault_is_never_overwritten_unasked(file):
    before = file.read_bytes()
    with pytest.raises(WalletError) as caught:
        vault.create_vault(file, PHRASE, "another passphrase", cost=CHEAP)
    assert caught.value.code == "vault_exists"
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == ["vault.json"]


def test_a_vault_that_appears_meanwhile_is_not_overwritten_either(tmp_path, monkeypatch):
    file = tmp_path / "v" / "vault.json"
    seal = vault._seal

    def meanwhile(*arguments):
        file.parent.mkdir(mode=0o700)
        file.write_text("the other one")
        return seal(*arguments)

    monkeypatch.setattr(vault, "_seal", meanwhile)
    with pytest.raises(WalletError) as caught:
        vault.create_vault(file, PHRASE, PASSPHRASE, cost=CHEAP)
    assert caught.value.code == "vault_exists"
    assert file.read_text() == "the other one"


def test_forced_replacement_keeps_the_old_vault(file):
    old = file.read_bytes()
    vault.create_vault(file, PHRASE, "another passphrase", cost=CHEAP, force=True)
    assert refusal(file).code == "wrong_passphrase"
    (kept,) = (each for each in file.parent.iterdir() if each.name != "vault.json")
    assert kept.suffix == ".bak"
    assert kept.read_bytes() == old
    with vault.open_vault(kept, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE


def test_a_passphrase_is_changed_with_everything_fresh(file):
    before = json.loads(file.read_text())
    cost = vault.KdfCost(3, 20 * 1024)
    vault.change_passphrase(file, PASSPHRASE, "a new passphrase", cost=cost)
    assert refusal(file).code == "wrong_passphrase"
    with vault.open_vault(file, "a new passphrase") as opened:
        assert opened.phrase == PHRASE
    after = json.loads(file.read_text())
    assert (after["kdf"]["ops"], after["kdf"]["mem_kib"]) == (3, 20 * 1024)
    assert after["kdf"]["salt"] != before["kdf"]["salt"]
    assert after["aead"]["nonce"] != before["aead"]["nonce"]
    assert (after["created"], after["accounts"]) == (before["created"], before["accounts"])
    assert left_beside(file) == set()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_change_leaves_the_old_vault(file, monkeypatch, step):
    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fails)
        with pytest.raises(SystemResourceError) as caught:
            vault.change_passphrase(file, PASSPHRASE, "a new passphrase", cost=CHEAP)
    assert caught.value.code == "file_unavailable"
    assert left_beside(file) == set()
    with vault.open_vault(file, PASSPHRASE) as opened:
        assert opened.phrase == PHRASE


def test_nothing_is_written_into_a_directory_others_may_change(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    with pytest.raises(WalletError) as caught:
        vault.create_vault(shared / "vault.json", PHRASE, PASSPHRASE, cost=CHEAP)
    assert caught.value.code == "vault_mode"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777
    assert list(shared.iterdir()) == []


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


def test_memory_that_is_not_there_is_named(file):
    edit(file, kdf__mem_kib=2**20)
    script = f"""
        import resource
        from pathlib import Path
        from kvasir_console.errors import SystemResourceError
        from kvasir_console.wallet import vault
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))  # the program needs some of it
        try:
            vault.open_vault(Path({str(file)!r}), {PASSPHRASE!r})
        except SystemResourceError as error:
            print(error.code, error.message)
    """
    output = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert output.stdout.startswith("memory_short")
    assert "1024 MiB" in output.stdout


# Several accounts, raw keys, watched addresses


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


def test_changes_of_two_processes_are_both_kept(file):
    """Each reads, derives and writes; without a lock one would undo the other."""
    script = (
        "import sys, pathlib\nfrom kvasir_console.wallet import accounts, vault\n"
        f"vault.update(pathlib.Path(sys.argv[1]), {PASSPHRASE!r}, lambda c: accounts.add_derived(c, sys.argv[2]))"
    )
    paths = [f"m/44'/501'/{index}'" for index in range(3)]
    children = [subprocess.Popen([sys.executable, "-c", script, str(file), path]) for path in paths]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert {each.path for each in vault.public_accounts(file)} == {keys.KVASIR_PATH, *paths}


# Older and newer versions


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


# Memory, and kills


def test_a_cost_that_does_not_fit_is_refused_before_the_kernel_would(file, monkeypatch):
    monkeypatch.setattr(vault, "available_bytes", lambda: 18 * 2**20)
    monkeypatch.setattr(vault.argon2id, "kdf", lambda *_: pytest.fail("derived"))
    assert refusal(file).code == "memory_short"


def test_the_dearest_legal_header_is_refused_in_time_and_memory(file):
    """The most a hostile file can make us spend: two passes over 1 GiB. How long that takes stands in the decisions."""
    edit(file, kdf__ops=2, kdf__mem_kib=2**20)
    script = (
        "import pathlib, sys\nfrom kvasir_console.errors import KvasirError\n"
        "from kvasir_console.wallet import vault\n"
        "try:\n    vault.open_vault(pathlib.Path(sys.argv[1]), 'x' * 9)\n"
        "except KvasirError as error:\n    print(error.code)\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"  # getrusage remembers the parent's peak
        "print(status.split('VmHWM:')[1].split()[0])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=120, check=True
    )
    code, rss_kib = result.stdout.split()
    assert code in ("wrong_passphrase", "memory_short")
    assert int(rss_kib) < 1.2 * 2**20


def test_random_kills_while_saving_leave_the_old_vault_or_the_new_one(file, monkeypatch):
    """A hundred times: SIGKILL at a random moment of a process that does nothing but save."""
    # Deriving takes long and writes nothing; without it the kills hit the saving.
    monkeypatch.setattr(vault, "_derive_key", lambda text, header: hashlib.sha256(header.salt + text.encode()).digest())
    vault.create_vault(file, PHRASE, "passphrase 0", cost=CHEAP, force=True)
    (file.parent / next(iter(left_beside(file)))).unlink()
    random = Random(4)
    for _ in range(100):
        before = current = opens_with(file)
        saved, saves = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                while True:
                    following = f"passphrase {(int(current.split()[1]) + 1) % 1000}"
                    vault.change_passphrase(file, current, following, cost=CHEAP)
                    current = following
                    os.write(saves, b".")
            finally:
                os._exit(1)
        assert select.select([saved], [], [], 30)[0]  # it has begun to save
        select.select([], [], [], random.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(saved)
        os.close(saves)
        assert opens_with(file) != before
    vault.change_passphrase(file, opens_with(file), "the last one", cost=CHEAP)
    assert left_beside(file) == set()


def opens_with(file: Path) -> str:
    """The passphrase that opens the vault, whole, with its phrase in it; whichever save came last."""
    for number in range(1000):
        try:
            with vault.open_vault(file, f"passphrase {number}") as opened:
                assert opened.phrase == PHRASE
                return f"passphrase {number}"
        except WalletError as error:
            if error.code != "wrong_passphrase":
                raise
    pytest.fail("neither the old vault nor the new one")
