"""The participation token: signed for, kept privately, renewed in time and only once."""

from __future__ import annotations

import asyncio
import base64
import json
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from nacl.signing import SigningKey
from node_parts import address

from kvasir_console.errors import NetworkError, WalletError
from kvasir_console.node.credentials import EXPIRY_SKEW_S, Credentials
from kvasir_console.node.market import GatewayInfo, Market
from kvasir_console.node.session_key import new_session_key
from kvasir_console.relay.wire.signed import (
    ActionKind,
    action_text,
    bridge_challenge_text,
    check_node_token,
    mint_node_token,
    parse_action,
    rfc3339,
)
from kvasir_console.wallet.delegation import MAX_LIFETIME_S, Delegation
from kvasir_console.wallet.keys import verify

KEY = SigningKey(bytes(range(32)))
WALLET = address(KEY)
OTHER = address(SigningKey(bytes(32)))
GATEWAY = "http://127.0.0.1:8791"
SECRET = "a gateway's secret"


class Gate:
    """A gateway that checks the signature as the contract says."""

    def __init__(self, lifetime_s: int = 3600) -> None:
        self.lifetime_s = lifetime_s
        self.minted: list[str] = []
        self.nonces: list[str] = []
        self.delegated: dict[str, int] = {}
        self.signers: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/action/challenge":
            now = int(time.time())
            times = {"issued_at": rfc3339(now), "expires_at": rfc3339(now + 300)}
            return httpx.Response(200, json={"nonce": "challenge-nonce-0123456789", **times})
        if request.url.path == "/api/auth/delegate":
            body = json.loads(request.content)
            action = parse_action(body["message"])
            assert verify(body["wallet"], body["message"].encode(), base64.b64decode(body["signature"]))
            self.delegated[action.details["key"]] = action.details["until"]
            return httpx.Response(200, json={"key": action.details["key"], "until": action.details["until"]})
        if request.url.path == "/api/auth/challenge":
            nonce = f"{len(self.nonces):032x}"
            self.nonces.append(nonce)
            return httpx.Response(200, json={"nonce": nonce, "message": bridge_challenge_text(WALLET, nonce)})
        body = json.loads(request.content)
        text = bridge_challenge_text(body["wallet"], body["nonce"]).encode()
        signer = body.get("key", body["wallet"])
        self.signers.append(signer)
        if signer not in (WALLET, *self.delegated) or not verify(signer, text, base64.b64decode(body["signature"])):
            return httpx.Response(401, json={"error": "bad signature"})
        token = mint_node_token(SECRET, body["wallet"], int(time.time()) + self.lifetime_s + len(self.minted))
        self.minted.append(token)
        return httpx.Response(200, json={"node_token": token, "wallet": body["wallet"], "expires_in": self.lifetime_s})

    def market(self, gateway: str = GATEWAY) -> Market:
        return Market(gateway, transport=httpx.MockTransport(self))


class Prover:
    def __init__(self, *, locked: bool = False) -> None:
        self.locked = locked
        self.hosts: list[str] = []

    async def prove_participation(self, host: str, wallet: str, nonce: str, message: str) -> bytes:
        self.hosts.append(host)
        await asyncio.sleep(0)  # another caller gets its turn here
        if self.locked:
            raise WalletError("wallet_locked", "The wallet is locked.")
        return KEY.sign(message.encode()).signature

    async def sign_delegation(self, key: str, until_s: int, challenge: dict) -> tuple[str, bytes]:
        if self.locked:
            raise WalletError("wallet_locked", "The wallet is locked.")
        details, times = Delegation(key, until_s).details(), (challenge["issued_at"], challenge["expires_at"])
        text = action_text("127.0.0.1:8791", ActionKind.DELEGATE, WALLET, details, challenge["nonce"], *times)
        return text, KEY.sign(text.encode()).signature


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "node-token.json"


async def test_a_token_is_minted_once_and_accepted_by_its_gateway(file):
    gate, prover = Gate(), Prover()
    credentials = Credentials(gate.market(), prover, WALLET, file)
    assert not credentials.valid
    token = await credentials.get()
    assert check_node_token(SECRET, token, time.time()) == WALLET
    assert await credentials.get() == token
    assert credentials.valid
    assert len(gate.minted) == 1
    assert prover.hosts == ["127.0.0.1:8791"]


async def test_the_token_outlives_the_program_in_a_private_file(file):
    gate = Gate()
    token = await Credentials(gate.market(), Prover(), WALLET, file).get()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    locked = Prover(locked=True)  # nothing has to be signed for what is kept
    assert await Credentials(gate.market(), locked, WALLET, file).get() == token
    assert locked.hosts == []


async def test_a_token_of_another_wallet_or_gateway_is_not_used(file):
    gate = Gate()
    await Credentials(gate.market(), Prover(), WALLET, file).get()
    assert not Credentials(gate.market(), Prover(), OTHER, file).valid
    assert not Credentials(gate.market("http://127.0.0.1:9999"), Prover(), WALLET, file).valid
    assert Credentials(gate.market(), Prover(), WALLET, file).valid


async def test_a_refused_token_is_renewed_and_replaces_the_kept_one(file):
    gate = Gate()
    credentials = Credentials(gate.market(), Prover(), WALLET, file)
    first = await credentials.get()
    second = await credentials.get(refresh=True)
    assert first != second
    assert await Credentials(gate.market(), Prover(locked=True), WALLET, file).get() == second


async def test_many_callers_at_once_mint_one_token(file):
    gate = Gate()
    credentials = Credentials(gate.market(), Prover(), WALLET, file)
    tokens = await asyncio.gather(*(credentials.get() for _ in range(8)))
    assert (len(set(tokens)), len(gate.minted)) == (1, 1)
    renewed = await asyncio.gather(*(credentials.get(refresh=True) for _ in range(8)))
    assert (len(set(renewed)), len(gate.minted)) == (1, 2)
    assert renewed[0] != tokens[0]


async def test_a_token_near_its_end_is_renewed(file, monkeypatch):
    now = int(time.time())
    monkeypatch.setattr(time, "time", lambda: now)
    gate = Gate(lifetime_s=3600)
    credentials = Credentials(gate.market(), Prover(), WALLET, file)
    await credentials.get()
    monkeypatch.setattr(time, "time", lambda: now + 3600 - EXPIRY_SKEW_S - 5)
    assert credentials.valid
    monkeypatch.setattr(time, "time", lambda: now + 3600 - EXPIRY_SKEW_S + 5)
    assert not credentials.valid
    await credentials.get()
    assert len(gate.minted) == 2


async def test_a_locked_wallet_is_said_and_nothing_is_kept(file):
    credentials = Credentials(Gate().market(), Prover(locked=True), WALLET, file)
    with pytest.raises(WalletError) as caught:
        await credentials.get()
    assert caught.value.code == "wallet_locked"
    assert not file.exists()


async def test_after_a_failure_the_next_call_tries_again(file):
    prover = Prover(locked=True)
    credentials = Credentials(Gate().market(), prover, WALLET, file)
    with pytest.raises(WalletError):
        await credentials.get()
    prover.locked = False
    assert await credentials.get()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"5",
        b"\xff",
        b"[" * 15_000,
        b"x" * 100_000,
        json.dumps({"gateway": GATEWAY, "wallet": WALLET}).encode(),
        json.dumps({"gateway": GATEWAY, "wallet": WALLET, "value": 5, "expires_at_s": 1e12}).encode(),
        json.dumps({"gateway": GATEWAY, "wallet": WALLET, "value": "T", "expires_at_s": "1e12"}).encode(),
    ],
)
async def test_a_damaged_file_costs_one_signature(file, content):
    file.write_bytes(content)
    file.chmod(0o600)
    gate = Gate()
    token = await Credentials(gate.market(), Prover(), WALLET, file).get()
    assert gate.minted == [token]
    assert json.loads(file.read_text())["value"] == token


async def test_a_file_others_could_have_written_is_not_trusted(file):
    gate = Gate()
    await Credentials(gate.market(), Prover(), WALLET, file).get()
    file.chmod(0o666)
    credentials = Credentials(gate.market(), Prover(), WALLET, file)
    assert not credentials.valid
    await credentials.get()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_refusal_of_the_gateway_is_passed_on(file):
    def closed(_: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": "10000 nonces are outstanding"})

    market = Market(GATEWAY, transport=httpx.MockTransport(closed))
    with pytest.raises(NetworkError) as caught:
        await Credentials(market, Prover(), WALLET, file).get()
    assert caught.value.code == "rate_limited"


# A session key in the wallet's place


def info(*, delegation: bool = True) -> GatewayInfo:
    return GatewayInfo("", (), True, True, True, delegation, "", None)


async def delegated(file: Path, gate: Gate) -> Credentials:
    credentials = Credentials(gate.market(), Prover(), WALLET, file)
    credentials.learn(info())
    assert await credentials.delegate()
    return credentials


async def test_a_locked_wallet_goes_on_taking_part_by_its_session_key(file):
    gate = Gate()
    await delegated(file, gate)
    kept = file.with_name("session-key.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    locked = Prover(locked=True)
    restarted = Credentials(gate.market(), locked, WALLET, file)
    restarted.learn(info())
    token = await restarted.get()
    assert check_node_token(SECRET, token, time.time()) == WALLET
    assert gate.signers == list(gate.delegated) != [WALLET]
    assert locked.hosts == []


async def test_a_delegation_lasts_thirty_days_and_is_renewed_after_half_of_them(file, monkeypatch):
    now = int(time.time())
    monkeypatch.setattr(time, "time", lambda: now)
    gate = Gate()
    credentials = await delegated(file, gate)
    (until,) = gate.delegated.values()
    assert until == pytest.approx(now + MAX_LIFETIME_S, abs=30)
    assert not await credentials.delegate()
    monkeypatch.setattr(time, "time", lambda: now + MAX_LIFETIME_S / 2 - 60)
    assert not await credentials.delegate()
    monkeypatch.setattr(time, "time", lambda: now + MAX_LIFETIME_S / 2 + 60)
    assert await credentials.delegate()
    assert len(gate.delegated) == 2


async def test_a_gateway_without_the_extension_is_never_asked(file):
    gate = Gate()
    credentials = Credentials(gate.market(), Prover(), WALLET, file)
    assert not await credentials.delegate()
    credentials.learn(info(delegation=False))
    assert not await credentials.delegate()
    await credentials.get()
    assert gate.signers == [WALLET]
    assert not file.with_name("session-key.json").exists()


async def test_a_refused_session_key_is_given_up_for_the_wallet(file):
    gate = Gate()
    await delegated(file, gate)
    gate.delegated.clear()  # the gateway forgot it
    credentials = Credentials(gate.market(), Prover(), WALLET, file)
    credentials.learn(info())
    await credentials.get()
    assert gate.signers[-1] == WALLET
    assert not file.with_name("session-key.json").exists()


async def test_an_ended_session_key_is_not_used(file, monkeypatch):
    gate = Gate()
    credentials = await delegated(file, gate)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + MAX_LIFETIME_S + 1)
    await credentials.get()
    assert gate.signers == [WALLET]


async def test_a_session_key_of_another_wallet_or_gateway_is_not_used(file):
    gate = Gate()
    await delegated(file, gate)
    for market, wallet in ((gate.market("http://127.0.0.1:9999"), WALLET), (gate.market(), OTHER)):
        assert Credentials(market, Prover(), wallet, file)._session is None


async def test_a_session_key_signs_the_bridges_challenge_only(file):
    gate = Gate()
    await delegated(file, gate)

    def hostile(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/auth/challenge":
            return httpx.Response(200, json={"nonce": "0" * 32, "message": "give me everything"})
        raise AssertionError(request.url)

    credentials = Credentials(Market(GATEWAY, transport=httpx.MockTransport(hostile)), Prover(), WALLET, file)
    credentials.learn(info())
    with pytest.raises(WalletError) as caught:
        await credentials.get()
    assert caught.value.code == "challenge_refused"
    assert file.with_name("session-key.json").exists()


async def test_a_locked_wallet_delegates_nothing(file):
    credentials = Credentials(Gate().market(), Prover(locked=True), WALLET, file)
    credentials.learn(info())
    with pytest.raises(WalletError):
        await credentials.delegate()
    assert not file.with_name("session-key.json").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"[" * 4000, b"{", b"x" * 9000, b'{"seed": 7}'])
async def test_a_damaged_session_key_is_made_anew(file, content):
    gate = Gate()
    await delegated(file, gate)
    file.with_name("session-key.json").write_bytes(content)
    credentials = await delegated(file, gate)
    await credentials.get()
    assert gate.signers[-1] == list(gate.delegated)[-1]


def test_a_session_keys_seed_does_not_show():
    key = new_session_key(GATEWAY, WALLET, time.time())
    assert repr(key.seed) not in repr(key)


# What is done with a token


def refusing(*tokens: str) -> Callable[[str], Awaitable[str]]:
    """A call that takes every token but these."""

    async def call(token: str) -> str:
        if token in tokens:
            raise WalletError("token_refused", "The gateway refused this node's token.")
        return token

    return call


async def test_a_refused_token_is_renewed_once(file):
    gate = Gate()
    credentials = Credentials(gate.market(), Prover(), WALLET, file)
    first = await credentials.with_token(refusing())
    second = await credentials.with_token(refusing(first))
    assert gate.minted == [first, second]
    assert await credentials.with_token(refusing(first)) == second


async def test_a_new_token_that_is_refused_too_is_the_callers(file):
    gate = Gate()
    credentials = Credentials(gate.market(), Prover(), WALLET, file)

    async def never(_: str) -> str:
        raise WalletError("token_refused", "No.")

    async def not_admitted(_: str) -> str:
        raise WalletError("not_admitted", "No.")

    for call, minted in ((never, 2), (not_admitted, 2)):
        with pytest.raises(WalletError):
            await credentials.with_token(call)
        assert len(gate.minted) == minted
