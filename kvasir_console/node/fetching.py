"""A slice's files: fetched and verified once, and known again as long as nobody touched them."""

from __future__ import annotations

from pathlib import Path

from kvasir_console.node import hardware
from kvasir_console.node.ahead import Ahead, Identity, as_if_served, identity
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.holding import Holding, RingHolding
from kvasir_console.node.journal import Journal
from kvasir_console.node.market import Market
from kvasir_console.node.phase import Phase
from kvasir_console.node.placement.plan import Plan


class Fetching:
    """Makes sure of files before an engine is asked to load them."""

    def __init__(
        self,
        market: Market,
        credentials: Credentials,
        journal: Journal,
        directory: Path,
        device: str,
        memory_budget_mib: int,
    ) -> None:
        """
        Args:
            device: the engine's, whose memory bounds a slice unless the owner set ``memory_budget_mib``.
        """
        self._market = market
        self._credentials = credentials
        self._journal = journal
        self._directory = directory
        self._device = device
        self._memory_budget_mib = memory_budget_mib
        self._ahead = Ahead()
        self._verified: Identity | None = None
        """Of the slice's files when they were verified."""

    async def fetch(self, holding: Holding) -> None:
        """Have the files of what is to be served. Raises ``KvasirError``."""
        if isinstance(holding, RingHolding) and not holding.fetched:
            found = self._ahead.find(holding.plan, holding.stage)
            if found is not None:  # the node stood by for it
                holding.file, self._verified = found
        if holding.fetched and self._verified == identity(holding.fetched):
            return  # the very files that were verified: only their engine was lost
        await self._download(holding)
        self._verified = identity(holding.fetched)

    async def fetch_ahead(self, plan: Plan, wallet: str) -> None:
        """Have the files of every window that ``wallet`` stands by for. Raises ``KvasirError``."""
        for stage in plan.stands_by(wallet):
            if self._ahead.find(plan, stage) is None:
                holding = as_if_served(plan, stage, wallet)
                await self._download(holding)
                self._ahead.keep(plan, stage, holding.file)

    async def _download(self, holding: Holding) -> None:
        what = holding.describe()
        self._journal.enter(Phase.DOWNLOADING, f"Fetching {what}.")
        budget = hardware.budget_bytes(hardware.probe(self._device), self._memory_budget_mib)
        try:
            await self._credentials.with_token(
                lambda token: holding.fetch(
                    self._market.client, token, self._directory, budget, self._journal.progress(what)
                )
            )
        finally:
            self._journal.download = None
