"""The node's side of its wallet: the signer child, its state, and the three things a node asks it to sign."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvasir_console.errors import SystemResourceError, WalletError
from kvasir_console.node.supervisor import ChildProcess, module_argv
from kvasir_console.paths import Paths, check_socket_path
from kvasir_console.relay.wire.signed import ActionKind, action_text
from kvasir_console.wallet.delegation import Delegation
from kvasir_console.wallet.intents import ActionIntent, DelegationIntent, Participation
from kvasir_console.wallet.signer_client import SignerClient
from kvasir_console.wallet.vault import public_accounts

log = logging.getLogger(__name__)

_RESTART_S = 2.0


class ActionSigner(Protocol):
    """Whoever signs an action for the wallet: a running node's signer, or one that was started for it."""

    async def sign_action(
        self, action: ActionKind, details: dict[str, Any], challenge: dict[str, Any]
    ) -> tuple[str, bytes]:
        """The text and signature of one action. Raises ``WalletError`` while locked or for a bad challenge."""
        ...


class WalletSigner:
    """Supervises the signer process. The address is known while locked; the key never leaves the child."""

    def __init__(self, paths: Paths, host: str, idle_lock_s: float = 0.0) -> None:
        """Raises ``WalletError`` if there is no vault, with the command that makes one.

        Args:
            idle_lock_s: lock after so long without a signature; 0 never.
        """
        if not paths.vault_file.exists():
            raise WalletError(
                "no_wallet",
                f"There is no wallet at {paths.vault_file}.",
                "Make one with: kvasir-console wallet create",
            )
        self.address = public_accounts(paths.vault_file)[0].address
        self.locked = True
        self._host = host
        self._idle_lock_s = idle_lock_s
        self._vault = paths.vault_file
        self._socket = check_socket_path(paths.runtime / "signer.sock")
        self._client = SignerClient(self._socket)
        self._child: ChildProcess | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, log_file: Path) -> None:
        argv = module_argv(
            "kvasir_console.wallet.signer",
            *("--vault", str(self._vault), "--socket", str(self._socket), "--host", self._host),
            *("--idle-lock-s", str(self._idle_lock_s)),
            *("--kinds", Participation.kind, DelegationIntent.kind, ActionIntent.kind),
        )
        self._child = ChildProcess("signer", argv, log_file)
        await self._child.start()
        self._watch = asyncio.create_task(self._supervise(self._child), name="signer")
        try:
            await self._client.wait_ready()
        except BaseException:
            await self.stop()
            raise

    async def _supervise(self, child: ChildProcess) -> None:
        """A signer that dies comes back locked: the key died with it."""
        while True:
            report = await child.wait()
            self.locked = True
            log.warning("%s It is started again and the wallet is locked.", report.reason)
            await asyncio.sleep(_RESTART_S)
            while True:
                try:
                    await child.start()
                    break
                except SystemResourceError as error:
                    log.error("%s", error)
                await asyncio.sleep(_RESTART_S)

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self._child is not None:
            await self._child.stop()

    async def unlock(self, passphrase: str) -> None:
        self.locked = (await self._client.unlock(passphrase)).locked

    async def lock(self) -> None:
        self.locked = (await self._client.lock()).locked

    async def refresh(self) -> None:
        """Learn whether the signer locked itself meanwhile. Raises ``WalletError`` ``signer_gone``."""
        self.locked = (await self._client.status()).locked

    async def prove_participation(self, host: str, wallet: str, nonce: str, message: str) -> bytes:
        """Sign a participation challenge. Raises ``WalletError`` while locked, or for another text than was asked."""
        return await self._client.sign(Participation(host=host, message=message, wallet=wallet, nonce=nonce))

    async def sign_delegation(self, key: str, until_s: int, challenge: dict[str, Any]) -> tuple[str, bytes]:
        """The text and signature that let a session key take part for this wallet."""
        nonce, issued, expires = _challenge(challenge)
        signature = await self._client.sign(DelegationIntent(self._host, key, until_s, nonce, issued, expires))
        details = Delegation(key, until_s).details()
        text = action_text(self._host, ActionKind.DELEGATE, self.address, details, nonce, issued, expires)
        return text, signature

    async def sign_action(
        self, action: ActionKind, details: dict[str, Any], challenge: dict[str, Any]
    ) -> tuple[str, bytes]:
        """The text and signature of one action. Only this wallet's own gateway is ever named in it."""
        return await sign_action(self._client, self._host, self.address, action, details, challenge)


@dataclass(frozen=True, slots=True)
class SessionSigner:
    """Actions signed by a signer that was started and unlocked for them (``wallet.signer_session``)."""

    client: SignerClient
    host: str
    wallet: str

    async def sign_action(
        self, action: ActionKind, details: dict[str, Any], challenge: dict[str, Any]
    ) -> tuple[str, bytes]:
        return await sign_action(self.client, self.host, self.wallet, action, details, challenge)


async def sign_action(
    client: SignerClient,
    host: str,
    wallet: str,
    action: ActionKind,
    details: dict[str, Any],
    challenge: dict[str, Any],
) -> tuple[str, bytes]:
    nonce, issued, expires = _challenge(challenge)
    signature = await client.sign(ActionIntent(host, action, details, nonce, issued, expires))
    return action_text(host, action, wallet, details, nonce, issued, expires), signature


def _challenge(challenge: dict[str, Any]) -> tuple[str, str, str]:
    nonce, issued, expires = (str(challenge.get(key, "")) for key in ("nonce", "issued_at", "expires_at"))
    return nonce, issued, expires
