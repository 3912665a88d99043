"""A running node's money: in which order it is looked at, and when it is claimed without being asked for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kvasir_console.errors import KvasirError, LedgerError, NetworkError, WalletError
from kvasir_console.node.earnings import Earnings
from kvasir_console.node.journal import Journal


class Money:
    """Everything that money is asked of, in one; ``done`` says in which order."""

    session_key = "the session key"

    def __init__(self, *, claimable: bool = True, locked: bool = False, auto_claim: bool = True) -> None:
        self.claimable, self.locked = claimable, locked
        self.done: list[str] = []
        self.refusals: dict[str, KvasirError] = {}
        self.journal = Journal(lambda: None)
        parts: list[Any] = [_Part(self, name) for name in ("accounts", "statements", "work", "wallet")]
        accounts, statements, work, wallet = parts
        self.earnings = Earnings(
            accounts, statements, work, self, wallet, self.journal, pause_s=0.0, auto_claim=auto_claim
        )

    async def with_token(self, call: Any) -> Any:
        return await call("token")

    async def rounds(self, count: int) -> None:
        running = asyncio.create_task(self.earnings.run())
        async with asyncio.timeout(30):
            while self.done.count("wallet.refresh") <= count:  # noqa: ASYNC110 - the loop sets no event
                await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class _Part:
    def __init__(self, money: Money, name: str) -> None:
        self._money, self._name = money, name

    @property
    def claimable(self) -> bool:
        return self._money.claimable

    @property
    def locked(self) -> bool:
        return self._money.locked

    def __getattr__(self, verb: str) -> Any:
        async def act(*arguments: Any) -> dict[str, Any]:
            name = f"{self._name}.{verb}"
            self._money.done.append(name)
            if verb == "agree":
                assert arguments[-1] == Money.session_key
            if name in self._money.refusals:
                raise self._money.refusals[name]
            return {"micro_kvr": 12_779}

        return act


LOOKED = ["wallet.refresh", "accounts.refresh", "statements.fetch", "work.sample", "statements.agree"]


async def test_what_is_stated_is_compared_with_counts_that_are_no_older() -> None:
    money = Money(auto_claim=False)
    await money.rounds(1)
    assert money.done[: len(LOOKED) + 1] == [*LOOKED, "wallet.refresh"]
    assert money.journal.lines == ()


@pytest.mark.parametrize(
    ("settings", "claims"),
    [({}, 1), ({"auto_claim": False}, 0), ({"claimable": False}, 0), ({"locked": True}, 0)],
)
async def test_what_may_be_claimed_is_claimed_by_itself_if_the_owner_wants_that(
    settings: dict[str, bool], claims: int
) -> None:
    money = Money(**settings)
    await money.rounds(1)
    assert money.done[: money.done.index("wallet.refresh", 1)].count("accounts.claim") == claims
    assert [line.split(" ", 1)[1] for line in money.journal.lines[:1]] == ["Claimed 12779 micro-KVR."] * claims


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ("wallet.refresh", WalletError("signer_gone", "It ended.")),
        ("accounts.refresh", NetworkError("gateway_unreachable", "Nobody.")),
        ("accounts.claim", LedgerError("claim_refused", "No.")),
    ],
)
async def test_what_fails_is_looked_at_again(failing: str, error: KvasirError) -> None:
    money = Money()
    money.refusals = {failing: error}
    await money.rounds(3)
    assert money.done.count("wallet.refresh") > 2
    assert ("statements.fetch" in money.done) is (failing != "accounts.refresh")


async def test_a_claim_that_was_asked_for_is_noted_or_its_refusal_told() -> None:
    money = Money(locked=True)
    assert (await money.earnings.claim())["micro_kvr"] == 12_779
    money.refusals = {"accounts.claim": LedgerError("nothing_to_claim", "Nothing.")}
    with pytest.raises(LedgerError):
        await money.earnings.claim()
    assert len(money.journal.lines) == 1
