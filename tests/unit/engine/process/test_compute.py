"""The compute thread: one thing at a time, in order, and it knows when others wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from kvasir_console.engine.process.compute import Compute

from engines import until


@pytest.fixture
def compute() -> Iterator[Compute]:
    thread = Compute()
    yield thread
    thread.close()


async def test_work_runs_in_order_on_one_thread_without_autograd(compute: Compute) -> None:
    order: list[int] = []

    def work(number: int) -> tuple[str, bool]:
        order.append(number)
        return threading.current_thread().name, torch.is_inference_mode_enabled()

    results = await asyncio.gather(*(compute.run(lambda n=n: work(n)) for n in range(5)))
    assert order == list(range(5))
    assert len({name for name, _ in results}) == 1
    assert all(inference for _, inference in results)
    assert results[0][0] != threading.current_thread().name


async def test_how_long_work_has_computed_does_not_count_what_it_waits(compute: Compute) -> None:
    computing, go_on, waiting, end = (threading.Event() for _ in range(4))

    def step() -> None:
        computing.set()
        go_on.wait(60)
        with compute.released():
            waiting.set()
            end.wait(60)

    assert compute.computing_s == 0
    running = asyncio.create_task(compute.run(step))
    await asyncio.to_thread(computing.wait, 60)
    before = compute.computing_s
    await asyncio.sleep(0.01)
    assert compute.computing_s > before
    go_on.set()
    await asyncio.to_thread(waiting.wait, 60)
    assert compute.computing_s == 0
    end.set()
    await running


async def test_work_that_begins_after_a_pause_has_never_computed_for_as_long_as_the_pause(
    compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks may do so at any moment: the clock is where another thread may have its turn."""
    seen: list[float] = []

    class Clock:
        now = 0.0
        asked = False

        def monotonic(self) -> float:
            if not self.asked:
                self.asked = True
                seen.append(compute.computing_s)
                self.asked = False
            return self.now

    clock = Clock()
    monkeypatch.setattr("kvasir_console.engine.process.compute.time", clock)
    for clock.now in (0.0, 1000.0, 2000.0):
        await compute.run(lambda: None)
    assert len(seen) >= 3
    assert max(seen) == 0.0


async def test_work_that_comes_as_other_work_ends_stays_on_the_thread(compute: Compute) -> None:
    async def one_by_one() -> set[int]:
        return {await compute.run(threading.get_ident) for _ in range(300)}

    threads = await asyncio.gather(*(one_by_one() for _ in range(3)))
    assert len(set().union(*threads)) == 1


async def test_the_first_thread_takes_its_work_back_when_it_returns_from_waiting(compute: Compute) -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def step() -> int:
        with compute.released():
            waiting.set()
            go_on.wait(120)
        return threading.get_ident()

    first = asyncio.create_task(compute.run(step))
    await asyncio.to_thread(waiting.wait, 120)
    other = await compute.run(threading.get_ident)
    go_on.set()
    assert other != await first
    # The other may not have ended yet when the first piece of work comes; by the last it has.
    assert [await compute.run(threading.get_ident) for _ in range(50)][-1] == await first


async def test_an_error_reaches_who_asked(compute: Compute) -> None:
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    assert await compute.run(lambda: 1) == 1


async def test_long_work_sees_that_others_wait_also_after_some_have_given_up(compute: Compute) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def long() -> bool:
        begun.set()
        go_on.wait(120)
        return compute.wanted

    for impatient in (False, True):
        begun.clear()
        go_on.clear()
        first = asyncio.create_task(compute.run(long))
        await asyncio.to_thread(begun.wait, 120)
        assert not compute.wanted
        second = asyncio.create_task(compute.run(lambda: 2))
        await asyncio.sleep(0)
        assert compute.wanted
        if impatient:
            second.cancel()
            await asyncio.wait([second])
        go_on.set()
        assert await first is not impatient
        assert impatient or await second == 2
    assert not compute.wanted


async def test_others_compute_while_one_waits_for_a_network_and_it_goes_on_before_new_work(compute: Compute) -> None:
    order: list[str] = []
    waiting, arrived, midway = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        order.append("step")
        with compute.released():
            waiting.set()
            arrived.wait(120)
        order.append("step goes on")

    def other() -> None:
        order.append("other")
        arrived.set()
        midway.wait(120)
        order.append("other ends")

    first = asyncio.create_task(compute.run(step))
    await asyncio.to_thread(waiting.wait, 120)
    second = asyncio.create_task(compute.run(other))
    await asyncio.to_thread(arrived.wait, 120)
    third = asyncio.create_task(compute.run(lambda: order.append("new")))
    await until(lambda: compute._returning)  # the first thread has come back to wait for its turn
    midway.set()
    await asyncio.gather(first, second, third)
    assert order == ["step", "other", "other ends", "step goes on", "new"]


async def test_never_two_compute_at_once(compute: Compute) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def step() -> None:
        nonlocal inside, most
        for _ in range(20):
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1
            with compute.released():
                pass

    await asyncio.gather(*(compute.run(step) for _ in range(8)))
    assert most == 1
