"""Earnings and claims (gateway contract 1.1 and 3), and the operator's view of the settlement.

The contract's fields are whole-KVR floats with six decimals; beside them stand the exact integers of a millionth. A
claim here is an action that the wallet signs, bound to this gateway and to one use.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvasir_console.errors import UsageError, WalletError
from kvasir_console.node.gateway.census import Census, Worker
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.ledger import Account, Claim, ClaimState, Ledger, fraction_text
from kvasir_console.node.gateway.metering import RING
from kvasir_console.node.gateway.web import address_of, read_json, text_field, wallet_field
from kvasir_console.relay.wire.signed import MAX_TEXT_BYTES, ActionKind, rfc3339
from kvasir_console.wallet import settlement
from kvasir_console.wallet.keys import is_address

ONLINE_S = 300
IDLE_S = 3600
_TIER_MULTIPLIERS = {settlement.UNRATED.multiplier, *(tier.multiplier for _, tier in settlement.TIERS)}
_SHOWN_SIGNATURE = (ClaimState.SIGNED, ClaimState.SENT, ClaimState.CONFIRMED, ClaimState.FAILED)


class Payments:
    def __init__(
        self,
        identity: Identity,
        ledger: Ledger,
        census: Census,
        *,
        minimum_micro_kvr: int,
        bonuses: Mapping[str, Fraction] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._ledger = ledger
        self._census = census
        self._minimum = minimum_micro_kvr
        self._bonuses = dict(bonuses or {})
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route("/api/action/challenge", self.challenge, methods=["POST"]),
            Route("/api/node/claim", self.claim, methods=["POST"]),
            Route("/api/node/claims/{owner}", self.claims, methods=["GET"]),
            Route("/api/node/rewards/{owner}", self.rewards, methods=["GET"]),
            Route("/api/node/status/{owner}", self.status, methods=["GET"]),
            Route("/api/node/all", self.all, methods=["GET"]),
            Route("/api/settlement", self.settlement, methods=["GET"]),
        ]

    async def challenge(self, request: Request) -> Response:
        body = await read_json(request)
        wallet, action = wallet_field(body), text_field(body, "action", 64)
        host = request.headers.get("host", "")
        return JSONResponse(await self._identity.action_challenge(wallet, action, host, address_of(request)))

    async def claim(self, request: Request) -> Response:
        """Reserve everything pending for the wallet that signed; the payout process pays it."""
        body = await read_json(request)
        owner = wallet_field(body, "owner")
        if not body.get("message") or not body.get("signature"):
            raise WalletError(
                "signature_needed",
                "A claim must be signed by the wallet it is for.",
                "Ask /api/action/challenge and sign a kvasir-action-v1 claim.",
            )
        action = await self._identity.check_action(
            owner, ActionKind.CLAIM, text_field(body, "message", MAX_TEXT_BYTES), text_field(body, "signature", 128)
        )
        if action.details:
            raise UsageError("claim_details", "A claim takes no details: it is for everything that is pending.")
        claim = await asyncio.to_thread(self._ledger.reserve, owner, self._minimum, int(self._clock()))
        accounts = await asyncio.to_thread(self._ledger.accounts, owner)
        return JSONResponse(
            {
                "claim_id": claim.claim_id,
                "micro_kvr": claim.micro_kvr,
                "state": claim.state,
                "signature": None,
                "claimed": kvr(claim.micro_kvr),
                "rewards": _rewards(owner, accounts),
            }
        )

    async def claims(self, request: Request) -> Response:
        claims = await asyncio.to_thread(self._ledger.claims, _owner(request))
        return JSONResponse({"claims": [_claim(claim) for claim in claims]})

    async def rewards(self, request: Request) -> Response:
        owner = _owner(request)
        return JSONResponse(_rewards(owner, await asyncio.to_thread(self._ledger.accounts, owner)))

    async def status(self, request: Request) -> Response:
        owner = _owner(request)
        accounts = await asyncio.to_thread(self._ledger.accounts, owner)
        paid = await asyncio.to_thread(self._ledger.paid_micro_kvr, owner)
        nodes = merge(accounts, self._census.workers(self._clock(), owner), self._bonuses)
        now = self._clock()
        pending = sum(account.pending_micro_kvr for account in accounts)
        claimed = sum(account.claimed_micro_kvr for account in accounts)
        carried = sum((account.carried for account in accounts), Fraction(0))
        micro_units = sum(account.micro_units for account in accounts)
        totals = {
            "nodes": len(nodes),
            "online": sum(node.state(now) == "online" for node in nodes),
            "contributedUnits": kvr(micro_units),
            "effectiveUnits": sum(node.effective_units for node in nodes),
            "pending": kvr(pending),
            "claimedTotal": kvr(claimed),
            "lifetimeRewards": kvr(pending + claimed),
            "microUnits": micro_units,
            "creditedMicroKvr": pending + claimed,
            "carriedMicroKvr": fraction_text(carried),
            "pendingMicroKvr": pending,
            "claimedMicroKvr": claimed,
            "paidMicroKvr": paid,
            "minimumClaimMicroKvr": self._minimum,
        }
        return JSONResponse({"owner": owner, "totals": totals, "nodes": [node.to_json(now) for node in nodes]})

    async def all(self, _request: Request) -> Response:
        """The network's nodes, wallets shortened."""
        now = self._clock()
        accounts = await asyncio.to_thread(self._ledger.accounts)
        nodes = merge(accounts, self._census.workers(now), self._bonuses)
        shown = []
        for node in nodes:
            view = node.to_json(now)
            for private in ("claimedTotal", "claimedMicroKvr", "lastReport"):
                view.pop(private)
            shown.append({"ownerShort": f"{node.wallet[:4]}\u2026{node.wallet[-4:]}", **view})
        totals = {
            "nodes": len(nodes),
            "online": sum(node.state(now) == "online" for node in nodes),
            "owners": len({node.wallet for node in nodes}),
            "effectiveUnits": sum(node.effective_units for node in nodes),
            "byTier": dict(Counter(node.tier for node in nodes)),
            "byOs": dict(Counter(node.platform.get("os", "unknown") for node in nodes)),
        }
        return JSONResponse({"totals": totals, "nodes": shown})

    async def settlement(self, request: Request) -> Response:
        """Every row and claim, exact, and what of them does not add up, for the operator's machines."""
        self._identity.require_service(request.headers)
        accounts = await asyncio.to_thread(self._ledger.accounts)
        claims = await asyncio.to_thread(self._ledger.claims)
        wrong = await asyncio.to_thread(self._ledger.audit)
        return JSONResponse(
            {
                "audit": list(wrong),
                "rows": [
                    {
                        "node_id": account.worker_id,
                        "wallet": account.wallet,
                        "kind": account.kind,
                        "model": account.model,
                        "micro_units": account.micro_units,
                        "multiplier": fraction_text(account.multiplier),
                        "credited_micro_kvr": account.credited_micro_kvr,
                        "carried_micro_kvr": fraction_text(account.carried),
                        "claimed_micro_kvr": account.claimed_micro_kvr,
                    }
                    for account in accounts
                ],
                "claims": [{**_claim(claim), "wallet": claim.wallet} for claim in claims],
            }
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node: what it earned and when it was last heard of."""

    wallet: str
    node_id: str
    account: Account | None
    worker: Worker | None
    platform: Mapping[str, str] = field(default_factory=dict)
    bonus: Fraction = Fraction(1)
    """What the operator multiplies this wallet's work by from now on."""

    @property
    def last_report(self) -> int | None:
        seen = [self.account.last_work_at] if self.account else []
        if self.worker is not None:
            seen.append(int(self.worker.last_at))
        return max(seen, default=None)

    def state(self, now: float) -> str:
        if self.last_report is None:
            return "registered"
        age_s = now - self.last_report
        return "online" if age_s < ONLINE_S else "idle" if age_s < IDLE_S else "offline"

    @property
    def multiplier(self) -> Fraction:
        """Tier times bonus, as the last work was credited."""
        return self.account.multiplier if self.account else self.bonus

    @property
    def perf_multiplier(self) -> Fraction:
        """The tier's part of it; a bonus that no work was credited with yet is not in it."""
        tier = self.multiplier / self.bonus
        return tier if tier in _TIER_MULTIPLIERS else self.multiplier

    @property
    def tier(self) -> str:
        """No node's speed is measured by this gateway yet, so all are unrated."""
        return settlement.UNRATED.name

    @property
    def effective_units(self) -> float:
        return kvr(int(self.account.micro_units * self.multiplier)) if self.account else 0.0

    def to_json(self, now: float) -> dict[str, Any]:
        """The contract's fields, then the exact integers."""
        account, worker = self.account, self.worker
        pending = account.pending_micro_kvr if account else 0
        claimed = account.claimed_micro_kvr if account else 0
        return {
            "nodeId": self.node_id,
            "status": self.state(now),
            "os": self.platform.get("os", "unknown"),
            "deviceKind": self.platform.get("device_kind", ""),
            "accelerator": self.platform.get("accelerator", "cpu"),
            "label": self.node_id,
            "perfScore": None,
            "backend": self.platform.get("backend", ""),
            "mode": account.kind if account else "expert" if worker and worker.windows else "waiting",
            "tier": self.tier,
            "perfMultiplier": float(self.perf_multiplier),
            "hostsGateway": self.bonus != 1,
            "gatewayBonus": float(self.bonus),
            "hostsBridge": False,
            "uptimeRewards": 0.0,
            "contributedUnits": kvr(account.micro_units) if account else 0.0,
            "effectiveUnits": self.effective_units,
            "pendingRewards": kvr(pending),
            "claimedTotal": kvr(claimed),
            "registeredAt": account.created_at if account else int(worker.claimed_at) if worker else None,
            "lastReport": self.last_report,
            "model": account.model if account else worker.model if worker else "",
            "microUnits": account.micro_units if account else 0,
            "creditedMicroKvr": account.credited_micro_kvr if account else 0,
            "carriedMicroKvr": fraction_text(account.carried if account else Fraction(0)),
            "pendingMicroKvr": pending,
            "claimedMicroKvr": claimed,
        }


def merge(
    accounts: Iterable[Account], workers: Iterable[Worker], bonuses: Mapping[str, Fraction] | None = None
) -> list[NodeView]:
    """One node for each worker: its earnings and its reports are one row.

    A ring's earnings stand under the plan's rank; they are joined with the reports of the wallet's node that holds no
    experts of that model.
    """
    bonus = {} if bonuses is None else bonuses
    waiting = {(worker.wallet, worker.worker_id): worker for worker in workers}
    nodes: list[NodeView] = []
    for account in accounts:
        key: tuple[str, str] | None = (account.wallet, account.worker_id)
        if account.kind == RING:
            key = next(
                (
                    key
                    for key, worker in waiting.items()
                    if key[0] == account.wallet and worker.model == account.model and not worker.windows
                ),
                None,
            )
        worker = waiting.pop(key, None) if key else None
        platform = worker.platform if worker else account.platform
        own = bonus.get(account.wallet, Fraction(1))
        nodes.append(NodeView(account.wallet, account.worker_id, account, worker, platform, own))
    nodes += [
        NodeView(each.wallet, each.worker_id, None, each, each.platform, bonus.get(each.wallet, Fraction(1)))
        for each in waiting.values()
    ]
    return nodes


def kvr(micro: int) -> float:
    """Millionths as a number with six decimals, as the contract shows units and KVR."""
    return round(micro / settlement.MICRO, 6)


def _owner(request: Request) -> str:
    owner = str(request.path_params["owner"])
    if not is_address(owner):
        raise UsageError("missing_field", "The path must end in a Solana address.")
    return owner


def _rewards(owner: str, accounts: Sequence[Account]) -> dict[str, Any]:
    pending = sum(account.pending_micro_kvr for account in accounts)
    return {
        "owner": owner,
        "pending": kvr(pending),
        "pendingMicroKvr": pending,
        "rewardPerUnit": float(settlement.RATE),
        "nodes": [
            {
                "nodeId": account.worker_id,
                "contributedUnits": kvr(account.micro_units),
                "pendingRewards": kvr(account.pending_micro_kvr),
                "microUnits": account.micro_units,
                "pendingMicroKvr": account.pending_micro_kvr,
            }
            for account in accounts
        ],
    }


def _claim(claim: Claim) -> dict[str, Any]:
    return {
        "id": claim.claim_id,
        "micro_kvr": claim.micro_kvr,
        "state": claim.state,
        "signature": claim.signature if claim.state in _SHOWN_SIGNATURE else None,
        "created_at": rfc3339(claim.created_at),
        "updated_at": rfc3339(claim.updated_at),
        "error": claim.error,
    }
