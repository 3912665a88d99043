"""A thousand kills of ledger, gateway, payout, work and node at random moments; the report is printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import postgresql_server
from money_parts import Money

PAUSE_S = 0.6


@pytest.fixture(params=[("sqlite", 1000), ("postgresql", 200)], ids=lambda value: value[0])
def arena(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """The URL of an empty database, "" for SQLite, and how many kills."""
    name, kills = request.param
    if name == "sqlite":
        yield "", kills
        return
    if reason := postgresql_server.missing():
        pytest.skip(reason)
    server = postgresql_server.PostgresqlServer().start()
    yield server.url(), kills
    server.stop()


@pytest.mark.timeout(7200)
async def test_the_money_adds_up_after_a_thousand_kills(
    tmp_path: Path, arena: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    database, kills = arena
    async with Money(tmp_path, database) as money:
        await money.rampage(kills, PAUSE_S)
        await money.finish(timeout_s=1200)
        await money.check()
    with capsys.disabled():
        print(f"\n{money.report.text()}")
    assert sum(money.report.killed.values()) == kills
