"""The phase: what, since when, why, what next; the progress of a download."""

from __future__ import annotations

from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import DownloadView
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.graph import filled
from kvasir_console.screens.line import Line, Role, Span, crop, labelled, line, wrap

LABEL = 7

_BADGES = {
    Phase.SERVING: Role.BADGE_GOOD,
    Phase.FAILED: Role.BADGE_BAD,
    Phase.LOCKED: Role.BADGE_WARN,
    Phase.STOPPED: Role.BADGE_WARN,
    Phase.DRAINING: Role.BADGE_WARN,
    Phase.VOLUNTEERING: Role.BADGE_WARN,
}
_DOTS = {
    Role.BADGE_GOOD: ("●", Role.GOOD),
    Role.BADGE_BAD: ("●", Role.BAD),
    Role.BADGE_WARN: ("○", Role.WARN),
    Role.BADGE_CALM: ("◌", Role.ACCENT),
}


def phase(frame: Frame, cells: int, height: int) -> list[Line]:
    view, snapshot = frame.view, frame.snapshot
    if view.lost_since_s is not None:
        seen = "never" if snapshot is None else fmt.clock(snapshot.at_s)
        title, badge, since = "disconnected", Role.BADGE_BAD, view.lost_since_s
        why, next_action = view.error, f"Last seen: {seen}. It is asked again."
    elif snapshot is None:
        title, badge, since = "connecting", Role.BADGE_CALM, frame.now_s
        why, next_action = "The node has not answered yet.", ""
    else:
        state = snapshot.state
        title, badge, since = state.phase.value, _BADGES.get(state.phase, Role.BADGE_CALM), state.since_s
        why, next_action = state.why, state.next_action
    label = f"  {title.upper()}  "
    age = fmt.duration(frame.now_s - since) if since != frame.now_s else ""
    tall = height >= 7
    lines = [line(Span(" " * len(label), badge))] if tall else []
    lines.append(line(Span(label, badge), Span(f"  for {age}" if age else "", Role.TEXT)))
    if tall:
        lines += [line(Span(" " * len(label), badge)), ()]
    download = snapshot.download if snapshot is not None and not view.lost else None
    room = height - len(lines) - (1 if download is not None else 0)
    lines += _paragraphs(why, next_action, cells, room)
    if download is not None:
        lines.append(progress(download, cells))
    return [crop(each, cells) for each in lines[:height]]


def _paragraphs(why: str, next_action: str, cells: int, room: int) -> list[Line]:
    """Both texts, the reason first; when room is short each keeps at least one line."""
    whys = wrap(why, cells - LABEL)
    nexts = wrap(next_action, cells - LABEL)
    keep_next = min(len(nexts), max(1, room - len(whys)))
    keep_why = min(len(whys), room - keep_next)
    keep_next = min(len(nexts), room - keep_why)
    return [
        *_paragraph("why", wrap(why, cells - LABEL, keep_why), Role.TEXT),
        *_paragraph("next", wrap(next_action, cells - LABEL, keep_next), Role.LABEL),
    ]


def _paragraph(label: str, texts: list[str], role: Role) -> list[Line]:
    return [
        labelled(label if index == 0 else "", Span(text, role), label_width=LABEL) for index, text in enumerate(texts)
    ]


def progress(download: DownloadView, cells: int) -> Line:
    """``loaded  ████░░░░  45.2 of 98.4 MiB``, without a bar when the whole is not known."""
    done, total = download.done_bytes, download.total_bytes
    text = fmt.size(done) if total is None else fmt.sizes(done, total)
    bar_cells = min(24, cells - LABEL - len(text) - 2)
    if total is None or bar_cells < 4:
        return labelled("done", text, label_width=LABEL)
    full = filled(done, total, bar_cells)
    return labelled(
        "done",
        Span("█" * full, Role.ACCENT),
        Span("░" * (bar_cells - full), Role.FAINT),
        f"  {text}",
        label_width=LABEL,
    )


def dot(frame: Frame, index: int) -> Span:
    """The state of one node as a mark for lists."""
    view = frame.views[index]
    if view.lost:
        return Span("×", Role.BAD)
    if view.snapshot is None:
        return Span("◌", Role.ACCENT)
    glyph, role = _DOTS[_BADGES.get(view.snapshot.state.phase, Role.BADGE_CALM)]
    return Span(glyph, role)


def word(frame: Frame, index: int) -> str:
    view = frame.views[index]
    if view.lost:
        return "disconnected"
    return "connecting" if view.snapshot is None else view.snapshot.state.phase.value
