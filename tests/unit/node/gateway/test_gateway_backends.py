"""A ring's rank 0 is another's machine: whatever it answers, the gateway goes on looking after it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir_console.engine.process.client import EngineClient, GenerateRequest
from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.backends import BackendInfo, RingBackend
from kvasir_console.relay.wire import control

from engines import until


class Hub:
    """Joins the gateway to a stream that this test writes."""

    def __init__(self) -> None:
        self.streams: list[asyncio.StreamReader] = []

    def entry_connected(self, ring_id: str) -> bool:
        return True

    async def open_entry(self, ring_id: str, timeout_s: float) -> Any:
        self.streams.append(asyncio.StreamReader())
        return self.streams[-1], Outward()


class Outward:
    """Where the gateway's questions go."""

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


def ring(hub: Any, **options: float) -> RingBackend:
    planned: Any = SimpleNamespace(plan=SimpleNamespace(ring="r", generation=1))
    return RingBackend(BackendInfo("m", "M"), planned, hub, **({"recover_s": -1.0} | options))


async def answered(hub: Hub, *messages: object) -> None:
    await until(lambda: hub.streams)
    for message in messages:
        hub.streams[-1].feed_data(message if isinstance(message, bytes) else control.encode(dict(message)))  # type: ignore[call-overload]


@pytest.mark.parametrize("tokens", [-1, -(10**9), 2**31, 10**40, float("inf"), "7" * 5000, None, [3]])
async def test_a_prompt_has_a_number_of_tokens_that_a_prompt_can_have(tokens: object) -> None:
    """What rank 0 counts is what every stage of the ring is paid by."""
    hub = Hub()
    backend = ring(hub)
    counting = asyncio.create_task(backend.count_tokens("abc", None))
    await answered(hub, {"id": 1, "ok": True, "tokens": tokens})
    with pytest.raises(KvasirError) as caught:
        await counting
    assert caught.value.code == "engine_misbehaved"
    await backend.close()


@pytest.mark.parametrize("identity", [[], {}, [1], "1", None, 1.5])
async def test_a_message_with_an_odd_id_answers_nobody_and_ends_nothing(identity: object) -> None:
    hub = Hub()
    backend = ring(hub)
    counting = asyncio.create_task(backend.count_tokens("abc", None))
    await answered(hub, {"id": identity, "ok": True, "tokens": 9}, {"id": 1, "ok": True, "tokens": 7})
    assert await counting == 7
    await backend.close()


async def test_a_rank_0_that_answers_nonsense_is_still_watched() -> None:
    """A watch that ended over one odd answer would miss that rank 0 hangs."""
    hub = Hub()
    backend = ring(hub, beat_s=0.001, silence_s=0.2)
    client = await backend.client()
    for number in range(1, 6):
        odd = [{"ok": True}, {"ok": True, "info": []}, {"error": 5}, {"ok": True, "info": None}][number % 4]
        await answered(hub, {"id": number, **odd})
        await asyncio.sleep(0.005)
    await until(lambda: client.closed)  # now it says nothing at all
    await backend.close()


async def test_a_stream_that_is_no_control_stream_ends_every_request() -> None:
    hub = Hub()
    backend = ring(hub)
    asking = asyncio.create_task(anext(backend.generate(GenerateRequest(prompt="abc"))))
    await answered(hub, b"\xff" * 64)
    with pytest.raises(KvasirError) as caught:
        await asking
    assert caught.value.code == "engine_gone"
    assert isinstance(await backend.client(), EngineClient)
    await backend.close()
