"""Windows of rings move to wallets that stand by: the gateway looks who is there, decides, and signs the next plan.

``placement.standby`` decides. A plan that moved is kept in the store beside the configuration that it came from, so a
gateway that is restarted goes on with it, and one whose operator changed the ring begins with what he wrote.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvasir_console.errors import KvasirError, UsageError
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.identity import Identity
from kvasir_console.node.gateway.plans import PlannedRing, move_ring, read_seen, write_seen
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.web import read_json, text_field
from kvasir_console.node.placement.standby import Watch
from kvasir_console.relay.closing import CloseCode
from kvasir_console.relay.hub import SessionCount

log = logging.getLogger(__name__)

LOOK_S = 1.0
READY_S = 60.0
"""A standby that has not reported for so long is not one to rely on; nor is a node that needs no session here."""
MAX_MOVES = 32


class Sessions(Protocol):
    """The relay's sessions (``relay.hub.Hub``)."""

    def sessions(self) -> list[SessionCount]: ...

    async def close_sessions(
        self, *, wallet: str | None = None, key: str | None = None, code: int = 1000, reason: str = ""
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Move:
    """A window that moved. ``at`` in Unix seconds."""

    at: int
    ring: str
    rank: int
    old: str
    new: str
    generation: int
    why: str


class Standbys:
    """Watches every ring of this gateway; ``rings`` is what hub and API look at too, and is changed in place."""

    def __init__(
        self,
        rings: dict[str, PlannedRing],
        store: Store,
        identity: Identity,
        census: Census,
        hub: Sessions,
        *,
        grace_s: float,
        missing: Callable[[str], str] = lambda _: "",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rings = rings
        self._store = store
        self._identity = identity
        self._census = census
        self._hub = hub
        self._missing = missing
        self._clock = clock
        self._monotonic = monotonic
        self._grace_s = grace_s
        self._since = clock()
        self._watches = {ring: Watch(grace_s) for ring in rings}
        self._kept: dict[str, frozenset[str]] = {}
        """Who was seen in each ring, as the store has it."""
        self._moves: deque[Move] = deque(maxlen=MAX_MOVES)
        self._moving = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/api/rings", self.show, methods=["GET"]),
            Route("/api/rings/move", self.ask, methods=["POST"]),
        ]

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except KvasirError as error:
                log.warning("no window can be moved now: %s", error)
            await asyncio.sleep(LOOK_S)

    async def restore(self) -> None:
        """Know again who was seen before a restart; to be called before the first look."""
        for ring_id in self._rings:
            self._kept[ring_id] = await asyncio.to_thread(read_seen, self._store, ring_id)
            self._watches[ring_id] = Watch(self._grace_s, self._kept[ring_id])

    async def look(self) -> None:
        """Look once at every ring, and move what is to be moved. Raises ``KvasirError`` of the store."""
        for ring_id, watch in self._watches.items():
            plan, now = self._rings[ring_id].plan, self._monotonic()
            watch.look(plan, self._connected(ring_id), now, self._came(ring_id))
            if watch.seen != self._kept.get(ring_id):
                await asyncio.to_thread(write_seen, self._store, ring_id, watch.seen)
                self._kept[ring_id] = watch.seen
            due = watch.decide(plan, self._ready(plan.model), now)
            if due is not None:
                why = f"its node has been gone for {due.gone_s:.0f} s"
                await self.move(ring_id, due.rank, due.new, why, plan.generation)

    async def move(self, ring_id: str, rank: int, wallet: str, why: str, generation: int | None = None) -> Move:
        """Sign the next generation, in which ``wallet`` serves this window, and end the sessions of who served it.

        Args:
            generation: the one that this was decided for, if any; another may have come since.

        Raises:
            UsageError: there is no such window, the wallet cannot take it, or the plan is another by now.
            KvasirError: the store cannot be written.
        """
        async with self._moving:
            ring = self._rings.get(ring_id)
            if ring is None:
                raise UsageError("unknown_ring", "No such ring is served here.")
            if not 0 <= rank < len(ring.plan.stages):
                raise UsageError("unknown_rank", f"The ring {ring_id} has the ranks 0 to {len(ring.plan.stages) - 1}.")
            if generation not in (None, ring.plan.generation):
                raise UsageError(
                    "plan_changed", f"The ring {ring_id} has another plan by now, generation {ring.plan.generation}."
                )
            if ring.plan.stage_of(wallet) is not None:
                raise UsageError("serves_already", "That wallet serves a window of this ring already.")
            old = ring.plan.stages[rank].wallet
            moved = await asyncio.to_thread(move_ring, ring, rank, wallet, self._store, self._identity)
            self._rings[ring_id] = moved
            self._watches[ring_id].expect(rank, wallet)
        made = Move(int(self._clock()), ring_id, rank, old, wallet, moved.plan.generation, why)
        self._moves.append(made)
        log.warning(
            "ring %s: rank %d moves from %s to %s, since %s; generation %d",
            *(ring_id, rank, old, wallet, why, made.generation),
        )
        for key in self._keys(ring_id, old):
            await self._hub.close_sessions(
                wallet=old, key=key, code=CloseCode.FORBIDDEN, reason="the plan names another wallet here"
            )
        return made

    def rings(self) -> list[dict[str, Any]]:
        """Every ring: who serves which window, who is gone since when, who stands by, what moved."""
        return [self._shown(ring_id, ring) for ring_id, ring in self._rings.items()]

    async def show(self, request: Request) -> Response:
        self._identity.require_service(request.headers)
        return JSONResponse({"rings": self.rings(), "moves": [asdict(each) for each in self._moves]})

    async def ask(self, request: Request) -> Response:
        """The operator moves a window, whoever is there; with ``generation`` out of that plan only."""
        self._identity.require_service(request.headers)
        body = await read_json(request)
        rank, generation = body.get("rank"), body.get("generation")
        if type(rank) is not int:
            raise UsageError("missing_field", "rank must be a whole number.")
        if type(generation) not in (int, type(None)):
            raise UsageError("missing_field", "generation must be a whole number.")
        ring_id, wallet = text_field(body, "ring", 128), text_field(body, "wallet", 64)
        made = await self.move(ring_id, rank, wallet, "the operator asked for it", generation)
        return JSONResponse({"move": asdict(made)})

    def _shown(self, ring_id: str, ring: PlannedRing) -> dict[str, Any]:
        plan, ready, now = ring.plan, self._ready(ring.plan.model), self._monotonic()
        connected, gone = self._connected(ring_id), self._watches[ring_id].gone_s(plan, now)
        return {
            "ring": ring_id,
            "generation": plan.generation,
            "missing": self._missing(ring_id),
            "stages": [
                {
                    "rank": stage.rank,
                    "layers": [stage.begin, stage.end],
                    "wallet": stage.wallet,
                    "connected": stage.wallet in connected,
                    "seen": stage.wallet in self._watches[ring_id].seen,
                    "gone_s": None if stage.wallet in connected else round(gone.get(stage.rank, 0.0), 1),
                    "replicas": [{"wallet": each, "ready": each in ready} for each in stage.replicas],
                }
                for stage in plan.stages
            ],
        }

    def _connected(self, ring_id: str) -> frozenset[str]:
        """Who has a session of the ring, or said lately that its edges go past the relay."""
        prefix, now, model = f"{ring_id}/", self._clock(), self._rings[ring_id].plan.model
        here = (each.wallet for each in self._hub.sessions() if each.connected and each.key.startswith(prefix))
        lately = (each for each in self._census.workers(now) if each.direct_live and now - each.last_at <= READY_S)
        return frozenset(here) | frozenset(each.wallet for each in lately if each.model == model)

    def _came(self, ring_id: str) -> frozenset[str]:
        """Who had a session of the ring since this object began; the hub remembers those of before a restart too."""
        prefix = f"{ring_id}/"
        sessions = (each for each in self._hub.sessions() if each.key.startswith(prefix))
        return frozenset(each.wallet for each in sessions if each.opened_at >= self._since)

    def _keys(self, ring_id: str, wallet: str) -> list[str]:
        prefix = f"{ring_id}/"
        mine = (each for each in self._hub.sessions() if each.connected and each.wallet == wallet)
        return [each.key for each in mine if each.key.startswith(prefix)]

    def _ready(self, model: str) -> frozenset[str]:
        """Wallets whose node says that it has the windows it stands by for, and that serve none of any ring."""
        now = self._clock()
        serving = {stage.wallet for ring in self._rings.values() for stage in ring.plan.stages}
        fresh = (each for each in self._census.workers(now) if now - each.last_at <= READY_S)
        return frozenset(each.wallet for each in fresh if each.stands_by and each.model == model) - serving


def missing_of(backends: Mapping[str, Any]) -> Callable[[str], str]:
    """What rank 0 of a ring says is missing, asked of the ring's backend."""
    return lambda ring_id: str(getattr(backends.get(ring_id), "missing", ""))
