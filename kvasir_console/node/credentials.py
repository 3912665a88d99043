"""The participation token: minted by a signature, kept in a private file, renewed before it expires.

The wallet signs, or a session key it delegated to (``session_key``) where the gateway knows such keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvasir_console.errors import KvasirError, WalletError
from kvasir_console.node.market import GatewayInfo, Market, NodeToken
from kvasir_console.node.session_key import SessionKey, new_session_key, read_session_key, write_session_key
from kvasir_console.relay.wire.signed import ActionKind, check_bridge_challenge
from kvasir_console.wallet import private_file

log = logging.getLogger(__name__)

EXPIRY_SKEW_S = 60.0
_MAX_FILE_BYTES = 16 * 1024
T = TypeVar("T")


class Prover(Protocol):
    """Signs the two texts that taking part needs; the wallet's signer process stands behind it."""

    async def prove_participation(self, host: str, wallet: str, nonce: str, message: str) -> bytes: ...

    async def sign_delegation(self, key: str, until_s: int, challenge: dict[str, Any]) -> tuple[str, bytes]: ...


class Credentials:
    """Hands out a valid node token, minting one when there is none, it nears its end, or it was refused."""

    def __init__(self, market: Market, prover: Prover, wallet: str, file: Path) -> None:
        self._market = market
        self._prover = prover
        self._wallet = wallet
        self._file = file
        self._token = self._read()
        self._session_file = file.with_name("session-key.json")
        self._session = read_session_key(self._session_file, market.gateway, wallet)
        self._delegation = False
        self._minting = asyncio.Lock()

    def learn(self, info: GatewayInfo) -> None:
        """What the gateway's configuration says about session keys."""
        self._delegation = info.delegation

    @property
    def valid(self) -> bool:
        token = self._token
        return token is not None and token.expires_at_s - EXPIRY_SKEW_S > time.time()

    @property
    def session_key(self) -> SessionKey | None:
        """The key that may act for the wallet while it is locked, if there is one and it has not ended."""
        session = self._session
        return session if session is not None and session.until_s > time.time() else None

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

    async def with_token(self, call: Callable[[str], Awaitable[T]]) -> T:
        """Run ``call(token)``; a refused token is minted anew once. Raises as ``get`` and ``call``."""
        try:
            return await call(await self.get())
        except WalletError as error:
            if error.code != "token_refused":
                raise
            return await call(await self.get(refresh=True))

    async def delegate(self) -> bool:
        """Have the wallet delegate to a session key, unless a fresh one is there; whether a new one was made.

        Raises:
            WalletError: the wallet is locked.
            NetworkError: the gateway cannot be reached.
        """
        now_s = time.time()
        if not self._delegation or (self._session is not None and self._session.fresh(now_s)):
            return False
        session = new_session_key(self._market.gateway, self._wallet, now_s)
        challenge = await self._market.action_challenge(self._wallet, ActionKind.DELEGATE.value)
        message, signature = await self._prover.sign_delegation(session.address, session.until_s, challenge)
        await self._market.delegate(self._wallet, message, signature)
        write_session_key(self._session_file, session)
        self._session = session
        return True

    async def _mint(self) -> NodeToken:
        session = self._session
        if self._delegation and session is not None and session.until_s > time.time():
            try:
                return await self._mint_with(session)
            except WalletError as error:
                if error.code != "token_refused":
                    raise
                log.info("the session key is given up: %s", error)
                self._session = None
                self._session_file.unlink(missing_ok=True)
        challenge = await self._market.challenge(self._wallet)
        signature = await self._prover.prove_participation(
            self._market.host, self._wallet, challenge.nonce, challenge.message
        )
        return await self._market.node_token(self._wallet, challenge.nonce, signature, time.time())

    async def _mint_with(self, session: SessionKey) -> NodeToken:
        challenge = await self._market.challenge(self._wallet)
        check_bridge_challenge(challenge.message, self._wallet, challenge.nonce)
        signature = session.sign(challenge.message.encode())
        return await self._market.node_token(self._wallet, challenge.nonce, signature, time.time(), key=session.address)

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
