"""Accounts, export and the passphrase, by their commands."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from scripted_person import CHEAP, PASSPHRASE, Scripted, make_command, passphrase_file

from kvasir_console.errors import KvasirError
from kvasir_console.paths import Paths
from kvasir_console.wallet import accounts, formats, vault
from kvasir_console.wallet.command import carry_out
from kvasir_console.wallet.keys import Key

DATA = Path(__file__).parents[2] / "data" / "conformance"
CASE = json.loads((DATA / "wallet_derivation.json").read_text())["phrases"][0]
PHRASE, KEYS = CASE["mnemonic"], {key["path"]: key for key in CASE["keys"]}
KVASIR_PATH = "m/44'/501'/0'/0'"
FIRST = KEYS[KVASIR_PATH]
RAW = formats.RawKey(bytes.fromhex(KEYS[None]["seed32_hex"]), KEYS[None]["address"])
OTHER = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"
SECRETS = (PHRASE, "abandon", FIRST["secret_key_base58"], FIRST["seed32_hex"], PASSPHRASE)


@pytest.fixture
def paths() -> Paths:
    made = Paths.from_environment().ensure()
    vault.create_vault(made.vault_file, PHRASE, PASSPHRASE, cost=CHEAP)
    return made


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    monkeypatch.setattr(vault, "choose_cost", lambda *_: CHEAP)


def owner(**answers) -> Scripted:
    return Scripted(**({"Passphrase of the vault": PASSPHRASE} | answers))


def refusal(command) -> str:
    with pytest.raises(KvasirError) as caught:
        carry_out(command)
    assert not [secret for secret in SECRETS if secret in str(caught.value)]
    return caught.value.code


# Accounts


def test_the_address_is_told_without_a_passphrase(paths, capsys):
    carry_out(make_command(paths, None, "address"))
    carry_out(make_command(paths, None, "address", "--json"))
    plain, _, rest = capsys.readouterr().out.partition("\n")
    assert (plain, json.loads(rest)) == (FIRST["address"], {"address": FIRST["address"]})


def test_accounts_are_listed_for_people_and_programs(paths, capsys):
    for change in (
        lambda contents: accounts.add_key(contents, RAW),
        lambda contents: accounts.add_watched(contents, OTHER),
    ):
        vault.update(paths.vault_file, PASSPHRASE, change)
    carry_out(make_command(paths, None, "accounts"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [KVASIR_PATH, "key", "watch"]
    assert [line.startswith("*") for line in lines] == [True, False, False]
    carry_out(make_command(paths, None, "accounts", "--json"))
    listed = json.loads(capsys.readouterr().out)["accounts"]
    assert listed[0] == {"address": FIRST["address"], "kind": "phrase", "path": KVASIR_PATH}
    assert [each["kind"] for each in listed] == ["phrase", "key", "watch"]


def test_accounts_are_added_used_and_removed(paths, capsys):
    second = KEYS["m/44'/501'/1'/0'"]["address"]
    for words, printed in (
        (("accounts", "add"), second),
        (("accounts", "add", "none"), KEYS[None]["address"]),
        (("accounts", "watch", OTHER), OTHER),
        (("accounts", "use", "2"), second),
        (("accounts", "remove", OTHER), ""),
    ):
        assert carry_out(make_command(paths, owner(), *words)) == 0
        assert capsys.readouterr().out.strip() == printed
    assert [each.address for each in vault.public_accounts(paths.vault_file)] == [
        second,
        FIRST["address"],
        KEYS[None]["address"],
    ]


def test_a_raw_key_is_not_removed_unasked(paths, tmp_path):
    vault.update(paths.vault_file, PASSPHRASE, lambda contents: accounts.add_key(contents, RAW))
    command = ("accounts", "remove", RAW.address, "--passphrase-file", str(passphrase_file(tmp_path)))
    assert refusal(make_command(paths, None, *command)) == "no_terminal"
    assert refusal(make_command(paths, owner(The_key_of="n"), *command)) == "not_removed"
    assert len(vault.public_accounts(paths.vault_file)) == 2
    assert carry_out(make_command(paths, owner(The_key_of="y"), *command)) == 0
    assert len(vault.public_accounts(paths.vault_file)) == 1


def test_a_wrong_passphrase_changes_nothing(paths):
    before = paths.vault_file.read_bytes()
    for words in (("accounts", "add"), ("export", "phrase"), ("passphrase",), ("limit",), ("contacts", "list")):
        wrong = owner(Passphrase_of_the_vault="not this one")
        assert refusal(make_command(paths, wrong, *words)) == "wrong_passphrase"
        assert wrong.secrets == []
    assert paths.vault_file.read_bytes() == before


# Export


def test_the_words_are_shown_on_the_terminal_only(paths, capsys):
    asked = owner()
    assert carry_out(make_command(paths, asked, "export", "phrase")) == 0
    assert asked.secrets == [f"\n{PHRASE}\n"]
    out, err = capsys.readouterr()
    assert out == ""
    assert not [secret for secret in SECRETS if secret in err]


def test_without_a_terminal_a_secret_goes_to_a_new_private_file_or_nowhere(paths, tmp_path, capsys):
    given = ("--passphrase-file", str(passphrase_file(tmp_path)))
    assert refusal(make_command(paths, None, "export", "phrase", *given)) == "no_terminal"
    out = tmp_path / "words"
    assert carry_out(make_command(paths, None, "export", "phrase", *given, "--out", str(out))) == 0
    assert out.read_text() == PHRASE + "\n"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert refusal(make_command(paths, None, "export", "key", *given, "--out", str(out))) == "file_exists"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert refusal(make_command(paths, None, "export", "key", *given, "--out", str(link))) == "file_exists"
    assert not (tmp_path / "elsewhere").exists()
    assert not [secret for secret in SECRETS if secret in "".join(capsys.readouterr())]


@pytest.mark.parametrize("form", ["cli", "base58", "desktop"])
def test_a_key_is_written_as_other_wallets_read_it(paths, tmp_path, form):
    out = tmp_path / "key"
    asked = owner(Passphrase_of_the_exported="another passphrase", Again="another passphrase")
    assert carry_out(make_command(paths, asked, "export", "key", "--form", form, "--out", str(out))) == 0
    content = formats.read(out)
    secret = content.open("another passphrase") if isinstance(content, formats.Sealed) else content
    if form == "desktop":
        assert secret == formats.Phrase(PHRASE)  # as that wallet would have written it
    else:
        assert secret == formats.RawKey(bytes.fromhex(FIRST["seed32_hex"]), FIRST["address"])


def test_the_words_are_written_as_the_web_wallet_reads_them(paths, tmp_path):
    out, secret = tmp_path / "browser.json", passphrase_file(tmp_path)
    options = ("--form", "browser", "--out", str(out), "--file-passphrase-file", str(secret))
    assert carry_out(make_command(paths, owner(), "export", "phrase", *options)) == 0
    assert formats.read(out).open(PASSPHRASE) == formats.Phrase(PHRASE)


def test_another_account_is_exported_by_number_or_address(paths, tmp_path):
    vault.update(paths.vault_file, PASSPHRASE, lambda contents: accounts.add_key(contents, RAW))
    vault.update(paths.vault_file, PASSPHRASE, lambda contents: accounts.add_watched(contents, OTHER))
    for number, which in enumerate(("2", RAW.address)):
        out = tmp_path / str(number)
        assert carry_out(make_command(paths, owner(), "export", "key", "--account", which, "--out", str(out))) == 0
        assert formats.read(out) == RAW
    with Key(bytearray(RAW.seed)) as key:
        assert (tmp_path / "0").read_bytes().strip() == formats.write_cli(key)
    out = tmp_path / "watched"
    command = make_command(paths, owner(), "export", "key", "--account", "3", "--out", str(out))
    assert refusal(command) == "watch_only"
    assert not out.exists()


@pytest.mark.parametrize(
    ("what", "form"), [("phrase", "cli"), ("phrase", "desktop"), ("key", "words"), ("key", "browser")]
)
def test_forms_that_do_not_fit_are_refused_before_anything_is_opened(paths, what, form):
    asked = Scripted()
    assert refusal(make_command(paths, asked, "export", what, "--form", form)) == "form_unfit"
    assert asked.questions == []


# The passphrase


def test_a_passphrase_is_changed(paths):
    asked = owner(New_passphrase="a new passphrase", Again="a new passphrase")
    assert carry_out(make_command(paths, asked, "passphrase")) == 0
    with vault.open_vault(paths.vault_file, "a new passphrase") as opened:
        assert opened.phrase == PHRASE
    assert refusal(make_command(paths, owner(), "accounts", "add")) == "wrong_passphrase"


def test_a_new_passphrase_comes_from_a_file_too(paths, tmp_path):
    new = tmp_path / "new"
    new.write_text("a new passphrase\n")
    new.chmod(0o600)
    old = passphrase_file(tmp_path)
    words = ("passphrase", "--passphrase-file", str(old), "--new-passphrase-file", str(new))
    assert carry_out(make_command(paths, None, *words)) == 0
    vault.open_vault(paths.vault_file, "a new passphrase").wipe()
