"""The dashboard on a terminal: what is where at every size, keys, what changes and what does not."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from console_fakes import (
    EMPTY,
    HOSTILE_SNAPSHOT,
    NOW_S,
    SERVING,
    UNREACHABLE,
    Clock,
    FakeSource,
    console,
    in_phase,
    refreshed,
    screen_text,
)
from textual.geometry import Region
from textual.widgets import Input

from kvasir_console.node.phase import Phase
from kvasir_console.node.snapshot import EarningsView
from kvasir_console.screens.app import ConsoleApp
from kvasir_console.screens.dialogs import TextScreen
from kvasir_console.screens.graph import Symbols
from kvasir_console.screens.widgets.lines import Lines, Panel
from kvasir_console.screens.widgets.log import LogPanel
from kvasir_console.screens.widgets.scroller import Scroller

SMALL, LARGE = (80, 24), (140, 40)


def several() -> list[FakeSource]:
    names = {"alpha": SERVING, "beta": EMPTY, "gamma": in_phase(Phase.DOWNLOADING), "delta": SERVING}
    return [FakeSource(replace(snapshot, name=name), name) for name, snapshot in names.items()]


def visible(app: ConsoleApp) -> dict[str, Region]:
    kinds = (Panel, LogPanel)
    return {str(panel.id): panel.region for panel in app.screen.query("*") if isinstance(panel, kinds) and panel.region}


@pytest.mark.parametrize("size", [SMALL, (100, 30), (101, 24), (101, 39), (131, 40), (132, 40), LARGE, (220, 60)])
@pytest.mark.parametrize("nodes", [1, 4, 12])
async def test_panels_stay_on_the_screen_and_apart(size: tuple[int, int], nodes: int) -> None:
    app = console((several() * 3)[:nodes])
    async with app.run_test(size=size) as pilot:
        await refreshed(app, pilot)
        regions = visible(app)
        assert {"header", "answer", "phase", "slice", "relay", "throughput", "earnings"} <= set(regions)
        assert ("nodes" in regions) == (nodes > 1)
        assert ("log" in regions) == (size[1] >= 39)
        assert ("machine" in regions) == (size[0] >= 132)
        assert ("cpu 42%" in app.query_one("#slice", Panel).text) == (size[0] < 132)
        inside = Region(0, 0, size[0], size[1] - 1)  # the footer's row is not theirs
        assert all(inside.contains_region(region) for region in regions.values())
        assert not [pair for pair in combinations(regions.items(), 2) if pair[0][1].overlaps(pair[1][1])]
        assert not app.screen.show_vertical_scrollbar


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_working_node_answers_the_first_questions(size: tuple[int, int]) -> None:
    app = console([FakeSource()])
    async with app.run_test(size=size) as pilot:
        await refreshed(app, pilot)
        shown = screen_text(app)
        for part in ("alpha", "7EcD…LtV2", "unlocked", "gate.example:8443", "YES  because", "SERVING", "1 h 02 min"):
            assert part in shown
        for part in ("experts 0–1 of layer 3", "2 of 8, 25%", "rows/s", "expert-alpha-7f3a", "12.3 ms"):
            assert part in shown
        for part in ("2.141592 KVR", "3.141592 KVR", "123.456789", "confirmed", "42%"):
            assert part in shown


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("snapshot", [EMPTY, HOSTILE_SNAPSHOT], ids=["empty", "hostile"])
async def test_any_snapshot_can_be_shown(size: tuple[int, int], snapshot: Any) -> None:
    app = console([FakeSource(snapshot), FakeSource(HOSTILE_SNAPSHOT)])
    async with app.run_test(size=size) as pilot:
        await refreshed(app, pilot)
        for key in ("l", "l", "g", "g", "j", "?", "escape", "ctrl+p", "escape"):
            await pilot.press(key)
            await pilot.pause()
            rows = screen_text(app).split("\n")
            assert len(rows) == size[1]
            assert not [
                character for row in rows for character in row if ord(character) < 32 or 127 <= ord(character) < 160
            ]
        if snapshot is HOSTILE_SNAPSHOT:
            assert "[bold red]" in "\n".join(rows)


async def test_a_lost_node_is_disconnected_since_a_moment_and_comes_back() -> None:
    clock, source = Clock(), FakeSource()
    app = console([source], clock=clock)
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        source.failure = UNREACHABLE
        await refreshed(app, pilot)
        clock.now_s += 75
        await refreshed(app, pilot)
        shown = screen_text(app)
        assert "DISCONNECTED" in shown
        assert "for 1 min 15 s" in shown
        assert "UNKNOWN  because this node has not answered" in shown
        assert "No node answers there." in shown
        assert "2.141592" in shown
        source.failure = None
        await refreshed(app, pilot)
        assert "SERVING" in screen_text(app)


async def test_before_the_first_answer_nothing_is_claimed() -> None:
    source = FakeSource(title="far away")
    source.failure = UNREACHABLE
    app = console([source])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        shown = screen_text(app)
        assert "far away" in shown
        assert "Last seen: never." in " ".join(app.query_one("#phase", Panel).text.split())
        assert "N/A" in shown
        assert "0.000000" not in shown


async def test_keys_select_nodes() -> None:
    app = console(several())
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        seen = []
        for key in ("2", "j", "j", "j", "k", "up", "down", "9", "1"):
            await pilot.press(key)
            await pilot.pause()
            seen.append(app.query_one("#header", Panel).text.split()[0])
        assert seen == ["beta", "gamma", "delta", "alpha", "delta", "gamma", "delta", "delta", "alpha"]


@pytest.mark.parametrize(("size", "offset"), [(LARGE, (20, 3)), (SMALL, (45, 0))])
async def test_a_click_selects_a_node(size: tuple[int, int], offset: tuple[int, int]) -> None:
    app = console(several())
    async with app.run_test(size=size) as pilot:
        await refreshed(app, pilot)
        await pilot.click("#nodes", offset=offset)
        await pilot.pause()
        assert app.query_one("#header", Panel).text.split()[0] == ("beta" if size == LARGE else "gamma")


async def test_one_node_has_no_keys_for_selecting() -> None:
    app = console([FakeSource()])
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        assert {"j", "k", "1", "2"}.isdisjoint(app.screen.active_bindings)


async def test_graph_symbols_walk_through_all_sets_and_ascii_is_ascii() -> None:
    app = console(several())
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)

        def graph() -> str:
            return app.query_one("#throughput", Panel).text

        assert any(0x2800 < ord(character) < 0x2900 for character in graph())
        await pilot.press("g")
        assert "█" in graph()
        await pilot.press("g")
        await pilot.pause()
        assert "#" in graph()
        rows = screen_text(app).split("\n")
        assert all(row.isascii() for row in rows)
        await pilot.press("g")
        assert any(0x2800 < ord(character) < 0x2900 for character in graph())


async def test_only_changed_cells_are_painted(monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource()
    app = console([source])
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        painted: list[tuple[str, tuple[Region, ...]]] = []
        refresh = Lines.refresh

        def spy(self: Lines, *regions: Region, **options: Any) -> Lines:
            painted.append((str(self.id), regions))
            return refresh(self, *regions, **options)

        monkeypatch.setattr(Lines, "refresh", spy)
        await refreshed(app, pilot)
        assert painted == []
        source.current = replace(SERVING, earnings=replace(SERVING.earnings, pending_micro_kvr=2_141_597))
        await refreshed(app, pilot)
        (panel, (region,)) = painted.pop()
        assert painted == []
        assert panel == "earnings"
        assert region.size == (1, 1)


async def test_a_stale_round_is_replaced_by_a_newer_one() -> None:
    from kvasir_console.screens.app import Snapshots

    assert Snapshots(()).can_replace(Snapshots(()))


async def test_the_log_follows_its_end_until_scrolled_and_counts_what_is_new() -> None:
    lines = tuple(f"12:00:{i % 60:02d} line {i}" for i in range(150))
    source = FakeSource(replace(SERVING, log=lines))
    app = console([source])
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        panel = app.query_one(LogPanel)
        assert panel.scroller.text.split("\n")[-1].endswith("line 149")
        await pilot.press("l")
        await pilot.pause()
        assert panel.region.height > 30
        await pilot.press("pageup", "up")
        await pilot.pause()
        top = panel.scroller.text.split("\n")[0]
        source.current = replace(SERVING, log=(*lines[20:], *(f"12:01:00 line {i}" for i in range(150, 153))))
        await refreshed(app, pilot)
        assert panel.scroller.text.split("\n")[0] == top
        assert "3 new below" in screen_text(app)
        await pilot.press("end")
        await pilot.pause()
        await refreshed(app, pilot)
        assert panel.scroller.text.split("\n")[-1].endswith("line 152")
        assert "new below" not in screen_text(app)


async def test_the_log_is_bounded_and_never_jumps_when_it_drops() -> None:
    app = console([source := FakeSource()])
    async with app.run_test(size=LARGE) as pilot:
        for start in range(0, 1400, 100):
            source.current = replace(SERVING, log=tuple(f"12:00:00 line {i}" for i in range(start, start + 200)))
            await refreshed(app, pilot)
        panel = app.query_one(LogPanel)
        assert panel.scroller.text.split("\n")[-1].endswith("line 1499")
        assert panel.scroller.virtual_size.height == 1000


async def test_a_filter_shows_or_hides_lines() -> None:
    log = ("12:00:00 relay opened", "12:00:01 Engine loads", "12:00:02 relay closed [/broken")
    app = console([FakeSource(replace(SERVING, log=log))])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("/", *"RELAY")
        await pilot.pause()
        shown = app.query_one(LogPanel).scroller.text
        assert "opened" in shown
        assert "Engine" not in shown
        await pilot.press("home", "!")
        await pilot.pause()
        shown = app.query_one(LogPanel).scroller.text
        assert "Engine" in shown
        assert "opened" not in shown
        app.query_one("#log-filter", Input).value = "[/"
        await pilot.press("enter")
        await pilot.pause()
        assert "closed [/broken" in app.query_one(LogPanel).scroller.text
        assert "Log: [/" in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert "Engine" in app.query_one(LogPanel).scroller.text
        await pilot.press("escape")
        await pilot.pause()
        assert "SERVING" in screen_text(app)


async def test_each_node_has_its_own_log() -> None:
    sources = [FakeSource(replace(SERVING, name=name, log=(f"12:00:00 of {name}",))) for name in ("a", "b")]
    app = console(sources)
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        assert "of a" in app.query_one(LogPanel).scroller.text
        await pilot.press("2")
        await pilot.pause()
        assert app.query_one(LogPanel).scroller.text.strip() == "12:00:00 of b"


async def test_secrets_in_a_log_line_are_masked() -> None:
    line = "12:00:00 GET /api/expert-relay?session=a&token=abcdef123456"
    app = console([FakeSource(replace(SERVING, log=(line,)))])
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        assert "token=***" in screen_text(app)
        assert "abcdef123456" not in screen_text(app)


async def test_help_lists_every_key_with_its_id() -> None:
    app = console(several())
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        await pilot.press("?")
        await pilot.pause()
        assert isinstance(app.screen, TextScreen)
        shown = screen_text(app)
        for key, name, binding in (
            ("q ^q", "Quit", "quit"),
            ("c", "Claim", "claim"),
            ("1-4", "Select node", "select-1"),
            ("j ↓", "Next node", "next"),
            ("/", "Filter log", "filter"),
            ("r", "Read-only", "read-only"),
        ):
            row = next(row for row in shown.split("\n") if name in row)
            assert key in row
            assert binding in row
        await pilot.press("q")
        await pilot.pause()
        assert app.screen is app.dashboard


async def test_a_keymap_moves_a_key() -> None:
    app = console(several(), keymap={"next": "n", "graph": "x"})
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        await pilot.press("n")
        await pilot.pause()
        assert app.query_one("#header", Panel).text.split()[0] == "beta"
        await pilot.press("j")
        await pilot.pause()
        assert app.query_one("#header", Panel).text.split()[0] == "beta"


async def test_the_palette_offers_keys_and_nodes_but_no_screenshot() -> None:
    app = console(several())
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Theme", "Claim", "Log", "Quit", "Node 3: gamma"} <= titles
        assert not [title for title in titles if "creenshot" in title]
        await pilot.press(":")
        await pilot.pause()
        await pilot.press(*"gamma", "enter")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert app.query_one("#header", Panel).text.split()[0] == "gamma"


async def test_every_theme_can_draw_the_dashboard() -> None:
    app = console(several())
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        for theme in app.available_themes:
            app.theme = theme
            await pilot.pause()
            assert "SERVING" in screen_text(app)


async def test_no_color_leaves_no_hue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = console([FakeSource()])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        assert app.no_color
        drawn = app.export_screenshot()
        assert "SERVING" in drawn.replace("&#160;", " ")
    monkeypatch.setenv("NO_COLOR", "")
    assert not console([FakeSource()]).no_color


async def test_the_screen_can_change_its_size() -> None:
    app = console(several())
    async with app.run_test(size=LARGE) as pilot:
        await refreshed(app, pilot)
        await pilot.resize_terminal(*SMALL)
        await pilot.pause()
        assert app.query_one("#nodes").region.height == 1
        assert "SERVING" in screen_text(app)
        await pilot.resize_terminal(*LARGE)
        await pilot.pause()
        assert app.query_one("#nodes").region.height == 7
        assert app.query_one("#log-lines", Scroller).region.height > 3


async def test_money_that_is_not_known_offers_no_claim() -> None:
    app = console([FakeSource(replace(SERVING, earnings=EarningsView()))])
    async with app.run_test(size=SMALL) as pilot:
        await refreshed(app, pilot)
        assert not app.screen.active_bindings["c"].enabled


async def test_reading_goes_on_by_itself() -> None:
    source = FakeSource()
    app = ConsoleApp([source], clock=Clock(NOW_S), symbols=Symbols.BRAILLE, interval_s=0.001)
    async with app.run_test(size=SMALL) as pilot:
        while source.reads < 5:
            await pilot.pause()
        source.current = replace(SERVING, name="renamed")
        while "renamed" not in screen_text(app):
            await pilot.pause()


def test_a_console_needs_a_node() -> None:
    with pytest.raises(ValueError, match="nothing to show"):
        ConsoleApp([])
