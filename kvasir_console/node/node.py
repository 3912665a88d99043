"""A node: from an unlocked wallet to a served slice and earned KVR.

The claim path is one walk through ``phase.Phase``: token, assignment (a signed plan's window, or experts from the
market), download, verification, load, report, dial, serve. Whatever fails on the way is named in the phase, and the
walk begins again after a pause with what is still good: the token, the verified file, the loaded engine.

Each step has its module: ``credentials`` keeps the token, ``search`` finds a slice, ``fetching`` has its files,
``supervisor`` the engine; ``coverage`` reports, ``sessions`` dials. Beside the walk ``work`` counts what the engine
did, ``earnings`` and ``reports`` see to the money, ``journal`` tells people. This one owns the order of things, what is
held now (a ``holding``), and what wakes the walk from a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable

from kvasir_console import __version__
from kvasir_console.config import Config
from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import (
    ConfigError,
    EngineError,
    KvasirError,
    ModelError,
    NetworkError,
    SystemResourceError,
)
from kvasir_console.node import hardware, phase
from kvasir_console.node.accounts import Accounts
from kvasir_console.node.admin import Handler
from kvasir_console.node.coverage import Coverage
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.direct import DirectEdges
from kvasir_console.node.earnings import Earnings
from kvasir_console.node.fetching import Fetching
from kvasir_console.node.holding import ExpertHolding, Holding, RingHolding
from kvasir_console.node.hubpin import HubPin
from kvasir_console.node.journal import Journal
from kvasir_console.node.market import GatewayInfo, Market
from kvasir_console.node.phase import Phase
from kvasir_console.node.placement.plan import Plan
from kvasir_console.node.reports import StageReporter
from kvasir_console.node.search import Search
from kvasir_console.node.sessions import RelaySessions
from kvasir_console.node.signing import WalletSigner
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.node.statements import StatementBook
from kvasir_console.node.supervisor import Engine
from kvasir_console.node.work import EngineWork
from kvasir_console.node.worker_id import worker_id
from kvasir_console.paths import Paths
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.uplink import UplinkPhase, UplinkState
from kvasir_console.relay.wire.control import Message

log = logging.getLogger(__name__)

STANDBY_POLL_S = 5.0
"""How often a node that stands by asks for the plan, at least."""
DIRECT_POLL_S = 20.0
"""A node whose edges may go past the relay reports at least so often: by that the gateway knows that it is there."""
Listener = Callable[[NodeSnapshot], None]


class Node:
    """One node. ``run`` until ``stop``; ``snapshot`` at any time."""

    def __init__(self, config: Config, paths: Paths) -> None:
        network, node, engine = config.network, config.node, config.engine
        self._config = config
        self._paths = paths
        self._journal = Journal(self._phase_changed)
        self._listeners: list[Listener] = []
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()

        # Who the node is, and to whom
        self._market = market = Market(network.gateway, ca_file=network.ca_file, timeout_s=network.request_timeout_s)
        self._signer = WalletSigner(paths, market.host, config.wallet.idle_lock_s)
        self.wallet = self._signer.address
        self.name = node.name or hardware.host_name()
        self.worker_id = worker_id(self.wallet, self.name)
        host = market.host.replace(":", "-")
        self._pin_file = paths.state / f"hub-key-{host}"
        token_file = paths.state / "node-token.json"
        self._credentials = credentials = Credentials(market, self._signer, self.wallet, token_file)
        self._info: GatewayInfo | None = None

        # What it serves
        self._holding: Holding | None = None
        self._engine = Engine(
            "node",
            paths.runtime,
            paths.state / "engine.log",
            engine,
            on_ready=self._engine_ready,
            on_exit=self._engine_exited,
        )
        self._loaded: EngineClient | None = None
        """The engine that was told to load the slice; another one has to be told again."""
        evidence = paths.state / "evidence"
        self._search = Search(market, credentials, node, engine, self.wallet, self.worker_id, self._pin_file, evidence)
        self._fetching = Fetching(
            market, credentials, self._journal, paths.shards, engine.device, node.memory_budget_mib
        )
        self._direct = DirectEdges(node, network.gateway, self._engine.data_socket)
        self._coverage = Coverage(market, credentials, self._direct, self.wallet, self.worker_id, engine.device)

        # What it earns
        self._accounts = Accounts(market, self._signer, self.wallet, config.wallet, paths)
        self._statements = StatementBook(
            market, self.wallet, paths.state / f"statements-{host}.json", HubPin(self._pin_file)
        )
        self._work = EngineWork(self._engine, self._statements, self._wake.set)
        self._earnings = Earnings(
            self._accounts,
            self._statements,
            self._work,
            credentials,
            self._signer,
            self._journal,
            pause_s=min(10.0, node.poll_s),
            auto_claim=node.auto_claim,
        )
        self._stage = StageReporter(market, credentials, self.wallet, self._ring_stage, self._wake.set)

        self._sessions = RelaySessions(
            market,
            credentials,
            self._statements,
            self._direct,
            network,
            self._engine.data_socket,
            self._session_changed,
        )

    # What others see and ask

    def snapshot(self) -> NodeSnapshot:
        now_s = time.time()
        return NodeSnapshot(
            at_s=now_s,
            version=__version__,
            pid=os.getpid(),
            engine_pid=self._engine.pid,
            name=self.name,
            worker_id=self.worker_id,
            wallet=self.wallet,
            wallet_locked=self._signer.locked,
            gateway=self._market.gateway,
            state=self._journal.state,
            held=None if self._holding is None else self._holding.view(),
            relays=self._sessions.views(now_s),
            work=self._work.view(layers=isinstance(self._holding, RingHolding)),
            earnings=self._accounts.view(),
            statements=self._statements.view(),
            download=self._journal.download,
            machine=hardware.view(self._config.engine.device, self._work.rss_bytes),
            log=self._journal.lines,
        )

    def verbs(self) -> dict[str, Handler]:
        """What the node's admin socket answers."""

        async def status(_: Message) -> Message:
            return {"snapshot": self.snapshot().to_json()}

        async def claim(_: Message) -> Message:
            return {"claim": await self.claim()}

        async def unlock(message: Message) -> Message:
            await self.unlock(str(message.get("passphrase", "")))
            return {}

        async def lock(_: Message) -> Message:
            await self.lock()
            return {}

        async def stop(_: Message) -> Message:
            self.stop()
            return {}

        return {"status": status, "claim": claim, "unlock": unlock, "lock": lock, "stop": stop}

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with a snapshot at every change of phase."""
        self._listeners.append(listener)

    async def unlock(self, passphrase: str) -> None:
        """Raises ``WalletError`` for a wrong passphrase."""
        await self._signer.unlock(passphrase)
        self._journal.note("The wallet is unlocked.")
        self._wake.set()

    async def lock(self) -> None:
        await self._signer.lock()
        self._journal.note("The wallet is locked.")

    async def claim(self) -> dict[str, object]:
        """Claim what is pending. Raises ``LedgerError`` below the minimum, ``WalletError`` while locked."""
        return await self._earnings.claim()

    def stop(self) -> None:
        self._stopping.set()

    # The life of the node

    async def run(self, passphrase: str | None = None) -> None:
        """Run until ``stop``. Children, sessions and tasks are gone when it returns.

        Raises:
            WalletError: the passphrase is wrong.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._market.close)
            await self._signer.start(self._paths.state / "signer.log")
            stack.push_async_callback(self._signer.stop)
            if passphrase is not None:
                await self.unlock(passphrase)
            await self._direct.start()
            stack.push_async_callback(self._direct.close)
            await self._run()
        self._journal.enter(Phase.STOPPED, "The node stopped.")

    async def _run(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        tasks = [
            asyncio.create_task(loop, name=name)
            for name, loop in (
                ("engine", self._engine.run()),
                ("participate", self._participate()),
                ("sample", self._work.run()),
                ("earnings", self._earnings.run()),
                ("reports", self._stage.run()),
            )
        ]
        try:
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a loop of ours ended by itself: that is a defect, let it be seen
        finally:
            self._journal.enter(Phase.DRAINING, "The node was asked to stop.")
            engine, *others = tasks
            for each in (stopping, *others):
                each.cancel()
            await asyncio.gather(stopping, *others, return_exceptions=True)
            await self._drain()
            await self._stage.finish()
            await self._sessions.drop()
            self._statements.save()
            engine.cancel()  # last: the sessions that just ended were served by it
            await asyncio.gather(engine, return_exceptions=True)

    async def _drain(self) -> None:
        """Part from the trunks that experts serve."""
        client, holding = self._engine.client, self._holding
        if client is not None and self._sessions.dialled and isinstance(holding, ExpertHolding):
            await holding.drain(client)

    # The claim path

    async def _participate(self) -> None:
        """Walk the claim path for ever; a failure is shown, then the walk begins again."""
        retry_s = self._config.node.retry_s
        while True:
            try:
                await self._walk()
            except KvasirError as error:
                self._journal.enter(*phase.after(error, retry_s))
                if not isinstance(error, ConfigError):
                    await self._sessions.drop()
                if error.code != "engine_restarted":  # it is on its way up: be ready for it
                    await self._pause(retry_s)

    async def _walk(self) -> None:
        enter = self._journal.enter
        if self._config.node.serve == "nothing":
            enter(Phase.STOPPED, "This node is configured to serve nothing.", "Set node.serve to change that.")
            await asyncio.Event().wait()
        enter(Phase.AUTHENTICATING, f"Asking {self._market.gateway} for a participation token.")
        info = await self._learn()
        await self._delegate()
        await self._credentials.with_token(self._market.demand)
        if isinstance(self._holding, RingHolding) and await self._search.planned(info) != self._holding.plan:
            self._holding = None
        if self._holding is None:
            self._holding = await self._find_slice(info)
        holding = self._holding
        try:
            await self._fetching.fetch(holding)
        except KvasirError:
            self._holding = None  # another slice may do better than the same one again
            raise
        client = self._loaded = await self._engine.connected()
        enter(Phase.STARTING, f"The engine loads {holding.describe()}.")
        await holding.load(client, self._journal.progress("Loading into the engine"))
        self._journal.download = None
        self._stage.loaded(client, layers=isinstance(holding, RingHolding))
        await self._serve(holding, info)

    async def _learn(self) -> GatewayInfo:
        """What the gateway says of itself. Raises ``NetworkError``."""
        info = self._info = await self._market.config()
        self._accounts.learn(info)
        self._credentials.learn(info)
        self._statements.learn(info)
        return info

    async def _delegate(self) -> None:
        """While the wallet is open, let a session key take part for it: locking it then ends no work."""
        if self._signer.locked:
            return
        try:
            if await self._credentials.delegate():
                self._journal.note("A session key may take part for this wallet while it is locked, for 30 days.")
        except KvasirError as error:
            log.info("there is no session key: %s", error)

    async def _find_slice(self, info: GatewayInfo) -> Holding:
        """Look for one until there is one, standing by meanwhile if a plan says so."""
        poll_s = self._config.node.poll_s
        while True:
            found = await self._search.look(info)
            if isinstance(found, Plan):
                await self._stand_by(found, info)
            elif isinstance(found, str):
                self._journal.enter(Phase.VOLUNTEERING, found, f"The market is asked again every {poll_s:g} s.")
                await self._coverage.report(None, info)
                await self._pause(poll_s)
            else:
                return found

    async def _stand_by(self, plan: Plan, info: GatewayInfo) -> None:
        """Have the windows ready that this wallet stands by for, say so, and wait a while."""
        windows = plan.stands_by(self.wallet)
        named = ", ".join(f"layers {stage.begin} to {stage.end - 1}" for stage in windows)
        why, ready = f"Stands by for {named} of {plan.model}.", True
        try:
            await self._fetching.fetch_ahead(plan, self.wallet)
        except (SystemResourceError, ModelError) as error:
            why, ready = f"Cannot stand by for {named} of {plan.model}: {error.message}", False
        self._journal.enter(Phase.VOLUNTEERING, why, "The gateway's plan says when this node takes over.")
        await self._coverage.report(None, info, stands_by=plan if ready else None)
        await self._pause(min(self._config.node.poll_s, STANDBY_POLL_S))

    async def _serve(self, holding: Holding, info: GatewayInfo) -> None:
        """Report and dial; then keep the report fresh until the engine is lost or the node stops."""
        node = self._config.node
        poll_s = min(node.poll_s, DIRECT_POLL_S if self._direct.enabled else math.inf)
        while True:
            if self._engine.client is not self._loaded:
                raise EngineError("engine_restarted", "The engine ended while it served.", "It loads its slice again.")
            try:
                wired = await self._coverage.report(holding, info)
                if isinstance(holding, RingHolding):
                    await self._follow_plan(holding, info)
                    await self._sessions.introduce(holding, info)
                elif await self._search.named(info):
                    await self._drain()
                    self._holding = None
                    raise NetworkError(
                        "plan_changed", "A ring's plan names this wallet.", "It does what the plan says."
                    )
            except NetworkError as error:
                if not isinstance(self._holding, RingHolding) or not self._sessions.dialled:
                    raise
                # The sessions say themselves whether they live; what a ring's engine holds must not be given up.
                self._journal.note(f"The gateway cannot be asked: {error.message}")
                if error.code == "plan_not_signed":  # the hub may have another key by now, for which the old one signed
                    with contextlib.suppress(NetworkError):
                        info = await self._learn()
                await self._pause(node.retry_s)
                continue
            if wired and not self._sessions.dialled:
                self._journal.enter(Phase.DIALLING, "The gateway waits for this node's sessions.")
                self._sessions.dial(holding, info)
            elif not wired:
                self._journal.enter(Phase.REPORTING, "The gateway has not wired a session for this slice yet.")
            self._show_sessions()
            await self._delegate()
            await self._pause(poll_s if wired else node.retry_s)

    async def _follow_plan(self, holding: RingHolding, info: GatewayInfo) -> None:
        """Take a newer plan: the engine keeps its window and what it holds if the plan leaves it there.

        Raises:
            NetworkError: ``plan_changed``; the plan gives this wallet something else, or nothing.
        """
        plan = await self._search.planned(info)
        if plan == holding.plan:
            return
        if plan is None or not holding.stays(plan):
            self._holding = None
            raise NetworkError("plan_changed", "The ring's plan gives this wallet another window.", "It looks anew.")
        await holding.replan(await self._engine.connected(), plan)
        self._journal.note(f"The ring {plan.ring} is at generation {plan.generation}; this window stays.")

    async def _pause(self, seconds: float) -> None:
        """Wait, unless something that matters happens first or has happened since the last pause."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    # What its parts ask and tell

    def _ring_stage(self) -> tuple[RingHolding, GatewayInfo] | None:
        holding, info = self._holding, self._info
        return (holding, info) if isinstance(holding, RingHolding) and info is not None else None

    def _phase_changed(self) -> None:
        snapshot = self.snapshot()
        for listener in self._listeners:
            listener(snapshot)

    def _session_changed(self, state: UplinkState) -> None:
        close = state.last_close
        why = close.text if close is not None and state.phase is UplinkPhase.WAITING else ""
        self._journal.note(f"Relay session {state.session}: {state.phase.value}. {why}".strip())
        code = None if close is None else close.code
        moved = code == CloseCode.FORBIDDEN and isinstance(self._holding, RingHolding)
        if moved or code == CloseCode.UNKNOWN_SESSION:
            self._wake.set()  # the gateway forgot this node, or gave its window to another: ask at once
        self._show_sessions()

    def _show_sessions(self) -> None:
        """Between dialling and serving the sessions decide."""
        standing = self._sessions.standing()
        if standing is not None and self._journal.state.phase in (Phase.DIALLING, Phase.SERVING):
            self._journal.enter(*standing)

    async def _engine_ready(self, _: EngineClient) -> None:
        self._wake.set()

    def _engine_exited(self, reason: str) -> None:
        self._stage.lost()
        self._work.lost()
        self._journal.note(reason)
        self._wake.set()
