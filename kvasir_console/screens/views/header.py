"""The two lines on top: which node this is, and whether it earns."""

from __future__ import annotations

from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.line import Line, Role, Span, crop, cut, line, spread, width, wrap
from kvasir_console.screens.verdict import Answer, Verdict, verdict

_ANSWERS = {
    Answer.YES: Role.GOOD,
    Answer.NOT_YET: Role.WARN,
    Answer.NO: Role.BAD,
    Answer.UNKNOWN: Role.BAD,
}


def header(frame: Frame, cells: int, _: int) -> list[Line]:
    """Name, wallet, lock, gateway, version, time; what matters least goes first when there is no room."""
    snapshot = frame.snapshot
    name = Span(f" {cut(frame.view.name, max(12, cells // 4))} ", Role.BADGE_CALM)
    clock = line(Span(f"{fmt.clock(frame.now_s)} ", Role.LABEL))
    if snapshot is None:
        return [spread(line(name), clock, cells)]
    lock = Span("○ locked", Role.WARN) if snapshot.wallet_locked else Span("● unlocked", Role.GOOD)
    read_only = [Span("read-only", Role.WARN)] if frame.read_only else []
    wallet = Span(fmt.short(snapshot.wallet), Role.TEXT)
    gateway = Span(fmt.host(snapshot.gateway), Role.LABEL)
    version = Span(f"v{snapshot.version}", Role.FAINT)
    for parts, right in (
        ([wallet, lock, *read_only, gateway, version], clock),
        ([wallet, lock, *read_only, gateway, version], ()),
        ([wallet, lock, *read_only, gateway], ()),
        ([wallet, lock, *read_only], ()),
    ):
        joined = line(name, *(piece for part in parts for piece in (Span("  "), part)))
        if width(joined) + width(right) < cells:
            return [spread(joined, right, cells)]
    return [crop(joined, cells)]


def answer(frame: Frame, cells: int, height: int) -> list[Line]:
    """ "Earning: yes, because ..." in at most ``height`` lines."""
    found = judged(frame)
    badge = f" {found.answer} "
    head = line(Span(" Earning  ", Role.LABEL), Span(badge, Role.STRONG if found.answer is Answer.YES else Role.TEXT))
    head = line(head[0], Span(found.answer.value.upper(), _ANSWERS[found.answer]), Span("  because ", Role.LABEL))
    indent = width(head)
    texts = wrap(found.because, cells - indent - 1, height)
    return [
        line(*(head if index == 0 else [Span(" " * indent)]), Span(text, Role.TEXT)) for index, text in enumerate(texts)
    ]


def judged(frame: Frame) -> Verdict:
    """The verdict on the selected node; unknown while it does not answer."""
    view = frame.view
    if view.lost_since_s is not None:
        return Verdict(
            Answer.UNKNOWN, f"this node has not answered for {fmt.duration(frame.now_s - view.lost_since_s)}"
        )
    if view.snapshot is None:
        return Verdict(Answer.UNKNOWN, "this node has not answered yet")
    return verdict(view.snapshot)


def answer_role(found: Answer) -> Role:
    return _ANSWERS[found]
