"""Whose work is whose: a step holds rows of several requests, and every expert pair is counted for its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Tally:
    """Work done for one request: token rows through the model whose result was kept, and their expert pairs."""

    rows: int = 0
    pairs_local: int = 0
    pairs_remote: int = 0
    failovers: int = 0


class StepTally:
    """Expert pairs of one step, by row. Written by the compute thread only.

    ``network`` (T,) says which rows' experts may be computed elsewhere. A forward pass may come to a layer in several
    calls; the rows of each call follow those of the call before.
    """

    def __init__(self, network: Sequence[bool]) -> None:
        self.network: npt.NDArray[np.bool_] = np.array(network, dtype=np.bool_)
        self._pairs = np.zeros((3, len(network)), dtype=np.int64)  # local, remote, failed over
        self._seen: dict[int, int] = {}
        self.spent_s = 0.0
        """Time in which nothing was left to compute for this step."""
        self.waited_s = 0.0
        """The part of it in which answers were under way."""

    def take(self, layer: int, count: int) -> slice:
        """The step's rows that the next ``count`` rows of ``layer`` are."""
        begin = self._seen.get(layer, 0)
        self._seen[layer] = begin + count
        return slice(begin, begin + count)

    def wait(self, spent_s: float, waited_s: float) -> None:
        """A layer's answers have come."""
        self.spent_s += spent_s
        self.waited_s += waited_s

    def rest_local(self, layers: int, pairs_per_row: int) -> None:
        """Of so many layers, those that no call came to were computed here whole."""
        self._pairs[0] += pairs_per_row * (layers - len(self._seen))

    def local_everywhere(self, pairs_per_row: int) -> None:
        """Every row had this many pairs, all computed here."""
        self._pairs[0] += pairs_per_row

    def count_local(self, rows: npt.NDArray[np.int64]) -> None:
        """One pair for each entry; entries index the step's rows."""
        np.add.at(self._pairs[0], rows, 1)

    def count_remote(self, rows: npt.NDArray[np.int64]) -> None:
        np.add.at(self._pairs[1], rows, 1)

    def count_failovers(self, rows: npt.NDArray[np.int64]) -> None:
        np.add.at(self._pairs[2], rows, 1)

    def credit(self, tally: Tally, rows: slice) -> None:
        """Add these rows' work to their request's tally."""
        local, remote, failed_over = (int(count) for count in self._pairs[:, rows].sum(axis=1))
        tally.rows += rows.stop - rows.start
        tally.pairs_local += local
        tally.pairs_remote += remote
        tally.failovers += failed_over
