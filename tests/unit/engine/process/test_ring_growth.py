"""What requests leave behind in the ranks of a ring, lost edges included: nothing that grows with their number."""

from __future__ import annotations

import asyncio
import logging

import pytest
from growth import counted, forget_timers, grown
from test_ring_faults import SIZE, Answer, Network, prompt

from kvasir_console.engine.process import ring

from engines import until

WARM, MORE = 40, 120


async def answered(network: Network, count: int, first: int) -> None:
    for number in range(first, first + count):
        answer = Answer(1 + number, prompt(number, 1 + number % 40), 12, "on" if number % 2 else "off")
        answer.begin()
        network.scheduler.submit(answer)
        await network.cut(number % SIZE)
        await network.mend()
        await answer.over.wait()
        assert answer.error is None


async def at_rest(network: Network) -> None:
    """A release that was lost with its edge is made up for by the second ROLL."""
    await until(lambda: not any(len(node.window) for node in network.nodes))
    await forget_timers()


async def run() -> dict[str, int]:
    network = Network()
    for edge in range(SIZE):
        await network.join(edge)
    try:
        await answered(network, WARM, 0)
        await at_rest(network)
        before = counted()
        await answered(network, MORE, WARM)
        await at_rest(network)
        return grown(before, counted(), MORE)
    finally:
        await network.close()


def test_nothing_of_a_request_stays_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "ROLL_S", 0.05)
    monkeypatch.setattr(ring, "TEND_S", 0.01)
    logging.disable(logging.CRITICAL)  # pytest keeps every record
    try:
        assert asyncio.run(run()) == {}
    finally:
        logging.disable(logging.NOTSET)
