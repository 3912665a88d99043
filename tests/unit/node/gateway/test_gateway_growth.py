"""What requests leave behind in a gateway: once its pools and caches are filled, nothing that grows with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway_parts import Gateway, ScriptedBackend, gateway
from growth import counted, forget_timers, grown

from kvasir_console.node.gateway.backends import BackendInfo

AT_ONCE = 8
WARM, MORE = 240, 400


async def requests(made: Gateway, count: int, first: int) -> None:
    async def one(number: int) -> None:
        body = {"model": "m", "prompt": f"hello {number}", "max_tokens": 16, "stream": number % 2 == 0}
        headers = {"Idempotency-Key": f"k{number}"} if number % 3 else {}
        assert (await made.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200

    for begin in range(first, first + count, AT_ONCE):
        await asyncio.gather(*(one(number) for number in range(begin, begin + AT_ONCE)))


async def test_nothing_of_a_request_stays_once_it_is_answered(tmp_path: Path) -> None:
    backend = ScriptedBackend(BackendInfo("m", "m"), texts=["word "] * 16, context=4096)
    async with gateway(tmp_path, [backend]) as made:
        await requests(made, WARM, 0)
        backend.requests.clear()
        await forget_timers()
        before = counted()
        await requests(made, MORE, WARM)
        await made.generations.idle()
        backend.requests.clear()
        await forget_timers()
        assert grown(before, counted(), MORE // 2) == {}
