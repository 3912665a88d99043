"""The participation API from the node's side: tokens, assignments, coverage, plans, earnings.

Paths and fields are the public contract's; what only our gateways offer is used when ``/api/config`` announces it.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from kvasir_console import __version__
from kvasir_console.errors import ConfigError, KvasirError, LedgerError, NetworkError, WalletError
from kvasir_console.relay.direct import Introduction
from kvasir_console.relay.tls import client_context, is_loopback
from kvasir_console.relay.wire.statement import MAX_ROTATIONS, Rotation
from kvasir_console.relay.wire.texts import loads

USER_AGENT = f"kvasir-console/{__version__}"
"""Edge networks refuse library default agents with a bare 403."""
MAX_JSON_BYTES = 4 * 2**20
MAX_EXPERTS = 64
"""Most experts in one assignment (contract section 2)."""
MAX_TOKEN_LIFETIME_S = 10 * 365 * 86_400
_OWN_CODES = ("token_refused", "wallet_locked", "signer_gone")
"""Codes by which the node knows its own state; no server may speak in their name."""


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """What ``/api/config`` says, with safe defaults for a gateway that announces no extensions."""

    mint: str
    dispatch_wires: tuple[str, ...]
    relay_token_header: bool
    placement: bool
    signed_actions: bool
    delegation: bool
    hub_key: str
    minimum_claim_micro_kvr: int | None
    statements: bool = False
    stage_reports: bool = False
    direct_edges: bool = False
    hub_key_rotations: tuple[Rotation, ...] = ()
    """How the hub's key came to be the one it is; unverified."""


@dataclass(frozen=True, slots=True)
class Challenge:
    nonce: str
    message: str


@dataclass(frozen=True, slots=True)
class NodeToken:
    value: str = field(repr=False)
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
        self.host = parts.netloc.lower()
        self.ssl_context = client_context(ca_file) if parts.scheme == "https" else None
        self._client = httpx.AsyncClient(
            base_url=self.gateway,
            headers={"User-Agent": USER_AGENT},
            timeout=timeout_s,
            transport=transport,
            verify=self.ssl_context or False,
            trust_env=parts.scheme == "https",  # a proxy would see what is sent in clear
        )

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def client(self) -> httpx.AsyncClient:
        """The HTTP client, for downloads."""
        return self._client

    async def config(self) -> GatewayInfo:
        data = await self._json("GET", "/api/config")
        extensions = data.get("extensions")
        if not isinstance(extensions, dict):
            extensions = {}
        minimum: Any = data.get("minimumClaimMicroKvr")
        wires = data.get("dispatch_wires")
        return GatewayInfo(
            mint=str(data.get("mint", "")),
            dispatch_wires=tuple(str(wire) for wire in wires) if isinstance(wires, list) else (),
            relay_token_header=bool(extensions.get("relay_token_header")),
            placement=bool(extensions.get("placement")),
            signed_actions=bool(extensions.get("signed_actions")),
            delegation=bool(extensions.get("delegation")),
            hub_key=str(extensions.get("hub_key", "")),
            statements=bool(extensions.get("statements")),
            stage_reports=bool(extensions.get("stage_reports")),
            direct_edges=bool(extensions.get("direct_edges")),
            hub_key_rotations=_rotations(extensions.get("hub_key_rotations")),
            minimum_claim_micro_kvr=minimum if type(minimum) is int and minimum >= 0 else None,
        )

    async def challenge(self, wallet: str) -> Challenge:
        data = await self._json("POST", "/api/auth/challenge", body={"wallet": wallet})
        return Challenge(_text(data, "nonce"), _text(data, "message"))

    async def node_token(
        self, wallet: str, nonce: str, signature: bytes, now_s: float, key: str | None = None
    ) -> NodeToken:
        """``key`` names the session key that signed, if it was not the wallet."""
        body = {"wallet": wallet, "nonce": nonce, "signature": base64.b64encode(signature).decode()}
        if key is not None:
            body["key"] = key
        data = await self._json("POST", "/api/auth/node-token", body=body)
        token = _text(data, "node_token")
        lifetime_s: Any = data.get("expires_in")
        if type(lifetime_s) not in (int, float) or not 0 < lifetime_s <= MAX_TOKEN_LIFETIME_S:
            raise _malformed("/api/auth/node-token", f"expires_in {lifetime_s!r}")
        if not token.isascii() or not token.isprintable() or data.get("wallet", wallet) != wallet:
            raise _malformed("/api/auth/node-token", "a token that is not for this wallet")
        return NodeToken(token, wallet, now_s + lifetime_s)

    async def delegate(self, wallet: str, message: str, signature: bytes) -> None:
        """Hand in a signed ``delegate`` action."""
        body = {"wallet": wallet, "message": message, "signature": base64.b64encode(signature).decode()}
        await self._json("POST", "/api/auth/delegate", body=body)

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
            return _printable(data.get("reason")) or "The market needs no more experts now."
        try:
            begin, end = data["experts"]
            numbers = (data["layer"], begin, end, data["n_embd"], data["n_layer"], data["n_expert"])
        except (KeyError, TypeError, ValueError) as error:
            raise _malformed("/api/expert-volunteer", f"an assignment without {error}") from error
        if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
            raise _malformed("/api/expert-volunteer", f"the numbers {numbers!r}")
        a = Assignment(safe_name(_text(data, "model")), *numbers)
        within = a.begin < a.end <= a.n_expert and a.end - a.begin <= MAX_EXPERTS and a.layer < a.n_layer
        if not within or a.n_embd == 0:
            raise _malformed("/api/expert-volunteer", f"experts [{begin}, {end}) of {a.n_expert}, layer {a.layer}")
        return a

    async def report(self, token: str, coverage: Mapping[str, Any]) -> CoverageReply:
        data = await self._json("POST", "/api/expert-coverage", token=token, body=coverage)
        return CoverageReply(bool(data.get("wired")), str(data.get("session") or ""))

    async def placements(self, token: str) -> list[dict[str, Any]]:
        """Signed plans: ``{"plan": {...}, "signature": base64}``; the caller verifies them."""
        return _objects(await self._json("GET", "/api/placement", token=token), "plans")

    async def edges(self, token: str) -> list[Introduction]:
        """How to reach the neighbours in a ring without the relay; what is no introduction is left out."""
        found: list[Introduction] = []
        for each in _objects(await self._json("GET", "/api/edges", token=token), "edges"):
            with contextlib.suppress(ValueError):
                found.append(Introduction.from_json(each))
        return found

    async def statements(self, token: str, worker: str, since: int) -> dict[str, Any]:
        """What the hub states about a worker beyond statement ``since``; unverified."""
        return await self._json("GET", f"/api/statements?{urlencode({'worker': worker, 'since': since})}", token=token)

    async def acknowledge_statement(self, token: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._json("POST", "/api/statements/acknowledge", token=token, body=body)

    async def report_stage(self, token: str, reports: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        """Hand in signed reports of a ring's stage; one answer for each, in their order."""
        data = await self._json("POST", "/api/stage-reports", token=token, body={"reports": list(reports)})
        answers = _objects(data, "results")
        if len(answers) != len(reports):
            raise _malformed("/api/stage-reports", f"{len(answers)} answers to {len(reports)} reports")
        return answers

    async def earnings(self, wallet: str) -> dict[str, Any]:
        return await self._json("GET", f"/api/node/status/{wallet}")

    async def action_challenge(self, wallet: str, action: str) -> dict[str, Any]:
        return await self._json("POST", "/api/action/challenge", body={"wallet": wallet, "action": action})

    async def claim(self, wallet: str, message: str, signature: bytes) -> dict[str, Any]:
        encoded = base64.b64encode(signature).decode()
        body = {"owner": wallet, "message": message, "signature": encoded}
        return await self._json("POST", "/api/node/claim", body=body)

    async def claims(self, wallet: str) -> list[dict[str, Any]]:
        """Every claim of the wallet, oldest first."""
        return _objects(await self._json("GET", f"/api/node/claims/{wallet}"), "claims")

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
            data = loads(content)
        if not response.is_success:  # a redirect is none: the token goes to the configured host only
            raise _refusal(path, response, data)
        if not isinstance(data, dict):
            raise _malformed(path, "not a JSON object")
        return data


def _rotations(entries: object) -> tuple[Rotation, ...]:
    """The announced rotations; one that is none is left out, and a chain over it will not verify."""
    found = []
    for entry in entries[-MAX_ROTATIONS:] if isinstance(entries, list) else []:
        with contextlib.suppress(KvasirError, KeyError, TypeError, ValueError):
            found.append(Rotation.parse(str(entry["text"]), base64.b64decode(entry["signature"], validate=True)))
    return tuple(found)


async def read_bounded(response: httpx.Response, limit: int) -> bytes:
    """The body, refused past ``limit`` bytes whatever its headers promised."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > limit:
            raise NetworkError("reply_too_long", f"{response.url.path} answered with more than {limit} bytes.")
    return bytes(content)


def check_gateway(url: str) -> str:
    """The base URL without a trailing slash. Plain http is for loopback only: tokens travel on it.

    Raises:
        ConfigError: another scheme, no host, a bad port, or a user, query or fragment in it.
    """
    try:
        parts = urlsplit(url)
        extra = "@" in parts.netloc or parts.query or parts.fragment
        legal = parts.scheme in ("https", "http") and parts.hostname and parts.port != 0 and not extra
    except ValueError:  # brackets or a port that are none
        legal = False
    if not legal or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            "bad_gateway_url", f"{url!r} is not an http(s) URL of a host.", "Set network.gateway to https://HOST."
        )
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
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
        "Check the network and network.gateway.",
    )


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise NetworkError("reply_malformed", f"The gateway's answer has no {key}.")
    return value


def _objects(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    values = data.get(key)
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _printable(text: object) -> str:
    """What a server wrote, fit for a terminal."""
    return "".join(ch for ch in str(text or "") if ch.isprintable())[:300]


def _malformed(path: str, what: str) -> NetworkError:
    return NetworkError("reply_malformed", f"The gateway answered {path} with something else: {what[:200]}.")


def _refusal(path: str, response: httpx.Response, data: Any) -> KvasirError:
    """One error for each way a gateway says no, with the next step."""
    status = response.status_code
    fields = data if isinstance(data, dict) else {}
    said: Any = fields.get("error")
    if isinstance(said, dict):  # OpenAI's envelope
        fields, said = said, said.get("message")
    text = _printable(said or fields.get("detail"))
    code = str(fields.get("code", ""))
    if not re.fullmatch(r"[a-z][a-z0-9_]{1,63}", code) or code in _OWN_CODES:
        code = ""
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
        return NetworkError("rate_limited", f"The gateway asks to wait. {text}".strip())
    if status in (400, 409) and path.startswith("/api/node/claim"):
        return LedgerError(code or "claim_refused", text or "The gateway refused the claim.")
    return NetworkError(code or f"http_{status}", f"The gateway answered {path} with {status}. {text}".strip())
