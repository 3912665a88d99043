"""Second factor, limits, address book and key ring, by their commands: what stands before money and secrets."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from scripted_person import CHEAP, PASSPHRASE, Scripted, make_command, passphrase_file

from kvasir_console.errors import KvasirError
from kvasir_console.paths import Paths
from kvasir_console.wallet import command_guard, passphrase_cache, twofactor, vault
from kvasir_console.wallet.command import carry_out

DATA = Path(__file__).parents[2] / "data" / "conformance"
CASE = json.loads((DATA / "wallet_derivation.json").read_text())["phrases"][0]
PHRASE, ADDRESS = CASE["mnemonic"], "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
OTHER = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"


class Phone:
    """An authenticator that was given a secret: shows its code at a moment of the test's own."""

    def __init__(self) -> None:
        self.secret = b""
        self.now_s = 1_790_000_000.0

    def __call__(self, asked: Scripted | None = None) -> str:
        """The code; learns the secret from the screen that shows it."""
        if asked is not None and asked.secrets and "otpauth://" in asked.secrets[-1]:
            self.secret = twofactor.decode_secret(re.search("secret=([A-Z2-7]+)", asked.secrets[-1])[1])
        return twofactor.hotp(self.secret, int(self.now_s) // 30)

    def next(self, asked: Scripted | None = None) -> str:
        self.now_s += 30
        return self(asked)


@pytest.fixture
def phone(monkeypatch) -> Phone:
    made = Phone()
    monkeypatch.setattr(time, "time", lambda: made.now_s)
    monkeypatch.setattr(twofactor.SecondFactor.__init__, "__defaults__", (lambda: made.now_s,))
    return made


@pytest.fixture
def paths() -> Paths:
    made = Paths.from_environment().ensure()
    vault.create_vault(made.vault_file, PHRASE, PASSPHRASE, cost=CHEAP)
    return made


def owner(**answers) -> Scripted:
    return Scripted(**({"Passphrase of the vault": PASSPHRASE} | answers))


def refusal(command) -> str:
    with pytest.raises(KvasirError) as caught:
        carry_out(command)
    return caught.value.code


def enrolled(paths: Paths, phone: Phone) -> list[str]:
    """Enrol; the back-up codes that were shown."""
    asked = owner(The_code_it_shows=phone)
    assert carry_out(make_command(paths, asked, "2fa", "enrol")) == 0
    return re.findall(r"(?:[A-Z2-7]{4}-){3}[A-Z2-7]{4}", asked.secrets[-1])


def status(paths: Paths, capsys) -> dict:
    capsys.readouterr()
    carry_out(make_command(paths, None, "2fa", "status", "--json"))
    return json.loads(capsys.readouterr().out)


# Enrolling


def test_a_second_factor_is_enrolled_with_a_code_of_it(paths, phone, capsys):
    assert status(paths, capsys) == {"enrolled": False, "backup_codes_left": 0}
    asked = owner(The_code_it_shows=phone)
    assert carry_out(make_command(paths, asked, "2fa", "enrol")) == 0
    assert status(paths, capsys) == {"enrolled": True, "backup_codes_left": 10}
    with vault.open_vault(paths.vault_file, PASSPHRASE) as opened:
        assert opened.second_factor == phone.secret
    grouped = " ".join(re.findall("....", twofactor.encode_secret(phone.secret)))
    assert grouped in asked.secrets[0]
    assert f"otpauth://totp/kvasir-console%3A{ADDRESS[:8]}?" in asked.secrets[0]
    assert asked.shown == []


@pytest.mark.parametrize(
    ("screen", "shown"), [((80, 24), ["qr", "text"]), ((80, 40), ["both"]), ((44, 40), ["text"]), ((80, 23), ["text"])]
)
def test_the_secret_is_shown_to_be_scanned_where_there_is_room(paths, phone, screen, shown):
    asked = owner(The_code_it_shows=phone)
    asked.screen = screen
    assert carry_out(make_command(paths, asked, "2fa", "enrol")) == 0
    kinds = []
    for text in asked.secrets[:-1]:  # the last are the back-up codes
        scanned, typed = "\u2580" in text, "otpauth://" in text
        kinds.append("both" if scanned and typed else "qr" if scanned else "text")
        assert len(text.splitlines()) < screen[1] or kinds == ["text"]
    assert kinds == shown


def test_a_wrong_code_enrols_nothing(paths, phone, capsys):
    before = paths.vault_file.read_bytes()
    asked = owner(The_code_it_shows="000000")
    assert refusal(make_command(paths, asked, "2fa", "enrol")) == "second_factor_refused"
    assert paths.vault_file.read_bytes() == before
    assert status(paths, capsys)["enrolled"] is False


def test_enrolling_needs_a_terminal(paths, tmp_path):
    given = ("--passphrase-file", str(passphrase_file(tmp_path)))
    assert refusal(make_command(paths, None, "2fa", "enrol", *given)) == "no_terminal"


def test_an_enrolled_secret_is_replaced_against_a_code_of_the_old_one_only(paths, phone):
    enrolled(paths, phone)
    old = phone.secret
    for answer in ("", "000000"):
        asked = owner(One_time_code=answer, The_code_it_shows=phone)
        asked.answers["one-time code"] = answer
        assert refusal(make_command(paths, asked, "2fa", "enrol")).startswith("second_factor_")
        assert asked.secrets == []
    asked = owner(The_code_it_shows=phone)
    asked.answers["one-time code"] = phone.next
    assert carry_out(make_command(paths, asked, "2fa", "enrol")) == 0
    assert phone.secret != old


# What needs it


@pytest.mark.parametrize(
    "words",
    [
        ("export", "phrase"),
        ("export", "key"),
        ("accounts", "remove", "2"),
        ("2fa", "codes"),
        ("2fa", "disable"),
        ("limit", "--kvr", "5"),
        ("contacts", "add", "the shop", OTHER),
    ],
    ids=" ".join,
)
def test_without_a_code_nothing_of_weight_is_done(paths, phone, words):
    enrolled(paths, phone)
    vault.update(paths.vault_file, PASSPHRASE, lambda contents: _watching(contents))
    before = paths.vault_file.read_bytes()
    asked = owner()
    asked.answers["one-time code"] = ""
    assert refusal(make_command(paths, asked, *words)) == "second_factor_needed"
    asked.answers["one-time code"] = "000000"
    assert refusal(make_command(paths, asked, *words)) == "second_factor_refused"
    assert asked.secrets == []
    assert paths.vault_file.read_bytes() == before
    asked.answers["one-time code"] = phone.next
    assert carry_out(make_command(paths, asked, *words)) == 0


def _watching(contents):
    from kvasir_console.wallet import accounts

    return accounts.add_watched(contents, OTHER)


def test_a_code_works_once_across_commands(paths, phone):
    enrolled(paths, phone)
    code = phone.next()
    assert carry_out(make_command(paths, owner(), "export", "phrase", "--code", code)) == 0
    assert refusal(make_command(paths, owner(), "export", "phrase", "--code", code)) == "second_factor_refused"


def test_backup_codes_work_once_and_run_low(paths, phone, capsys):
    codes = enrolled(paths, phone)
    assert len(codes) == 10
    for code in codes[:7]:
        assert carry_out(make_command(paths, owner(), "export", "phrase", "--code", f" {code.lower()} ")) == 0
    assert refusal(make_command(paths, owner(), "export", "phrase", "--code", codes[0])) == "second_factor_refused"
    capsys.readouterr()
    carry_out(make_command(paths, None, "2fa", "status"))
    assert "3 back-up codes" in capsys.readouterr().out
    asked = owner()
    asked.answers["one-time code"] = phone.next
    assert carry_out(make_command(paths, asked, "2fa", "codes")) == 0
    assert refusal(make_command(paths, owner(), "export", "phrase", "--code", codes[9])) == "second_factor_refused"
    assert status(paths, capsys)["backup_codes_left"] == 10


def test_five_failures_pause_the_next_command(paths, phone):
    enrolled(paths, phone)
    for _ in range(5):
        assert refusal(make_command(paths, owner(), "export", "phrase", "--code", "000000")) == "second_factor_refused"
    code = phone.next()
    phone.now_s -= 29
    assert refusal(make_command(paths, owner(), "export", "phrase", "--code", code)) == "second_factor_paused"
    phone.now_s += 31
    assert carry_out(make_command(paths, owner(), "export", "phrase", "--code", phone())) == 0


def test_taking_the_flag_out_of_the_file_does_not_help(paths, phone):
    enrolled(paths, phone)
    document = json.loads(paths.vault_file.read_text())
    document["second_factor"] = False
    paths.vault_file.write_text(json.dumps(document))
    assert refusal(make_command(paths, owner(), "export", "phrase")) == "wrong_passphrase"


def test_a_lost_state_releases_nothing(paths, phone):
    enrolled(paths, phone)
    twofactor.state_file(paths.vault_file).unlink()
    command = make_command(paths, owner(), "export", "phrase", "--code", phone.next())
    assert refusal(command) == "second_factor_state"


def test_disabled_nothing_is_asked(paths, phone, capsys):
    enrolled(paths, phone)
    assert carry_out(make_command(paths, owner(), "2fa", "disable", "--code", phone.next())) == 0
    assert status(paths, capsys) == {"enrolled": False, "backup_codes_left": 0}
    assert not twofactor.state_file(paths.vault_file).exists()
    assert carry_out(make_command(paths, owner(), "export", "phrase")) == 0
    assert refusal(make_command(paths, owner(), "2fa", "codes")) == "second_factor_none"


# Limits and the address book


def test_limits_are_set_shown_and_lifted(paths, capsys):
    for words, kvr, sol in (
        ((), None, None),
        (("--kvr", "12.5"), 12_500_000, None),
        (("--sol", "0.1"), 12_500_000, 100_000_000),
        ((), 12_500_000, 100_000_000),
        (("--kvr", "none"), None, 100_000_000),
        (("--sol", "0"), None, 0),
    ):
        assert carry_out(make_command(paths, owner(), "limit", *words, "--json")) == 0
        assert json.loads(capsys.readouterr().out) == {"micro_kvr": kvr, "lamports": sol}
    carry_out(make_command(paths, owner(), "limit"))
    assert capsys.readouterr().out == "KVR: no limit\nSOL: at most 0.000000000 SOL a day\n"


@pytest.mark.parametrize("text", ["1.0000001", "-1", "1e3", "1,5", "", "lots", "18446744073710"])
def test_a_limit_that_is_no_amount_is_refused(paths, text):
    assert refusal(make_command(paths, owner(), "limit", f"--kvr={text}")).startswith("amount_")


def test_the_address_book_is_kept(paths, capsys):
    for words, names in (
        (("list",), []),
        (("add", "the shop", OTHER), ["the shop"]),
        (("add", "me", ADDRESS), ["me", "the shop"]),
        (("remove", "the shop"), ["me"]),
        (("list",), ["me"]),
    ):
        assert carry_out(make_command(paths, owner(), "contacts", *words, "--json")) == 0
        assert sorted(json.loads(capsys.readouterr().out)["contacts"]) == names


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("add", "x", OTHER + "1"), "address"),
        (("add", "", OTHER), "contact_name"),
        (("add", " x", OTHER), "contact_name"),
        (("add", "x\x1b[2J", OTHER), "contact_name"),
        (("add", "x" * 32, OTHER), "contact_name"),  # as long as the shortest address
        (("remove", "nobody"), "no_such_contact"),
    ],
)
def test_other_entries_of_the_address_book_are_refused(paths, words, code):
    assert refusal(make_command(paths, owner(), "contacts", *words)) == code


def test_the_address_book_has_an_end(paths, monkeypatch):
    monkeypatch.setattr(command_guard, "MAX_CONTACTS", 1)
    carry_out(make_command(paths, owner(), "contacts", "add", "one", OTHER))
    assert refusal(make_command(paths, owner(), "contacts", "add", "two", OTHER)) == "too_many_contacts"


# The key ring


def test_a_right_passphrase_is_kept_in_the_key_ring_and_used_when_that_is_wanted(paths, monkeypatch):
    kept: dict[str, str] = {}
    monkeypatch.setattr(passphrase_cache, "remember", kept.__setitem__)
    monkeypatch.setattr(passphrase_cache, "recall", kept.get)
    monkeypatch.setattr(passphrase_cache, "forget", lambda wallet: kept.pop(wallet, None))
    wrong = owner(Passphrase_of_the_vault="not this one")
    assert refusal(make_command(paths, wrong, "keyring", "keep")) == "wrong_passphrase"
    assert kept == {}
    carry_out(make_command(paths, owner(), "keyring", "keep"))
    assert kept == {ADDRESS: PASSPHRASE}

    from kvasir_console.config import WalletConfig

    settings = WalletConfig(kdf="interactive", keyring=True)
    nobody = Scripted()
    assert carry_out(make_command(paths, nobody, "export", "phrase", wallet=settings)) == 0
    assert nobody.secrets
    assert refusal(make_command(paths, None, "export", "key", "--out", "x")) == "no_passphrase"  # not opted in
    carry_out(make_command(paths, None, "keyring", "forget"))
    assert kept == {}
