"""What tests of a node's parts share: wallets, a plan, and a gateway that answers as it was told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from nacl.signing import SigningKey
from solders.pubkey import Pubkey

from kvasir_console.node.credentials import Credentials
from kvasir_console.node.market import GatewayInfo, Market
from kvasir_console.node.placement.plan import Plan, PlannedStage, sign_plan

GATEWAY = "http://127.0.0.1:8791"
HUB = SigningKey(bytes(range(32)))


def address(key: SigningKey) -> str:
    return str(Pubkey.from_bytes(bytes(key.verify_key)))


A, B, C = (address(SigningKey(bytes([number] * 32))) for number in (1, 2, 3))
PLAN = Plan("r", "m", "ab" * 32, 30, 4, (PlannedStage(0, A, 0, 15, (B,)), PlannedStage(1, A, 15, 30)))
INFO = GatewayInfo("", (), True, True, True, False, address(HUB), None)


def signed(plan: Plan, key: SigningKey = HUB) -> dict[str, Any]:
    return sign_plan(plan, lambda message: key.sign(message).signature)


class Told:
    """A gateway. ``answers`` are by path, lists one after the other; ``asked`` are paths and bodies, but for tokens."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {f"/api/{name.replace('_', '-')}": answer for name, answer in answers.items()}
        self.asked: list[tuple[str, Any]] = []
        self.revoked: set[str] = set()
        self.minted: list[str] = []
        self.market = Market(GATEWAY, transport=httpx.MockTransport(self._answer))

    def credentials(self, directory: Path, wallet: str = A) -> Credentials:
        directory.chmod(0o700)
        return Credentials(self.market, _Prover(), wallet, directory / "node-token.json")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content) if request.content else None
        if path == "/api/auth/challenge":
            return httpx.Response(200, json={"nonce": "0" * 32, "message": "a challenge"})
        if path == "/api/auth/node-token":
            self.minted.append(f"token-{len(self.minted)}")
            return httpx.Response(200, json={"node_token": self.minted[-1], "expires_in": 3600})
        self.asked.append((path, body))
        if request.headers["authorization"].removeprefix("Bearer ") not in set(self.minted) - self.revoked:
            return httpx.Response(401, json={"error": "revoked"})
        answer = self.answers.get(path)
        if isinstance(answer, list):
            answer = answer.pop(0)
        return httpx.Response(404 if answer is None else 200, json=answer)


class _Prover:
    """The wallet's signer, for a gateway that believes it."""

    async def prove_participation(self, host: str, wallet: str, nonce: str, message: str) -> bytes:
        return bytes(64)

    async def sign_delegation(self, key: str, until_s: int, challenge: dict[str, Any]) -> tuple[str, bytes]:
        raise AssertionError("nothing is delegated here")


def knows(**extensions: Any) -> GatewayInfo:
    """What a gateway with these extensions says of itself."""
    return replace(INFO, **extensions)
