"""How a wallet comes into the vault: created, or imported from everywhere, with every address shown first."""

from __future__ import annotations

import io
import json
import shutil
import stat
from pathlib import Path

import pytest
from scripted_person import CHEAP, PASSPHRASE, Scripted, make_command, passphrase_file

from kvasir_console.errors import KvasirError, NetworkError
from kvasir_console.paths import Paths
from kvasir_console.wallet import command_create, vault
from kvasir_console.wallet.command import carry_out
from kvasir_console.wallet.vault_format import AccountKind

DATA = Path(__file__).parents[2] / "data" / "conformance"
CASE = json.loads((DATA / "wallet_derivation.json").read_text())["phrases"][0]
FILES = json.loads((DATA / "wallet_files" / "index.json").read_text())["files"]
PHRASE, KEYS = CASE["mnemonic"], {key["path"]: key for key in CASE["keys"]}
KVASIR_PATH = "m/44'/501'/0'/0'"
OTHER = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"


@pytest.fixture
def paths() -> Paths:
    return Paths.from_environment().ensure()


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    monkeypatch.setattr(vault, "choose_cost", lambda *_: CHEAP)


def refusal(command) -> str:
    with pytest.raises(KvasirError) as caught:
        carry_out(command)
    assert PASSPHRASE not in str(caught.value)
    assert "abandon" not in str(caught.value)
    return caught.value.code


def person(**answers) -> Scripted:
    return Scripted(**({"New passphrase": PASSPHRASE, "Again": PASSPHRASE} | answers))


def shown_words(asked: Scripted) -> list[str]:
    """The words out of the numbered table on the screen."""
    text = asked.secrets[-1].split("only way back:")[1]
    pairs = text.split()
    numbered = dict(zip((int(each.rstrip(".")) for each in pairs[::2]), pairs[1::2], strict=True))
    return [numbered[place] for place in sorted(numbered)]


def right_word(asked: Scripted) -> str:
    return shown_words(asked)[asked.asked_for_word - 1]


# Creating


@pytest.mark.parametrize("words", ["12", "24"])
def test_a_new_wallets_words_are_shown_once_and_typed_back_in_part(paths, capsys, words):
    asked = person(Word=right_word)
    assert carry_out(make_command(paths, asked, "create", "--words", words)) == 0
    (account,) = vault.public_accounts(paths.vault_file)
    out, err = capsys.readouterr()
    assert out == f"{account.address}\n"
    assert len(shown_words(asked)) == int(words)
    with vault.open_vault(paths.vault_file, PASSPHRASE) as opened:
        assert opened.phrase == " ".join(shown_words(asked))
    questions = [question for question in asked.questions if question.startswith("Word ")]
    assert len(set(questions)) == 3
    assert not any(word in (out + err).split() for word in shown_words(asked))
    assert asked.echoed == []  # the words are typed without an echo


def test_words_in_capitals_are_right_too(paths):
    asked = person(Word=lambda asked: f" {right_word(asked).upper()} ")
    assert carry_out(make_command(paths, asked, "create", "--words", "12")) == 0


def test_a_wrong_word_shows_them_again_and_three_times_ends_it(paths):
    asked = person(Word=["wrong", right_word, right_word, right_word])
    assert carry_out(make_command(paths, asked, "create")) == 0
    assert len(asked.secrets) == 2
    paths.vault_file.unlink()
    asked = person(Word="wrong")
    assert refusal(make_command(paths, asked, "create")) == "phrase_not_kept"
    assert not paths.vault_file.exists()


def test_without_a_terminal_the_words_need_a_private_file(paths, tmp_path):
    secret = passphrase_file(tmp_path)
    base = ("create", "--passphrase-file", str(secret))
    assert refusal(make_command(paths, None, *base)) == "no_terminal"
    words = tmp_path / "words"
    assert carry_out(make_command(paths, None, *base, "--phrase-file", str(words))) == 0
    assert stat.S_IMODE(words.stat().st_mode) == 0o600
    with vault.open_vault(paths.vault_file, PASSPHRASE) as opened:
        assert opened.phrase == words.read_text().strip()
    again = make_command(paths, None, *base, "--force", "--phrase-file", str(words))
    assert refusal(again) == "file_exists"  # a file with words in it is not overwritten


def test_an_existing_wallet_is_said_before_anything_is_asked(paths):
    carry_out(make_command(paths, person(Word=right_word), "create"))
    asked = Scripted()
    assert refusal(make_command(paths, asked, "create")) == "vault_exists"
    assert refusal(make_command(paths, asked, "import")) == "vault_exists"
    assert asked.questions == []


def test_two_different_passphrases_make_no_wallet(paths):
    assert refusal(make_command(paths, person(Again="another one"), "create")) == "passphrase_differs"
    assert refusal(make_command(paths, person(New_passphrase=""), "create")) == "no_passphrase"
    assert not paths.vault_file.exists()


# Importing


def typed(monkeypatch, text: str) -> None:
    """Standard input of a program without a terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text + "\n"))


def test_every_paths_address_is_shown_before_one_is_kept(paths, monkeypatch, capsys):
    typed(monkeypatch, PHRASE)
    asked = person(Which="3")

    def nothing_yet(*_: object) -> str:
        assert not paths.vault_file.exists()
        shown = capsys.readouterr().err
        assert all(key["address"] in shown for key in CASE["keys"])
        assert all(str(key["path"] or "none") in shown for key in CASE["keys"])
        return "3"

    asked.answers["which"] = nothing_yet
    assert carry_out(make_command(paths, asked, "import", "--offline")) == 0
    third = KEYS["m/44'/501'/1'/0'"]["address"]
    assert capsys.readouterr().out == f"{third}\n"
    assert vault.public_accounts(paths.vault_file)[0].address == third


@pytest.mark.parametrize("answer", ["0", "9", "x", "-1"])
def test_a_number_that_is_not_offered_keeps_nothing(paths, monkeypatch, answer):
    typed(monkeypatch, PHRASE)
    assert refusal(make_command(paths, person(Which=answer), "import", "--offline")) == "no_such_account"
    assert not paths.vault_file.exists()


def test_balances_stand_beside_the_addresses_when_the_chain_answers(paths, monkeypatch, capsys):
    typed(monkeypatch, PHRASE)

    async def rich(addresses):
        return [(1_500_000, 2 * 10**9) if address == KEYS[None]["address"] else (0, 0) for address in addresses]

    assert command_create.import_(make_command(paths, person(Which=""), "import"), rich) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if KEYS[None]["address"] in line]
    assert line.endswith("1.500000 KVR, 2.000000000 SOL")


def test_without_the_chain_an_import_goes_on(paths, monkeypatch, capsys):
    typed(monkeypatch, PHRASE)

    async def nobody(_addresses):
        raise NetworkError("rpc_unreachable", "The Solana RPC did not answer.")

    assert command_create.import_(make_command(paths, person(Which=""), "import"), nobody) == 0
    assert "balances are not known" in capsys.readouterr().err
    assert vault.public_accounts(paths.vault_file)[0].address == KEYS[KVASIR_PATH]["address"]


@pytest.mark.parametrize("case", [each for each in FILES if each["expect"] == "loads"], ids=lambda case: case["file"])
def test_key_files_of_other_wallets_come_in(paths, tmp_path, case, capsys):
    file = tmp_path / case["file"]
    shutil.copy(DATA / "wallet_files" / case["file"], file)
    file.chmod(0o600)
    asked = person(Which="", Passphrase_of=case["passphrase"] or "")
    assert carry_out(make_command(paths, asked, "import", "--offline", str(file))) == 0
    assert capsys.readouterr().out == f"{case['result']['address']}\n"
    with vault.open_vault(paths.vault_file, PASSPHRASE) as opened, opened.key() as key:
        assert key.address == case["result"]["address"]


def test_an_encrypted_file_is_opened_by_a_file_too(paths, tmp_path):
    secret = passphrase_file(tmp_path)
    words = ("import", "--offline", str(DATA / "wallet_files" / "desktop_mnemonic.enc"))
    assert refusal(make_command(paths, None, *words)) == "no_passphrase"
    options = ("--passphrase-file", str(secret), "--file-passphrase-file", str(secret))
    assert carry_out(make_command(paths, None, *words, *options)) == 0


def test_a_file_that_is_refused_leaves_no_wallet(paths, tmp_path):
    file = tmp_path / "id.json"
    shutil.copy(DATA / "wallet_files" / "cli_keypair.json", file)
    file.chmod(0o644)
    assert refusal(make_command(paths, person(), "import", "--offline", str(file))) == "key_file_permissions"
    damaged = DATA / "wallet_files" / "desktop_ct_bit_flip.enc"
    asked = person(Passphrase_of=PASSPHRASE)
    code = refusal(make_command(paths, asked, "import", "--offline", str(damaged)))
    assert code == "key_file_wrong_passphrase_or_damaged"
    assert not paths.vault_file.exists()


def test_an_address_is_watched_without_a_key(paths, capsys):
    assert carry_out(make_command(paths, person(), "import", "--watch", OTHER)) == 0
    assert capsys.readouterr().out == f"{OTHER}\n"
    assert vault.public_accounts(paths.vault_file)[0].kind is AccountKind.WATCH
    assert refusal(make_command(paths, person(), "import", "--force", "--watch", OTHER + "1")) == "address"


def test_more_comes_into_the_wallet_that_is_there(paths, monkeypatch, tmp_path):
    carry_out(make_command(paths, person(), "import", "--watch", OTHER))
    file = tmp_path / "id.json"
    shutil.copy(DATA / "wallet_files" / "cli_keypair.json", file)
    file.chmod(0o600)
    opens = person(Passphrase_of_the_vault=PASSPHRASE, Which="")
    assert carry_out(make_command(paths, opens, "import", "--offline", "--add", str(file))) == 0
    typed(monkeypatch, PHRASE)
    code = refusal(make_command(paths, opens, "import", "--offline", "--add"))
    assert code == "account_exists"  # the file held the first account of these words
    typed(monkeypatch, PHRASE)
    assert carry_out(make_command(paths, opens, "import", "--offline", "--add", "--path", "none")) == 0
    listed = vault.public_accounts(paths.vault_file)
    assert [str(each.kind) for each in listed] == ["watch", "key", "phrase"]


def test_a_raw_key_has_no_path(paths, monkeypatch):
    typed(monkeypatch, KEYS[KVASIR_PATH]["secret_key_base58"])
    assert refusal(make_command(paths, person(), "import", "--offline", "--path", "none")) == "path_without_phrase"
    typed(monkeypatch, KEYS[KVASIR_PATH]["secret_key_base58"])
    assert carry_out(make_command(paths, person(), "import", "--offline")) == 0


@pytest.mark.parametrize("text", ["", " ", PHRASE.rsplit(" ", 1)[0], OTHER, "[1, 2]"])
def test_what_is_no_secret_is_refused_before_a_passphrase_is_asked_for(paths, monkeypatch, text):
    typed(monkeypatch, text)
    asked = Scripted()
    assert refusal(make_command(paths, asked, "import", "--offline"))
    assert asked.questions == []
    assert not paths.vault_file.exists()
