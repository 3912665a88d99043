"""What lies over the dashboard: a confirmation, the passphrase, a text to read."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual import constants
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input

from kvasir_console.errors import KvasirError
from kvasir_console.screens.line import Line, Role, Span, clean, line, wrap
from kvasir_console.screens.widgets.lines import Lines
from kvasir_console.screens.widgets.scroller import Scroller

TEXT_CELLS = 58
"""Cells of text in a dialog of ordinary width."""
_FRAME_CELLS = 7
"""Border, padding and scroll bar of a text screen."""
MOST_PASSPHRASE = 1024
_HEAD = re.compile(r" *(?:[!-~]+ {2,})?")
"""An indent, or a label with its column."""


class ConfirmScreen(ModalScreen[bool]):
    """Yes or no about one act; the answer at hand is no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes", id="confirm.yes"),
        Binding("n,escape", "answer(False)", "No", id="confirm.no"),
        Binding("left,right", "other", "Other answer", show=False),
    ]
    AUTO_FOCUS = "#no"

    def __init__(self, title: str, lines: Sequence[Line], *, yes: str, possible: bool = True) -> None:
        super().__init__()
        self._heading = title
        self._lines = list(lines)
        self._yes = yes
        self._possible = possible

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = Content(self._heading)
            text = Lines(self._lines, widget_id="confirm-text")
            text.styles.height = len(self._lines)
            yield text
            with Horizontal(classes="buttons"):
                yield Button(self._yes, id="yes", variant="primary", disabled=not self._possible, compact=True)
                yield Button("Cancel", id="no", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_answer(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        if not yes or self._possible:
            self.dismiss(yes)

    def action_other(self) -> None:
        self.focus_next()


class TextScreen(ModalScreen[None]):
    """Lines to read, and to scroll when there are many. ``build`` makes them for a width in cells."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter", "leave", "Close", id="text.close"),
    ]

    def __init__(self, title: str, build: Callable[[int], Sequence[Line]], *, cells: int) -> None:
        super().__init__()
        self._heading = title
        self._build = build
        self._cells = cells

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog text") as dialog:
            dialog.border_title = Content(self._heading)
            dialog.border_subtitle = "escape closes"
            dialog.styles.width = self._cells + _FRAME_CELLS
            scroller = Scroller(widget_id="text-lines")
            scroller.follows = False
            yield scroller

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        scroller = self.query_one(Scroller)
        lines = self._build(max(1, scroller.size.width - 1))
        scroller.styles.height = len(lines)
        scroller.set_rows(lines)

    def action_leave(self) -> None:
        self.dismiss()


def plain_lines(text: str, cells: int) -> list[Line]:
    """``text`` as it is; a line that is too long is wrapped under its own indent or beside its label."""
    rows: list[str] = []
    for each in text.strip("\n").split("\n"):
        each = clean(each)
        head = _HEAD.match(each)
        prefix = head[0] if head is not None and len(head[0]) < cells // 2 else ""
        if cell_len(each) <= cells:
            rows.append(each)
        else:
            wrapped = wrap(each[len(prefix) :], cells - len(prefix))
            rows += [(" " * len(prefix) if index else prefix) + row for index, row in enumerate(wrapped)]
    return [line(Span(row)) for row in rows]


class PassphraseInput(Input):
    """Masked, never copied, and emptied by ``take``."""

    def __init__(self) -> None:
        super().__init__(
            password=True, id="passphrase", max_length=MOST_PASSPHRASE, placeholder="passphrase", compact=True
        )
        self.cursor_blink = False

    def take(self) -> str:
        """What was typed; the field forgets it."""
        value = self.value
        self.value = ""
        return value

    def on_unmount(self) -> None:
        self.take()

    def action_copy(self) -> None:
        """A clipboard is no place for a passphrase (OSC 52 reaches the other end of an SSH session)."""

    def action_cut(self) -> None:
        """As ``action_copy``."""


class UnlockScreen(ModalScreen[bool]):
    """Asks for the vault's passphrase until it is right or the person leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Cancel", id="unlock.cancel")]
    AUTO_FOCUS = "#passphrase"

    def __init__(self, name: str, unlock: Callable[[str], Awaitable[None]]) -> None:
        super().__init__()
        self._name_line = line(Span("node    ", Role.LABEL), name)
        self._unlock = unlock

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "Unlock the wallet"
            yield Lines([self._name_line], widget_id="unlock-node")
            yield PassphraseInput()
            yield Lines(widget_id="unlock-status")

    def on_mount(self) -> None:
        self._say("Enter unlocks, escape leaves. The key stays in the signer.", Role.LABEL)

    @property
    def _field(self) -> PassphraseInput:
        return self.query_one(PassphraseInput)

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if not self._field.value:
            return
        self._field.disabled = True
        self._say("Unlocking; the derivation is slow on purpose.", Role.LABEL)
        self.run_worker(self._try(), group="unlock", exclusive=True)

    async def _try(self) -> None:
        try:
            await self._unlock(self._field.take())
        except KvasirError as error:
            self._field.disabled = False
            self._field.focus()
            self._say(str(error), Role.BAD)
        else:
            self.dismiss(True)

    def action_leave(self) -> None:
        self._field.take()
        self.dismiss(False)

    def _say(self, text: str, role: Role) -> None:
        self.query_one("#unlock-status", Lines).set_lines([line(Span(row, role)) for row in wrap(text, TEXT_CELLS, 2)])


def keys_are_recorded(features: frozenset[str]) -> bool:
    """Whether this process writes key presses somewhere: Textual does so in its log and to its developer tools."""
    return bool(constants.LOG_FILE) or "devtools" in features
