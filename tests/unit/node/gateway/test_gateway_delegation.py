"""Session keys at the gateway: what a wallet signs for, what they may do, and how it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_parts import ALICE, BOB, DOMAIN, NOW, Gateway, Wallet, gateway

from kvasir_console.node.gateway.store import DELEGATIONS_PER_WALLET, Store
from kvasir_console.relay.wire.signed import action_text, read_node_token

DAY = 86_400
KEY, OTHER_KEY = Wallet("session"), Wallet("another session")
UNTIL = int(NOW) + 30 * DAY


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path) as running:
        yield running


async def delegate(served: Gateway, signer: Wallet = ALICE, wallet: Wallet = ALICE, **details: object):
    """Sign a delegation and hand it in; the reply."""
    asked = {"wallet": wallet.address, "action": "delegate"}
    challenge = (await served.client.post("/api/action/challenge", json=asked, headers={"Host": DOMAIN})).json()
    given = {"key": KEY.address, "scope": ["participation", "statements"], "until": UNTIL} | details
    times = (challenge["issued_at"], challenge["expires_at"])
    text = action_text(DOMAIN, "delegate", wallet.address, given, challenge["nonce"], *times)
    body = {"wallet": wallet.address, "message": text, "signature": signer.sign(text)}
    return await served.client.post("/api/auth/delegate", json=body)


async def sign_in(served: Gateway, signer: Wallet, wallet: Wallet = ALICE, key: str | None = KEY.address):
    challenge = (await served.client.post("/api/auth/challenge", json={"wallet": wallet.address})).json()
    body = {"wallet": wallet.address, "nonce": challenge["nonce"], "signature": signer.sign(challenge["message"])}
    return await served.client.post("/api/auth/node-token", json=body | ({} if key is None else {"key": key}))


async def test_the_extension_is_announced(served: Gateway) -> None:
    assert (await served.client.get("/api/config")).json()["extensions"]["delegation"] == 1


async def test_a_session_key_signs_in_for_its_wallet(served: Gateway) -> None:
    granted = await delegate(served)
    assert (granted.status_code, granted.json()) == (
        200,
        {"wallet": ALICE.address, "key": KEY.address, "until": UNTIL},
    )
    served.clock.now += 10 * DAY
    reply = (await sign_in(served, KEY)).json()
    assert (reply["wallet"], reply["expires_in"]) == (ALICE.address, 20 * DAY)  # its token ends with it
    assert read_node_token(reply["node_token"]).expiry == UNTIL
    token = {"Authorization": f"Bearer {reply['node_token']}"}
    assert (await served.client.get("/api/expert-demand", headers=token)).status_code == 200


async def test_the_wallet_itself_still_signs_in(served: Gateway) -> None:
    await delegate(served)
    assert (await sign_in(served, ALICE, key=None)).json()["expires_in"] == 30 * DAY
    assert (await sign_in(served, KEY, key=None)).status_code == 401


async def test_nobody_else_signs_in_by_it(served: Gateway) -> None:
    await delegate(served)
    assert (await sign_in(served, OTHER_KEY)).status_code == 401  # another key's signature
    assert (await sign_in(served, OTHER_KEY, key=OTHER_KEY.address)).status_code == 401  # a key nobody named
    assert (await sign_in(served, KEY, wallet=BOB)).status_code == 401  # another wallet's
    assert (await sign_in(served, KEY, key="not a key")).status_code == 400


async def test_it_ends(served: Gateway) -> None:
    await delegate(served)
    served.clock.now = UNTIL - 1
    assert (await sign_in(served, KEY)).status_code == 200
    served.clock.now = UNTIL
    refused = await sign_in(served, KEY)
    assert (refused.status_code, refused.json()["code"]) == (401, "delegation_unknown")


async def test_it_can_be_taken_back(served: Gateway) -> None:
    await delegate(served)
    assert (await delegate(served, until=0)).status_code == 200
    assert (await sign_in(served, KEY)).status_code == 401
    assert (await delegate(served, until=0)).status_code == 200  # again changes nothing


async def test_it_survives_a_restart(served: Gateway, tmp_path: Path) -> None:
    await delegate(served)
    store = Store.open(f"sqlite:///{tmp_path / 'gateway.sqlite'}")
    assert store.delegated_until(ALICE.address, KEY.address, int(NOW)) == UNTIL
    store.close()


@pytest.mark.parametrize(
    "details",
    [
        {"scope": ["participation"]},
        {"scope": ["participation", "statements", "claim"]},
        {"scope": "everything"},
        {"until": int(NOW) + 31 * DAY},
        {"until": int(NOW) - 1},
        {"until": "soon"},
        {"until": True},
        {"key": "not a key"},
        {"key": ALICE.address},
        {"key": None},
        {"amount": 1},
    ],
    ids=str,
)
async def test_other_rights_are_not_granted(served: Gateway, details: dict[str, object]) -> None:
    refused = await delegate(served, **details)
    assert (refused.status_code, refused.json()["code"]) == (400, "delegation_malformed")
    assert (await sign_in(served, KEY)).status_code == 401


async def test_only_the_wallet_delegates_and_each_text_once(served: Gateway) -> None:
    assert (await delegate(served, signer=BOB)).status_code == 401
    assert (await delegate(served, signer=KEY)).status_code == 401
    asked = {"wallet": ALICE.address, "action": "claim"}
    challenge = (await served.client.post("/api/action/challenge", json=asked, headers={"Host": DOMAIN})).json()
    details = {"key": KEY.address, "scope": ["participation", "statements"], "until": UNTIL}
    for kind in ("claim", "delegate"):  # a challenge for a claim is none for a delegation
        text = action_text(
            DOMAIN, kind, ALICE.address, details, challenge["nonce"], challenge["issued_at"], challenge["expires_at"]
        )
        body = {"wallet": ALICE.address, "message": text, "signature": ALICE.sign(text)}
        assert (await served.client.post("/api/auth/delegate", json=body)).status_code == 401
    assert (await sign_in(served, KEY)).status_code == 401


async def test_a_wallet_has_so_many_session_keys_and_the_oldest_gives_way(served: Gateway) -> None:
    keys = [Wallet(f"session {number}") for number in range(DELEGATIONS_PER_WALLET + 1)]
    for key in keys:
        served.clock.now += 1
        assert (await delegate(served, key=key.address)).status_code == 200
    assert (await sign_in(served, keys[0], key=keys[0].address)).status_code == 401
    for key in (keys[1], keys[-1]):
        assert (await sign_in(served, key, key=key.address)).status_code == 200
    assert (await delegate(served, signer=BOB, wallet=BOB)).status_code == 200  # others have their own number
