"""Hub and node count the same bytes, through real sockets that are cut in the middle and a hub that starts again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from relay_parts import TOKEN, WALLET, Engine, RawClient, Table, echo, expert_target, until

from kvasir_console.bench.links import Links
from kvasir_console.relay.authority import Refused
from kvasir_console.relay.counting import OwnCount, Tally
from kvasir_console.relay.front import Front
from kvasir_console.relay.hub import Hub
from kvasir_console.relay.uplink import Uplink, expert_url
from kvasir_console.relay.wire.preamble import Kind, Preamble

SESSION = "expert-node-1"


async def token(*, refresh: bool) -> str:
    return TOKEN


@asynccontextmanager
async def serving(table: Table, port: int = 0, restored: list[Tally] | None = None) -> AsyncIterator[tuple[Hub, int]]:
    hub = Hub(table, ping_interval_s=2.0)  # what a node received is confirmed by its pongs
    hub.restore(restored or [])
    async with Front(hub, Path("/nonexistent"), port=port) as front:
        try:
            yield hub, front.port
        finally:
            await hub.close()


@asynccontextmanager
async def dialling(port: int, engine: Path, count: OwnCount) -> AsyncIterator[Uplink]:
    uplink = Uplink(
        expert_url(f"http://127.0.0.1:{port}", SESSION),
        SESSION,
        token,
        token_in_header=True,
        ssl_context=None,
        engine_socket=engine,
        preamble=Preamble(Kind.EXPERTS, SESSION, WALLET, layer=3, begin=0, end=4),
        user_agent="kvasir-console/test",
        redial_min_s=0.02,
        redial_max_s=0.05,
        count=count,
    )
    task = asyncio.create_task(uplink.run())
    try:
        yield uplink
    finally:
        await uplink.close()
        await task


def agreed(hub: Hub, own: OwnCount) -> bool:
    counts = [each for each in hub.sessions() if each.key == SESSION]
    return bool(counts) and (counts[0].ws2tcp, counts[0].confirmed) == (own.total_up, own.total_down)


async def push(trunk: Engine, size: int) -> None:
    """Send over the next link until it breaks or its echo is complete."""
    link = await trunk.next_link()
    sending = asyncio.create_task(_send(link.writer, size))
    try:
        got = 0
        while got < size and (data := await link.reader.read(65536)):
            got += len(data)
    except ConnectionError:
        pass
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _send(writer: asyncio.StreamWriter, size: int) -> None:
    for _ in range(size // 10_000):
        writer.write(bytes(10_000))
        await writer.drain()


async def test_cuts_in_the_middle_of_frames_leave_both_ends_with_the_same_counts(runtime: Path) -> None:
    table, own = Table(), OwnCount()
    table.expert(SESSION, runtime / "trunk.data")
    async with (
        Engine(runtime / "trunk.data") as trunk,
        Engine(runtime / "node.data", echo),
        serving(table) as (hub, port),
        Links(seed=5) as links,
    ):
        through = await links.open("node", port, rtt_ms=2.0)
        async with dialling(through, runtime / "node.data", own) as uplink:
            for after in (300_001, 170_003, 90_007):
                await links.cut("node", direction="up", after_bytes=after)
                await push(trunk, 2_000_000)
            await push(trunk, 500_000)
            await until(lambda: agreed(hub, own))
            stats = (await links.stats())["node"]
            assert (stats["cuts"], uplink.snapshot().connects) == (3, 4)
        assert own.disputed == 0
        assert own.lost_up > 0  # something was on its way when the link broke, and it is in neither count
        assert own.total_up >= 500_000


async def test_counts_go_on_over_a_restart_of_the_hub(runtime: Path) -> None:
    table, own = Table(), OwnCount()
    table.expert(SESSION, runtime / "trunk.data")
    async with Engine(runtime / "trunk.data") as trunk, Engine(runtime / "node.data", echo):
        async with serving(table) as (hub, port), dialling(port, runtime / "node.data", own):
            await push(trunk, 100_000)
            await until(lambda: agreed(hub, own))
            written = [(each, json.dumps(each.state())) for each in hub.tallies()]
        restored = []
        for tally, state in written:
            restored.append(Tally(tally.key, tally.wallet))
            restored[-1].restore(json.loads(state))
        async with serving(table, restored=restored) as (hub, port), dialling(port, runtime / "node.data", own):
            await push(trunk, 50_000)
            await until(lambda: agreed(hub, own))
        assert (own.total_up, own.total_down) == (150_000, 150_000)


async def test_a_session_that_would_not_be_admitted_any_more_is_ended(runtime: Path) -> None:
    table = Table()
    table.expert(SESSION, runtime / "trunk.data")
    hub = Hub(table, recheck_s=0.02)
    async with (
        Engine(runtime / "trunk.data") as trunk,
        Front(hub, Path("/nonexistent"), port=0) as front,
        RawClient.open(front.port, expert_target(SESSION)) as node,
    ):
        await trunk.next_link()
        await until(lambda: len(table.asked) >= 3)  # asked again, admitted again, not disturbed
        assert hub.sessions()[0].connected
        table.refusals[SESSION] = Refused(1011, "no engine now")
        seen = len(table.asked)
        await until(lambda: len(table.asked) >= seen + 2)  # says nothing about the node
        assert hub.sessions()[0].connected
        table.refusals[SESSION] = Refused(4403, "no longer admitted")
        assert await node.receive_close() == (4403, "no longer admitted")
        await hub.close()


async def test_a_node_that_knows_no_counting_headers_is_served_all_the_same(runtime: Path) -> None:
    table = Table()
    table.expert(SESSION, runtime / "trunk.data")
    hub = Hub(table)
    async with (
        Engine(runtime / "trunk.data", echo),
        Front(hub, Path("/nonexistent"), port=0) as front,
        RawClient.open(front.port, expert_target(SESSION)) as node,
    ):
        assert b"Kvasir-Counted" not in node.answer
        assert b"Kvasir-Connection: " in node.answer
        await hub.close()
