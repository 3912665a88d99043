"""Sign-In-With-Solana against the published grammar and rules, to the byte, from both sides."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import WalletError
from kvasir_console.wallet import signin
from kvasir_console.wallet.keys import Key, verify
from kvasir_console.wallet.signin import Expected, SignIn

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "signed_messages.json").read_text())[
    "sign_in_with_solana"
]
MAXIMAL = next(case for case in VECTORS["messages"] if case["name"] == "maximal")
ADDRESS = MAXIMAL["fields"]["address"]
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def message_of(case: dict) -> SignIn:
    values = {snake(name): tuple(value) if isinstance(value, list) else value for name, value in case["fields"].items()}
    return SignIn(**values)


def expected_of(case: dict) -> Expected:
    wanted = case["expected"]
    return Expected(
        wanted["domain"],
        wanted["address"],
        datetime.fromisoformat(wanted["now"]),
        wanted["uri_origin"],
        wanted["chainId"],
        tolerance=timedelta(seconds=wanted["issued_at_tolerance_s"]),
    )


def named(case: dict) -> str:
    return case["name"]


@pytest.mark.parametrize("case", VECTORS["messages"], ids=named)
def test_fields_and_text_are_the_same_thing(case):
    message = message_of(case)
    assert message.text() == case["text"]
    assert message.text().encode().hex() == case["utf8_hex"]
    assert signin.parse(case["text"]) == message
    assert verify(message.address, message.text().encode(), base64.b64decode(case["signature_base64"]))


@pytest.mark.parametrize("case", VECTORS["unparsable"], ids=named)
def test_texts_outside_the_grammar_are_refused(case):
    with pytest.raises(WalletError) as caught:
        signin.parse(case["text"])
    assert caught.value.code == "sign_in_malformed"


@pytest.mark.parametrize("case", VECTORS["rules"], ids=named)
def test_rules(case):
    message, expected = signin.parse(case["text"]), expected_of(case)
    wrong = signin.errors(message, expected)
    if case["result"] == "accepted":
        assert wrong == ()
        signin.check(message, expected)
        return
    assert set(wrong) <= set(case["errors_any"])
    assert wrong
    with pytest.raises(WalletError) as caught:
        signin.check(message, expected)
    assert all(name in caught.value.message for name in wrong)


def test_every_vector_is_used():
    assert [len(VECTORS[name]) for name in ("messages", "unparsable", "rules")] == [10, 19, 14]


@pytest.mark.parametrize("missing", ["chain_id", "nonce", "issued_at", "expiration_time"])
def test_what_the_grammar_leaves_out_the_rules_want(missing):
    message = replace(signin.parse(MAXIMAL["text"]), **{missing: None})
    assert signin.errors(message, Expected("console.example.org", ADDRESS, NOW)) == (missing,)


def test_a_nonce_of_somebody_else_is_refused():
    message = signin.parse(MAXIMAL["text"])
    assert signin.errors(message, Expected(message.domain, ADDRESS, NOW, nonce=message.nonce)) == ()
    assert signin.errors(message, Expected(message.domain, ADDRESS, NOW, nonce="anothernonce")) == ("nonce",)


def test_chains_and_origins_have_several_spellings():
    message = replace(signin.parse(MAXIMAL["text"]), chain_id="solana:devnet", uri="https://Console.Example.org:443/x")
    assert (
        signin.errors(message, Expected("Console.Example.Org", ADDRESS, NOW, "https://console.example.org", "devnet"))
        == ()
    )


@pytest.mark.parametrize(
    "origin", ["http://console.example.org", "https://console.example.org:8443", "https://example.org", "console"]
)
def test_another_origin_is_refused(origin):
    message = signin.parse(MAXIMAL["text"])
    assert signin.errors(message, Expected("console.example.org", ADDRESS, NOW, origin)) == ("uri",)


def test_a_server_believes_a_text_only_with_its_signature():
    text, expected = MAXIMAL["text"], Expected("console.example.org", ADDRESS, NOW, nonce="5813ef31351cd608")
    signature = base64.b64decode(MAXIMAL["signature_base64"])
    assert signin.verify_sign_in(text, signature, expected) == message_of(MAXIMAL)
    for wrong in (bytes(64), signature[:-1], signature[:5] + bytes([signature[5] ^ 1]) + signature[6:]):
        with pytest.raises(WalletError) as caught:
            signin.verify_sign_in(text, wrong, expected)
        assert caught.value.code == "signature_refused"
    with Key(bytearray([9] * 32)) as other, pytest.raises(WalletError) as caught:
        signin.verify_sign_in(text, other.sign(text.encode()), expected)
    assert caught.value.code == "signature_refused"


@pytest.mark.parametrize(
    "change",
    [
        {"domain": ""},
        {"domain": "a b"},
        {"domain": "evil.example\nconsole.example.org"},
        {"address": ADDRESS + "1"},
        {"statement": ""},
        {"statement": "two\nlines"},
        {"statement": "URI: https://evil.example/"},
        {"statement": "Resources:"},
        {"statement": "caf\u00e9"},
        {"uri": "no-scheme"},
        {"uri": "https://x/ y"},
        {"version": "2"},
        {"chain_id": "betanet"},
        {"nonce": "short"},
        {"issued_at": "2026-13-29T12:00:00Z"},
        {"issued_at": "2026-11-29 12:00:00Z"},
        {"issued_at": "2026-11-29T12:00:00"},
        {"request_id": "a b"},
        {"resources": ("https://x/\n- https://y/",)},
        {"resources": ("",)},
        {"statement": "a" * 16_384},
    ],
    ids=str,
)
def test_fields_that_could_write_another_line_are_not_put_into_a_text(change):
    with pytest.raises(WalletError) as caught:
        replace(signin.parse(MAXIMAL["text"]), **change).text()
    assert caught.value.code == "sign_in_malformed"


URIS = st.from_regex(r"\Ahttps://[a-z]{1,8}\.example(/[a-z0-9%]{0,3})?\Z").filter(lambda uri: "%" not in uri)
INSTANTS = st.datetimes(datetime(2000, 1, 1), datetime(2099, 1, 1)).map(lambda at: at.isoformat() + "Z")
MESSAGES = st.builds(
    SignIn,
    domain=st.from_regex(r"\A[a-z]{1,9}(\.[a-z]{2,5}){0,2}(:[0-9]{1,5})?\Z"),
    address=st.just(ADDRESS),
    statement=st.none() | st.from_regex(r"\A[A-Za-z0-9 .,:'?!-]{1,40}\Z"),
    uri=st.none() | URIS,
    version=st.none() | st.just("1"),
    chain_id=st.none() | st.sampled_from(signin.CHAINS),
    nonce=st.none() | st.from_regex(r"\A[A-Za-z0-9]{8,20}\Z"),
    issued_at=st.none() | INSTANTS,
    expiration_time=st.none() | INSTANTS,
    not_before=st.none() | INSTANTS,
    request_id=st.none() | st.from_regex(r"\A[A-Za-z0-9._~-]{0,12}\Z"),
    resources=st.none() | st.lists(URIS, max_size=3).map(tuple),
)


@given(MESSAGES)
def test_every_message_is_read_back_from_its_text(message):
    assert signin.parse(message.text()) == message


@given(MESSAGES, st.data())
def test_a_changed_text_is_another_message_or_none(message, data):
    text = message.text()
    place = data.draw(st.integers(0, len(text)))
    changed = text[:place] + data.draw(st.sampled_from(["\n", " ", "x", "\r", "\u200b", "- ", "URI: "])) + text[place:]
    assert read(changed) != message


@given(st.text(max_size=200))
def test_no_text_breaks_the_parser(text):
    assert read(text) is None
    assert read(f"a.example wants you to sign in with your Solana account:\n{ADDRESS}\n{text}") is None or text


def read(text: str) -> SignIn | None:
    try:
        return signin.parse(text)
    except WalletError:
        return None


def test_the_fields_are_those_of_the_specification():
    assert [field.name for field in fields(SignIn)] == [snake(name) for name in MAXIMAL["fields"]]
