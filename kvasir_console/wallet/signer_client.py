"""The console's side of the signer's socket. One connection for each request, so a restarted signer is no event."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.errors import KvasirError, NetworkError, WalletError
from kvasir_console.relay.wire import control
from kvasir_console.wallet.intents import Intent
from kvasir_console.wallet.keys import decode_signature
from kvasir_console.wallet.passphrase import encode_passphrase
from kvasir_console.wallet.peer import check_same_user

_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class SignerStatus:
    locked: bool
    address: str
    host: str
    """The gateway the signer is bound to."""
    second_factor: bool = False
    """Whether a transfer needs a one-time code."""


class SignerClient:
    """Asks the signer at ``path``. Every method raises ``WalletError`` ``signer_gone`` if nobody answers there."""

    def __init__(self, path: Path, timeout_s: float = 60.0) -> None:
        """``timeout_s`` bounds one request; deriving the key of a costly vault takes seconds."""
        self._path, self._timeout_s = path, timeout_s

    async def status(self) -> SignerStatus:
        return _status(await self._ask("status"))

    async def unlock(self, passphrase: str) -> SignerStatus:
        """Raises ``WalletError``: ``wrong_passphrase``, ``unlock_throttled`` and what ``open_vault`` raises."""
        encode_passphrase(passphrase)  # refuses what cannot be sent, without repeating it
        return _status(await self._ask("unlock", passphrase=passphrase))

    async def lock(self) -> SignerStatus:
        return _status(await self._ask("lock"))

    async def sign(self, intent: Intent, code: str | None = None) -> bytes:
        """The 64-byte signature over the intent's text, or a transfer's message. Raises ``WalletError`` if it is
        refused or locked.

        Args:
            code: a one-time or back-up code, for a transfer where a second factor is enrolled.
        """
        fields: dict[str, Any] = {"intent": intent.to_json()} | ({} if code is None else {"code": code})
        return decode_signature(str((await self._ask("sign", **fields)).get("signature")))

    async def contacts(self) -> dict[str, str]:
        """The address book. Raises ``WalletError`` ``wallet_locked``."""
        answer = (await self._ask("contacts")).get("contacts")
        return {str(name): str(address) for name, address in answer.items()} if isinstance(answer, dict) else {}

    async def exit(self) -> None:
        await self._ask("exit")

    async def wait_ready(self, timeout_s: float = 10.0) -> SignerStatus:
        """The status, once a signer that is just starting answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                return await self.status()
            except WalletError as error:
                if error.code != "signer_gone" or loop.time() >= deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_unix_connection(self._path)
                try:
                    check_same_user(writer)
                    await control.write_message(writer, {"id": 1, "verb": verb, **fields})
                    answer = await control.read_message(reader)
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, NetworkError):
            raise WalletError(
                "signer_gone", "The signer does not answer.", "It is started again with the console; see the log."
            ) from None
        if "error" in answer:
            raise KvasirError.from_dict(answer["error"])
        return answer


def _status(answer: dict[str, Any]) -> SignerStatus:
    factor = bool(answer.get("second_factor"))
    return SignerStatus(bool(answer["locked"]), str(answer["address"]), str(answer["host"]), factor)
