"""How much work flows: the rate in large digits, its history as a graph, and the totals."""

from __future__ import annotations

from textual.renderables.digits import DIGITS, DIGITS3X3_BOLD

from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.graph import Symbols, nice_top, plot
from kvasir_console.screens.line import Line, Role, Span, crop, fit, line, spread, width
from kvasir_console.screens.verdict import quiet_s

_GUTTER = 7
_ROOMY = 48
"""From here on the digits stand apart."""


def throughput(frame: Frame, cells: int, height: int) -> list[Line]:
    """Head of three rows; under it as much graph as there is room for, its time axis from two rows of graph on."""
    snapshot = frame.snapshot
    rate, unit = headline(snapshot)
    lines = _head(snapshot, rate, unit, cells, frame.symbols)
    history = () if snapshot is None else snapshot.work.history
    room = height - len(lines)
    if room >= 5:
        lines.append(())
        room -= 1
    if room > 0:
        lines += _graph(history, cells, room, frame.symbols)
    return [crop(each, cells) for each in lines[:height]]


def headline(snapshot: NodeSnapshot | None) -> tuple[float | None, str]:
    """The rate that counts for what is held, and its unit. A ring stage that does not sample counts rows."""
    if snapshot is None or snapshot.held is None:
        return None, "rows/s"
    work = snapshot.work
    if not work.history:
        return None, "rows/s"
    if snapshot.held.kind == "layers" and work.tokens > 0:
        return work.tokens_per_s, "tokens/s"
    return work.rows_per_s, "rows/s"


def _head(snapshot: NodeSnapshot | None, rate: float | None, unit: str, cells: int, symbols: Symbols) -> list[Line]:
    plain = symbols is Symbols.ASCII or rate is None
    texts = ["", fmt.rate(rate), ""] if plain else big(fmt.rate(rate), gap=1 if cells >= _ROOMY else 0)
    role = Role.ACCENT if rate else Role.LABEL
    left = [line(Span(text, role)) for text in texts]
    units = ["", unit, "" if snapshot is None else _last_work(snapshot)]
    column = max(width(each) for each in left) + 2
    rows = _totals(snapshot)
    lines = []
    for number, (each, note, total) in enumerate(zip(left, units, rows, strict=True)):
        role = Role.TEXT if number == 1 else Role.LABEL
        lines.append(spread(line(*each, Span(" " * (column - width(each))), Span(note, role)), total, cells))
    return lines


def _totals(snapshot: NodeSnapshot | None) -> list[Line]:
    """Totals; unknown before the first sample. A stage of layers sees rows and tokens, no requests and no pairs."""
    held = None if snapshot is None else snapshot.held
    work = None if snapshot is None or held is None or not snapshot.work.history else snapshot.work
    layers = held is not None and held.kind == "layers"
    requests, rows = (None, None) if work is None else (work.requests, work.rows)
    last = None if work is None else work.tokens if layers else work.pairs
    values = (("" if layers else "requests", requests), ("rows", rows), ("tokens" if layers else "pairs", last))
    return [
        line(Span(f"{label} ", Role.LABEL), Span(fit(fmt.compact(value), 5, right=True))) if label else ()
        for label, value in values
    ]


def _last_work(snapshot: NodeSnapshot) -> str:
    history = snapshot.work.history
    if not history or not any(history):
        return ""
    quiet = quiet_s(snapshot)
    return "now" if quiet == 0 else f"{fmt.duration(quiet)} ago"


def _graph(history: tuple[float, ...], cells: int, room: int, symbols: Symbols) -> list[Line]:
    columns = cells - _GUTTER
    rows = room - 1 if room > 2 else room
    shown = history[-columns * symbols.per_column :] if columns > 0 else ()
    top = nice_top(max(shown, default=0.0))
    axis = [f"{top:g}", *[""] * (rows - 1)]
    if rows > 1:
        axis[-1] = "0"
    lines = [
        line(Span(f"{fit(label, _GUTTER - 2, right=True)}┤ ", Role.FAINT), Span(text, Role.GRAPH))
        for label, text in zip(axis, plot(shown, columns, rows, top, symbols), strict=True)
    ]
    if rows < room:
        span = f"{fmt.duration(columns * symbols.per_column)} ago"
        note = "now" if history else "no samples yet"
        ends = spread(line(Span(span, Role.FAINT)), line(Span(note, Role.FAINT)), columns)
        lines.append(line(Span(" " * _GUTTER), *ends))
    return lines


def big(text: str, gap: int = 0) -> list[str]:
    """Three rows of Textual's digits, ``gap`` columns apart; a full stop and a comma take one column."""
    rows = ["", "", ""]
    for character in text:
        if character in DIGITS:
            first = DIGITS.index(character) * 3
            glyph = [DIGITS3X3_BOLD[first + row].ljust(3) for row in range(3)]
        else:
            glyph = [" ", " ", character]
        rows = [row + part + " " * gap for row, part in zip(rows, glyph, strict=True)]
    return rows
