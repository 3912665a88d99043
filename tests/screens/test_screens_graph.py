"""Graphs: known characters for known values, the same scale for all sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.screens.graph import Symbols, default_symbols, filled, nice_top, plot, window

HISTORIES = st.lists(st.floats(0, 1e9), max_size=300)


def test_braille_takes_two_values_a_column_from_the_bottom() -> None:
    # Dots 7, 3, 2, 1 of the left column are bits 0x40, 0x04, 0x02, 0x01; 8, 6, 5, 4 of the right 0x80 ... 0x08.
    assert plot([1, 4], 1, 1, 4, Symbols.BRAILLE) == [chr(0x2800 | 0x40 | 0xB8)]
    assert plot([4, 0], 1, 1, 4, Symbols.BRAILLE) == [chr(0x2847)]
    assert plot([4, 4], 1, 2, 8, Symbols.BRAILLE) == [" ", "\u28ff"]
    assert plot([8, 8], 1, 2, 8, Symbols.BRAILLE) == ["\u28ff", "\u28ff"]


def test_blocks_have_eight_levels_and_ascii_three() -> None:
    assert plot(range(9), 9, 1, 8, Symbols.BLOCK) == [" ▁▂▃▄▅▆▇█"]
    assert plot([0, 1, 2, 3], 4, 1, 3, Symbols.ASCII) == [" .:#"]
    assert plot([6], 1, 2, 6, Symbols.ASCII) == ["#", "#"]


@given(HISTORIES, st.integers(0, 60), st.integers(0, 8), st.sampled_from(Symbols))
def test_size_is_exactly_what_was_asked(history: list[float], columns: int, rows: int, symbols: Symbols) -> None:
    drawn = plot(history, columns, rows, nice_top(max(history, default=0)), symbols)
    assert [len(row) for row in drawn] == [columns] * rows


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=100), st.sampled_from(Symbols))
def test_a_value_above_zero_always_shows_and_the_newest_is_at_the_right(values: list[float], symbols: Symbols) -> None:
    drawn = plot(values, 20, 3, nice_top(max(values)), symbols)
    assert drawn[-1][-1] != " "
    assert plot([*values, 0.0, 0.0], 20, 3, nice_top(max(values)), symbols)[-1][-1] == " "


@given(st.lists(st.floats(0, 100), max_size=50), st.sampled_from(Symbols))
def test_what_is_not_known_is_blank(values: list[float], symbols: Symbols) -> None:
    columns = 40
    known = -(-len(values) // symbols.per_column)
    assert all(not row[: columns - known].strip() for row in plot(values, columns, 2, 100, symbols))


@pytest.mark.parametrize(
    ("peak", "top"), [(0, 1), (0.3, 0.5), (1, 1), (1.01, 2), (2, 2), (37.4, 50), (50, 50), (99, 100)]
)
def test_the_scale_is_one_two_or_five(peak: float, top: float) -> None:
    assert nice_top(peak) == pytest.approx(top)


@given(st.floats(1e-6, 1e12))
def test_the_scale_holds_the_peak_and_wastes_little(peak: float) -> None:
    assert peak <= nice_top(peak) * (1 + 1e-6) <= peak * 2.6


def test_a_full_bar_means_all_of_it() -> None:
    assert filled(999, 1000, 10) == 9
    assert filled(1000, 1000, 10) == 10
    assert filled(None, 1000, 10) == 0
    assert filled(5, None, 10) == 0
    assert filled(5, 0, 10) == 0


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.integers(0, 80))
def test_a_window_fills_its_bar_and_always_shows(begin: int, size: int, rest: int, cells: int) -> None:
    total = begin + size + rest
    before, inside, after = window(begin, begin + size, total, cells)
    assert min(before, inside, after) >= 0
    assert before + inside + after == cells
    if size and cells:
        assert inside >= 1


def test_windows_that_divide_a_bar_tile_it() -> None:
    assert [window(begin, begin + 2, 8, 16) for begin in (0, 2, 6)] == [(0, 4, 12), (4, 4, 8), (12, 4, 0)]


@pytest.mark.parametrize(
    ("env", "symbols"),
    [
        ({"LANG": "en_GB.UTF-8", "TERM": "xterm-256color"}, Symbols.BRAILLE),
        ({"LANG": "C", "LC_ALL": "de_DE.utf8", "TERM": "screen"}, Symbols.BRAILLE),
        ({"LANG": "en_GB.UTF-8", "TERM": "linux"}, Symbols.BLOCK),
        ({"LANG": "C", "TERM": "xterm"}, Symbols.ASCII),
        ({"LC_ALL": "C", "LANG": "en_GB.UTF-8"}, Symbols.ASCII),
        ({}, Symbols.ASCII),
    ],
)
def test_the_terminal_decides_what_is_drawn(env: dict[str, str], symbols: Symbols) -> None:
    assert default_symbols(env) is symbols


def test_the_key_walks_through_all_sets() -> None:
    assert {Symbols.BRAILLE.following, Symbols.BLOCK.following, Symbols.ASCII.following} == set(Symbols)
