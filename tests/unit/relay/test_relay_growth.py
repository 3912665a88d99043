"""What broken sessions leave behind in front, hub and uplink, TLS included: nothing that grows with their number."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from growth import counted, forget_timers, grown
from relay_parts import Engine, Table, echo
from uplink_parts import SESSION, make, relay, running

from kvasir_console.relay.counting import OwnCount
from kvasir_console.relay.hub import Hub
from kvasir_console.relay.tls import client_context
from kvasir_console.relay.uplink import Uplink, expert_url

from tls import TlsFiles

WARM, MORE = 30, 200


@pytest.fixture
def unlogged() -> Iterator[None]:
    """pytest keeps every log record: that would be what grows."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def sessions(count: int, hub: Hub, uplink: Uplink, trunk: Engine, node: Engine, table: Table) -> None:
    """Each carries something both ways, then the hub ends it and the uplink dials again."""
    for _ in range(count):
        link = await trunk.next_link()
        link.writer.write(b"x" * 5000)
        assert await link.reader.readexactly(5000)
        while not node.links.empty():
            node.links.get_nowait()
        table.asked.clear()
        await hub.close_sessions(key=SESSION)
        assert await link.reader.read() == b""
        link.writer.close()


@pytest.mark.usefixtures("unlogged")
async def test_nothing_of_a_session_stays_once_it_is_over(runtime: Path, tls_files: TlsFiles) -> None:
    table = Table()
    table.expert(SESSION, runtime / "trunk.data")
    async with (
        Engine(runtime / "trunk.data") as trunk,
        Engine(runtime / "node.data", echo) as node,
        relay(table, tls_files) as (hub, port),
    ):
        url = expert_url(f"https://localhost:{port}", SESSION)
        quick = {"redial_min_s": 0.01, "redial_max_s": 0.01, "count": OwnCount()}
        uplink = make(url, runtime / "node.data", ssl_context=client_context(tls_files.ca), **quick)
        async with running(uplink):
            await sessions(WARM, hub, uplink, trunk, node, table)
            await forget_timers()
            before = counted()
            await sessions(MORE, hub, uplink, trunk, node, table)
            await forget_timers()
            assert grown(before, counted(), MORE) == {}
