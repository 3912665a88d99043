"""Relay sessions: open or not, how far away, how much they carried, why one is closed and when it is tried again."""

from __future__ import annotations

from kvasir_console.node.snapshot import RelayView
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.line import Line, Role, Span, crop, cut_middle, fit, line, wrap

_MARKS = {
    "open": ("●", Role.GOOD),
    "dialling": ("◌", Role.ACCENT),
    "waiting": ("○", Role.WARN),
    "closed": ("○", Role.BAD),
}
_WIDE = 58
_COLUMNS = (("state", 8), ("rtt", 8), ("up", 9), ("down", 9), ("for", 12))


def relay(frame: Frame, cells: int, height: int) -> list[Line]:
    snapshot = frame.snapshot
    sessions = () if snapshot is None else snapshot.relays
    if not sessions:
        return (
            [
                line(Span("No session yet: the gateway asks for one when", Role.LABEL)),
                line(Span("a slice is reported.", Role.LABEL)),
            ]
            if cells >= 46
            else [
                line(Span(text, Role.LABEL))
                for text in wrap("No session yet: the gateway asks for one when a slice is reported.", cells)
            ]
        )
    blocks = [_row(each, cells) if cells >= _WIDE else _block(each, cells) for each in sessions]
    head = [_heading(cells)] if cells >= _WIDE else []
    if cells < _WIDE and sum(map(len, blocks)) > height:
        blocks = [_short(each, cells) for each in sessions]
    return _whole_blocks(head, blocks, height)


def _whole_blocks(lines: list[Line], blocks: list[list[Line]], height: int) -> list[Line]:
    """As many blocks as fit; a last line counts the rest."""
    for index, block in enumerate(blocks):
        rest = len(blocks) - index
        needed = len(block) if rest == 1 else len(block) + 1
        if len(lines) + needed > height:
            if len(lines) + len(block) <= height and rest == 1:
                return [*lines, *block]
            if len(lines) < height:
                noun = "session" if rest == 1 else "sessions"
                lines = [*lines, line(Span(f"and {rest} more {noun}" if index else f"{rest} {noun}", Role.LABEL))]
            return lines[:height]
        lines = [*lines, *block]
    return lines


def _heading(cells: int) -> Line:
    columns = [Span(fit(name, size, right=name in ("rtt", "up", "down")) + "  ", Role.FAINT) for name, size in _COLUMNS]
    return crop([Span("  "), *columns, Span("session", Role.FAINT)], cells)


def _row(view: RelayView, cells: int) -> list[Line]:
    glyph, role = _MARKS.get(view.state, ("○", Role.WARN))
    values = (
        (view.state, False, role),
        (fmt.milliseconds(view.rtt_ms), True, Role.TEXT),
        (fmt.size(view.bytes_up), True, Role.TEXT),
        (fmt.size(view.bytes_down), True, Role.TEXT),
        (fmt.duration(view.since_s), False, Role.LABEL),
    )
    columns = [
        Span(fit(text, size, right=right) + "  ", shade)
        for (text, right, shade), (_, size) in zip(values, _COLUMNS, strict=True)
    ]
    used = 2 + sum(size + 2 for _, size in _COLUMNS)
    name = Span(cut_middle(view.session, cells - used), Role.LABEL)
    return [line(Span(f"{glyph} ", role), *columns, name), *_why_closed(view, cells)]


def _block(view: RelayView, cells: int) -> list[Line]:
    glyph, role = _MARKS.get(view.state, ("○", Role.WARN))
    since = fmt.duration(view.since_s)
    traffic = f"↑ {fmt.size(view.bytes_up)}  ↓ {fmt.size(view.bytes_down)}"
    return [
        line(Span(f"{glyph} ", role), Span(cut_middle(view.session, cells - 2), Role.TEXT)),
        crop(
            [
                Span(f"  {view.state}", role),
                Span(f" {since}", Role.LABEL),
                Span("  rtt ", Role.LABEL),
                Span(fmt.milliseconds(view.rtt_ms)),
            ],
            cells,
        ),
        crop([Span(f"  {traffic}")], cells),
        *_why_closed(view, cells),
    ]


def _short(view: RelayView, cells: int) -> list[Line]:
    glyph, role = _MARKS.get(view.state, ("○", Role.WARN))
    state = fmt.milliseconds(view.rtt_ms) if view.state == "open" else view.state
    traffic = fit(fmt.size(view.bytes_up + view.bytes_down), 9, right=True)
    name = fit(cut_middle(view.session, cells - 22), cells - 22)
    first = line(Span(f"{glyph} ", role), Span(name), Span(fit(state, 10, right=True), role), Span(f" {traffic}"))
    return [first, *_why_closed(view, cells, most=1)]


def _why_closed(view: RelayView, cells: int, most: int = 3) -> list[Line]:
    """Indented lines under a session that is not open."""
    if view.state == "open":
        return []
    retry = "" if view.retry_in_s is None else f"again in {fmt.duration(view.retry_in_s)}"
    text = "; ".join(part for part in (retry, view.last_close.strip()) if part)
    return [line(Span(f"  {each}", Role.WARN)) for each in wrap(text, cells - 2, most)]
