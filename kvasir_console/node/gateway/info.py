"""What the gateway says of itself: health, configuration with its extensions, the models one can pay for."""

from __future__ import annotations

import asyncio
import platform
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvasir_console.config import GatewayConfig, WalletConfig
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.openai import OpenAI
from kvasir_console.node.gateway.payout import TREASURY_FACT
from kvasir_console.node.gateway.store import Store
from kvasir_console.relay.wire.preamble import WIRE_NAMES
from kvasir_console.wallet import settlement, token

SYMBOL = "KVR"
_OS = {"Linux": "linux", "Darwin": "macos", "Windows": "windows"}


class Info:
    def __init__(
        self,
        identity: Identity,
        store: Store,
        openai: OpenAI,
        gateway: GatewayConfig,
        wallet: WalletConfig,
        public_url: str,
    ) -> None:
        self._identity = identity
        self._store = store
        self._openai = openai
        self._gateway = gateway
        self._wallet = wallet
        self._public_url = public_url

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/api/config", self.config, methods=["GET"]),
            Route("/api/pay/models", self.models, methods=["GET"]),
        ]

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def config(self, _request: Request) -> Response:
        """Gateway contract 1.3, then the extensions, which a client uses only if it finds them here."""
        owner, vault = await self._treasury()
        extensions: dict[str, Any] = {
            "wires": list(WIRE_NAMES),
            "relay_token_header": True,
            "placement": 1,
            "direct_edges": 1,
            "signed_actions": 1,
            "delegation": 1,
            "statements": 1,
            "stage_reports": 1,
            "hub_key": self._identity.hub_key,
            "hub_key_rotations": self._identity.hub_key_rotations,
        }
        return JSONResponse(
            {
                "cluster": cluster_of(self._wallet.rpc_url),
                "rpcUrl": self._wallet.rpc_url,
                "mint": self._wallet.mint,
                "decimals": token.DECIMALS,
                "vault": vault,
                "vaultOwner": owner,
                "symbol": SYMBOL,
                "aprPercent": 0,
                "rewardPerUnit": float(settlement.RATE),
                "perfTiers": [
                    {"tier": tier.name, "minTps": least, "mult": float(tier.multiplier)}
                    for least, tier in settlement.TIERS
                ],
                "gatewayBonus": float(settlement.GATEWAY_BONUS),
                "bridgeUptimePerHour": 0,
                "gatewayUptimePerHour": 0,
                "publicUrl": self._public_url,
                "hostOs": _OS.get(platform.system(), "unknown"),
                "minOperatorKvr": 0,
                "minimumClaimMicroKvr": self._gateway.minimum_claim_micro_kvr,
                "dispatch_wires": list(WIRE_NAMES),
                "relay_token_header": True,
                "extensions": extensions,
            }
        )

    async def models(self, _request: Request) -> Response:
        """Only models that can answer now."""
        owner, _ = await self._treasury()
        return JSONResponse(
            {
                "recipient": owner,
                "mint": self._wallet.mint,
                "symbol": SYMBOL,
                "models": [
                    {"id": self._openai.qualified(model_id), "name": backend.info.name}
                    for model_id, backend in self._openai.backends.items()
                    if backend.ready
                ],
            }
        )

    async def _treasury(self) -> tuple[str | None, str | None]:
        """The treasury's wallet and its KVR account, once the payout process has said who it pays for."""
        owner = await asyncio.to_thread(self._store.fact, TREASURY_FACT)
        return owner, None if owner is None else token.associated_token_address(owner, self._wallet.mint)


def cluster_of(rpc_url: str) -> str:
    """The cluster's name as far as its URL tells."""
    host = urlsplit(rpc_url).hostname or ""
    if host in ("127.0.0.1", "localhost", "::1"):
        return "localnet"
    return next((name for name in ("devnet", "testnet", "mainnet-beta") if name.partition("-")[0] in host), "custom")
