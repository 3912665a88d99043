"""What a wallet signs and what it does not, before any key is near."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import WalletError
from kvasir_console.relay.wire import signed
from kvasir_console.wallet import intents

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "signed_messages.json").read_text())
BRIDGE = next(case for case in VECTORS["messages"] if case["name"] == "bridge_0")
WALLET, HOST = BRIDGE["fields"]["wallet"], "gate.example.net"
NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
CONTEXT = intents.Context(HOST, WALLET, NOW)


def participation(**changes: object) -> dict[str, object]:
    fields = {"kind": "participation", "host": HOST, "message": BRIDGE["text"], **BRIDGE["fields"]}
    return fields | changes


def action(issued: timedelta = timedelta(0), expires: timedelta = timedelta(minutes=5), **changes: object):
    fields = {
        "kind": "action",
        "host": HOST,
        "action": "claim",
        "details": {"micro_kvr": 1_277_952, "note": "January"},
        "nonce": "c7926ef0444886b1f6d113b980986ed1",
        "issued_at": signed.rfc3339(NOW + issued),
        "expires_at": signed.rfc3339(NOW + expires),
    }
    return fields | changes


def refused(fields: object) -> WalletError:
    with pytest.raises(WalletError) as refusal:
        intents.parse(fields).text(CONTEXT)
    return refusal.value


def test_the_bridges_challenge_is_signed_as_it_stands():
    assert intents.parse(participation()).text(CONTEXT).encode().hex() == BRIDGE["utf8_hex"]


def test_a_host_is_the_same_in_capitals():
    assert intents.parse(participation(host="Gate.Example.NET")).text(CONTEXT) == BRIDGE["text"]


@pytest.mark.parametrize("case", VECTORS["hostile_challenges"], ids=lambda case: case["name"])
def test_hostile_challenges_are_not_signed(case):
    assert case["asked_for"] == WALLET
    refused(participation(message=case["response"]["message"], nonce=case["response"]["nonce"]))


def test_a_challenge_for_another_wallet_is_not_signed():
    other = next(case for case in VECTORS["messages"] if case["name"] == "bridge_1")
    assert refused(participation(message=other["text"], **other["fields"])).code == "other_wallet"


@pytest.mark.parametrize("host", ["evil.example.net", "gate.example.net.evil.org", "gate.example.net:8443", ""])
@pytest.mark.parametrize("fields", [participation, action])
def test_other_hosts_are_refused_by_name(fields, host):
    error = refused(fields(host=host))
    assert error.code == "other_host"
    assert HOST in error.message
    assert host in error.message


def test_an_action_is_the_text_of_the_contract():
    text = intents.parse(action()).text(CONTEXT)
    assert text == (
        "kvasir-action-v1\n"
        "domain: gate.example.net\n"
        "action: claim\n"
        "wallet: HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk\n"
        'details: {"micro_kvr":1277952,"note":"January"}\n'
        "nonce: c7926ef0444886b1f6d113b980986ed1\n"
        "issued-at: 2026-01-31T12:00:00Z\n"
        "expires-at: 2026-01-31T12:05:00Z"
    )


@pytest.mark.parametrize("kind", list(signed.ActionKind))
def test_every_action_can_be_named_and_is_described(kind):
    intent = intents.parse(action(action=str(kind)))
    assert f"\naction: {kind}\n" in intent.text(CONTEXT)
    assert HOST in intent.describe()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (action(issued=timedelta(minutes=-5), expires=timedelta(0)), "action_expired"),
        (action(issued=timedelta(minutes=-6), expires=timedelta(minutes=-1)), "action_expired"),
        (action(expires=timedelta(minutes=5, seconds=1)), "action_lifetime"),
        (action(expires=timedelta(0)), "action_lifetime"),
        (action(issued=timedelta(minutes=1), expires=timedelta(minutes=5, seconds=31)), "action_lifetime"),
        (action(expires_at="2026-01-31T12:05:00+00:00"), "action_time"),
        (action(expires_at="tomorrow"), "action_time"),
        (action(nonce="short"), "field_refused"),
        (action(nonce="c7926ef0444886b1\naction: grant"), "field_refused"),
        (action(details={"share": 0.5}), "not_canonical"),
        (action(action="withdraw-everything"), "action_unknown"),
        (action(action=7), "intent_malformed"),
        (action(details=[]), "intent_malformed"),
        (action(wallet=WALLET), "intent_malformed"),
        (participation(nonce=None), "intent_malformed"),
        (participation(extra=1), "intent_malformed"),
        ({}, "intent_malformed"),
        (None, "intent_malformed"),
        ({"kind": ["participation"]}, "intent_malformed"),
    ],
)
def test_malformed_and_ill_timed_intents_are_refused(fields, code):
    assert refused(fields).code == code


def test_a_gateways_clock_may_be_a_little_ahead():
    text = intents.parse(action(issued=timedelta(seconds=20), expires=timedelta(minutes=5, seconds=20))).text(CONTEXT)
    assert text.endswith("expires-at: 2026-01-31T12:05:20Z")


@pytest.mark.parametrize("kind", ["bytes", "transaction", "message", "transfer", "sign", "Participation", ""])
def test_anything_else_is_refused_by_name(kind):
    error = refused({"kind": kind, "message": "aGVsbG8="})
    assert error.code == "intent_unknown"
    assert f"does not sign {kind}." in error.message
    assert "participation" in error.hint


def test_what_a_person_is_shown_is_everything_and_harmless():
    shown = intents.parse(action(details={"node\x1b[2J": "line\nbreak \u202e", "micro_kvr": 1})).describe()
    assert shown.splitlines()[0] == "Claim the earned KVR at gate.example.net"
    assert len(shown.splitlines()) == 3
    assert "micro_kvr: 1" in shown
    assert all(letter == "\n" or " " <= letter <= "~" for letter in shown)
    hostile = refused({"kind": "\x1b]0;owned\x07" + "x" * 500})
    assert "\x1b" not in str(hostile)
    assert len(str(hostile)) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(
    st.sampled_from([participation(), action()]),
    st.sampled_from(["kind", "host", "message", "wallet", "nonce", "action", "details", "issued_at", "expires_at"]),
    json_values,
)
def test_one_foreign_field_never_makes_a_text_of_another_meaning(fields, name, value):
    try:
        text = intents.parse(fields | {name: value}).text(CONTEXT)
    except WalletError:
        return
    if fields["kind"] == "participation":
        assert text == BRIDGE["text"]
    else:
        read = signed.parse_action(text)
        assert (read.domain, read.wallet) == (HOST, WALLET)
        assert NOW < read.expires_at <= NOW + intents.MAX_LIFETIME + intents.CLOCK_SKEW


@pytest.mark.parametrize("fields", [participation(), action()])
def test_intents_travel_as_json(fields):
    intent = intents.parse(json.loads(json.dumps(fields)))
    assert intents.parse(json.loads(json.dumps(intent.to_json()))) == intent
