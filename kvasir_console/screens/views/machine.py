"""The machine under the node: load, memory, the engine's own memory, processes."""

from __future__ import annotations

from kvasir_console.node.snapshot import MachineView
from kvasir_console.screens import format as fmt
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.graph import filled
from kvasir_console.screens.line import Line, Role, Span, crop, labelled, line

LABEL = 8
_HIGH_PERCENT = 90


def machine(frame: Frame, cells: int, height: int) -> list[Line]:
    snapshot = frame.snapshot
    if snapshot is None:
        return [line(Span(fmt.NA, Role.LABEL))]
    seen = snapshot.machine
    cpu = None if seen.cpu_percent is None else min(100, round(seen.cpu_percent))
    lines = [
        _bar("cpu", cpu, 100, "" if cpu is None else f"{cpu}%", cells),
        _bar("memory", seen.memory_used_bytes, seen.memory_total_bytes, _of_total(seen), cells),
        labelled("engine", fmt.size(seen.engine_rss_bytes), label_width=LABEL),
        labelled("device", seen.accelerator or fmt.NA, label_width=LABEL),
        labelled("pids", _pids(snapshot.pid, snapshot.engine_pid), label_width=LABEL),
        labelled("worker", Span(snapshot.worker_id or fmt.NA, Role.LABEL), label_width=LABEL),
    ]
    return [crop(each, cells) for each in lines[:height]]


def one_line(seen: MachineView, cells: int) -> Line:
    cpu = fmt.NA if seen.cpu_percent is None else f"{round(seen.cpu_percent)}%"
    share = fmt.percent(seen.memory_used_bytes, seen.memory_total_bytes)
    memory = fmt.NA if share is None else f"{share}%"
    parts = (("cpu ", cpu), ("  mem ", memory), ("  engine ", fmt.size(seen.engine_rss_bytes)))
    return crop([span for label, text in parts for span in (Span(label, Role.LABEL), Span(text))], cells)


def _bar(label: str, part: int | None, whole: int | None, text: str, cells: int) -> Line:
    if part is None or not whole:
        return labelled(label, fmt.NA, label_width=LABEL)
    bar_cells = max(4, min(16, cells - LABEL - len(text) - 2))
    full = filled(part, whole, bar_cells)
    role = Role.WARN if part * 100 >= whole * _HIGH_PERCENT else Role.ACCENT
    return labelled(
        label, Span("█" * full, role), Span("░" * (bar_cells - full), Role.FAINT), f"  {text}", label_width=LABEL
    )


def _of_total(seen: MachineView) -> str:
    return f"{fmt.size(seen.memory_used_bytes)} of {fmt.size(seen.memory_total_bytes)}"


def _pids(node: int, engine: int | None) -> str:
    return f"node {node}, engine {fmt.NA if engine is None else engine}"
