"""The participation API from the node's side, against a gateway that answers anything."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import ConfigError, KvasirError, LedgerError, NetworkError, WalletError
from kvasir_console.node.market import (
    MAX_JSON_BYTES,
    Assignment,
    Market,
    NodeToken,
    check_gateway,
    safe_name,
)

WALLET = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
GATEWAY = "http://127.0.0.1:8791"
ASSIGNED = {
    "assigned": True,
    "model": "smollm2-8x135m",
    "layer": 3,
    "experts": [2, 6],
    "n_embd": 576,
    "n_layer": 30,
    "n_expert": 8,
    "scarcity": 0.5,
    "replicas": 1,
    "target": 2,
}
Answer = Callable[[httpx.Request], httpx.Response]


def market(answer: Answer, gateway: str = GATEWAY) -> Market:
    return Market(gateway, transport=httpx.MockTransport(answer))


def replying(content: Any, status: int = 200) -> Market:
    return market(lambda _: httpx.Response(status, json=content))


async def refusal(awaitable: Any, kind: type[KvasirError] = NetworkError) -> KvasirError:
    with pytest.raises(kind) as caught:
        await awaitable
    return caught.value


# What is sent


async def test_the_calls_are_the_contracts():
    seen: list[tuple[str, str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["user-agent"].startswith("kvasir-console/")
        body = json.loads(request.content) if request.content else None
        seen.append((f"{request.method} {request.url.path}", request.headers.get("authorization", ""), body))
        replies: dict[str, Any] = {
            "/api/auth/challenge": {"nonce": "00" * 16, "message": "text"},
            "/api/auth/node-token": {"node_token": "T", "wallet": WALLET, "expires_in": 2_592_000},
            "/api/expert-volunteer": ASSIGNED,
            "/api/expert-coverage": {"ok": True, "workers": 1, "wired": True, "session": "expert-a"},
            "/api/placement": {"plans": [{"plan": {}, "signature": ""}, "rubbish"]},
            "/api/node/claims/" + WALLET: {"claims": [{"id": "1"}]},
        }
        return httpx.Response(200, json=replies.get(request.url.path, {"models": []}))

    gate = market(answer)
    assert (await gate.challenge(WALLET)).nonce == "00" * 16
    token = await gate.node_token(WALLET, "00" * 16, b"\1" * 64, 1000.0)
    assert token == NodeToken("T", WALLET, 2_593_000.0)
    await gate.demand("T")
    assignment = await gate.volunteer("T", model="m", max_experts=8)
    assert assignment == Assignment("smollm2-8x135m", 3, 2, 6, 576, 30, 8)
    await gate.volunteer("T", model="", max_experts=8)
    coverage = {"worker_id": "w", "model": "m", "segments": [[3, 2, 6]]}
    assert (await gate.report("T", coverage)).wired
    assert await gate.placements("T") == [{"plan": {}, "signature": ""}]
    await gate.earnings(WALLET)
    assert await gate.claims(WALLET) == [{"id": "1"}]
    await gate.claim(WALLET, "text", b"\2" * 64)
    await gate.close()
    assert seen == [
        ("POST /api/auth/challenge", "", {"wallet": WALLET}),
        (
            "POST /api/auth/node-token",
            "",
            {"wallet": WALLET, "nonce": "00" * 16, "signature": base64.b64encode(b"\1" * 64).decode()},
        ),
        ("GET /api/expert-demand", "Bearer T", None),
        ("POST /api/expert-volunteer", "Bearer T", {"model": "m", "max_experts": 8}),
        ("POST /api/expert-volunteer", "Bearer T", {"max_experts": 8}),
        ("POST /api/expert-coverage", "Bearer T", coverage),
        ("GET /api/placement", "Bearer T", None),
        (f"GET /api/node/status/{WALLET}", "", None),
        (f"GET /api/node/claims/{WALLET}", "", None),
        (
            "POST /api/node/claim",
            "",
            {"owner": WALLET, "message": "text", "signature": base64.b64encode(b"\2" * 64).decode()},
        ),
    ]


async def test_a_gateway_without_extensions_offers_none():
    info = await replying({"mint": "M", "cluster": "devnet"}).config()
    assert (info.mint, info.dispatch_wires, info.hub_key) == ("M", (), "")
    assert (info.relay_token_header, info.placement, info.signed_actions) == (False, False, False)
    assert info.minimum_claim_micro_kvr is None


async def test_announced_extensions_are_read():
    info = await replying(
        {
            "dispatch_wires": ["v1", "v2", "v2f16"],
            "minimumClaimMicroKvr": 1,
            "extensions": {"relay_token_header": True, "placement": 1, "signed_actions": 1, "hub_key": WALLET},
        }
    ).config()
    assert info.dispatch_wires == ("v1", "v2", "v2f16")
    assert (info.relay_token_header, info.placement, info.signed_actions) == (True, True, True)
    assert (info.hub_key, info.minimum_claim_micro_kvr) == (WALLET, 1)


def test_a_token_does_not_stand_in_a_repr():
    assert "SECRET" not in repr(NodeToken("SECRET", WALLET, 1.0))


# Refusals


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (401, {"error": "nonce used"}, WalletError, "token_refused"),
        (401, None, WalletError, "token_refused"),
        (403, {"error": "wallet not allowed"}, WalletError, "not_admitted"),
        (403, {"error": "no", "code": "wallet_capped"}, WalletError, "wallet_capped"),
        (403, None, NetworkError, "edge_refused"),
        (429, {"error": "too many nonces"}, NetworkError, "rate_limited"),
        (400, {"error": "worker_id missing"}, NetworkError, "http_400"),
        (
            404,
            {"error": {"message": "There is no such thing.", "code": "unknown_endpoint"}},
            NetworkError,
            "unknown_endpoint",
        ),
        (503, {"error": "census full", "code": "census_full"}, NetworkError, "census_full"),
        (500, None, NetworkError, "http_500"),
        (502, {"detail": "older gateways say it so"}, NetworkError, "http_502"),
    ],
)
async def test_each_refusal_has_an_error_of_its_own(status, body, kind, code):
    def answer(_: httpx.Request) -> httpx.Response:
        if body is None:
            return httpx.Response(status, text="<html>error code: 1010</html>")
        return httpx.Response(status, json=body)

    error = await refusal(market(answer).demand("T"), KvasirError)
    assert type(error) is kind
    assert error.code == code
    if isinstance(body, dict):
        said = body.get("error", body.get("detail"))
        assert (said["message"] if isinstance(said, dict) else said) in error.message


async def test_a_refused_claim_is_the_ledgers_word():
    for status, code in ((400, "below_minimum"), (409, "claim_running")):
        gate = replying({"error": "less than 1 KVR", "code": code}, status)
        error = await refusal(gate.claim(WALLET, "t", bytes(64)), LedgerError)
        assert (error.code, error.message) == (code, "less than 1 KVR")


@pytest.mark.parametrize("code", ["wallet_locked", "token_refused", "signer_gone", "A B", "x" * 99, 5, None])
async def test_a_server_does_not_choose_the_nodes_own_codes(code):
    error = await refusal(replying({"error": "no", "code": code}, 403).demand("T"), WalletError)
    assert error.code == "not_admitted"


async def test_what_a_server_says_is_safe_to_print():
    error = await refusal(replying({"error": "\x1b[31mred\r\n\x07" + "x" * 5000}, 500).demand("T"))
    assert error.message.isprintable()
    assert len(error.message) < 500
    reason = await replying({"assigned": False, "reason": "\x1b]0;title\x07 full"}).volunteer(
        "T", model="", max_experts=1
    )
    assert isinstance(reason, str)
    assert reason.isprintable()
    assert "full" in reason


async def test_a_redirect_is_not_followed_with_the_token():
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.host == "127.0.0.1"
        return httpx.Response(302, headers={"location": "https://elsewhere.example/"})

    await refusal(market(answer).demand("SECRET"))


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (httpx.ConnectError("refused"), "gateway_unreachable"),
        (httpx.ReadTimeout("slow"), "gateway_unreachable"),
        (httpx.RemoteProtocolError("cut"), "gateway_unreachable"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] unknown"), "certificate_refused"),
    ],
)
async def test_a_lost_connection_names_the_gateway(failure, code):
    def answer(_: httpx.Request) -> httpx.Response:
        raise failure

    error = await refusal(market(answer).demand("T"))
    assert error.code == code
    assert GATEWAY in error.message
    assert error.hint


# Replies out of bounds


async def test_an_endless_reply_is_cut_off():
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 2**20
            yield b" " * 2**20

    gate = market(lambda _: httpx.Response(200, content=endless()))
    assert (await refusal(gate.demand("T"))).code == "reply_too_long"
    assert sent <= MAX_JSON_BYTES + 2 * 2**20


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b'"text"', b"5", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000],
    ids=["empty", "null", "list", "text", "number", "cut", "bytes", "deep list", "deep object", "huge number"],
)
async def test_what_is_no_json_object_is_refused(content):
    gate = market(lambda _: httpx.Response(200, content=content))
    for call in (gate.config, lambda: gate.challenge(WALLET), lambda: gate.demand("T"), lambda: gate.placements("T")):
        assert (await refusal(call())).code == "reply_malformed"


@pytest.mark.parametrize("reply", [{}, {"nonce": 5, "message": "x"}, {"nonce": "n"}, {"nonce": "", "message": "m"}])
async def test_half_a_challenge_is_refused(reply):
    assert (await refusal(replying(reply).challenge(WALLET))).code == "reply_malformed"


@pytest.mark.parametrize(
    "change",
    [
        {"node_token": None},
        {"node_token": ""},
        {"node_token": "two\r\nlines"},
        {"expires_in": None},
        {"expires_in": 0},
        {"expires_in": -5},
        {"expires_in": "3600"},
        {"expires_in": True},
        {"expires_in": 1e300},
        {"wallet": "somebody else"},
    ],
)
async def test_a_token_that_makes_no_sense_is_refused(change):
    reply = {"node_token": "T", "wallet": WALLET, "expires_in": 60, **change}
    assert (await refusal(replying(reply).node_token(WALLET, "n", bytes(64), 0.0))).code == "reply_malformed"


@pytest.mark.parametrize(
    "change",
    [
        {"n_embd": None},
        {"n_embd": 0},
        {"n_embd": "576"},
        {"n_embd": 576.0},
        {"n_embd": True},
        {"n_embd": 2**40},
        {"experts": [6, 2]},
        {"experts": [2, 2]},
        {"experts": [-1, 2]},
        {"experts": [0, 9]},
        {"experts": [0]},
        {"experts": [0, 1, 2]},
        {"experts": 5},
        {"experts": "ab"},
        {"experts": None},
        {"experts": [0, 65], "n_expert": 128},
        {"layer": 30},
        {"layer": -1},
        {"layer": "3"},
        {"n_layer": None},
        {"model": None},
        {"model": "../../etc/passwd"},
        {"model": "/etc"},
        {"model": ".."},
        {"model": "a/b"},
        {"model": "a\\b"},
        {"model": "a\0b"},
        {"model": "a b"},
        {"model": "x" * 129},
        {"model": "ü"},
    ],
    ids=str,
)
async def test_an_assignment_that_makes_no_sense_is_refused(change):
    await refusal(replying({**ASSIGNED, **change}).volunteer("T", model="", max_experts=64))


@pytest.mark.parametrize("field", ["model", "layer", "experts", "n_embd", "n_layer", "n_expert"])
async def test_every_field_of_an_assignment_is_needed(field):
    reply = {key: value for key, value in ASSIGNED.items() if key != field}
    error = await refusal(replying(reply).volunteer("T", model="", max_experts=64))
    assert field in error.message


async def test_no_assignment_is_a_reason():
    for reply in ({"assigned": False, "reason": "enough replicas"}, {"assigned": False}, {}):
        reason = await replying(reply).volunteer("T", model="", max_experts=64)
        assert isinstance(reason, str)
        assert reason
        assert reply.get("reason", "") in reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (*ASSIGNED, "extensions", "dispatch_wires", "minimumClaimMicroKvr", "plans", "claims", "nonce", "message")


@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=10), st.sampled_from([200, 400, 401, 403, 409, 429, 500])
)
async def test_no_reply_raises_anything_but_an_error_of_ours(reply, status):
    gate = replying(reply, status)
    for call in (
        gate.config,
        lambda: gate.challenge(WALLET),
        lambda: gate.volunteer("T", model="", max_experts=64),
        lambda: gate.report("T", {}),
        lambda: gate.placements("T"),
        lambda: gate.claims(WALLET),
        lambda: gate.claim(WALLET, "t", bytes(64)),
    ):
        with contextlib.suppress(KvasirError):
            await call()
    await gate.close()


# The gateway's address


@pytest.mark.parametrize(
    "url",
    ["http://gate.example.net", "http://10.0.0.1:80", "http://[2001:db8::1]", "http://127.0.0.1.example.net"],
)
def test_plain_http_is_for_this_machine_only(url):
    with pytest.raises(ConfigError) as caught:
        check_gateway(url)
    assert caught.value.code == "gateway_not_encrypted"
    assert "https://" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("http://127.0.0.1:8791", "http://127.0.0.1:8791"),
        ("http://localhost:1/", "http://localhost:1"),
        ("http://[::1]:80", "http://[::1]:80"),
        ("https://gate.example.net/", "https://gate.example.net"),
        ("https://gate.example.net:8443", "https://gate.example.net:8443"),
    ],
)
def test_a_legal_gateway_loses_only_its_last_slash(url, clean):
    assert check_gateway(url) == clean


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gate.example.net",
        "wss://gate.example.net",
        "ftp://gate.example.net",
        "https://",
        "https://user:pass@gate.example.net",
        "https://gate.example.net?x=1",
        "https://gate.example.net#x",
        "https://gate.example.net:99999",
        "https://gate.example.net:abc",
        "https://[::1",
        "https://gate.example.net\n.evil",
        "https://gate .example.net",
    ],
)
def test_what_is_no_gateway_is_refused(url):
    with pytest.raises(ConfigError) as caught:
        check_gateway(url)
    assert caught.value.code == "bad_gateway_url"


def test_signatures_are_bound_to_the_host_in_lower_case():
    assert market(lambda _: httpx.Response(200), "https://Gate.Example.NET:8443").host == "gate.example.net:8443"


def test_a_proxy_never_sees_what_goes_to_this_machine_in_clear(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.net:3128")
    monkeypatch.setenv("ALL_PROXY", "http://proxy.example.net:3128")
    assert not Market("http://127.0.0.1:8791").client._mounts


@given(st.text(max_size=40))
def test_a_name_that_passes_stays_in_its_folder(name):
    try:
        safe_name(name)
    except NetworkError:
        return
    assert "/" not in name
    assert name not in ("", ".", "..")
    assert name.isascii()
