"""The node's money as its gateway and the chain state it: units, credited, carried, pending, paid, balance."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

from kvasir_console.config import WalletConfig
from kvasir_console.errors import KvasirError, LedgerError
from kvasir_console.node.market import GatewayInfo, Market
from kvasir_console.node.signing import ActionSigner
from kvasir_console.node.snapshot import EarningsView
from kvasir_console.paths import Paths
from kvasir_console.relay.wire.signed import ActionKind

log = logging.getLogger(__name__)


class Accounts:
    """Reads earnings, signs claims. ``refresh`` is called from time to time; ``view`` is what was last known."""

    def __init__(self, market: Market, signer: ActionSigner, wallet: str, config: WalletConfig, paths: Paths) -> None:
        self._market = market
        self._signer = signer
        self._wallet = wallet
        self._config = config
        self._paths = paths
        self._minimum: int | None = None
        self._view = EarningsView()
        self._trouble = ""
        """Why the balance was not refreshed, as the log has it: it is told once, not every few seconds."""

    def learn(self, info: GatewayInfo) -> None:
        """What the gateway's configuration says about money."""
        self._minimum = info.minimum_claim_micro_kvr

    def view(self) -> EarningsView:
        return self._view

    @property
    def claimable(self) -> bool:
        pending = self._view.pending_micro_kvr
        return pending is not None and self._minimum is not None and pending >= max(self._minimum, 1)

    async def refresh(self) -> None:
        """Raises ``NetworkError`` when the gateway cannot be read; the last values then stay."""
        status = await self._market.earnings(self._wallet)
        totals = status.get("totals")
        if not isinstance(totals, dict):
            totals = {}
        claims = await self._market.claims(self._wallet)
        last: dict[str, Any] = claims[-1] if claims else {}
        self._view = EarningsView(
            micro_units=_integer(totals, "microUnits"),
            credited_micro_kvr=_integer(totals, "creditedMicroKvr"),
            carried_micro_kvr=_fraction(totals.get("carriedMicroKvr")),
            pending_micro_kvr=_integer(totals, "pendingMicroKvr"),
            paid_micro_kvr=_integer(totals, "paidMicroKvr"),
            wallet_micro_kvr=self._view.wallet_micro_kvr,
            minimum_claim_micro_kvr=self._minimum,
            claim_state=str(last.get("state", "")),
            last_signature=str(last.get("signature") or ""),
        )
        try:
            await self._refresh_balance()
        except KvasirError as error:
            if str(error) != self._trouble:
                log.info("the balance on chain is not refreshed: %s", error)
            self._trouble = str(error)
        else:
            if self._trouble:
                log.info("the balance on chain is refreshed again")
            self._trouble = ""

    async def _refresh_balance(self) -> None:
        # The Solana client takes a quarter of a second to import; a node that never shows money never pays it.
        from kvasir_console.wallet.chain import open_chain
        from kvasir_console.wallet.chain_cluster import ClusterPin

        pin = ClusterPin(self._paths.state / "clusters.json", self._wallet)
        async with open_chain(self._config, pin=pin) as chain:
            balance = await chain.balance_micro_kvr(self._wallet, self._config.mint)
        self._view = replace(self._view, wallet_micro_kvr=balance)

    async def claim(self) -> dict[str, Any]:
        """Claim everything that is pending for this wallet with one signed action.

        Raises:
            LedgerError: nothing to claim, or less than the gateway's minimum.
            WalletError: the wallet is locked.
        """
        if self._minimum is None:
            self.learn(await self._market.config())
        await self.refresh()
        pending = self._view.pending_micro_kvr or 0
        if not self.claimable:
            raise LedgerError(
                "nothing_to_claim",
                f"{pending} micro-KVR are pending; the gateway pays from {self._minimum} on.",
                "It accrues with the work this node does.",
            )
        challenge = await self._market.action_challenge(self._wallet, ActionKind.CLAIM.value)
        message, signature = await self._signer.sign_action(ActionKind.CLAIM, {}, challenge)
        claim = await self._market.claim(self._wallet, message, signature)
        await self.refresh()
        return claim


def _fraction(value: object) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"[0-9]{1,40}/[0-9]{1,40}", value) else None


def _integer(values: dict[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if type(value) is int else None
