"""Lines: what a peer says is made harmless, and every text takes exactly the cells it was given."""

from __future__ import annotations

import unicodedata

from console_fakes import HOSTILE
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvasir_console.screens import line as lines
from kvasir_console.screens.line import Role, Span

TEXTS = st.text(max_size=60)
CELLS = st.integers(0, 50)


@given(TEXTS)
def test_a_span_holds_nothing_that_could_move_a_cursor(text: str) -> None:
    cleaned = Span(text).text
    assert not any(unicodedata.category(character)[0] == "C" for character in cleaned)
    assert not set("\u2028\u2029\ufe0f\x1b\n\r") & set(cleaned)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=40))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert lines.clean(text) == unicodedata.normalize("NFC", text)


def test_escape_sequences_lose_their_escape_and_markup_stays_text() -> None:
    cleaned = lines.clean(HOSTILE)
    assert "\x1b" not in cleaned
    assert "\x9b" not in cleaned
    assert "\u202e" not in cleaned
    assert "[bold red]x[/] [/nope]" in cleaned
    assert "名前" in cleaned


@given(TEXTS, CELLS, st.booleans())
def test_fit_takes_exactly_its_cells(text: str, cells: int, right: bool) -> None:
    assert cell_len(lines.fit(text, cells, right=right)) == cells


@given(TEXTS, CELLS)
def test_cuts_take_at_most_their_cells_and_keep_what_fits(text: str, cells: int) -> None:
    text = lines.clean(text)
    for cut in (lines.cut(text, cells), lines.cut_middle(text, cells)):
        assert cell_len(cut) <= cells
        if cell_len(text) <= cells:
            assert cut == text


def test_the_middle_goes_and_both_ends_stay() -> None:
    assert lines.cut_middle("expert-alpha-7f3a", 9) == "expe…7f3a"
    assert lines.cut("expert-alpha", 7) == "expert…"


@given(st.lists(TEXTS, max_size=5), CELLS)
def test_crop_takes_at_most_its_cells(texts: list[str], cells: int) -> None:
    spans = lines.line(*texts)
    cropped = lines.crop(spans, cells)
    assert lines.width(cropped) <= cells
    if lines.width(spans) <= cells:
        assert cropped == spans


@given(st.lists(TEXTS, max_size=3), st.text(max_size=20), st.integers(45, 200))
def test_spread_puts_the_right_part_at_the_right_edge(left: list[str], right: str, cells: int) -> None:
    end = lines.line(right)
    joined = lines.spread(lines.line(*left), end, cells)
    assert lines.width(joined) == cells
    assert joined[-1:] == end


@given(TEXTS, st.integers(2, 50), st.one_of(st.none(), st.integers(0, 4)))
def test_wrap_keeps_width_and_count(text: str, cells: int, most: int | None) -> None:
    rows = lines.wrap(text, cells, most)
    assert all(cell_len(row) <= cells for row in rows)
    if most is None:
        assert "".join(rows).replace(" ", "") == "".join(lines.clean(text).split())
    else:
        assert len(rows) <= most


def test_wrap_breaks_at_spaces_and_marks_what_it_left_out() -> None:
    assert lines.wrap("the quick brown fox jumps", 10) == ["the quick", "brown fox", "jumps"]
    assert lines.wrap("the quick brown fox jumps", 10, 2) == ["the quick", "brown fox…"]
    assert lines.wrap("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert lines.wrap("", 10) == []
    assert lines.wrap("anything", 0) == []


@given(TEXTS)
def test_ascii_keeps_every_width(text: str) -> None:
    spans = lines.line(text, "…●░█↑µ")
    ascii_spans = lines.to_ascii(spans)
    assert all(span.text.isascii() for span in ascii_spans)
    assert lines.width(ascii_spans) == lines.width(spans)


def test_faded_keeps_the_words() -> None:
    assert lines.faded(lines.line(Span("37.4", Role.ACCENT))) == (Span("37.4", Role.FAINT),)
