"""Fifty kills of ledger, gateway, payout, work and node at random moments: the books and the chain agree exactly."""

from __future__ import annotations

from pathlib import Path

from money_parts import Money

KILLS = 50
PAUSE_S = 0.6


async def test_the_money_adds_up_after_fifty_kills(tmp_path: Path) -> None:
    async with Money(tmp_path) as money:
        await money.rampage(KILLS, PAUSE_S)
        await money.finish()
        await money.check()
    print(money.report.text())
    assert sum(money.report.killed.values()) == KILLS
    assert money.report.figures["micro-KVR credited"] > 0
