"""A public front before a gateway that only its own network can reach: everything is passed on, upgrades byte by byte.

The front ends the public TLS; the stream to the gateway behind it is another TLS connection of the operator's own
network. A relay session is spliced raw: the two WebSocket ends are the node and the hub, and what is between them
copies without looking, with back-pressure, one chunk at a time in each direction.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvasir_console.errors import ConfigError
from kvasir_console.relay.http_requests import HeadError
from kvasir_console.relay.splice import CHUNK_BYTES, close_writer
from kvasir_console.relay.tls import is_loopback

__all__ = ["RawUpgrades", "Upstream", "parse_upstream"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where the gateway behind the front listens."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    timeout_s: float = 5.0

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises ``OSError``."""
        async with asyncio.timeout(self.timeout_s):
            return await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=2 * CHUNK_BYTES)


def parse_upstream(url: str, tls: ssl.SSLContext) -> Upstream:
    """``https://host:port``, or ``http`` on loopback.

    Raises:
        ConfigError: another URL, or one that would send what the public TLS protected in clear to another machine.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        legal = parts.scheme in ("https", "http") and parts.hostname and port and parts.path in ("", "/")
    except ValueError:
        legal, port = False, None
    if not legal or parts.username is not None or parts.query or parts.fragment or not parts.hostname or not port:
        raise ConfigError("bad_upstream", f"gateway.upstream {url!r} is not https://HOST:PORT.")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            "upstream_not_encrypted",
            f"gateway.upstream: {url} is not encrypted, and {parts.hostname} is another machine.",
            "Give the gateway behind it a certificate (network.ca_file names its issuer) and use https://.",
        )
    return Upstream(parts.hostname, port, tls if parts.scheme == "https" else None)


class RawUpgrades:
    """In the hub's place: hands every upgraded connection on as it is."""

    def __init__(self, upstream: Upstream, *, linger_s: float = 2.0) -> None:
        self._upstream = upstream
        self._linger_s = linger_s

    async def serve(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Splice one connection to its end. Raises ``HeadError`` 502 while the gateway cannot be reached."""
        try:
            inner_reader, inner_writer = await self._upstream.open()
        except OSError as error:  # a timeout is one too
            _log.warning("the gateway at %s does not answer: %s", self._upstream.host, type(error).__name__)
            raise HeadError(502, "the gateway is not running") from None
        inner_writer.write(head)
        tasks = [
            asyncio.ensure_future(_copy(reader, inner_writer)),
            asyncio.ensure_future(_copy(inner_reader, writer)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The last word of the side that ended (a close frame) may still be on its way; its answer gets a moment.
            await asyncio.wait(tasks, timeout=self._linger_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await close_writer(inner_writer, self._linger_s)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()
