"""A running node's money, kept fresh: its accounts, the hub's statements beside its own counts, and claims."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from kvasir_console.errors import KvasirError, WalletError
from kvasir_console.node.accounts import Accounts
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.journal import Journal
from kvasir_console.node.statements import StatementBook
from kvasir_console.node.work import EngineWork

log = logging.getLogger(__name__)


class Wallet(Protocol):
    """The node's signer, as far as it matters here."""

    @property
    def locked(self) -> bool: ...

    async def refresh(self) -> None:
        """Raises ``WalletError``."""
        ...


class Earnings:
    """``run`` until cancelled; ``claim`` at any time, or by itself with ``auto_claim``."""

    def __init__(
        self,
        accounts: Accounts,
        statements: StatementBook,
        work: EngineWork,
        credentials: Credentials,
        wallet: Wallet,
        journal: Journal,
        *,
        pause_s: float,
        auto_claim: bool,
    ) -> None:
        self._accounts = accounts
        self._statements = statements
        self._work = work
        self._credentials = credentials
        self._wallet = wallet
        self._journal = journal
        self._pause_s = pause_s
        self._auto_claim = auto_claim

    async def run(self) -> None:
        while True:
            with contextlib.suppress(WalletError):
                await self._wallet.refresh()  # it locks itself when nobody uses it
            try:
                await self._refresh()
            except KvasirError as error:
                log.info("earnings are not refreshed: %s", error)
            await asyncio.sleep(self._pause_s)

    async def claim(self) -> dict[str, object]:
        """Claim what is pending. Raises ``LedgerError`` below the minimum, ``WalletError`` while locked."""
        claim = await self._accounts.claim()
        self._journal.note(f"Claimed {claim.get('micro_kvr')} micro-KVR.")
        return claim

    async def _refresh(self) -> None:
        await self._accounts.refresh()
        await self._statements.fetch(self._credentials.with_token)
        await self._work.sample()  # what is stated may be younger than the last sample
        await self._statements.agree(self._credentials.with_token, self._credentials.session_key)
        if self._auto_claim and self._accounts.claimable and not self._wallet.locked:
            await self.claim()
