"""Introduces the two ends of a ring's edge to each other, so that it may go past the relay (``relay.direct``)."""

from __future__ import annotations

from typing import Any

from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.coverage import Reached
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.plans import PlannedRing


def introductions(
    ring: PlannedRing, wallet: str, census: Census, identity: Identity, now: float
) -> list[dict[str, Any]]:
    """What ``wallet`` is told of the edges of its window: a ticket for each, and for the one that it dials where the
    successor listens, if it said so lately."""
    plan = ring.plan
    stage = plan.stage_of(wallet)
    if stage is None or len(plan.stages) < 2:
        return []
    before, after = (stage.rank - 1) % len(plan.stages), (stage.rank + 1) % len(plan.stages)
    reached = _reached(census, plan.stages[after].wallet, plan.model, now)
    told: list[dict[str, Any]] = []
    for edge, role in ((stage.rank, "P"), (before, "N")):
        ticket = identity.edge_ticket(plan.ring, plan.generation, edge)
        told.append({"ring": plan.ring, "edge": edge, "role": role, "ticket": ticket})
    if reached is not None:
        told[0] |= {"address": reached.address, "certificate": reached.certificate}
    return told


def _reached(census: Census, wallet: str, model: str, now: float) -> Reached | None:
    """By the latest report of a wallet's nodes."""
    workers = [each for each in census.workers(now, wallet) if each.model == model]
    latest = max(workers, key=lambda each: each.last_at, default=None)
    return None if latest is None else latest.direct
