"""Roles to terminal styles: the one place where the style sheet and a ``Line`` meet."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from kvasir_console.screens.line import Line, Role, Span, crop, to_ascii, width

ROLE_CLASSES = {f"role--{role.value}" for role in Role}
"""Component classes of every widget that paints lines."""


class Palette:
    """The styles of one widget; computed on demand, forgotten when its style sheet or theme changes."""

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._styles: dict[Role, Style] = {}

    def clear(self) -> None:
        self._styles.clear()

    def strip(self, spans: Line) -> Strip:
        return Strip([Segment(span.text, self._style(span.role)) for span in spans])

    def _style(self, role: Role) -> Style:
        style = self._styles.get(role)
        if style is None:
            rules = self._widget.get_component_styles(f"role--{role.value}")
            _, background = self._widget.background_colors
            background += rules.background
            color = background + rules.color
            style = Style(color=color.rich_color, bgcolor=background.rich_color) + rules.text_style
            self._styles[role] = style
        return style


def padded(spans: Line, cells: int, *, ascii_only: bool = False) -> Line:
    """The line in exactly ``cells`` cells."""
    kept = crop(to_ascii(spans) if ascii_only else spans, cells)
    if ascii_only:
        kept = to_ascii(kept)
    missing = cells - width(kept)
    return (*kept, Span(" " * missing)) if missing > 0 else kept
