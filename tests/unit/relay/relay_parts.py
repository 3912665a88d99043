"""What the relay tests share: engines, an authority, and a WebSocket client made of plain bytes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from data_socket import Engine, Link

from kvasir_console.relay.authority import Admission, Refused
from kvasir_console.relay.wire.preamble import Kind, Preamble

__all__ = ["Engine", "Link", "RawClient", "Table"]

TOKEN = "a-node-token"
WALLET = "9xQeWvG816bUx9EPjHmaT23yvVM2ZWbrrpZb9PusVFin"
TIMEOUT_S = 120.0


async def echo(link: Link) -> None:
    while data := await link.reader.read(65536):
        link.writer.write(data)
        await link.writer.drain()


@dataclass
class Table:
    """An authority that knows a fixed set of sessions and one token."""

    admissions: dict[str, Admission] = field(default_factory=dict)
    refusals: dict[str, Refused] = field(default_factory=dict)
    token: str = TOKEN
    asked: list[tuple[str, dict[str, str], str | None]] = field(default_factory=list)

    async def admit(self, path: str, query: Mapping[str, str], token: str | None) -> Admission:
        self.asked.append((path, dict(query), token))
        if token != self.token:
            raise Refused(4401, "bad or expired token")
        if path == "/api/expert-relay":
            name = query["session"]
        else:
            name = f"{query['controller_id']}/{query['edge']}/{query['role']}"
        if name in self.refusals:
            raise self.refusals[name]
        if name not in self.admissions:
            raise Refused(4404, "unknown session")
        return self.admissions[name]

    def expert(self, session: str, engine: Path | None, wallet: str = WALLET) -> None:
        preamble = Preamble(Kind.DISPATCH, session, wallet, layer=3, begin=0, end=4)
        self.admissions[session] = Admission(session, wallet, preamble=preamble, engine_socket=engine)

    def edge(self, ring: str, edge: int) -> None:
        for role, other in (("P", "N"), ("N", "P")):
            key = f"{ring}/{edge}/{role}"
            self.admissions[key] = Admission(key, WALLET, peer_key=f"{ring}/{edge}/{other}")

    def entry(self, ring: str) -> None:
        self.admissions[f"{ring}/entry/N"] = Admission(f"{ring}/entry/N", WALLET, entry_model="smollm2-135m")


def frame(
    opcode: int,
    payload: bytes,
    *,
    fin: bool = True,
    mask: bytes | None = b"\x37\xfa\x21\x3d",
    length: int | None = None,
) -> bytes:
    """A client frame, RFC 6455 section 5.2; ``length`` lies about the payload's size."""
    size = len(payload) if length is None else length
    head = bytes([(0x80 if fin else 0) | opcode])
    bit = 0x80 if mask is not None else 0
    if size < 126:
        head += bytes([bit | size])
    elif size < 65536:
        head += bytes([bit | 126]) + struct.pack("!H", size)
    else:
        head += bytes([bit | 127]) + struct.pack("!Q", size)
    if mask is None:
        return head + payload
    return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


class RawClient:
    """A WebSocket client made of bytes, so that it can also do what no library would."""

    KEY = "dGhlIHNhbXBsZSBub25jZQ=="  # the sample of RFC 6455 section 1.3
    ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.answer = b""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, port: int, target: str, headers: tuple[str, ...] = ()) -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = cls(reader, writer)
        lines = [
            f"GET {target} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {cls.KEY}",
            "Sec-WebSocket-Version: 13",
            *headers,
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        try:
            client.answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
            yield client
        finally:
            writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """The next frame from the server: opcode and payload."""
        return await asyncio.wait_for(self._receive(), TIMEOUT_S)

    async def _receive(self) -> tuple[int, bytes]:
        first, second = await self.reader.readexactly(2)
        assert second & 0x80 == 0, "a server must not mask"
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", await self.reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await self.reader.readexactly(8))
        return first & 0x0F, await self.reader.readexactly(size)

    async def receive_data(self, size: int) -> bytes:
        """The next ``size`` payload bytes, in however many binary frames."""
        data = b""
        while len(data) < size:
            opcode, payload = await self.receive()
            if opcode in (9, 10):
                continue
            assert opcode == 2, f"opcode {opcode}: {payload!r}"
            data += payload
        assert len(data) == size
        return data

    async def receive_close(self) -> tuple[int, str]:
        """Code and reason of the close frame, which must come next but for pings and pongs."""
        while True:
            opcode, payload = await self.receive()
            if opcode in (9, 10):
                continue
            assert opcode == 8, f"opcode {opcode}: {payload[:40]!r}"
            return struct.unpack("!H", payload[:2])[0], payload[2:].decode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def expert_target(session: str, token: str = TOKEN) -> str:
    return f"/api/expert-relay?session={session}&token={token}"


def ring_target(ring: str, edge: int | str, role: str, token: str = TOKEN) -> str:
    return f"/api/ring-relay?controller_id={ring}&edge={edge}&role={role}&token={token}"


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds; fails if it never does."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 (what is waited for is seen from outside, and tells nobody)
            await asyncio.sleep(0.005)


async def fill(writer: asyncio.StreamWriter, piece: bytes, limit: int) -> int:
    """Write ``piece`` again and again until nobody has taken any for a second; returns how many were written.

    Fails if ``limit`` of them are taken.
    """
    for count in range(1, limit + 1):
        writer.write(piece)
        try:
            await asyncio.wait_for(writer.drain(), 1.0)
        except TimeoutError:
            return count
    raise AssertionError(f"{limit} pieces of {len(piece)} bytes were taken")


def accept_key(key: str) -> str:
    """RFC 6455 section 4.2.2."""
    return base64.b64encode(
        hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()  # noqa: S324
    ).decode()


async def accept_upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer an upgrade request the way RFC 6455 section 4.2.2 asks for, and nothing more."""
    head = await reader.readuntil(b"\r\n\r\n")
    [key] = [line for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key:")]
    accept = accept_key(key.partition(b":")[2].strip().decode())
    writer.write(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
    )
