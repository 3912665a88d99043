"""The one port of a gateway: relay upgrades go to the hub, all other requests to the HTTP server behind it.

The front speaks TLS, or plain HTTP on a loopback address only. Of a connection that begins with an upgrade to one of
the two relay paths it hands the whole stream to the hub. Any other connection is spliced to the gateway's HTTP server
on a Unix socket, both ways and with back-pressure, for as long as the two keep it alive; responses pass untouched,
and every request head is rewritten to carry the true address of its sender (``http_requests``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
import ssl
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from kvasir_console.errors import ConfigError, SystemResourceError
from kvasir_console.relay.http_requests import HEAD_BYTES, HeadError, RequestHead, RequestStream
from kvasir_console.relay.hub import EXPERT_PATH, RING_PATH
from kvasir_console.relay.splice import CHUNK_BYTES, LocalEnd, StreamEnd, close_writer, finish
from kvasir_console.relay.tls import is_loopback, server_context
from kvasir_console.relay.upstream import Upstream

__all__ = ["Front", "Upgrades", "server_context"]

_KEEPALIVE_S = 60
"""Idle time before the kernel probes a peer (gateway contract, section 5.1)."""
_log = logging.getLogger(__name__)


class Upgrades(Protocol):
    """The hub, as the front sees it: this process's own, or one behind it (``upstream.RawUpgrades``)."""

    async def serve(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run one upgraded connection to its end."""
        ...


class Front:
    """A listening port. ``async with`` starts and stops it."""

    def __init__(
        self,
        hub: Upgrades,
        gateway: Path | Upstream,
        *,
        host: str = "127.0.0.1",
        port: int = 8791,
        tls: ssl.SSLContext | None = None,
        max_connections: int = 480,  # two descriptors each, under the usual limit of 1024
        head_bytes: int = HEAD_BYTES,
        head_timeout_s: float = 10.0,
        body_timeout_s: float = 30.0,
        stall_timeout_s: float = 120.0,
        linger_s: float = 1.0,
    ) -> None:
        """
        Args:
            gateway: Unix socket of the gateway's HTTP server, or where another machine's gateway listens.
            port: 0 lets the kernel choose; see ``port``.
            tls: from ``server_context``; ``None`` is accepted for loopback addresses only.
            max_connections: more are answered 503; from twice as many on, connections are dropped unheard.
            head_timeout_s: for the TLS handshake, and again for the whole first request head.
            body_timeout_s: longest silence of a client inside a request.
            stall_timeout_s: longest time in which a client may take no byte of its answer.

        Raises:
            ConfigError: plain HTTP on an address that others can reach.
        """
        if tls is None and not is_loopback(host):
            raise ConfigError(
                "tls_required",
                f"The gateway would serve plain HTTP on {host}, which other machines can reach.",
                "Set gateway.tls_cert and gateway.tls_key, or gateway.host to 127.0.0.1.",
            )
        self._hub = hub
        self._gateway = gateway
        self._host = host
        self._port = port
        self._tls = tls
        self._max_connections = max_connections
        self._head_bytes = head_bytes
        self._head_timeout_s = head_timeout_s
        self._body_timeout_s = body_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._linger_s = linger_s
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port listened on."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else self._port

    @property
    def connections(self) -> int:
        """Connections that are open now, those still in their TLS handshake included."""
        return len(self._connections)

    async def start(self) -> None:
        """Listen. Raises ``SystemResourceError`` if the address cannot be had."""
        try:
            self._listener = socket.create_server(
                (self._host, self._port),
                family=socket.AF_INET6 if ":" in self._host else socket.AF_INET,
                backlog=256,
            )
        except OSError as error:
            raise _listen_error(self._host, self._port, error) from error
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def close(self) -> None:
        """Stop listening and drop what is still open. Close the hub first, so that its nodes are told."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def __aenter__(self) -> Front:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or a client that was gone before we looked
                _log.warning("accepting a connection failed: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= 2 * self._max_connections:
                sock.close()
                continue
            task = asyncio.create_task(self._connection(sock, str(address[0])))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _connection(self, sock: socket.socket, peer: str) -> None:
        # asyncio would set this for a socket that names its protocol; an accepted one does not.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(sock)
        reader = asyncio.StreamReader(limit=self._head_bytes)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        limits: dict[str, Any] = {}
        if self._tls is not None:  # its goodbye comes after all that is buffered
            limits = {"ssl_handshake_timeout": self._head_timeout_s, "ssl_shutdown_timeout": self._stall_timeout_s}
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls, **limits)
        except OSError as error:
            _log.debug("no TLS with %s: %s", peer, error)
            sock.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            await self._serve(reader, writer, peer)
        except OSError as error:  # either side went away, or a timeout, which is one too
            _log.debug("a connection of %s ended: %s", peer, type(error).__name__)
        except Exception:
            _log.exception("a connection of %s failed", peer)
        finally:
            await close_writer(writer, self._linger_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        try:
            if len(self._connections) > self._max_connections:
                raise HeadError(503, "too many connections; try again later")
            raw = await self._first_head(reader)
            if raw is None:
                return
            head = RequestHead.parse(raw)
            if head.upgrade:
                if head.method != b"GET" or not head.websocket or head.path not in (EXPERT_PATH, RING_PATH):
                    raise HeadError(404, "there is nothing to upgrade to at this path")
                await self._hub.serve(raw, reader, writer)
                return
            requests = RequestStream(peer, "https" if self._tls is not None else "http", head_bytes=self._head_bytes)
            first = requests.feed(raw)
            try:
                inner = await self._open_gateway()
            except OSError as error:
                _log.warning("the gateway at %s does not answer: %s", self._gateway, error.strerror)
                raise HeadError(502, "the gateway is not running") from None
        except HeadError as error:
            await self._answer(reader, writer, error)
            return
        try:
            whole = await self._splice(reader, writer, inner, requests, first)
        finally:
            await inner.close()
        # TLS holds a part that ``drain`` does not know of: the end of an answer has as much time as the rest of it had.
        close_s = self._stall_timeout_s if whole else self._linger_s
        if not requests.idle:
            await finish(reader, writer, linger_s=self._linger_s, close_s=close_s)
        await close_writer(writer, close_s, goodbye_s=self._linger_s)

    async def _open_gateway(self) -> LocalEnd | StreamEnd:
        if isinstance(self._gateway, Path):
            return await LocalEnd.open(self._gateway)
        return StreamEnd(*await self._gateway.open())

    async def _first_head(self, reader: asyncio.StreamReader) -> bytes | None:
        """The first request head, or ``None`` if the client left before it was complete."""
        try:
            async with asyncio.timeout(self._head_timeout_s):
                return await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise HeadError(408, "the request did not come in time") from None
        except asyncio.LimitOverrunError:
            raise HeadError(431, "the request head is too long") from None
        except asyncio.IncompleteReadError:
            return None

    async def _splice(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        inner: LocalEnd | StreamEnd,
        requests: RequestStream,
        first: bytes,
    ) -> bool:
        """Pass requests in, ``first`` first, and answers out until the gateway has closed, or either side is gone.

        A client that closes its sending half still gets its answer; so does one that sends more than the gateway takes.

        Returns:
            Whether all that the gateway said was passed on.
        """

        async def inward() -> None:
            passing = first
            while True:
                try:
                    await inner.write(passing)
                except ConnectionError:
                    return  # the gateway takes no more; what it said before is on its way out
                async with asyncio.timeout(None if requests.idle else self._body_timeout_s):
                    data = await reader.read(CHUNK_BYTES)
                if not data:
                    await inner.end()
                    return
                passing = requests.feed(data)

        async def outward() -> None:
            while data := await inner.read():
                writer.write(data)
                async with asyncio.timeout(self._stall_timeout_s):
                    await writer.drain()
            if not writer.is_closing():
                # Now ``drain`` waits for the last byte to leave. At 0, TLS would pause for ever if there is none.
                writer.transport.set_write_buffer_limits(high=1)
            async with asyncio.timeout(self._stall_timeout_s):
                await writer.drain()

        tasks = [asyncio.ensure_future(inward()), asyncio.ensure_future(outward())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done() and tasks[0].exception() is None:
                await tasks[1]
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, HeadError):
                _log.info("a connection was cut: %s", outcome)
        return outcomes[1] is None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: HeadError) -> None:
        body = json.dumps({"error": str(error)}).encode()
        writer.write(
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        await finish(reader, writer, linger_s=self._linger_s)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)


def _listen_error(host: str, port: int, error: OSError) -> SystemResourceError:
    if error.errno == errno.EADDRINUSE:
        return SystemResourceError(
            "port_busy",
            f"Port {port} on {host} is already in use.",
            "Stop the program that holds it, or set gateway.port to a free port.",
        )
    if error.errno == errno.EACCES:
        return SystemResourceError(
            "port_forbidden", f"This user may not listen on port {port}.", "Set gateway.port to 1024 or above."
        )
    return SystemResourceError(
        "address_unavailable",
        f"Nothing can listen on {host}, port {port}: {error.strerror or error}.",
        "Set gateway.host to an address of this machine.",
    )
