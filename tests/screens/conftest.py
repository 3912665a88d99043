"""A screen is looked at once it has settled, on a machine of any speed."""

from __future__ import annotations

import asyncio

import pytest
from textual.app import App
from textual.pilot import Pilot

ROUNDS = 200
"""Of changes that follow from each other; a console that reads without a pause never settles."""
TURNS = 2000


@pytest.fixture(autouse=True)
def _pauses_until_all_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's own pauses go by how little processor time was spent, which on a busy machine may be for want of it."""
    pause, press = Pilot.pause, Pilot.press

    async def longer_pause(self: Pilot[object], delay: float | None = None) -> None:
        await pause(self, delay)
        await settled(self.app)

    async def longer_press(self: Pilot[object], *keys: str) -> None:
        for key in keys:
            await press(self, key)
            await settled(self.app)

    monkeypatch.setattr(Pilot, "pause", longer_pause)
    monkeypatch.setattr(Pilot, "press", longer_press)


async def settled(app: App[object]) -> None:
    """Until every message was handled, and what it changed was laid out and drawn."""
    for _ in range(ROUNDS):
        await _nothing_left_to_run()
        if not app.is_running or not app._screen_stack:
            return
        screen = app.screen
        changes = (screen._layout_required, screen._scroll_required, screen._repaint_required, screen._dirty_widgets)
        if not any((*changes, screen._recompose_required, screen._callbacks)):
            return
        screen._on_timer_update()


async def _nothing_left_to_run() -> None:
    """Until every task of this event loop waits for something from outside, or for a time."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    quiet = 0
    for _ in range(TURNS):
        await asyncio.sleep(0)
        quiet = 0 if ready else quiet + 1
        if quiet == 3:
            return
