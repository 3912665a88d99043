"""The participation API from the node's side: tokens, assignments, coverage, plans, earnings.

Paths and fields are the public contract's; what only our gateways offer is used when ``/api/config`` announces it.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvasir_console import __version__
from kvasir_console.errors import ConfigError, KvasirError, LedgerError, NetworkError, WalletError
from kvasir_console.relay.tls import client_context, is_loopback

USER_AGENT = f"kvasir-console/{__version__}"
"""Edge networks refuse library default agents with a bare 403."""
MAX_JSON_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """What ``/api/config`` says, with safe defaults for a gateway that announces no extensions."""

    mint: str
    dispatch_wires: tuple[str, ...]
    relay_token_header: bool
    placement: bool
    signed_actions: bool
    hub_key: str
    minimum_claim_micro_kvr: int | None


@dataclass(frozen=True, slots=True)
class Challenge:
    nonce: str
    message: str


@dataclass(frozen=True, slots=True)
class NodeToken:
    value: str
    wallet: str
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """Experts [begin, end) of one layer that the market asks this node to hold."""

    model: str
    layer: int
    begin: int
    end: int
    n_embd: int
    n_layer: int
    n_expert: int


@dataclass(frozen=True, slots=True)
class CoverageReply:
    wired: bool
    session: str


class Market:
    """HTTP calls to one gateway. The caller holds the token and renews it when ``token_refused`` is raised."""

    def __init__(
        self,
        gateway: str,
        *,
        ca_file: str = "",
        timeout_s: float = 20.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.gateway = check_gateway(gateway)
        parts = urlsplit(self.gateway)
        self.host = parts.netloc
        self.ssl_context = client_context(ca_file) if parts.scheme == "https" else None
        self._client = httpx.AsyncClient(
            base_url=self.gateway,
            headers={"User-Agent": USER_AGENT},
            timeout=timeout_s,
            transport=transport,
            verify=self.ssl_context or False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def client(self) -> httpx.AsyncClient:
        """The HTTP client, for downloads."""
        return self._client

    async def config(self) -> GatewayInfo:
        data = await self._json("GET", "/api/config")
        extensions = data.get("extensions") or {}
        minimum = data.get("minimumClaimMicroKvr")
        return GatewayInfo(
            mint=str(data.get("mint", "")),
            dispatch_wires=tuple(str(wire) for wire in data.get("dispatch_wires", ())),
            relay_token_header=bool(extensions.get("relay_token_header")),
            placement=bool(extensions.get("placement")),
            signed_actions=bool(extensions.get("signed_actions")),
            hub_key=str(extensions.get("hub_key", "")),
            minimum_claim_micro_kvr=minimum if isinstance(minimum, int) else None,
        )

    async def challenge(self, wallet: str) -> Challenge:
        data = await self._json("POST", "/api/auth/challenge", body={"wallet": wallet})
        return Challenge(_text(data, "nonce"), _text(data, "message"))

    async def node_token(self, wallet: str, nonce: str, signature: bytes, now_s: float) -> NodeToken:
        body = {"wallet": wallet, "nonce": nonce, "signature": base64.b64encode(signature).decode()}
        data = await self._json("POST", "/api/auth/node-token", body=body)
        return NodeToken(_text(data, "node_token"), wallet, now_s + float(data.get("expires_in", 0)))

    async def demand(self, token: str) -> dict[str, Any]:
        """What the network lacks, by model and layer; also the cheapest proof that a token is accepted."""
        return await self._json("GET", "/api/expert-demand", token=token)

    async def volunteer(self, token: str, *, model: str, max_experts: int) -> Assignment | str:
        """An assignment, or the reason why there is none. An assignment without ``n_embd`` is refused."""
        body: dict[str, Any] = {"max_experts": max_experts}
        if model:
            body["model"] = model
        data = await self._json("POST", "/api/expert-volunteer", token=token, body=body)
        if not data.get("assigned"):
            return str(data.get("reason") or "The market needs no more experts now.")
        try:
            begin, end = (int(bound) for bound in data["experts"])
            assignment = Assignment(
                model=safe_name(_text(data, "model")),
                layer=int(data["layer"]),
                begin=begin,
                end=end,
                n_embd=int(data["n_embd"]),
                n_layer=int(data["n_layer"]),
                n_expert=int(data["n_expert"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _malformed("/api/expert-volunteer", repr(error)) from error
        if not (0 <= begin < end <= assignment.n_expert and end - begin <= 64 and assignment.n_embd > 0):
            raise _malformed("/api/expert-volunteer", f"experts [{begin}, {end}) of {assignment.n_expert}")
        return assignment

    async def report(self, token: str, coverage: Mapping[str, Any]) -> CoverageReply:
        data = await self._json("POST", "/api/expert-coverage", token=token, body=coverage)
        return CoverageReply(bool(data.get("wired")), str(data.get("session") or ""))

    async def placements(self, token: str) -> list[dict[str, Any]]:
        """Signed plans: ``{"plan": {...}, "signature": base64}``; the caller verifies them."""
        plans = (await self._json("GET", "/api/placement", token=token)).get("plans", [])
        return [plan for plan in plans if isinstance(plan, dict)]

    async def earnings(self, wallet: str) -> dict[str, Any]:
        return await self._json("GET", f"/api/node/status/{wallet}")

    async def action_challenge(self, wallet: str, action: str) -> dict[str, Any]:
        return await self._json("POST", "/api/action/challenge", body={"wallet": wallet, "action": action})

    async def claim(self, wallet: str, message: str, signature: bytes) -> dict[str, Any]:
        encoded = base64.b64encode(signature).decode()
        body = {"owner": wallet, "message": message, "signature": encoded}
        return await self._json("POST", "/api/node/claim", body=body)

    async def claims(self, wallet: str) -> list[dict[str, Any]]:
        claims: list[dict[str, Any]] = (await self._json("GET", f"/api/node/claims/{wallet}")).get("claims", [])
        return claims

    async def _json(
        self, method: str, path: str, *, token: str | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with self._client.stream(method, path, json=body, headers=headers) as response:
                content = await read_bounded(response, MAX_JSON_BYTES)
        except httpx.HTTPError as error:
            raise unreachable(self.gateway, error) from error
        data: Any = None
        with contextlib.suppress(ValueError):
            data = httpx.Response(200, content=content).json() if content else {}
        if response.status_code >= 400:
            raise _refusal(path, response, data)
        if not isinstance(data, dict):
            raise _malformed(path, "not a JSON object")
        return data


async def read_bounded(response: httpx.Response, limit: int) -> bytes:
    """The body, refused past ``limit`` bytes whatever its headers promised."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > limit:
            raise NetworkError("reply_too_long", f"{response.url.path} answered with more than {limit} bytes.")
    return bytes(content)


def check_gateway(url: str) -> str:
    """The base URL without a trailing slash. Plain http is for loopback only: tokens travel on it."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise ConfigError("bad_gateway_url", f"{url!r} is not an http(s) URL.", "Set network.gateway.")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            "gateway_not_encrypted",
            f"{url} is not encrypted, and {parts.hostname} is not this machine.",
            "Use an https:// URL.",
        )
    return url.rstrip("/")


def safe_name(name: str) -> str:
    """A model name that is safe as a path component and in a URL."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", name):
        raise NetworkError("bad_model_name", f"The gateway named a model {name[:40]!r}, which is not a legal name.")
    return name


def unreachable(gateway: str, error: Exception) -> NetworkError:
    """What a person needs to know of a transport failure."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return NetworkError(
            "certificate_refused",
            f"The certificate of {gateway} is not trusted.",
            "If this gateway has its own authority, set network.ca_file to its certificate.",
        )
    return NetworkError(
        "gateway_unreachable",
        f"{gateway} cannot be reached ({type(error).__name__}).",
        "Check the network and network.gateway; it is tried again.",
    )


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise NetworkError("reply_malformed", f"The gateway's answer has no {key}.")
    return value


def _malformed(path: str, what: str) -> NetworkError:
    return NetworkError("reply_malformed", f"The gateway answered {path} with something else: {what[:200]}.")


def _refusal(path: str, response: httpx.Response, data: Any) -> KvasirError:
    """One error for each way a gateway says no, with the next step."""
    status = response.status_code
    said: Any = data.get("error") if isinstance(data, dict) else None
    if isinstance(said, dict):
        said = said.get("message")
    text = "".join(ch for ch in str(said or "") if ch.isprintable())[:300]
    code = str(data.get("code", "")) if isinstance(data, dict) else ""
    if status == 401:
        return WalletError("token_refused", f"The gateway refused this node's token. {text}".strip())
    if status == 403 and data is None:
        return NetworkError(
            "edge_refused",
            "A network edge before the gateway refused the request (403 without JSON).",
            "It is not the gateway's own answer; a firewall or the edge's browser check blocks this program.",
        )
    if status == 403:
        return WalletError(code or "not_admitted", f"The gateway refuses this wallet. {text}".strip())
    if status == 429:
        return NetworkError("rate_limited", f"The gateway asks to wait. {text}".strip(), "It is tried again.")
    if status in (400, 409) and path.startswith("/api/node/claim"):
        return LedgerError(code or "claim_refused", text or "The gateway refused the claim.")
    return NetworkError(code or f"http_{status}", f"The gateway answered {path} with {status}. {text}".strip())
