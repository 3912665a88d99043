"""A ring edge that goes straight from one node to the next, where the owners of both allow it.

The successor listens with TLS 1.3 and a certificate of its own making, the predecessor dials. The gateway introduces
them: the predecessor gets the address, the certificate's SHA-256 and a ticket, the successor the ticket. The dialler
sends nothing before it has compared the certificate, so a wrong address learns no more than that somebody called.

    dialler -> listener    "KVSE", u8 version 1, u16 edge, u16 length of the ring's id, the id, 32 bytes ticket
    listener -> dialler    0x01

Little-endian. After that come the edge's own bytes, both ways, which nobody looks at here.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import ipaddress
import logging
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvasir_console.errors import ConfigError, NetworkError
from kvasir_console.relay.splice import CHUNK_BYTES, SocketEnd
from kvasir_console.relay.tls import is_loopback

MAX_RING_BYTES = 128
TICKET_BYTES = 32
MAX_GREETING = 16
"""Most connections that have not shown a ticket yet; a further one is closed at once."""
TIMEOUT_S = 10.0
"""For the handshake, and then for the ticket."""
_HEAD = struct.Struct("<4sBHH")
_MAGIC, _VERSION, _WELCOME = b"KVSE", 1, b"\x01"
_LIFETIME = datetime.timedelta(days=3650)
_log = logging.getLogger(__name__)

Carry = Callable[[SocketEnd], Awaitable[None]]
"""Carries an edge's bytes until one side is gone."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What the gateway tells one end of an edge. ``address`` and ``certificate`` only the end that dials, if the other
    listens."""

    ring: str
    edge: int
    role: str
    """``P``, the predecessor on this edge, or ``N``."""
    ticket: bytes = field(repr=False)
    address: str = ""
    """``HOST:PORT``."""
    certificate: str = ""
    """SHA-256 of the listener's certificate (DER), in hexadecimal digits."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Introduction:
        """Raises ``ValueError`` for what is none."""
        ring, edge, role, ticket = (data.get(name) for name in ("ring", "edge", "role", "ticket"))
        address, certificate = data.get("address", ""), data.get("certificate", "")
        if not isinstance(ring, str) or not 0 < len(ring.encode()) <= MAX_RING_BYTES:
            raise ValueError("the ring has no name")
        if type(edge) is not int or not 0 <= edge < 2**16 or role not in ("P", "N"):
            raise ValueError("there is no such edge")
        if not isinstance(ticket, str) or not isinstance(address, str) or not isinstance(certificate, str):
            raise ValueError("a field is not text")
        shown = bytes.fromhex(ticket)
        if len(shown) != TICKET_BYTES:
            raise ValueError("the ticket has another length")
        if address or certificate:
            parse_address(address)
            check_fingerprint(certificate)
        return cls(ring, edge, role, shown, address, certificate)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPV6]:PORT``. Raises ``ValueError``."""
    if len(text) > 260 or not text.isascii() or not text.isprintable() or set(text) & set("/?#@\\ "):
        raise ValueError(f"{text[:60]!r} is not HOST:PORT")
    parts = urlsplit(f"//{text}")
    if not parts.hostname or not parts.port:
        raise ValueError(f"{text[:60]!r} is not HOST:PORT")
    return parts.hostname, parts.port


def check_fingerprint(text: str) -> None:
    """Raises ``ValueError`` for what is not a SHA-256 in hexadecimal digits."""
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError("a certificate is named by 64 hexadecimal digits")


@dataclass(frozen=True, slots=True)
class Identity:
    """A listener's certificate, made anew with each start."""

    context: ssl.SSLContext
    fingerprint: str
    """SHA-256 of the certificate (DER), in hexadecimal digits."""

    @classmethod
    def make(cls) -> Identity:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvasir node")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + _LIFETIME)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.TemporaryDirectory() as directory:  # 0700; the library reads from files only
            file = Path(directory) / "node.pem"
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(certificate.public_bytes(serialization.Encoding.PEM) + private)
            context.load_cert_chain(file)
        return cls(context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest())


class DirectListener:
    """Takes connections of predecessors. ``admit`` says who carries an edge, ``None`` for a wrong ticket."""

    def __init__(
        self, identity: Identity, admit: Callable[[str, int, bytes], Carry | None], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._identity = identity
        self._admit = admit
        self._timeout_s = timeout_s
        self._greeting = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port that is listened on; 0 while it is not."""
        return self._server.sockets[0].getsockname()[1] if self._server is not None else 0

    async def start(self, address: str) -> None:
        """Listen on ``HOST:PORT``. Raises ``ConfigError`` if that cannot be had."""
        try:
            host, port = parse_listen(address)
            self._server = await asyncio.start_server(
                self._connected,
                host,
                port,
                ssl=self._identity.context,
                ssl_handshake_timeout=self._timeout_s,
                limit=2 * CHUNK_BYTES,
            )
        except (OSError, ValueError) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(
                "direct_listen_refused",
                f"Nobody can be listened for on node.direct_listen {address!r}: {why}.",
                "Choose another address or port, or leave it empty.",
            ) from error

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="direct edge")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = SocketEnd(reader, writer)
        try:
            if (carry := await self._greet(reader)) is not None:
                await end.write(_WELCOME)
                await carry(end)
        except ConnectionError:
            pass  # whoever called has left
        finally:
            await end.close()

    async def _greet(self, reader: asyncio.StreamReader) -> Carry | None:
        if self._greeting >= MAX_GREETING:
            return None
        self._greeting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                ring, edge, ticket = await read_greeting(reader)
        except (EOFError, OSError, ValueError):  # a timeout is one too
            return None
        finally:
            self._greeting -= 1
        carry = self._admit(ring, edge, ticket)
        if carry is None:
            _log.debug("a direct connection for edge %d of ring %.40r is refused", edge, ring)
        return carry


def encode_greeting(ring: str, edge: int, ticket: bytes) -> bytes:
    """What the dialler says first."""
    name = ring.encode()
    return _HEAD.pack(_MAGIC, _VERSION, edge, len(name)) + name + ticket


async def read_greeting(reader: asyncio.StreamReader) -> tuple[str, int, bytes]:
    """Ring, edge and ticket. Raises ``ValueError`` for what is no greeting, ``EOFError`` for half of one."""
    magic, version, edge, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if magic != _MAGIC or version != _VERSION or length > MAX_RING_BYTES:
        raise ValueError("this is no greeting of version 1")
    ring = (await reader.readexactly(length)).decode()
    return ring, edge, await reader.readexactly(TICKET_BYTES)


def same_ticket(one: bytes, other: bytes) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(one, other)


def parse_listen(text: str) -> tuple[str, int]:
    """As ``parse_address``; port 0 lets the system choose. Raises ``ValueError``."""
    host, colon, port = text.rpartition(":")
    if colon and port == "0":
        return parse_address(f"{host}:1")[0], 0
    return parse_address(text)


async def dial(introduction: Introduction, *, loopback: bool, timeout_s: float = TIMEOUT_S) -> SocketEnd:
    """An open edge to the other end.

    Args:
        loopback: this machine is a place to dial; only where the gateway is on it, too.

    Raises:
        NetworkError: ``direct_forbidden``, ``direct_unreachable``, ``direct_wrong_certificate``, ``direct_refused``.
    """
    where = introduction.address
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate itself is compared, below
    try:
        async with asyncio.timeout(timeout_s):
            host, port = await _resolve(*parse_address(where), loopback=loopback)
            reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=2 * CHUNK_BYTES)
    except (OSError, ValueError) as error:
        raise NetworkError(
            "direct_unreachable", f"{where} does not answer.", "The edge goes through the relay; it is tried again."
        ) from error
    end = SocketEnd(reader, writer)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(hashlib.sha256(shown).hexdigest(), introduction.certificate):
            raise NetworkError(
                "direct_wrong_certificate",
                f"Whoever answers at {where} has another certificate than the gateway named.",
                "The edge goes through the relay; it is tried again.",
            )
        try:
            async with asyncio.timeout(timeout_s):
                await end.write(encode_greeting(introduction.ring, introduction.edge, introduction.ticket))
                welcome = await reader.readexactly(1)
        except (EOFError, OSError):
            welcome = b""
        if welcome != _WELCOME:
            raise NetworkError(
                "direct_refused", f"{where} refuses this edge.", "The edge goes through the relay; it is tried again."
            )
    except BaseException:
        with contextlib.suppress(OSError):
            writer.transport.abort()
        raise
    return end


async def _resolve(host: str, port: int, *, loopback: bool) -> tuple[str, int]:
    """The first address of ``host`` that may be dialled, so that what was looked at is what is connected to."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, place in found:
        address = ipaddress.ip_address(str(place[0]).partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        if mapped.is_multicast or mapped.is_unspecified or mapped.is_link_local or mapped.is_reserved:
            continue
        if mapped.is_loopback and not loopback:
            continue
        return str(address), port
    raise NetworkError(
        "direct_forbidden",
        f"{host} is not an address of another machine.",
        "The neighbour must correct node.direct_address; the edge goes through the relay.",
    )


def on_loopback(gateway: str) -> bool:
    """Whether a gateway (``https://HOST``) is on this machine."""
    return is_loopback(urlsplit(gateway).hostname or "")
