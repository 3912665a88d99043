"""The help screen, made from the bindings that are active: it cannot be out of date."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from kvasir_console.screens.line import Line, Role, Span, fit, line
from kvasir_console.screens.widgets.scroller import Scroller

_KEYS, _NAME = 12, 26


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "leave", "Close", id="help.close"),
    ]

    def __init__(self, lines: Iterable[Line]) -> None:
        super().__init__()
        self._lines = list(lines)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog help") as dialog:
            dialog.border_title = "Keys"
            dialog.border_subtitle = "escape closes"
            scroller = Scroller(widget_id="help-lines")
            scroller.styles.height = len(self._lines)
            yield scroller

    def on_mount(self) -> None:
        self.query_one(Scroller).follows = False
        self.call_after_refresh(self._draw)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        self.query_one(Scroller).set_rows(self._lines)

    def action_leave(self) -> None:
        self.dismiss()


def key_lines(app: App[int], bindings: Iterable[ActiveBinding]) -> list[Line]:
    """One line for each of our actions: its keys, what it does, and the id by which a keymap can move it."""
    keys: dict[str, list[str]] = {}
    first: dict[str, ActiveBinding] = {}
    for active in bindings:
        name = active.binding.description
        if active.binding.id or active.binding.show or name in first:
            keys.setdefault(name, []).append(app.get_key_display(active.binding))
            first.setdefault(name, active)
    return [
        line(
            Span(fit(_run(keys[name]), _KEYS), Role.ACCENT),
            Span(fit(name, _NAME), Role.TEXT if active.enabled else Role.FAINT),
            Span(active.binding.id or "", Role.FAINT),
        )
        for name, active in first.items()
    ]


def _run(keys: list[str]) -> str:
    """``1 2 3 4`` as ``1-4``."""
    if len(keys) > 2 and all(key.isdigit() for key in keys):
        return f"{keys[0]}-{keys[-1]}"
    return " ".join(keys)
