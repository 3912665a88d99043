"""The participation token: minted by a wallet signature, kept in a private file, renewed before it expires."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from kvasir_console.errors import WalletError
from kvasir_console.node.market import Market, NodeToken

EXPIRY_SKEW_S = 60.0


class Prover(Protocol):
    """Signs the one challenge text a node may sign; the wallet's signer process stands behind it."""

    async def prove_participation(self, host: str, wallet: str, nonce: str, message: str) -> bytes: ...


class Credentials:
    """Hands out a valid node token, minting one when there is none, it nears its end, or it was refused."""

    def __init__(self, market: Market, prover: Prover, wallet: str, file: Path) -> None:
        self._market = market
        self._prover = prover
        self._wallet = wallet
        self._file = file
        self._token = self._read()

    @property
    def valid(self) -> bool:
        token = self._token
        return token is not None and token.expires_at_s - EXPIRY_SKEW_S > time.time()

    async def get(self, *, refresh: bool = False) -> str:
        """The token's text.

        Raises:
            WalletError: the wallet is locked and a new token must be signed for, or this wallet is not admitted.
            NetworkError: the gateway cannot be reached.
        """
        if refresh or not self.valid or self._token is None:
            challenge = await self._market.challenge(self._wallet)
            signature = await self._prover.prove_participation(
                self._market.host, self._wallet, challenge.nonce, challenge.message
            )
            self._token = await self._market.node_token(self._wallet, challenge.nonce, signature, time.time())
            self._write(self._token)
        return self._token.value

    def forget(self) -> None:
        self._token = None
        self._file.unlink(missing_ok=True)

    def _read(self) -> NodeToken | None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            data = json.loads(self._file.read_text())
            if data.pop("gateway") == self._market.gateway and data["wallet"] == self._wallet:
                return NodeToken(**data)
        return None

    def _write(self, token: NodeToken) -> None:
        part = self._file.with_name(self._file.name + ".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({**asdict(token), "gateway": self._market.gateway}, file)
        os.replace(part, self._file)


def locked() -> WalletError:
    return WalletError(
        "wallet_locked",
        "The wallet is locked and the gateway asks for a signature.",
        "Unlock it on the console, or start with --passphrase-file.",
    )
