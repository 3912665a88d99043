"""A QR code for a terminal: two modules to a character, dark on light whatever the terminal's own colours. Pure."""

from __future__ import annotations

QUIET_MODULES = 4
"""The light border that ISO/IEC 18004 asks for."""
_COLOURS, _RESET = "\x1b[30;47m", "\x1b[0m"
_HALVES = {(0, 0): " ", (1, 0): "\u2580", (0, 1): "\u2584", (1, 1): "\u2588"}
"""Upper and lower module."""


def qr_lines(text: str) -> tuple[str, ...]:
    """The lines of the smallest QR code that holds ``text``, each ready to be written as it is."""
    import segno  # a tenth of a second, for one command

    code = segno.make(text, error="l", boost_error=False, micro=False)
    rows = [list(row) for row in code.matrix_iter(border=QUIET_MODULES)]
    if len(rows) % 2:
        rows.append([0] * len(rows[0]))
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return tuple(
        _COLOURS + "".join(_HALVES[upper, lower] for upper, lower in zip(*pair, strict=True)) + _RESET for pair in pairs
    )


def columns(lines: tuple[str, ...]) -> int:
    return max(len(line) for line in lines) - len(_COLOURS) - len(_RESET)
