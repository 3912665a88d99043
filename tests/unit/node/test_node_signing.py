"""The node's signer: a real process with a real vault, and signatures that others accept."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from solders.hash import Hash
from solders.message import MessageV0, to_bytes_versioned
from solders.pubkey import Pubkey
from solders.system_program import TransferParams, transfer

from kvasir_console.errors import KvasirError, WalletError
from kvasir_console.node import signing
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.market import Market
from kvasir_console.node.signing import WalletSigner
from kvasir_console.paths import Paths
from kvasir_console.relay.wire.signed import (
    ActionKind,
    action_text,
    bridge_challenge_text,
    gateway_sign_in_text,
    p4_relay_text,
    parse_action,
    rfc3339,
)
from kvasir_console.wallet import commands
from kvasir_console.wallet.intents import GatewaySignIn, TransferIntent
from kvasir_console.wallet.keys import verify
from kvasir_console.wallet.localnet import base58
from kvasir_console.wallet.signin import SignIn

VECTORS = Path(__file__).parents[2] / "data" / "conformance" / "signed_messages.json"

SESSION = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"
HOST, PASSPHRASE, NONCE = "gate.example.net", "correct horse battery", "0123456789abcdef" * 2


@pytest.fixture
def paths() -> Paths:
    return Paths.from_environment().ensure()


@pytest.fixture
def address(paths: Paths) -> str:
    return commands.create_wallet(paths, PASSPHRASE, kdf="interactive").address


@pytest.fixture
async def signer(paths: Paths, address: str) -> AsyncIterator[WalletSigner]:
    started = WalletSigner(paths, HOST)
    await started.start(paths.state / "signer.log")
    yield started
    await started.stop()


def challenge(lifetime_s: int = 300) -> dict:
    now = datetime.now(UTC)
    return {
        "nonce": "challenge-nonce-0123456789",
        "issued_at": rfc3339(now),
        "expires_at": rfc3339(now + timedelta(seconds=lifetime_s)),
        "domain": "somewhere.else.example",
    }


async def refusal(awaitable) -> str:
    with pytest.raises(WalletError) as caught:
        await awaitable
    assert PASSPHRASE not in str(caught.value)
    return caught.value.code


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - another process sets no event of ours
            await asyncio.sleep(0.01)


def test_without_a_wallet_there_is_no_signer(paths):
    with pytest.raises(WalletError) as caught:
        WalletSigner(paths, HOST)
    assert "kvasir-console wallet create" in caught.value.hint


async def test_participation_is_proved_to_the_own_host_only(signer, address):
    assert signer.address == address
    assert signer.locked
    text = bridge_challenge_text(address, NONCE)
    assert await refusal(signer.prove_participation(HOST, address, NONCE, text)) == "wallet_locked"

    await signer.unlock(PASSPHRASE)
    assert not signer.locked
    signature = await signer.prove_participation(HOST, address, NONCE, text)
    assert verify(address, text.encode(), signature)
    assert not verify(address, text.encode() + b" ", signature)

    assert await refusal(signer.prove_participation("evil.example", address, NONCE, text)) == "other_host"
    sign_in = gateway_sign_in_text(address, NONCE)
    assert await refusal(signer.prove_participation(HOST, address, NONCE, sign_in)) == "challenge_refused"

    await signer.lock()
    assert signer.locked
    assert await refusal(signer.prove_participation(HOST, address, NONCE, text)) == "wallet_locked"


async def test_a_claim_names_this_gateway_whatever_the_challenge_says(signer, address):
    await signer.unlock(PASSPHRASE)
    asked = challenge()
    text, signature = await signer.sign_action(ActionKind.CLAIM, {}, asked)
    assert verify(address, text.encode(), signature)
    action = parse_action(text)
    action.check(domain=HOST, kind="claim", wallet=address, nonce=asked["nonce"], now=datetime.now(UTC))
    assert action.details == {}


# A hostile gateway, and the real signer behind an unlocked node


def transaction(address: str) -> bytes:
    payer, thief = Pubkey.from_string(address), Pubkey.from_string(SESSION)
    pay = transfer(TransferParams(from_pubkey=payer, to_pubkey=thief, lamports=10**9))
    return bytes(to_bytes_versioned(MessageV0.try_compile(payer, [pay], [], Hash.default())))


def hostile_texts(address: str) -> dict[str, str]:
    """What such a gateway may hand out as a challenge for our wallet, with a nonce that fits."""
    honest = bridge_challenge_text(address, NONCE)
    now = datetime.now(UTC)
    times = rfc3339(now), rfc3339(now + timedelta(minutes=5))
    elsewhere = SignIn(
        *("bank.example", address, "Sign in.", "https://bank.example/", "1", "mainnet", "a" * 12),
        *(now.isoformat(timespec="seconds"), (now + timedelta(minutes=5)).isoformat(timespec="seconds")),
    )
    money = transaction(address)
    vectors = {
        case["name"]: case["response"]["message"].replace(case["asked_for"], address)
        for case in json.loads(VECTORS.read_text())["hostile_challenges"]
    }
    return {
        **vectors,
        "admin text": gateway_sign_in_text(address, NONCE),
        "relay text of another host": p4_relay_text("relay.example", "n", address, NONCE),
        "sign-in elsewhere": elsewhere.text(),
        "claim elsewhere": action_text("bank.example", ActionKind.CLAIM, address, {}, NONCE, *times),
        "grant here": action_text(HOST, ActionKind.GRANT, address, {"to": SESSION}, NONCE, *times),
        "transaction": money.decode("latin-1"),
        "transaction in base64": base64.b64encode(money).decode(),
        "transaction in base58": base58.encode(money),
        "challenge and more": f"{honest}\npay: {SESSION}",
        "another dash": honest.replace("\N{EM DASH}", "\N{EN DASH}"),
        "hyphen": honest.replace("\N{EM DASH}", "-"),
        "space at the end": honest + " ",
        "line at the end": honest + "\n",
        "line ends of Windows": honest.replace("\n", "\r\n"),
        "hard space": honest.replace(" ", "\N{NO-BREAK SPACE}", 1),
        "nothing between": honest.replace("bridge", "bri\N{ZERO WIDTH SPACE}dge"),
        "Cyrillic": honest.replace("Kvasir", "Kv\N{CYRILLIC SMALL LETTER A}sir"),
        "Greek": honest.replace("node.", "n\N{GREEK SMALL LETTER OMICRON}de."),
        "capitals": honest.replace("wallet:", "Wallet:"),
        "decomposed": honest.replace("\N{EM DASH}", "\N{EM DASH}\N{COMBINING DOT BELOW}"),
    }


async def test_a_hostile_gateway_gets_no_signature(signer, address, paths):
    """Whatever it hands out instead of the bridge's challenge."""
    await signer.unlock(PASSPHRASE)
    received: list[httpx.Request] = []
    given = ""

    def gateway(request: httpx.Request) -> httpx.Response:
        received.append(request)
        return httpx.Response(200, json={"nonce": NONCE, "message": given})

    market = Market(f"https://{HOST}", transport=httpx.MockTransport(gateway))
    credentials = Credentials(market, signer, address, paths.state / "token.json")
    texts = hostile_texts(address)
    assert len(texts) > 25
    for name, text in texts.items():
        given, received[:] = text, []
        with pytest.raises(KvasirError):
            await credentials.get()
        assert [request.url.path for request in received] == ["/api/auth/challenge"], name
    given = bridge_challenge_text(address, NONCE)
    with pytest.raises(KvasirError):
        await credentials.get()  # signed; this gateway gives no token for it
    (signed,) = [request for request in received if b"signature" in request.content]
    assert verify(address, given.encode(), base64.b64decode(json.loads(signed.content)["signature"]))
    await market.close()
    log = (paths.state / "signer.log").read_text()
    assert log.count("signed:") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": "x\ndomain: bank.example"},
        {"nonce": ""},
        {"nonce": "a" * 10_000},
        {"issued_at": "yesterday"},
        {"expires_at": "2020-01-01T00:00:00Z"},
        {"expires_at": "2999-01-01T00:00:00Z"},
        {"expires_at": "2026-01-01T00:00:00Z\nwallet: " + SESSION},
        {"expires_at": None},
    ],
    ids=str,
)
async def test_a_hostile_challenge_for_a_claim_gets_no_signature(signer, change):
    await signer.unlock(PASSPHRASE)
    await refusal(signer.sign_action(ActionKind.CLAIM, {}, challenge() | change))


async def test_a_session_key_is_given_participation_at_this_gateway(signer, address):
    await signer.unlock(PASSPHRASE)
    asked, until = challenge(), int(datetime.now(UTC).timestamp()) + 86_400
    text, signature = await signer.sign_delegation(SESSION, until, asked)
    assert verify(address, text.encode(), signature)
    action = parse_action(text)
    action.check(domain=HOST, kind="delegate", wallet=address, nonce=asked["nonce"], now=datetime.now(UTC))
    assert action.details == {"key": SESSION, "scope": ["participation", "statements"], "until": until}
    assert await refusal(signer.sign_delegation(SESSION, until + 40 * 86_400, challenge())) == "delegation_malformed"
    assert await refusal(signer.sign_action(ActionKind.DELEGATE, {}, challenge())) == "action_unknown"


async def test_a_nodes_signer_signs_no_money_and_no_sign_in(signer, address):
    await signer.unlock(PASSPHRASE)
    text = gateway_sign_in_text(address, NONCE)
    assert await refusal(signer._client.sign(GatewaySignIn(HOST, text, address, NONCE))) == "intent_not_allowed"
    payment = TransferIntent("", "SOL", SESSION, 1, "", SESSION)
    assert await refusal(signer._client.sign(payment)) == "intent_not_allowed"


async def test_a_signer_that_locks_itself_is_noticed(paths, address):
    signer = WalletSigner(paths, HOST, idle_lock_s=0.01)
    await signer.start(paths.state / "signer.log")
    try:
        await signer.unlock(PASSPHRASE)
        async with asyncio.timeout(120):
            while not signer.locked:
                await signer.refresh()
                await asyncio.sleep(0.02)
    finally:
        await signer.stop()


async def test_a_claim_without_a_sound_challenge_is_not_signed(signer):
    await signer.unlock(PASSPHRASE)
    for change in ({"nonce": ""}, {"nonce": "short"}, {"nonce": "line\nbreak-0123456789"}, {"expires_at": None}):
        await refusal(signer.sign_action(ActionKind.CLAIM, {}, {**challenge(), **change}))
    await refusal(signer.sign_action(ActionKind.CLAIM, {}, {}))
    assert await refusal(signer.sign_action(ActionKind.CLAIM, {}, challenge(lifetime_s=3600))) == "action_lifetime"


async def test_a_wrong_passphrase_leaves_it_locked(signer):
    assert await refusal(signer.unlock("not the passphrase")) == "wrong_passphrase"
    assert signer.locked


async def test_a_signer_that_dies_comes_back_locked(signer, address, monkeypatch):
    monkeypatch.setattr(signing, "_RESTART_S", 0.01)
    await signer.unlock(PASSPHRASE)
    child = signer._child
    first = child.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: signer.locked and child.running and child.pid != first)
    await signer._client.wait_ready()
    text = bridge_challenge_text(address, NONCE)
    assert await refusal(signer.prove_participation(HOST, address, NONCE, text)) == "wallet_locked"
    await signer.unlock(PASSPHRASE)
    assert verify(address, text.encode(), await signer.prove_participation(HOST, address, NONCE, text))


async def test_stopping_ends_the_process_and_its_socket(paths, address):
    signer = WalletSigner(paths, HOST)
    await signer.start(paths.state / "signer.log")
    pid = signer._child.pid
    await signer.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not (paths.runtime / "signer.sock").exists()
    assert await refusal(signer.unlock(PASSPHRASE)) == "signer_gone"


async def test_a_start_that_fails_leaves_no_process(paths, address, monkeypatch):
    signer = WalletSigner(paths, HOST)

    async def never(*_: object) -> None:
        raise WalletError("signer_gone", "The signer does not answer.")

    monkeypatch.setattr(signer._client, "wait_ready", never)
    assert await refusal(signer.start(paths.state / "signer.log")) == "signer_gone"
    assert not signer._child.running


async def test_no_passphrase_and_no_key_stands_in_the_log(signer, paths, address):
    await signer.unlock(PASSPHRASE)
    await refusal(signer.unlock("another secret phrase"))
    await signer.sign_action(ActionKind.CLAIM, {}, challenge())
    text = Path(paths.state / "signer.log").read_text()
    assert address in text
    assert PASSPHRASE not in text
    assert "another secret phrase" not in text
