"""Relay sessions: open or not, how far away, how much they carried, why one is closed and when it is tried again."""

from __future__ import annotations

from kvasir_console.node.snapshot import RelayView
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.line import Line, Role, Span, crop, cut_middle, fit, line, width, wrap

_MARKS = {
    "open": ("●", Role.GOOD),
    "direct": ("●", Role.GOOD),
    "aside": ("◌", Role.ACCENT),
    "dialling": ("◌", Role.ACCENT),
    "waiting": ("○", Role.WARN),
    "closed": ("○", Role.BAD),
}
_NONE = "No session yet: the gateway asks for one once a slice is reported."


def relay(frame: Frame, cells: int, height: int) -> list[Line]:
    snapshot = frame.snapshot
    sessions = () if snapshot is None else snapshot.relays
    if not sessions:
        return [line(Span(text, Role.LABEL)) for text in wrap(_NONE, cells, height)]
    blocks = [_block(each, frame.now_s, cells) for each in sessions]
    if sum(map(len, blocks)) > height:
        blocks = [_short(each, cells) for each in sessions]
    return _whole_blocks(blocks, height)


def _whole_blocks(blocks: list[list[Line]], height: int) -> list[Line]:
    """As many blocks as fit; a last line counts the rest."""
    lines: list[Line] = []
    for index, block in enumerate(blocks):
        rest = len(blocks) - index
        room = height - len(lines) - (1 if rest > 1 else 0)
        if len(block) > room and index > 0:
            return [*lines, line(Span(f"and {rest} more session{'s' if rest > 1 else ''}", Role.LABEL))][:height]
        lines = [*lines, *block]
    return lines[:height]


def _block(view: RelayView, now_s: float, cells: int) -> list[Line]:
    glyph, role = _MARKS.get(view.state, ("○", Role.WARN))
    name = line(Span(f"{glyph} ", role), Span(cut_middle(view.session, cells - 2), Role.STRONG))
    state = line(Span(f"  {view.state}", role), Span(f" for {fmt.duration(now_s - view.since_s)}", Role.LABEL))
    if not view.carries:
        retry = "" if view.retry_in_s is None else f", again in {fmt.duration(view.retry_in_s)}"
        why = [line(Span(f"  {text}", Role.WARN)) for text in wrap(view.last_close, cells - 2, 2)]
        return [name, crop([*state, Span(retry)], cells), *why]
    rtt = () if view.state == "direct" else (Span("  rtt ", Role.LABEL), Span(fmt.milliseconds(view.rtt_ms)))
    facts = line(*state, *rtt)
    traffic = line(
        Span("  ↑ ", Role.LABEL),
        Span(fmt.size(view.bytes_up)),
        Span("  ↓ ", Role.LABEL),
        Span(fmt.size(view.bytes_down)),
    )
    together = (*facts, *traffic)
    return [name, *([together] if width(together) <= cells else [crop(facts, cells), crop(traffic, cells)])]


def _short(view: RelayView, cells: int) -> list[Line]:
    """One line; a second one says why a session is not open."""
    glyph, role = _MARKS.get(view.state, ("○", Role.WARN))
    state = fmt.milliseconds(view.rtt_ms) if view.state == "open" else view.state
    traffic = fit(fmt.size(view.bytes_up + view.bytes_down), 10, right=True)
    name = fit(cut_middle(view.session, cells - 22), cells - 22)
    first = line(Span(f"{glyph} ", role), Span(name), Span(fit(state, 10, right=True), role), Span(traffic))
    if view.carries:
        return [first]
    retry = "" if view.retry_in_s is None else f"again in {fmt.duration(view.retry_in_s)}"
    why = "; ".join(part for part in (retry, view.last_close.strip()) if part)
    return [first, *(line(Span(f"  {text}", Role.WARN)) for text in wrap(why, cells - 2, 1))]
