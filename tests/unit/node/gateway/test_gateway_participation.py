"""The participation API over a real server: the contract's routes, and whom they refuse."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from gateway_parts import ALICE, BOB, CAROL, DENSE, MOE, N_EXPERT, N_LAYER, NOW, Gateway, Wallet, gateway

from kvasir_console.config import ServedModel
from kvasir_console.engine.checkpoint.digest import model_digest, source_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import verify_shard, verify_stage
from kvasir_console.node.gateway.census import STALE_S
from kvasir_console.node.gateway.store import NONCE_TTL_S
from kvasir_console.node.gateway.tables import nonces
from kvasir_console.node.placement.plan import verify_plan
from kvasir_console.relay.wire.signed import mint_node_token, read_node_token

VECTORS = json.loads((Path(__file__).parents[3] / "data/conformance/signed_messages.json").read_text())
SHARD = f"/api/proxy/models/{MOE}/expert-shard"
STAGE = f"/api/proxy/models/{DENSE}/stage"


@pytest.fixture
async def served(tmp_path: Path, models: tuple[ServedModel, ...]) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path, models=models) as running:
        yield running


# -- signing in ------------------------------------------------------------------------------------------------------


async def test_a_wallet_signs_in(served: Gateway) -> None:
    challenge = (await served.client.post("/api/auth/challenge", json={"wallet": ALICE.address})).json()
    wanted = next(message for message in VECTORS["messages"] if message["kind"] == "bridge_node_token")
    fields = wanted["fields"]
    text = wanted["text"].replace(fields["wallet"], ALICE.address).replace(fields["nonce"], challenge["nonce"])
    assert challenge == {"nonce": challenge["nonce"], "message": text}
    assert len(bytes.fromhex(challenge["nonce"])) == 16
    body = {"wallet": ALICE.address, "nonce": challenge["nonce"], "signature": ALICE.sign(text)}
    reply = await served.client.post("/api/auth/node-token", json=body)
    assert reply.status_code == 200
    token = reply.json()
    assert (token["wallet"], token["expires_in"]) == (ALICE.address, 30 * 86_400)
    assert read_node_token(token["node_token"]).wallet == ALICE.address
    assert read_node_token(token["node_token"]).expiry == int(NOW) + 30 * 86_400
    assert (await served.client.post("/api/auth/node-token", json=body)).status_code == 401  # the nonce is spent


async def _challenge(served: Gateway) -> tuple[str, str]:
    challenge = (await served.client.post("/api/auth/challenge", json={"wallet": ALICE.address})).json()
    return challenge["nonce"], challenge["message"]


async def test_a_wrong_answer_spends_the_challenge(served: Gateway) -> None:
    def answers(message: str) -> dict[str, dict[str, str]]:
        return {
            "other wallet's signature": {"signature": BOB.sign(message)},
            "other text": {"signature": ALICE.sign(message + "\n")},
            "garbage": {"signature": base64.b64encode(bytes(64)).decode()},
            "not base64": {"signature": "?"},
            "foreign wallet": {"wallet": BOB.address, "signature": BOB.sign(message)},
        }

    for wrong in answers(""):
        nonce, message = await _challenge(served)
        body = {"wallet": ALICE.address, "nonce": nonce, "signature": ALICE.sign(message)}
        reply = await served.client.post("/api/auth/node-token", json=body | answers(message)[wrong])
        assert (reply.status_code, set(reply.json())) == (401, {"error", "code"}), wrong
        assert (await served.client.post("/api/auth/node-token", json=body)).status_code == 401, wrong


async def test_an_expired_challenge_is_refused(served: Gateway) -> None:
    nonce, message = await _challenge(served)
    served.clock.now += NONCE_TTL_S
    body = {"wallet": ALICE.address, "nonce": nonce, "signature": ALICE.sign(message)}
    assert (await served.client.post("/api/auth/node-token", json=body)).status_code == 401


async def test_signatures_are_checked_strictly(served: Gateway) -> None:
    """The malleable twin and the like, for the text and wallet of the vectors."""
    vectors = VECTORS["wrong_signatures"]
    wallet, nonce = vectors["wallet"], vectors["text"].rpartition("nonce: ")[2]
    row = {"wallet": wallet, "purpose": "node-token", "address": "", "issued_at": 0, "expires_at": int(NOW) + 9}
    cases = {case["name"]: case["signature"] for case in vectors["cases"]}
    for name, signature in (cases | {"right": vectors["right_signature_base64"]}).items():
        with served.store.write() as connection:
            connection.execute(nonces.delete())
            connection.execute(nonces.insert().values(nonce=nonce, **row))
        body = {"wallet": wallet, "nonce": nonce, "signature": signature}
        reply = await served.client.post("/api/auth/node-token", json=body)
        assert reply.status_code in ((200,) if name == "right" else (400, 401)), name


async def test_a_challenge_needs_a_wallet(served: Gateway) -> None:
    for wallet in (None, "", "x", 7, "1" * 45, ALICE.address + "1"):
        reply = await served.client.post("/api/auth/challenge", json={"wallet": wallet})
        assert (reply.status_code, set(reply.json())) == (400, {"error", "code"}), wallet


async def test_too_many_challenges_from_one_address_are_refused(served: Gateway) -> None:
    with served.store.write() as connection:
        row = {"wallet": "w", "purpose": "node-token", "address": "203.0.113.9"}
        times = {"issued_at": int(NOW), "expires_at": int(NOW) + 300}
        connection.execute(nonces.insert(), [{"nonce": str(i), **row, **times} for i in range(1000)])
    body = {"wallet": ALICE.address}
    from_there = await served.client.post("/api/auth/challenge", json=body, headers={"X-Forwarded-For": "203.0.113.9"})
    assert from_there.status_code == 429
    from_here = await served.client.post("/api/auth/challenge", json=body, headers={"X-Forwarded-For": "203.0.113.8"})
    assert from_here.status_code == 200


# -- who may call ----------------------------------------------------------------------------------------------------

NODE_ROUTES = [
    ("GET", "/api/expert-demand"),
    ("POST", "/api/expert-volunteer"),
    ("POST", "/api/expert-coverage"),
    ("GET", f"{SHARD}?layer=0&expert_begin=0&expert_end=1"),
    ("GET", f"{STAGE}?layer_begin=0&layer_end=1"),
    ("GET", "/api/placement"),
]


async def test_nothing_is_given_without_a_token(served: Gateway) -> None:
    forged = mint_node_token(b"another secret, 32 bytes long...", ALICE.address, int(NOW) + 1000)
    expired = mint_node_token(served.secrets.node_token_key, ALICE.address, int(NOW) - 1)
    shown = (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {forged}"},
        {"Authorization": f"Bearer {expired}"},
        {"Authorization": f"Basic {forged}"},
        {"X-Kvasir-Service-Token": "wrong-service-token"},
    )
    for (method, path), headers in itertools.product(NODE_ROUTES, shown):
        reply = await served.client.request(method, path, headers=headers, json={} if method == "POST" else None)
        assert (reply.status_code, set(reply.json())) == (401, {"error", "code"}), (path, headers)


async def test_a_node_token_is_also_taken_in_the_service_header(served: Gateway) -> None:
    """As the public bridge does (node contract, section 2)."""
    token = (await served.token(ALICE))["Authorization"].removeprefix("Bearer ")
    reply = await served.client.get("/api/expert-demand", headers={"X-Kvasir-Service-Token": token})
    assert reply.status_code == 200


async def test_the_operators_routes_need_the_service_token(served: Gateway) -> None:
    node = await served.token(ALICE)
    for path in ("/api/expert-relay/sessions", "/api/contributions", "/api/settlement"):
        assert (await served.client.get(path)).status_code == 401
        refused = await served.client.get(path, headers=node)
        assert (refused.status_code, refused.headers["x-kvasir-error"]) == (403, "service_token_needed")
        assert (await served.client.get(path, headers=served.service)).status_code == 200
        bearer = {"Authorization": f"Bearer {served.secrets.service_token}"}
        assert (await served.client.get(path, headers=bearer)).status_code == 200


async def test_a_wrong_method_is_told_the_right_one(served: Gateway) -> None:
    for method, path, allow in (
        ("GET", "/api/expert-volunteer", {"POST"}),
        ("POST", "/api/expert-demand", {"GET", "HEAD"}),
    ):
        reply = await served.client.request(method, path)
        assert reply.status_code == 405
        assert set(reply.headers["allow"].replace(" ", "").split(",")) == allow


# -- the market ------------------------------------------------------------------------------------------------------


async def test_demand_is_as_the_contract_shows_it(served: Gateway) -> None:
    reply = (await served.client.get("/api/expert-demand", headers=await served.token(ALICE))).json()
    whole = {"experts": [0, N_EXPERT], "replicas": 0, "target": 2, "scarcity": 1.0}
    assert reply == {
        "target_replicas": 2,
        "recruiting": True,
        "models": [
            {
                "model": MOE,
                "n_layer": N_LAYER,
                "n_expert": N_EXPERT,
                "target_replicas": 2,
                "recruiting": True,
                "layers": [{"layer": layer, "segments": [whole]} for layer in range(N_LAYER)],
            }
        ],
    }
    for query, count in ((f"?model={MOE}", 1), (f"?model=some/dir/{MOE}", 1), ("?model=other", 0)):
        reply = await served.client.get(f"/api/expert-demand{query}", headers=await served.token(ALICE))
        assert len(reply.json()["models"]) == count


async def test_from_assignment_to_wired(served: Gateway) -> None:
    token = await served.token(ALICE)
    reply = await served.client.post("/api/expert-volunteer", headers=token, json={"max_experts": 8})
    assignment = reply.json()
    assert assignment == {
        "assigned": True,
        "model": MOE,
        "layer": 0,
        "experts": [0, 8],
        "scarcity": 1.0,
        "replicas": 0,
        "target": 2,
        "n_embd": 64,
        "n_layer": N_LAYER,
        "n_expert": N_EXPERT,
    }
    body = {
        "worker_id": "server-alice",
        "model": MOE,
        "segments": [[0, 0, 8]],
        "owner": BOB.address,  # advice at most
        "url": "relay:expert-server-alice",
        "os": "linux",
        "wires": ["v1", "v2"],
    }
    reply = await served.client.post("/api/expert-coverage", headers=token, json=body)
    assert reply.json() == {
        "ok": True,
        "workers": 1,
        "wired": True,
        "listen_port": 0,
        "session": "expert-server-alice",
    }
    listed = (await served.client.get("/api/expert-relay/sessions", headers=served.service)).json()
    assert listed == {
        "sessions": [
            {
                "session": "expert-server-alice",
                "node_id": "server-alice",
                "owner": ALICE.address,
                "model": MOE,
                "layer": 0,
                "experts": [0, 8],
                "listen_host": "127.0.0.1",
                "listen_port": 0,
                "claimed_at": int(NOW * 1000),
                "connected": False,
                "bytes": None,
            }
        ]
    }


async def test_a_volunteer_without_a_window_is_told_why(served: Gateway) -> None:
    token = await served.token(ALICE)
    reply = await served.client.post("/api/expert-volunteer", headers=token, json={"model": "no-such"})
    assert reply.status_code == 200
    assert reply.json()["assigned"] is False
    assert "no-such" in reply.json()["reason"]


async def test_a_malformed_volunteer_is_refused(served: Gateway) -> None:
    token = await served.token(ALICE)
    for body in ({"max_experts": -1}, {"max_experts": "8"}, {"max_experts": 1.5}, {"model": 7}, []):
        reply = await served.client.post("/api/expert-volunteer", headers=token, json=body)
        assert reply.status_code == 400, body


async def test_a_session_name_of_another_wallet_is_taken(served: Gateway) -> None:
    body = {"worker_id": "w", "model": MOE, "segments": []}
    assert (
        await served.client.post("/api/expert-coverage", headers=await served.token(ALICE), json=body)
    ).status_code == 200
    bob = await served.token(BOB)
    taken = await served.client.post("/api/expert-coverage", headers=bob, json=body)
    assert (taken.status_code, taken.json()["code"]) == (409, "relay_session_taken")
    own = await served.client.post("/api/expert-coverage", headers=bob, json=body | {"url": "relay:expert-w-bob"})
    assert own.json()["workers"] == 2


async def test_a_malformed_report_is_refused(served: Gateway) -> None:
    token = await served.token(ALICE)
    for body, code in (
        ({"model": MOE}, "missing_field"),
        ({"worker_id": "w"}, "missing_field"),
        ({"worker_id": "w", "model": MOE, "url": "relay:ring-x"}, "bad_relay_session"),
        ({"worker_id": "w", "model": MOE, "url": "relay:"}, "bad_relay_session"),
    ):
        reply = await served.client.post("/api/expert-coverage", headers=token, json=body)
        assert (reply.status_code, reply.json()["code"]) == (400, code), body


async def test_the_operators_machine_reports_for_a_named_wallet(served: Gateway) -> None:
    body = {"worker_id": "w", "model": MOE, "segments": [], "url": "relay:ring-x"}
    assert (await served.client.post("/api/expert-coverage", headers=served.service, json=body)).status_code == 400
    named = body | {"owner": CAROL.address}
    assert (await served.client.post("/api/expert-coverage", headers=served.service, json=named)).status_code == 200
    assert served.census.workers(NOW)[0].wallet == CAROL.address
    volunteer = await served.client.post("/api/expert-volunteer", headers=served.service, json={})
    assert volunteer.status_code == 403  # it is done for a wallet


async def test_a_body_that_is_no_json_object_is_refused(served: Gateway) -> None:
    headers = await served.token(ALICE) | {"Content-Type": "application/json"}
    for content in (b"{", b"[1]", b'"x"', b'{"max_experts": NaN}', b"\xff", b"[" * 100_000):
        reply = await served.client.post("/api/expert-volunteer", headers=headers, content=content)
        assert (reply.status_code, reply.json()["code"]) == (400, "malformed_json"), content[:9]


async def test_a_body_is_at_most_two_megabytes(served: Gateway) -> None:
    token = await served.token(ALICE)
    fitting = b'{"model": "' + b"x" * (2_000_000 - 13) + b'"}'
    assert len(fitting) == 2_000_000
    assert (await served.client.post("/api/expert-volunteer", headers=token, content=fitting)).status_code == 200

    async def chunks() -> AsyncIterator[bytes]:  # no length is announced
        for _ in range(40):
            yield b" " * 100_000

    for content in (fitting + b" ", chunks()):
        reply = await served.client.post("/api/expert-volunteer", headers=token, content=content)
        assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")


# -- slices ----------------------------------------------------------------------------------------------------------


async def test_an_expert_shard_is_cut_whole_and_resumable(
    served: Gateway, tmp_path: Path, models: tuple[ServedModel, ...]
) -> None:
    token = await served.token(ALICE)
    query = {"layer": "1", "expert_begin": "3", "expert_end": "7"}
    reply = await served.client.get(SHARD, params=query, headers=token)
    assert reply.status_code == 200
    assert int(reply.headers["content-length"]) == len(reply.content)
    with Checkpoint.open(Path(models[0].path)) as source:
        assert reply.headers["x-kvasir-shard-digest"] == source_digest(source)
        digest = model_digest(source)
    file = tmp_path / "shard.gguf"
    file.write_bytes(reply.content)
    with Checkpoint.open(file) as shard:
        info = verify_shard(shard, model=MOE, layer=1, begin=3, end=7, model_digest=digest, require_hashes=True)
    assert (info.n_embd, info.n_expert_total) == (64, N_EXPERT)
    # The bytes are the source's own, read by another implementation.
    whole = {tensor.name: tensor for tensor in gguf.GGUFReader(Path(models[0].path)).tensors}
    for tensor in gguf.GGUFReader(file).tensors:
        assert (tensor.data == whole[tensor.name].data[3:7]).all()
    part = await served.client.get(
        SHARD, params=query, headers=token | {"Range": "bytes=1000-", "If-Range": reply.headers["etag"]}
    )
    assert (part.status_code, part.content) == (206, reply.content[1000:])
    past = await served.client.get(SHARD, params=query, headers=token | {"Range": f"bytes={len(reply.content)}-"})
    assert past.status_code == 416


async def test_a_shard_that_many_ask_for_is_cut_once(served: Gateway, tmp_path: Path) -> None:
    token = await served.token(ALICE)
    query = {"layer": "0", "expert_begin": "0", "expert_end": "64"}
    replies = await asyncio.gather(*(served.client.get(SHARD, params=query, headers=token) for _ in range(6)))
    assert len({reply.headers["etag"] for reply in replies}) == 1
    assert len({reply.content for reply in replies}) == 1
    assert [file.name for file in (tmp_path / "slices").rglob("*") if file.is_file()] == ["L0_e000-064.gguf"]


async def test_a_range_is_refused_never_clamped(served: Gateway) -> None:
    token = await served.token(ALICE)
    for query, status in (
        ("layer=0&expert_begin=0&expert_end=65", 413),
        (f"layer=0&expert_begin=0&expert_end={N_EXPERT + 1}", 400),
        (f"layer={N_LAYER}&expert_begin=0&expert_end=1", 400),
        ("layer=0&expert_begin=4&expert_end=4", 400),
        ("layer=0&expert_begin=5&expert_end=4", 400),
        ("layer=-1&expert_begin=0&expert_end=1", 400),
        ("layer=0&expert_begin=0x0&expert_end=1", 400),
        ("layer=0&expert_begin=0", 400),
        ("", 400),
    ):
        reply = await served.client.get(f"{SHARD}?{query}", headers=token)
        assert reply.status_code == status, query


async def test_a_model_that_is_not_served_is_not_found(served: Gateway) -> None:
    token = await served.token(ALICE)
    for model in ("no-such", "..%2f..%2fetc", "%2e%2e"):
        path = f"/api/proxy/models/{model}/expert-shard?layer=0&expert_begin=0&expert_end=1"
        assert (await served.client.get(path, headers=token)).status_code == 404


async def test_a_dense_model_has_no_experts_to_give(served: Gateway) -> None:
    path = f"/api/proxy/models/{DENSE}/expert-shard?layer=0&expert_begin=0&expert_end=1"
    assert (await served.client.get(path, headers=await served.token(ALICE))).status_code == 400


async def test_a_stage_is_for_the_wallet_the_plan_names(
    served: Gateway, tmp_path: Path, models: tuple[ServedModel, ...]
) -> None:
    query = {"layer_begin": "1", "layer_end": "4"}
    for stranger in (ALICE, CAROL):
        refused = await served.client.get(STAGE, params=query, headers=await served.token(stranger))
        assert (refused.status_code, refused.json()["code"]) == (403, "not_in_plan")
    bob = await served.token(BOB)
    wider = await served.client.get(STAGE, params={"layer_begin": "0", "layer_end": "4"}, headers=bob)
    assert wider.status_code == 403
    reply = await served.client.get(STAGE, params=query, headers=bob)
    assert reply.status_code == 200
    file = tmp_path / "stage.gguf"
    file.write_bytes(reply.content)
    with Checkpoint.open(Path(models[1].path)) as source, Checkpoint.open(file) as stage:
        shape = verify_stage(stage, model=DENSE, begin=1, end=4, model_digest=model_digest(source))
        assert shape.n_layer == 4
        assert reply.headers["x-kvasir-shard-digest"] == source_digest(source)


# -- placement -------------------------------------------------------------------------------------------------------


async def test_plans_are_signed_and_shown_to_whom_they_name(served: Gateway) -> None:
    config = (await served.client.get("/api/config")).json()
    assert config["extensions"]["placement"] == 1
    replies = {
        wallet.label: (await served.client.get("/api/placement", headers=await served.token(wallet))).json()["plans"]
        for wallet in (ALICE, BOB, CAROL)
    }
    assert replies["carol"] == []
    assert replies["alice"] == replies["bob"]
    plan = verify_plan(replies["alice"][0], config["extensions"]["hub_key"])
    assert [(stage.wallet, stage.begin, stage.end) for stage in plan.stages] == [
        (ALICE.address, 0, 1),
        (BOB.address, 1, 4),
    ]
    assert (plan.ring, plan.model, plan.generation) == (DENSE, DENSE, 1)
    service = (await served.client.get("/api/placement", headers=served.service)).json()["plans"]
    assert service == replies["alice"]


async def test_neighbours_in_a_ring_are_introduced_and_nobody_else(served: Gateway) -> None:
    assert (await served.client.get("/api/config")).json()["extensions"]["direct_edges"] == 1

    async def told(wallet: Wallet) -> dict[tuple[int, str], dict[str, Any]]:
        edges = (await served.client.get("/api/edges", headers=await served.token(wallet))).json()["edges"]
        assert all(each["ring"] == DENSE for each in edges)
        return {(each["edge"], each["role"]): each for each in edges}

    async def report(wallet: Wallet, model: str = DENSE, **direct: object) -> None:
        body = {"worker_id": f"of-{wallet.label}", "model": model, "segments": [], "direct": direct or None}
        reply = await served.client.post("/api/expert-coverage", json=body, headers=await served.token(wallet))
        assert reply.status_code == 200

    place = {"address": "bob.example:7443", "certificate": "ab" * 32}
    assert await told(CAROL) == {}
    alice, bob = await told(ALICE), await told(BOB)
    assert set(alice) == {(0, "P"), (1, "N")}
    assert set(bob) == {(1, "P"), (0, "N")}
    # Both ends of an edge have the same ticket, another than that of the other edge, and no address so far.
    assert alice[0, "P"]["ticket"] == bob[0, "N"]["ticket"]
    assert alice[1, "N"]["ticket"] == bob[1, "P"]["ticket"]
    assert alice[0, "P"]["ticket"] != alice[1, "N"]["ticket"]
    assert not any("address" in each for each in (*alice.values(), *bob.values()))

    await report(BOB, **place)
    assert {name: (await told(ALICE))[0, "P"][name] for name in place} == place
    assert "address" not in (await told(BOB))[0, "N"]  # who listens is not told where others are
    for wrong in ({"address": "bob.example:0"}, {"address": "http://x/"}, {"certificate": "zz"}, {"certificate": 5}):
        await report(BOB, **(place | wrong))
        assert "address" not in (await told(ALICE))[0, "P"]
    await report(BOB, model="another", **place)
    assert "address" not in (await told(ALICE))[0, "P"]
    await report(BOB, **place)
    served.clock.now += STALE_S + 1
    assert "address" not in (await told(ALICE))[0, "P"]

    moved = replace(served.rings[DENSE].plan, generation=2)
    served.rings[DENSE] = replace(served.rings[DENSE], plan=moved)
    assert (await told(ALICE))[0, "P"]["ticket"] != alice[0, "P"]["ticket"]
    assert (await served.client.get("/api/edges")).status_code == 401
