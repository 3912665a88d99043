"""A history as a bar graph of characters: braille, block or ASCII. Pure; one idea of scale for all sets."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum

BLOCKS = " ▁▂▃▄▅▆▇█"
_NOTHING = 1e-9
_ASCII_LEVELS = " .:#"
# Bits of U+2800 from the bottom dot up, for the left and the right column of a cell (Unicode, chapter 21).
_BRAILLE_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))


class Symbols(StrEnum):
    BRAILLE = "braille"
    """Two values in a column, four levels in a row."""
    BLOCK = "block"
    """One value in a column, eight levels in a row."""
    ASCII = "ascii"
    """One value in a column, three levels in a row."""

    @property
    def per_column(self) -> int:
        return 2 if self is Symbols.BRAILLE else 1

    @property
    def following(self) -> Symbols:
        members = list(Symbols)
        return members[(members.index(self) + 1) % len(members)]


def default_symbols(env: Mapping[str, str] | None = None) -> Symbols:
    """What the terminal can draw: ASCII without a UTF-8 locale, block on a Linux virtual console, else braille."""
    env = os.environ if env is None else env
    locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
    if "utf" not in locale.lower():
        return Symbols.ASCII
    return Symbols.BLOCK if env.get("TERM") == "linux" else Symbols.BRAILLE


def nice_top(peak: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below ``peak``: a scale that seldom changes."""
    if not peak > _NOTHING:
        return 1.0
    base: float = 10.0 ** math.floor(math.log10(peak))
    return next(step * base for step in (1, 2, 5, 10) if step * base >= peak * (1 - 1e-9))


def plot(values: Sequence[float], columns: int, rows: int, top: float, symbols: Symbols) -> list[str]:
    """``rows`` strings of ``columns`` characters, top row first, the newest value at the right edge.

    A value above zero always shows; what lies before the first value is left blank.
    """
    wanted = columns * symbols.per_column
    recent = list(values[-wanted:]) if wanted else []
    levels = rows * {Symbols.BRAILLE: 4, Symbols.BLOCK: 8, Symbols.ASCII: 3}[symbols]
    heights = [0] * (wanted - len(recent)) + [_height(value, top, levels) for value in recent]
    draw = _braille_row if symbols is Symbols.BRAILLE else _block_row if symbols is Symbols.BLOCK else _ascii_row
    return [draw(heights, rows - 1 - row) for row in range(rows)]


def filled(part: int | None, whole: int | None, cells: int) -> int:
    """Cells of a progress bar that are full; rounded down, so that a full bar means all of it."""
    if not whole or part is None:
        return 0
    return max(0, min(cells, part * cells // whole))


def window(begin: int, end: int, total: int, cells: int) -> tuple[int, int, int]:
    """Cells before, within and after [begin, end) of [0, total). A window that is not empty takes at least one."""
    if total <= 0 or cells <= 0:
        return 0, 0, max(cells, 0)
    first = max(0, min(begin * cells // total, cells - 1))
    last = max(first, min(-(end * cells // -total), cells))
    if end > begin:
        last = max(last, first + 1)
    return first, last - first, cells - last


def _height(value: float, top: float, levels: int) -> int:
    if not value > 0 or top <= 0:
        return 0
    return max(1, min(levels, round(min(value / top, 1.0) * levels)))


def _braille_row(heights: Sequence[int], row: int) -> str:
    cells = []
    for column in range(0, len(heights), 2):
        bits = 0
        for side in (0, 1):
            filled = max(0, min(4, heights[column + side] - 4 * row))
            bits |= sum(_BRAILLE_DOTS[side][:filled])
        cells.append(chr(0x2800 + bits) if bits else " ")
    return "".join(cells)


def _block_row(heights: Sequence[int], row: int) -> str:
    return "".join(BLOCKS[max(0, min(8, height - 8 * row))] for height in heights)


def _ascii_row(heights: Sequence[int], row: int) -> str:
    return "".join(_ASCII_LEVELS[max(0, min(3, height - 3 * row))] for height in heights)
