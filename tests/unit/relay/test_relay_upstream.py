"""A public front before another front: sessions and requests cross both, over TLS, unchanged."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from relay_parts import TOKEN, WALLET, Engine, RawClient, Table, digest, echo, expert_target, until

from kvasir_console.errors import ConfigError
from kvasir_console.relay.front import Front
from kvasir_console.relay.hub import Hub
from kvasir_console.relay.tls import client_context, server_context
from kvasir_console.relay.uplink import Uplink, UplinkPhase, expert_url
from kvasir_console.relay.upstream import RawUpgrades, Upstream, parse_upstream
from kvasir_console.relay.wire.preamble import Kind, Preamble

from tls import TlsFiles

SESSION = "expert-node-1"


async def token(*, refresh: bool) -> str:
    return TOKEN


async def test_a_session_crosses_a_public_front_to_a_hub_in_the_lan(runtime: Path, tls_files: TlsFiles) -> None:
    table = Table()
    table.expert(SESSION, runtime / "trunk.data")
    hub, tls, trusting = Hub(table), server_context(tls_files.cert, tls_files.key), client_context(tls_files.ca)
    async with (
        Engine(runtime / "trunk.data") as trunk,
        Engine(runtime / "node.data", echo),
        Front(hub, Path("/nonexistent"), port=0, tls=tls) as inner,
    ):
        upstream = Upstream("127.0.0.1", inner.port, trusting)
        async with Front(RawUpgrades(upstream), upstream, port=0, tls=tls) as public:
            uplink = Uplink(
                expert_url(f"https://127.0.0.1:{public.port}", SESSION),
                SESSION,
                token,
                token_in_header=True,
                ssl_context=trusting,
                engine_socket=runtime / "node.data",
                preamble=Preamble(Kind.EXPERTS, SESSION, WALLET, layer=3, begin=0, end=4),
                user_agent="kvasir-console/test",
            )
            running = asyncio.create_task(uplink.run())
            link = await trunk.next_link()
            payload = random.Random(1).randbytes(3_000_000)
            link.writer.write(payload)
            assert digest(await asyncio.wait_for(link.reader.readexactly(len(payload)), 120)) == digest(payload)
            [(_, _, shown)] = table.asked
            assert shown == TOKEN
            await uplink.close()
            await running
            await until(lambda: hub.sessions()[0].last_close == (1000, ""))  # the goodbye crossed both too
            assert uplink.snapshot().phase is UplinkPhase.CLOSED
        await hub.close()


async def test_requests_cross_too_and_a_gateway_that_is_away_is_said_so(runtime: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /v1/health HTTP/1.1\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    upstream = Upstream("127.0.0.1", server.sockets[0].getsockname()[1], None)
    async with Front(RawUpgrades(upstream), upstream, port=0) as public:
        reader, writer = await asyncio.open_connection("127.0.0.1", public.port)
        writer.write(b"GET /v1/health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read(-1)).endswith(b"\r\n\r\nok")
        writer.close()
        server.close()
        await server.wait_closed()
        async with RawClient.open(public.port, expert_target(SESSION)) as node:
            assert node.answer.startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://10.0.0.5:8791", "upstream_not_encrypted"),
        ("https://10.0.0.5", "bad_upstream"),
        ("https://user@10.0.0.5:1", "bad_upstream"),
        ("https://10.0.0.5:1/path", "bad_upstream"),
        ("https://10.0.0.5:99999", "bad_upstream"),
        ("ftp://10.0.0.5:1", "bad_upstream"),
    ],
)
def test_an_upstream_is_an_encrypted_address_and_nothing_else(url: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_upstream(url, client_context())
    assert caught.value.code == code


def test_loopback_may_be_plain() -> None:
    assert parse_upstream("http://127.0.0.1:8791", client_context()) == Upstream("127.0.0.1", 8791, None)
