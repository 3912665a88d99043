"""Quiet trunks keep their experts, saturated ones stream them, and newcomers are tried one at a time."""

from __future__ import annotations

from kvasir_console.engine.process.elastic import Dispatch, Elastic, Newcomer, first_try


def test_experts_leave_under_load_and_come_back_when_it_has_been_calm() -> None:
    elastic = Elastic(Dispatch.ELASTIC, busy_streams=4, calm_s=5.0)
    elastic.observe(3, now=0.0)
    assert not elastic.streaming
    elastic.observe(4, now=1.0)
    assert elastic.streaming
    elastic.observe(1, now=5.9)
    assert elastic.streaming
    elastic.observe(5, now=6.0)
    elastic.observe(1, now=10.9)
    assert elastic.streaming
    elastic.observe(1, now=11.0)
    assert not elastic.streaming


def test_always_is_always_and_still_knows_its_load() -> None:
    elastic = Elastic(Dispatch.ALWAYS, busy_streams=4)
    assert elastic.streaming
    assert not elastic.saturated
    elastic.observe(8, now=0.0)
    assert elastic.saturated


def test_the_one_who_was_tried_least_and_came_first_is_next() -> None:
    early, late = Newcomer("b", 1.0, 0, under_way=False), Newcomer("a", 2.0, 0, under_way=False)
    assert first_try([late, early]) == "b"
    assert first_try([Newcomer("b", 1.0, 10, under_way=False), late]) == "a"
    assert first_try([early, Newcomer("a", 2.0, 0, under_way=True)]) is None
    assert first_try([]) is None
