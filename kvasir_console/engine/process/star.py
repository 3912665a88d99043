"""One layer's step: every frame goes out before any answer is awaited, and an answer that is late is asked for twice.

Runs on the compute thread. While answers travel, it computes what stays here and the references of what will be
looked at. Of an answer that fails, that no rounding explains, or that is late with nobody else to ask, the pairs are
computed here: a step always ends, with the same sums.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvasir_console.engine.process.sums import F32, I64, Pairs, Sum
from kvasir_console.engine.process.worker import Worker
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Wire

Released = Callable[[], contextlib.AbstractContextManager[None]]
"""Lets other steps compute inside the block."""


@dataclass(slots=True, eq=False)
class Part:
    """Pairs that one worker is asked for in one frame."""

    layer: int
    pairs: Pairs
    sent: I64
    """(R,) rows of the batch that the frame carries."""
    row_idx: I64
    """(P,) the frame's row of each pair."""
    request: dispatch.Request
    drawn: I64
    """(C,) the frame's rows that are looked at, ascending."""
    asks: list[Ask] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Everybody who was asked, in order."""
    reference: tuple[tuple[Wire, str], F32, dispatch.Request] | None = None
    """The drawn pairs' terms as a worker of this wire has to answer them, and the request for them as it sees it."""
    cross: str | None = None
    """Who is asked for the drawn rows too, instead of computing them here."""
    answer: F32 | None = None
    answered_by: str | None = None
    answerer: Worker | None = None
    """The connection that ``answer`` came on."""
    answered_at: float = 0.0

    @property
    def experts(self) -> list[int]:
        return sorted(set(self.pairs.ids.tolist()))


@dataclass(slots=True, eq=False)
class Ask:
    """One worker asked for one part."""

    key: str
    part: Part
    sent_at: float
    late_at: float
    """When it counts as late, on the same clock."""
    worker: Worker | None = None
    """The connection it goes out on. One that took its place since holds, speaks and is owed something else."""
    answered_at: float = 0.0
    reply: concurrent.futures.Future[F32] = field(default_factory=concurrent.futures.Future)


class Desk(Protocol):
    """The router, as a star needs it. Called on the compute thread."""

    def ask(self, asks: Sequence[Ask]) -> None:
        """Send frames; each ask's ``reply`` will be set."""

    def make_ask(self, key: str, part: Part) -> Ask: ...

    def other(self, part: Part, *, hedge: bool) -> str | None:
        """Another worker to ask for a part; a second request is granted only as far as the budget goes."""

    def accept(self, ask: Ask, values: F32) -> bool:
        """Whether an answer may be used; it is looked at, and paid or not."""

    def leave(self, ask: Ask) -> None:
        """Nobody waits for this answer any more; it is paid if it still comes in time."""


def gather(
    desk: Desk,
    parts: list[Part],
    total: Sum,
    local: Callable[[Pairs], None],
    clock: Callable[[], float],
    released: Released,
    on_remote: Callable[[Pairs], None],
    on_failover: Callable[[Pairs], None],
) -> None:
    """Bring every part into ``total``; ``local`` computes and adds pairs here."""
    open_parts = list(parts)
    woken = threading.Event()
    for part in open_parts:
        for ask in part.asks:
            ask.reply.add_done_callback(lambda _: woken.set())
    while open_parts:
        woken.clear()
        for part in list(open_parts):
            if _settle(desk, part, clock, woken):
                open_parts.remove(part)
                if part.answered_by != part.asked[0]:
                    on_failover(part.pairs)
                if part.answer is None:
                    local(part.pairs)
                else:
                    total.remote(part.pairs, part.sent, part.answer)
                    on_remote(part.pairs)
        if open_parts:
            # A part is looked at anew when the last of its asks is late; those that are late already wake nobody.
            late_at = min(max(ask.late_at for ask in part.asks) for part in open_parts)
            with released():
                woken.wait(max(0.0, late_at - clock()))


def _settle(
    desk: Desk,
    part: Part,
    clock: Callable[[], float],
    woken: threading.Event,
) -> bool:
    """See whether a part has its answer, or will be computed here (``answer`` is then ``None``)."""
    for ask in [ask for ask in part.asks if ask.reply.done()]:
        part.asks.remove(ask)
        if ask.reply.cancelled() or ask.reply.exception() is not None:
            continue
        values = ask.reply.result()
        if desk.accept(ask, values):
            part.answer, part.answered_by, part.answerer, part.answered_at = (
                values,
                ask.key,
                ask.worker,
                ask.answered_at,
            )
            break
    hedge = bool(part.asks) and all(ask.late_at <= clock() for ask in part.asks)
    if part.answer is None and (hedge or not part.asks):
        other = desk.other(part, hedge=hedge)
        if other is not None:
            ask = desk.make_ask(other, part)
            part.asks.append(ask)
            ask.reply.add_done_callback(lambda _: woken.set())
            desk.ask([ask])
            return False
    elif part.answer is None:
        return False
    part.answered_at = part.answered_at or clock()
    for ask in part.asks:
        desk.leave(ask)
    return True
