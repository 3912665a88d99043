"""Requests that nobody follows are kept for a while; whoever comes back in time goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvasir_console.engine.process.kept import MAX_KEPT, Kept

from engines import until


class Running:
    def __init__(self) -> None:
        self.cancelled = False

    async def follow(self, index: int) -> AsyncIterator[int]:
        yield index

    async def __aexit__(self, *_: object) -> None:
        self.cancelled = True


async def test_a_request_is_cancelled_once_nobody_comes_back() -> None:
    kept, running = Kept(keep_s=0.01), Running()
    kept.add(1, running)
    with kept.following(1):
        assert kept.get(1) is running
    await until(lambda: running.cancelled)
    assert kept.get(1) is None
    assert len(kept) == 0


async def test_who_follows_keeps_it_whatever_others_do() -> None:
    kept, running = Kept(keep_s=0), Running()
    kept.add(1, running)
    with kept.following(1):
        with kept.following(1):
            pass
        for _ in range(5):
            await asyncio.sleep(0)
        assert kept.get(1) is running
        assert not running.cancelled


async def test_who_comes_back_in_time_stops_the_clock() -> None:
    kept, running = Kept(keep_s=0.02), Running()
    kept.add(1, running)
    with kept.following(1):
        pass
    with kept.following(1):
        await asyncio.sleep(0.05)
        assert not running.cancelled
    await until(lambda: running.cancelled)


async def test_a_request_that_is_dropped_while_it_is_followed_is_gone_for_good() -> None:
    kept, first, second = Kept(keep_s=0), Running(), Running()
    kept.add(1, first)
    with kept.following(1):
        await kept.drop(1)
        assert first.cancelled
        kept.add(1, second)
    for _ in range(5):
        await asyncio.sleep(0)
    assert kept.get(1) is second
    assert not second.cancelled
    await kept.drop(2)  # nobody knows it


async def test_the_last_followers_word_cancels() -> None:
    kept, running = Kept(), Running()
    kept.add(1, running)
    with kept.following(1):
        with kept.following(1):
            await kept.give_up(1)
            assert not running.cancelled
        await kept.give_up(1)
        assert running.cancelled
    await kept.give_up(1)


async def test_of_very_many_the_oldest_that_nobody_follows_makes_room() -> None:
    kept = Kept()
    running = [Running() for _ in range(MAX_KEPT + 1)]
    for key, each in enumerate(running[:-1]):
        kept.add(key, each)
    with kept.following(0):
        kept.add(MAX_KEPT, running[-1])
        await until(lambda: running[1].cancelled)
        assert not running[0].cancelled
        assert len(kept) == MAX_KEPT
    kept.close()
    assert len(kept) == 0
