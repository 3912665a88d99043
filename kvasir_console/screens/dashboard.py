"""The dashboard: every panel of the selected node, and the keys."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.geometry import Size
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer

from kvasir_console.errors import KvasirError
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.screens import format as fmt
from kvasir_console.screens.dialogs import (
    TEXT_CELLS,
    ConfirmScreen,
    TextScreen,
    UnlockScreen,
    keys_are_recorded,
    plain_lines,
)
from kvasir_console.screens.frame import Frame
from kvasir_console.screens.graph import Symbols
from kvasir_console.screens.help import key_lines
from kvasir_console.screens.line import Line, Role, Span, clean, labelled, line, wrap
from kvasir_console.screens.reader import NodeView
from kvasir_console.screens.source import SnapshotSource
from kvasir_console.screens.views.earnings import can_claim, earnings
from kvasir_console.screens.views.header import answer, header
from kvasir_console.screens.views.holding import holding
from kvasir_console.screens.views.machine import machine
from kvasir_console.screens.views.nodes import first_row, nodes, strip_index
from kvasir_console.screens.views.phase import phase
from kvasir_console.screens.views.relay import relay
from kvasir_console.screens.views.throughput import throughput
from kvasir_console.screens.widgets.lines import Panel
from kvasir_console.screens.widgets.log import LogPanel
from kvasir_console.screens.widgets.prompt import Prompt, PromptPanel

if TYPE_CHECKING:
    from kvasir_console.screens.app import ConsoleApp

log = logging.getLogger(__name__)


_TOAST_LINES = 4
"""A longer answer to an act is shown to be read at leisure."""
_REPORT_CELLS = 110


class NodesPanel(Panel):
    """The list of nodes; a click selects one."""

    class Chosen(Message):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, count: int) -> None:
        super().__init__(nodes, "Nodes", widget_id="nodes", lively=True)
        self._count = count

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return self._count + 1

    def on_click(self, event: events.Click) -> None:
        frame, size = self._frame, self.content_size
        if frame is None:
            return
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if size.height <= 1:
            self.post_message(self.Chosen(strip_index(frame, size.width, offset.x)))
        elif offset.y > 0:
            self.post_message(self.Chosen(first_row(frame, size.height) + offset.y - 1))


class Dashboard(Screen[None]):
    """Paints frames and turns keys into acts. It never asks a node anything by itself but a person's wish."""

    AUTO_FOCUS = ""
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (101, "-wide"), (132, "-roomy")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (39, "-tall"), (50, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "Help", key_display="?", id="help"),
        Binding("q", "app.quit", "Quit", id="quit"),
        Binding("c", "claim", "Claim", id="claim"),
        Binding("u", "unlock", "Unlock", id="unlock"),
        Binding("p", "prompt", "Prompt", id="prompt"),
        Binding("l", "log", "Log", id="log"),
        Binding("slash", "filter", "Filter log", key_display="/", show=False, id="filter"),
        Binding("g", "symbols", "Graph", id="graph"),
        Binding("j,down", "move(1)", "Next node", show=False, id="next"),
        Binding("k,up", "move(-1)", "Previous node", show=False, id="previous"),
        *(
            Binding(str(number), f"select({number - 1})", "Select node", show=False, id=f"select-{number}")
            for number in range(1, 10)
        ),
        Binding("r", "read_only", "Read-only on or off", show=False, id="read-only"),
        Binding("escape", "back", "Back", id="back"),
        Binding("colon", "app.command_palette", "Commands", key_display=":", show=False, id="commands"),
    ]

    def __init__(
        self,
        sources: Sequence[SnapshotSource],
        clock: Callable[[], float],
        *,
        prompt: Prompt | None = None,
        prompt_hint: str = "",
        read_only: bool = False,
        symbols: Symbols = Symbols.BRAILLE,
    ) -> None:
        super().__init__()
        self._sources = sources
        self._clock = clock
        self._prompt = prompt
        self._prompt_hint = prompt_hint
        self._always_read_only = read_only
        self._read_only = read_only
        self._symbols = symbols
        self._selected = 0
        self._views: tuple[NodeView, ...] = tuple(NodeView(source.title) for source in sources)
        self._offered: tuple[object, ...] = ()
        self.add_class("-narrow", "-short")  # until the first resize says otherwise: the layout that fits everywhere
        self.set_class(len(sources) == 1, "-single")

    def compose(self) -> ComposeResult:
        yield Panel(header, widget_id="header", lively=True)
        if len(self._sources) > 1:
            yield NodesPanel(len(self._sources))
        yield Panel(answer, widget_id="answer", lively=True)
        with Container(id="body"):
            with Vertical(id="left"):
                yield Panel(phase, "Phase", widget_id="phase", lively=True)
                yield Panel(holding, "Slice", widget_id="slice")
                yield Panel(relay, "Relay", widget_id="relay")
            with Vertical(id="right"):
                yield Panel(throughput, "Throughput", widget_id="throughput")
                with Container(id="money"):
                    yield Panel(earnings, "Earnings", widget_id="earnings")
                    yield Panel(machine, "Machine", widget_id="machine")
        yield LogPanel(widget_id="log")
        if self._prompt is not None:
            yield PromptPanel(self._prompt, self._prompt_hint, widget_id="prompt")
        yield Footer()

    def on_mount(self) -> None:
        self.call_after_refresh(self._repaint)

    # Painting

    @property
    def frame(self) -> Frame:
        return Frame(self._views, self._selected, self._clock(), self._symbols, self._read_only)

    def paint(self, views: tuple[NodeView, ...]) -> None:
        """Show what was read, in one batch."""
        self._views = views
        for log_panel in self.query(LogPanel):
            log_panel.take(views)
        self._repaint()

    def on_screen_resume(self) -> None:
        self._repaint()

    def _repaint(self) -> None:
        # Under a dialog every change would paint the whole screen anew, dialog included: it waits until that is gone.
        if not self.is_mounted or self.app.screen_stack[-1:] != [self]:
            return
        frame = self.frame
        with self.app.batch_update():
            self.app.set_class(self._symbols is Symbols.ASCII, "-ascii")
            for panel in self.query(Panel):
                panel.show(frame)
            for log_panel in self.query(LogPanel):
                log_panel.show(frame)
        snapshot = frame.snapshot
        offered = (
            frame.view.lost,
            self._read_only,
            snapshot is not None and snapshot.wallet_locked,
            snapshot is not None and bool(snapshot.earnings.pending_micro_kvr),
        )
        if offered != self._offered:
            self._offered = offered
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """False hides a key, None shows it dimmed."""
        view = self._views[self._selected]
        snapshot = None if view.lost else view.snapshot
        match action:
            case "claim" | "unlock" if self._read_only:
                return False
            case "claim":
                return True if snapshot is not None and snapshot.earnings.pending_micro_kvr else None
            case "unlock":
                return snapshot is not None and snapshot.wallet_locked
            case "prompt":
                return self._prompt is not None
            case "move":
                return len(self._sources) > 1
            case "select":
                return len(self._sources) > 1 and int(cast(int, parameters[0])) < len(self._sources)
            case "back":
                return self.focused is not None or self.has_class("-show-log") or self.has_class("-show-prompt")
            case "read_only":
                return not self._always_read_only
        return True

    # Selecting and looking

    @property
    def names(self) -> list[str]:
        return [view.name for view in self._views]

    def action_select(self, index: int) -> None:
        if 0 <= index < len(self._sources) and index != self._selected:
            self._selected = index
            self._repaint()

    def action_move(self, step: int) -> None:
        self.action_select((self._selected + step) % len(self._sources))

    def on_nodes_panel_chosen(self, event: NodesPanel.Chosen) -> None:
        self.action_select(event.index)

    def action_symbols(self) -> None:
        self._symbols = self._symbols.following
        self._repaint()

    def action_read_only(self) -> None:
        self._read_only = not self._read_only
        self._repaint()

    def action_help(self) -> None:
        app = cast("ConsoleApp", self.app)
        lines = key_lines(app, self.active_bindings.values())
        self.app.push_screen(TextScreen("Keys", lambda _: lines, cells=TEXT_CELLS))

    def action_log(self) -> None:
        """The log takes the whole screen, or gives it back."""
        self.remove_class("-show-prompt")
        if self.toggle_class("-show-log").has_class("-show-log"):
            self.query_one(LogPanel).scroller.focus()
        else:
            self.set_focus(None)

    def action_filter(self) -> None:
        panel = self.query_one(LogPanel)
        if not panel.display or self.has_class("-short"):
            self.remove_class("-show-prompt")
            self.add_class("-show-log")
        panel.open_filter()

    def action_prompt(self) -> None:
        self.remove_class("-show-log")
        self.add_class("-show-prompt")
        self.query_one(PromptPanel).open()

    async def action_back(self) -> None:
        """One step back: out of the filter, out of an answer that is being written, out of log or prompt."""
        panel = self.query_one(LogPanel)
        if panel.filtering:
            panel.close_filter()
        elif self.has_class("-show-prompt"):
            prompt = self.query_one(PromptPanel)
            if prompt.busy:
                await prompt.cancel()
                return
            self.remove_class("-show-prompt")
            self.set_focus(None)
        else:
            self.remove_class("-show-log")
            self.set_focus(None)

    # Acts

    def action_claim(self) -> None:
        snapshot = self._views[self._selected].snapshot
        if snapshot is None:
            return
        if snapshot.wallet_locked:
            self.say("A claim is signed by the wallet, which is locked. Unlock it first.", "warning")
            return
        source = self._sources[self._selected]
        possible = can_claim(snapshot.earnings)

        def decided(yes: bool | None) -> None:
            if yes:
                self.act(source.claim, "Claim")

        self.app.push_screen(
            ConfirmScreen("Claim", _claim_lines(snapshot, possible), yes="Claim", possible=possible), decided
        )

    def action_unlock(self) -> None:
        view = self._views[self._selected]
        if keys_are_recorded(self.app.features):
            self.say(
                "Key presses are being recorded (TEXTUAL_LOG or developer tools): no passphrase is asked.", "error"
            )
            return
        source = self._sources[self._selected]

        def decided(yes: bool | None) -> None:
            if yes:
                self.say(f"The wallet of {view.name} is unlocked.", "information")
                self.run_worker(cast("ConsoleApp", self.app).read_now(), group="read")

        self.app.push_screen(UnlockScreen(view.name, source.unlock), decided)

    def act(self, act: Callable[[], Awaitable[str]], name: str) -> None:
        """Carry out ``act`` beside the screen, show what it says, read again. One of a name at a time."""
        if any(worker.group == name and not worker.is_finished for worker in self.workers):
            self.say(f"{name} is still under way.", "warning")
            return
        self.run_worker(self._carry_out(act, name), group=name)

    async def _carry_out(self, act: Callable[[], Awaitable[str]], name: str) -> None:
        try:
            text = await act()
            if text.count("\n") < _TOAST_LINES:
                self.say(text, "information")
            else:
                self.app.push_screen(TextScreen(name, partial(plain_lines, text), cells=_REPORT_CELLS))
        except KvasirError as error:
            self.say(str(error), "error")
        except Exception as error:
            log.exception("an act of the console failed")
            self.say(f"It failed in a way that is not foreseen ({type(error).__name__}); the log says more.", "error")
        await cast("ConsoleApp", self.app).read_now()

    def say(self, text: str, severity: str) -> None:
        """A toast; text from elsewhere is cleaned and never read as markup."""
        text = "\n".join(clean(row) for row in text.split("\n"))
        self.app.notify(text, severity=severity, markup=False, timeout=8)  # type: ignore[arg-type]


def _claim_lines(snapshot: NodeSnapshot, possible: bool) -> list[Line]:
    seen = snapshot.earnings
    lines = [
        labelled("amount", Span(fmt.kvr(seen.pending_micro_kvr), Role.STRONG)),
        labelled("to", snapshot.wallet),
        labelled("from", fmt.host(snapshot.gateway)),
        (),
    ]
    text = (
        "The wallet signs this one claim; the gateway then pays on the chain."
        if possible
        else f"Below the gateway's minimum of {fmt.kvr(seen.minimum_claim_micro_kvr)}. It accrues with the work."
    )
    return lines + [line(Span(row, Role.LABEL if possible else Role.WARN)) for row in wrap(text, TEXT_CELLS)]
