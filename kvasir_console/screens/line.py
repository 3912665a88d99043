"""One line of a screen as values: spans of clean text, each with a role that a theme colours.

Builders of panels return lines; widgets paint them. Text from the network or a log becomes a ``Span`` before it is
drawn, and a ``Span`` cannot hold a control character, so nothing that a peer says moves the cursor or is read as
markup.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.cells import cell_len, chop_cells

ELLIPSIS = "…"


class Role(StrEnum):
    """What a span is, not how it looks; ``console.tcss`` gives each its colour."""

    TEXT = "text"
    STRONG = "strong"
    LABEL = "label"
    FAINT = "faint"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    ACCENT = "accent"
    GRAPH = "graph"
    BADGE_GOOD = "badge-good"
    BADGE_WARN = "badge-warn"
    BADGE_BAD = "badge-bad"
    BADGE_CALM = "badge-calm"
    SELECTED = "selected"


@dataclass(frozen=True, slots=True)
class Span:
    """``text`` is cleaned on the way in."""

    text: str
    role: Role = Role.TEXT

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", clean(self.text))


Line = tuple[Span, ...]


def clean(text: str) -> str:
    """``text`` in which every character takes the cells it seems to take.

    Control, format and private characters, lone surrogates and line separators become ``�``; a tab becomes a space;
    variation selectors go, because they change the width of the character before them on some terminals only.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in unicodedata.normalize("NFC", text))


def _visible(character: str) -> str:
    if character == "\t":
        return " "
    if "\ufe00" <= character <= "\ufe0f":
        return ""
    return (
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(character)[0] == "C" or character in "\u2028\u2029"
        else character
    )


def line(*parts: Span | str) -> Line:
    return tuple(part if isinstance(part, Span) else Span(part) for part in parts)


def width(spans: Iterable[Span]) -> int:
    """Cells that a line takes."""
    return sum(cell_len(span.text) for span in spans)


def fit(text: str, cells: int, *, right: bool = False) -> str:
    """``text`` in exactly ``cells`` cells: padded, or cut with an ellipsis."""
    text = cut(clean(text), cells)
    padding = " " * (cells - cell_len(text))
    return padding + text if right else text + padding


def cut(text: str, cells: int) -> str:
    """``text`` in at most ``cells`` cells."""
    if cell_len(text) <= cells:
        return text
    if cells <= 0:
        return ""
    return _head(text, cells - 1) + ELLIPSIS


def cut_middle(text: str, cells: int) -> str:
    """``text`` in at most ``cells`` cells with both ends kept: names of sessions differ at their ends."""
    text = clean(text)
    if cell_len(text) <= cells:
        return text
    if cells <= 0:
        return ""
    tail = (cells - 1) // 2
    return _head(text, cells - 1 - tail) + ELLIPSIS + _head(text[::-1], tail)[::-1]


def _head(text: str, cells: int) -> str:
    taken, used = [], 0
    for character in text:
        used += cell_len(character)
        if used > cells:
            break
        taken.append(character)
    return "".join(taken)


def crop(spans: Sequence[Span], cells: int) -> Line:
    """The line in at most ``cells`` cells, the cut marked with an ellipsis."""
    if width(spans) <= cells:
        return tuple(spans)
    kept: list[Span] = []
    left = cells
    for index, span in enumerate(spans):
        taken = cell_len(span.text)
        rest = width(spans[index + 1 :])
        if taken > left or (taken == left and rest):
            kept.append(Span(_head(span.text, left - 1) + ELLIPSIS if left > 0 else "", span.role))
            break
        kept.append(span)
        left -= taken
    return tuple(kept)


def wrap(text: str, cells: int, most: int | None = None) -> list[str]:
    """``text`` broken at spaces into lines of at most ``cells`` cells.

    A word that is longer is broken where it must be. What does not fit in ``most`` lines ends with an ellipsis.
    """
    if cells <= 0:
        return []
    lines: list[str] = []
    current = ""
    for word in clean(text).split():
        pieces = [word] if cell_len(word) <= cells else list(chop_cells(word, cells))
        for piece in pieces:
            joined = f"{current} {piece}" if current else piece
            if cell_len(joined) <= cells:
                current = joined
            else:
                lines.append(current)
                current = piece
    if current:
        lines.append(current)
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], cut(lines[most - 1] + " " + lines[most], cells)] if most > 0 else []
        if lines and not lines[-1].endswith(ELLIPSIS):
            lines[-1] = (
                cut(lines[-1] + ELLIPSIS, cells)
                if cell_len(lines[-1]) < cells
                else _head(lines[-1], cells - 1) + ELLIPSIS
            )
    return lines


def labelled(label: str, *parts: Span | str, label_width: int = 10) -> Line:
    """A label in a fixed column, then its value."""
    return line(Span(fit(label, label_width), Role.LABEL), *parts)


def spread(left: Sequence[Span], right: Sequence[Span], cells: int) -> Line:
    """``left`` at the left edge, ``right`` at the right one; the left gives way."""
    left = crop(left, max(0, cells - width(right) - 1))
    gap = max(0, cells - width(left) - width(right))
    return (*left, Span(" " * gap), *right)


def faded(spans: Iterable[Span]) -> Line:
    """The line with every colour taken back: numbers that are no longer known to be true."""
    return tuple(Span(span.text, Role.FAINT) for span in spans)


_ASCII = str.maketrans(
    {
        "…": "~", "●": "*", "○": "o", "◌": ".", "◆": "*", "·": "-", "│": "|", "─": "-", "┤": "|", "└": "+",
        "█": "#", "░": ".", "↑": "^", "↓": "v", "▸": ">", "–": "-", "≈": "~", "µ": "u", "×": "x", "�": "?",
        "‹": "<", "›": ">",
    }
)  # fmt: skip


def to_ascii(spans: Iterable[Span]) -> Line:
    """The line for a terminal without Unicode; every character keeps its width."""
    return tuple(Span(_ascii(span.text), span.role) for span in spans)


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    text = text.translate(_ASCII)
    return "".join(character if character.isascii() else "?" * cell_len(character) for character in text)
