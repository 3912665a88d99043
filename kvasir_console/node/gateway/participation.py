"""The participation API: how a node signs in, is given work, fetches it and reports it (gateway contract 1.6)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from kvasir_console.errors import UsageError, WalletError
from kvasir_console.node.gateway.catalog import Slices
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.coverage import parse_report, short_model_name
from kvasir_console.node.gateway.identity import Caller, Identity
from kvasir_console.node.gateway.introductions import introductions
from kvasir_console.node.gateway.metering import Meter
from kvasir_console.node.gateway.plans import PlannedRing
from kvasir_console.node.gateway.web import address_of, query_integer, read_json, text_field, wallet_field
from kvasir_console.relay.hub import Hub
from kvasir_console.relay.wire.signed import MAX_TEXT_BYTES

SHARD_DIGEST_HEADER = "x-kvasir-shard-digest"


class Participation:
    def __init__(
        self,
        identity: Identity,
        census: Census,
        slices: Slices,
        rings: Mapping[str, PlannedRing],
        meter: Meter,
        hub: Hub,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._census = census
        self._slices = slices
        self._rings = rings
        self._meter = meter
        self._hub = hub
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route("/api/auth/challenge", self.challenge, methods=["POST"]),
            Route("/api/auth/node-token", self.node_token, methods=["POST"]),
            Route("/api/auth/delegate", self.delegate, methods=["POST"]),
            Route("/api/expert-demand", self.demand, methods=["GET"]),
            Route("/api/expert-volunteer", self.volunteer, methods=["POST"]),
            Route("/api/expert-coverage", self.coverage, methods=["POST"]),
            Route("/api/proxy/models/{model}/expert-shard", self.expert_shard, methods=["GET"]),
            Route("/api/proxy/models/{model}/stage", self.stage, methods=["GET"]),
            Route("/api/placement", self.placement, methods=["GET"]),
            Route("/api/edges", self.edges, methods=["GET"]),
            Route("/api/expert-relay/sessions", self.sessions, methods=["GET"]),
            Route("/api/contributions", self.contributions, methods=["GET"]),
        ]

    async def challenge(self, request: Request) -> Response:
        wallet = wallet_field(await read_json(request))
        nonce, message = await self._identity.challenge(wallet, address_of(request))
        return JSONResponse({"nonce": nonce, "message": message})

    async def node_token(self, request: Request) -> Response:
        """Our extension: with ``key``, a session key signed the challenge in the wallet's place."""
        body = await read_json(request)
        wallet = wallet_field(body)
        key = wallet_field(body, "key") if body.get("key") is not None else None
        token, ttl_s = await self._identity.node_token(
            wallet, text_field(body, "nonce", 64), text_field(body, "signature", 128), key
        )
        return JSONResponse({"node_token": token, "wallet": wallet, "expires_in": ttl_s})

    async def delegate(self, request: Request) -> Response:
        body = await read_json(request)
        wallet = wallet_field(body)
        message, signature = text_field(body, "message", MAX_TEXT_BYTES), text_field(body, "signature", 128)
        granted = await self._identity.delegate(wallet, message, signature)
        return JSONResponse({"wallet": wallet, "key": granted.key, "until": granted.until_s})

    async def demand(self, request: Request) -> Response:
        self._caller(request)
        model = request.query_params.get("model") or None
        return JSONResponse(self._census.demand(self._clock(), short_model_name(model) if model else None))

    async def volunteer(self, request: Request) -> Response:
        wallet = self._caller(request).require_wallet()
        body = await read_json(request)
        model, max_experts = body.get("model") or None, body.get("max_experts") or 0
        if model is not None and not isinstance(model, str):
            raise UsageError("missing_field", "model must be text.")
        if type(max_experts) is not int or max_experts < 0:
            raise UsageError("missing_field", "max_experts must be a whole number; 0 means no cap.")
        found = self._census.volunteer(wallet, self._clock(), short_model_name(model) if model else None, max_experts)
        if isinstance(found, str):
            return JSONResponse({"assigned": False, "reason": found})
        return JSONResponse(
            {
                "assigned": True,
                "model": found.window.model,
                "layer": found.window.layer,
                "experts": [found.window.begin, found.window.end],
                "scarcity": found.segment.scarcity,
                "replicas": found.segment.replicas,
                "target": found.segment.target,
                "n_embd": found.model.n_embd,
                "n_layer": found.model.n_layer,
                "n_expert": found.model.n_expert,
            }
        )

    async def coverage(self, request: Request) -> Response:
        """``owner`` is advice at most: the report belongs to the token's wallet.

        ``listen_port`` is where a legacy backbone would listen; sessions to the engine here need no port, so it is 0.
        """
        caller = self._caller(request)
        body = await read_json(request)
        wallet = wallet_field(body, "owner") if caller.service else caller.require_wallet()
        report, now = parse_report(body, service=caller.service), self._clock()
        before = self._census.worker(wallet, report.worker_id, now)
        worker = self._census.report(wallet, report, now)
        if before is not None and (before.session, before.windows[:1]) != (worker.session, worker.windows[:1]):
            # A session is for one window: what is dispatched to the old one would be answered with other experts.
            await self._hub.close_sessions(
                key=before.session, wallet=wallet, reason="the worker reports another window or session"
            )
        return JSONResponse(
            {
                "ok": True,
                "workers": len(self._census.workers(now)),
                "wired": self._census.wired(worker),
                "listen_port": 0,
                "session": worker.session,
            }
        )

    async def expert_shard(self, request: Request) -> Response:
        self._caller(request)
        model = self._slices.model(request.path_params["model"])
        layer, begin, end = (query_integer(request, key) for key in ("layer", "expert_begin", "expert_end"))
        file = await self._slices.expert_shard(model, layer, begin, end)
        return FileResponse(
            file, media_type="application/octet-stream", headers={SHARD_DIGEST_HEADER: model.source_digest}
        )

    async def stage(self, request: Request) -> Response:
        """A window of layers, for a wallet that the signed plan names for exactly this window, standbys included."""
        caller = self._caller(request)
        model = self._slices.model(request.path_params["model"])
        begin, end = (query_integer(request, key) for key in ("layer_begin", "layer_end"))
        if not caller.service and not self._planned(model.id, begin, end, caller.require_wallet()):
            raise WalletError("not_in_plan", f"No plan gives this wallet the layers [{begin}, {end}) of {model.id}.")
        file = await self._slices.stage(model, begin, end)
        return FileResponse(
            file, media_type="application/octet-stream", headers={SHARD_DIGEST_HEADER: model.source_digest}
        )

    async def placement(self, request: Request) -> Response:
        """The signed plans that name the caller's wallet; the operator's machines see all."""
        caller = self._caller(request)
        plans = [ring.signed for ring in self._rings.values() if caller.service or ring.names(caller.require_wallet())]
        return JSONResponse({"plans": plans})

    async def edges(self, request: Request) -> Response:
        """Our extension: introduces the two ends of each edge of the caller's windows to each other."""
        wallet, now = self._caller(request).require_wallet(), self._clock()
        rings = list(self._rings.values())
        told = [each for ring in rings for each in introductions(ring, wallet, self._census, self._identity, now)]
        return JSONResponse({"edges": told})

    async def sessions(self, request: Request) -> Response:
        self._identity.require_service(request.headers)
        counts = {(count.key, count.wallet): count for count in self._hub.sessions()}
        rows: list[dict[str, Any]] = []
        for worker in self._census.workers(self._clock()):
            count = counts.get((worker.session, worker.wallet))
            window = worker.windows[0] if worker.windows else None
            rows.append(
                {
                    "session": worker.session,
                    "node_id": worker.worker_id,
                    "owner": worker.wallet,
                    "model": worker.model,
                    "layer": window.layer if window else None,
                    "experts": [window.begin, window.end] if window else None,
                    "listen_host": "127.0.0.1",
                    "listen_port": 0,
                    "claimed_at": int(worker.claimed_at * 1000),
                    "connected": count.connected if count else False,
                    "bytes": {"ws2tcp": count.ws2tcp, "tcp2ws": count.tcp2ws} if count else None,
                }
            )
        return JSONResponse({"sessions": rows})

    async def contributions(self, request: Request) -> Response:
        self._identity.require_service(request.headers)
        rows = await self._meter.contributions()
        return JSONResponse({"contributions": [row.to_json() for row in rows]})

    def _caller(self, request: Request) -> Caller:
        return self._identity.caller(request.headers)

    def _planned(self, model: str, begin: int, end: int, wallet: str) -> bool:
        return any(
            wallet in (stage.wallet, *stage.replicas) and (stage.begin, stage.end) == (begin, end)
            for ring in self._rings.values()
            if ring.plan.model == model
            for stage in ring.plan.stages
        )
