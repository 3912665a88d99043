"""What a wallet signs and what it does not, before any key is near."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solders.message import Message

from kvasir_console.errors import KvasirError, WalletError
from kvasir_console.relay.wire import signed
from kvasir_console.wallet import delegation, intent_base, intents
from kvasir_console.wallet.token import associated_token_address

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


@pytest.mark.parametrize("kind", [kind for kind in signed.ActionKind if kind != "delegate"])
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


@pytest.mark.parametrize("kind", ["bytes", "transaction", "message", "delegate", "sign", "Participation", ""])
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


# Signing in


DEVNET = "EtWTRABZaYq6iMfeYKouRu166VU2xqa1wcaWoxPkrZBG"
GATEWAY = next(case for case in VECTORS["messages"] if case["kind"] == "gateway_sign_in")
USUAL = next(case for case in VECTORS["sign_in_with_solana"]["messages"] if case["name"] == "maximal")


def gateway_sign_in(**changes: object) -> dict[str, object]:
    return {"kind": "gateway_sign_in", "host": HOST, "message": GATEWAY["text"], **GATEWAY["fields"]} | changes


def sign_in(**changes: object) -> dict[str, object]:
    fields = {
        "kind": "sign_in",
        "domain": HOST,
        "address": WALLET,
        "statement": "Sign in to the gateway.",
        "uri": f"https://{HOST}/login",
        "version": "1",
        "chain_id": "devnet",
        "nonce": "5813ef31351cd608",
        "issued_at": "2026-01-31T12:00:00.000Z",
        "expiration_time": "2026-01-31T12:05:00.000Z",
        "not_before": None,
        "request_id": None,
        "resources": [f"https://{HOST}/terms"],
    }
    return fields | changes


def test_the_gateways_sign_in_is_signed_when_it_was_asked_for():
    assert intents.text_of(intents.parse(gateway_sign_in()), CONTEXT) == GATEWAY["text"]
    shown = intents.parse(gateway_sign_in()).describe()
    assert all(word in shown for word in ("administration", "credits", "API keys", HOST, WALLET))


@pytest.mark.parametrize("case", VECTORS["hostile_challenges"], ids=lambda case: case["name"])
def test_no_hostile_answer_is_taken_for_a_gateways_sign_in_unless_it_is_one(case):
    message, nonce = case["response"]["message"], case["response"]["nonce"]
    fields = gateway_sign_in(message=message, nonce=nonce)
    if message == signed_text(nonce):
        assert intents.parse(fields).text(CONTEXT) == message
    else:
        refused(fields)


def signed_text(nonce: str) -> str | None:
    try:
        return signed.gateway_sign_in_text(WALLET, nonce)
    except WalletError:
        return None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"message": BRIDGE["text"]}, "challenge_refused"),
        ({"host": "evil.example"}, "other_host"),
        ({"wallet": "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"}, "other_wallet"),
        ({"message": GATEWAY["text"] + "\n"}, "challenge_refused"),
        ({"nonce": 7}, "intent_malformed"),
    ],
)
def test_other_gateway_sign_ins_are_refused(change, code):
    assert refused(gateway_sign_in(**change)).code == code


def test_a_sign_in_with_solana_is_the_specifications_text():
    names = {"chainId": "chain_id", "issuedAt": "issued_at", "expirationTime": "expiration_time"}
    names |= {"notBefore": "not_before", "requestId": "request_id"}
    fields = {names.get(name, name): value for name, value in USUAL["fields"].items()}
    now = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
    context = intents.Context(fields["domain"], fields["address"], now, DEVNET)
    assert intents.text_of(intents.parse({"kind": "sign_in", **fields}), context) == USUAL["text"]


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"domain": "evil.example"}, "other_host", "evil.example"),
        ({"domain": HOST + ".evil.example"}, "other_host", "evil.example"),
        ({"address": "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"}, "sign_in_refused", "address"),
        ({"uri": "https://evil.example/login"}, "sign_in_refused", "uri"),
        ({"uri": f"http://{HOST}/login"}, "sign_in_refused", "uri"),
        ({"uri": f"https://{HOST}@evil.example/login"}, "sign_in_refused", "uri"),
        ({"uri": "http://["}, "sign_in_refused", "uri"),
        ({"chain_id": "mainnet"}, "sign_in_refused", "chain_id"),
        ({"chain_id": None}, "sign_in_refused", "chain_id"),
        ({"nonce": None}, "sign_in_refused", "nonce"),
        ({"issued_at": None}, "sign_in_refused", "issued_at"),
        ({"issued_at": "2026-01-31T11:49:59Z"}, "sign_in_refused", "issued_at"),
        ({"expiration_time": None}, "sign_in_refused", "expiration_time"),
        ({"expiration_time": "2026-01-31T11:59:59Z"}, "sign_in_refused", "expiration_time"),
        ({"statement": "x\nURI: https://evil.example/"}, "sign_in_malformed", "statement"),
        ({"issued_at": "noon"}, "sign_in_malformed", "issued_at"),
        ({"resources": "https://x/"}, "intent_malformed", "resources"),
        ({"resources": [7]}, "intent_malformed", "resources"),
        ({"statement": 7}, "intent_malformed", "statement"),
        ({"host": HOST}, "intent_malformed", "host"),
    ],
)
def test_other_sign_ins_with_solana_are_refused(change, code, named):
    with pytest.raises(WalletError) as caught:
        intents.parse(sign_in(**change)).text(replace(CONTEXT, cluster=DEVNET))
    assert caught.value.code == code
    assert named in caught.value.message


def test_a_local_gateway_may_be_reached_without_tls():
    for host in ("127.0.0.1:8791", "localhost:8791", "[::1]:8791"):
        fields = sign_in(domain=host, uri=f"http://{host}/", resources=None)
        assert intents.parse(fields).text(replace(CONTEXT, host=host)).startswith(host)


def test_a_cluster_of_ones_own_is_localnet():
    own = replace(CONTEXT, cluster="9WzDXwBbmkg8ZTbNMqUxvQRAyrZzDsGYdLVL9zYtAWWM")
    assert intents.parse(sign_in(chain_id="localnet")).text(own)
    with pytest.raises(WalletError, match="chain_id"):
        intents.parse(sign_in()).text(own)


def test_a_sign_in_is_shown_with_every_field_and_harmlessly():
    shown = intents.parse(sign_in(statement="\x1b[2J\u202e")).describe()
    for value in (HOST, WALLET, "devnet", "5813ef31351cd608", f"https://{HOST}/login", f"https://{HOST}/terms"):
        assert value in shown
    assert all(letter == "\n" or " " <= letter <= "~" for letter in shown)


# Delegation


SESSION = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"


def delegation_of(days: float = 30, **changes: object) -> dict[str, object]:
    fields = {name: value for name, value in action().items() if name not in ("action", "details")}
    until = int((NOW + timedelta(days=days)).timestamp())
    return fields | {"kind": "delegation", "key": SESSION, "until_s": until} | changes


def test_a_delegation_is_an_action_that_grants_participation_only():
    text = intents.text_of(intents.parse(delegation_of()), CONTEXT)
    read = signed.parse_action(text)
    assert (read.kind, read.wallet, read.domain) == ("delegate", WALLET, HOST)
    until = int((NOW + timedelta(days=30)).timestamp())
    assert read.details == {"key": SESSION, "scope": ["participation", "statements"], "until": until}
    shown = intents.parse(delegation_of()).describe()
    assert shown == f"Let the key {SESSION} take part in the network at {HOST} until 2026-03-02T12:00:00Z"


def test_a_delegation_can_be_taken_back():
    intent = intents.parse(delegation_of(until_s=0))
    assert signed.parse_action(intent.text(CONTEXT)).details["until"] == 0
    assert intent.describe().startswith("Take back")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"days": 31}, "delegation_malformed"),
        ({"days": -1}, "delegation_malformed"),
        ({"until_s": -5}, "delegation_malformed"),
        ({"until_s": True}, "intent_malformed"),
        ({"key": "not a key"}, "delegation_malformed"),
        ({"key": WALLET}, "delegation_malformed"),
        ({"host": "evil.example"}, "other_host"),
        ({"expires_at": "2026-01-31T11:00:00Z"}, "action_lifetime"),
        ({"scope": ["everything"]}, "intent_malformed"),
    ],
)
def test_other_delegations_are_refused(change, code):
    assert refused(delegation_of(**change)).code == code


@pytest.mark.parametrize("details", [{}, {"key": SESSION, "scope": ["transfer"], "until": 0}])
def test_a_delegation_is_not_had_as_a_plain_action(details):
    assert refused(action(action="delegate", details=details)).code == "action_unknown"


@given(json_values)
def test_only_exact_details_delegate_anything(value):
    for details in (value, {"key": SESSION, "until": 0, "scope": value}):
        if isinstance(details, dict) and details != delegation.Delegation(SESSION, 0).details():
            with pytest.raises(WalletError):
                delegation.parse_details(details)


# Transfers


MINT = "6cuJAmqtMuGzJ7s7eWQSqfJvEFRUdTiYR3cuMmiNoCPQ"
RECIPIENT = SESSION
BLOCKHASH = "9WzDXwBbmkg8ZTbNMqUxvQRAyrZzDsGYdLVL9zYtAWWM"
MONEY = intents.Context(HOST, WALLET, NOW, DEVNET, MINT)


def transfer(**changes: object) -> dict[str, object]:
    fields = {"kind": "transfer", "cluster": DEVNET, "token": "KVR", "recipient": RECIPIENT}
    money = {"amount": 1_500_000, "memo": "", "blockhash": BLOCKHASH, "priority_micro_lamports": 0, "payment": ""}
    return fields | money | changes


@pytest.mark.parametrize("token", ["KVR", "SOL"])
@pytest.mark.parametrize("memo", ["", "January"])
def test_a_transfer_moves_what_it_says_and_nothing_else(token, memo):
    message = intents.parse(transfer(token=token, memo=memo)).message(MONEY)
    keys = [str(key) for key in message.account_keys]
    assert message.header.num_required_signatures == 1
    assert keys[0] == WALLET  # pays the fee, signs, and owns what is moved
    assert str(message.recent_blockhash) == BLOCKHASH
    assert not message.address_table_lookups
    programs = [keys[each.program_id_index] for each in message.instructions]
    system, spl = "1" * 32, "TokenkegQfeZyiNwAJbNbGKPFXCWuBvf9Ss623VQ5DA"
    ata, memo_program = "ATokenGPvbdGVxr1b2hvZbsiqW5xWH25efTNsLJA8knL", "MemoSq4gqABAXKb96qnH8TysNcWxMyWCqXgDLGmfcHr"
    wanted = [ata, spl] if token == "KVR" else [system]
    assert programs == wanted + ([memo_program] if memo else [])
    pays = message.instructions[wanted.index(wanted[-1])]
    data = bytes(pays.data)
    if token == "KVR":
        assert data == bytes([12]) + (1_500_000).to_bytes(8, "little") + bytes([6])  # TransferChecked
        owner = keys[pays.accounts[3]]
        assert (keys[pays.accounts[1]], owner) == (MINT, WALLET)
        assert keys[pays.accounts[2]] == associated_token_address(RECIPIENT, MINT)
    else:
        assert data == (2).to_bytes(4, "little") + (1_500_000).to_bytes(8, "little")
        assert [keys[index] for index in pays.accounts] == [WALLET, RECIPIENT]
    if memo:
        assert bytes(message.instructions[-1].data) == memo.encode()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"cluster": "5eykt4UsFv8P8NJdTREpY1vzqKqZKvdpKuc147dw2N9d"}, "other_cluster"),
        ({"cluster": ""}, "other_cluster"),
        ({"token": "USDC"}, "token_unknown"),
        ({"recipient": WALLET}, "recipient_is_source"),
        ({"recipient": MINT}, "recipient_is_mint"),
        ({"recipient": associated_token_address(RECIPIENT, MINT)}, "recipient_off_curve"),
        ({"recipient": RECIPIENT[:-1] + "0"}, "recipient_malformed"),
        ({"recipient": "the shop"}, "recipient_malformed"),
        ({"amount": 0}, "amount_out_of_range"),
        ({"amount": -1}, "amount_out_of_range"),
        ({"amount": 2**64}, "amount_out_of_range"),
        ({"amount": True}, "intent_malformed"),
        ({"amount": 1.5}, "intent_malformed"),
        ({"memo": "x" * 257}, "memo_too_long"),
        ({"blockhash": ""}, "blockhash"),
        ({"blockhash": "1"}, "blockhash"),
        ({"priority_micro_lamports": -1}, "priority_out_of_range"),
        ({"priority_micro_lamports": 2**40}, "priority_out_of_range"),
        ({"mint": MINT}, "intent_malformed"),
        ({"source": RECIPIENT}, "intent_malformed"),
        ({"message": "AQAB"}, "intent_malformed"),
    ],
)
def test_other_transfers_are_refused(change, code):
    with pytest.raises(KvasirError) as caught:
        intents.parse(transfer(**change)).message(MONEY)
    assert caught.value.code == code


def test_a_priority_fee_is_all_that_comes_before_a_transfer():
    message = intents.parse(transfer(token="SOL", priority_micro_lamports=5000)).message(MONEY)
    programs = [str(message.account_keys[each.program_id_index]) for each in message.instructions]
    assert programs == ["ComputeBudget111111111111111111111111111111"] * 2 + ["1" * 32]
    assert bytes(message.instructions[1].data) == bytes([3]) + (5000).to_bytes(8, "little")  # SetComputeUnitPrice


def test_a_transfer_is_shown_in_full():
    shown = intents.parse(transfer(memo="\x1b[31mred")).describe()
    assert shown == f"Send 1.500000 KVR to {RECIPIENT} on devnet\n  memo: \\x1b[31mred"
    assert "5000 micro-lamports" in intents.parse(transfer(priority_micro_lamports=5000)).describe()
    assert "0.001500000 SOL" in intents.parse(transfer(token="SOL")).describe()


def test_what_can_be_read_as_a_transaction_is_not_signed_as_a_text():
    """No text of ours can be one, so the check is shown one that is: a whole message, in characters below 128."""
    keys = [bytes([0x41 + place] * 32) for place in range(2)]
    legacy = bytes([1, 0, 1, 2]) + b"".join(keys) + b"h" * 32 + bytes([1, 1, 1, 0, 2]) + b"ok"
    assert Message.from_bytes(legacy).instructions
    with pytest.raises(WalletError) as caught:
        intent_base.check_is_no_transaction(legacy.decode())
    assert caught.value.code == "text_is_transaction"


@given(st.text(max_size=300))
def test_the_check_for_transactions_takes_any_text(text):
    with contextlib.suppress(WalletError):
        intent_base.check_is_no_transaction(text)


@pytest.mark.parametrize("fields", [gateway_sign_in(), sign_in(), delegation_of(), transfer()])
def test_the_newer_intents_travel_as_json(fields):
    intent = intents.parse(fields)
    assert intents.parse(json.loads(json.dumps(intent.to_json()))) == intent


@given(
    st.sampled_from([gateway_sign_in(), sign_in(), delegation_of()]),
    st.data(),
    json_values,
)
def test_a_foreign_field_never_signs_for_another_host_or_wallet(fields, data, value):
    name = data.draw(st.sampled_from(sorted(fields)))
    try:
        text = intents.parse(fields | {name: value}).text(replace(CONTEXT, cluster=DEVNET))
    except WalletError:
        return
    assert WALLET in text
    if fields["kind"] != "gateway_sign_in":
        assert HOST in text
