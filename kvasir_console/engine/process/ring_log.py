"""What a rank sent of one sequence, and what of it a successor still needs. Pure.

A *step* is what rank 0 feeds of a sequence at once: a prompt chunk, or a token and a draft after it. Rows before a
step's first are final. A step's number is rank 0's; one that was made up out of several has none (0).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvasir_console.engine.process.prefix import PREFILL_CHUNK
from kvasir_console.relay.wire.ring import Held, Item, RingError

WANT_TOKEN = 1
"""Item flag: the last rank chooses a token after the item's last row."""
REFILL = 2
"""Item flag: rows that were answered before. The last rank returns nothing for them; where it was not told what was
chosen after a row, it chooses again."""
AGAIN = 4
"""Item flag: rows that were computed before, as far as is known; they only count otherwise."""
KEPT_STEPS = 16
"""Steps whose numbers are remembered; more than can be on the wire of one sequence at a time."""

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Step:
    """Rows [begin, end). ``wants``: tokens are waited for; ``refill``: they were answered before."""

    number: int
    begin: int
    end: int
    wants: bool = False
    refill: bool = False

    @classmethod
    def of(cls, items: Sequence[Item]) -> Step:
        """The step that consecutive items of one sequence and step are."""
        first, last = items[0], items[-1]
        refill = bool(first.flags & REFILL)
        wants = not refill and any(item.flags & WANT_TOKEN for item in items)
        return cls(first.step, first.position, last.position + last.rows, wants, refill)

    def items(self, request_id: int, prompt_length: int, flags: int = 0) -> list[Item]:
        """The step as items of a frame.

        Prompt rows are cut where prompts always are. A row after the prompt is an item of its own, because a token is
        chosen after each; in a refill they stay together.
        """
        items: list[Item] = []
        flags |= REFILL if self.refill else 0
        for begin, end in chunks(self.begin, min(self.end, prompt_length)):
            want = WANT_TOKEN if end == prompt_length and (self.wants or self.refill) else 0
            items.append(Item(request_id, self.number, begin, end - begin, flags | want))
        generated = max(self.begin, prompt_length)
        if self.refill:
            pieces = chunks(generated, self.end)
        else:
            pieces = ((row, row + 1) for row in range(generated, self.end))
        flags |= WANT_TOKEN if self.wants or self.refill else 0
        items += [Item(request_id, self.number, begin, end - begin, flags) for begin, end in pieces]
        return items


def chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """[begin, end) cut at multiples of ``PREFILL_CHUNK``."""
    while begin < end:
        cut = min(end, (begin // PREFILL_CHUNK + 1) * PREFILL_CHUNK)
        yield begin, cut
        begin = cut


class SentLog:
    """The rows (n, D) f32 that a rank sent of a sequence, from its first on, and the steps they were last sent in."""

    def __init__(self, n_embd: int, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.end = 0
        self.steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._n_embd = n_embd
        self._blocks: list[Rows] = []

    def put(self, step: Step, rows: Rows) -> None:
        """Enter a step. What lay at its first row or after is forgotten. Raises ``RingError`` if it skips rows."""
        if step.begin > self.end or len(rows) != step.end - step.begin:
            raise RingError(f"a step of {len(rows)} rows at {step.begin} comes after {self.end} rows", "rows")
        kept = [replace(each, end=min(each.end, step.begin)) for each in self.steps if each.begin < step.begin]
        self.steps = deque([*kept, step], maxlen=KEPT_STEPS)
        while len(self._blocks) * PREFILL_CHUNK < step.end:
            self._blocks.append(np.empty((PREFILL_CHUNK, self._n_embd), dtype=np.float32))
        for begin, end in chunks(step.begin, step.end):
            row = begin % PREFILL_CHUNK
            block = self._blocks[begin // PREFILL_CHUNK]
            block[row : row + end - begin] = rows[begin - step.begin : end - step.begin]
        self.end = step.end

    def rows(self, begin: int, end: int) -> Rows:
        """A copy of rows [begin, end)."""
        parts = [
            self._blocks[at // PREFILL_CHUNK][at % PREFILL_CHUNK : at % PREFILL_CHUNK + cut - at]
            for at, cut in chunks(begin, end)
        ]
        return np.concatenate(parts) if parts else np.empty((0, self._n_embd), dtype=np.float32)

    def resume(self, held: Held | None) -> int:
        """The first row that a successor needs which has ``held`` (``None``: nothing); ``end`` if it needs none."""
        if held is None:
            return 0
        if not self.steps:
            return self.end
        if held.step:
            for index, step in enumerate(self.steps):
                if step.number == held.step:
                    return self.steps[index + 1].begin if index + 1 < len(self.steps) else self.end
        last = self.steps[-1]
        start = min(held.final, last.begin) if last.wants else held.final
        return min(start, self.end)

    def replay(self, start: int) -> list[Step]:
        """Rows from ``start`` on as steps that a successor can take: whatever comes before the last one is a refill.

        The last two keep their numbers, so that the successor can say later how far it got.
        """
        if start >= self.end:
            return []
        last = self.steps[-1]
        if start >= last.begin:
            return [replace(last, begin=start)]
        before = self.steps[-2] if len(self.steps) > 1 else None
        cut = last.begin if before is None else max(start, min(before.begin, last.begin))
        steps = [Step(0, begin, end, refill=True) for begin, end in chunks(start, cut)]
        if before is not None and cut < last.begin:
            steps.append(Step(before.number, cut, last.begin, refill=True))
        return [*steps, last]
