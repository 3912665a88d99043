"""When a window of a ring moves to a wallet that stands by for it. Pure: who is connected and what time it is are told.

A window's node is *there* while it has a relay session of the ring. One that was never there is still expected, and its
window stays: a ring that is being set up waits for downloads. Who was seen before a restart counts as gone from the
first look on. Of several windows the one whose node has been gone longest moves first. Who takes over has the same
grace; then the next that stands by has its turn, with twice the time, and so on until one comes: loading a window may
take longer than the grace, and nobody would ever serve one that is taken away before it is loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvasir_console.node.placement.plan import Plan

MAX_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class Takeover:
    """A window is to move from the wallet of ``rank`` to another."""

    rank: int
    old: str
    new: str
    gone_s: float


class Watch:
    """Since when the nodes of one ring's windows are gone. ``seen`` are wallets that were there once."""

    def __init__(self, grace_s: float, seen: Collection[str] = ()) -> None:
        self.seen = frozenset(seen)
        self._grace_s = grace_s
        self._gone: dict[tuple[int, str], float] = {}
        self._expected: dict[int, int] = {}
        """By rank, how many were given the window since somebody was last there."""

    def look(self, plan: Plan, connected: Collection[str], now: float, came: Collection[str] = ()) -> None:
        """``connected`` are the wallets that have a relay session of this ring now, ``came`` those that had one at some
        time since this watch began: one that came and left between two looks was there too. ``now`` in seconds."""
        self.seen |= {stage.wallet for stage in plan.stages if stage.wallet in connected or stage.wallet in came}
        gone = [(stage.rank, stage.wallet) for stage in plan.stages if stage.wallet not in connected]
        self._expected = {rank: self._expected[rank] for rank, _ in gone if rank in self._expected}
        self._gone = {each: self._gone.get(each, now) for each in gone}

    def expect(self, rank: int, wallet: str) -> None:
        """A window was given to this wallet, which said that it was ready: if it does not come, it is gone."""
        self.seen |= {wallet}
        self._expected[rank] = self._expected.get(rank, 0) + 1

    def _patience_s(self, rank: int) -> float:
        return self._grace_s * (1 << min(max(self._expected.get(rank, 0) - 1, 0), MAX_DOUBLINGS))

    def gone_s(self, plan: Plan, now: float) -> dict[int, float]:
        """For how long the node of each rank that is gone has been so, as of the last look."""
        wallets = {stage.rank: stage.wallet for stage in plan.stages}
        return {rank: now - since for (rank, wallet), since in self._gone.items() if wallets.get(rank) == wallet}

    def decide(self, plan: Plan, ready: Collection[str], now: float) -> Takeover | None:
        """The next window to move, if any. ``ready`` are wallets that have reported lately and serve no window.

        Nothing moves without a grace (0), nor to a wallet that serves a window of this ring.
        """
        serving = {stage.wallet for stage in plan.stages}
        late = [
            (gone_s, rank) for rank, gone_s in self.gone_s(plan, now).items() if gone_s > self._patience_s(rank) > 0
        ]
        for gone_s, rank in sorted(late, key=lambda each: (-each[0], each[1])):
            stage = plan.stages[rank]
            if stage.wallet not in self.seen:
                continue
            for wallet in stage.replicas:
                if wallet in ready and wallet not in serving:
                    return Takeover(rank, stage.wallet, wallet, gone_s)
        return None
