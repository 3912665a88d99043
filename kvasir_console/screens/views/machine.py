"""The machine under the node: load, memory, the engine's own memory, processes."""

from __future__ import annotations

from kvasir_console.node.snapshot import MachineView
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.graph import filled
from kvasir_console.screens.line import Line, Role, Span, crop, cut_middle, labelled, line

LABEL = 8
_HIGH_PERCENT = 90


def machine(frame: Frame, cells: int, height: int) -> list[Line]:
    snapshot = frame.snapshot
    if snapshot is None:
        return [line(Span(fmt.NA, Role.LABEL))]
    seen = snapshot.machine
    cpu = None if seen.cpu_percent is None else min(100, round(seen.cpu_percent))
    share = fmt.percent(seen.memory_used_bytes, seen.memory_total_bytes)
    engine = "" if snapshot.engine_pid is None else f", pid {snapshot.engine_pid}"
    lines = [
        _bar("cpu", cpu, cells),
        _bar("memory", share, cells),
        labelled(
            "",
            Span(fmt.sizes(seen.memory_used_bytes, seen.memory_total_bytes), Role.LABEL),
            label_width=LABEL,
        ),
        labelled("engine", f"{fmt.size(seen.engine_rss_bytes)}{engine}", label_width=LABEL),
        labelled("console", f"pid {snapshot.pid}", label_width=LABEL),
        labelled("device", seen.accelerator or fmt.NA, label_width=LABEL),
        labelled("worker", cut_middle(snapshot.worker_id or fmt.NA, cells - LABEL), label_width=LABEL),
    ]
    return [crop(each, cells) for each in lines[:height]]


def one_line(seen: MachineView, cells: int) -> Line:
    cpu = fmt.NA if seen.cpu_percent is None else f"{round(seen.cpu_percent)}%"
    share = fmt.percent(seen.memory_used_bytes, seen.memory_total_bytes)
    memory = fmt.NA if share is None else f"{share}%"
    parts = (("cpu ", cpu), ("  mem ", memory), ("  engine ", fmt.size(seen.engine_rss_bytes)))
    return crop([span for label, text in parts for span in (Span(label, Role.LABEL), Span(text))], cells)


def _bar(label: str, percent: int | None, cells: int) -> Line:
    if percent is None:
        return labelled(label, fmt.NA, label_width=LABEL)
    bar_cells = max(4, min(16, cells - LABEL - 6))
    full = filled(percent, 100, bar_cells)
    role = Role.WARN if percent >= _HIGH_PERCENT else Role.ACCENT
    return labelled(
        label,
        Span("█" * full, role),
        Span("░" * (bar_cells - full), Role.FAINT),
        f" {percent:>3}%",
        label_width=LABEL,
    )
