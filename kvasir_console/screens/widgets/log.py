"""The log of the selected node: it follows the end, stays put once scrolled up, and can be filtered."""

from __future__ import annotations

import re
from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input

from kvasir_console import logs
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.graph import Symbols
from kvasir_console.screens.line import Line, Role, Span, clean, line, wrap
from kvasir_console.screens.logbuffer import LogBuffer
from kvasir_console.screens.reader import NodeView
from kvasir_console.screens.widgets.scroller import Scroller

_TIME = re.compile(r"[0-9T:.,+-]{8,32}(?= )")
_LEVELS = (
    (re.compile(r"\b(?:ERROR|CRITICAL)\b|^\S+ failed:"), Role.BAD),
    (re.compile(r"\bWARNING\b|: waiting\b|: closed\b"), Role.WARN),
)


class LogPanel(Vertical):
    """The lines, and the filter's input while it is open."""

    def __init__(self, *, widget_id: str) -> None:
        super().__init__(id=widget_id)
        self._buffers: dict[int, LogBuffer] = {}
        self._selected = 0
        self._filter = ""
        self._added = self._dropped = self._unseen = 0
        self._width = 0
        self._titles = ("", "")

    def compose(self) -> ComposeResult:
        yield Scroller(widget_id="log-lines")
        yield Input(
            placeholder="words to show, or !words to hide", id="log-filter", compact=True, select_on_focus=False
        )

    def on_mount(self) -> None:
        field = self.query_one(Input)
        field.cursor_blink = False
        field.display = False
        self._title()

    @property
    def scroller(self) -> Scroller:
        return self.query_one(Scroller)

    def take(self, views: Sequence[NodeView]) -> None:
        """Remember every node's new lines, whether they are drawn now or not."""
        for index, view in enumerate(views):
            buffer = self._buffers.setdefault(index, LogBuffer())
            added, dropped = buffer.take(view.snapshot.log) if view.snapshot is not None else (0, 0)
            if index == self._selected:
                self._added += added
                self._dropped += dropped

    def show(self, frame: Frame) -> None:
        """Draw the selected node's lines, if anything about them changed."""
        scroller = self.scroller
        scroller.ascii_only = frame.symbols is Symbols.ASCII
        added, dropped, self._added, self._dropped = self._added, self._dropped, 0, 0
        if frame.selected != self._selected:
            self._selected = frame.selected
            self._unseen = 0
            scroller.follows = True
            self._rebuild()
        elif added or self._width != scroller.scrollable_content_region.width:
            self._unseen = 0 if scroller.follows else self._unseen + added
            self._rebuild(dropped)
        elif self._unseen and scroller.follows:
            self._unseen = 0
            self._title()

    def open_filter(self) -> None:
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def close_filter(self) -> None:
        """Hide the input and show every line again."""
        field = self.query_one(Input)
        field.value = ""
        field.display = False
        self.scroller.focus()

    @property
    def filtering(self) -> bool:
        return bool(self.query_one(Input).display)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._filter = event.value
        self.scroller.follows = True
        self._rebuild()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter, go back to the lines."""
        event.stop()
        if event.value:
            self.scroller.focus()
        else:
            self.close_filter()

    def on_resize(self, _: events.Resize) -> None:
        self.call_after_refresh(self._rebuild)

    def _rebuild(self, dropped: int = 0) -> None:
        scroller = self.scroller
        self._width = scroller.scrollable_content_region.width
        buffer = self._buffers.get(self._selected, LogBuffer())
        rows: list[Line] = []
        for text in buffer.lines:
            if matches(text, self._filter):
                rows += log_lines(text, self._width)
        scroller.set_rows(rows, dropped=dropped)
        self._title()

    def _title(self) -> None:
        titles = (
            f"Log: {self._filter}" if self._filter else "Log",
            f"{self._unseen} new below, end to follow" if self._unseen else "",
        )
        if titles != self._titles:
            self._titles = titles
            self.border_title, self.border_subtitle = (Content(clean(title)) for title in titles)


def matches(text: str, wanted: str) -> bool:
    """Case does not matter; ``!words`` turns the filter round."""
    hide = wanted.startswith("!")
    words = wanted[1:] if hide else wanted
    return not words or (words.casefold() in text.casefold()) is not hide


def log_lines(text: str, cells: int) -> list[Line]:
    """One log line in as many rows as it needs; the time is faint and later rows are indented under the words."""
    text = logs.mask(text)
    stamp = _TIME.match(text)
    prefix = f"{stamp[0]} " if stamp is not None else ""
    role = next((role for pattern, role in _LEVELS if pattern.search(text)), Role.TEXT)
    rows = wrap(text[len(prefix) :], max(1, cells - len(prefix))) or [""]
    return [
        line(Span(prefix if index == 0 else " " * len(prefix), Role.FAINT), Span(row, role))
        for index, row in enumerate(rows)
    ]
