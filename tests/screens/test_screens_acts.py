"""What a person can do: claim, unlock, prompt, quit; each asked, shown, and refused where it must be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from console_fakes import EMPTY, HOSTILE, SERVING, WALLET, FakeSource, console, refreshed, screen_text
from textual import constants
from textual.pilot import Pilot
from textual.widgets import Input

from kvasir_console.errors import ExitCode, LedgerError
from kvasir_console.screens.app import ConsoleApp, LocalAction
from kvasir_console.screens.dialogs import ConfirmScreen, PassphraseInput, TextScreen, UnlockScreen, plain_lines
from kvasir_console.screens.widgets.prompt import PromptPanel

SMALL = (80, 24)
LOCKED = replace(SERVING, wallet_locked=True)


def toasts(app: ConsoleApp) -> list[str]:
    return [notification.message for notification in app._notifications]


async def until(pilot: Pilot[int], condition: object) -> None:
    async with asyncio.timeout(120):
        while not condition():  # type: ignore[operator]
            await pilot.pause(0.01)


async def test_a_claim_shows_amount_and_wallet_and_asks_first() -> None:
    source = FakeSource()
    app = console([source])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("c")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmScreen)
        shown = screen_text(app)
        assert "2.141592 KVR" in shown
        assert WALLET in shown
        assert "gate.example:8443" in shown
        await pilot.press("enter")  # the answer at hand is no
        await pilot.pause()
        assert app.screen is app.dashboard
        assert source.claims == 0
        await pilot.press("c")
        await pilot.pause()
        await pilot.press("y")
        await until(pilot, lambda: source.claims == 1)
        await until(pilot, lambda: toasts(app) == ["2.141592 KVR claimed; the claim is reserved."])
        assert source.reads >= 3


async def test_arrow_and_enter_claim_too() -> None:
    source = FakeSource()
    app = console([source])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("c")
        await pilot.pause()
        await pilot.press("left", "enter")
        await until(pilot, lambda: source.claims == 1)


async def test_a_refused_claim_says_why_and_hostile_words_stay_words() -> None:
    source = FakeSource()
    source.claim_failure = LedgerError("refused", f"The gateway said {HOSTILE}", "Ask its operator.")
    app = console([source])
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await refreshed(app, pilot)
        await pilot.press("c")
        await pilot.pause()
        await pilot.press("y")
        await until(pilot, lambda: toasts(app))
        (toast,) = toasts(app)
        assert "Ask its operator." in toast
        assert "\x1b" not in toast
        await until(pilot, lambda: "[bold red]" in screen_text(app))


async def test_below_the_minimum_the_dialog_explains_and_cannot_claim() -> None:
    source = FakeSource(replace(SERVING, earnings=replace(SERVING.earnings, pending_micro_kvr=5)))
    app = console([source])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("c")
        await pilot.pause()
        assert "minimum of 1.000000 KVR" in screen_text(app)
        await pilot.press("y")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("escape")
        await pilot.pause()
        assert source.claims == 0


async def test_a_locked_wallet_is_unlocked_before_a_claim() -> None:
    source = FakeSource(LOCKED)
    app = console([source])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("c")
        await pilot.pause()
        assert app.screen is app.dashboard
        assert "locked" in toasts(app)[0]


async def test_a_second_claim_waits_for_the_first() -> None:
    source = FakeSource()
    running = asyncio.Event()

    async def slow() -> str:
        source.claims += 1
        await running.wait()
        return "done"

    source.claim = slow  # type: ignore[method-assign]
    app = console([source])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        for _ in range(2):
            await pilot.press("c")
            await pilot.pause()
            await pilot.press("y")
            await pilot.pause()
        assert source.claims == 1
        assert toasts(app) == ["Claim is still under way."]
        running.set()
        await until(pilot, lambda: "done" in toasts(app))


async def test_unlocking_is_masked_retried_and_forgotten() -> None:
    source = FakeSource(LOCKED)
    app = console([source])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("u")
        await pilot.pause()
        assert isinstance(app.screen, UnlockScreen)
        field = app.screen.query_one(PassphraseInput)
        await pilot.press(*"wrong")
        await pilot.pause()
        assert field.value == "wrong"
        assert "wrong" not in screen_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: source.unlocks == ["wrong"])
        assert field.value == ""
        await until(pilot, lambda: "The passphrase is wrong." in screen_text(app))
        await until(pilot, lambda: app.focused is field)
        await pilot.press(*"right", "enter")
        await until(pilot, lambda: app.screen is app.dashboard)
        assert source.unlocks == ["wrong", "right"]
        assert field.value == ""
        await until(pilot, lambda: "unlocked" in screen_text(app).split("\n")[0])
        assert "u" not in app.screen.active_bindings


async def test_leaving_the_dialog_forgets_what_was_typed() -> None:
    source = FakeSource(LOCKED)
    app = console([source])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("u")
        await pilot.pause()
        field = app.screen.query_one(PassphraseInput)
        await pilot.press(*"half", "escape")
        await pilot.pause()
        assert app.screen is app.dashboard
        assert field.value == ""
        assert source.unlocks == []


async def test_a_passphrase_reaches_no_clipboard_and_no_palette() -> None:
    app = console([FakeSource(LOCKED)])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("u")
        await pilot.pause()
        await pilot.press(*"secret")
        app.screen.query_one(PassphraseInput).action_select_all()
        await pilot.press("ctrl+c", "ctrl+x", "ctrl+p")
        await pilot.pause()
        assert app.clipboard == ""
        assert isinstance(app.screen, UnlockScreen)
        assert app.screen.query_one(PassphraseInput).value == "secret"


async def test_no_passphrase_is_asked_while_keys_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "LOG_FILE", "keys.log")
    app = console([FakeSource(LOCKED)])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("u")
        await pilot.pause()
        assert app.screen is app.dashboard
        assert "recorded" in toasts(app)[0]


@pytest.mark.parametrize("snapshot", [SERVING, EMPTY])
async def test_read_only_hides_every_act(snapshot: object) -> None:
    source = FakeSource(snapshot)  # type: ignore[arg-type]
    app = console([source], read_only=True)
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        assert {"c", "u", "r"}.isdisjoint(app.screen.active_bindings)
        await pilot.press("r", "c", "u")
        await pilot.pause()
        assert app.screen is app.dashboard
        assert "read-only" in screen_text(app)


async def test_read_only_can_be_put_on_and_taken_off_for_a_while() -> None:
    app = console([FakeSource()])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("r")
        await pilot.pause()
        assert "read-only" in screen_text(app)
        assert "c" not in app.screen.active_bindings
        await pilot.press("r")
        await pilot.pause()
        assert app.screen.active_bindings["c"].enabled


async def test_quitting_is_immediate_where_it_stops_nothing() -> None:
    app = console([FakeSource()])
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("q")
        await pilot.pause()
    assert app.return_value == ExitCode.OK


@pytest.mark.parametrize("last", ["y", "ctrl+q"])
async def test_quitting_asks_where_it_stops_a_node(last: str) -> None:
    app = console([FakeSource()], quit_warning="The node stops.")
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("q")
        await pilot.pause()
        assert "The node stops." in screen_text(app)
        await pilot.press("n")
        await pilot.pause()
        assert app.screen is app.dashboard
        await pilot.press("q")
        await pilot.pause()
        await pilot.press(last)
        await pilot.pause()
    assert app.return_value == ExitCode.OK


async def test_a_local_action_has_a_key_and_says_what_came_of_it() -> None:
    async def act() -> str:
        return "One node was stopped."

    app = console([FakeSource()], actions=[LocalAction("x", "Stop one node", act)])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        assert "x Stop one node" in screen_text(app)
        await pilot.press("x")
        await until(pilot, lambda: toasts(app) == ["Stop one node has begun.", "One node was stopped."])
        await pilot.press("?")
        await pilot.pause()
        assert "Stop one node" in screen_text(app)


def test_a_report_keeps_its_columns_where_it_must_be_wrapped() -> None:
    text = "\nCHECKS   one two three four\n         | five six seven eight nine\nshort  as it is\n" + "x" * 50
    rows = ["".join(span.text for span in row) for row in plain_lines(text, 22)]
    assert rows == [
        "CHECKS   one two three",
        "         four",
        "         | five six",
        "         seven eight",
        "         nine",
        "short  as it is",
        "x" * 22,
        "x" * 22,
        "x" * 6,
    ]


async def test_a_long_answer_to_an_action_is_shown_to_be_read() -> None:
    async def act() -> str:
        return "\n".join(["Report", "", *(f"line {i} [/markup] \x1b[2J" for i in range(40))])

    app = console([FakeSource()], actions=[LocalAction("x", "Whole pass", act)])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("x")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        await until(pilot, lambda: "line 0 [/markup]" in screen_text(app))
        assert "Whole pass" in screen_text(app)
        assert "line 39" not in screen_text(app)
        await pilot.press("end")
        await until(pilot, lambda: "line 39 [/markup]" in screen_text(app))
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen is app.dashboard


async def test_a_defect_in_an_act_is_said_and_does_not_end_the_console() -> None:
    async def act() -> str:
        raise RuntimeError("internal detail")

    app = console([FakeSource()], actions=[LocalAction("x", "Break", act)])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("x")
        await until(pilot, lambda: len(toasts(app)) == 2)
        assert "RuntimeError" in toasts(app)[1]
        assert "internal detail" not in toasts(app)[1]
        assert app.is_running


class Prompts:
    """A prompt whose pieces a test lets through."""

    def __init__(self, *pieces: str, failure: Exception | None = None) -> None:
        self.pieces = pieces
        self.failure = failure
        self.asked: list[str] = []
        self.closed = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, text: str) -> AsyncIterator[str]:
        self.asked.append(text)
        try:
            for piece in self.pieces:
                yield piece
                await self.gate.wait()
            if self.failure is not None:
                raise self.failure
        finally:
            self.closed += 1


@pytest.mark.parametrize("size", [SMALL, (140, 40)])
async def test_a_prompt_streams_into_its_panel(size: tuple[int, int]) -> None:
    prompts = Prompts(" Paris", ", of", " course.\n", "\x1b[31m[bold]")
    app = console([FakeSource()], prompt=prompts)
    async with app.run_test(size=size) as pilot:
        await refreshed(app, pilot)
        await pilot.press("p")
        await pilot.pause()
        await pilot.press(*"The capital", "enter")
        await until(pilot, lambda: "done: first piece after" in screen_text(app))
        assert prompts.asked == ["The capital"]
        shown = screen_text(app)
        assert "The capital" in shown
        assert "Paris, of course." in shown
        assert "[bold]" in shown
        assert "4 pieces" in shown
        assert app.query_one("#prompt-input", Input).value == ""
        await pilot.press("escape")
        await pilot.pause()
        assert app.query_one(PromptPanel).region.height == 0


async def test_escape_stops_an_answer_first_and_closes_its_stream() -> None:
    prompts = Prompts("one", "two")
    prompts.gate.clear()
    app = console([FakeSource()], prompt=prompts)
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("p")
        await pilot.pause()
        await pilot.press("a", "enter")
        await until(pilot, lambda: "streaming" in screen_text(app))
        await pilot.press("b", "enter")
        assert prompts.asked == ["a"]
        await pilot.press("escape")
        await until(pilot, lambda: "stopped:" in screen_text(app))
        assert prompts.closed == 1
        assert app.query_one(PromptPanel).region.height > 0


async def test_quitting_during_an_answer_closes_its_stream() -> None:
    prompts = Prompts("one", "two")
    prompts.gate.clear()
    app = console([FakeSource()], prompt=prompts)
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("p")
        await pilot.pause()
        await pilot.press("a", "enter")
        await until(pilot, lambda: "streaming" in screen_text(app))
        await pilot.press("ctrl+q")
    assert prompts.closed == 1


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            LedgerError("x", "The gateway refused the prompt.", "Pay first."),
            "The gateway refused the prompt. Pay first.",
        ),
        (RuntimeError("detail"), "RuntimeError"),
    ],
)
async def test_a_failed_prompt_says_so_and_another_can_follow(failure: Exception, words: str) -> None:
    prompts = Prompts("partial", failure=failure)
    app = console([FakeSource()], prompt=prompts)
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("p")
        await pilot.pause()
        await pilot.press("a", "enter")
        await until(pilot, lambda: "failed: first piece" in screen_text(app))
        shown = " ".join(screen_text(app).split())
        assert "partial" in shown
        assert words in shown
        await pilot.press("b", "enter")
        await until(pilot, lambda: prompts.asked == ["a", "b"])


async def test_without_a_prompt_there_is_no_key_for_it() -> None:
    app = console([FakeSource()])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        assert "p" not in app.screen.active_bindings
        await pilot.press("p")
        assert not app.query(PromptPanel)
