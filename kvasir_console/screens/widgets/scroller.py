"""Lines that scroll, and follow their end until a person scrolls up."""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from kvasir_console.screens.line import Line
from kvasir_console.screens.widgets.palette import ROLE_CLASSES, Palette, padded


class Scroller(ScrollView, can_focus=True):
    ALLOW_SELECT = False
    COMPONENT_CLASSES = ROLE_CLASSES

    def __init__(self, *, widget_id: str | None = None) -> None:
        super().__init__(id=widget_id)
        self._palette = Palette(self)
        self._rows: list[Line] = []
        self.follows = True
        self.ascii_only = False

    @property
    def text(self) -> str:
        """The lines in view, without styles."""
        top = self.scroll_offset.y
        shown = self._rows[top : top + self.size.height]
        return "\n".join("".join(span.text for span in spans).rstrip() for spans in shown)

    def set_rows(self, rows: Sequence[Line], *, dropped: int = 0) -> None:
        """Show ``rows``. ``dropped`` former ones are gone from the top; a view scrolled up stays where it is."""
        self._rows = list(rows)
        follows = self.follows
        self.virtual_size = Size(self.scrollable_content_region.width, len(self._rows))
        if follows:
            self.to_end()
        elif dropped:
            self.scroll_to(y=max(0, self.scroll_offset.y - dropped), animate=False)
        self.refresh()

    def to_end(self) -> None:
        self.follows = True
        self.scroll_to(y=self.max_scroll_y, animate=False)

    def render_line(self, y: int) -> Strip:
        cells = self.scrollable_content_region.width
        index = y + self.scroll_offset.y
        if not 0 <= index < len(self._rows):
            return self._palette.strip(padded((), cells))
        return self._palette.strip(padded(self._rows[index], cells, ascii_only=self.ascii_only))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.follows = new_value >= self.max_scroll_y

    def notify_style_update(self) -> None:
        self._palette.clear()
        super().notify_style_update()
