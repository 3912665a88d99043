"""Placement plans of the rings this gateway serves: built from the configuration, numbered, signed by the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvasir_console.errors import ConfigError, KvasirError
from kvasir_console.node.gateway.catalog import CatalogModel
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.placement.plan import Plan, PlannedStage, sign_plan
from kvasir_console.relay.wire.signed import canonical_json
from kvasir_console.wallet.keys import is_address


@dataclass(frozen=True, slots=True)
class PlannedRing:
    """A ring in force: its plan, and the plan as ``/api/placement`` serves it."""

    plan: Plan
    signed: dict[str, Any]

    def names(self, wallet: str) -> bool:
        return any(stage.wallet == wallet for stage in self.plan.stages)

    @property
    def text(self) -> str:
        return canonical_json(self.plan.to_dict())


def make_rings(models: Iterable[CatalogModel], store: Store, identity: Identity) -> dict[str, PlannedRing]:
    """The plan of every ring model, by ring id (the model's id). Blocks; call it from a thread.

    A plan whose content changed gets the next generation, so that a rank of the old placement cannot write to the new.

    Raises:
        ConfigError: the configured windows are no plan.
    """
    return {model.id: _make_ring(model, store, identity) for model in models if model.placement == "ring"}


def _make_ring(model: CatalogModel, store: Store, identity: Identity) -> PlannedRing:
    stages = tuple(PlannedStage(rank, wallet, begin, end) for rank, (wallet, begin, end) in enumerate(model.ring))
    for stage in stages:
        if not is_address(stage.wallet):
            raise ConfigError(
                "bad_ring",
                f"gateway.models {model.id}: {stage.wallet[:60]!r} is not a wallet.",
                "Name wallets in ring.",
            )
    draft = Plan(model.id, model.id, model.digest.hex(), model.shape.n_layer, 0, stages)
    try:
        Plan.from_dict(draft.to_dict())
    except KvasirError as error:
        raise ConfigError("bad_ring", f"gateway.models {model.id}: {error.message}", "Correct its ring.") from error
    generation = store.plan_generation(model.id, canonical_json(draft.to_dict()))
    plan = Plan(model.id, model.id, model.digest.hex(), model.shape.n_layer, generation, stages)
    return PlannedRing(plan, sign_plan(plan, identity.sign_as_hub))


def plan_from_text(text: str) -> Plan:
    """A plan that the store kept beside the work done under it."""
    return Plan.from_dict(json.loads(text))
