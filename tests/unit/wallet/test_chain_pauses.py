"""An RPC that asks for a pause."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from chain_parts import Monotonic, endpoints, slot_of

from kvasir_console.wallet.chain_errors import MAX_RETRY_AFTER_S, RateLimitedError

from ledger_process import LedgerProcess, Refusal, RpcProxy


def limited(times: int, header: str = "", status: int = 429) -> Callable[[str], Refusal | None]:
    """The first ``times`` requests are asked to wait."""
    left = iter(range(times))
    refusal = Refusal(status, {"Retry-After": header} if header else {})
    return lambda _method: None if next(left, None) is None else refusal


@pytest.mark.parametrize("status", [429, 503])
async def test_a_pause_that_is_asked_for_is_made(process: LedgerProcess, status: int) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(2, "7", status)) as proxy:
        several = endpoints(clock, process, proxy.url)
        assert await slot_of(several) >= 0
        assert clock.pauses == [7.0, 7.0]
        assert len(proxy.calls) == 3
        await several.close()


async def test_without_a_header_the_pauses_grow(process: LedgerProcess) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(4)) as proxy:
        several = endpoints(clock, process, proxy.url)
        await slot_of(several)
        assert clock.pauses == [1.0, 2.0, 4.0, 8.0]
        await several.close()


async def test_a_pause_can_be_given_as_a_date(process: LedgerProcess) -> None:
    clock = Monotonic()
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    async with RpcProxy(process.url, gate=limited(1, date)) as proxy:
        several = endpoints(clock, process, proxy.url)
        await slot_of(several)
        assert 5 < clock.pauses[0] <= 20
        await several.close()


async def test_a_long_pause_is_told_and_kept_meanwhile(process: LedgerProcess) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(1, "120")) as proxy:
        several = endpoints(clock, process, proxy.url)
        for _ in range(2):
            with pytest.raises(RateLimitedError) as error:
                await slot_of(several)
            assert error.value.retry_after_s == 120
            assert "120 seconds" in error.value.hint
        assert len(proxy.calls) == 1  # the second question did not reach it
        clock.now_s += 121
        assert await slot_of(several) >= 0
        assert clock.pauses == []
        await several.close()


@pytest.mark.parametrize("header", ["-5", "soon", "1e9", "Mon, 99 Foo 2099 99:99:99 GMT"])
async def test_a_pause_that_makes_no_sense_is_a_short_one(process: LedgerProcess, header: str) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(1, header)) as proxy:
        several = endpoints(clock, process, proxy.url)
        await slot_of(several)
        assert clock.pauses == [1.0]
        await several.close()


async def test_a_pause_is_bounded(process: LedgerProcess) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(1, "9" * 400)) as proxy:
        several = endpoints(clock, process, proxy.url)
        with pytest.raises(RateLimitedError) as error:
            await slot_of(several)
        assert error.value.retry_after_s == MAX_RETRY_AFTER_S
        await several.close()


async def test_while_one_pauses_the_other_answers(process: LedgerProcess, public: RpcProxy) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(10**6, "30")) as first:
        several = endpoints(clock, process, first.url, public.url)
        for _ in range(5):
            await slot_of(several)
        assert clock.pauses == []
        assert len(first.calls) == 1
        await several.close()
