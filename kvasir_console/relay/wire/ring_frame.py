"""The frame that carries everything the ranks of a ring say to each other (sans-I/O, little-endian).

    header, 32 bytes
         0   4  magic "KVRG"
         4   1  version, u8 = 2
         5   1  kind, u8 (``FrameKind``)
         6   2  flags, u16
         8   4  epoch, u32: the generation of the placement plan
        12   4  count, u32: items in the table
        16   4  payload_bytes, u32
        20   4  slowest_us, u32: the longest that any rank took to compute what this frame carries
        24   4  inside_us, u32: how long it spent in ranks altogether, waiting included
        28   4  zero
    item, 24 bytes, ``count`` times
         0   8  request id, u64
         8   4  step, u32: the number of the step that the rows belong to, 0 for none
        12   4  position, u32: of the item's first row in its sequence
        16   4  rows, u32
        20   4  flags, u32
    payload, then CRC32C (RFC 3720) of every byte before it, u32

One frame moves a whole batch: the rows of its items follow each other in the payload. The checksum is for faults, not
for enemies: it guards a rank's memory and drivers, which TLS does not. Announced sizes are refused from the header
alone. What a kind's payload holds is in ``relay.wire.ring``.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from enum import IntEnum

import google_crc32c
import numpy as np

from kvasir_console.relay.wire.control import Reader

MAGIC = b"KVRG"
VERSION = 2
MAX_ITEMS = 4096
MAX_ROWS = 65536
MAX_PAYLOAD_BYTES = 64 * 2**20
MAX_ADMIT_BYTES = 8 * 2**20
MAX_ERROR_BYTES = 64 * 2**10
HELLO_BYTES = 60
PING_BYTES = 64
PROGRESS_BYTES = 24
MAX_RANKS = 1024

_HEADER = struct.Struct("<4sBBHIIIII4s")
_ITEM = struct.Struct("<QIIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
ITEM_BYTES = _ITEM.size
_ZERO = bytes(4)
_MOST_US = 2**32 - 1


class FrameKind(IntEnum):
    HELLO = 1
    ADMIT = 2
    HIDDEN = 3
    TOKEN = 4
    RELEASE = 5
    ERROR = 6
    PING = 7
    PONG = 8
    HELD = 9
    ROLL = 10
    LOST = 11
    PROGRESS = 12


# kind: fewest items, most items, most payload bytes
_LIMITS: dict[FrameKind, tuple[int, int, int]] = {
    FrameKind.HELLO: (0, 0, HELLO_BYTES),
    FrameKind.ADMIT: (1, 1, MAX_ADMIT_BYTES),
    FrameKind.HIDDEN: (1, MAX_ITEMS, MAX_PAYLOAD_BYTES),
    FrameKind.TOKEN: (1, MAX_ITEMS, 4 * MAX_ITEMS),
    FrameKind.RELEASE: (1, MAX_ITEMS, 0),
    FrameKind.ERROR: (0, MAX_ITEMS, MAX_ERROR_BYTES),
    FrameKind.PING: (0, 0, PING_BYTES),
    FrameKind.PONG: (0, 0, PING_BYTES),
    FrameKind.HELD: (0, MAX_ITEMS, 4 * MAX_ROWS),
    FrameKind.ROLL: (0, MAX_ITEMS, 0),
    FrameKind.LOST: (0, 0, 2 * MAX_RANKS),
    FrameKind.PROGRESS: (0, 0, PROGRESS_BYTES),
}


class RingError(ValueError):
    """Bytes that are no frame, or a frame that contradicts itself or its ring; ``reason`` is a stable name."""

    def __init__(self, message: str, reason: str = "protocol") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence's part of a frame."""

    request_id: int
    step: int = 0
    position: int = 0
    rows: int = 1
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    epoch: int
    items: tuple[Item, ...] = ()
    payload: bytes = b""
    flags: int = 0
    slowest_us: int = 0
    inside_us: int = 0

    @property
    def rows(self) -> int:
        """Rows of all items together."""
        return sum(item.rows for item in self.items)


def is_stale(frame_epoch: int, current_epoch: int) -> bool:
    """Whether a frame was sent under an older plan; it is dropped and its sender told to exit."""
    return frame_epoch < current_epoch


def encode(frame: Frame) -> bytes:
    """The bytes of ``frame``. Raises ``RingError`` for one that its receiver would refuse."""
    try:
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            frame.kind,
            frame.flags,
            frame.epoch,
            len(frame.items),
            len(frame.payload),
            min(frame.slowest_us, _MOST_US),
            min(frame.inside_us, _MOST_US),
            _ZERO,
        )
        table = b"".join(
            _ITEM.pack(item.request_id, item.step, item.position, item.rows, item.flags) for item in frame.items
        )
    except struct.error as error:
        raise RingError(f"a number does not fit its field: {error}", "field_range") from error
    _check_limits(frame.kind, len(frame.items), len(frame.payload))
    _check_consistent(frame)
    head = header + table
    crc = google_crc32c.extend(google_crc32c.value(head), frame.payload)
    return b"".join((head, frame.payload, _CRC.pack(crc)))


def decode(data: bytes) -> Frame:
    """The one frame that ``data`` is. Raises ``RingError``."""
    decoder = FrameDecoder()
    decoder.feed(data)
    frame = decoder.next()
    decoder.eof()
    if frame is None:
        raise RingError("there is no frame", "truncated")
    return frame


class FrameDecoder:
    """Frames out of a byte stream. After a ``RingError`` every later call raises the same one: close the edge."""

    __slots__ = ("_buffer", "_error", "_header")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: _Header | None = None
        self._error: RingError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        if self._error is None:
            self._buffer += data

    def next(self) -> Frame | None:
        """The next whole frame, or None while its end has not come."""
        if self._error is not None:
            raise self._error
        try:
            if self._header is None:
                if len(self._buffer) < HEADER_BYTES:
                    return None
                self._header = _read_header(bytes(self._buffer[:HEADER_BYTES]))
            header = self._header
            if len(self._buffer) < HEADER_BYTES + header.rest_bytes:
                return None
            with memoryview(self._buffer) as view:
                rest = bytes(view[HEADER_BYTES : HEADER_BYTES + header.rest_bytes])
            del self._buffer[: HEADER_BYTES + header.rest_bytes]
            self._header = None
            return _read_rest(header, rest)
        except RingError as error:
            self._error = error
            self._buffer = bytearray()
            raise

    def eof(self) -> None:
        """The stream has ended. Raises ``RingError`` if it ended inside a frame."""
        if self._error is not None:
            raise self._error
        if self._buffer:
            self._error = RingError(f"the stream ended after {len(self._buffer)} bytes of a frame", "truncated")
            raise self._error


async def read_frame(reader: Reader) -> Frame:
    """The next frame. Raises ``RingError`` for a bad or broken-off one, ``IncompleteReadError`` at a clean end."""
    try:
        head = await reader.readexactly(HEADER_BYTES)
        header = _read_header(head)
        return _read_rest(header, await reader.readexactly(header.rest_bytes))
    except asyncio.IncompleteReadError as error:
        if error.expected == HEADER_BYTES and not error.partial:
            raise
        raise RingError("the stream ended inside a frame", "truncated") from error


@dataclass(frozen=True, slots=True)
class _Header:
    raw: bytes
    kind: FrameKind
    flags: int
    epoch: int
    count: int
    payload_bytes: int
    slowest_us: int
    inside_us: int

    @property
    def rest_bytes(self) -> int:
        return self.count * ITEM_BYTES + self.payload_bytes + _CRC.size


def _read_header(raw: bytes) -> _Header:
    magic, version, kind, flags, epoch, count, payload_bytes, slowest_us, inside_us, zero = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise RingError("the bytes are not a ring frame", "magic")
    if version != VERSION:
        raise RingError(f"a ring frame has version {version}; this rank speaks {VERSION}", "version")
    try:
        kind = FrameKind(kind)
    except ValueError:
        raise RingError(f"a ring frame has the unknown kind {kind}", "kind") from None
    if zero != _ZERO:
        raise RingError("a reserved field of a ring frame is not zero", "reserved")
    _check_limits(kind, count, payload_bytes)
    return _Header(raw, kind, flags, epoch, count, payload_bytes, slowest_us, inside_us)


def _read_rest(header: _Header, rest: bytes) -> Frame:
    end = len(rest) - _CRC.size
    # The C extension reads bytes and arrays without copying them, but refuses memory views.
    covered = np.frombuffer(rest, dtype=np.uint8, count=end)
    crc = google_crc32c.extend(google_crc32c.value(header.raw), covered)
    if crc != _CRC.unpack_from(rest, end)[0]:
        raise RingError("the checksum of a ring frame does not match its bytes", "checksum")
    table = header.count * ITEM_BYTES
    items = tuple(Item(*fields) for fields in _ITEM.iter_unpack(rest[:table]))
    frame = Frame(header.kind, header.epoch, items, rest[table:end], header.flags, header.slowest_us, header.inside_us)
    _check_consistent(frame)
    return frame


def _check_limits(kind: FrameKind, count: int, payload_bytes: int) -> None:
    fewest, most, most_bytes = _LIMITS[kind]
    if not fewest <= count <= most:
        raise RingError(f"a {kind.name} frame of {count} items; it has {fewest} to {most}", "count")
    if payload_bytes > most_bytes:
        raise RingError(f"a {kind.name} payload of {payload_bytes} bytes; the limit is {most_bytes}", "payload_bytes")


def _check_consistent(frame: Frame) -> None:
    """What a frame's table and payload must agree on, whatever the model."""
    rows, size = frame.rows, len(frame.payload)
    if rows > MAX_ROWS:
        raise RingError(f"a {frame.kind.name} frame of {rows} rows; the limit is {MAX_ROWS}", "rows")
    if frame.kind is FrameKind.HIDDEN and (any(item.rows == 0 for item in frame.items) or size == 0 or size % rows):
        raise RingError(f"a HIDDEN payload of {size} bytes cannot hold {rows} rows", "rows")
    if frame.kind is FrameKind.TOKEN and size != 4 * len(frame.items):
        raise RingError(f"a TOKEN payload of {size} bytes for {len(frame.items)} items", "payload_bytes")
    if frame.kind is FrameKind.HELLO and size != HELLO_BYTES:
        raise RingError(f"a HELLO payload of {size} bytes; it has {HELLO_BYTES}", "payload_bytes")
