"""The sending side of an edge, whatever happens to the edge: sequences, what was sent of them, what the peer has.

Sans-I/O. A link is *live* from the peer's HELD until the edge is lost; what is said meanwhile waits in the log. The
frames that a method returns are to be written in their order; an iterator makes each only when it is its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from kvasir_console.engine.process.ring_log import Rows, SentLog, Step
from kvasir_console.relay.wire import ring as wire
from kvasir_console.relay.wire.ring import Frame, FrameKind, Held, Item, Known

MAX_NOTICES = 4096
"""Most releases and errors that are kept for a peer; older ones give way (a ROLL frees what they would have)."""
REPLAY_ROWS = 256
"""Rows of a frame that repeats."""

MakeFrame = Callable[[FrameKind, tuple[Item, ...], bytes], Frame]


class Notices:
    """Errors and releases: said again to a peer that comes back, until they are of no use."""

    def __init__(self, make: MakeFrame) -> None:
        self._make = make
        self._errors: dict[int, bytes] = {}
        self._released: dict[int, None] = {}

    def error(self, request_id: int, payload: bytes) -> Frame:
        """A sequence ended by an error; it is repeated until the sequence is released."""
        _bounded(self._errors)
        self._errors[request_id] = payload
        return self._make(FrameKind.ERROR, (Item(request_id, rows=0),), payload)

    def release(self, request_id: int, *, live: bool) -> Frame:
        self._errors.pop(request_id, None)
        if not live:
            _bounded(self._released)
            self._released[request_id] = None
        return self._make(FrameKind.RELEASE, (Item(request_id, rows=0),), b"")

    def admit(self, request_id: int) -> None:
        self._errors.pop(request_id, None)
        self._released.pop(request_id, None)

    def keep(self, living: set[int]) -> None:
        """Only these sequences live."""
        for request_id in [each for each in self._errors if each not in living]:
            del self._errors[request_id]

    def joined(self) -> list[Frame]:
        frames = [self._make(FrameKind.RELEASE, (Item(key, rows=0),), b"") for key in self._released]
        self._released.clear()
        frames += [self._make(FrameKind.ERROR, (Item(key, rows=0),), payload) for key, payload in self._errors.items()]
        return frames


def _bounded(notices: dict[int, bytes] | dict[int, None]) -> None:
    if len(notices) >= MAX_NOTICES:
        del notices[next(iter(notices))]


@dataclass(slots=True)
class _Outgoing:
    """A sequence as it goes on to the successor. ``peer`` is what the successor said it has, until something was sent
    after it; ``None``: it has everything that was sent."""

    admit: bytes
    log: SentLog
    peer: Held | None = None


class RowLink:
    """From a rank to its successor: admissions and hidden states."""

    def __init__(self, n_embd: int, make: MakeFrame) -> None:
        self.notices = Notices(make)
        self.live = False
        self._n_embd = n_embd
        self._make = make
        self._out: dict[int, _Outgoing] = {}
        self._unknown: dict[int, Held] = {}
        """What the successor has of sequences that are not known here, yet perhaps."""

    def __len__(self) -> int:
        return len(self._out)

    def admit(self, request_id: int, payload: bytes, prompt_length: int) -> list[Frame]:
        """A sequence begins here; its ADMIT goes on unless the successor has the sequence."""
        self.notices.admit(request_id)
        peer = self._unknown.pop(request_id, None)
        self._out[request_id] = _Outgoing(payload, SentLog(self._n_embd, prompt_length), peer)
        if not self.live or peer is not None:
            return []
        return [self._make(FrameKind.ADMIT, (Item(request_id, rows=0),), payload)]

    def rows(self, items: Sequence[Item], hidden: Rows, times: tuple[int, int] = (0, 0)) -> Iterator[Frame]:
        """Rows (R, D) of ``items`` leave this rank. ``times`` are the frame's ``slowest_us`` and ``inside_us``."""
        parts: list[tuple[int, Step]] = []
        fresh: list[Item] = []
        taken: list[Rows] = []
        at = 0
        for (request_id, _), run in groupby(items, lambda item: (item.request_id, item.step)):
            group = list(run)
            step = Step.of(group)
            mine = hidden[at : at + step.end - step.begin]
            at += len(mine)
            out = self._out.get(request_id)
            if out is None:
                continue
            out.log.put(step, mine)
            if not self.live:
                continue
            start = step.begin if out.peer is None else out.log.resume(out.peer)
            if start >= out.log.end:
                continue  # the successor has it already
            out.peer = None
            if start == step.begin:
                fresh += group
                taken.append(mine)
            else:
                parts += [(request_id, each) for each in out.log.replay(start)]
        return self._frames(parts, fresh, taken, times)

    def release(self, request_id: int) -> list[Frame]:
        """The sequence is over for this rank and all behind it."""
        self._out.pop(request_id, None)
        self._unknown.pop(request_id, None)
        frame = self.notices.release(request_id, live=self.live)
        return [frame] if self.live else []

    def error(self, request_id: int, payload: bytes) -> list[Frame]:
        """A sequence that this rank, or one before it, cannot go on with."""
        self._out.pop(request_id, None)
        frame = self.notices.error(request_id, payload)
        return [frame] if self.live else []

    def joined(self, held: Mapping[int, Held]) -> Iterator[Frame]:
        """The successor has ``held``: what it lacks, and what could not be said while the edge was lost."""
        frames = self.notices.joined()
        self.live = True
        self._unknown = {key: each for key, each in held.items() if key not in self._out}
        parts: list[tuple[int, Step]] = []
        for request_id, out in self._out.items():
            out.peer = held.get(request_id)
            if out.peer is None:
                frames.append(self._make(FrameKind.ADMIT, (Item(request_id, rows=0),), out.admit))
            start = out.log.resume(out.peer)
            if start < out.log.end:
                out.peer = None
            parts += [(request_id, step) for step in out.log.replay(start)]
        return self._again(frames, parts)

    def lost(self) -> None:
        """The edge ended."""
        self.live = False
        self._unknown.clear()

    def _frames(
        self, parts: list[tuple[int, Step]], fresh: list[Item], taken: list[Rows], times: tuple[int, int]
    ) -> Iterator[Frame]:
        yield from self._again([], parts)
        if fresh:
            frame = self._make(FrameKind.HIDDEN, tuple(fresh), wire.encode_hidden(np.concatenate(taken)))
            slowest_us, inside_us = times
            yield Frame(frame.kind, frame.epoch, frame.items, frame.payload, frame.flags, slowest_us, inside_us)

    def _again(self, frames: list[Frame], parts: list[tuple[int, Step]]) -> Iterator[Frame]:
        """Repeats, several sequences to a frame, read from the logs when it is their turn."""
        yield from frames
        items: list[Item] = []
        taken: list[Rows] = []
        for request_id, step in parts:
            out = self._out.get(request_id)
            if out is None or step.begin >= out.log.end:
                continue  # released since
            step = replace(step, end=min(step.end, out.log.end))  # a draft's end may have been rejected since
            mine = step.items(request_id, out.log.prompt_length)
            rows = step.end - step.begin
            full = sum(len(each) for each in taken) + rows > REPLAY_ROWS or len(items) + len(mine) > wire.MAX_ITEMS
            if items and full:
                yield self._make(FrameKind.HIDDEN, tuple(items), wire.encode_hidden(np.concatenate(taken)))
                items, taken = [], []
            items += mine
            taken.append(out.log.rows(step.begin, step.end))
        if items:
            yield self._make(FrameKind.HIDDEN, tuple(items), wire.encode_hidden(np.concatenate(taken)))


class TokenLink:
    """From the last rank to rank 0: the tokens of each sequence's last step."""

    def __init__(self, make: MakeFrame) -> None:
        self.notices = Notices(make)
        self.live = False
        self._make = make
        self._answers: dict[int, list[tuple[Item, int]]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def admit(self, request_id: int) -> None:
        self.notices.admit(request_id)

    def tokens(self, chosen: Sequence[tuple[Item, int]], times: tuple[int, int] = (0, 0)) -> list[Frame]:
        """Tokens of whole steps."""
        for request_id, run in groupby(chosen, lambda each: each[0].request_id):
            self._answers[request_id] = list(run)
        return [self._frame(chosen, times)] if self.live and chosen else []

    def release(self, request_id: int) -> list[Frame]:
        """Nothing goes on to rank 0: the release came from there."""
        self._answers.pop(request_id, None)
        self.notices.release(request_id, live=True)
        return []

    def error(self, request_id: int, payload: bytes) -> list[Frame]:
        self._answers.pop(request_id, None)
        frame = self.notices.error(request_id, payload)
        return [frame] if self.live else []

    def joined(self, known: Mapping[int, Known]) -> Iterator[Frame]:
        """Rank 0 knows ``known``: the answers it waits for, and errors it may not have heard of."""
        self.live = True
        frames = self.notices.joined()
        missing = [
            (item, token)
            for request_id, each in known.items()
            for item, token in self._answers.get(request_id, ())
            if each.step and item.step == each.step and item.position + item.rows >= each.count
        ]
        size = wire.MAX_ITEMS
        frames += [self._frame(missing[at : at + size], (0, 0)) for at in range(0, len(missing), size)]
        return iter(frames)

    def lost(self) -> None:
        self.live = False

    def _frame(self, chosen: Sequence[tuple[Item, int]], times: tuple[int, int]) -> Frame:
        items = tuple(item for item, _ in chosen)
        frame = self._make(FrameKind.TOKEN, items, wire.encode_tokens([token for _, token in chosen]))
        slowest_us, inside_us = times
        return Frame(frame.kind, frame.epoch, frame.items, frame.payload, frame.flags, slowest_us, inside_us)
