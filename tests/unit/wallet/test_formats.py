"""Key files of other wallets: everything that should load does, and everything else is refused by its name."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.errors import KvasirError, WalletError
from kvasir_console.wallet import formats
from kvasir_console.wallet.keys import KVASIR_PATH, Key, derive
from kvasir_console.wallet.localnet import base58
from kvasir_console.wallet.phrase import seed

DATA = Path(__file__).parents[2] / "data" / "conformance" / "wallet_files"
INDEX = json.loads((DATA / "index.json").read_text())
CASES = INDEX["files"]
MNEMONIC = "abandon abandon abandon abandon abandon abandon abandon abandon abandon abandon abandon about"
PASSPHRASE = "correct horse battery"


def identity(case: dict) -> str:
    return "-".join(str(case[key]) for key in ("file", "passphrase", "mode") if case.get(key) is not None)


def opened(content: formats.Secret | formats.Sealed, passphrase: str | None) -> formats.Secret:
    if isinstance(content, formats.Sealed):
        assert passphrase is not None
        return content.open(passphrase)
    return content


def shown(secret: formats.Secret) -> dict[str, str]:
    """A secret in the words of the vectors."""
    if isinstance(secret, formats.Phrase):
        with Key(derive(seed(secret.words), KVASIR_PATH)) as key:
            return {"kind": "mnemonic", "mnemonic": secret.words, "address": key.address}
    with Key(bytearray(secret.seed)) as key:
        assert key.address == secret.address
        return {"kind": "raw", "secret_key_base58": formats.write_base58(key), "address": key.address}


def private_copy(case: dict, tmp_path: Path) -> Path:
    file = tmp_path / case["file"]
    shutil.copy(DATA / case["file"], file)
    file.chmod(int(case.get("mode", "0600"), 8))
    return file


@pytest.mark.parametrize("case", [each for each in CASES if each["expect"] == "loads"], ids=identity)
def test_files_of_other_wallets_give_what_they_hold(case, tmp_path):
    content = formats.read(private_copy(case, tmp_path))
    assert getattr(content, "kind", "cli") == case["kind"]
    assert shown(opened(content, case["passphrase"])) == case["result"]


@pytest.mark.parametrize("case", [each for each in CASES if each["expect"] == "refused"], ids=identity)
def test_other_files_are_refused_by_name(case, tmp_path, monkeypatch):
    allowed = [f"key_file_{refusal}" for refusal in case["refusal"].split("|")]
    if not {"wrong_passphrase_or_damaged", "bad_secret"} & set(case["refusal"].split("|")):
        monkeypatch.setattr(formats, "_derive", lambda *_: pytest.fail("derived"))
    with pytest.raises(WalletError) as caught:
        opened(formats.read(private_copy(case, tmp_path)), case["passphrase"])
    assert caught.value.code in allowed
    text = str(caught.value)
    assert "abandon" not in text
    assert not case["passphrase"] or case["passphrase"] not in text
    assert text.isprintable()


def test_every_vector_is_used():
    assert len(CASES) == 83
    assert {each["expect"] for each in CASES} == {"loads", "refused"}
    assert len(INDEX["pasted"]) == 11


@pytest.mark.parametrize("case", INDEX["pasted"], ids=lambda case: repr(case["text"][:24]))
def test_pasted_text(case):
    if case["expect"] == "loads":
        assert shown(formats.parse_text(case["text"])) == case["result"]
        return
    with pytest.raises(WalletError) as caught:
        formats.parse_text(case["text"])
    assert caught.value.code in [f"key_file_{refusal}" for refusal in case["refusal"].split("|")]
    assert not case["text"] or case["text"] not in str(caught.value)


def test_numbered_words_are_told_as_such():
    with pytest.raises(WalletError) as caught:
        formats.parse_text(" ".join(f"{place}. {word}" for place, word in enumerate(MNEMONIC.split(), 1)))
    assert caught.value.code == "phrase_length"


@pytest.mark.parametrize("case", [each for each in CASES if "kdf_parameters" in each.get("refusal", "")], ids=identity)
def test_absurd_costs_take_neither_memory_nor_time(case, tmp_path):
    """In a process that may have little more memory than Python itself."""
    script = (
        "import sys, pathlib\n"
        "from kvasir_console.errors import KvasirError\n"
        "from kvasir_console.wallet import formats\n"
        "try:\n    formats.read(pathlib.Path(sys.argv[1]))\n"
        "except KvasirError as error:\n    print(error.code)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(private_copy(case, tmp_path))],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)),
        check=True,
    )
    assert result.stdout.strip() in ("key_file_kdf_parameters", "key_file_malformed")


def test_an_encrypted_file_may_lie_open(tmp_path):
    file = private_copy({"file": "desktop_mnemonic.enc", "mode": "0644"}, tmp_path)
    assert isinstance(formats.read(file), formats.Sealed)


def test_no_secret_is_in_a_repr():
    sealed = formats.parse((DATA / "desktop_rawkey.enc").read_bytes())
    secret = opened(sealed, PASSPHRASE)
    assert isinstance(secret, formats.RawKey)
    assert secret.seed.hex() not in repr(secret)
    assert repr(secret.seed) not in repr(secret)
    assert "abandon" not in repr(formats.Phrase(MNEMONIC))


# What is written here is read by the other wallets' own rules, which the vectors above are.


def key_of(number: int = 7) -> Key:
    return Key(bytearray([number] * 32))


def test_a_written_key_file_is_solana_keygens(tmp_path):
    case = next(each for each in CASES if each["file"] == "cli_keypair.json")
    secret = formats.read(private_copy(case, tmp_path))
    assert isinstance(secret, formats.RawKey)
    with Key(bytearray(secret.seed)) as key:
        assert formats.write_cli(key) == (DATA / "cli_keypair.json").read_bytes()
        assert formats.write_base58(key) == case["result"]["secret_key_base58"]


@pytest.mark.parametrize("passphrase", [PASSPHRASE, "p\u00e4ssw\u00f6rd \u2014 \u043a\u043b\u044e\u0447"])
def test_written_envelopes_open_again_and_never_twice_the_same(passphrase):
    phrase = formats.Phrase(MNEMONIC)
    with key_of() as key:
        written = [
            (formats.write_desktop(phrase, passphrase), {"kvasir", "kdf", "N", "r", "p", "salt", "iv", "ct", "tag"}),
            (formats.write_desktop(key, passphrase), {"kvasir", "kdf", "N", "r", "p", "salt", "iv", "ct", "tag"}),
            (formats.write_browser(phrase, passphrase), {"v", "salt", "iv", "ct"}),
        ]
        assert formats.write_desktop(phrase, passphrase) != written[0][0]
        for data, fields in written:
            assert set(json.loads(data)) == fields
        assert opened(formats.parse(written[0][0]), passphrase) == phrase
        assert opened(formats.parse(written[1][0]), passphrase) == formats.RawKey(bytes([7] * 32), key.address)
        assert opened(formats.parse(written[2][0]), passphrase) == phrase


def test_a_written_desktop_file_has_the_published_costs():
    document = json.loads(formats.write_desktop(formats.Phrase(MNEMONIC), PASSPHRASE))
    reference = json.loads((DATA / "desktop_mnemonic.enc").read_bytes())
    assert {name: document[name] for name in ("kvasir", "kdf", "N", "r", "p")} == {
        name: reference[name] for name in ("kvasir", "kdf", "N", "r", "p")
    }


def parsed(data: bytes) -> formats.Secret | formats.Sealed | str:
    """What was read, or the code of the refusal."""
    try:
        return formats.parse(data)
    except KvasirError as error:
        return error.code


@settings(max_examples=200, deadline=None)
@given(
    source=st.sampled_from(["desktop_mnemonic.enc", "browser_mnemonic.json", "cli_keypair.json"]),
    data=st.data(),
)
def test_damage_is_refused_by_name(source, data):
    whole = (DATA / source).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :]
    else:
        damaged = whole[:place]
    content = parsed(damaged)
    if isinstance(content, str):
        assert content.startswith("key_file_")
    elif not isinstance(content, formats.Sealed):  # which is authenticated when it is opened
        assert content == formats.parse(whole)


@given(st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode(errors="surrogatepass")))
def test_no_bytes_break_the_reader(data):
    content = parsed(data)
    assert not isinstance(content, str) or content.startswith(("key_file_", "phrase_"))


def test_base58_of_the_key_is_the_alphabet_of_bitcoin():
    with key_of() as key:
        assert base58.decode(formats.write_base58(key)) == bytes([7] * 32) + bytes(key.keypair().pubkey())
