from __future__ import annotations

import asyncio
import random
import struct
from contextlib import asynccontextmanager

import pytest
import uplink_parts
from relay_parts import RawClient, Table, digest, fill, frame, ring_target, until

from kvasir_console.errors import NetworkError
from kvasir_console.relay.wire import control

RING = "ring-a"
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10


@asynccontextmanager
async def relay(**options):
    table = Table()
    table.edge(RING, 0)
    table.edge(RING, 1)
    table.entry(RING)
    async with uplink_parts.relay(table, **options) as parts:
        yield parts


@pytest.fixture
async def network():
    async with relay() as parts:
        yield parts


def dial(port, edge, role):
    return RawClient.open(port, ring_target(RING, edge, role))


async def goodbye(client, code):
    await client.send(frame(CLOSE, struct.pack("!H", code)))


@pytest.mark.parametrize("first", ["P", "N"])
async def test_whichever_end_comes_first_waits_and_the_role_byte_reaches_the_other(network, first):
    hub, port = network
    second = {"P": "N", "N": "P"}[first]
    async with dial(port, 0, first) as early:
        await early.send(frame(BINARY, first.encode() + b"hello"))
        await early.send(frame(PING, b"still there?"))
        assert await early.receive() == (PONG, b"still there?")  # so what came before it has been read
        async with dial(port, 0, second) as late:
            await late.send(frame(BINARY, second.encode()))
            assert await late.receive_data(6) == first.encode() + b"hello"
            assert await early.receive_data(1) == second.encode()
            await late.send(frame(BINARY, b"and back"))
            assert await early.receive_data(8) == b"and back"
            counts = {count.key: (count.ws2tcp, count.tcp2ws) for count in hub.sessions()}
            assert counts == {f"{RING}/0/{first}": (6, 9), f"{RING}/0/{second}": (9, 6)}


async def test_edges_of_a_ring_are_joined_each_to_itself(network):
    _, port = network
    async with dial(port, 0, "P") as p0, dial(port, 1, "P") as p1, dial(port, 1, "N") as n1, dial(port, 0, "N") as n0:
        for client, hello in ((p0, b"P-edge0"), (p1, b"P-edge1"), (n1, b"N-edge1"), (n0, b"N-edge0")):
            await client.send(frame(BINARY, hello))
        assert await p0.receive_data(7) == b"N-edge0"
        assert await n0.receive_data(7) == b"P-edge0"
        assert await p1.receive_data(7) == b"N-edge1"
        assert await n1.receive_data(7) == b"P-edge1"


async def test_much_goes_both_ways_at_once(network):
    _, port = network
    down, up = random.Random(1).randbytes(8 * 2**20), random.Random(2).randbytes(8 * 2**20)

    async def send(client, data):
        for at in range(0, len(data), 2**18):
            await client.send(frame(BINARY, data[at : at + 2**18], mask=bytes(4)))

    async with dial(port, 0, "P") as predecessor, dial(port, 0, "N") as successor:
        await predecessor.send(frame(BINARY, b"P"))
        await successor.send(frame(BINARY, b"N"))
        _, _, got_down, got_up = await asyncio.gather(
            send(predecessor, down),
            send(successor, up),
            successor.receive_data(1 + len(down)),
            predecessor.receive_data(1 + len(up)),
        )
    assert digest(got_down) == digest(b"P" + down)
    assert digest(got_up) == digest(b"N" + up)


async def test_an_end_that_waits_is_held_to_a_bounded_amount():
    async with relay(hold_bytes=2**16) as (hub, port), dial(port, 0, "P") as early:
        await early.send(frame(BINARY, b"P"))
        accepted = await fill(early.writer, frame(BINARY, bytes(2**16), mask=bytes(4)), 512)
        assert hub.sessions()[0].ws2tcp == 0
        async with dial(port, 0, "N") as late:
            await late.send(frame(BINARY, b"N"))
            assert await late.receive_data(1 + accepted * 2**16) == b"P" + bytes(accepted * 2**16)


async def test_a_role_byte_other_than_the_dialled_role_is_1002(network):
    _, port = network
    async with dial(port, 0, "P") as client:
        await client.send(frame(BINARY, b"N"))
        assert await client.receive_close() == (1002, "the first byte is not the role this end dialled with")


async def test_an_end_that_never_says_its_role_is_1002():
    async with relay(role_timeout_s=0.05) as (_, port), dial(port, 0, "P") as client:
        assert await client.receive_close() == (1002, "no role byte came")


async def test_when_one_end_leaves_the_other_is_closed_so_that_both_dial_again(network):
    hub, port = network
    async with dial(port, 0, "P") as p, dial(port, 0, "N") as n:
        await p.send(frame(BINARY, b"P"))
        await n.send(frame(BINARY, b"N"))
        await n.receive_data(1)
        await goodbye(p, 1000)
        assert await n.receive_close() == (1001, "the other end left")
        await goodbye(n, 1001)
    await until(lambda: not any(count.connected for count in hub.sessions()))
    async with dial(port, 0, "N") as n, dial(port, 0, "P") as p:
        await n.send(frame(BINARY, b"N again"))
        await p.send(frame(BINARY, b"P again"))
        assert await n.receive_data(7) == b"P again"
        assert await p.receive_data(7) == b"N again"


async def test_an_end_that_leaves_while_it_waits_is_not_waited_for(network):
    hub, port = network
    async with dial(port, 0, "P") as gone:
        await gone.send(frame(BINARY, b"P gone"))
        await until(lambda: hub.sessions() and hub.sessions()[0].connected)
        gone.writer.transport.abort()
    await until(lambda: not hub.sessions()[0].connected)
    async with dial(port, 0, "N") as n, dial(port, 0, "P") as p:
        await n.send(frame(BINARY, b"N"))
        await p.send(frame(BINARY, b"P here"))
        assert await n.receive_data(6) == b"P here"


async def test_a_newer_end_replaces_the_older_and_its_peer_dials_again(network):
    _, port = network
    async with dial(port, 0, "P") as p, dial(port, 0, "N") as old:
        await p.send(frame(BINARY, b"P"))
        await old.send(frame(BINARY, b"N"))
        await old.receive_data(1)
        async with dial(port, 0, "N") as new:
            await new.send(frame(BINARY, b"N new"))
            assert await old.receive_close() == (1000, "replaced by a newer connection")
            await p.receive_data(1)
            assert await p.receive_close() == (1001, "the other end left")
            async with dial(port, 0, "P") as again:
                await again.send(frame(BINARY, b"P again"))
                assert await again.receive_data(5) == b"N new"
                assert await new.receive_data(7) == b"P again"


async def test_a_newer_end_replaces_one_that_waits(network):
    _, port = network
    async with dial(port, 0, "P") as old:
        await old.send(frame(BINARY, b"P old"))
        async with dial(port, 0, "P") as new:
            assert (await old.receive_close())[0] == 1000
            await new.send(frame(BINARY, b"P new"))
            async with dial(port, 0, "N") as n:
                await n.send(frame(BINARY, b"N"))
                assert await n.receive_data(5) == b"P new"


async def test_an_end_without_a_role_or_a_ring_nobody_knows_is_refused(network):
    _, port = network
    async with RawClient.open(port, ring_target("unknown", 0, "P")) as client:
        assert (await client.receive_close())[0] == 4404


async def test_the_gateway_talks_to_rank_0_through_the_entry(network):
    hub, port = network
    assert not hub.entry_connected(RING)
    opening = asyncio.create_task(hub.open_entry(RING, 10))
    async with dial(port, "entry", "N") as rank0:
        reader, writer = await opening
        assert hub.entry_connected(RING)
        await control.write_message(writer, {"id": 1, "verb": "info"})
        message = control.encode({"id": 1, "verb": "info"})
        assert await rank0.receive_data(len(message)) == message
        reply = control.encode({"id": 1, "ok": True})
        await rank0.send(frame(BINARY, reply[:3]) + frame(BINARY, reply[3:]))
        assert await control.read_message(reader) == {"id": 1, "ok": True}
        [count] = hub.sessions()
        assert (count.ws2tcp, count.tcp2ws) == (len(reply), len(message))
        writer.close()
        assert await rank0.receive_close() == (1001, "the other end left")
    await until(lambda: not hub.entry_connected(RING))


async def test_what_rank_0_says_before_the_gateway_comes_is_kept(network):
    hub, port = network
    async with dial(port, "entry", "N") as rank0:
        await rank0.send(frame(BINARY, b"early") + frame(PING, b""))
        assert await rank0.receive() == (PONG, b"")
        reader, writer = await hub.open_entry(RING, 10)
        assert await asyncio.wait_for(reader.readexactly(5), 120) == b"early"
        writer.close()


async def test_when_rank_0_leaves_the_gateway_reads_the_end(network):
    hub, port = network
    async with dial(port, "entry", "N") as rank0:
        reader, writer = await hub.open_entry(RING, 10)
        await rank0.send(frame(BINARY, b"bye"))
        await goodbye(rank0, 1000)
        assert await asyncio.wait_for(reader.read(), 120) == b"bye"
        writer.close()
    opening = asyncio.create_task(hub.open_entry(RING, 10))
    async with dial(port, "entry", "N") as rank0:
        reader, writer = await opening
        await rank0.send(frame(BINARY, b"back"))
        assert await asyncio.wait_for(reader.readexactly(4), 120) == b"back"
        writer.close()


async def test_an_entry_that_is_not_there_or_taken_says_so(network):
    hub, port = network
    with pytest.raises(NetworkError) as missing:
        await hub.open_entry(RING, 0.02)
    assert missing.value.code == "entry_not_connected"
    async with dial(port, "entry", "N"):
        _, writer = await hub.open_entry(RING, 10)
        with pytest.raises(NetworkError) as taken:
            await hub.open_entry(RING, 0.02)
        assert taken.value.code == "entry_in_use"
        writer.close()


async def test_two_who_open_one_entry_do_not_both_get_it(network):
    hub, port = network
    first, second = (asyncio.create_task(hub.open_entry(RING, 0.5)) for _ in range(2))
    async with dial(port, "entry", "N"):
        results = await asyncio.gather(first, second, return_exceptions=True)
    streams = [result for result in results if isinstance(result, tuple)]
    refused = [result for result in results if isinstance(result, NetworkError)]
    assert (len(streams), len(refused)) == (1, 1)
    streams[0][1].close()


async def test_a_hub_that_stops_does_not_leave_the_gateway_waiting(network):
    hub, _ = network
    opening = asyncio.create_task(hub.open_entry(RING, 60))
    await asyncio.sleep(0)
    await hub.close()
    with pytest.raises(NetworkError):
        await asyncio.wait_for(opening, 120)
