from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import tracemalloc
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from relay_parts import TIMEOUT_S, RawClient, Table, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from kvasir_console.errors import ConfigError, SystemResourceError
from kvasir_console.relay import front as front_module
from kvasir_console.relay.front import Front
from kvasir_console.relay.hub import Hub
from kvasir_console.relay.tls import client_context, server_context


class Gateway:
    """A small Starlette application on a Unix socket, served by a real uvicorn."""

    def __init__(self, path):
        self.path = path
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route("/headers", self.headers),
                Route("/hash", self.hash, methods=["POST"]),
                Route("/events", self.events),
                Route("/large", self.large),
                Route("/api/expert-relay", self.headers),
            ]
        )

    async def headers(self, request: Request) -> JSONResponse:
        return JSONResponse({"headers": request.headers.items(), "path": request.url.path})

    async def hash(self, request: Request) -> JSONResponse:
        total = hashlib.sha256()
        async for piece in request.stream():
            total.update(piece)
        return JSONResponse({"sha256": total.hexdigest()})

    async def large(self, request: Request) -> StreamingResponse:
        async def pieces():
            for _ in range(1536):
                yield bytes(2**16)

        return StreamingResponse(pieces())

    async def events(self, request: Request) -> StreamingResponse:
        async def stream():
            try:
                yield "data: one\n\n"
                await self.go_on.wait()
                yield "data: two\n\n"
            finally:
                self.left.set()

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def __aenter__(self):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()
        options = {"timeout_graceful_shutdown": 1, "timeout_keep_alive": 600}
        config = uvicorn.Config(self.app, ws="none", lifespan="off", log_config=None, **options)
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server._serve(sockets=[listener]))
        await until(lambda: self._server.started)
        return self

    async def __aexit__(self, *_):
        self._server.should_exit = True
        await self._serving


@asynccontextmanager
async def network(runtime, *, tls=None, **options):
    async with Gateway(runtime / "http.sock") as gateway:
        context = server_context(tls.cert, tls.key) if tls is not None else None
        hub = Hub(Table())
        settings = {"linger_s": 0.1, "head_timeout_s": 60.0, "body_timeout_s": 60.0, **options}
        async with Front(hub, gateway.path, port=0, tls=context, **settings) as front:
            yield front, gateway


@pytest.fixture(params=["plain", "tls"])
async def served(request, runtime, tls_files):
    """A front, its gateway, and an HTTP client for it."""
    tls = tls_files if request.param == "tls" else None
    async with network(runtime, tls=tls) as (front, gateway):
        scheme, verify = ("https", client_context(tls_files.ca)) if tls is not None else ("http", True)
        base = f"{scheme}://127.0.0.1:{front.port}"
        async with httpx.AsyncClient(base_url=base, verify=verify, trust_env=False, timeout=TIMEOUT_S) as client:
            yield front, gateway, client


@asynccontextmanager
async def raw(port, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_of(reader):
    line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
    return int(line.split()[1])


async def answer_of(reader):
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
    [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return json.loads(await reader.readexactly(int(length.split(b":")[1])))


async def test_requests_reach_the_gateway_over_one_connection_kept_alive(served):
    front, _, client = served
    for _ in range(3):
        reply = await client.get("/headers", headers={"X-Forwarded-For": "6.6.6.6"})
        assert reply.status_code == 200
        headers = dict(reply.json()["headers"])
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert headers["x-forwarded-proto"] == client.base_url.scheme
    assert front.connections == 1


async def test_large_bodies_pass_whole_both_ways(served):
    _, _, client = served
    body = random.Random(3).randbytes(8 * 2**20)

    async def pieces():
        for at in range(0, len(body), 100_000):
            yield body[at : at + 100_000]

    expected = {"sha256": hashlib.sha256(body).hexdigest()}
    assert (await client.post("/hash", content=body)).json() == expected
    assert (await client.post("/hash", content=pieces())).json() == expected  # chunked
    assert (await client.get("/large")).content == bytes(1536 * 2**16)


async def test_events_come_one_by_one(served):
    _, gateway, client = served
    async with client.stream("GET", "/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.aiter_lines()
        assert await asyncio.wait_for(anext(lines), TIMEOUT_S) == "data: one"
        assert not gateway.left.is_set()
        gateway.go_on.set()
        assert [line async for line in lines] == ["", "data: two", ""]


async def test_a_client_that_leaves_mid_stream_is_missed_by_the_gateway(served):
    front, gateway, client = served
    async with client.stream("GET", "/events") as reply:
        await anext(reply.aiter_lines())
    await client.aclose()
    await asyncio.wait_for(gateway.left.wait(), TIMEOUT_S)
    await until(lambda: front.connections == 0)


async def test_later_requests_of_a_connection_cannot_lie_about_their_address(runtime):
    one = b"GET /headers HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\n\r\n"
    async with network(runtime) as (front, _), raw(front.port) as (reader, writer):
        for request in (one, one, one + one):  # the last two pipelined
            writer.write(request)
            for _ in range(request.count(b"GET")):
                answer = await answer_of(reader)
                assert [value for name, value in answer["headers"] if "forwarded-for" in name] == ["127.0.0.1"]
                assert "6.6.6.6" not in json.dumps(answer)


async def test_a_slow_client_slows_the_gateway_down(runtime):
    async with (
        network(runtime, max_connections=10) as (front, _),
        raw(front.port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, writer),
    ):
        writer.transport.pause_reading()
        tracemalloc.start()
        await asyncio.sleep(0.5)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * 2**20  # of 96 MiB
        writer.transport.resume_reading()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        received = 0
        while received < 1536 * 2**16:
            received += len(await asyncio.wait_for(reader.read(2**20), TIMEOUT_S))


async def test_a_client_that_takes_nothing_is_dropped(runtime):
    async with (
        network(runtime, stall_timeout_s=0.2) as (front, _),
        raw(front.port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n") as (_, writer),
    ):
        writer.transport.pause_reading()
        await until(lambda: front.connections == 1)
        await until(lambda: front.connections == 0)


async def test_only_the_two_relay_paths_are_upgraded(runtime):
    async with network(runtime) as (front, _):
        for path in ("/api/expert-relay?session=s", "/api/ring-relay?controller_id=r"):
            async with RawClient.open(front.port, path) as client:
                assert client.answer.startswith(b"HTTP/1.1 101 ")
                assert (await client.receive_close())[0] == 4401
        for path in ("/", "/api/expert-relay/", "/api/expert-relay/x", "/API/expert-relay", "/api/expert%2Drelay"):
            async with RawClient.open(front.port, path) as client:
                assert client.answer.startswith(b"HTTP/1.1 404 ")
                await client.reader.readuntil(b"}")
                assert await client.reader.read() == b""


@pytest.mark.parametrize(
    "request_head",
    [
        b"POST /api/expert-relay HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /api/expert-relay HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
    ],
)
async def test_other_upgrades_are_refused(runtime, request_head):
    async with network(runtime) as (front, _), raw(front.port, request_head) as (reader, _):
        assert await status_of(reader) == 404


async def test_an_upgrade_after_another_request_is_cut_off(runtime):
    upgrade = b"GET /api/expert-relay HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with (
        network(runtime) as (front, _),
        raw(front.port, b"GET /headers HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, writer),
    ):
        await answer_of(reader)
        writer.write(upgrade)
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""


async def test_a_plain_request_to_a_relay_path_is_the_gateways(served):
    _, _, client = served
    assert (await client.get("/api/expert-relay")).json()["path"] == "/api/expert-relay"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 200_000, 431),
        (b"hello\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
)
async def test_heads_that_cannot_be_passed_on_are_answered_and_the_connection_closed(runtime, data, status):
    async with network(runtime, linger_s=60.0) as (front, _), raw(front.port, data) as (reader, writer):
        assert await status_of(reader) == status
        await asyncio.wait_for(reader.read(), TIMEOUT_S)
        writer.close()
        await until(lambda: front.connections == 0)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHos"])
async def test_a_client_that_says_too_little_is_answered_408_and_dropped(runtime, data):
    async with network(runtime, head_timeout_s=0.1) as (front, _), raw(front.port, data) as (reader, _):
        assert await status_of(reader) == 408
        await asyncio.wait_for(reader.read(), TIMEOUT_S)
        await until(lambda: front.connections == 0)


async def test_a_client_that_drips_its_head_is_dropped_all_the_same(runtime):
    async with (
        network(runtime, head_timeout_s=0.2) as (front, _),
        raw(front.port, b"GET / HTTP/1.1\r\n") as (reader, writer),
    ):
        dripping = asyncio.create_task(_drip(writer))
        assert await status_of(reader) == 408
        dripping.cancel()
        await until(lambda: front.connections == 0)


async def _drip(writer):
    with contextlib.suppress(OSError):
        while True:
            writer.write(b"A: b\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)


async def test_a_client_that_never_begins_its_tls_handshake_is_dropped(runtime, tls_files):
    async with network(runtime, tls=tls_files, head_timeout_s=0.2) as (front, _), raw(front.port) as (reader, _):
        await until(lambda: front.connections == 1)
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        await until(lambda: front.connections == 0)


async def test_plain_http_to_a_tls_port_is_dropped(runtime, tls_files):
    async with (
        network(runtime, tls=tls_files) as (front, _),
        raw(front.port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, _),
    ):
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), TIMEOUT_S)
        await until(lambda: front.connections == 0)


async def test_a_client_that_stops_inside_its_body_is_dropped(runtime):
    request = b"POST /hash HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nonly this"
    async with network(runtime, body_timeout_s=0.1) as (front, _), raw(front.port, request) as (reader, _):
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        await until(lambda: front.connections == 0)


async def test_a_connection_between_requests_is_not_hurried(runtime):
    request = b"GET /headers HTTP/1.1\r\nHost: x\r\n\r\n"
    async with network(runtime, body_timeout_s=0.05) as (front, _), raw(front.port, request) as (reader, writer):
        await answer_of(reader)
        await asyncio.sleep(0.2)
        writer.write(request)
        assert (await answer_of(reader))["path"] == "/headers"


async def test_connections_over_the_cap_are_answered_503_and_far_over_it_dropped(runtime):
    # Who was answered 503 stays until it has left, so that the further ones are too many.
    options = {"max_connections": 2, "linger_s": 60.0}
    async with network(runtime, **options) as (front, _), contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(raw(front.port))
        await until(lambda: front.connections == 2)
        reader, _ = await stack.enter_async_context(raw(front.port))
        assert await status_of(reader) == 503
        fillers = [await stack.enter_async_context(raw(front.port)) for _ in range(6)]
        outcomes = [await _first_byte(filler) for filler, _ in fillers]
        assert outcomes == [b"H"] + 5 * [b""]
        assert front.connections == 4


async def _first_byte(reader):
    try:
        return await asyncio.wait_for(reader.read(1), TIMEOUT_S)
    except ConnectionError:
        return b""


async def test_a_client_that_closes_its_sending_half_still_gets_its_answer(runtime):
    async def gateway(reader, writer):
        request = await reader.read()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n%04d" % len(request))
        writer.close()

    server = await asyncio.start_unix_server(gateway, runtime / "http.sock")
    async with (
        Front(Hub(Table()), runtime / "http.sock", port=0) as front,
        raw(front.port, b"GET / HTTP/1.0\r\n\r\n") as (reader, writer),
    ):
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    server.close()
    assert answer.endswith(
        b"\r\n\r\n%04d" % len(b"GET / HTTP/1.0\r\nx-forwarded-for: 127.0.0.1\r\nx-forwarded-proto: http\r\n\r\n")
    )


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_an_early_answer_to_a_large_upload_arrives(runtime, in_pieces):
    """Though the front writes to a gateway that has closed, before it has read what that one said."""

    async def gateway(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(gateway, runtime / "http.sock")
    async with Front(Hub(Table()), runtime / "http.sock", port=0, linger_s=60.0) as front:
        head = b"POST /hash HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
        async with raw(front.port, head + (b"" if in_pieces else bytes(2_000_000))) as (reader, writer):
            sending = asyncio.create_task(_pieces(writer) if in_pieces else asyncio.sleep(0))
            assert await status_of(reader) == 413
            await asyncio.wait_for(reader.read(), TIMEOUT_S)  # and then the end, not a reset
            sending.cancel()
    server.close()


async def _pieces(writer):
    with contextlib.suppress(OSError):
        while True:
            writer.write(bytes(2**14))
            await writer.drain()


@pytest.fixture(params=["plain", "tls"])
def ends(request, tls_files):
    """TLS of a front, and of who dials it; ``None`` twice for plain."""
    if request.param == "plain":
        return None, None
    return server_context(tls_files.cert, tls_files.key), client_context(tls_files.ca)


async def answering(path, body=b"", meanwhile=None):
    """A gateway that answers one request with ``body``, then closes, once ``meanwhile`` is set."""

    async def gateway(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if meanwhile is not None:
            await meanwhile.wait()
        writer.close()

    return await asyncio.start_unix_server(gateway, path)


async def test_a_connection_ends_when_the_gateway_has_closed_it(runtime, ends):
    server = await answering(runtime / "http.sock", b"hello")
    async with Front(Hub(Table()), runtime / "http.sock", port=0, tls=ends[0], linger_s=0.1) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, ssl=ends[1])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
        assert answer.endswith(b"\r\n\r\nhello")
        await until(lambda: front.connections == 0)
        writer.close()
    server.close()


async def test_a_client_that_keeps_a_connection_it_does_not_read_holds_no_place(runtime, ends):
    """As clients with a pool do: what the gateway closed is found closed when it is used the next time."""
    server = await answering(runtime / "http.sock", b"hello")
    async with Front(Hub(Table()), runtime / "http.sock", port=0, tls=ends[0], linger_s=0.1) as front:
        with await asyncio.to_thread(_pooled, front.port, ends[1]):
            # TLS alone would wait for its goodbye for 30 s.
            await asyncio.wait_for(until(lambda: front.connections == 0), 10)
    server.close()


def _pooled(port, tls):
    """A connection that was answered, and is not read any more."""
    sock = socket.create_connection(("127.0.0.1", port))
    if tls is not None:
        sock = tls.wrap_socket(sock, server_hostname="127.0.0.1")
    sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"hello"):
        answer += sock.recv(4096)
    return sock


async def test_a_client_that_is_gone_before_the_gateway_closes_is_no_failure(runtime, ends, caplog):
    closing = asyncio.Event()
    server = await answering(runtime / "http.sock", b"hello", closing)
    async with Front(Hub(Table()), runtime / "http.sock", port=0, tls=ends[0], linger_s=0.1) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, ssl=ends[1])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"hello")
        writer.transport.abort()
        await asyncio.sleep(0.1)
        closing.set()
        await until(lambda: front.connections == 0)
    server.close()
    assert [each.getMessage() for each in caplog.records if each.levelname in ("WARNING", "ERROR")] == []


async def test_the_end_of_an_answer_is_not_cut_off_for_a_slow_client(runtime, monkeypatch, ends):
    # Small kernel buffers, so that the front itself still holds a part when the gateway has closed.
    monkeypatch.setattr(front_module, "_keep_alive", lambda sock: _small_buffer(sock, socket.SO_SNDBUF))
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", 0.1)  # 30 s, and a client may stall for 120 s
    body = random.Random(4).randbytes(60_000)
    closed = asyncio.Event()

    async def gateway(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_unix_server(gateway, runtime / "http.sock")
    async with Front(Hub(Table()), runtime / "http.sock", port=0, tls=ends[0], linger_s=0.05) as front:
        sock = await asyncio.to_thread(_asking, front.port, ends[1])
        await asyncio.wait_for(closed.wait(), TIMEOUT_S)
        await asyncio.sleep(0.3)  # longer than the front lingers
        answer = await asyncio.to_thread(_rest_of, sock)
    server.close()
    assert answer.partition(b"\r\n\r\n")[2] == body


def _asking(port, tls):
    """A connection that asked and has not read yet: a blocking one, since asyncio's TLS reads ahead."""
    sock = socket.socket()
    _small_buffer(sock, socket.SO_RCVBUF)
    sock.settimeout(TIMEOUT_S)
    sock.connect(("127.0.0.1", port))
    if tls is not None:
        sock = tls.wrap_socket(sock, server_hostname="127.0.0.1")
    sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    return sock


def _rest_of(sock):
    with sock, sock.makefile("rb") as file:
        return file.read()


def _small_buffer(sock, which):
    sock.setsockopt(socket.SOL_SOCKET, which, 4096)


async def test_a_gateway_that_is_not_there_is_502(runtime):
    async with (
        Front(Hub(Table()), runtime / "missing.sock", port=0) as front,
        raw(front.port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, _),
    ):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
        assert json.loads(await reader.read()) == {"error": "the gateway is not running"}


async def test_a_busy_port_is_named(runtime):
    async with Front(Hub(Table()), runtime / "http.sock", port=0) as front:
        with pytest.raises(SystemResourceError, match=str(front.port)) as refusal:
            await Front(Hub(Table()), runtime / "http.sock", port=front.port).start()
    assert refusal.value.code == "port_busy"
    assert "gateway.port" in refusal.value.hint


async def test_an_address_of_another_machine_is_named(runtime, tls_files):
    tls = server_context(tls_files.cert, tls_files.key)
    with pytest.raises(SystemResourceError, match=r"192\.0\.2\.1"):
        await Front(Hub(Table()), runtime / "http.sock", host="192.0.2.1", port=0, tls=tls).start()


async def test_plain_http_is_for_loopback_only(runtime):
    with pytest.raises(ConfigError) as refusal:
        Front(Hub(Table()), runtime / "http.sock", host="0.0.0.0")  # noqa: S104
    assert refusal.value.code == "tls_required"


async def test_closing_drops_what_is_open_and_frees_the_port(runtime):
    async with network(runtime) as (front, _):
        async with raw(front.port, b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, _):
            await reader.readuntil(b"one")
            port = front.port
            await front.close()
            assert front.connections == 0
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), TIMEOUT_S)
        async with Front(Hub(Table()), runtime / "http.sock", port=port) as again:
            assert again.port == port
