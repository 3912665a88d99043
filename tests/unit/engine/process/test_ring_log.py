"""What was sent, and what a successor still needs of it, for every history of steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.ring_log import REFILL, WANT_TOKEN, SentLog, Step
from kvasir_console.relay.wire.ring import Held, Item, RingError

PROMPT = 300


def rows(values: list[int]) -> np.ndarray:
    return np.array([[value, -value] for value in values], dtype=np.float32)


class Peer:
    """A successor: the rows it holds, what it says of them, and how it takes steps."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.step, self.final = 0, 0

    def take(self, step: Step, values: list[int]) -> None:
        assert step.begin <= len(self.values), "rows were left out"
        self.values[step.begin :] = values
        if step.refill:
            self.final = step.end
        elif step.number != self.step:
            self.final = max(step.begin, min(step.end, PROMPT))
        self.step = step.number

    @property
    def held(self) -> Held | None:
        return Held(self.step, self.final, len(self.values)) if self.values else None


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Step, list[int]]]:
    """Steps as rank 0 feeds them: the prompt's chunks, then a token with a draft that may be cut anywhere behind it."""
    steps = [Step(1, 0, 256), Step(2, 256, PROMPT, wants=True)]
    at = PROMPT
    for number in range(3, 3 + draw(st.integers(0, 24))):
        count = draw(st.integers(1, 8))
        steps.append(Step(number, at, at + count, wants=True))
        at += draw(st.integers(1, count))
    return [(step, [100_000 * step.number + row for row in range(step.begin, step.end)]) for step in steps]


@given(histories(), st.data())
def test_a_peer_that_missed_anything_ends_with_what_was_sent(
    history: list[tuple[Step, list[int]]], data: st.DataObject
) -> None:
    log, peer, sent = SentLog(2, PROMPT), Peer(), []
    for step, values in history:
        log.put(step, rows(values))
        sent[step.begin :] = values
        if data.draw(st.booleans(), "lost"):
            continue
        start = log.resume(peer.held)
        for each in log.replay(start):
            peer.take(each, [int(value) for value in log.rows(each.begin, each.end)[:, 0]])
        assert peer.values == sent
        assert log.resume(peer.held) == log.end
    assert np.array_equal(log.rows(0, log.end), rows(sent))


@given(histories(), st.integers(0, 26))
def test_a_log_that_was_filled_again_sends_a_peer_only_its_last_steps(
    history: list[tuple[Step, list[int]]], at: int
) -> None:
    """The rank before the peer was lost after it had sent all; it is filled with refills and the last step."""
    log, peer, fresh = SentLog(2, PROMPT), Peer(), SentLog(2, PROMPT)
    for step, values in history:
        log.put(step, rows(values))
        peer.take(step, values)
    before = len(peer.values)
    for each in log.replay(0):
        fresh.put(each, log.rows(each.begin, each.end))
        start = fresh.resume(peer.held)
        assert start == fresh.end  # it has all of it already
    assert len(peer.values) == before
    assert np.array_equal(fresh.rows(0, fresh.end), log.rows(0, log.end))


@given(histories(), st.integers(1, 8))
def test_another_rank_0_feeds_on_and_the_peer_takes_it(history: list[tuple[Step, list[int]]], count: int) -> None:
    """Its steps have other numbers, and it may know fewer tokens than the one before had fed."""
    peer, final = Peer(), []
    for step, values in history:
        peer.take(step, values)
        final[step.begin :] = values
    last = history[-1][0]
    position = last.begin if last.begin >= PROMPT else PROMPT
    if position > last.begin and last.begin < PROMPT:
        position = last.begin  # the prompt's last chunk was not answered
    log = SentLog(2, PROMPT)
    refill = [Step(900, begin, end, refill=True) for begin, end in ((0, 256), (256, position)) if begin < end]
    fed = Step(901, position, position + count if position >= PROMPT else PROMPT, wants=True)
    for step in [*refill, fed]:
        values = final[step.begin : step.end] if step.refill else list(range(step.begin, step.end))
        log.put(step, rows(values))
        for each in log.replay(log.resume(peer.held)):
            peer.take(each, [int(value) for value in log.rows(each.begin, each.end)[:, 0]])
    assert peer.values == [*final[:position], *range(fed.begin, fed.end)]
    assert peer.step == 901


def test_steps_are_cut_into_items_as_they_were_fed() -> None:
    assert Step(7, 0, 256).items(1, PROMPT) == [Item(1, 7, 0, 256, 0)]
    assert Step(7, 256, 300, wants=True).items(1, PROMPT) == [Item(1, 7, 256, 44, WANT_TOKEN)]
    assert Step(7, 300, 302, wants=True).items(1, PROMPT) == [Item(1, 7, row, 1, WANT_TOKEN) for row in (300, 301)]
    again = Step(0, 200, 600, refill=True).items(1, PROMPT)
    assert again == [
        Item(1, 0, 200, 56, REFILL),
        Item(1, 0, 256, 44, REFILL | WANT_TOKEN),
        Item(1, 0, 300, 212, REFILL | WANT_TOKEN),
        Item(1, 0, 512, 88, REFILL | WANT_TOKEN),
    ]
    assert Step.of(again) == Step(0, 200, 600, refill=True)


def test_a_step_that_skips_rows_is_refused() -> None:
    log = SentLog(2, PROMPT)
    for step in (Step(1, 1, 2), Step(1, 0, 3)):
        with pytest.raises(RingError):
            log.put(step, rows([5]))
