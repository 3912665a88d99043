"""``wallet sign-in``: a text of the specification, signed for the configured host, that a verifier believes."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta

import pytest
from scripted_person import CHEAP, PASSPHRASE, Scripted, make_command, passphrase_file

from kvasir_console.errors import KvasirError
from kvasir_console.paths import Paths
from kvasir_console.wallet import vault
from kvasir_console.wallet.command import carry_out
from kvasir_console.wallet.signin import Expected, verify_sign_in

ADDRESS = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"


@pytest.fixture
def paths() -> Paths:
    made = Paths.from_environment().ensure()
    vault.create_vault(made.vault_file, "abandon " * 11 + "about", PASSPHRASE, cost=CHEAP)
    return made


def refusal(command) -> str:
    with pytest.raises(KvasirError) as caught:
        carry_out(command)
    return caught.value.code


def test_a_verifier_believes_what_was_signed(paths, capsys):
    asked = Scripted(**{"Sign it": "y", "Passphrase": PASSPHRASE})
    words = ("sign-in", "--nonce", "5813ef31351cd608", "--statement", "Sign in.", "--chain", "devnet", "--json")
    assert carry_out(make_command(paths, asked, *words)) == 0
    out, err = capsys.readouterr()
    signed = json.loads(out)
    now = datetime.now(UTC)
    expected = Expected("gate.example.net", ADDRESS, now, "https://gate.example.net", "devnet", "5813ef31351cd608")
    message = verify_sign_in(signed["message"], base64.b64decode(signed["signature"]), expected)
    assert datetime.fromisoformat(message.expiration_time) - now <= timedelta(minutes=5)
    assert all(text in err for text in ("gate.example.net", ADDRESS, "Sign in."))


def test_nothing_is_signed_unasked(paths, tmp_path):
    given = ("--passphrase-file", str(passphrase_file(tmp_path)))
    assert refusal(make_command(paths, None, "sign-in", *given)) == "no_terminal"
    assert refusal(make_command(paths, Scripted(**{"Sign it": "n"}), "sign-in", *given)) == "not_signed"
    assert carry_out(make_command(paths, None, "sign-in", "--yes", *given)) == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--uri", "https://evil.example/"), "sign_in_refused"),
        (("--nonce", "short"), "sign_in_malformed"),
        (("--statement", "two\nlines"), "sign_in_malformed"),
    ],
)
def test_other_texts_are_refused(paths, tmp_path, words, code):
    given = ("--passphrase-file", str(passphrase_file(tmp_path)), "--yes")
    assert refusal(make_command(paths, None, "sign-in", *words, *given)) == code
