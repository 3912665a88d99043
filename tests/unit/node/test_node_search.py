"""Which slice a node is to serve: what plans and the market say, and what its owner allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nacl.signing import SigningKey
from node_parts import PLAN, A, B, C, Told, knows, signed

from kvasir_console.config import EngineConfig, NodeConfig
from kvasir_console.errors import NetworkError
from kvasir_console.node.holding import ExpertHolding, RingHolding
from kvasir_console.node.search import NO_PLAN, Search

ENGINE = EngineConfig(context_length=128, kv_budget_mib=3)
NOTHING = {"assigned": False, "reason": "Every slice has its replicas."}


def assigned(layer: int, model: str = "moe") -> dict[str, Any]:
    return {
        "assigned": True,
        "model": model,
        "layer": layer,
        "experts": [2, 6],
        "n_embd": 576,
        "n_layer": 30,
        "n_expert": 8,
    }


def searching(gateway: Told, directory: Path, wallet: str, **node: Any) -> Search:
    evidence = directory / "evidence"
    credentials, pin = gateway.credentials(directory, wallet), directory / "hub-key"
    return Search(gateway.market, credentials, NodeConfig(**node), ENGINE, wallet, "box", pin, evidence)


@pytest.mark.parametrize("serve", ["auto", "ring"])
async def test_a_plans_window_comes_first(tmp_path: Path, serve: str) -> None:
    gateway = Told(placement={"plans": [signed(PLAN)]})
    found = await searching(gateway, tmp_path, A, serve=serve).look(knows())
    assert found == RingHolding(PLAN, A, 128, 3 * 2**20, tmp_path / "evidence")
    assert [path for path, _ in gateway.asked] == ["/api/placement"]


async def test_a_window_comes_before_standing_by_for_another(tmp_path: Path) -> None:
    other = replace(PLAN, ring="r2")
    served = replace(PLAN, stages=(replace(PLAN.stages[0], wallet=B, replicas=()), PLAN.stages[1]))
    gateway = Told(placement={"plans": [signed(other), signed(served)]})
    found = await searching(gateway, tmp_path, B).look(knows())
    assert isinstance(found, RingHolding)
    assert found.plan == served


async def test_who_stands_by_is_told_for_which_plan_and_takes_no_experts(tmp_path: Path) -> None:
    gateway = Told(placement={"plans": [signed(PLAN)]})
    assert await searching(gateway, tmp_path, B).look(knows()) == PLAN
    assert [path for path, _ in gateway.asked] == ["/api/placement"]


async def test_without_a_plan_the_market_assigns_experts(tmp_path: Path) -> None:
    gateway = Told(placement={"plans": [signed(PLAN)]}, expert_volunteer=assigned(3))
    found = await searching(gateway, tmp_path, C, model="moe", max_experts=100).look(knows())
    assert isinstance(found, ExpertHolding)
    assert (found.assignment.layer, found.more, found.worker_id, found.wallet) == (3, (), "box", C)
    assert gateway.asked[-1] == ("/api/expert-volunteer", {"max_experts": 64, "model": "moe"})


async def test_an_owner_who_wants_experts_is_asked_for_no_plan(tmp_path: Path) -> None:
    gateway = Told(expert_volunteer=NOTHING)
    assert await searching(gateway, tmp_path, A, serve="experts").look(knows()) == NOTHING["reason"]
    assert [path for path, _ in gateway.asked] == ["/api/expert-volunteer"]


async def test_an_owner_who_wants_layers_takes_no_experts(tmp_path: Path) -> None:
    gateway = Told(placement={"plans": []})
    assert await searching(gateway, tmp_path, A, serve="ring").look(knows()) == NO_PLAN
    assert await searching(gateway, tmp_path, A, serve="ring").look(knows(placement=False)) == NO_PLAN
    assert [path for path, _ in gateway.asked] == ["/api/placement"]


@pytest.mark.parametrize(
    ("answers", "layers"),
    [
        ([assigned(3), assigned(4), assigned(5), assigned(6)], [3, 4, 5]),
        ([assigned(3), NOTHING], [3]),
        ([assigned(3), assigned(4), assigned(3)], [3, 4]),
        ([assigned(3), assigned(4, "another")], [3]),
    ],
)
async def test_further_layers_are_those_of_one_model_while_the_market_wants_them(
    tmp_path: Path, answers: list[dict[str, Any]], layers: list[int]
) -> None:
    gateway = Told(expert_volunteer=answers)
    search = searching(gateway, tmp_path, A, serve="experts", max_slices=3)
    found = await search.look(knows(dispatch_wires=("v3",)))
    assert isinstance(found, ExpertHolding)
    assert [each.layer for each in found.assignments] == layers
    assert [body.get("model") for _, body in gateway.asked[1:]] == ["moe"] * (len(gateway.asked) - 1)


async def test_one_layer_is_all_where_the_wire_knows_no_more(tmp_path: Path) -> None:
    gateway = Told(expert_volunteer=[assigned(3), assigned(4)])
    found = await searching(gateway, tmp_path, A, serve="experts", max_slices=3).look(knows(dispatch_wires=("v2",)))
    assert isinstance(found, ExpertHolding)
    assert found.more == ()


@pytest.mark.parametrize(("wallet", "serve", "named"), [(A, "auto", True), (B, "auto", True), (A, "experts", False)])
async def test_a_plan_that_names_the_wallet_comes_before_experts_unless_its_owner_says_otherwise(
    tmp_path: Path, wallet: str, serve: str, named: bool
) -> None:
    gateway = Told(placement={"plans": [signed(PLAN)]})
    search = searching(gateway, tmp_path, wallet, serve=serve)
    assert await search.named(knows()) is named
    assert not await search.named(knows(placement=False))


async def test_the_plan_that_is_served_is_the_one_with_a_window(tmp_path: Path) -> None:
    gateway = Told(placement={"plans": [signed(PLAN)]})
    assert await searching(gateway, tmp_path, A).planned(knows()) == PLAN
    assert await searching(gateway, tmp_path, B).planned(knows()) is None


async def test_a_plan_of_another_hub_is_refused(tmp_path: Path) -> None:
    gateway = Told(placement={"plans": [signed(PLAN, SigningKey(bytes(32)))]})
    with pytest.raises(NetworkError) as caught:
        await searching(gateway, tmp_path, A).look(knows())
    assert caught.value.code == "plan_not_signed"
