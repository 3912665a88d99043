"""A node: from an unlocked wallet to a served slice and earned KVR.

The claim path is one walk through ``phase.Phase``: token, assignment (a signed plan's window, or experts from the
market), download, verification, load, report, dial, serve. Whatever fails on the way is named in the phase, and the
walk begins again after a pause with what is still good: the token, the verified file, the loaded engine.

Each subject has its module: ``market`` speaks HTTP, ``shards`` fetches, ``credentials`` keeps the token, ``holding``
is the slice, ``accounts`` the money. This one owns the order of things and the snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

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
    WalletError,
)
from kvasir_console.node import hardware, phase
from kvasir_console.node.accounts import Accounts
from kvasir_console.node.admin import Handler
from kvasir_console.node.ahead import Ahead, as_if_served, identity
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.direct import DirectEdges, DirectView
from kvasir_console.node.holding import (
    ExpertHolding,
    Holding,
    RelaySession,
    RingHolding,
    choose_plan,
    verified_plans,
)
from kvasir_console.node.hubpin import HubPin
from kvasir_console.node.market import USER_AGENT, Assignment, GatewayInfo, Market
from kvasir_console.node.phase import Phase
from kvasir_console.node.placement.plan import Plan, PlannedStage
from kvasir_console.node.reports import AT_ONCE, REPORT_S, StageBook
from kvasir_console.node.signing import WalletSigner
from kvasir_console.node.snapshot import DownloadView, MachineView, NodeSnapshot, RelayView
from kvasir_console.node.star import Star
from kvasir_console.node.statements import StatementBook
from kvasir_console.node.supervisor import Engine
from kvasir_console.node.telemetry import Counters, Telemetry
from kvasir_console.node.worker_id import worker_id
from kvasir_console.paths import Paths
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.counting import OwnCount
from kvasir_console.relay.uplink import MAX_WAITING, Uplink, UplinkPhase, UplinkState
from kvasir_console.relay.wire.control import Message
from kvasir_console.relay.wire.preamble import Kind

log = logging.getLogger(__name__)

LOG_LINES = 200
DRAIN_S = 1.5
"""How long trunks are waited for when the node stops."""
STANDBY_POLL_S = 5.0
"""How often a node that stands by asks for the plan, at least."""
DIRECT_POLL_S = 20.0
"""A node whose edges may go past the relay reports at least so often: by that the gateway knows that it is there."""
QUICK_KINDS = (Kind.RING_NEXT, Kind.RING_PREV, Kind.ENTRY)
QUICK_REDIAL_S = (0.25, 5.0)
"""A ring stands still while an edge is dialled again: its sessions wait no longer than this."""
Listener = Callable[[NodeSnapshot], None]


class Node:
    """One node. ``run`` until ``stop``; ``snapshot`` at any time."""

    def __init__(self, config: Config, paths: Paths) -> None:
        self._config = config
        self._paths = paths
        self._market = Market(
            config.network.gateway, ca_file=config.network.ca_file, timeout_s=config.network.request_timeout_s
        )
        self._signer = WalletSigner(paths, self._market.host, config.wallet.idle_lock_s)
        self.wallet = self._signer.address
        self.name = config.node.name or hardware.host_name()
        self.worker_id = worker_id(self.wallet, self.name)
        self._credentials = Credentials(self._market, self._signer, self.wallet, paths.state / "node-token.json")
        self._accounts = Accounts(self._market, self._signer, self.wallet, config.wallet, paths)
        host = self._market.host.replace(":", "-")
        self._pin_file = paths.state / f"hub-key-{host}"
        self._statements = StatementBook(
            self._market, self.wallet, paths.state / f"statements-{host}.json", HubPin(self._pin_file)
        )
        self._engine = Engine(
            "node",
            paths.runtime,
            paths.state / "engine.log",
            config.engine,
            on_ready=self._engine_ready,
            on_exit=self._engine_exited,
        )
        self._stage_book = StageBook(self.wallet)
        self._stage_run: tuple[EngineClient, str] | None = None
        """The engine that holds a ring's window, and the run that its counters are of."""
        self._info: GatewayInfo | None = None
        self._loaded: EngineClient | None = None
        """The engine that was told to load the slice; another one has to be told again."""
        self._direct = DirectEdges(config.node, config.network.gateway, self._engine.data_socket)
        self._state = phase.initial(time.time())
        self._holding: Holding | None = None
        self._verified: tuple[int, ...] | None = None
        """Identity of the slice's files when they were verified."""
        self._ahead = Ahead()
        self._uplinks: dict[Uplink, asyncio.Task[None]] = {}
        self._waiting: dict[Uplink, asyncio.Task[None]] = {}
        """A ring stage's sessions for workers (``star``): it serves whether or not any worker came."""
        self._star: asyncio.Task[None] | None = None
        self._download: DownloadView | None = None
        self._telemetry = Telemetry()
        self._sampled_at = time.monotonic()
        self._engine_rss: int | None = None
        self._expert_pairs: tuple[int, ...] = ()
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._listeners: list[Listener] = []

    # What others see and ask

    def snapshot(self) -> NodeSnapshot:
        memory = psutil.virtual_memory()
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
            state=self._state,
            held=None if self._holding is None else self._holding.view(),
            relays=tuple(
                _relay_view(state, now_s, self._direct.view(state.session))
                for state in (uplink.snapshot() for uplink in (*self._uplinks, *self._waiting))
            ),
            work=replace(
                self._telemetry.view(layers=isinstance(self._holding, RingHolding)), expert_pairs=self._expert_pairs
            ),
            earnings=self._accounts.view(),
            statements=self._statements.view(),
            download=self._download,
            machine=MachineView(
                cpu_percent=psutil.cpu_percent(interval=None),
                memory_used_bytes=memory.total - memory.available,
                memory_total_bytes=memory.total,
                engine_rss_bytes=self._engine_rss,
                accelerator=self._config.engine.device,
            ),
            log=tuple(self._log),
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
        self._note("The wallet is unlocked.")
        self._wake.set()

    async def lock(self) -> None:
        await self._signer.lock()
        self._note("The wallet is locked.")

    async def claim(self) -> dict[str, object]:
        """Claim what is pending. Raises ``LedgerError`` below the minimum, ``WalletError`` while locked."""
        claim = await self._accounts.claim()
        self._note(f"Claimed {claim.get('micro_kvr')} micro-KVR.")
        return claim

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
        self._enter(Phase.STOPPED, "The node stopped.")

    async def _run(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        tasks = [
            asyncio.create_task(loop, name=name)
            for name, loop in (
                ("engine", self._engine.run()),
                ("participate", self._participate()),
                ("sample", self._sample()),
                ("earnings", self._follow_earnings()),
                ("reports", self._report_work()),
            )
        ]
        try:
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a loop of ours ended by itself: that is a defect, let it be seen
        finally:
            self._enter(Phase.DRAINING, "The node was asked to stop.")
            engine, *others = tasks
            for each in (stopping, *others):
                each.cancel()
            await asyncio.gather(stopping, *others, return_exceptions=True)
            await self._drain()
            await self._last_report()
            await self._drop_uplinks()
            self._statements.save()
            engine.cancel()  # last: the sessions that just ended were served by it
            await asyncio.gather(engine, return_exceptions=True)

    async def _drain(self) -> None:
        """Let trunks have the answers they wait for, and go elsewhere with the next question."""
        client = self._engine.client
        if client is None or not self._uplinks or not isinstance(self._holding, ExpertHolding):
            return
        with contextlib.suppress(KvasirError, OSError):  # a timeout is one too
            async with asyncio.timeout(DRAIN_S + 0.5):
                await client.call("drain", timeout_s=DRAIN_S)

    async def _participate(self) -> None:
        """Walk the claim path for ever; a failure is shown, then the walk begins again."""
        while True:
            try:
                await self._walk()
            except ConfigError as error:
                self._enter(Phase.FAILED, error.message, error.hint)
                await self._pause(self._config.node.retry_s)
            except KvasirError as error:
                if error.code in ("signer_locked", "wallet_locked"):
                    self._enter(Phase.LOCKED, error.message, error.hint)
                else:
                    again = "" if error.code == "engine_restarted" else f"It is tried again within {self._retry_text}."
                    self._enter(Phase.FAILED, error.message, f"{error.hint} {again}".strip())
                await self._drop_uplinks()
                if error.code != "engine_restarted":  # it is on its way up: be ready for it
                    await self._pause(self._config.node.retry_s)

    @property
    def _retry_text(self) -> str:
        return f"{self._config.node.retry_s:g} s"

    async def _walk(self) -> None:
        if self._config.node.serve == "nothing":
            self._enter(Phase.STOPPED, "This node is configured to serve nothing.", "Set node.serve to change that.")
            await asyncio.Event().wait()
        self._enter(Phase.AUTHENTICATING, f"Asking {self._market.gateway} for a participation token.")
        info = await self._learn()
        await self._delegate()
        await self._credentials.with_token(self._market.demand)
        if isinstance(self._holding, RingHolding) and await self._planned(info) != self._holding.plan:
            self._holding = None
        if self._holding is None:
            self._holding = await self._find_slice(info)
        holding = self._holding
        await self._fetch(holding)
        client = self._loaded = await self._engine.connected()
        self._enter(Phase.STARTING, f"The engine loads {holding.describe()}.")
        await holding.load(client, self._progress("Loading into the engine"))
        self._download = None
        self._stage_run = (client, self._stage_book.begin()) if isinstance(holding, RingHolding) else None
        await self._serve(holding, info)

    async def _learn(self) -> GatewayInfo:
        """What the gateway says of itself. Raises ``NetworkError``."""
        info = self._info = await self._market.config()
        self._accounts.learn(info)
        self._credentials.learn(info)
        self._statements.learn(info)
        return info

    async def _find_slice(self, info: GatewayInfo) -> Holding:
        """A window that a signed plan gives this wallet, else experts from the market. Waits until there is one."""
        serve = self._config.node.serve
        while True:
            if serve in ("auto", "ring") and info.placement:
                plans = await self._plans(info)
                if (plan := next((each for each in plans if each.stage_of(self.wallet)), None)) is not None:
                    return self._window(plan)
                if (plan := next((each for each in plans if each.stands_by(self.wallet)), None)) is not None:
                    await self._stand_by(plan, info)
                    continue
            reason = "No signed plan names this wallet."
            if serve in ("auto", "experts"):
                answer = await self._credentials.with_token(self._volunteer)
                if not isinstance(answer, str):
                    more = await self._more_slices(answer) if "v3" in info.dispatch_wires else ()
                    return ExpertHolding(answer, self.worker_id, self.wallet, more=more)
                reason = answer
            self._enter(Phase.VOLUNTEERING, reason, f"The market is asked again every {self._config.node.poll_s:g} s.")
            await self._heartbeat(None, info)
            await self._pause(self._config.node.poll_s)

    def _window(self, plan: Plan) -> RingHolding:
        """The window that a plan gives this wallet, with its file if it was fetched while the node stood by."""
        engine = self._config.engine
        kept = self._paths.state / "evidence"
        holding = RingHolding(plan, self.wallet, engine.context_length, engine.kv_budget_bytes, kept)
        if (found := self._ahead.find(plan, holding.stage)) is not None:
            holding.file, self._verified = found
        return holding

    async def _stand_by(self, plan: Plan, info: GatewayInfo) -> None:
        """Have the windows ready that this wallet stands by for, say so, and wait a while."""
        windows = plan.stands_by(self.wallet)
        named = ", ".join(f"layers {stage.begin} to {stage.end - 1}" for stage in windows)
        why, ready = f"Stands by for {named} of {plan.model}.", True
        try:
            for stage in windows:
                await self._fetch_ahead(plan, stage)
        except (SystemResourceError, ModelError) as error:
            why, ready = f"Cannot stand by for {named} of {plan.model}: {error.message}", False
        self._enter(Phase.VOLUNTEERING, why, "The gateway's plan says when this node takes over.")
        await self._heartbeat(None, info, stands_by=plan if ready else None)
        await self._pause(min(self._config.node.poll_s, STANDBY_POLL_S))

    async def _fetch_ahead(self, plan: Plan, stage: PlannedStage) -> None:
        if self._ahead.find(plan, stage) is None:
            holding = as_if_served(plan, stage, self.wallet)
            await self._fetch(holding)
            self._ahead.keep(plan, stage, holding.file)

    async def _plans(self, info: GatewayInfo) -> list[Plan]:
        """The signed plans that name this wallet, for a window or to stand by for one."""
        return verified_plans(await self._credentials.with_token(self._market.placements), info.hub_key, self._pin_file)

    async def _named(self, info: GatewayInfo) -> bool:
        """Whether a signed plan names this wallet, which its owner lets come before experts."""
        return self._config.node.serve == "auto" and info.placement and bool(await self._plans(info))

    async def _planned(self, info: GatewayInfo) -> Plan | None:
        """The signed plan that gives this wallet a window."""
        plans = await self._credentials.with_token(self._market.placements)
        return choose_plan(plans, info.hub_key, self.wallet, self._pin_file)

    async def _volunteer(self, token: str, model: str = "") -> Assignment | str:
        node = self._config.node
        return await self._market.volunteer(token, model=model or node.model, max_experts=min(node.max_experts, 64))

    async def _more_slices(self, first: Assignment) -> tuple[Assignment, ...]:
        """Experts of further layers of the same model, as far as the market wants them held and the owner allows."""
        taken = [first]
        while len(taken) < self._config.node.max_slices:
            answer = await self._credentials.with_token(lambda token: self._volunteer(token, first.model))
            if isinstance(answer, str) or answer.model != first.model or answer.layer in {a.layer for a in taken}:
                break
            taken.append(answer)
        return tuple(taken[1:])

    async def _fetch(self, holding: Holding) -> None:
        if holding.fetched and self._verified == identity(holding.fetched):
            return  # the very files that were verified: only their engine was lost
        self._enter(Phase.DOWNLOADING, f"Fetching {holding.describe()}.")
        budget = hardware.budget_bytes(hardware.probe(self._config.engine.device), self._config.node.memory_budget_mib)
        try:
            await self._credentials.with_token(
                lambda token: holding.fetch(
                    self._market.client, token, self._paths.shards, budget, self._progress(holding.describe())
                )
            )
        except KvasirError:
            self._holding = None  # another slice may do better than the same one again
            raise
        else:
            self._verified = identity(holding.fetched)
        finally:
            self._download = None

    async def _serve(self, holding: Holding, info: GatewayInfo) -> None:
        """Report and dial; then keep the report fresh until the engine is lost or the node stops."""
        while True:
            if self._engine.client is not self._loaded:
                raise EngineError("engine_restarted", "The engine ended while it served.", "It loads its slice again.")
            try:
                wired = await self._heartbeat(holding, info)
                if isinstance(holding, RingHolding):
                    await self._follow_plan(holding, info)
                    await self._introduce(holding, info)
                elif await self._named(info):
                    await self._drain()
                    self._holding = None
                    raise NetworkError(
                        "plan_changed", "A ring's plan names this wallet.", "It does what the plan says."
                    )
            except NetworkError as error:
                if not isinstance(self._holding, RingHolding) or not self._uplinks:
                    raise
                # The sessions say themselves whether they live; what a ring's engine holds must not be given up.
                self._note(f"The gateway cannot be asked: {error.message}")
                if error.code == "plan_not_signed":  # the hub may have another key by now, for which the old one signed
                    with contextlib.suppress(NetworkError):
                        info = await self._learn()
                await self._pause(self._config.node.retry_s)
                continue
            if wired and not self._uplinks:
                self._enter(Phase.DIALLING, "The gateway waits for this node's sessions.")
                self._dial(holding, info)
            elif not wired:
                self._enter(Phase.REPORTING, "The gateway has not wired a session for this slice yet.")
            self._note_serving()
            await self._delegate()
            poll_s = min(self._config.node.poll_s, DIRECT_POLL_S if self._direct.enabled else math.inf)
            await self._pause(poll_s if wired else self._config.node.retry_s)

    async def _follow_plan(self, holding: RingHolding, info: GatewayInfo) -> None:
        """Take a newer plan: the engine keeps its window and what it holds if the plan leaves it there.

        Raises:
            NetworkError: ``plan_changed``; the plan gives this wallet something else, or nothing.
        """
        plan = await self._planned(info)
        if plan == holding.plan:
            return
        if plan is None or not holding.stays(plan):
            self._holding = None
            raise NetworkError("plan_changed", "The ring's plan gives this wallet another window.", "It looks anew.")
        await holding.replan(await self._engine.connected(), plan)
        self._note(f"The ring {plan.ring} is at generation {plan.generation}; this window stays.")

    async def _introduce(self, holding: RingHolding, info: GatewayInfo) -> None:
        """Let edges go past the relay where the gateway knows a way and the owner allows it."""
        if not self._direct.enabled or not info.direct_edges:
            return
        uplinks = {uplink.snapshot().session: uplink for uplink in self._uplinks}
        offered = {each.name: each.preamble for each in holding.sessions(self._market.gateway)}
        sessions = {name: (offered[name], uplink) for name, uplink in uplinks.items() if name in offered}
        await self._direct.follow(await self._credentials.with_token(self._market.edges), sessions)

    async def _heartbeat(self, holding: Holding | None, info: GatewayInfo, stands_by: Plan | None = None) -> bool:
        """One coverage report; whether the gateway has sessions wired for what is held.

        A node that has what it stands by for says so, and names the plan's model (``stands_by``).
        """
        machine = hardware.probe(self._config.engine.device)
        report = {
            "worker_id": self.worker_id,
            "owner": self.wallet,
            "os": machine.os,
            "device_kind": machine.device_kind,
            "accelerator": machine.accelerator,
            "backend": machine.backend,
            **(holding.coverage() if holding is not None else _nothing_held(stands_by)),
        }
        if self._direct.enabled and info.direct_edges and isinstance(holding, RingHolding):
            report |= {"direct": self._direct.announcement(), "direct_live": self._direct.live}
        if not info.dispatch_wires:
            report.pop("wires", None)  # an extension, used only where it is announced
        reply = await self._credentials.with_token(lambda token: self._market.report(token, report))
        return holding is not None and (reply.wired or isinstance(holding, RingHolding))

    def _dial(self, holding: Holding, info: GatewayInfo) -> None:
        for session in holding.sessions(self._market.gateway):
            uplink = self._uplink(session, info, self._uplink_changed)
            self._uplinks[uplink] = asyncio.create_task(uplink.run(), name=f"uplink {session.name}")
        if isinstance(holding, RingHolding) and holding.routes:
            self._star = asyncio.create_task(self._keep_waiting(holding, info), name="star")

    async def _keep_waiting(self, holding: RingHolding, info: GatewayInfo) -> None:
        """Keep a session waiting for the next worker that holds experts of this stage's layers."""

        def dial(slot: int) -> Uplink:
            session = holding.waiting_session(self._market.gateway, slot)
            uplink = self._uplink(session, info, partial(star.changed, slot))
            self._waiting[uplink] = asyncio.create_task(uplink.run(), name=f"uplink {session.name}")
            return uplink

        star = Star(dial)
        await star.run()

    def _uplink(self, session: RelaySession, info: GatewayInfo, on_change: Callable[[UplinkState], None]) -> Uplink:
        network = self._config.network
        quick = session.preamble.kind in QUICK_KINDS

        def changed(state: UplinkState) -> None:
            if state.phase is UplinkPhase.OPEN:
                self._statements.save()  # the connection before was just settled; a crash must not forget how
            on_change(state)

        return Uplink(
            session.url,
            session.name,
            self._credentials.get,
            token_in_header=info.relay_token_header,
            ssl_context=self._market.ssl_context,
            engine_socket=self._engine.data_socket,
            preamble=session.preamble,
            user_agent=USER_AGENT,
            redial_min_s=min(network.redial_min_s, QUICK_REDIAL_S[0]) if quick else network.redial_min_s,
            redial_max_s=min(network.redial_max_s, QUICK_REDIAL_S[1]) if quick else network.redial_max_s,
            on_change=changed,
            count=self._own_count(session),
        )

    def _own_count(self, session: RelaySession) -> OwnCount | None:
        holding = self._holding
        if holding is None:
            return None
        experts = isinstance(holding, ExpertHolding)
        return self._statements.count(holding.account(), session.name, compare_rows=experts)

    async def _drop_uplinks(self) -> None:
        if self._star is not None:
            self._star.cancel()
            await asyncio.gather(self._star, return_exceptions=True)
            self._star = None
        await self._direct.drop()
        ended = self._uplinks | self._waiting
        self._uplinks, self._waiting = {}, {}
        await asyncio.gather(*(uplink.close() for uplink in ended))
        await asyncio.gather(*ended.values(), return_exceptions=True)

    def _uplink_changed(self, state: UplinkState) -> None:
        closed = state.last_close is not None and state.phase is UplinkPhase.WAITING
        why = state.last_close.text if closed and state.last_close is not None else ""
        self._note(f"Relay session {state.session}: {state.phase.value}. {why}".strip())
        code = None if state.last_close is None else state.last_close.code
        moved = code == CloseCode.FORBIDDEN and isinstance(self._holding, RingHolding)
        if moved or code == CloseCode.UNKNOWN_SESSION:
            self._wake.set()  # the gateway forgot this node, or gave its window to another: ask at once
        self._note_serving()

    def _note_serving(self) -> None:
        """Between dialling and serving the sessions decide."""
        if self._state.phase not in (Phase.DIALLING, Phase.SERVING) or not self._uplinks:
            return
        states = [uplink.snapshot() for uplink in self._uplinks]
        waiting = [state for state in states if state.phase not in (UplinkPhase.OPEN, UplinkPhase.ASIDE)]
        if not waiting:
            self._enter(Phase.SERVING, "Every relay session is open.")
        elif waiting[0].last_close is not None:
            self._enter(Phase.DIALLING, f"{waiting[0].session}: {waiting[0].last_close.text}")
        else:
            self._enter(Phase.DIALLING, f"Session {waiting[0].session} is being dialled.")

    # The engine

    async def _engine_ready(self, _: EngineClient) -> None:
        self._wake.set()

    def _engine_exited(self, reason: str) -> None:
        self._stage_run = None
        self._engine_rss = None
        self._statements.unsure()
        self._expert_pairs = ()
        self._note(reason)
        self._wake.set()

    # Loops beside the claim path

    async def _sample(self) -> None:
        """Counters of the engine, once a second."""
        while True:
            await asyncio.sleep(1.0)
            with contextlib.suppress(KvasirError):
                await self._sample_once()

    async def _sample_once(self) -> None:
        """Raises ``EngineError``."""
        client = self._engine.client
        if client is None:
            return
        stats = await client.stats()
        now = time.monotonic()
        served = stats["served"] or {}
        ring = stats["ring"] or {}
        if ring.get("behind"):
            self._wake.set()  # its neighbours have a newer plan
        counters = Counters(
            requests=int(served.get("requests", 0)),
            rows=int(served.get("rows", ring.get("rows", 0))),
            pairs=int(served.get("pairs", 0)),
            tokens=max(int(stats["tokens_total"]), int(ring.get("sampled", 0))),
        )
        self._telemetry.sample(counters, now - self._sampled_at)
        self._sampled_at = now
        work = self._telemetry.view()
        self._statements.work(work.rows, work.pairs)
        self._expert_pairs = tuple(stats["experts"][0]["pairs"]) if stats.get("experts") else ()
        self._engine_rss = int(stats["rss_bytes"])

    async def _follow_earnings(self) -> None:
        pause_s = min(10.0, self._config.node.poll_s)
        while True:
            with contextlib.suppress(WalletError):
                await self._signer.refresh()  # it locks itself when nobody uses it
            try:
                await self._accounts.refresh()
                await self._statements.fetch(self._credentials.with_token)
                await self._sample_once()  # what is stated may be younger than the last sample
                await self._statements.agree(self._credentials.with_token, self._credentials.session_key)
                if self._config.node.auto_claim and self._accounts.claimable and not self._signer.locked:
                    await self.claim()
            except KvasirError as error:
                log.info("earnings are not refreshed: %s", error)
            await asyncio.sleep(pause_s)

    async def _report_work(self) -> None:
        """Tell the hub what the workers of this ring's stage did, so that it pays them."""
        while True:
            await asyncio.sleep(REPORT_S)
            try:
                await self._report_once()
            except KvasirError as error:
                log.info("the stage's workers are not reported: %s", error)

    async def _report_once(self) -> None:
        """Raises ``KvasirError``."""
        holding, info, key = self._holding, self._info, self._credentials.session_key
        if not isinstance(holding, RingHolding) or info is None or not info.stage_reports or key is None:
            return
        if self._stage_run is not None:
            client, run = self._stage_run
            with contextlib.suppress(EngineError):  # what it said before is still to be sent
                self._stage_book.observe(run, await client.coverage())

        async def send(reports: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
            return await self._credentials.with_token(lambda token: self._market.report_stage(token, reports))

        async def pardon(session: str, wallet: str) -> bool:
            return self._stage_run is not None and await self._stage_run[0].pardon(session, wallet)

        refused = await self._stage_book.send(holding.plan, info.hub_key, key, send, pardon)
        if "report_old_epoch" in refused:
            self._wake.set()  # there is a newer plan

    async def _last_report(self) -> None:
        with contextlib.suppress(KvasirError, OSError):  # a timeout is one too
            async with asyncio.timeout(REPORT_S):
                for _ in range(MAX_WAITING // AT_ONCE):  # as many workers as a stage can have
                    await self._report_once()

    # Small things

    async def _delegate(self) -> None:
        """While the wallet is open, let a session key take part for it: locking it then ends no work."""
        if self._signer.locked:
            return
        try:
            if await self._credentials.delegate():
                self._note("A session key may take part for this wallet while it is locked, for 30 days.")
        except KvasirError as error:
            log.info("there is no session key: %s", error)

    def _progress(self, what: str) -> Callable[[int, int | None], None]:
        def report(done: int, total: int | None) -> None:
            self._download = DownloadView(what, done, total)

        return report

    def _enter(self, phase_: Phase, why: str = "", next_action: str = "") -> None:
        before = self._state.phase
        self._state = self._state.to(phase_, time.time(), why, next_action)
        if before is not phase_:
            self._note(f"{phase_.value}: {why}".rstrip(": "))
            snapshot = self.snapshot()
            for listener in self._listeners:
                listener(snapshot)

    def _note(self, line: str) -> None:
        log.info(line)
        self._log.append(f"{time.strftime('%H:%M:%S')} {line}")

    async def _pause(self, seconds: float) -> None:
        """Wait, unless something that matters happens first or has happened since the last pause."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()


def _nothing_held(stands_by: Plan | None) -> dict[str, object]:
    """What a node reports that serves nothing."""
    if stands_by is None:
        return {"model": "none", "segments": []}
    return {"model": stands_by.model, "segments": [], "stands_by": True}


def _relay_view(state: UplinkState, now_s: float, direct: DirectView | None) -> RelayView:
    if direct is not None:
        return RelayView(
            session=state.session,
            state="direct",
            since_s=now_s - direct.since_s,
            bytes_up=state.bytes_up + direct.bytes_up,
            bytes_down=state.bytes_down + direct.bytes_down,
        )
    return RelayView(
        session=state.session,
        state=state.phase.value,
        since_s=now_s - state.since_s,
        rtt_ms=state.rtt_ms,
        bytes_up=state.bytes_up,
        bytes_down=state.bytes_down,
        retry_in_s=state.retry_in_s,
        last_close="" if state.last_close is None else state.last_close.text,
    )
