"""The log's memory: windows that overlap are joined without loss or repetition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.screens.logbuffer import GAP, LogBuffer


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(5, 12))
def test_sliding_windows_give_back_every_distinct_line(steps: list[int], window: int) -> None:
    """A node that writes fewer lines than a window holds between two looks loses none."""
    written: list[str] = []
    buffer = LogBuffer(most=10_000)
    for step in steps:
        written += [f"line {len(written) + index}" for index in range(step % (window - 1))]
        buffer.take(tuple(written[-window:]))
    assert list(buffer.lines) == written


def test_lines_that_repeat_are_not_swallowed() -> None:
    buffer = LogBuffer()
    assert buffer.take(("a", "b", "b")) == (3, 0)
    assert buffer.take(("a", "b", "b", "b")) == (1, 0)
    assert list(buffer.lines) == ["a", "b", "b", "b"]


def test_a_window_without_overlap_is_marked() -> None:
    buffer = LogBuffer()
    buffer.take(("a", "b"))
    buffer.take(("x", "y"))
    assert list(buffer.lines) == ["a", "b", GAP, "x", "y"]


def test_memory_is_bounded_and_the_dropped_are_counted() -> None:
    buffer = LogBuffer(most=3)
    assert buffer.take(("a", "b", "c")) == (3, 0)
    assert buffer.take(("c", "d", "e")) == (2, 2)
    assert list(buffer.lines) == ["c", "d", "e"]
    assert buffer.take(("c", "d", "e")) == (0, 0)


def test_an_empty_log_adds_nothing() -> None:
    buffer = LogBuffer()
    assert buffer.take(()) == (0, 0)
    buffer.take(("a",))
    assert buffer.take(()) == (0, 0)
    assert list(buffer.lines) == ["a"]
