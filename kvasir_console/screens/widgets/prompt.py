"""A prompt to the network from the screen: local mode's way to see a token travel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input

from kvasir_console.errors import KvasirError
from kvasir_console.screens import format as fmt
from kvasir_console.screens.line import Line, Role, Span, clean, line, wrap
from kvasir_console.screens.widgets.lines import Lines
from kvasir_console.screens.widgets.scroller import Scroller

log = logging.getLogger(__name__)

_MOST_CHARACTERS = 200_000


class Prompt(Protocol):
    def __call__(self, text: str, /) -> AsyncIterator[str]:
        """Stream the answer to ``text`` in pieces. Raises ``KvasirError``. Closing the iterator cancels."""
        ...


class PromptPanel(Vertical):
    """One question at a time: the answer as it comes, and how long the first piece took."""

    def __init__(
        self, prompt: Prompt, hint: str = "", *, widget_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(id=widget_id)
        self._prompt = prompt
        self._hint = hint or "a prompt, then enter"
        self._clock = clock
        self._question = ""
        self._answer = ""
        self._error = ""
        self._answering: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        yield Scroller(widget_id="prompt-answer")
        yield Lines(widget_id="prompt-status")
        yield Input(placeholder=self._hint, id="prompt-input", compact=True, max_length=8000)

    def on_mount(self) -> None:
        self.border_title = "Prompt"
        self.query_one(Input).cursor_blink = False

    async def on_unmount(self) -> None:
        await self.cancel()

    @property
    def busy(self) -> bool:
        return self._answering is not None and not self._answering.done()

    def open(self) -> None:
        self.query_one(Input).focus()

    async def cancel(self) -> None:
        """Stop the answer that is being written, if there is one."""
        task, self._answering = self._answering, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self.busy or not event.value.strip():
            return
        self._question, self._answer, self._error = event.value, "", ""
        event.input.value = ""
        self._answering = asyncio.create_task(self._ask(self._question), name="prompt")

    def on_resize(self, _: events.Resize) -> None:
        self.call_after_refresh(self._draw)

    async def _ask(self, question: str) -> None:
        started = self._clock()
        first: float | None = None
        pieces = 0
        state = "stopped"
        self._status("waiting for the first piece")
        try:
            async with contextlib.aclosing(_closable(self._prompt(question))) as answer:
                async for piece in answer:
                    pieces += 1
                    if first is None:
                        first = self._clock() - started
                    self._answer = (self._answer + piece)[-_MOST_CHARACTERS:]
                    self._status(_progress("streaming", first, pieces, self._clock() - started))
                    self._draw()
            state = "done"
        except KvasirError as error:
            state, self._error = "failed", str(error)
        except Exception as error:
            log.exception("the prompt failed")
            state, self._error = "failed", f"The prompt failed ({type(error).__name__}); the log says more."
        finally:
            self._status(_progress(state, first, pieces, self._clock() - started))
            self._draw()

    def _status(self, text: str) -> None:
        for lines in self.query(Lines):
            lines.set_lines([line(Span(text, Role.LABEL))])

    def _draw(self) -> None:
        scroller = self.query(Scroller).first() if self.query(Scroller) else None
        if scroller is None:
            return
        cells = max(1, scroller.scrollable_content_region.width)
        rows: list[Line] = [line(Span(text, Role.LABEL)) for text in wrap(self._question, cells)]
        for paragraph in self._answer.replace("\r", "").split("\n"):
            rows += [line(Span(clean(text))) for text in wrap(paragraph, cells) or [""]]
        rows += [line(Span(text, Role.BAD)) for text in wrap(self._error, cells)]
        scroller.set_rows(rows)


async def _closable(answer: AsyncIterator[str]) -> AsyncGenerator[str]:
    """``answer`` as a generator; closing it closes ``answer`` if that can be closed."""
    try:
        async for piece in answer:
            yield piece
    finally:
        close = getattr(answer, "aclose", None)
        if close is not None:
            await close()


def _progress(state: str, first_s: float | None, pieces: int, elapsed_s: float) -> str:
    if first_s is None:
        return f"{state} after {elapsed_s:.2f} s, nothing came"
    speed = fmt.rate((pieces - 1) / (elapsed_s - first_s)) if pieces > 1 and elapsed_s > first_s else fmt.NA
    return f"{state}: first piece after {first_s:.2f} s, {pieces} pieces in {elapsed_s:.2f} s, {speed} a second"
