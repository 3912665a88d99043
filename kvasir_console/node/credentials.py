"""The participation token: minted by a wallet signature, kept in a private file, renewed before it expires."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from kvasir_console.errors import KvasirError
from kvasir_console.node.market import Market, NodeToken
from kvasir_console.wallet import private_file

EXPIRY_SKEW_S = 60.0
_MAX_FILE_BYTES = 16 * 1024


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
        self._minting = asyncio.Lock()

    @property
    def valid(self) -> bool:
        token = self._token
        return token is not None and token.expires_at_s - EXPIRY_SKEW_S > time.time()

    async def get(self, *, refresh: bool = False) -> str:
        """The token's text. ``refresh`` mints a new one; of several callers at once, only the first does.

        Raises:
            WalletError: the wallet is locked and a new token must be signed for, or this wallet is not admitted.
            NetworkError: the gateway cannot be reached.
        """
        before = self._token
        async with self._minting:
            token = self._token
            if token is None or not self.valid or (refresh and token is before):
                token = await self._mint()
                self._token = token
                self._write(token)
        return token.value

    async def _mint(self) -> NodeToken:
        challenge = await self._market.challenge(self._wallet)
        signature = await self._prover.prove_participation(
            self._market.host, self._wallet, challenge.nonce, challenge.message
        )
        return await self._market.node_token(self._wallet, challenge.nonce, signature, time.time())

    def _read(self) -> NodeToken | None:
        """The kept token, unless it is another wallet's or gateway's, or not readable: then a new one is minted."""
        with contextlib.suppress(KvasirError, ValueError, KeyError, RecursionError):
            data = json.loads(private_file.read(self._file, _MAX_FILE_BYTES))
            if not isinstance(data, dict) or data["gateway"] != self._market.gateway or data["wallet"] != self._wallet:
                return None
            if isinstance(data["value"], str) and isinstance(data["expires_at_s"], float):
                return NodeToken(data["value"], self._wallet, data["expires_at_s"])
        return None

    def _write(self, token: NodeToken) -> None:
        content = json.dumps({**asdict(token), "gateway": self._market.gateway})
        private_file.write(self._file, content.encode(), replace=True)
