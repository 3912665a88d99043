"""Texts to sign and node tokens against tests/data/conformance/signed_messages.json, and our own action texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl.signing import VerifyKey

from kvasir_console.errors import WalletError
from kvasir_console.relay.wire import signed
from kvasir_console.relay.wire.signed import Action, ActionKind

VECTORS = json.loads((Path(__file__).parents[3] / "data" / "conformance" / "signed_messages.json").read_text())
WALLET, OTHER = VECTORS["keys"]
TEXTS: dict[str, Callable[..., str]] = {
    "gateway_sign_in": signed.gateway_sign_in_text,
    "bridge_node_token": signed.bridge_challenge_text,
    "p4_relay": signed.p4_relay_text,
}
NONCE = "c7926ef0444886b1f6d113b980986ed1"
ISSUED = "2026-11-29T12:00:00Z"
EXPIRES = "2026-11-29T12:05:00Z"


@pytest.mark.parametrize("message", VECTORS["messages"], ids=lambda message: message["name"])
def test_a_text_is_the_contract_s_to_the_byte_and_its_signature_holds(message: dict) -> None:
    text = TEXTS[message["kind"]](**message["fields"])
    assert text == message["text"]
    assert text.encode().hex() == message["utf8_hex"]
    key = VerifyKey(bytes.fromhex(VECTORS["keys"][message["signer"]]["public_key_hex"]))
    key.verify(text.encode(), base64.b64decode(message["signature_base64"]))


@pytest.mark.parametrize("case", VECTORS["hostile_challenges"], ids=lambda case: case["name"])
def test_a_foreign_challenge_is_not_signed(case: dict) -> None:
    with pytest.raises(WalletError):
        signed.check_bridge_challenge(case["response"]["message"], case["asked_for"], case["response"]["nonce"])


@pytest.mark.parametrize(
    "message", [m for m in VECTORS["messages"] if m["kind"] == "bridge_node_token"], ids=lambda message: message["name"]
)
def test_the_bridge_s_own_challenge_is_accepted_and_every_neighbour_of_it_refused(message: dict) -> None:
    text, fields = message["text"], message["fields"]
    signed.check_bridge_challenge(text, **fields)
    neighbours = [
        text + "\n",
        text.replace("\n", "\r\n"),
        text.replace("—", "-"),
        text.replace("—", "–"),
        text.replace("wallet: ", "wallet:"),
        " " + text,
        text.upper(),
    ]
    for neighbour in neighbours:
        with pytest.raises(WalletError):
            signed.check_bridge_challenge(neighbour, **fields)


def test_a_nonce_that_carries_another_line_is_refused_although_the_text_agrees() -> None:
    nonce = f"{NONCE}\nwallet: {OTHER}"
    text = f"Kvasir bridge — prove you operate this node.\nwallet: {WALLET}\nnonce: {nonce}"
    with pytest.raises(WalletError):
        signed.check_bridge_challenge(text, WALLET, nonce)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (signed.gateway_sign_in_text, ("0OIl" * 10, NONCE)),
        (signed.gateway_sign_in_text, (WALLET + "\n", NONCE)),
        (signed.bridge_challenge_text, (WALLET, "")),
        (signed.bridge_challenge_text, (WALLET, NONCE + "\n")),
        (signed.p4_relay_text, ("relay\nnode: x", "node", WALLET, NONCE)),
        (signed.p4_relay_text, ("relay.example.net", "two words", WALLET, NONCE)),
    ],
)
def test_a_field_that_would_write_a_line_is_refused(build: Callable[..., str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(WalletError):
        build(*arguments)


def action(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "domain": "gateway.example.org:8443",
        "action": "claim",
        "wallet": WALLET,
        "details": {"micro_kvr": 8950, "all": True},
        "nonce": NONCE,
        "issued_at": ISSUED,
        "expires_at": EXPIRES,
    }
    return signed.action_text(**{**fields, **changes})


ACTION_TEXT = (
    "kvasir-action-v1\n"
    "domain: gateway.example.org:8443\n"
    "action: claim\n"
    f"wallet: {WALLET}\n"
    'details: {"all":true,"micro_kvr":8950}\n'
    f"nonce: {NONCE}\n"
    "issued-at: 2026-11-29T12:00:00Z\n"
    "expires-at: 2026-11-29T12:05:00Z"
)


def test_an_action_has_one_text_and_that_text_reads_back() -> None:
    assert action() == ACTION_TEXT
    read = signed.parse_action(ACTION_TEXT)
    assert read == Action(
        "gateway.example.org:8443",
        ActionKind.CLAIM,
        WALLET,
        {"all": True, "micro_kvr": 8950},
        NONCE,
        datetime(2026, 11, 29, 12, 0, tzinfo=UTC),
        datetime(2026, 11, 29, 12, 5, tzinfo=UTC),
    )
    assert read.text() == ACTION_TEXT


def test_instants_may_be_given_as_datetimes_in_any_zone() -> None:
    tokyo = datetime.fromisoformat("2026-11-29T21:00:00.9+09:00")
    assert action(issued_at=tokyo, expires_at=tokyo + timedelta(minutes=5)) == ACTION_TEXT
    assert signed.rfc3339(1_796_000_000) == datetime.fromtimestamp(1_796_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert signed.rfc3339(0) == "1970-01-01T00:00:00Z"
    with pytest.raises(ValueError):
        signed.rfc3339(datetime(2026, 11, 29))


def test_the_seven_actions_are_the_ones_that_need_a_signature() -> None:
    assert {str(kind) for kind in ActionKind} == {
        "claim", "remove-node", "move-node", "delegate", "apply-plan", "set-price", "grant",
    }  # fmt: skip
    for kind in ActionKind:
        assert signed.parse_action(action(action=kind)).kind is kind


@pytest.mark.parametrize(
    "changes",
    [
        {"expires_at": "2026-11-29T12:05:01Z"},
        {"expires_at": ISSUED},
        {"expires_at": "2026-11-29T11:59:00Z"},
        {"issued_at": "2026-11-29T12:00:00+00:00"},
        {"issued_at": "2026-11-29T12:00:00.5Z"},
        {"issued_at": "2026-02-30T12:00:00Z"},
        {"issued_at": "2026-11-29 12:00:00Z"},
        {"action": "pay"},
        {"domain": "a b"},
        {"domain": "gateway\naction: grant"},
        {"nonce": "short"},
        {"nonce": NONCE + "\n"},
        {"wallet": "x"},
        {"details": {"kvr": 0.5}},
        {"details": {"note": "x" * 70_000}},
    ],
)
def test_an_action_that_may_not_be_signed_has_no_text(changes: dict[str, Any]) -> None:
    with pytest.raises(WalletError):
        action(**changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ACTION_TEXT + "\n",
        "\n" + ACTION_TEXT,
        ACTION_TEXT.replace("\n", "\r\n"),
        ACTION_TEXT.replace("action-v1", "action-v2"),
        ACTION_TEXT.replace('{"all":true,"micro_kvr":8950}', '{"micro_kvr":8950,"all":true}'),
        ACTION_TEXT.replace('{"all":true,"micro_kvr":8950}', '{"all": true,"micro_kvr":8950}'),
        ACTION_TEXT.replace('"all":true', '"all":true,"all":true'),
        ACTION_TEXT.replace("8950", "-0"),
        ACTION_TEXT.replace("8950", "8950.0"),
        ACTION_TEXT.replace("8950", "1e3"),
        ACTION_TEXT.replace("8950", "9" * 5000),
        ACTION_TEXT.replace("8950", '"\u00e9"'),
        ACTION_TEXT.replace("8950", "[" * 20_000),
        ACTION_TEXT.replace('{"all":true,"micro_kvr":8950}', "[]"),
        ACTION_TEXT.replace("12:05:00Z", "12:05:01Z"),
        ACTION_TEXT.replace("action: claim", "action: CLAIM"),
        ACTION_TEXT.replace("domain: ", "domain:  "),
        ACTION_TEXT.replace("domain: ", "Domain: "),
        ACTION_TEXT + "\nwallet: " + OTHER,
        "\n".join(sorted(ACTION_TEXT.split("\n"))),
        ACTION_TEXT * 300,
    ],
)
def test_a_text_that_is_not_exactly_an_action_is_refused(text: str) -> None:
    with pytest.raises(WalletError):
        signed.parse_action(text)


def test_an_action_is_checked_field_by_field_and_against_the_clock() -> None:
    read = signed.parse_action(ACTION_TEXT)
    due: dict[str, Any] = {
        "domain": "gateway.example.org:8443",
        "kind": "claim",
        "wallet": WALLET,
        "nonce": NONCE,
        "now": read.issued_at + timedelta(seconds=1),
    }
    read.check(**due)
    read.check(**{**due, "now": read.issued_at})
    read.check(**{**due, "now": read.expires_at.timestamp()})
    for change, code in (
        ({"domain": "evil.example.org"}, "action_domain"),
        ({"kind": ActionKind.GRANT}, "action_action"),
        ({"wallet": OTHER}, "action_wallet"),
        ({"nonce": NONCE[::-1]}, "action_nonce"),
        ({"now": read.issued_at - timedelta(seconds=1)}, "action_expired"),
        ({"now": read.expires_at + timedelta(seconds=1)}, "action_expired"),
    ):
        with pytest.raises(WalletError) as caught:
            read.check(**{**due, **change})
        assert caught.value.code == code
    assert replace(read, wallet=OTHER).text() != ACTION_TEXT


CANONICAL = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None)
@given(CANONICAL)
def test_canonical_json_is_ascii_reads_back_and_does_not_depend_on_order(value: Any) -> None:
    def shuffled(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: shuffled(part[key]) for key in reversed(part)}
        return [shuffled(entry) for entry in part] if isinstance(part, list) else part

    text = signed.canonical_json(value)
    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text) == value
    assert signed.canonical_json(shuffled(value)) == text


def test_canonical_json_has_sorted_keys_no_spaces_and_escapes() -> None:
    assert signed.canonical_json({"b": [1, None], "a": {"é": False}}) == '{"a":{"\\u00e9":false},"b":[1,null]}'
    assert signed.plan_text({"version": 1, "ring": "r"}) == 'kvasir-plan-v1\n{"ring":"r","version":1}'


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [0.5, float("nan"), {1: 2}, {"a": {None: 1}}, [b"x"], {1, 2}, 2**64, -(2**63) - 1, nested(5000)]
)
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(WalletError) as caught:
        signed.canonical_json(value)
    assert caught.value.code == "not_canonical"


@settings(deadline=None)
@given(
    st.sampled_from(list(ActionKind)),
    st.dictionaries(st.text(max_size=6), CANONICAL, max_size=4),
    st.integers(0, 4_000_000_000),
    st.integers(1, 300),
)
def test_every_action_reads_back(kind: ActionKind, details: dict[str, Any], issued: int, lifetime: int) -> None:
    text = signed.action_text(
        "h", kind, WALLET, details, NONCE, signed.rfc3339(issued), signed.rfc3339(issued + lifetime)
    )
    read = signed.parse_action(text)
    assert (read.kind, read.details) == (kind, details)
    assert read.expires_at - read.issued_at == timedelta(seconds=lifetime)


@pytest.mark.parametrize("case", VECTORS["node_tokens"]["cases"], ids=lambda case: case["name"])
def test_node_tokens_are_accepted_and_refused_as_the_contract_says(case: dict) -> None:
    secret = VECTORS["node_tokens"]["secret"]
    if case["expect"] == "accepted":
        assert signed.check_node_token(secret, case["token"], case["now"]) == case["wallet"]
        assert signed.mint_node_token(secret, case["wallet"], case["expiry"]) == case["token"]
        assert signed.read_node_token(case["token"]) == signed.NodeToken(case["wallet"], case["expiry"])
    else:
        with pytest.raises(WalletError):
            signed.check_node_token(secret, case["token"], case["now"])


def test_a_token_is_valid_through_its_last_second_and_not_with_padding() -> None:
    token = signed.mint_node_token("secret", WALLET, 1000)
    assert signed.check_node_token(b"secret", token, 1000.9) == WALLET
    for refused, now in ((token, 1001.0), (token + "=", 0), (token + "\n", 0), (token * 4, 0), ("é" + token, 0)):
        with pytest.raises(WalletError):
            signed.check_node_token("secret", refused, now)


def test_without_a_secret_no_token_is_written_and_none_holds() -> None:
    token = signed.mint_node_token("secret", WALLET, 1000)
    for secret in ("", b""):
        with pytest.raises(WalletError):
            signed.mint_node_token(secret, WALLET, 1000)
        with pytest.raises(WalletError):
            signed.check_node_token(secret, token, 0)


@settings(deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=150).map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_no_other_text_is_a_token(text: str) -> None:
    with pytest.raises(WalletError):
        signed.check_node_token("secret", text, 0)
