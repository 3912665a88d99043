"""What the uplink's tests share: a relay in this process, and an uplink that dials it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

from relay_parts import TOKEN, WALLET

from kvasir_console.relay.front import Front
from kvasir_console.relay.hub import Hub
from kvasir_console.relay.tls import server_context
from kvasir_console.relay.uplink import Uplink, expert_url
from kvasir_console.relay.wire.preamble import Kind, Preamble

SESSION = "expert-node-1"
NODE_PREAMBLE = Preamble(Kind.EXPERTS, SESSION, WALLET, layer=3, begin=0, end=4)


class Tokens:
    """A token provider that remembers how it was asked."""

    def __init__(self, *tokens: str) -> None:
        self._tokens = list(tokens)
        self.asked: list[bool] = []

    async def __call__(self, *, refresh: bool) -> str:
        self.asked.append(refresh)
        if refresh and len(self._tokens) > 1:
            self._tokens.pop(0)
        return self._tokens[0]


@asynccontextmanager
async def relay(table, tls=None, port=0, **options):
    patient = {"admission_timeout_s": 60.0, "engine_timeout_s": 60.0, "role_timeout_s": 60.0}
    hub = Hub(table, **{**patient, **options})
    context = server_context(tls.cert, tls.key) if tls is not None else None
    async with Front(hub, Path("/nonexistent"), port=port, tls=context) as front:
        try:
            yield hub, front.port
        finally:
            await hub.close()


@asynccontextmanager
async def running(uplink):
    """An uplink that runs, and is closed at the end."""
    task = asyncio.create_task(uplink.run())
    try:
        yield uplink
    finally:
        await asyncio.wait_for(uplink.close(), 120)
        await task


def make(url, engine, *, token=None, **options):
    settings = {
        "token_in_header": True,
        "ssl_context": None,
        "engine_socket": engine,
        "preamble": NODE_PREAMBLE,
        "user_agent": "kvasir-console/test",
        "redial_min_s": 0.02,
        "redial_max_s": 0.05,
        "open_timeout_s": 60.0,
        "engine_timeout_s": 60.0,
    }
    return Uplink(url, SESSION, token or Tokens(TOKEN), **{**settings, **options})


def local_url(port):
    return expert_url(f"http://127.0.0.1:{port}", SESSION)
