"""What a node's engine says it did: read off it, added to the node's own counts, drawn by screens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from kvasir_console.errors import KvasirError
from kvasir_console.node.snapshot import WorkView
from kvasir_console.node.statements import StatementBook
from kvasir_console.node.supervisor import Engine
from kvasir_console.node.telemetry import Counters, Telemetry

SAMPLE_S = 1.0


class EngineWork:
    """``run`` until cancelled; ``lost`` when the engine ended. Totals go on over its restarts."""

    def __init__(
        self,
        engine: Engine,
        statements: StatementBook,
        on_newer_plan: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_newer_plan: the engine heard from its ring's neighbours that there is one.
        """
        self.rss_bytes: int | None = None
        """Of the engine's process."""
        self._engine = engine
        self._statements = statements
        self._on_newer_plan = on_newer_plan
        self._clock = clock
        self._telemetry = Telemetry()
        self._sampled_at = clock()
        self._expert_pairs: tuple[int, ...] = ()

    async def run(self) -> None:
        """Counters of the engine, once a second."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            with contextlib.suppress(KvasirError):
                await self.sample()

    async def sample(self) -> None:
        """Look at the engine once, if it is up. Raises ``EngineError``."""
        client = self._engine.client
        if client is None:
            return
        stats = await client.stats()
        now = self._clock()
        served = stats["served"] or {}
        ring = stats["ring"] or {}
        if ring.get("behind"):
            self._on_newer_plan()
        counters = Counters(
            requests=int(served.get("requests", 0)),
            rows=int(served.get("rows", ring.get("rows", 0))),
            pairs=int(served.get("pairs", 0)),
            tokens=max(int(stats["tokens_total"]), int(ring.get("sampled", 0))),
        )
        self._telemetry.sample(counters, now - self._sampled_at)
        self._sampled_at = now
        total = self._telemetry.view()
        self._statements.work(total.rows, total.pairs)
        self._expert_pairs = tuple(stats["experts"][0]["pairs"]) if stats.get("experts") else ()
        self.rss_bytes = int(stats["rss_bytes"])

    def lost(self) -> None:
        """The engine ended: what it did since the last sample is in no count."""
        self.rss_bytes = None
        self._expert_pairs = ()
        self._statements.unsure()

    def view(self, *, layers: bool) -> WorkView:
        """``layers``: the node serves a window of layers, whose history counts tokens; experts count rows."""
        return replace(self._telemetry.view(layers=layers), expert_pairs=self._expert_pairs)
