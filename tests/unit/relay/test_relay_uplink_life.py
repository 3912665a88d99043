"""An uplink's session in bad company: dead paths, busy engines, silence; and ranks that meet through two of them."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from relay_parts import Engine, Table, accept_upgrade, digest, echo, frame, until
from uplink_parts import SESSION, local_url, make, relay, running

from kvasir_console.relay import uplink as uplink_module
from kvasir_console.relay.hub import Refused
from kvasir_console.relay.tls import client_context
from kvasir_console.relay.uplink import UplinkPhase, ring_url


@pytest.fixture
def table(runtime):
    table = Table()
    table.expert(SESSION, runtime / "trunk.data")
    return table


async def test_waits_grow_until_something_was_received(runtime, table):
    waits = []

    def note(state):
        if state.phase is UplinkPhase.WAITING:
            waits.append(state.retry_in_s)

    class Least(random.Random):
        def random(self):
            return 0.0

    table.refusals[SESSION] = Refused(4404, "unknown session")
    options = {"redial_min_s": 0.02, "redial_max_s": 0.16, "on_change": note, "rng": Least(), "clock": lambda: 0.0}
    async with (
        Engine(runtime / "trunk.data", echo),
        Engine(runtime / "node.data") as node,
        relay(table) as (hub, port),
        running(make(local_url(port), runtime / "node.data", **options)),
    ):
        await until(lambda: len(waits) == 5)
        table.refusals.clear()
        while True:  # opening alone changes nothing: the session must have carried something
            link = await node.next_link()
            link.writer.write(b"x")
            if await link.reader.read(1) == b"x":
                break
        refused = len(waits)
        await hub.close_sessions(key=SESSION)
        await until(lambda: len(waits) > refused)
    assert waits[:5] == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.16])
    assert waits[refused] == pytest.approx(0.02)


class MuteRelay:
    """A relay that accepts, then neither says nor reads anything, or does as told."""

    def __init__(self, *, reads: bool, beats_s: float | None = None) -> None:
        self._reads = reads
        self._beats_s = beats_s
        self.connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        await accept_upgrade(reader, writer)
        self.connections += 1
        try:
            while True:
                if self._reads and self._beats_s is None:
                    if not await reader.read(65536):
                        break
                else:
                    await asyncio.sleep(self._beats_s or 0.05)
                    if self._beats_s is not None:
                        writer.write(frame(10, b"", mask=None))
                    if writer.is_closing():
                        break
        except ConnectionError:
            pass
        finally:
            writer.close()


async def test_a_dead_path_is_found_and_dialled_again(runtime):
    async with Engine(runtime / "node.data"), MuteRelay(reads=True) as mute:
        options = {"ping_interval_s": 0.05, "ping_timeout_s": 0.05}
        async with running(make(local_url(mute.port), runtime / "node.data", **options)) as uplink:
            await until(lambda: mute.connections >= 2)
            assert "no sign of life for 0.1 s" in uplink.snapshot().last_close.text
            assert uplink.snapshot().rtt_ms is None


async def test_a_node_that_did_not_get_its_turn_takes_no_relay_for_dead(runtime, table):
    options = {"ping_interval_s": 0.2, "ping_timeout_s": 0.2}
    async with (
        Engine(runtime / "trunk.data", echo),
        Engine(runtime / "node.data") as node,
        relay(table) as (_, port),
        running(make(local_url(port), runtime / "node.data", **options)) as uplink,
    ):
        link = await node.next_link()
        await until(lambda: uplink.snapshot().rtt_ms is not None)
        time.sleep(1.0)  # noqa: ASYNC251 - the whole process stands still, for longer than silence is borne
        await asyncio.sleep(0.3)  # the next ping and its answer
        link.writer.write(b"x")
        assert await link.reader.readexactly(1) == b"x"
        assert uplink.snapshot().connects == 1


async def test_a_relay_that_is_held_up_but_shows_signs_of_life_is_not_dead(runtime):
    async with Engine(runtime / "node.data"), MuteRelay(reads=False, beats_s=0.02) as mute:
        options = {"ping_interval_s": 0.25, "ping_timeout_s": 0.25}
        async with running(make(local_url(mute.port), runtime / "node.data", **options)) as uplink:
            await until(lambda: uplink.snapshot().phase is UplinkPhase.OPEN)
            await asyncio.sleep(1.5)  # three times as long as silence would be borne
            assert (uplink.snapshot().phase, mute.connections) == (UplinkPhase.OPEN, 1)


async def test_an_engine_that_is_busy_for_long_does_not_cost_the_session(runtime, table):
    data = random.Random(9).randbytes(24 * 2**20)
    options = {"ping_interval_s": 0.25, "ping_timeout_s": 0.25}
    async with (
        Engine(runtime / "trunk.data") as trunk,
        Engine(runtime / "node.data") as node,
        relay(table, ping_interval_s=0.25) as (hub, port),
        running(make(local_url(port), runtime / "node.data", **options)) as uplink,
    ):
        near, far = await node.next_link(), await trunk.next_link()

        async def send():
            for at in range(0, len(data), 2**18):
                far.writer.write(data[at : at + 2**18])
                await far.writer.drain()

        sending = asyncio.create_task(send())
        await until(lambda: uplink.snapshot().bytes_down > 0)
        await asyncio.sleep(1.5)  # three times as long as silence would be borne, on both sides
        assert not sending.done()
        assert uplink.snapshot().bytes_down < 2**20
        assert digest(await asyncio.wait_for(near.reader.readexactly(len(data)), 120)) == digest(data)
        await sending
        assert uplink.snapshot().connects == 1
        assert hub.sessions()[0].connects == 1


async def test_fragments_and_text_of_a_relay_are_one_stream(runtime):
    async def fragments(reader, writer):
        await accept_upgrade(reader, writer)
        writer.write(frame(1, b"te\xff", fin=True, mask=None))  # "text" that is no UTF-8 is data like any other
        writer.write(frame(2, b"a" * 70_000, fin=False, mask=None) + frame(0, b"", fin=False, mask=None))
        writer.write(frame(0, b"b", fin=False, mask=None))  # and the message never ends
        await reader.read()
        writer.close()

    server = await asyncio.start_server(fragments, "127.0.0.1", 0)
    async with (
        Engine(runtime / "node.data") as node,
        running(make(local_url(server.sockets[0].getsockname()[1]), runtime / "node.data")),
    ):
        link = await node.next_link()
        expected = b"te\xff" + b"a" * 70_000 + b"b"
        assert await asyncio.wait_for(link.reader.readexactly(len(expected)), 120) == expected
    server.close()


async def test_two_ring_ranks_meet_through_their_uplinks(runtime, tls_files):
    table = Table()
    table.edge("ring-a", 0)
    async with Engine(runtime / "a.data") as a, Engine(runtime / "b.data") as b, relay(table, tls_files) as (_, port):
        base, trust = f"https://localhost:{port}", {"ssl_context": client_context(tls_files.ca)}
        forward = make(ring_url(base, "ring-a", 0, "P"), runtime / "a.data", **trust)
        backward = make(ring_url(base, "ring-a", 0, "N"), runtime / "b.data", **trust)
        async with running(forward), running(backward):
            left, right = await a.next_link(), await b.next_link()
            left.writer.write(b"P" + b"frame 1")
            right.writer.write(b"N")
            assert await asyncio.wait_for(right.reader.readexactly(8), 120) == b"Pframe 1"
            assert await asyncio.wait_for(left.reader.readexactly(1), 120) == b"N"
            right.writer.close()  # a rank that restarts: both ends dial again, and meet again
            left, right = await a.next_link(), await b.next_link()
            left.writer.write(b"P")
            right.writer.write(b"N")
            assert await asyncio.wait_for(left.reader.readexactly(1), 120) == b"N"


async def test_a_session_stands_aside_for_another_path_and_comes_back(runtime, table, monkeypatch):
    monkeypatch.setattr(uplink_module, "ASIDE_AFTER_S", 0.2)
    phases = []
    async with (
        Engine(runtime / "trunk.data", echo) as trunk,
        Engine(runtime / "node.data") as node,
        relay(table) as (hub, port),
        running(
            make(local_url(port), runtime / "node.data", on_change=lambda each: phases.append(each.phase))
        ) as uplink,
    ):
        link = await node.next_link()
        await trunk.next_link()
        uplink.stand_aside()
        uplink.resume()  # the other path came to nothing: the session is the same
        await asyncio.sleep(0.4)
        link.writer.write(b"x")
        assert await link.reader.readexactly(1) == b"x"
        uplink.stand_aside()
        assert await asyncio.wait_for(link.reader.read(), 120) == b""
        await until(lambda: uplink.snapshot().phase is UplinkPhase.ASIDE)
        await until(lambda: not [each for each in hub.sessions() if each.connected])
        await asyncio.sleep(0.3)
        assert uplink.snapshot().connects == 1  # dialling again is not for now
        uplink.resume()
        link = await node.next_link()
        link.writer.write(b"y")
        assert await link.reader.readexactly(1) == b"y"
        uplink.stand_aside()
        await until(lambda: uplink.snapshot().phase is UplinkPhase.ASIDE)
    assert uplink.snapshot().phase is UplinkPhase.CLOSED  # and it can be closed from there
    assert UplinkPhase.WAITING not in phases
