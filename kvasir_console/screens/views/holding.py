"""What the node holds: model, layers or experts, their place in the whole, and how much memory they take."""

from __future__ import annotations

from kvasir_console.node.snapshot import SliceView
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.graph import window
from kvasir_console.screens.line import Line, Role, Span, crop, cut_middle, labelled, line, spread
from kvasir_console.screens.views.machine import one_line

LABEL = 9
MACHINE_CELLS = 62
"""Narrower panels end with the machine's line: their screen has no panel for it (``console.tcss``: 132 columns)."""
_BAR_MOST = 32


def holding(frame: Frame, cells: int, height: int) -> list[Line]:
    snapshot = frame.snapshot
    held = None if snapshot is None else snapshot.held
    lines = [line(Span("No slice is held.", Role.LABEL))] if held is None else _slice(held, cells)
    if snapshot is not None and cells < MACHINE_CELLS:
        lines = [*lines[: height - 1], one_line(snapshot.machine, cells)]
    return [crop(each, cells) for each in lines[:height]]


def _slice(held: SliceView, cells: int) -> list[Line]:
    number = held.end - held.begin
    what = fmt.percent(number, held.total)
    share = f"{number} of {held.total}" + ("" if what is None else f", {what}%")
    bar_cells = min(_BAR_MOST, cells - LABEL - len(share) - 2)
    before, inside, after = window(held.begin, held.end, held.total, bar_cells)
    return [
        labelled("model", Span(cut_middle(held.model, cells - LABEL), Role.STRONG), label_width=LABEL),
        labelled("holds", Span(describe(held)), label_width=LABEL),
        labelled(
            "share",
            Span("░" * before, Role.FAINT),
            Span("█" * inside, Role.ACCENT),
            Span("░" * after, Role.FAINT),
            f"  {share}" if bar_cells > 0 else share,
            label_width=LABEL,
        ),
        spread(
            labelled("tensors", fmt.size(held.tensor_bytes), label_width=LABEL),
            line(Span("digest ", Role.LABEL), fmt.short(held.model_digest)) if cells >= 34 else (),
            min(cells, LABEL + _BAR_MOST + 16),
        ),
    ]


def describe(held: SliceView) -> str:
    """``experts 0–3 of layer 7`` or ``layers 0–14``; both ends are held."""
    span = f"{held.begin}–{held.end - 1}" if held.end - held.begin > 1 else str(held.begin)
    plural = "s" if held.end - held.begin > 1 else ""
    if held.kind == "experts":
        return f"expert{plural} {span} of layer {held.layer if held.layer is not None else fmt.NA}"
    return f"layer{plural} {span}"
