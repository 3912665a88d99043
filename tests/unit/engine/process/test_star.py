"""One layer's step: whoever answers, fails, lies or is late, every pair is summed exactly once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process import star
from kvasir_console.engine.process.star import Ask, Part, gather
from kvasir_console.engine.process.sums import F32, GroupedSum, Pairs
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Wire

D = 4
ANSWERS = ("right", "wrong", "error", "late", "never")


class ScriptedDesk:
    """Workers that answer as they are told. Time passes only when somebody waits."""

    def __init__(self, script: dict[str, str], replicas: Sequence[str]) -> None:
        self.now = 0.0
        self.script = script
        self.replicas = list(replicas)
        self.left: list[str] = []
        self.accepted: list[str] = []
        self.asked: list[str] = []
        self.later: list[Ask] = []

    def clock(self) -> float:
        self.now += 1e-4
        return self.now

    @contextlib.contextmanager
    def released(self):  # type: ignore[no-untyped-def]
        self.now += 0.02
        for ask in self.later:
            if ask.late_at + 0.03 <= self.now and not ask.reply.done():
                ask.reply.set_result(answer_of(ask.part))
        yield

    def make_ask(self, key: str, part: Part) -> Ask:
        part.asked.append(key)
        return Ask(key, part, self.now, self.now + 0.01)

    def ask(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.asked.append(ask.key)
            match self.script[ask.key]:
                case "right":
                    ask.reply.set_result(answer_of(ask.part))
                case "wrong":
                    ask.reply.set_result(answer_of(ask.part) + 1)
                case "error":
                    ask.reply.set_exception(ConnectionResetError("gone"))
                case "late":
                    self.later.append(ask)

    def other(self, part: Part, *, hedge: bool) -> str | None:
        return next((key for key in self.replicas if key not in part.asked), None)

    def accept(self, ask: Ask, values: F32) -> bool:
        right = bool(np.array_equal(values, answer_of(ask.part)))
        if right:
            self.accepted.append(ask.key)
        return right

    def leave(self, ask: Ask) -> None:
        self.left.append(ask.key)


def answer_of(part: Part) -> F32:
    values = np.zeros((len(part.sent), D), dtype=np.float32)
    np.add.at(values, part.row_idx, (part.pairs.weights * (part.pairs.ids + 1))[:, None])
    return values


def pairs_of(rows: int) -> Pairs:
    ids = torch.arange(2 * rows).reshape(rows, 2) % 5
    return Pairs.of(ids, torch.full((rows, 2), 0.5))


def run(script: dict[str, str], replicas: Sequence[str], first: Sequence[str]) -> tuple[ScriptedDesk, int, np.ndarray]:
    """A step of six rows, two thirds of whose pairs are asked of ``first``; (desk, pairs computed here, sums)."""
    x = torch.zeros(6, D)
    pairs, total, desk = pairs_of(6), GroupedSum(x), ScriptedDesk(script, replicas)
    here = 0

    def local(some: Pairs) -> None:
        nonlocal here
        here += len(some)
        values = np.zeros((6, D), dtype=np.float32)
        np.add.at(values, some.rows, (some.weights * (some.ids + 1))[:, None])
        total.remote(some, np.arange(6), values)

    parts = []
    for number, key in enumerate(first):
        mine = pairs.where(pairs.ids == number)
        sent, row_idx = total.frame(mine)
        rows = np.zeros((len(sent), D), dtype=np.float32)
        request = dispatch.Request(Wire.V2, rows, row_idx.astype("i4"), mine.ids.astype("i4"), mine.weights)
        part = Part(0, mine, sent, row_idx, request, np.arange(0))
        part.asks.append(desk.make_ask(key, part))
        parts.append(part)
    desk.ask([ask for part in parts for ask in part.asks])
    local(pairs.where(pairs.ids >= len(first)))
    seen: list[int] = []
    note: Callable[[Pairs], None] = lambda some: seen.append(len(some))  # noqa: E731
    gather(desk, parts, total, local, desk.clock, desk.released, note, lambda _: None)
    assert sum(seen) + here == len(pairs)
    return desk, here, total.result().numpy()


def expected() -> np.ndarray:
    pairs = pairs_of(6)
    values = np.zeros((6, D), dtype=np.float32)
    np.add.at(values, pairs.rows, (pairs.weights * (pairs.ids + 1))[:, None])
    return values


@given(
    st.lists(st.sampled_from(ANSWERS), min_size=4, max_size=4),
    st.integers(0, 2),
    st.integers(1, 2),
)
def test_every_pair_is_summed_once_whoever_fails(answers: list[str], replicas: int, first: int) -> None:
    names = ["a", "b", "c", "d"]
    script = dict(zip(names, answers, strict=True))
    desk, _, sums = run(script, names[2 : 2 + replicas], names[:first])
    assert np.array_equal(sums, expected())
    assert all(script[key] in ("right", "late") for key in desk.accepted)
    assert len(desk.asked) == len(set(desk.asked)) or replicas  # a replica may serve two parts


def test_a_late_answer_is_asked_of_a_replica_and_left_to_be_paid() -> None:
    desk, here, _ = run({"a": "never", "b": "right"}, ["b"], ["a"])
    assert desk.asked == ["a", "b"]
    assert desk.accepted == ["b"]
    assert desk.left == ["a"]
    assert here == len(pairs_of(6)) - int((pairs_of(6).ids == 0).sum())


def test_who_is_late_already_does_not_keep_the_wait_for_another_awake() -> None:
    """Time passes only as it is waited for: with a deadline in the past the wait would end at once, again and again."""
    waited: list[float] = []
    desk = ScriptedDesk({"a": "never", "b": "never"}, ["b"])

    class Waiting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waited.append(timeout)
            assert len(waited) < 10
            desk.now += timeout
            return False

    with mock.patch.object(star.threading, "Event", Waiting):
        mine = pairs_of(6)
        total = GroupedSum(torch.zeros(6, D))
        sent, row_idx = total.frame(mine)
        rows = np.zeros((len(sent), D), dtype=np.float32)
        request = dispatch.Request(Wire.V2, rows, row_idx.astype("i4"), mine.ids.astype("i4"), mine.weights)
        part = Part(0, mine, sent, row_idx, request, np.arange(0))
        part.asks.append(desk.make_ask("a", part))
        desk.ask(part.asks)
        nothing: Callable[[Pairs], None] = lambda _: None  # noqa: E731
        gather(desk, [part], total, nothing, lambda: desk.now, contextlib.nullcontext, nothing, nothing)
    assert desk.asked == ["a", "b"]
    assert waited == pytest.approx([0.01, 0.01])  # once for each of them


def test_without_a_replica_a_late_answer_is_computed_here() -> None:
    desk, here, _ = run({"a": "never"}, [], ["a"])
    assert desk.left == ["a"]
    assert here == len(pairs_of(6))


def test_a_wrong_answer_is_not_summed_and_another_is_asked() -> None:
    desk, _, sums = run({"a": "wrong", "b": "right"}, ["b"], ["a"])
    assert desk.accepted == ["b"]
    assert np.array_equal(sums, expected())
