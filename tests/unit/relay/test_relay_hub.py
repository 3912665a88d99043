from __future__ import annotations

import asyncio
import logging
import random
import struct
import time
import tracemalloc

import pytest
from relay_parts import (
    TOKEN,
    WALLET,
    Engine,
    RawClient,
    Table,
    accept_key,
    digest,
    echo,
    expert_target,
    fill,
    frame,
    until,
)
from uplink_parts import relay
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from kvasir_console.errors import LedgerError
from kvasir_console.relay import hub as hub_module
from kvasir_console.relay.counting import Tally
from kvasir_console.relay.hub import Refused
from kvasir_console.relay.wire.preamble import Kind, Preamble

SESSION = "expert-node-1"
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


@pytest.fixture
async def network(runtime):
    """A hub with one expert session that ends in an echoing engine."""
    table = Table()
    table.expert(SESSION, runtime / "e.data")
    async with Engine(runtime / "e.data", echo) as engine, relay(table) as (hub, port):
        yield hub, port, engine, table


def test_the_accept_key_vector_of_rfc_6455():
    assert accept_key(RawClient.KEY) == RawClient.ACCEPT


async def test_the_101_carries_the_accept_key_and_neither_extension_nor_subprotocol(network):
    _, port, _, _ = network
    wishes = ("Sec-WebSocket-Extensions: permessage-deflate", "Sec-WebSocket-Protocol: chat")
    async with RawClient.open(port, expert_target(SESSION), wishes) as client:
        assert client.answer.startswith(b"HTTP/1.1 101 ")
        assert f"Sec-WebSocket-Accept: {RawClient.ACCEPT}".encode() in client.answer
        assert b"Extensions" not in client.answer
        assert b"Protocol:" not in client.answer


async def test_the_engine_is_told_first_whose_bytes_follow(network):
    _, port, engine, _ = network
    async with RawClient.open(port, expert_target(SESSION)):
        link = await engine.next_link()
    assert link.preamble == Preamble(Kind.DISPATCH, SESSION, WALLET, layer=3, begin=0, end=4)


async def test_the_masked_frames_of_rfc_6455_become_a_byte_stream_and_come_back_unmasked(network):
    _, port, _, _ = network
    async with RawClient.open(port, expert_target(SESSION)) as client:
        # Section 5.7: a masked text "Hello"; then the same as binary, in fragments, with a ping in between.
        await client.send(bytes.fromhex("818537fa213d7f9f4d5158"))
        assert await client.receive_data(5) == b"Hello"
        await client.send(
            frame(TEXT, b"Hel", fin=False) + frame(PING, b"p") + frame(0, b"", fin=False) + frame(0, b"lo")
        )
        received, pongs = b"", []
        while len(received) < 5 or not pongs:
            opcode, payload = await client.receive()
            if opcode == PONG:
                pongs.append(payload)
            else:
                received += payload
        assert (received, pongs) == (b"Hello", [b"p"])


@pytest.mark.parametrize("size", [125, 126, 127, 65535, 65536, 65537, 200_000, 1_000_003])
async def test_frames_of_every_length_encoding_arrive_whole(network, size):
    _, port, _, _ = network
    data = random.Random(size).randbytes(size)
    async with RawClient.open(port, expert_target(SESSION)) as client:
        await client.send(frame(BINARY, data))
        assert digest(await client.receive_data(size)) == digest(data)


async def test_one_message_may_be_longer_than_any_frame_may_be(runtime):
    table = Table()
    table.expert(SESSION, runtime / "e.data")
    async with (
        Engine(runtime / "e.data", echo),
        relay(table, max_frame_bytes=1000) as (_, port),
        RawClient.open(port, expert_target(SESSION)) as client,
    ):
        await client.send(frame(BINARY, b"a" * 1000, fin=False))
        for _ in range(20):
            await client.send(frame(0, b"b" * 1000, fin=False))
        assert await client.receive_data(21_000) == b"a" * 1000 + b"b" * 20_000


async def test_an_unmasked_frame_ends_the_session_with_1002(network):
    _, port, _, _ = network
    async with RawClient.open(port, expert_target(SESSION)) as client:
        await client.send(frame(BINARY, b"hello", mask=None))
        code, _ = await client.receive_close()
        assert code == 1002


async def test_a_frame_over_16_mib_ends_the_session_with_1009_before_it_is_read(network):
    hub, port, _, _ = network
    async with RawClient.open(port, expert_target(SESSION)) as client:
        await client.send(frame(BINARY, b"only the beginning", length=16 * 2**20 + 1))
        code, _ = await client.receive_close()
        assert code == 1009
    await until(lambda: not hub.sessions()[0].connected)
    assert hub.sessions()[0].last_close[0] == 1009
    assert hub.sessions()[0].ws2tcp == 0


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (expert_target(SESSION, "wrong"), 4401),
        (f"/api/expert-relay?session={SESSION}", 4401),
        (expert_target("nobody"), 4404),
        (expert_target("foreign"), 4403),
        (expert_target("idle"), 1011),
        (expert_target("nowhere"), 1011),
        (expert_target(SESSION) + "&session=other", 1002),
    ],
)
async def test_refusals_are_close_codes_after_the_101(network, runtime, target, code):
    _, port, _, table = network
    table.refusals["foreign"] = Refused(4403, "this name belongs to another wallet")
    table.expert("idle", runtime / "nobody-listens.data")
    table.expert("nowhere", None)
    async with RawClient.open(port, target) as client:
        assert client.answer.startswith(b"HTTP/1.1 101 ")
        assert (await client.receive_close())[0] == code
        await client.send(frame(CLOSE, struct.pack("!H", code)))
        assert await client.reader.read() == b""


async def test_an_authority_that_fails_or_dawdles_is_1011(runtime):
    class Broken:
        def __init__(self) -> None:
            self.waits = False

        async def admit(self, path, query, token):
            if self.waits:
                await asyncio.Event().wait()
            raise RuntimeError("the store is gone")

    broken = Broken()
    async with relay(broken, admission_timeout_s=0.05) as (_, port):
        for broken.waits in (False, True):
            async with RawClient.open(port, expert_target(SESSION)) as client:
                assert (await client.receive_close())[0] == 1011


async def test_the_token_comes_from_the_header_first_and_is_never_part_of_the_query(network):
    _, port, _, table = network
    async with RawClient.open(port, expert_target(SESSION, "wrong"), (f"Authorization: Bearer {TOKEN}",)):
        pass
    async with RawClient.open(port, expert_target(SESSION)):
        pass
    await until(lambda: len(table.asked) == 2)
    assert table.asked == 2 * [("/api/expert-relay", {"session": SESSION}, TOKEN)]


async def test_an_upgrade_that_is_none_is_answered_with_http(network):
    _, port, _, _ = network
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET {expert_target(SESSION)} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Key: c2hvcnQ=\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_a_wallet_cannot_fill_the_books_with_names(network, runtime, monkeypatch):
    hub, port, _, table = network
    monkeypatch.setattr(hub_module, "MAX_NAMES", 3)
    hub.restore([Tally("expert-of-before", WALLET), Tally("expert-1", "another wallet")])
    for name in ("expert-1", "expert-2"):
        table.expert(name, runtime / "e.data")
    table.expert("expert-3", runtime / "e.data", wallet="another wallet")
    for name, code in ((SESSION, None), ("expert-1", None), ("expert-2", 4403), ("expert-3", None), (SESSION, None)):
        async with RawClient.open(port, expert_target(name)) as client:
            if code is not None:
                assert (await client.receive_close())[0] == code
                continue
            await client.send(frame(BINARY, b"x"))
            assert await client.receive_data(1) == b"x"
    assert len([each for each in hub.sessions() if each.wallet == WALLET]) == 3


class Written:
    """The books at the seam ``hub.Books``: what was written of each session, and whether they can be read."""

    def __init__(self):
        self.states, self.readable = {}, True

    def write(self, tally):
        self.states[tally.wallet, tally.key] = tally.state()

    def has(self, tally):
        return self.states.get((tally.wallet, tally.key)) == tally.state()

    async def names(self, wallet):
        if not self.readable:
            raise LedgerError("store_busy", "The database is busy.")
        return {key for owner, key in self.states if owner == wallet}

    async def recall(self, wallet, key):
        if not self.readable:
            raise LedgerError("store_busy", "The database is busy.")
        if (wallet, key) not in self.states:
            return None
        tally = Tally(key, wallet)
        tally.restore(self.states[wallet, key])
        return tally


async def carry(hub, port, *names):
    """A byte over each of these sessions, one after the other."""
    for name in names:
        async with RawClient.open(port, expert_target(name)) as client:
            await client.send(frame(BINARY, b"x"))
            await client.receive_data(1)
        await until(lambda name=name: not any(each.connected for each in hub.sessions() if each.key == name))


async def test_the_memory_holds_so_many_sessions_and_the_books_hold_the_others(network, runtime, monkeypatch):
    hub, port, _, table = network
    monkeypatch.setattr(hub_module, "MAX_TALLIES", 2)
    monkeypatch.setattr(hub_module, "QUIET_S", 0)
    monkeypatch.setattr(hub_module, "MAX_NAMES", 3)
    books = Written()
    for name, wallet in (("one", WALLET), ("two", WALLET), ("three", WALLET), ("four", WALLET), ("fifth", "another")):
        table.expert(name, runtime / "e.data", wallet=wallet)
    await carry(hub, port, "one", "two")
    async with RawClient.open(port, expert_target("fifth")):
        await until(lambda: any(each.connected for each in hub.sessions()))
        await carry(hub, port, "three")
        assert hub.trim(books.has) == []  # nobody keeps books
        hub.books = books
        assert hub.trim(books.has) == []  # nothing is written
        for tally in hub.tallies():
            books.write(tally)
        assert hub.trim(books.has) == [(WALLET, "one"), (WALLET, "two")]
        assert [each.key for each in hub.sessions()] == ["fifth", "three"]
        # What was let go of goes on where it stood, and still counts against its wallet.
        await carry(hub, port, "one")
        assert {each.key: each.ws2tcp for each in hub.sessions()} == {"fifth": 0, "one": 2, "three": 1}
        books.write(next(each for each in hub.tallies() if each.key == "one"))
        assert hub.trim(books.has) == [(WALLET, "three")]
        async with RawClient.open(port, expert_target("four")) as client:
            assert (await client.receive_close())[0] == 4403
        # Nor are the names kept of a wallet that is only turned away: they are in the books.
        books.states |= {("third", name): {} for name in ("1", "2", "3")}
        table.expert("seventh", runtime / "e.data", wallet="third")
        async with RawClient.open(port, expert_target("seventh")) as client:
            assert (await client.receive_close())[0] == 4403
        assert hub.trim(books.has) == []
        assert set(hub._names) == {WALLET, "another"}
        # Rather nobody is served than somebody whose counts begin anew.
        books.readable = False
        async with RawClient.open(port, expert_target("two")) as client:
            assert (await client.receive_close())[0] == 1011
        books.readable = True
        await carry(hub, port, "two")
        assert next(each.ws2tcp for each in hub.sessions() if each.key == "two") == 2


async def test_a_session_that_lives_or_has_just_ended_stays_in_memory(network, monkeypatch):
    hub, port, _, _ = network
    monkeypatch.setattr(hub_module, "MAX_TALLIES", 0)
    hub.books = Written()
    async with RawClient.open(port, expert_target(SESSION)):
        await until(lambda: any(each.connected for each in hub.sessions()))
        assert hub.trim(lambda _: True) == []
    await until(lambda: not hub.sessions()[0].connected)
    assert hub.trim(lambda _: True) == []
    monkeypatch.setattr(hub_module, "QUIET_S", 0)
    assert hub.trim(lambda _: True) == [(WALLET, SESSION)]


async def test_bytes_are_counted_over_redials_and_tell_when_the_session_is_up(network):
    hub, port, _, _ = network
    for turn in (1, 2):
        async with RawClient.open(port, expert_target(SESSION)) as client:
            await client.send(frame(BINARY, b"x" * 1000))
            await client.receive_data(1000)
            await until(lambda: hub.sessions()[0].connected)
            await client.send(frame(CLOSE, struct.pack("!H", 1000)))
            await client.receive_close()
        await until(lambda: not hub.sessions()[0].connected)
        [count] = hub.sessions()
        assert (count.key, count.wallet, count.connects) == (SESSION, WALLET, turn)
        assert (count.ws2tcp, count.tcp2ws) == (turn * 1000, turn * 1000)
        assert count.last_close == (1000, "")
        assert count.opened_at > 1_600_000_000


async def test_a_newer_connection_replaces_the_older_and_the_engine_sees_them_one_after_the_other(network):
    hub, port, engine, _ = network
    async with RawClient.open(port, expert_target(SESSION)) as old:
        first = await engine.next_link()
        async with RawClient.open(port, expert_target(SESSION)) as new:
            assert await old.receive_close() == (1000, "replaced by a newer connection")
            await engine.next_link()
            assert first.reader.at_eof()
            await new.send(frame(BINARY, b"here"))
            assert await new.receive_data(4) == b"here"
            assert [(count.connects, count.connected) for count in hub.sessions()] == [(2, True)]


async def test_when_the_engine_ends_the_session_the_node_is_told(network):
    _, port, engine, _ = network
    async with RawClient.open(port, expert_target(SESSION)) as client:
        link = await engine.next_link()
        link.writer.write(b"last words")
        link.writer.close()
        assert await client.receive_data(10) == b"last words"
        assert await client.receive_close() == (1011, "the engine ended the session")


async def test_when_the_node_leaves_the_engine_gets_what_was_sent_and_then_the_end(runtime):
    table = Table()
    table.expert(SESSION, runtime / "e.data")
    async with (
        Engine(runtime / "e.data") as engine,
        relay(table) as (_, port),
        RawClient.open(port, expert_target(SESSION)) as client,
    ):
        await client.send(frame(BINARY, b"last words") + frame(CLOSE, struct.pack("!H", 1000)))
        link = await engine.next_link()
        assert await asyncio.wait_for(link.reader.read(), 120) == b"last words"


async def test_a_node_that_vanishes_is_1006(network):
    hub, port, engine, _ = network
    async with RawClient.open(port, expert_target(SESSION)) as client:
        await engine.next_link()
        client.writer.transport.abort()
    await until(lambda: not hub.sessions()[0].connected)
    assert hub.sessions()[0].last_close == (1006, "")


async def test_sessions_of_a_wallet_or_with_a_key_can_be_ended(network, runtime):
    hub, port, _, table = network
    table.expert("second", runtime / "e.data", wallet="another-wallet")
    async with (
        RawClient.open(port, expert_target(SESSION)) as one,
        RawClient.open(port, expert_target("second")) as two,
    ):
        await until(lambda: sum(count.connected for count in hub.sessions()) == 2)
        assert await hub.close_sessions() == 0
        assert await hub.close_sessions(wallet=WALLET, key="second") == 0
        assert await hub.close_sessions(wallet=WALLET, code=4403, reason="no longer admitted") == 1
        assert await one.receive_close() == (4403, "no longer admitted")
        assert await hub.close_sessions(key="second") == 1
        assert (await two.receive_close())[0] == 1000
        assert not any(count.connected for count in hub.sessions())


async def test_a_hub_that_stops_tells_every_node_and_takes_no_new_one(network):
    hub, port, engine, _ = network
    async with RawClient.open(port, expert_target(SESSION)) as client:
        link = await engine.next_link()
        closing = asyncio.create_task(hub.close())
        assert (await client.receive_close())[0] == 1001
        await client.send(frame(CLOSE, struct.pack("!H", 1001)))
        await closing
        await until(link.reader.at_eof)
    async with RawClient.open(port, expert_target(SESSION)) as client:
        assert (await client.receive_close())[0] == 1001


async def test_a_node_that_answers_pings_stays_and_one_that_is_silent_is_dropped(runtime):
    table = Table()
    table.expert(SESSION, runtime / "e.data")
    async with (
        Engine(runtime / "e.data", echo),
        relay(table, ping_interval_s=0.25) as (hub, port),
        RawClient.open(port, expert_target(SESSION)) as client,
    ):
        for _ in range(6):  # three times as long as a silent one would be borne
            while (await client.receive())[0] != PING:
                pass
            await client.send(frame(PONG, b""))
        assert hub.sessions()[0].connected
        await until(lambda: not hub.sessions()[0].connected)
        assert hub.sessions()[0].last_close == (1006, "no sign of life from the node")


async def test_a_hub_that_did_not_get_its_turn_takes_no_node_for_silent(runtime):
    table = Table()
    table.expert(SESSION, runtime / "e.data")
    async with (
        Engine(runtime / "e.data", echo),
        relay(table, ping_interval_s=0.2) as (hub, port),
        RawClient.open(port, expert_target(SESSION)) as client,
    ):
        while (await client.receive())[0] != PING:
            pass
        await client.send(frame(PONG, b""))
        await asyncio.sleep(0.1)  # the hub has read it, and waits
        time.sleep(1.0)  # noqa: ASYNC251 - the whole process stands still, for longer than a silent node is borne
        while (await client.receive())[0] != PING:
            pass
        assert hub.sessions()[0].connected


async def test_a_session_held_up_by_its_engine_shows_signs_of_life_and_lives_on(runtime):
    table = Table()
    table.expert(SESSION, runtime / "e.data")
    async with (
        Engine(runtime / "e.data") as engine,
        relay(table, ping_interval_s=0.2) as (hub, port),
        RawClient.open(port, expert_target(SESSION)) as client,
    ):
        link = await engine.next_link()
        accepted = await fill(client.writer, frame(BINARY, bytes(2**16)), 512)  # takes over a second at its end
        beats = [(await client.receive())[0] for _ in range(30)]
        assert set(beats) == {PING, PONG}  # though none of the pings was answered, and none sent
        assert beats.count(PONG) > beats.count(PING)
        assert hub.sessions()[0].connected
        assert not any(await asyncio.wait_for(link.reader.readexactly(accepted * 2**16), 120))


async def test_a_slow_engine_slows_the_node_down_and_memory_stays_bounded(runtime):
    table = Table()
    table.expert(SESSION, runtime / "e.data")
    async with (
        Engine(runtime / "e.data") as engine,
        relay(table) as (hub, port),
        RawClient.open(port, expert_target(SESSION)) as client,
    ):
        link = await engine.next_link()
        one = frame(BINARY, bytes(2**16))
        tracemalloc.start()
        # The limit of 32 MiB is what the kernel may buffer for one loopback connection, and more.
        accepted = await fill(client.writer, one, 512)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * 2**20
        assert hub.sessions()[0].ws2tcp < 2 * 2**20
        assert not any(await asyncio.wait_for(link.reader.readexactly(accepted * 2**16), 120))


async def test_a_slow_node_slows_the_engine_down_and_memory_stays_bounded(runtime):
    table = Table()
    table.expert(SESSION, runtime / "e.data")
    async with (
        Engine(runtime / "e.data") as engine,
        relay(table) as (_, port),
        RawClient.open(port, expert_target(SESSION)) as client,
    ):
        client.writer.transport.pause_reading()
        link = await engine.next_link()
        tracemalloc.start()
        written = await fill(link.writer, bytes(2**16), 512)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * 2**20
        client.writer.transport.resume_reading()
        assert not any(await client.receive_data(written * 2**16))


async def test_a_node_that_floods_pings_and_reads_nothing_is_cut_off(network):
    hub, port, engine, _ = network
    flood = frame(PING, b"p" * 125) * 1000
    async with RawClient.open(port, expert_target(SESSION)) as client:
        await engine.next_link()
        client.writer.transport.pause_reading()
        with pytest.raises(ConnectionError):
            await fill(client.writer, flood, 10_000)
        await until(lambda: not hub.sessions()[0].connected)


async def test_no_token_is_logged_at_any_level(network, caplog):
    _, port, _, _ = network
    caplog.set_level(logging.DEBUG)
    for target in (expert_target(SESSION, "secret-token-1"), expert_target(SESSION)):
        async with RawClient.open(port, target, ("Authorization: Bearer secret-token-2",)) as client:
            await client.receive_close()
    assert "secret-token" not in caplog.text
    assert TOKEN not in caplog.text


async def test_any_websocket_client_is_served(network):
    _, port, _, _ = network
    async with connect(f"ws://127.0.0.1:{port}{expert_target(SESSION)}", proxy=None) as ws:
        await ws.send(b"one")
        assert await ws.recv() == b"one"
        await ws.send("two")
        assert await ws.recv() == b"two"
        await ws.close()
    with pytest.raises(ConnectionClosed) as refusal:
        async with connect(f"ws://127.0.0.1:{port}{expert_target('nobody')}", proxy=None) as ws:
            await ws.recv()
    assert refusal.value.rcvd.code == 4404
