"""Who may dial the hub, and where an admitted session leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from kvasir_console.errors import WalletError
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.coverage import Window
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.metering import ring_worker_id
from kvasir_console.node.gateway.plans import PlannedRing
from kvasir_console.relay.authority import Admission, Refused
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.hub import EXPERT_PATH
from kvasir_console.relay.uplink import MAX_WAITING, STAR_EDGE
from kvasir_console.relay.wire.preamble import Kind, Preamble, Wire


class Trunks(Protocol):
    """The engines that dispatch experts."""

    def data_socket(self, model: str) -> Path | None:
        """Where sessions of ``model`` go; ``None`` while its engine is not ready."""
        ...


class Sessions(Protocol):
    """Learns which worker a session belongs to, for as long as its work is counted."""

    def admitted(self, session: str, wallet: str, worker_id: str, model: str, platform: Mapping[str, str]) -> None: ...

    def quarantined(self, wallet: str, worker_id: str, stage: str = "") -> bool:
        """Whether a worker was caught with a wrong answer, by an engine here or by the stage of a wallet. Blocks."""
        ...


class HubAuthority:
    """Answers the hub from tokens, the census and the signed plans.

    * An expert session belongs to the wallet that registered its name by a coverage report; only that wallet dials it.
    * A stage's sessions for workers belong to the wallet that the plan names for it.
    * A ring edge admits the wallet that the plan names at that end, the entry edge the wallet of rank 0.
    """

    def __init__(
        self,
        identity: Identity,
        census: Census,
        rings: Mapping[str, PlannedRing],
        trunks: Trunks,
        sessions: Sessions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._census = census
        self._rings = rings
        self._trunks = trunks
        self._sessions = sessions
        self._clock = clock

    async def admit(self, path: str, query: Mapping[str, str], token: str | None) -> Admission:
        """Raises ``Refused`` with the contract's close code (gateway contract 5.1)."""
        try:
            wallet = self._identity.wallet_of(token or "")
        except WalletError as error:
            raise Refused(CloseCode.UNAUTHORISED, error.code.replace("_", " ")) from error
        if path == EXPERT_PATH:
            return await self._expert(wallet, query.get("session", ""))
        return self._ring(wallet, query)

    async def _expert(self, wallet: str, session: str) -> Admission:
        worker = self._census.session(session, self._clock())
        if worker is None:
            raise Refused(CloseCode.UNKNOWN_SESSION, "report coverage before dialling")
        if worker.wallet != wallet:
            raise Refused(CloseCode.FORBIDDEN, "the session belongs to another wallet")
        socket, ring = self._trunks.data_socket(worker.model), self._rings.get(worker.model)
        stage = _stage_wallet(ring, worker.windows)
        if await asyncio.to_thread(self._sessions.quarantined, wallet, worker.worker_id, stage):
            raise Refused(CloseCode.FORBIDDEN, "this worker is quarantined: it answered wrongly")
        if (socket is None and ring is None) or not self._census.wired(worker):
            raise Refused(CloseCode.UPSTREAM, "no engine dispatches to this window now")
        window, *others = worker.windows
        # Only version 3 says which slice a request is for; an older wire serves the first window.
        more = [
            (each.layer, each.begin, each.end)
            for each in others
            if worker.wires & Wire.V3 and self._census.fits(each) and (ring is None or _same_rank(ring, window, each))
        ]
        self._sessions.admitted(session, wallet, worker.worker_id, worker.model, worker.platform)
        return Admission(
            key=session,
            wallet=wallet,
            worker=worker.worker_id,
            model_digest=self._census.models[worker.model].digest.hex(),
            preamble=Preamble(
                kind=Kind.DISPATCH,
                session=session,
                wallet=wallet,
                model_digest=self._census.models[worker.model].digest,
                layer=window.layer,
                begin=window.begin,
                end=window.end,
                wires=worker.wires,
                more=tuple(more),
            ),
            engine_socket=socket,
            star=None if ring is None else _star(ring, _rank_of(ring, window.layer)),
        )

    def _ring(self, wallet: str, query: Mapping[str, str]) -> Admission:
        ring_id, edge, role = query.get("controller_id", ""), query.get("edge", ""), query.get("role", "")
        ring = self._rings.get(ring_id)
        if ring is None:
            raise Refused(CloseCode.UNKNOWN_SESSION, "no plan names this ring")
        stages = ring.plan.stages
        if edge.startswith(STAR_EDGE):
            return _waiting(ring, wallet, edge)
        entry = edge == "entry"
        if not entry and not (edge.isascii() and edge.isdigit() and len(edge) < 5 and int(edge) < len(stages)):
            raise Refused(CloseCode.UNKNOWN_SESSION, "the ring has no such edge")
        if role not in (("N",) if entry else ("P", "N")):
            raise Refused(CloseCode.PROTOCOL, "an edge is dialled as P or N, the entry as N")
        # Edge i leads from rank i, which is the predecessor on it, to the next rank; the entry leads to rank 0.
        rank = 0 if entry else (int(edge) + (role == "N")) % len(stages)
        if stages[rank].wallet != wallet:
            raise Refused(CloseCode.FORBIDDEN, "the plan names another wallet here")
        admission = Admission("", wallet, ring_worker_id(ring_id, rank), ring.plan.model_digest)
        if entry:
            return replace(admission, key=f"{ring_id}/entry/N", entry_model=ring.plan.model)
        name = f"{ring_id}/{int(edge)}"
        return replace(admission, key=f"{name}/{role}", peer_key=f"{name}/{'N' if role == 'P' else 'P'}")


def _waiting(ring: PlannedRing, wallet: str, edge: str) -> Admission:
    """A session that a stage keeps for one worker: ``experts-<slot>``, by the wallet that the plan names."""
    slot = edge.removeprefix(STAR_EDGE)
    if not (slot.isascii() and slot.isdigit() and len(slot) < 4 and int(slot) < MAX_WAITING):
        raise Refused(CloseCode.UNKNOWN_SESSION, f"a stage keeps sessions {STAR_EDGE}0 to {STAR_EDGE}{MAX_WAITING - 1}")
    rank = next((stage.rank for stage in ring.plan.stages if stage.wallet == wallet), None)
    if rank is None:
        raise Refused(CloseCode.FORBIDDEN, "the plan does not name this wallet")
    star = _star(ring, rank)
    worker = ring_worker_id(ring.plan.ring, rank)
    return Admission(f"{star}/{int(slot)}", wallet, worker, ring.plan.model_digest, star=star)


def _star(ring: PlannedRing, rank: int) -> str:
    return star_of(ring.plan.ring, rank)


def star_of(ring: str, rank: int) -> str:
    """The name of a stage's sessions for workers."""
    return f"{ring}/experts/{rank}"


def _stage_wallet(ring: PlannedRing | None, windows: Sequence[Window]) -> str:
    """Whose stage a worker of these windows would be joined to; empty if it is none."""
    stages = () if ring is None or not windows else ring.plan.stages
    return next((stage.wallet for stage in stages if stage.begin <= windows[0].layer < stage.end), "")


def _same_rank(ring: PlannedRing, one: Window, other: Window) -> bool:
    return _rank_of(ring, one.layer) == _rank_of(ring, other.layer)


def _rank_of(ring: PlannedRing, layer: int) -> int:
    """The rank that holds a layer and so owns its router; a plan's windows hold every layer."""
    return next(stage.rank for stage in ring.plan.stages if stage.begin <= layer < stage.end)
