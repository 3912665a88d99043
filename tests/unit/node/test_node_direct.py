"""Edges of a ring past the relay: two nodes' ends, each with an engine's socket, and uplinks that stand aside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from data_socket import Engine, Link

from kvasir_console.config import NodeConfig
from kvasir_console.errors import ConfigError
from kvasir_console.node import direct
from kvasir_console.node.direct import DirectEdges
from kvasir_console.relay.direct import Introduction
from kvasir_console.relay.wire.preamble import Kind, Preamble

from engines import until

GATEWAY = "https://127.0.1.1:8443"
TICKET = bytes(range(32))


@dataclass
class Standing:
    """An uplink, as far as it matters here."""

    aside: bool = False
    changes: int = 0

    def stand_aside(self) -> None:
        self.aside, self.changes = True, self.changes + 1

    def resume(self) -> None:
        self.aside, self.changes = False, self.changes + 1


@dataclass
class End:
    """One node: its edges, its engine, and the uplink of the edge 0."""

    edges: DirectEdges
    engine: Engine
    role: str
    uplink: Any = field(default_factory=Standing)

    async def told(self, introduction: Introduction) -> None:
        kind = Kind.RING_NEXT if self.role == "P" else Kind.RING_PREV
        name = f"ring/0/{self.role}"
        await self.edges.follow([introduction], {name: (Preamble(kind, name, epoch=1), self.uplink)})


@asynccontextmanager
async def two(directory: Path) -> AsyncIterator[tuple[End, End]]:
    """The predecessor, which dials, and the successor, which listens."""
    configs = (NodeConfig(direct=True), NodeConfig(direct=True, direct_listen="127.0.0.1:0"))
    names = ("P", "N")
    engines = [Engine(directory / f"{name}.data") for name in names]
    nodes = [DirectEdges(config, GATEWAY, engine.path) for config, engine in zip(configs, engines, strict=True)]
    async with engines[0], engines[1]:
        try:
            for each in nodes:
                await each.start()
            yield End(nodes[0], engines[0], "P"), End(nodes[1], engines[1], "N")
        finally:
            for each in nodes:
                await each.close()


def introduced(listener: End, ticket: bytes = TICKET) -> tuple[Introduction, Introduction]:
    said = listener.edges.announcement()
    assert said is not None
    return Introduction("ring", 0, "P", ticket, **said), Introduction("ring", 0, "N", ticket)


async def meet(before: End, after: End) -> tuple[Link, Link]:
    """The engines' ends of a new path, once each has heard the other, as with their HELLOs."""
    one, other = await before.engine.next_link(), await after.engine.next_link()
    for link in (one, other):
        link.writer.write(b"H")
    for link in (one, other):
        assert await link.reader.readexactly(1) == b"H"
    return one, other


async def test_an_edge_passes_by_while_both_uplinks_stand_aside(runtime: Path) -> None:
    async with two(runtime) as (before, after):
        assert before.edges.announcement() is None  # it listens to nobody
        dialler, listener = introduced(after)
        await after.told(listener)
        await before.told(dialler)
        one, other = await meet(before, after)
        assert (one.preamble.kind, other.preamble.kind) == (Kind.RING_NEXT, Kind.RING_PREV)
        assert (one.preamble.session, other.preamble.session) == ("ring/0/P", "ring/0/N")
        one.writer.write(b"forth")
        assert await other.reader.readexactly(5) == b"forth"
        other.writer.write(b"back")
        assert await one.reader.readexactly(4) == b"back"
        for end, sent, received in ((before, 6, 5), (after, 5, 6)):
            assert end.uplink.aside
            assert end.edges.live
            view = end.edges.view(f"ring/0/{end.role}")
            assert view is not None
            assert (view.bytes_up, view.bytes_down) == (sent, received)
        one.writer.close()  # an engine ends it: both go back to the relay
        await until(lambda: not before.uplink.aside and not after.uplink.aside)
        assert not before.edges.live
        assert after.edges.view("ring/0/N") is None


async def test_a_path_that_breaks_is_tried_again(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "Backoff", lambda: direct_backoff)
    from kvasir_console.relay.backoff import Backoff

    direct_backoff = Backoff(0.05, 0.1)
    async with two(runtime) as (before, after):
        dialler, listener = introduced(after)
        await before.told(dialler)
        await asyncio.sleep(0.2)  # refused so far: nobody told the other
        assert before.uplink.changes == 0
        await after.told(listener)
        for _ in range(3):
            _, other = await meet(before, after)
            other.writer.close()
        await until(lambda: before.uplink.changes >= 5)


async def test_another_plan_ends_what_was_introduced_before(runtime: Path) -> None:
    async with two(runtime) as (before, after):
        dialler, listener = introduced(after)
        await after.told(listener)
        await before.told(dialler)
        one, other = await meet(before, after)
        newer = introduced(after, bytes(32))
        await after.told(newer[1])
        assert await asyncio.wait_for(other.reader.read(), 120) == b""
        assert await asyncio.wait_for(one.reader.read(), 120) == b""
        await until(lambda: not before.uplink.aside and not after.uplink.aside)
        await before.told(newer[0])
        one, other = await meet(before, after)
        await before.edges.drop()
        assert await asyncio.wait_for(other.reader.read(), 120) == b""
        await until(lambda: not after.uplink.aside)


async def test_a_gateway_that_has_forgotten_an_address_ends_nothing(runtime: Path) -> None:
    async with two(runtime) as (before, after):
        dialler, listener = introduced(after)
        await before.told(replace(dialler, address="", certificate=""))  # nor does it begin anything
        await after.told(listener)
        await before.told(dialler)
        one, other = await meet(before, after)
        await before.told(replace(dialler, address="", certificate=""))
        one.writer.write(b"x")
        assert await other.reader.readexactly(1) == b"x"
        assert before.uplink.changes == 1
        await before.told(replace(dialler, certificate="ab" * 32))  # another node stands there now
        assert await asyncio.wait_for(other.reader.read(), 120) == b""


async def test_a_path_on_which_nobody_speaks_is_given_up_and_the_relay_kept_the_edge(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "HELLO_TIMEOUT_S", 0.2)
    async with two(runtime) as (before, after):
        dialler, listener = introduced(after)
        await after.told(listener)
        await before.told(dialler)
        one, other = await before.engine.next_link(), await after.engine.next_link()
        assert await asyncio.wait_for(one.reader.read(), 120) == b""
        assert await asyncio.wait_for(other.reader.read(), 120) == b""
        assert (before.uplink.changes, after.uplink.changes) == (0, 0)
        assert not before.edges.live


async def test_one_ticket_opens_few_doors(runtime: Path) -> None:
    async with two(runtime) as (before, after):
        dialler, listener = introduced(after)
        await after.told(listener)
        links = []
        for _ in range(direct.MAX_AT_ONCE):
            links.append(await direct.dial(dialler, loopback=True))
            await after.engine.next_link()
        with pytest.raises(direct.KvasirError, match="refuses"):
            await direct.dial(dialler, loopback=True)
        for link in links:
            await link.close()
        assert before.uplink.changes == 0


async def test_without_an_engine_the_relay_keeps_the_edge(runtime: Path) -> None:
    async with two(runtime) as (before, after):
        dialler, listener = introduced(after)
        await after.told(listener)
        broken = End(DirectEdges(NodeConfig(direct=True), GATEWAY, runtime / "gone.data"), before.engine, "P")
        await broken.told(dialler)
        await asyncio.sleep(0.3)
        assert broken.uplink.changes == 0
        await until(lambda: not after.uplink.aside)
        await broken.edges.close()


@pytest.mark.parametrize(
    "change",
    [
        {"direct": True, "direct_listen": "nowhere"},
        {"direct": True, "direct_listen": "127.0.0.1:0", "direct_address": "x:0"},
        {"direct": True, "direct_address": "node.example:443"},
        {"direct_listen": "127.0.0.1:0"},
    ],
)
def test_addresses_that_lead_nowhere_are_refused(runtime: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"node\.direct"):
        DirectEdges(replace(NodeConfig(), **change), GATEWAY, runtime / "x.data")


async def test_off_means_off(runtime: Path) -> None:
    edges = DirectEdges(NodeConfig(), GATEWAY, runtime / "x.data")
    await edges.start()
    assert (edges.enabled, edges.announcement(), edges.live) == (False, None, False)
    await edges.close()
