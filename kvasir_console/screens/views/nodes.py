"""All nodes at a glance: a table on a wide screen, one strip on a narrow one."""

from __future__ import annotations

from rich.cells import cell_len

from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.line import Line, Role, Span, crop, cut_middle, fit, line, width
from kvasir_console.screens.verdict import Answer, verdict
from kvasir_console.screens.views.header import answer_role
from kvasir_console.screens.views.holding import describe
from kvasir_console.screens.views.phase import dot, word
from kvasir_console.screens.views.throughput import headline

_NAME, _PHASE, _RATE, _PENDING, _EARNING = 18, 15, 16, 16, 8


def nodes(frame: Frame, cells: int, height: int) -> list[Line]:
    """One strip if there is one row, else a heading and one row for each node around the selected one."""
    if height <= 1:
        return [_strip(frame, cells)]
    first, last = _around(frame.selected, len(frame.views), height - 1)
    return [_heading(cells), *(_row(frame, index, cells) for index in range(first, last))]


def first_row(frame: Frame, height: int) -> int:
    """Index of the node in the table's first row under the heading."""
    return _around(frame.selected, len(frame.views), height - 1)[0]


def _around(selected: int, count: int, rows: int) -> tuple[int, int]:
    first = max(0, min(selected - rows // 2, count - rows))
    return first, min(count, first + rows)


def _slice_cells(cells: int) -> int:
    return max(0, cells - 8 - sum(size + 2 for size in (_NAME, _PHASE, _RATE, _PENDING)) - _EARNING - 2)


def _heading(cells: int) -> Line:
    columns = (
        ("", 4, False),
        ("  name", _NAME + 2, False),
        ("phase", _PHASE, False),
        ("slice", _slice_cells(cells), False),
        ("rate", _RATE, True),
        ("pending KVR", _PENDING, True),
        ("earning", _EARNING, False),
    )
    return line(Span("  ".join(fit(text, size, right=right) for text, size, right in columns), Role.FAINT))


def _row(frame: Frame, index: int, cells: int) -> Line:
    view = frame.views[index]
    snapshot = view.snapshot
    chosen = index == frame.selected
    rate, unit = headline(snapshot)
    held = snapshot.held if snapshot is not None else None
    what = "" if held is None else f"{describe(held)} · {held.model}"
    rate_text = fmt.NA if rate is None else f"{fmt.rate(rate)} {fit(unit, 8)}"
    pending = fmt.micro(snapshot.earnings.pending_micro_kvr) if snapshot is not None else fmt.NA
    found = verdict(snapshot).answer if snapshot is not None and not view.lost else Answer.UNKNOWN
    plain, quiet = (Role.FAINT, Role.FAINT) if view.lost else (Role.TEXT, Role.LABEL)
    columns = (
        Span(f"{'▸' if chosen else ' '}{index + 1:>2} ", Role.ACCENT if chosen else Role.LABEL),
        Span("  "),
        dot(frame, index),
        Span(" " + fit(cut_middle(view.name, _NAME), _NAME), Role.STRONG if chosen else plain),
        Span("  " + fit(word(frame, index), _PHASE), plain),
        Span("  " + fit(what, _slice_cells(cells)), quiet),
        Span("  " + fit(rate_text, _RATE, right=True), plain),
        Span("  " + fit(pending, _PENDING, right=True), plain),
        Span("  " + found.value, answer_role(found)),
    )
    return crop(columns, cells)


def strip_cell(cells: int, count: int) -> int:
    """Cells of one node in the strip."""
    return max(14, min(24, cells // max(count, 1)))


def _strip(frame: Frame, cells: int) -> Line:
    each = strip_cell(cells, len(frame.views))
    first, last = _around(frame.selected, len(frame.views), max(1, cells // each))
    rates = [_rate(frame.views[index].snapshot) for index in range(first, last)]
    names = [cut_middle(frame.views[index].name, each - 4 - len(str(last))) for index in range(first, last)]
    if any(len(str(last)) + 4 + cell_len(name) + len(rate) > each for name, rate in zip(names, rates, strict=True)):
        rates = [""] * len(rates)
    spans: list[Span] = []
    for index, name, rate in zip(range(first, last), names, rates, strict=True):
        chosen = index == frame.selected
        node = [
            Span(str(index + 1), Role.SELECTED if chosen else Role.LABEL),
            Span(" "),
            dot(frame, index),
            Span(f" {name}", Role.STRONG if chosen else Role.TEXT),
            Span(rate, Role.LABEL),
        ]
        spans += [*node, Span(" " * (each - width(node)))]
    return crop(line(*spans), cells)


def _rate(snapshot: NodeSnapshot | None) -> str:
    rate, _ = headline(snapshot)
    return "" if rate is None else f" {fmt.rate(rate)}/s"


def strip_index(frame: Frame, cells: int, x: int) -> int:
    """Index of the node under column ``x`` of the strip."""
    each = strip_cell(cells, len(frame.views))
    first, last = _around(frame.selected, len(frame.views), max(1, cells // each))
    return min(first + x // each, last - 1)
