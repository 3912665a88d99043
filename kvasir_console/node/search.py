"""Which slice a node is to serve: the window that a signed plan gives its wallet, else experts from the market."""

from __future__ import annotations

from pathlib import Path

from kvasir_console.config import EngineConfig, NodeConfig
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.holding import ExpertHolding, RingHolding, choose_plan, verified_plans
from kvasir_console.node.market import Assignment, GatewayInfo, Market
from kvasir_console.node.placement.plan import Plan

NO_PLAN = "No signed plan names this wallet."


class Search:
    """Asks the gateway; keeps nothing but the hub's key. Every method raises ``KvasirError``."""

    def __init__(
        self,
        market: Market,
        credentials: Credentials,
        node: NodeConfig,
        engine: EngineConfig,
        wallet: str,
        worker_id: str,
        pin_file: Path,
        evidence: Path,
    ) -> None:
        """
        Args:
            pin_file: where the hub's key is pinned that signs plans.
            evidence: where wrong answers of a stage's workers are kept.
        """
        self._market = market
        self._credentials = credentials
        self._node = node
        self._engine = engine
        self._wallet = wallet
        self._worker_id = worker_id
        self._pin_file = pin_file
        self._evidence = evidence

    async def look(self, info: GatewayInfo) -> RingHolding | ExpertHolding | Plan | str:
        """What to serve; else the plan by which the wallet stands by for windows; else why there is nothing."""
        reason = NO_PLAN
        if self._node.serve in ("auto", "ring") and info.placement:
            plans = await self._plans(info)
            if (plan := next((each for each in plans if each.stage_of(self._wallet)), None)) is not None:
                engine = self._engine
                return RingHolding(plan, self._wallet, engine.context_length, engine.kv_budget_bytes, self._evidence)
            if (plan := next((each for each in plans if each.stands_by(self._wallet)), None)) is not None:
                return plan
        if self._node.serve in ("auto", "experts"):
            answer = await self._volunteer()
            if not isinstance(answer, str):
                more = await self._more_slices(answer) if "v3" in info.dispatch_wires else ()
                return ExpertHolding(answer, self._worker_id, self._wallet, more=more)
            reason = answer
        return reason

    async def planned(self, info: GatewayInfo) -> Plan | None:
        """The signed plan that gives this wallet a window."""
        plans = await self._credentials.with_token(self._market.placements)
        return choose_plan(plans, info.hub_key, self._wallet, self._pin_file)

    async def named(self, info: GatewayInfo) -> bool:
        """Whether a signed plan names this wallet, which its owner lets come before experts."""
        return self._node.serve == "auto" and info.placement and bool(await self._plans(info))

    async def _plans(self, info: GatewayInfo) -> list[Plan]:
        """The signed plans that name this wallet, for a window or to stand by for one."""
        plans = await self._credentials.with_token(self._market.placements)
        return verified_plans(plans, info.hub_key, self._pin_file)

    async def _volunteer(self, model: str = "") -> Assignment | str:
        node = self._node
        wanted, most = model or node.model, min(node.max_experts, 64)
        return await self._credentials.with_token(
            lambda token: self._market.volunteer(token, model=wanted, max_experts=most)
        )

    async def _more_slices(self, first: Assignment) -> tuple[Assignment, ...]:
        """Experts of further layers of the same model, as far as the market wants them held and the owner allows."""
        taken = [first]
        while len(taken) < self._node.max_slices:
            answer = await self._volunteer(first.model)
            if isinstance(answer, str) or answer.model != first.model or answer.layer in {a.layer for a in taken}:
                break
            taken.append(answer)
        return tuple(taken[1:])
