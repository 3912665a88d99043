"""An uplink dials, says what it is doing and why, and gives up nothing that it was not told to."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from pathlib import Path

import pytest
from relay_parts import TOKEN, Engine, Table, digest, echo, until
from uplink_parts import NODE_PREAMBLE, SESSION, Tokens, local_url, make, relay, running

from kvasir_console.errors import NetworkError, WalletError
from kvasir_console.relay.hub import Hub, Refused
from kvasir_console.relay.tls import client_context
from kvasir_console.relay.uplink import UplinkPhase, expert_url, ring_url
from kvasir_console.relay.wire.preamble import Kind


@pytest.fixture
def table(runtime):
    table = Table()
    table.expert(SESSION, runtime / "trunk.data")
    return table


async def test_fifty_megabytes_go_both_ways_through_tls_unchanged(runtime, tls_files, table):
    size = 50 * 10**6
    data = random.Random(50).randbytes(size)
    async with (
        Engine(runtime / "trunk.data", echo) as trunk,
        Engine(runtime / "node.data") as node,
        relay(table, tls_files) as (hub, port),
        running(
            make(
                expert_url(f"https://localhost:{port}", SESSION),
                runtime / "node.data",
                ssl_context=client_context(tls_files.ca),
            )
        ) as uplink,
    ):
        link = await node.next_link()
        assert link.preamble == NODE_PREAMBLE
        assert (await trunk.next_link()).preamble.kind is Kind.DISPATCH
        view = memoryview(data)

        async def send():
            for at in range(0, size, 200_000):  # engine writes of any size
                link.writer.write(view[at : at + 200_000])
                await link.writer.drain()

        sending = asyncio.create_task(send())
        received = await link.reader.readexactly(size)
        await sending
        assert digest(received) == digest(data)
        state, [count] = uplink.snapshot(), hub.sessions()
        assert (state.bytes_up, state.bytes_down) == (size, size)
        assert (count.ws2tcp, count.tcp2ws) == (size, size)


async def test_the_phases_of_a_session_and_what_is_known_in_each(runtime, table):
    seen, clock = [], itertools.count()
    uplink_options = {"on_change": seen.append, "clock": lambda: float(next(clock))}
    async with (
        Engine(runtime / "trunk.data", echo),
        Engine(runtime / "node.data") as node,
        relay(table) as (hub, port),
    ):
        uplink = make(local_url(port), runtime / "node.data", **uplink_options)
        assert uplink.snapshot().phase is UplinkPhase.CLOSED
        async with running(uplink):
            link = await node.next_link()
            link.writer.write(b"ping")
            assert await link.reader.readexactly(4) == b"ping"
            await until(lambda: uplink.snapshot().rtt_ms is not None)
            assert 0 < uplink.snapshot().rtt_ms < 5000
            assert uplink.snapshot().connects == 1
            await hub.close_sessions(key=SESSION)
            await until(lambda: any(state.phase is UplinkPhase.WAITING for state in seen))
            await until(lambda: uplink.snapshot().phase is UplinkPhase.OPEN)
    phases = [state.phase.value for state in seen]
    assert phases == ["dialling", "open", "waiting", "dialling", "open", "closed"]
    waiting = seen[2]
    assert waiting.retry_in_s is not None
    assert waiting.last_close.code == 1000
    assert all(state.retry_in_s is None for state in seen if state.phase is not UplinkPhase.WAITING)
    assert [state.since for state in seen] == sorted(state.since for state in seen)
    assert seen[-1].connects == 2


@pytest.mark.parametrize(
    ("refusal", "action"),
    [
        (Refused(4403, "this name belongs to another wallet"), "choose another node name"),
        (Refused(4404, "unknown session"), "reporting coverage again"),
        (Refused(1011, "nothing is listening for this session"), "until something does"),
    ],
)
async def test_a_refusal_says_what_it_means_and_is_tried_again(runtime, table, refusal, action):
    table.refusals[SESSION] = refusal
    async with (
        Engine(runtime / "trunk.data", echo),
        Engine(runtime / "node.data") as node,
        relay(table) as (_, port),
        running(make(local_url(port), runtime / "node.data")) as uplink,
    ):
        await until(lambda: uplink.snapshot().last_close is not None)
        closing = uplink.snapshot().last_close
        assert (closing.code, closing.reason) == (refusal.close_code, refusal.reason)
        assert action in closing.text
        await until(lambda: uplink.snapshot().connects >= 2)
        table.refusals.clear()
        while True:  # until a link that is not one of a refused session
            link = await node.next_link()
            link.writer.write(b"hello")
            try:
                assert await asyncio.wait_for(link.reader.readexactly(5), 120) == b"hello"
                break
            except (asyncio.IncompleteReadError, ConnectionError):
                continue


async def test_after_4401_a_fresh_token_is_asked_for_once(runtime, table):
    tokens = Tokens("expired", TOKEN)
    async with (
        Engine(runtime / "trunk.data", echo) as trunk,
        Engine(runtime / "node.data"),
        relay(table) as (hub, port),
        running(make(local_url(port), runtime / "node.data", token=tokens)) as uplink,
    ):
        await trunk.next_link()
        assert tokens.asked == [False, True]
        await hub.close_sessions(key=SESSION)
        await trunk.next_link()
        assert tokens.asked == [False, True, False]
        assert uplink.snapshot().last_close.code == 1000


@pytest.mark.parametrize("in_header", [True, False])
async def test_the_token_travels_where_the_relay_takes_it_and_is_logged_nowhere(
    runtime, table, in_header, caplog, monkeypatch
):
    caplog.set_level(logging.DEBUG)
    heads = []
    serve = Hub.serve

    async def spy(self, head, reader, writer):
        heads.append(head)
        await serve(self, head, reader, writer)

    monkeypatch.setattr(Hub, "serve", spy)
    table.token = "to/ken+1=?&"
    async with (
        Engine(runtime / "trunk.data", echo) as trunk,
        Engine(runtime / "node.data"),
        relay(table) as (_, port),
    ):
        options = {"token": Tokens(table.token), "token_in_header": in_header}
        async with running(make(local_url(port), runtime / "node.data", **options)) as uplink:
            await trunk.next_link()
            assert "?" not in uplink.snapshot().url
    [head] = heads
    assert (b"Authorization: Bearer to/ken+1=?&" in head) is in_header
    assert (b"&token=" in head.split(b"\r\n")[0]) is not in_header
    assert b"User-Agent: kvasir-console/test" in head
    assert b"Extensions" not in head
    assert "to/ken" not in caplog.text
    assert "to%2Fken" not in caplog.text


async def test_when_the_engine_ends_the_session_the_relay_is_told_and_the_node_dials_again(runtime, table):
    async with (
        Engine(runtime / "trunk.data", echo),
        Engine(runtime / "node.data") as node,
        relay(table) as (hub, port),
        running(make(local_url(port), runtime / "node.data")) as uplink,
    ):
        link = await node.next_link()
        link.writer.close()
        await node.next_link()
        assert hub.sessions()[0].last_close == (1011, "engine gone")
        assert "engine ended the session" in uplink.snapshot().last_close.text


async def test_an_engine_that_does_not_listen_is_waited_for(runtime, table):
    async with (
        Engine(runtime / "trunk.data", echo),
        relay(table) as (_, port),
        running(make(local_url(port), runtime / "node.data")) as uplink,
    ):
        await until(lambda: uplink.snapshot().last_close is not None)
        assert "engine does not answer" in uplink.snapshot().last_close.text
        async with Engine(runtime / "node.data") as node:
            await node.next_link()


async def test_a_relay_that_cannot_be_reached_is_dialled_until_it_can(runtime, table):
    async with Engine(runtime / "trunk.data", echo), Engine(runtime / "node.data") as node:
        async with relay(table) as (_, port):
            pass
        async with running(make(local_url(port), runtime / "node.data")) as uplink:
            await until(lambda: uplink.snapshot().last_close is not None)
            closing = uplink.snapshot().last_close
            assert closing.code is None
            assert "cannot be reached" in closing.text
            async with relay(table, port=port):
                await node.next_link()
                assert uplink.snapshot().connects == 1


async def test_a_certificate_nobody_vouches_for_is_refused(runtime, table, tls_files):
    async with Engine(runtime / "node.data"), relay(table, tls_files) as (_, port):
        url = expert_url(f"https://localhost:{port}", SESSION)
        async with running(make(url, runtime / "node.data")) as uplink:
            await until(lambda: uplink.snapshot().last_close is not None)
            assert "certificate is not trusted" in uplink.snapshot().last_close.text
            assert "network.ca_file" in uplink.snapshot().last_close.text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "HTTP 503"),
        (b"HTTP/1.1 302 Found\r\nLocation: ws://127.0.0.1:1/steal\r\nContent-Length: 0\r\n\r\n", "HTTP 302"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not a relay"),
        (b"", "not a relay"),
    ],
)
async def test_whatever_else_answers_is_named_without_the_token(runtime, answer, text, caplog):
    async def other(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    caplog.set_level(logging.DEBUG)
    server = await asyncio.start_server(other, "127.0.0.1", 0)
    url = local_url(server.sockets[0].getsockname()[1])
    async with running(make(url, runtime / "node.data", token_in_header=False)) as uplink:
        await until(lambda: uplink.snapshot().last_close is not None)
        assert text in uplink.snapshot().last_close.text
    server.close()
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(uplink.snapshot())


async def test_a_token_that_cannot_be_had_is_a_reason_to_wait(runtime, table):
    async def locked(*, refresh):
        raise WalletError("wallet_locked", "The wallet is locked.", "Unlock it.")

    async with (
        relay(table) as (_, port),
        running(make(local_url(port), runtime / "node.data", token=locked)) as uplink,
    ):
        await until(lambda: uplink.snapshot().phase is UplinkPhase.WAITING)
        assert uplink.snapshot().last_close.text == "The wallet is locked.; Unlock it."


async def test_a_token_with_a_line_break_goes_nowhere(runtime, table):
    async with relay(table) as (_, port):
        token = Tokens("a\r\nX-Admin: 1")
        async with running(make(local_url(port), runtime / "node.data", token=token)) as uplink:
            await until(lambda: uplink.snapshot().last_close is not None)
            assert "not printable" in uplink.snapshot().last_close.text
            assert table.asked == []


async def test_closing_says_1000_and_ends_run(runtime, table):
    async with (
        Engine(runtime / "trunk.data", echo) as trunk,
        Engine(runtime / "node.data") as node,
        relay(table) as (hub, port),
    ):
        uplink = make(local_url(port), runtime / "node.data")
        task = asyncio.create_task(uplink.run())
        await trunk.next_link()
        link = await node.next_link()
        await asyncio.wait_for(uplink.close(), 120)
        await asyncio.wait_for(task, 120)
        assert uplink.snapshot().phase is UplinkPhase.CLOSED
        assert await asyncio.wait_for(link.reader.read(), 120) == b""
        await until(lambda: not hub.sessions()[0].connected)
        assert hub.sessions()[0].last_close == (1000, "")


@pytest.mark.parametrize("where", ["token", "handshake", "waiting"])
async def test_closing_does_not_wait_for_anybody(runtime, where):
    async def forever(*, refresh):
        await asyncio.Event().wait()

    async def mute(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = 1 if where == "waiting" else server.sockets[0].getsockname()[1]
    token = forever if where == "token" else Tokens(TOKEN)
    options = {"token": token, "redial_min_s": 60.0, "redial_max_s": 60.0, "open_timeout_s": 60.0}
    uplink = make(local_url(port), runtime / "node.data", **options)
    task = asyncio.create_task(uplink.run())
    expected = UplinkPhase.WAITING if where == "waiting" else UplinkPhase.DIALLING
    await until(lambda: uplink.snapshot().phase is expected)
    await asyncio.wait_for(uplink.close(), 120)
    await asyncio.wait_for(task, 120)
    server.close()


async def test_redial_ends_the_wait(runtime, table):
    table.refusals[SESSION] = Refused(4404, "unknown session")
    async with (
        Engine(runtime / "trunk.data", echo) as trunk,
        Engine(runtime / "node.data"),
        relay(table) as (_, port),
    ):
        options = {"redial_min_s": 60.0, "redial_max_s": 60.0, "clock": lambda: 0.0}
        async with running(make(local_url(port), runtime / "node.data", **options)) as uplink:
            await until(lambda: uplink.snapshot().phase is UplinkPhase.WAITING)
            assert 45.0 <= uplink.snapshot().retry_in_s <= 60.0
            table.refusals.clear()
            uplink.redial()
            await trunk.next_link()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("ws://gate.kvasir-ai.net/api/expert-relay?session=s&token=secret", "relay_not_encrypted"),
        ("ws://192.0.2.1/api/expert-relay?token=secret", "relay_not_encrypted"),
        ("https://gate.kvasir-ai.net/api/expert-relay?token=secret", "relay_url_malformed"),
        ("wss:///api/expert-relay?token=secret", "relay_url_malformed"),
        ("wss://user:secret@gate.kvasir-ai.net/api/expert-relay", "relay_url_malformed"),
        ("token=secret", "relay_url_malformed"),
    ],
)
def test_addresses_that_will_not_do_are_refused_without_repeating_secrets(url, code):
    with pytest.raises(NetworkError) as refusal:
        make(url, Path("/nonexistent"))
    assert refusal.value.code == code
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            expert_url("https://gate.kvasir-ai.net", "expert-a b"),
            "wss://gate.kvasir-ai.net/api/expert-relay?session=expert-a%20b",
        ),
        (expert_url("http://127.0.0.1:8791/", "s"), "ws://127.0.0.1:8791/api/expert-relay?session=s"),
        (
            ring_url("https://h:8443/k/", "r/1", 2, "P"),
            "wss://h:8443/k/api/ring-relay?controller_id=r%2F1&edge=2&role=P",
        ),
        (ring_url("https://h", "r", "entry", "N"), "wss://h/api/ring-relay?controller_id=r&edge=entry&role=N"),
    ],
)
def test_addresses_are_made_as_the_contract_writes_them(made, expected):
    assert made == expected
