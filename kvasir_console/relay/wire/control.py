"""Control messages: length-prefixed JSON objects, the same on an engine's socket, a node's socket and a ring's entry.

A message is a u32 little-endian length and that many bytes of UTF-8 JSON holding one object.
A request has ``id`` and ``verb``; its answer has the same ``id`` and ``ok: true``, or ``error`` (see
``errors.KvasirError.as_dict``). A message with ``event`` belongs to the request whose ``id`` it carries.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Protocol

from kvasir_console.errors import KvasirError, NetworkError
from kvasir_console.relay.wire.texts import loads

MAX_MESSAGE_BYTES = 16 * 2**20
_LENGTH = struct.Struct("<I")

Message = dict[str, Any]


class Reader(Protocol):
    """The part of ``asyncio.StreamReader`` that reading a message needs."""

    async def readexactly(self, n: int, /) -> bytes: ...


class Writer(Protocol):
    """The part of ``asyncio.StreamWriter`` that writing a message needs."""

    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...


def encode(message: Message) -> bytes:
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise NetworkError("control_message_too_long", f"A control message of {len(body)} bytes is too long.")
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: Reader, limit: int = MAX_MESSAGE_BYTES) -> Message:
    """The next message. Raises ``NetworkError`` for a bad one, ``asyncio.IncompleteReadError`` at the end."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > limit:
        raise NetworkError(
            "control_message_too_long", f"A control message announces {size} bytes; the limit is {limit}."
        )
    body = await reader.readexactly(size)
    try:
        message = loads(body)
    except ValueError as error:
        raise NetworkError("control_message_malformed", "A control message is not JSON.") from error
    if not isinstance(message, dict):
        raise NetworkError("control_message_malformed", "A control message is not a JSON object.")
    return message


async def write_message(writer: Writer, message: Message) -> None:
    writer.write(encode(message))
    await writer.drain()


def reply(request: Message, **fields: Any) -> Message:
    return {"id": request.get("id"), "ok": True, **fields}


def failure(request: Message, error: KvasirError) -> Message:
    return {"id": request.get("id"), "error": error.as_dict()}
