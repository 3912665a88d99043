"""Who is connected, what was measured of them, and whom a layer's step asks for which experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvasir_console.engine.process import checks, coverage
from kvasir_console.engine.process.elastic import BUSY_STREAMS, Dispatch, Elastic, Newcomer, first_try
from kvasir_console.engine.process.hedging import Pace
from kvasir_console.engine.process.star import Ask
from kvasir_console.engine.process.worker import Worker

MAX_KNOWN = 4096
"""Sessions whose measurements are kept."""
REST_S = 1.0
"""A worker that refused a request is left alone for so long."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's settings."""

    dispatch: Dispatch = Dispatch.ALWAYS
    busy_streams: int = BUSY_STREAMS
    hot_experts: int = 0
    """So many of a layer's most wanted experts are never dispatched."""
    trial_pairs: int = checks.TRIAL_PAIRS
    """Pairs to be found right before a slice is proven; 0 trusts everybody from the start."""
    check_share: float = checks.SHARE
    hedge_share: float = 0.1
    groups: int = 0
    """Into so many groups streams are put (``groups``); 0 for as many as measurements say."""
    seed: int | None = None
    """Of the checks' draws; without one nobody can foresee them."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Policy:
        """Settings by name. Raises ``ValueError`` or ``TypeError`` for one that makes no sense."""
        made = cls(**{**given, "dispatch": Dispatch(given.get("dispatch", Dispatch.ALWAYS))})
        shares = (made.check_share, made.hedge_share)
        counts = (made.busy_streams - 1, made.hot_experts, made.trial_pairs, made.groups)
        if min(counts) < 0 or not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"a dispatch policy cannot be {dict(given)!r}")
        return made


@dataclass(slots=True, eq=False)
class Session:
    """A connected worker, with what was measured of it."""

    key: str
    worker: Worker
    connected_at: float
    pace: Pace = field(default_factory=Pace)
    open_asks: set[Ask] = field(default_factory=set)
    rests_until: float = 0.0
    doubtful: bool = False
    """It let a request run into its timeout on an earlier connection: it is asked again once it has answered a probe,
    for which nobody waits."""

    def available(self, now: float) -> bool:
        """Not broken, refusing, leaving, late with an answer or doubtful."""
        worker = self.worker
        if worker.broken or worker.draining or now < self.rests_until or self.doubtful:
            return False
        return all(now < ask.late_at for ask in list(self.open_asks))


class Roster:
    """The live sessions of one router. The loop adds and removes them; the compute thread reads."""

    def __init__(self, policy: Policy) -> None:
        self.elastic = Elastic(policy.dispatch, policy.busy_streams)
        self._policy = policy
        self._heat = coverage.Heat()
        self._live: dict[str, Session] = {}
        self._paces: dict[str, Pace] = {}
        """They outlive connections."""
        self._hung: set[str] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._live.values()))

    def get(self, key: str | None) -> Session | None:
        return None if key is None else self._live.get(key)

    def add(self, key: str, worker: Worker, now: float) -> Session:
        if len(self._paces) > MAX_KNOWN:
            self._paces.clear()
            self._hung.clear()
        session = Session(key, worker, now, self._paces.setdefault(key, Pace()), doubtful=key in self._hung)
        self._live[key] = session
        return session

    def layers(self) -> frozenset[int]:
        """Layers of which somebody holds experts."""
        return frozenset(held.layer for session in self for held in session.worker.slices)

    def hung(self, session: Session) -> None:
        """A request ran into its timeout."""
        self._hung.add(session.key)

    def answered(self, session: Session, pairs: int, elapsed_ms: float) -> None:
        session.pace.record(pairs, elapsed_ms)
        session.doubtful = False
        self._hung.discard(session.key)

    def probes(self, layer: int) -> list[Session]:
        """Doubtful sessions of a layer that were not asked anything yet."""
        return [
            session
            for session in self
            if session.doubtful and not session.open_asks and session.worker.holds(layer) and not session.worker.broken
        ]

    def remove(self, session: Session) -> None:
        """Nothing happens if another one has taken its place."""
        if self._live.get(session.key) is session:
            del self._live[session.key]

    def plan(self, layer: int, counts: coverage.Counts, now: float) -> dict[str, list[int]]:
        """Which sessions are asked for which experts."""
        if not self._live:
            return {}
        if self._policy.hot_experts:
            self._heat.record(layer, counts)
        if not self.elastic.streaming:
            return {}
        counts = counts.copy()
        for expert in self._heat.hottest(layer, self._policy.hot_experts):
            counts[expert] = 0
        proven: list[coverage.Holder] = []
        new: list[coverage.Holder] = []
        sessions: dict[str, Session] = {}
        for session, holder in self.holders(layer, now):
            sessions[session.key] = session
            (proven if session.worker.stats[layer].proven else new).append(holder)
        chosen: dict[str, list[int]] = {}
        newcomer = first_try(
            Newcomer(
                holder.name,
                sessions[holder.name].connected_at,
                sessions[holder.name].worker.stats[layer].checked_pairs,
                holder.in_flight > 0,
            )
            for holder in new
            if counts[holder.begin : holder.end].any()
        )
        for holder in new:
            if holder.name == newcomer:
                chosen[holder.name] = self._trial_experts(counts, holder)
                counts[chosen[holder.name]] = 0
        for key, experts in coverage.assign(counts, proven).items():
            chosen[key] = experts
            counts[experts] = 0
        if self.elastic.mode is Dispatch.ALWAYS:
            for key, experts in coverage.assign(counts, new).items():
                chosen[key] = sorted([*chosen.get(key, []), *experts])
        return dict(sorted(chosen.items()))

    def _trial_experts(self, counts: coverage.Counts, holder: coverage.Holder) -> list[int]:
        """What a newcomer is asked: the experts most wanted, until a trial's worth of pairs."""
        held = np.arange(holder.begin, holder.end)
        wanted = held[counts[held] > 0]
        experts, pairs = [], 0
        for expert in wanted[np.argsort(-counts[wanted], kind="stable")].tolist():
            if pairs >= self._policy.trial_pairs:
                break
            experts.append(expert)
            pairs += int(counts[expert])
        return sorted(experts)

    def holders(self, layer: int, now: float) -> list[tuple[Session, coverage.Holder]]:
        """Sessions of a layer that may be asked now, in a fixed order."""
        found = []
        for session in sorted(self, key=lambda session: session.key):
            held = session.worker.holds(layer)
            if held is None or not session.available(now):
                continue
            pace = session.pace
            found.append(
                (
                    session,
                    coverage.Holder(
                        session.key,
                        session.worker.wallet,
                        held.start,
                        held.stop,
                        pace.delay_ms,
                        pace.pair_ms,
                        session.worker.in_flight,
                    ),
                )
            )
        return found
