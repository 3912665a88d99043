"""What goes wrong, when and to whom: a fault schedule is a pure function of its seed.

A fault strikes when a share of all tokens has come, not at a time of day: so the same seed strikes the same work on a
fast machine and on a slow one.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["MIN_FAULTS", "STOP_S", "Fault", "Kind", "Part", "schedule"]

STOP_S = 30.0
"""How long a stopped process stays stopped."""
MIN_FAULTS = 12
HUB = "gateway"
_WORKER = "worker-"
_CUT_BYTES = 2000


class Kind(StrEnum):
    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after ``STOP_S``."""
    CUT = "cut"
    """Connections are reset."""


class Part(StrEnum):
    """Which of a member's processes, or where its connections are cut."""

    ENGINE = "engine"
    CONSOLE = "console"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    share: float
    """Strikes once this share of all tokens has come."""
    kind: Kind
    target: str
    """``stage-0``, ``worker-2`` or ``gateway``, which holds the hub and talks to the clients."""
    part: Part
    after_bytes: int = 0
    """A cut: 0 resets every connection of the link at once, else the one that has passed so many more, in mid-frame."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def schedule(seed: int, count: int = 16, *, stages: int = 3, workers: int = 4) -> tuple[Fault, ...]:
    """The faults of a run, in order.

    The first, the last and a middle rank, a worker and the hub are each struck, each by every kind as far as ``count``
    goes round. Workers take turns, so that none is struck again before it is back.

    Raises:
        ValueError: fewer than ``MIN_FAULTS``, or no middle rank.
    """
    if count < MIN_FAULTS or stages < 3 or workers < 1:
        raise ValueError(f"a schedule has at least {MIN_FAULTS} faults, 3 stages and a worker")
    rng = random.Random(f"faults:{seed}")  # noqa: S311 - a replay, no secret
    turns = itertools.cycle(rng.sample(range(workers), workers))
    drawn: list[tuple[str, Kind]] = []
    while len(drawn) < count:
        ranks = ("stage-0", f"stage-{rng.randrange(1, stages - 1)}", f"stage-{stages - 1}")
        lap = [(target, kind) for target in (*ranks, _WORKER, HUB) for kind in Kind]
        drawn += _some(rng, lap, count - len(drawn))
    rng.shuffle(drawn)
    named = [(f"{_WORKER}{next(turns)}" if target == _WORKER else target, kind) for target, kind in drawn]
    return tuple(_fault(rng, number, count, target, kind) for number, (target, kind) in enumerate(named))


def _some(rng: random.Random, lap: list[tuple[str, Kind]], count: int) -> list[tuple[str, Kind]]:
    """At most ``count`` of a lap, with as many different targets among them as there can be."""
    mixed = rng.sample(lap, len(lap))
    first = [next(each for each in mixed if each[0] == target) for target in dict.fromkeys(each[0] for each in mixed)]
    return [*first, *(each for each in mixed if each not in first)][:count]


def _fault(rng: random.Random, number: int, count: int, target: str, kind: Kind) -> Fault:
    share = (number + 0.5 + rng.uniform(-0.25, 0.25)) / (count + 1)
    if kind is Kind.CUT:
        return Fault(number, share, kind, target, Part.LINK, rng.choice((0, rng.randrange(1, _CUT_BYTES))))
    part = Part.CONSOLE if target == HUB else rng.choice((Part.ENGINE, Part.CONSOLE))
    return Fault(number, share, kind, target, part)
