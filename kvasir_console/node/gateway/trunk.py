"""The trunk engines: a child for each model this machine computes, loaded whenever it is up, read for the meter."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kvasir_console.config import EngineConfig
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.backends import TrunkBackend
from kvasir_console.node.gateway.catalog import CatalogModel
from kvasir_console.node.gateway.metering import Meter

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
HUNG_AFTER = 3
"""Readings in a row without an answer after which an engine counts as hung."""

OnReady = Callable[[EngineClient], Awaitable[None]]
OnExit = Callable[[str], None]


class SupervisedEngine(Protocol):
    """A child that is started again whenever it ends (``node.supervisor.Engine``)."""

    @property
    def data_socket(self) -> Path: ...

    async def run(self) -> None:
        """Supervise until cancelled."""
        ...

    async def stop(self) -> None:
        """End the child; ``run`` starts it again."""
        ...


EngineFactory = Callable[[str, OnReady, OnExit], SupervisedEngine]
"""(name, what to do with a connected client, who hears why it ended) to an engine that is not started yet."""


class Trunk:
    """One model's engine. ``sharers`` trunks, this one included, divide the machine's memory among them."""

    def __init__(
        self,
        name: str,
        model: CatalogModel,
        backend: TrunkBackend,
        make_engine: EngineFactory,
        engine: EngineConfig,
        dispatch_wire: str,
        sharers: int = 1,
        dispatch_policy: Mapping[str, Any] | None = None,
        evidence_directory: Path | None = None,
        dispatch_dtype: str = "f32",
    ) -> None:
        self.model = model
        self.engine = make_engine(name, self._ready, self._exited)
        self._backend = backend
        self._config = engine
        self._dispatch_wire, self._dispatch_dtype = dispatch_wire, dispatch_dtype
        self._policy = dict(dispatch_policy or {})
        self._evidence_directory = evidence_directory or ""
        self._sharers = sharers
        self._client: EngineClient | None = None
        self._run_id = ""
        self._unanswered = 0

    @property
    def data_socket(self) -> Path | None:
        return self.engine.data_socket if self._backend.ready else None

    async def read(self, meter: Meter) -> None:
        """Enter the engine's counters in the meter. An engine that does not answer is started anew."""
        client, run_id = self._client, self._run_id
        if client is None or client.closed:
            return
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                coverage = await client.coverage()
        except TimeoutError:
            self._unanswered += 1
            log.warning("the engine of %s does not answer (%d)", self.model.id, self._unanswered)
            if self._unanswered >= HUNG_AFTER:
                self._unanswered = 0
                await self.engine.stop()
            return
        self._unanswered = 0
        for session, wallet in await meter.read_engine(run_id, coverage):
            if await client.pardon(session, wallet):
                log.info("the quarantine of session %s of %s is lifted", session, wallet)

    async def _ready(self, client: EngineClient) -> None:
        log.info("loading %s", self.model.id)
        info = await client.load(
            path=str(self.model.path),
            model=self.model.id,
            role="stage",
            layers=[0, self.model.shape.n_layer],
            context_length=self._config.context_length,
            kv_budget_bytes=self._config.kv_budget_bytes,
            kv_sharers=self._sharers,
            dispatch_timeout_s=self._config.dispatch_timeout_s,
            dispatch_wire=self._dispatch_wire,
            dispatch_dtype=self._dispatch_dtype,
            dispatch_policy=self._policy,
            evidence_directory=str(self._evidence_directory),
        )
        client.on_event = self._heard
        # The engine's counters begin at zero with its load; a new run id keeps them apart from the last ones.
        self._run_id = f"engine:{self.model.id}:{secrets.token_hex(8)}"
        self._client = client
        self._backend.attach(client)
        log.info("%s serves after %.1f s", self.model.id, info["load_s"])

    def _heard(self, event: Mapping[str, Any]) -> None:
        if event.get("event") == "quarantined":
            what = "session %s of %s answered wrongly and is quarantined: %s; evidence: %s"
            log.warning(what, *(event.get(key) for key in ("session", "wallet", "fault", "evidence")))

    def _exited(self, reason: str) -> None:
        self._backend.attach(None)
        self._client = None
        log.warning("the engine of %s is gone: %s", self.model.id, reason)


class Trunks:
    """All trunk engines of a gateway."""

    def __init__(self, trunks: Mapping[str, Trunk]) -> None:
        self._trunks = trunks
        self._reading = asyncio.Lock()

    def data_socket(self, model: str) -> Path | None:
        trunk = self._trunks.get(model)
        return None if trunk is None else trunk.data_socket

    async def read(self, meter: Meter) -> None:
        """One reading of every engine; one that fails does not keep the others from theirs.

        One at a time: an older reading must not be written over a newer one.
        """
        async with self._reading:
            for trunk in self._trunks.values():
                try:
                    await trunk.read(meter)
                except KvasirError as error:
                    log.warning("the work of %s cannot be read: %s", trunk.model.id, error)

    async def run(self) -> None:
        """Supervise all until cancelled; a gateway of rings only has none."""
        async with asyncio.TaskGroup() as group:
            for name, trunk in self._trunks.items():
                group.create_task(trunk.engine.run(), name=f"trunk-{name}")
            await asyncio.Event().wait()
