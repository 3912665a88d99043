"""Prompt-lookup speculation: guess the next tokens from where the last ones stood before, and check them in one step.

A draft is what followed the most recent earlier occurrence of the sequence's last tokens (as in Saxena's prompt
lookup decoding, 2023). Its rows go through the model behind the row that is due. The sampler then chooses after each
row as it would have alone, and a draft counts only as far as it equals those choices: since sampling is keyed by
position, it changes no token at any temperature, only how many come out of a step.

Whether a draft is worth its rows is measured: how often this sequence's drafts were right, and what a row more costs
in a step here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NGRAM_SIZES = (3, 2)
"""Lengths of the endings that are looked up, the longest first."""
MAX_DRAFT = 7
GAIN = 1.05
"""A draft has to promise this many times the tokens per second of a step without it."""
_PRIOR_CHANCE = 0.6
_MEMORY = 0.9
_PATIENCE = 16
_MOST_PATIENCE = 256
_PROBE = 2
_COST_MEMORY = 0.97
_PRIOR_ROW_SHARE = 0.2
_OUTLIER = 4.0


class Lookup:
    """Where each ending of a sequence stood before; fed token by token."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in NGRAM_SIZES)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        known = self._tokens
        for token in tokens:
            at = len(known)
            for size, after in zip(NGRAM_SIZES, self._after, strict=True):
                if at >= size:
                    after[tuple(known[at - size :])] = at  # the ending before this token; the latest occurrence wins
            known.append(token)

    def draft(self, count: int) -> list[int]:
        """At most ``count`` tokens that followed this ending the last time; empty if it is new."""
        known = self._tokens
        for size, after in zip(NGRAM_SIZES, self._after, strict=True):
            at = after.get(tuple(known[-size:])) if len(known) >= size else None
            if at is not None:
                period = len(known) - at  # past its end the guess repeats itself, as a loop would
                return [known[at + step % period] for step in range(count)]
        return []


class Chance:
    """How likely the next drafted token of a sequence is right, from its drafts so far; recent ones count more."""

    def __init__(self) -> None:
        self._right = _PRIOR_CHANCE
        self._tried = 1.0
        self._passed = 0
        self._patience = _PATIENCE

    @property
    def value(self) -> float:
        return self._right / self._tried

    def record(self, drafted: int, accepted: int) -> None:
        """A draft was checked. Tokens after the first wrong one say nothing."""
        tried = min(drafted, accepted + 1)
        if tried:
            self._right = self._right * _MEMORY**tried + accepted
            self._tried = self._tried * _MEMORY**tried + tried
        if accepted:
            self._patience = _PATIENCE

    def probe(self, limit: int) -> int:
        """A draft was there and seemed not worth its rows. Now and then, ever more rarely until one is right, a short
        one is tried all the same: texts change, and so does what a row costs. Returns its length, mostly 0."""
        self._passed += 1
        if self._passed < self._patience:
            return 0
        self._passed = 0
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return min(limit, _PROBE)


class StepCost:
    """Seconds of a decode step as ``fixed + per_row * rows``, fitted to the steps so far; recent ones count more."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._products = 0.0

    def record(self, rows: int, seconds: float) -> None:
        if self._weight > 8 and seconds > _OUTLIER * self.seconds(rows):
            seconds = _OUTLIER * self.seconds(rows)  # the machine was busy with something else
        keep = _COST_MEMORY
        self._weight = self._weight * keep + 1
        self._rows = self._rows * keep + rows
        self._seconds = self._seconds * keep + seconds
        self._rows_squared = self._rows_squared * keep + rows * rows
        self._products = self._products * keep + rows * seconds

    def seconds(self, rows: float) -> float:
        """Expected time of a step of ``rows``; only ratios mean anything before the first record."""
        if not self._weight:
            return (1 - _PRIOR_ROW_SHARE) + _PRIOR_ROW_SHARE * rows
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        prior = _PRIOR_ROW_SHARE * mean_seconds / ((1 - _PRIOR_ROW_SHARE) + _PRIOR_ROW_SHARE * mean_rows)
        spread = self._rows_squared - self._rows * mean_rows
        slope = (self._products - self._rows * mean_seconds + prior) / (spread + 1)
        return max(mean_seconds + max(0.0, slope) * (rows - mean_rows), 0.05 * mean_seconds)


def worthwhile(chance: float, cost: StepCost, rows: int, tokens: float, limit: int) -> int:
    """Length of the draft, at most ``limit``, that a sequence should add to a step; 0 for none.

    Args:
        chance: that a drafted token is right if those before it are.
        rows: what the step has without this draft.
        tokens: what it is expected to yield without it.
    """
    best, best_rate = 0, GAIN * tokens / cost.seconds(rows)
    for count in range(1, limit + 1):
        tokens += chance**count
        rate = tokens / cost.seconds(rows + count)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


def accepted(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many tokens of ``draft`` equal what the sampler chose in their places."""
    right = 0
    for guess, choice in zip(draft, chosen, strict=False):
        if guess != choice:
            break
        right += 1
    return right
