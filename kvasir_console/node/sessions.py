"""A node's sessions at the relay: dialled for what it holds, watched, and ended together.

A ring's stage keeps one more waiting for the next worker (``star``), and its edges may go past the relay (``direct``):
what is shown of a session is then what carries it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvasir_console.config import NetworkConfig
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.direct import DirectEdges, DirectView
from kvasir_console.node.holding import ExpertHolding, Holding, RelaySession, RingHolding
from kvasir_console.node.market import USER_AGENT, GatewayInfo, Market
from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import RelayView
from kvasir_console.node.star import Star
from kvasir_console.node.statements import StatementBook
from kvasir_console.relay.uplink import Uplink, UplinkPhase, UplinkState
from kvasir_console.relay.wire.preamble import Kind

QUICK_KINDS = (Kind.RING_NEXT, Kind.RING_PREV, Kind.ENTRY)
QUICK_REDIAL_S = (0.25, 5.0)
"""A ring stands still while an edge is dialled again: its sessions wait no longer than this."""
Changed = Callable[[UplinkState], None]


class RelaySessions:
    """``dial`` them all, ``drop`` them all. Each goes on being dialled in between, whatever ends it."""

    def __init__(
        self,
        market: Market,
        credentials: Credentials,
        statements: StatementBook,
        direct: DirectEdges,
        network: NetworkConfig,
        engine_socket: Path,
        on_change: Changed,
    ) -> None:
        """
        Args:
            on_change: told of every change of a session that serves; not of those that wait for workers.
        """
        self._market = market
        self._credentials = credentials
        self._statements = statements
        self._direct = direct
        self._network = network
        self._engine_socket = engine_socket
        self._on_change = on_change
        self._uplinks: dict[Uplink, asyncio.Task[None]] = {}
        self._waiting: dict[Uplink, asyncio.Task[None]] = {}
        """A ring stage's sessions for workers: it serves whether or not any worker came."""
        self._star: asyncio.Task[None] | None = None

    @property
    def dialled(self) -> bool:
        return bool(self._uplinks)

    def dial(self, holding: Holding, info: GatewayInfo) -> None:
        for session in holding.sessions(self._market.gateway):
            uplink = self._uplink(session, holding, info, self._on_change)
            self._uplinks[uplink] = asyncio.create_task(uplink.run(), name=f"uplink {session.name}")
        if isinstance(holding, RingHolding) and holding.routes:
            self._star = asyncio.create_task(self._keep_waiting(holding, info), name="star")

    async def introduce(self, holding: RingHolding, info: GatewayInfo) -> None:
        """Let edges go past the relay where the gateway knows a way and the owner allows it. Raises ``KvasirError``."""
        if not self._direct.enabled or not info.direct_edges:
            return
        uplinks = {uplink.snapshot().session: uplink for uplink in self._uplinks}
        offered = {each.name: each.preamble for each in holding.sessions(self._market.gateway)}
        sessions = {name: (offered[name], uplink) for name, uplink in uplinks.items() if name in offered}
        await self._direct.follow(await self._credentials.with_token(self._market.edges), sessions)

    async def drop(self) -> None:
        if self._star is not None:
            self._star.cancel()
            await asyncio.gather(self._star, return_exceptions=True)
            self._star = None
        await self._direct.drop()
        ended = self._uplinks | self._waiting
        self._uplinks, self._waiting = {}, {}
        await asyncio.gather(*(uplink.close() for uplink in ended))
        await asyncio.gather(*ended.values(), return_exceptions=True)

    def standing(self) -> tuple[Phase, str] | None:
        """Whether the node serves or still dials, and why; nothing before it dialled."""
        return standing([uplink.snapshot() for uplink in self._uplinks])

    def views(self, now_s: float) -> tuple[RelayView, ...]:
        states = (uplink.snapshot() for uplink in (*self._uplinks, *self._waiting))
        return tuple(relay_view(state, now_s, self._direct.view(state.session)) for state in states)

    async def _keep_waiting(self, holding: RingHolding, info: GatewayInfo) -> None:
        """Keep a session waiting for the next worker that holds experts of this stage's layers."""

        def dial(slot: int) -> Uplink:
            session = holding.waiting_session(self._market.gateway, slot)
            uplink = self._uplink(session, holding, info, partial(star.changed, slot))
            self._waiting[uplink] = asyncio.create_task(uplink.run(), name=f"uplink {session.name}")
            return uplink

        star = Star(dial)
        await star.run()

    def _uplink(self, session: RelaySession, holding: Holding, info: GatewayInfo, on_change: Changed) -> Uplink:
        network = self._network
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
            engine_socket=self._engine_socket,
            preamble=session.preamble,
            user_agent=USER_AGENT,
            redial_min_s=min(network.redial_min_s, QUICK_REDIAL_S[0]) if quick else network.redial_min_s,
            redial_max_s=min(network.redial_max_s, QUICK_REDIAL_S[1]) if quick else network.redial_max_s,
            on_change=changed,
            count=self._statements.count(
                holding.account(), session.name, compare_rows=isinstance(holding, ExpertHolding)
            ),
        )


def standing(states: list[UplinkState]) -> tuple[Phase, str] | None:
    """What sessions say of the node: it serves once each is open, or is carried past the relay."""
    if not states:
        return None
    waiting = next((state for state in states if state.phase not in (UplinkPhase.OPEN, UplinkPhase.ASIDE)), None)
    if waiting is None:
        return Phase.SERVING, "Every relay session is open."
    if waiting.last_close is not None:
        return Phase.DIALLING, f"{waiting.session}: {waiting.last_close.text}"
    return Phase.DIALLING, f"Session {waiting.session} is being dialled."


def relay_view(state: UplinkState, now_s: float, direct: DirectView | None) -> RelayView:
    """A session for people; ``direct`` is what carries it past the relay, if anything does."""
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
