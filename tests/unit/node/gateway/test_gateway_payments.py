"""Claims that only the wallet can make, and what each view says of the money."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_parts import ALICE, BOB, CAROL, DOMAIN, MOE, NOW, Gateway, Wallet, gateway

from kvasir_console.node.gateway.coverage import parse_report
from kvasir_console.node.gateway.ledger import ClaimState, Reading
from kvasir_console.node.gateway.payout import TREASURY_FACT
from kvasir_console.relay.wire.signed import action_text
from kvasir_console.wallet.token import associated_token_address


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path, minimum_micro_kvr=1000) as running:
        yield running


def earn(served: Gateway, micro_units: int, wallet: Wallet = ALICE, **fields: Any) -> None:
    values: dict[str, Any] = {"worker_id": "w", "kind": "expert", "model": MOE, "platform": {"os": "linux"}, **fields}
    served.ledger.credit(Reading(wallet=wallet.address, run_id="r", micro_units=micro_units, **values), int(NOW))


async def challenge(served: Gateway, wallet: Wallet = ALICE, action: str = "claim", **headers: str) -> dict[str, str]:
    body = {"wallet": wallet.address, "action": action}
    reply = await served.client.post("/api/action/challenge", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def claim_body(wallet: Wallet, given: dict[str, str], signer: Wallet | None = None, **changes: Any) -> dict[str, str]:
    fields: dict[str, Any] = {"domain": given["domain"], "action": "claim", "wallet": wallet.address, "details": {}}
    fields |= {key: given[key] for key in ("nonce", "issued_at", "expires_at")}
    text = action_text(**(fields | changes))
    return {"owner": wallet.address, "message": text, "signature": (signer or wallet).sign(text)}


async def test_a_signed_claim_reserves_everything_pending(served: Gateway) -> None:
    earn(served, 250_099)
    given = await challenge(served)
    assert given["domain"] == DOMAIN
    reply = await served.client.post("/api/node/claim", json=claim_body(ALICE, given))
    claim = reply.json()
    assert reply.status_code == 200
    assert (claim["micro_kvr"], claim["state"], claim["claimed"], claim["signature"]) == (
        2500,
        "reserved",
        0.0025,
        None,
    )
    assert claim["rewards"]["pending"] == 0.0
    listed = (await served.client.get(f"/api/node/claims/{ALICE.address}")).json()["claims"]
    assert [(each["id"], each["micro_kvr"], each["state"]) for each in listed] == [
        (claim["claim_id"], 2500, "reserved")
    ]


async def test_a_claim_works_once(served: Gateway) -> None:
    earn(served, 250_000)
    body = claim_body(ALICE, await challenge(served))
    assert (await served.client.post("/api/node/claim", json=body)).status_code == 200
    earn(served, 900_000)
    again = await served.client.post("/api/node/claim", json=body)
    assert (again.status_code, again.json()["code"]) == (401, "challenge_refused")
    assert len(served.ledger.claims()) == 1


async def test_of_claims_that_race_on_one_nonce_one_is_taken(served: Gateway) -> None:
    earn(served, 250_000)
    body = claim_body(ALICE, await challenge(served))
    replies = await asyncio.gather(*(served.client.post("/api/node/claim", json=body) for _ in range(6)))
    assert sorted(reply.status_code for reply in replies) == [200] + [401] * 5
    assert sum(claim.micro_kvr for claim in served.ledger.claims()) == 2500


async def test_of_claims_that_race_on_many_nonces_one_is_paid(served: Gateway) -> None:
    earn(served, 250_000)
    bodies = [claim_body(ALICE, await challenge(served)) for _ in range(6)]
    replies = await asyncio.gather(*(served.client.post("/api/node/claim", json=body) for body in bodies))
    assert sorted(reply.status_code for reply in replies) == [200] + [400] * 5
    assert sum(claim.micro_kvr for claim in served.ledger.claims()) == 2500


async def test_claims_that_are_not_the_wallets_are_refused(served: Gateway) -> None:
    earn(served, 250_000)
    earn(served, 250_000, BOB)

    async def refused(body: dict[str, Any]) -> str:
        reply = await served.client.post("/api/node/claim", json=body)
        assert reply.status_code in (400, 401), reply.text
        return str(reply.json()["code"])

    assert await refused({"owner": ALICE.address}) == "signature_needed"  # the public gateway would pay
    forged = claim_body(ALICE, await challenge(served), signer=BOB)
    assert await refused(forged) == "signature_refused"
    other_owner = claim_body(ALICE, await challenge(served)) | {"owner": BOB.address}
    assert await refused(other_owner) == "challenge_refused"
    for_bob = await challenge(served, BOB)  # BOB's nonce in ALICE's claim
    assert await refused(claim_body(ALICE, for_bob)) == "challenge_refused"
    for_move = await challenge(served, action="move-node")
    assert await refused(claim_body(ALICE, for_move)) == "challenge_refused"
    other_action = claim_body(ALICE, await challenge(served), action="move-node")
    assert await refused(other_action) == "action_action"
    other_domain = claim_body(ALICE, await challenge(served), domain="evil.example")
    assert await refused(other_domain) == "action_domain"
    with_details = claim_body(ALICE, await challenge(served), details={"to": BOB.address})
    assert await refused(with_details) == "claim_details"
    changed = claim_body(ALICE, await challenge(served))
    changed["message"] = changed["message"].replace("claim", "claim ", 1)
    assert await refused(changed) in ("action_malformed", "action_unknown")
    made_up = claim_body(ALICE, await challenge(served) | {"nonce": "0" * 32})
    assert await refused(made_up) == "challenge_refused"
    assert served.ledger.claims() == ()


async def test_a_claim_expires(served: Gateway) -> None:
    earn(served, 250_000)
    body = claim_body(ALICE, await challenge(served))
    served.clock.now += 301
    reply = await served.client.post("/api/node/claim", json=body)
    assert (reply.status_code, reply.json()["code"]) == (401, "challenge_refused")
    early = claim_body(
        ALICE, await challenge(served) | {"issued_at": "2030-01-01T00:00:00Z", "expires_at": "2030-01-01T00:05:00Z"}
    )
    reply = await served.client.post("/api/node/claim", json=early)
    assert (reply.status_code, reply.json()["code"]) == (401, "action_expired")


async def test_any_name_of_this_gateway_may_be_signed_for(served: Gateway) -> None:
    """The challenge answers with the name the caller used, if it is ours."""
    name = f"127.0.0.1:{served.port}"
    for shown, expected in ((name, name), ("evil.example", DOMAIN), (DOMAIN.upper(), DOMAIN.upper())):
        assert (await challenge(served, Host=shown))["domain"] == expected
    earn(served, 250_000)
    body = claim_body(ALICE, await challenge(served), domain=name)
    assert (await served.client.post("/api/node/claim", json=body)).status_code == 200


@pytest.mark.parametrize(("micro_units", "code"), [(0, "nothing_pending"), (99_999, "below_minimum")])
async def test_less_than_the_minimum_is_not_paid(served: Gateway, micro_units: int, code: str) -> None:
    earn(served, micro_units)
    reply = await served.client.post("/api/node/claim", json=claim_body(ALICE, await challenge(served)))
    assert (reply.status_code, reply.json()["code"]) == (400, code)


async def test_an_unknown_action_has_no_challenge(served: Gateway) -> None:
    body = {"wallet": ALICE.address, "action": "pay-me"}
    assert (await served.client.post("/api/action/challenge", json=body)).status_code == 400


# -- views -----------------------------------------------------------------------------------------------------------


async def test_status_is_exact_and_one_row_a_node(served: Gateway) -> None:
    earn(served, 250_099)
    earn(served, 100_000, worker_id="ring-dense-0", kind="ring", model="dense", platform={})
    earn(served, 500_000, BOB)
    reports = (
        {"worker_id": "w", "model": MOE, "segments": [[1, 0, 8]], "os": "macos", "accelerator": "gpu"},
        {"worker_id": "server-ring", "model": "dense", "segments": [], "os": "linux"},
        {"worker_id": "new", "model": "none", "segments": []},
    )
    for report in reports:
        served.census.report(ALICE.address, parse_report(report), NOW + 5)
    served.clock.now += 10
    status = (await served.client.get(f"/api/node/status/{ALICE.address}")).json()
    assert status["totals"] == {
        "nodes": 3,
        "online": 3,
        "contributedUnits": 0.350099,
        "effectiveUnits": pytest.approx(0.350099),
        "pending": 0.0035,
        "claimedTotal": 0.0,
        "lifetimeRewards": 0.0035,
        "microUnits": 350_099,
        "creditedMicroKvr": 3500,
        "carriedMicroKvr": "99/100",
        "pendingMicroKvr": 3500,
        "claimedMicroKvr": 0,
        "paidMicroKvr": 0,
        "minimumClaimMicroKvr": 1000,
    }
    nodes = {node["nodeId"]: node for node in status["nodes"]}
    assert set(nodes) == {"w", "ring-dense-0", "new"}  # reports and earnings of a machine are one row
    node = nodes["w"]
    assert (node["status"], node["os"], node["accelerator"], node["tier"], node["perfMultiplier"]) == (
        "online",
        "macos",
        "gpu",
        "unrated",
        1.0,
    )
    assert (node["lastReport"], node["microUnits"], node["pendingRewards"]) == (int(NOW) + 5, 250_099, 0.0025)
    assert nodes["ring-dense-0"]["os"] == "linux"
    assert (nodes["new"]["microUnits"], nodes["new"]["mode"]) == (0, "waiting")


@pytest.mark.parametrize(("age_s", "state"), [(299, "online"), (300, "idle"), (3599, "idle"), (3600, "offline")])
async def test_a_node_ages(served: Gateway, age_s: int, state: str) -> None:
    earn(served, 1)
    served.clock.now += age_s
    status = (await served.client.get(f"/api/node/status/{ALICE.address}")).json()
    assert (status["nodes"][0]["status"], status["totals"]["online"]) == (state, int(state == "online"))


async def test_money_moves_through_the_views(served: Gateway) -> None:
    earn(served, 250_099)
    await served.client.post("/api/node/claim", json=claim_body(ALICE, await challenge(served)))

    async def totals() -> tuple[int, int, int, int]:
        found = (await served.client.get(f"/api/node/status/{ALICE.address}")).json()["totals"]
        keys = ("creditedMicroKvr", "pendingMicroKvr", "claimedMicroKvr", "paidMicroKvr")
        credited, pending, claimed, paid = (found[key] for key in keys)
        return credited, pending, claimed, paid

    assert await totals() == (2500, 0, 2500, 0)
    claim = served.ledger.record_attempt(served.ledger.claims()[0].claim_id, "5ig", b"raw", 9, int(NOW))
    assert claim is not None
    served.ledger.advance(claim, ClaimState.CONFIRMED, int(NOW))
    assert await totals() == (2500, 0, 2500, 2500)
    settlement = (await served.client.get("/api/settlement", headers=served.service)).json()
    assert settlement["rows"] == [
        {
            "node_id": "w",
            "wallet": ALICE.address,
            "kind": "expert",
            "model": MOE,
            "micro_units": 250_099,
            "multiplier": "1/1",
            "credited_micro_kvr": 2500,
            "carried_micro_kvr": "99/100",
            "claimed_micro_kvr": 2500,
        }
    ]
    (shown,) = settlement["claims"]
    assert (shown["wallet"], shown["micro_kvr"], shown["state"], shown["signature"]) == (
        ALICE.address,
        2500,
        "confirmed",
        "5ig",
    )


async def test_rewards_are_the_contracts(served: Gateway) -> None:
    earn(served, 250_099)
    rewards = (await served.client.get(f"/api/node/rewards/{ALICE.address}")).json()
    assert (rewards["owner"], rewards["pending"], rewards["rewardPerUnit"]) == (ALICE.address, 0.0025, 0.01)
    assert rewards["nodes"][0]["contributedUnits"] == 0.250099


async def test_the_network_is_shown_without_whole_wallets(served: Gateway) -> None:
    earn(served, 100_000)
    earn(served, 100_000, BOB)
    served.census.report(CAROL.address, parse_report({"worker_id": "c", "model": "m", "os": "macos"}), NOW)
    reply = await served.client.get("/api/node/all")
    everything = reply.json()
    assert everything["totals"] == {
        "nodes": 3,
        "online": 3,
        "owners": 3,
        "effectiveUnits": 0.2,
        "byTier": {"unrated": 3},
        "byOs": {"linux": 2, "macos": 1},
    }
    for wallet in (ALICE, BOB, CAROL):
        assert wallet.address not in reply.text
    assert {node["ownerShort"] for node in everything["nodes"]} == {
        f"{wallet.address[:4]}\u2026{wallet.address[-4:]}" for wallet in (ALICE, BOB, CAROL)
    }
    assert not {"lastReport", "claimedTotal"} & set(everything["nodes"][0])


@pytest.mark.parametrize("view", ["status", "rewards", "claims"])
async def test_a_view_needs_a_wallet(served: Gateway, view: str) -> None:
    assert (await served.client.get(f"/api/node/{view}/nobody")).status_code == 400
    stranger = await served.client.get(f"/api/node/{view}/{CAROL.address}")
    assert stranger.status_code == 200


# -- what the gateway says of itself ---------------------------------------------------------------------------------


async def test_config_has_the_contracts_fields_and_the_extensions(served: Gateway) -> None:
    config = (await served.client.get("/api/config")).json()
    contract = {
        *("cluster", "rpcUrl", "mint", "decimals", "vault", "vaultOwner", "symbol", "aprPercent", "rewardPerUnit"),
        *("perfTiers", "gatewayBonus", "bridgeUptimePerHour", "gatewayUptimePerHour", "publicUrl", "hostOs"),
        "minOperatorKvr",
    }
    assert contract <= set(config)
    assert (config["cluster"], config["decimals"], config["rewardPerUnit"]) == ("devnet", 6, 0.01)
    assert config["perfTiers"][0] == {"tier": "S", "minTps": 90, "mult": 1.5}
    assert (config["vault"], config["vaultOwner"]) == (None, None)  # no payout process has said yet
    assert config["dispatch_wires"] == ["v1", "v2", "v2f16", "v3"]
    assert config["minimumClaimMicroKvr"] == 1000
    assert config["extensions"] == {
        "wires": ["v1", "v2", "v2f16", "v3"],
        "relay_token_header": True,
        "placement": 1,
        "direct_edges": 1,
        "signed_actions": 1,
        "delegation": 1,
        "statements": 1,
        "stage_reports": 1,
        "hub_key": served.identity.hub_key,
        "hub_key_rotations": [],
    }
    served.store.set_fact(TREASURY_FACT, CAROL.address)
    config = (await served.client.get("/api/config")).json()
    assert config["vaultOwner"] == CAROL.address
    assert config["vault"] == associated_token_address(CAROL.address, config["mint"])
    assert (await served.client.get("/api/pay/models")).json()["recipient"] == CAROL.address


async def test_what_is_not_there_is_said_in_the_surfaces_own_words(served: Gateway) -> None:
    unknown = {"type": "invalid_request_error", "code": "unknown_endpoint"}
    for path in ("/api/nothing", "/v1/nothing", "/c/x", "/nothing"):
        reply = await served.client.get(path)
        assert reply.status_code == 404
        assert {key: reply.json()["error"][key] for key in unknown} == unknown
    reply = await served.client.get("/anthropic/v1/messages")
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (
        404,
        "error",
        "invalid_request_error",
    )
    wrong_method = await served.client.get("/v1/chat/completions")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert (await served.client.get("/health")).json() == {"ok": True}


async def test_a_failure_of_ours_shows_nothing_of_the_inside(served: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(served.ledger, "claims", broken)
    async with asyncio.timeout(120):
        reply = await served.client.get(f"/api/node/claims/{ALICE.address}")
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert reply.json()["error"] == {
        "type": "gateway_error",
        "code": "internal",
        "message": "The gateway failed on this request.",
        "detail": "RuntimeError",
    }


async def test_web_wallets_may_read_the_api_but_not_use_the_models(served: Gateway) -> None:
    """Any page a visitor opens could otherwise run his models: on loopback they need no key."""
    preflight = await served.client.options("/api/config", headers={"Origin": "https://wallet.example"})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, "*")
    assert preflight.headers["access-control-allow-headers"] == "Content-Type"
    assert (await served.client.get("/api/config")).headers["access-control-allow-origin"] == "*"
    assert (await served.client.get("/api/node/status/x")).headers["access-control-allow-origin"] == "*"
    refused = await served.client.options("/v1/chat/completions", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers
