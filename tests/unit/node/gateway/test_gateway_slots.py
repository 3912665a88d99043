"""The admission queue: never more at once than allowed, first come first served, and no slot lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvasir_console.node.gateway.slots import BusyError, Slots


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_slots_are_given_in_the_order_of_asking() -> None:
    slots, order, gate = Slots(1, 5, 60.0), [], asyncio.Event()

    async def work(number: int) -> None:
        async with slots.hold():
            order.append(number)
            await gate.wait()

    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(work(number)))
        await _settle()
    assert (order, slots.waiting) == ([0], 3)
    gate.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    slots, gate = Slots(1, 1, 60.0), asyncio.Event()

    async def work() -> None:
        async with slots.hold():
            await gate.wait()

    tasks = [asyncio.create_task(work()) for _ in range(2)]
    await _settle()
    with pytest.raises(BusyError) as caught:
        await work()
    assert caught.value.retry_after_s == 5
    gate.set()
    await asyncio.gather(*tasks)


async def test_a_wait_that_is_too_long_ends_and_frees_its_place() -> None:
    slots = Slots(1, 1, 0.0)
    async with slots.hold():
        with pytest.raises(BusyError) as caught:
            async with slots.hold():
                raise AssertionError("two at once")
        assert caught.value.retry_after_s == 10
        assert slots.waiting == 0
    async with slots.hold():
        assert slots.waiting == 0


async def test_whoever_leaves_while_waiting_gives_up_the_place() -> None:
    slots, gate = Slots(1, 1, 60.0), asyncio.Event()

    async def work() -> None:
        async with slots.hold():
            await gate.wait()

    first, second = asyncio.create_task(work()), asyncio.create_task(work())
    await _settle()
    second.cancel()
    await _settle()
    assert slots.waiting == 0
    third = asyncio.create_task(work())
    await _settle()
    assert slots.waiting == 1
    gate.set()
    await asyncio.gather(first, third)


async def test_a_slot_that_comes_in_the_moment_of_leaving_is_passed_on() -> None:
    slots = Slots(1, 5, 60.0)
    holder = slots.hold()
    await holder.__aenter__()

    async def work() -> None:
        async with slots.hold():
            pass

    leaving, waiting = asyncio.create_task(work()), asyncio.create_task(work())
    await _settle()
    await holder.__aexit__(None, None, None)  # the slot goes to the first ...
    leaving.cancel()  # ... who leaves before it could run
    await asyncio.wait_for(waiting, 120)
    async with asyncio.timeout(120), slots.hold():
        assert slots.waiting == 0


@pytest.mark.parametrize("seed", range(5))
async def test_under_random_leaving_no_slot_is_lost_or_doubled(seed: int) -> None:
    rng, slots, inside, most = random.Random(seed), Slots(3, 8, 60.0), 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with slots.hold():
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    tasks: list[asyncio.Task[None]] = []
    for _ in range(200):
        tasks.append(asyncio.create_task(work()))
        await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks[-12:]).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most <= 3
    # All three are free again.
    async with slots.hold(), slots.hold(), slots.hold():
        assert slots.waiting == 0
