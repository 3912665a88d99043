"""Two nodes meet without the relay: over real TLS, with the certificate and the ticket that they were told."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_parts import until

from kvasir_console.errors import ConfigError, NetworkError
from kvasir_console.relay import direct
from kvasir_console.relay.direct import (
    MAX_GREETING,
    DirectListener,
    Identity,
    Introduction,
    parse_address,
    parse_listen,
)
from kvasir_console.relay.splice import SocketEnd

TICKET = bytes(range(32))


async def echo(other: SocketEnd) -> None:
    while data := await other.read():
        await other.write(data)


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.make()


dial = functools.partial(direct.dial, timeout_s=60.0)


@asynccontextmanager
async def listening(identity: Identity) -> AsyncIterator[DirectListener]:
    def admit(ring: str, edge: int, ticket: bytes) -> direct.Carry | None:
        return echo if (ring, edge, ticket) == ("ring", 1, TICKET) else None

    listener = DirectListener(identity, admit, timeout_s=60.0)
    await listener.start("127.0.0.1:0")
    try:
        yield listener
    finally:
        await listener.close()


def told(listener: DirectListener, identity: Identity) -> Introduction:
    return Introduction("ring", 1, "P", TICKET, f"127.0.0.1:{listener.port}", identity.fingerprint)


async def test_bytes_go_both_ways_once_both_have_shown_who_they_are(identity: Identity) -> None:
    data = bytes(range(256)) * 4096
    async with listening(identity) as listener:
        other = await dial(told(listener, identity), loopback=True)
        sending = asyncio.create_task(other.write(data))
        came = b""
        while len(came) < len(data):
            came += await other.read()
        await sending
        assert came == data
        await other.close()


@pytest.mark.parametrize(
    "change",
    [{"ticket": bytes(32)}, {"edge": 2}, {"ring": "other"}, {"ring": "r" * 128}],
    ids=["ticket", "edge", "ring", "long"],
)
async def test_who_shows_something_else_is_refused(identity: Identity, change: dict[str, object]) -> None:
    async with listening(identity) as listener:
        with pytest.raises(NetworkError) as caught:
            await dial(replace(told(listener, identity), **change), loopback=True)
        assert caught.value.code == "direct_refused"
        await (await dial(told(listener, identity), loopback=True)).close()


async def test_another_certificate_is_not_shown_the_ticket(identity: Identity) -> None:
    seen: list[bytes] = []
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            seen.append(await reader.read(1))
        writer.close()
        over.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=Identity.make().context)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(NetworkError) as caught:
        await dial(Introduction("ring", 1, "P", TICKET, f"127.0.0.1:{port}", identity.fingerprint), loopback=True)
    assert caught.value.code == "direct_wrong_certificate"
    await asyncio.wait_for(over.wait(), 120)
    assert seen in ([], [b""])
    server.close()


EVERYWHERE = "0.0.0.0"  # noqa: S104 - nothing is bound to it


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "169.254.1.1", EVERYWHERE, "224.0.0.1"])
async def test_a_neighbour_cannot_send_us_to_ourselves(identity: Identity, host: str) -> None:
    async with listening(identity) as listener:
        there = replace(told(listener, identity), address=f"{host}:{listener.port}")
        with pytest.raises(NetworkError) as caught:
            await dial(there, loopback=False)
        assert caught.value.code in ("direct_forbidden", "direct_unreachable")
        assert listener._serving == set()


async def test_nobody_there_is_told(identity: Identity) -> None:
    with socket.socket() as bound:  # nobody else has the port, and nobody listens
        bound.bind(("127.0.0.1", 0))
        gone = Introduction("ring", 1, "P", TICKET, f"127.0.0.1:{bound.getsockname()[1]}", identity.fingerprint)
        with pytest.raises(NetworkError) as caught:
            await dial(gone, loopback=True)
    assert caught.value.code == "direct_unreachable"


async def test_strangers_that_say_nothing_are_few_and_leave(identity: Identity) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with listening(identity) as listener:
        silent = [await asyncio.open_connection("127.0.0.1", listener.port, ssl=context) for _ in range(MAX_GREETING)]
        await until(lambda: listener._greeting == MAX_GREETING)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=context)
        assert await asyncio.wait_for(reader.read(), 120) == b""  # at once
        writer.close()
        assert listener._greeting == MAX_GREETING
        for _, writer in silent:
            writer.close()
        await until(lambda: listener._greeting == 0)
        listener._timeout_s = 0.2  # from now on; the handshake's limit is the one it started with
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=context)
        assert await asyncio.wait_for(reader.read(), 120) == b""  # in its time
        writer.close()
        await (await dial(told(listener, identity), loopback=True)).close()


@pytest.mark.parametrize(
    "junk", [b"", b"GET / HTTP/1.1\r\n\r\n", b"KVSE\x02" + bytes(40), b"KVSE\x01\x00\x00\xff\xff" + bytes(99)]
)
async def test_junk_gets_no_answer(identity: Identity, junk: bytes) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with listening(identity) as listener:
        listener._timeout_s = 0.5  # for what comes after the handshake
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=context)
        writer.write(junk)
        assert await asyncio.wait_for(reader.read(), 120) == b""
        writer.close()


async def test_a_certificate_is_named_by_what_a_library_reads(identity: Identity) -> None:
    async with listening(identity) as listener:
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", listener.port))
    assert hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() == identity.fingerprint
    assert Identity.make().fingerprint != identity.fingerprint


async def test_a_place_that_is_taken_is_refused_by_name(identity: Identity) -> None:
    async with listening(identity) as listener:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{listener.port}"):
            await DirectListener(identity, lambda *_: None).start(f"127.0.0.1:{listener.port}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "h/x:1",
        "a@b:1",
        "a b:1",
        "h:1?x",
        "ä:1",
        "h:1:2",
        "x" * 300 + ":1",
    ],
)
def test_what_is_no_address_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


def test_addresses() -> None:
    assert parse_address("node.example:443") == ("node.example", 443)
    assert parse_address("[2001:db8::1]:9") == ("2001:db8::1", 9)
    assert parse_listen("[2001:db8::1]:0") == ("2001:db8::1", 0)


@given(
    st.dictionaries(
        st.sampled_from(["ring", "edge", "role", "ticket", "address", "certificate"]),
        st.one_of(st.none(), st.integers(), st.text(max_size=8), st.just("ab" * 32), st.just("P"), st.just("h:1")),
    )
)
def test_an_introduction_is_read_or_refused(data: dict[str, object]) -> None:
    try:
        found = Introduction.from_json(data)
    except ValueError:
        return
    assert (found.ring, found.edge, found.role) == (data["ring"], data["edge"], data["role"])
    assert found.ticket.hex() == data["ticket"]
    assert found.ticket.hex() not in repr(found)
