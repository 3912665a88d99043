"""A widget that shows lines and repaints only the cells that changed: what tmux over a slow link needs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual import events
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from kvasir_console.screens.frame import Builder, Frame
from kvasir_console.screens.graph import Symbols
from kvasir_console.screens.line import Line, faded
from kvasir_console.screens.widgets.palette import ROLE_CLASSES, Palette, padded


class Lines(Widget, can_focus=False):
    """Shows the lines it is given."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES = ROLE_CLASSES

    def __init__(self, lines: Sequence[Line] = (), *, widget_id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=widget_id, classes=classes)
        self._palette = Palette(self)
        self._given = tuple(lines)
        self._shown: list[Line] = []
        self._shown_size = Size(0, 0)
        self.ascii_only = False

    @property
    def text(self) -> str:
        """What is on the screen, without styles."""
        return "\n".join("".join(span.text for span in spans).rstrip() for spans in self._shown)

    def set_lines(self, lines: Sequence[Line]) -> None:
        self._given = tuple(lines)
        size = self.content_size
        if not size:
            return
        new = [padded(spans, size.width, ascii_only=self.ascii_only) for spans in self._given[: size.height]]
        new += [padded((), size.width)] * (size.height - len(new))
        old, self._shown = self._shown, new
        if size != self._shown_size:
            self._shown_size = size
            self.refresh()
            return
        regions = [
            Region(begin, y, end - begin, 1)
            for y, (before, after) in enumerate(zip(old, new, strict=True))
            for begin, end in changed_cells(before, after)
        ]
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        return self._palette.strip(self._shown[y] if y < len(self._shown) else padded((), self.content_size.width))

    def notify_style_update(self) -> None:
        self._palette.clear()
        super().notify_style_update()

    def on_resize(self, _: events.Resize) -> None:
        self.set_lines(self._given)


class Panel(Lines):
    """Shows what a builder makes of the frame. Numbers of a node that does not answer are faded unless ``lively``."""

    def __init__(self, build: Builder, title: str = "", *, widget_id: str, lively: bool = False) -> None:
        super().__init__(widget_id=widget_id)
        self._build = build
        self._lively = lively
        self._frame: Frame | None = None
        if title:
            self.border_title = title

    def show(self, frame: Frame) -> None:
        self._frame = frame
        self._draw()

    def on_resize(self, _: events.Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        size = self.content_size
        if self._frame is None or not size:
            return
        self.ascii_only = self._frame.symbols is Symbols.ASCII
        lines = self._build(self._frame, size.width, size.height)
        self.set_lines([faded(spans) for spans in lines] if self._frame.view.lost and not self._lively else lines)


def changed_cells(before: Line, after: Line) -> list[tuple[int, int]]:
    """The span of cells [begin, end) in which two lines of the same width differ; none if they are equal."""
    if before == after:
        return []
    old = [(character, span.role) for span in before for character in span.text]
    new = [(character, span.role) for span in after for character in span.text]
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    begin = sum(cell_len(character) for character, _ in new[:head])
    end = sum(cell_len(character) for character, _ in new) - sum(
        cell_len(character) for character, _ in (new[len(new) - tail :] if tail else ())
    )
    return [(begin, end)] if end > begin else []
