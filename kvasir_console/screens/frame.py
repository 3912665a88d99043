"""What a panel is drawn from: everything known at one tick, as one frozen value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.screens.graph import Symbols
from kvasir_console.screens.line import Line
from kvasir_console.screens.reader import NodeView


@dataclass(frozen=True, slots=True)
class Frame:
    views: tuple[NodeView, ...]
    selected: int
    now_s: float
    """Unix time of the console's clock."""
    symbols: Symbols
    read_only: bool = False

    @property
    def view(self) -> NodeView:
        return self.views[self.selected]

    @property
    def snapshot(self) -> NodeSnapshot | None:
        return self.view.snapshot


Builder = Callable[[Frame, int, int], list[Line]]
"""(frame, width, height in cells) to at most ``height`` lines of at most ``width`` cells."""
