"""Whether a ring is whole and moves, as far as one of its ranks can know.

Edge i leads from rank i to the next, round to rank 0. A rank sees its own two edges; of the others it hears from its
neighbours, in LOST frames. They are told away from the edge that is lost: from its predecessor back to rank 0, from its
successor on to rank 0. So rank 0 hears of the first lost edge in either direction, and nothing goes round twice.

A rank may answer every PING and still compute nothing, or pass nothing on. So each tells its predecessor in PROGRESS
how far the ranks from it on have come, and rank 0 counts the time in which nothing came of what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvasir_console.engine.process.client import STUCK_S
from kvasir_console.engine.process.ring_edge import Edge
from kvasir_console.relay.wire import ring as wire

Edges = frozenset[int]
NONE: Edges = frozenset()
LATE_S = 2.0
"""A look that comes so long after the one before is late."""


def behind(rank: int, next_ready: bool, said: Iterable[int]) -> Edges:
    """Lost edges that a rank tells its predecessor of: its own next one, or what its successor ``said``."""
    return frozenset(said) if next_ready else frozenset({rank})


def before(rank: int, size: int, prev_ready: bool, said: Iterable[int]) -> Edges:
    """Lost edges that a rank tells its successor of: its own previous one, or what its predecessor ``said``."""
    return frozenset(said) if prev_ready else frozenset({(rank - 1) % size})


def describe(lost: Iterable[int], rank: int, size: int) -> str:
    """In words. Rank 0 is there itself: nobody is heard of between the first lost edge and the last."""
    edges = sorted(set(lost))
    if not edges:
        return "every rank is connected"
    first, last = edges[0] + 1, edges[-1]
    if len(edges) == 1:
        return f"the edge between ranks {edges[0]} and {first % size} is lost"
    if rank:
        return f"the edges {', '.join(map(str, edges))} are lost"
    return f"rank {first} is not connected" if first == last else f"ranks {first} to {last} are not connected"


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank has done itself: rows for the first time, rows again; for how long it has been at one frame."""

    fresh: int = 0
    again: int = 0
    busy_s: float = 0.0


def progress(rank: int, work: Work, said: wire.Progress | None) -> wire.Progress:
    """What rank ``rank`` tells its predecessor; ``said`` is its successor's word, ``None`` at the last rank."""
    mine = int(work.busy_s * 1e3)
    if said is None:
        return wire.Progress(work.fresh, work.again, rank, mine)
    longest = (said.rank, said.busy_ms) if said.busy_ms > mine else (rank, mine)
    return wire.Progress(said.fresh, said.again + work.again, *longest)


class Patience:
    """For how long nothing has come of what is waited for.

    It runs while the ring is not whole, and while nothing moves in one that is. Tokens and new rows of the last rank
    begin it anew; rows that are computed again, and a rank that is at one frame for no longer than ``STUCK_S``, only
    stop it: a ring that is lost and refilled for ever comes to its end as well.
    """

    def __init__(self, grace_s: float, now: float) -> None:
        self.spent_s = 0.0
        self.stalled = False
        """Whether it runs although the ring is whole."""
        self._grace_s = grace_s
        self._looked = now
        self._moved = now
        self._fresh = 0
        self._again = 0

    def anew(self) -> None:
        """A token came; or what was waited for was given up, and others wait for as long."""
        self.spent_s = 0.0
        self._moved = self._looked

    def look(self, now: float, said: wire.Progress, *, whole: bool, waiting: bool) -> None:
        """See what became of the time since the last look."""
        passed, self._looked = now - self._looked, now
        if passed > LATE_S:  # it was this process that was stopped, not the ring
            self._moved += passed - LATE_S
            passed = LATE_S
        if said.fresh > self._fresh:
            self.spent_s = 0.0
        if said.fresh > self._fresh or said.again > self._again:
            self._moved = now
        self._fresh, self._again = said.fresh, said.again  # lower ones are those of a new process
        if whole and not waiting:
            self.spent_s = 0.0
        if not (whole and waiting):
            self._moved = now
        busy = 0 < said.busy_ms <= STUCK_S * 1e3
        self.stalled = now - self._moved > self._grace_s and not busy
        if self.stalled or not whole:
            self.spent_s += passed


class Wholeness:
    """What one rank knows of its ring, and tells its neighbours."""

    def __init__(self, rank: int, size: int, recover_s: float, now: float) -> None:
        self.lost: Edges = frozenset({rank, (rank - 1) % size})
        self.patience = Patience(recover_s / 4, now)
        self._rank = rank
        self._size = size
        self._recover_s = recover_s
        self._said: wire.Progress | None = None
        """The successor's last word; it outlives its edge. ``None`` before the first: who has heard nothing tells
        nothing, for the counts that come after it would pass for progress."""
        self._now = wire.Progress()
        """How far this rank and those behind it have come."""

    def heard(self, edge: Edge, frame: wire.Frame) -> None:
        """A neighbour's word of what lies behind it. It is looked at in turn: a peer may say it often."""
        if frame.kind is wire.FrameKind.LOST:
            edge.said = wire.decode_lost(frame, self._size)
        elif edge.name == "next" and self._rank < self._size - 1:
            self._said = wire.decode_progress(frame, self._size)
        else:
            raise wire.RingError(f"rank {self._rank} takes no PROGRESS on its {edge.name} edge")

    def look(self, now: float, prev: Edge | None, next_: Edge | None, work: Work, *, waiting: bool, epoch: int) -> None:
        """See which edges are lost, and tell the neighbours what is new to them.

        ``waiting``: rank 0 waits for tokens.
        """
        prev_ready = prev is not None and prev.ready
        next_ready = next_ is not None and next_.ready
        if self._said is not None and not next_ready:
            self._said = replace(self._said, busy_ms=0)
        lost_behind = behind(self._rank, next_ready, next_.said if next_ else ())
        lost_before = before(self._rank, self._size, prev_ready, prev.said if prev else ())
        self.lost = lost_behind | lost_before
        last = self._rank == self._size - 1
        if self._rank == 0:  # what is told ends here
            self._now = progress(0, work, self._said or wire.Progress())
            self.patience.look(now, self._now, whole=not self.lost, waiting=waiting)
            return
        for edge, tell in ((prev, lost_behind), (next_, lost_before)):
            if edge is not None and edge.ready and edge.told != tell:
                edge.told = tell
                edge.say(wire.encode_lost(epoch, tell))
        if self._said is None and not last:
            return
        self._now = progress(self._rank, work, None if last else self._said)
        if prev is not None and prev_ready and prev.told_progress != self._now and not prev.clogged:
            prev.told_progress = self._now
            prev.say(wire.encode_progress(epoch, self._now))

    @property
    def spent(self) -> bool:
        """Whether nothing has come for longer than requests are kept."""
        return self.patience.spent_s > self._recover_s

    def given_up(self) -> None:
        """What was waited for has ended. In a ring that is not whole, others are not waited for at all."""
        if not self.lost:
            self.patience.anew()

    @property
    def missing(self) -> str:
        """Who is missed, in words; empty while the ring is whole and moves."""
        if self.lost:
            return describe(self.lost, self._rank, self._size)
        if not self.patience.stalled:
            return ""
        if self._now.busy_ms > STUCK_S * 1e3:
            return f"rank {self._now.rank} does not come to the end of a step"
        return "rows go into the ring and nothing comes out of it"

    def as_fields(self) -> dict[str, Any]:
        return {"lost_edges": sorted(self.lost), "waited_s": self.patience.spent_s, "missing": self.missing}
