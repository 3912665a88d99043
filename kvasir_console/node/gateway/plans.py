"""Placement plans of the rings this gateway serves: built from the configuration, numbered, signed by the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvasir_console.errors import ConfigError, KvasirError, UsageError
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
    configured: str = ""
    """The stages as the operator wrote them, before any window moved: canonical JSON."""

    def names(self, wallet: str) -> bool:
        """Whether the wallet serves a window, or stands by for one."""
        return any(wallet in (stage.wallet, *stage.replicas) for stage in self.plan.stages)

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
    stages = tuple(
        PlannedStage(rank, wallet, begin, end, replicas)
        for rank, ((wallet, begin, end), replicas) in enumerate(zip(model.ring, model.replicas, strict=True))
    )
    for wallet in (each for stage in stages for each in (stage.wallet, *stage.replicas)):
        if not is_address(wallet):
            raise ConfigError(
                "bad_ring", f"gateway.models {model.id}: {wallet[:60]!r} is not a wallet.", "Name wallets in ring."
            )
    draft = Plan(model.id, model.id, model.digest.hex(), model.shape.n_layer, 0, stages)
    try:
        Plan.from_dict(draft.to_dict())
    except KvasirError as error:
        raise ConfigError("bad_ring", f"gateway.models {model.id}: {error.message}", "Correct its ring.") from error
    configured = canonical_json(draft.to_dict())
    return _in_force(_moved(draft, configured, store), configured, store, identity)


def move_ring(ring: PlannedRing, rank: int, wallet: str, store: Store, identity: Identity) -> PlannedRing:
    """The ring's next generation, in which ``wallet`` serves the window ``rank``. Blocks; call it from a thread.

    Raises:
        UsageError: the wallet is none, or serves the window already.
    """
    if not is_address(wallet):
        raise UsageError("bad_wallet", f"{wallet[:60]!r} is not a wallet.")
    try:
        plan = ring.plan.moved(rank, wallet, 0)
    except ValueError as error:
        raise UsageError("bad_move", f"The window cannot move: {error}.") from error
    kept = canonical_json({"configured": ring.configured, "plan": plan.to_dict()})
    return _in_force(plan, ring.configured, store, identity, (_fact(plan.ring), kept))


def _in_force(
    draft: Plan, configured: str, store: Store, identity: Identity, kept: tuple[str, str] | None = None
) -> PlannedRing:
    """Number and sign a plan, and set the fact ``kept`` with it; ``draft`` has the generation 0."""
    plan = replace(draft, generation=store.plan_generation(draft.ring, canonical_json(draft.to_dict()), kept))
    return PlannedRing(plan, sign_plan(plan, identity.sign_as_hub), configured)


def _moved(draft: Plan, configured: str, store: Store) -> Plan:
    """The plan that was made out of this configuration when windows moved, else the configured one itself.

    What was made out of another configuration is forgotten: it must not come back with it.
    """
    kept = store.fact(_fact(draft.ring))
    if kept is None:
        return draft
    found = json.loads(kept)
    if found["configured"] == configured:
        return Plan.from_dict(found["plan"])
    store.set_fact(_fact(draft.ring), canonical_json({"configured": configured, "plan": draft.to_dict()}))
    return draft


def read_seen(store: Store, ring: str) -> frozenset[str]:
    """The wallets that have served a window of the ring at some time. Blocks."""
    return frozenset(json.loads(store.fact(_seen(ring)) or "[]"))


def write_seen(store: Store, ring: str, wallets: Iterable[str]) -> None:
    """Blocks."""
    store.set_fact(_seen(ring), canonical_json(sorted(wallets)))


def _seen(ring: str) -> str:
    return f"ring-seen:{ring}"


def _fact(ring: str) -> str:
    return f"ring-moved:{ring}"


def plan_from_text(text: str) -> Plan:
    """A plan that the store kept beside the work done under it."""
    return Plan.from_dict(json.loads(text))
