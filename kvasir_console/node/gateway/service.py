"""The gateway process, put together: front, hub, HTTP API, trunk engines, meter, settlement.

One port is open to others, the front's. The HTTP server listens on a Unix socket behind it; the settlement polls that
socket with the service token, as a gateway on another machine would.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from starlette.applications import Starlette

from kvasir_console.config import Config
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.node.gateway.app import make_app
from kvasir_console.node.gateway.authority import HubAuthority
from kvasir_console.node.gateway.backends import Backend, BackendInfo, RingBackend, TrunkBackend
from kvasir_console.node.gateway.catalog import CatalogModel, Slices, read_catalog
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.domains import own_domains
from kvasir_console.node.gateway.generation import Generations
from kvasir_console.node.gateway.httpserver import serving
from kvasir_console.node.gateway.identity import Identity, Secrets
from kvasir_console.node.gateway.info import Info
from kvasir_console.node.gateway.ledger import Ledger
from kvasir_console.node.gateway.metering import Meter
from kvasir_console.node.gateway.openai import NO_MODEL, OpenAI
from kvasir_console.node.gateway.participation import Participation
from kvasir_console.node.gateway.payments import Payments
from kvasir_console.node.gateway.plans import make_rings
from kvasir_console.node.gateway.settle import Settler, read_bonuses
from kvasir_console.node.gateway.slots import Slots
from kvasir_console.node.gateway.stage_reports import StageReports
from kvasir_console.node.gateway.standbys import Standbys, missing_of
from kvasir_console.node.gateway.statements import Statements
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.trunk import EngineFactory, OnExit, OnReady, SupervisedEngine, Trunk, Trunks
from kvasir_console.node.supervisor import Engine
from kvasir_console.paths import Paths, check_socket_path
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.front import Front, server_context
from kvasir_console.relay.hub import Hub
from kvasir_console.relay.tls import is_loopback

log = logging.getLogger(__name__)

READ_S = 2.0
"""Pause between two readings of the engines' counters: the most work that a crash of an engine can leave unpaid."""
SWEEP_S = 5.0
CLEAN_S = 3600.0


class GatewayService:
    """``async with`` starts everything but waits for no model to load: ``/v1/health`` says when one serves."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        make_engine: EngineFactory | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._paths = paths
        self._make_engine = make_engine or self._supervised_engine
        self._clock = clock
        self._stack = AsyncExitStack()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def port(self) -> int:
        return self._front.port

    @property
    def public_url(self) -> str:
        return f"{'https' if self._config.gateway.tls_cert else 'http'}://{self._identity.domains[0]}"

    @property
    def warning(self) -> str:
        """What an operator has to know about a gateway that runs and is of no use; empty if all is well."""
        if self._config.gateway.models:
            return ""
        return (
            f"{NO_MODEL} It keeps its books and takes claims; requests and nodes are turned away. Add a "
            f"[[gateway.models]] table (id, path, placement) to {self._paths.config_file} and start it again."
        )

    @property
    def hub_key(self) -> str:
        return self._identity.hub_key

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    async def __aenter__(self) -> GatewayService:
        """Raises ``KvasirError``: configuration, checkpoints, secrets, database or port."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Running answers are cut off and recorded, the last work is settled, then everything ends."""
        await self._stack.aclose()

    async def wait(self) -> None:
        """Until a part of the service ends by itself, which is a failure; raises what it raised."""
        done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise EngineError(
            "gateway_part_ended", f"A part of the gateway ended: {', '.join(t.get_name() for t in done)}."
        )

    async def settle(self) -> int:
        """Read every counter and credit what grew, now; the micro-KVR credited."""
        return await self._settler.poll()

    async def _start(self) -> None:
        gateway, paths = self._config.gateway, self._paths
        paths.ensure()
        self._bonuses = read_bonuses(gateway.bonus_wallets)
        token_file = Path(gateway.service_token_file).expanduser() if gateway.service_token_file else None
        secrets = await asyncio.to_thread(Secrets.load, paths.data / "gateway", token_file)
        catalog = await asyncio.to_thread(read_catalog, gateway.models)
        database = gateway.database or f"sqlite:///{paths.data / 'gateway.sqlite'}"
        self._store = await asyncio.to_thread(Store.open, database)
        self._stack.callback(self._store.close)
        self._identity = Identity(secrets, self._store, self._clock)
        self._ledger = Ledger(self._store)
        self._census = Census(gateway.target_replicas)
        self._census.offer(offered for model in catalog.values() if (offered := model.offered))
        self._meter = Meter(self._store, self._census, self._clock)
        self._generations = Generations(self._store, self._clock)
        self._rings = await asyncio.to_thread(make_rings, catalog.values(), self._store, self._identity)
        trunks: dict[str, Trunk] = {}
        self._trunks = Trunks(trunks)
        self._hub = Hub(HubAuthority(self._identity, self._census, self._rings, self._trunks, self._meter, self._clock))
        self._statements = Statements(self._store, self._identity, self._hub, self._clock)
        await self._statements.restore()
        self._stage_reports = StageReports(
            self._store, self._identity, self._census, self._rings, self._hub, self._clock
        )
        await self._stage_reports.restore()
        self._meter.watch_bytes(self._hub.sessions)
        self._meter.watch_engines(lambda: self._trunks.read(self._meter))
        backends = [self._backend(number, model, trunks) for number, model in enumerate(catalog.values())]
        if trunks:
            self._spawn("engines", self._trunks.run())
        self._standbys = Standbys(
            self._rings,
            self._store,
            self._identity,
            self._census,
            self._hub,
            grace_s=gateway.standby_grace_s,
            missing=missing_of({backend.info.model_id: backend for backend in backends}),
            clock=self._clock,
        )
        await self._standbys.restore()
        socket = check_socket_path(paths.runtime / "gateway.http")
        await self._open_port(socket)
        self._stack.push_async_callback(self._generations.close)
        await self._stack.enter_async_context(serving(self._app(backends, catalog), socket))
        self._stack.push_async_callback(self._flush_counts)
        self._stack.push_async_callback(self._hub.close)
        client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket)), base_url="http://gateway", trust_env=False
        )
        await self._stack.enter_async_context(client)
        self._settler = Settler(
            client,
            secrets.service_token,
            self._ledger,
            poll_s=gateway.settlement_poll_s,
            bonuses=self._bonuses,
            clock=self._clock,
        )
        # The last to be pushed is the first to run: answers end and are settled while everything still works.
        self._stack.push_async_callback(self._settle_last)
        self._stack.push_async_callback(self._generations.close)
        self._spawn("settlement", self._settler.run())
        self._spawn("meter", self._read_engines())
        self._spawn("sweep", self._sweep())
        self._spawn("retention", self._forget())
        if self._rings:
            self._spawn("standbys", self._standbys.run())
        log.info("the gateway serves %s", self.public_url)
        if self.warning:
            log.warning("%s", self.warning)

    def _backend(self, number: int, model: CatalogModel, trunks: dict[str, Trunk]) -> Backend:
        """What answers for a model; a trunk's engine is added to ``trunks``."""
        if model.placement == "ring":
            ring = self._rings[model.id]
            backend = RingBackend(BackendInfo(model.id, model.name, ring, model.shape.context_length), ring, self._hub)
            backend.planned = partial(self._rings.__getitem__, model.id)
            self._stack.push_async_callback(backend.close)
            return backend
        trunk = TrunkBackend(BackendInfo(model.id, model.name, None, model.shape.context_length))
        engine, wire = self._config.engine, self._config.gateway.dispatch_wire
        sharers = sum(each.placement != "ring" for each in self._config.gateway.models)
        trunks[model.id] = Trunk(
            f"trunk{number}",
            model,
            trunk,
            self._make_engine,
            engine,
            wire,
            sharers,
            self._config.gateway.dispatch_policy(),
            self._paths.state / "evidence",
            self._config.gateway.dispatch_dtype,
        )
        return trunk

    async def _open_port(self, socket: Path) -> None:
        gateway = self._config.gateway
        certificate = Path(gateway.tls_cert) if gateway.tls_cert else None
        tls = server_context(certificate, Path(gateway.tls_key)) if certificate else None
        self._front = Front(self._hub, socket, host=gateway.host, port=gateway.port, tls=tls)
        await self._front.start()
        self._stack.push_async_callback(self._front.close)
        self._identity.domains = own_domains(gateway.host, self._front.port, certificate)

    def _app(self, backends: Sequence[Backend], catalog: Mapping[str, CatalogModel]) -> Starlette:
        config, gateway = self._config, self._config.gateway
        openai = OpenAI(
            backends,
            self._generations,
            self._identity,
            public_url=self.public_url,
            open_access=is_loopback(gateway.host),
            make_slots=lambda: Slots(gateway.max_requests, gateway.max_waiting),
        )
        info = Info(self._identity, self._store, openai, gateway, config.wallet, self.public_url)
        slices = Slices(self._paths.cache / "slices", catalog)
        participation = Participation(
            self._identity, self._census, slices, self._rings, self._meter, self._hub, self._clock
        )
        payments = Payments(
            self._identity,
            self._ledger,
            self._census,
            minimum_micro_kvr=gateway.minimum_claim_micro_kvr,
            bonuses=self._bonuses,
            clock=self._clock,
        )
        return make_app(
            [
                *openai.routes(),
                *info.routes(),
                *participation.routes(),
                *payments.routes(),
                *self._statements.routes(),
                *self._standbys.routes(),
                *self._stage_reports.routes(),
            ]
        )

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.create_task(work, name=f"gateway-{name}")
        self._stack.push_async_callback(_end, self._tasks[name])

    def _supervised_engine(self, name: str, on_ready: OnReady, on_exit: OnExit) -> SupervisedEngine:
        log_file = self._paths.state / f"engine-{name}.log"
        return Engine(name, self._paths.runtime, log_file, self._config.engine, on_ready, on_exit)

    async def _read_engines(self) -> None:
        while True:
            await asyncio.sleep(READ_S)
            try:
                await self._trunks.read(self._meter)
                await self._statements.flush()
                await self._stage_reports.flush()
            except KvasirError as error:
                log.warning("the meter: %s", error)

    async def _flush_counts(self) -> None:
        try:
            await self._statements.flush()
            await self._stage_reports.flush()
        except KvasirError as error:
            log.warning("the last byte counts are not written: %s", error)

    async def _sweep(self) -> None:
        """End the sessions of workers that went stale: whoever does not report is not served."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for worker in self._census.take_stale(self._clock()):
                await self._hub.close_sessions(
                    key=worker.session,
                    wallet=worker.wallet,
                    code=CloseCode.UNKNOWN_SESSION,
                    reason="no coverage report for two minutes",
                )

    async def _forget(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._store.forget_content, int(self._clock()))
                await self._statements.forget()
            except KvasirError as error:
                log.warning("old answers are not erased: %s", error)
            await asyncio.sleep(CLEAN_S)

    async def _settle_last(self) -> None:
        try:
            await self.settle()
        except KvasirError as error:
            log.warning("the last work is not settled yet; it is metered and will be: %s", error)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        try:
            await task
        except Exception:
            log.exception("%s failed", task.get_name())
