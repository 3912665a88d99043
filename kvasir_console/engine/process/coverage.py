"""Who holds which experts of a layer, and whom to ask for them (pure).

A step asks all workers of a layer at once and waits for the last of them, a star. So experts are handed out, the most
wanted first, such that the star's longest ray stays short; among choices that do not lengthen it, one that needs no
further frame wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
"""(E,) pairs of each expert of a layer in a step."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One live session that holds the experts ``[begin, end)``, as far as a choice needs to know it."""

    name: str
    wallet: str
    begin: int
    end: int
    delay_ms: float = 0.0
    """From a request of next to nothing to its answer."""
    pair_ms: float = 0.0
    """What each pair adds."""
    in_flight: int = 0
    """Pairs that wait there already."""

    def ready_ms(self, pairs: int) -> float:
        """When ``pairs`` more would be answered, as measured so far."""
        return self.delay_ms + self.pair_ms * (self.in_flight + pairs)

    def holds(self, experts: Iterable[int]) -> bool:
        return all(self.begin <= expert < self.end for expert in experts)


def assign(counts: Counts, holders: Sequence[Holder]) -> dict[str, list[int]]:
    """Which holder computes which of the wanted experts; experts that nobody holds are left out.

    The answer depends on the values only, not on the order of ``holders``.
    """
    ordered = sorted(holders, key=lambda holder: holder.name)
    pairs = dict.fromkeys((holder.name for holder in ordered), 0)
    chosen: dict[str, list[int]] = {}
    longest_ms = 0.0
    wanted = np.flatnonzero(counts)
    for expert in wanted[np.argsort(-counts[wanted], kind="stable")].tolist():
        count = int(counts[expert])
        best: tuple[float, bool, float, str] | None = None
        for holder in ordered:
            if holder.begin <= expert < holder.end:
                ready_ms = holder.ready_ms(pairs[holder.name] + count)
                offer = (max(longest_ms, ready_ms), holder.name not in chosen, ready_ms, holder.name)
                best = offer if best is None else min(best, offer)
        if best is not None:
            longest_ms, name = best[0], best[3]
            chosen.setdefault(name, []).append(expert)
            pairs[name] += count
    return {name: sorted(chosen[name]) for name in sorted(chosen)}


def replica(experts: Sequence[int], holders: Sequence[Holder], without: Iterable[str]) -> str | None:
    """The holder of all ``experts`` that would answer first, none of ``without``."""
    asked = set(without)
    able = [holder for holder in holders if holder.name not in asked and holder.holds(experts)]
    return min(able, key=lambda holder: (holder.ready_ms(len(experts)), holder.name)).name if able else None


def replicas(n_expert: int, holders: Iterable[Holder]) -> Counts:
    """(E,) how many sessions hold each expert."""
    held = np.zeros(n_expert, dtype=np.int64)
    for holder in holders:
        held[holder.begin : holder.end] += 1
    return held


@dataclass(slots=True)
class Heat:
    """How wanted each expert of each layer was of late; the hottest are kept local.

    An expert that is local stays so until another is wanted ``_MARGIN`` times as much: a placement that flutters would
    cost the worker its measurements.
    """

    keep: float = 0.99
    """What remains of a step's weight at the next."""
    _wanted: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    _local: dict[int, frozenset[int]] = field(default_factory=dict)

    def record(self, layer: int, counts: Counts) -> None:
        known = self._wanted.get(layer)
        self._wanted[layer] = counts.astype(np.float64) if known is None else known * self.keep + counts

    def hottest(self, layer: int, count: int) -> frozenset[int]:
        """The ``count`` experts of ``layer`` to keep local."""
        wanted = self._wanted.get(layer)
        if wanted is None or count < 1:
            return frozenset()
        now = self._local.get(layer, frozenset())
        biased = wanted * [_MARGIN if expert in now else 1.0 for expert in range(len(wanted))]
        order = np.argsort(-biased, kind="stable")[:count]
        self._local[layer] = frozenset(int(expert) for expert in order if wanted[expert] > 0)
        return self._local[layer]


_MARGIN = 1.25


def describe(layers: Mapping[int, int], holders: Mapping[int, Sequence[Holder]]) -> list[dict[str, Any]]:
    """For each layer, with its number of experts: how many of them have a replica, and the fewest of any."""
    found = []
    for layer, n_expert in sorted(layers.items()):
        held = replicas(n_expert, holders.get(layer, ()))
        found.append({"layer": layer, "held": int((held > 0).sum()), "of": n_expert, "fewest": int(held.min())})
    return found
