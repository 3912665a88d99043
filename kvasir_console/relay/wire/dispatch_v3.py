"""The expert dispatch stream, version 3: frames with ids, so that errors, cancelling and draining need no new session.

Either end opens its direction with the word -4 (which no older wire begins with) and a HELLO; the trunk speaks first,
and asks for nothing before it has read the worker's HELLO. After that a direction is a sequence of frames.

    header, 16 bytes, little-endian
         0   4  payload bytes, u32
         4   1  kind, u8 (``FrameKind``)
         5   1  flags, u8: the dtype of the frame's values in REQUEST and REPLY, else 0
         6   2  slice, u16: which of the worker's slices (REQUEST, REPLY), else 0
         8   8  request id, u64: chosen by the trunk, each greater than the last; 0 where no request is meant

    HELLO    u16 lowest and highest version, u32 n_embd, u32 dtypes (bit 1 << code), u32 n_slices,
             u64 byte budget of work in flight, 32 bytes model digest,
             then for each slice: i32 layer, i32 begin, i32 end, 32 bytes shard digest (zero: not known)
    REQUEST  u32 n_rows, u32 n_pairs, f32 weights[n_pairs], u16 row_idx[n_pairs], u16 ids[n_pairs] (local to the
             slice), then rows[n_rows, E] as ``values`` writes them
    REPLY    u32 status (``Status``), u32 microseconds the worker took, then sums[n_rows, E]; no sums if cancelled
    ERROR    u16 code (``ErrorCode``), UTF-8 text; the request with this id is over, the session is not. With id 0 it
             is about no request; often the last word before the sender closes
    CANCEL   nothing; the request is answered by a REPLY (computed already, or cancelled) or an ERROR all the same
    PING     up to 64 bytes; PONG brings them back
    GOODBYE  UTF-8 text. From a worker: ask for nothing new, I answer what I have. From a trunk: nothing more will
             come, close when you have answered

A frame's size is judged by its header, before anything is kept of its payload. One that is too large or of no known
kind is skipped and answered by an ERROR; what cannot be skipped ends the session.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from kvasir_console.relay.wire.dispatch import MAX_PAIRS, MAX_ROWS, Request
from kvasir_console.relay.wire.preamble import Wire
from kvasir_console.relay.wire.values import Dtype, F32Array, decode_rows, encode_rows, values_bytes

MARKER = -4
OPENING = struct.pack("<i", MARKER)
VERSION = 3
MAX_SLICES = 256
MAX_TEXT_BYTES = 512
MAX_PING_BYTES = 64
MAX_SKIP_BYTES = 2**30
"""A frame that claims more than this is no mistake in counting; it is not waited for."""
MAX_N_EMBD = 2**16
DEFAULT_BYTE_BUDGET = 512 * 2**20

_HEADER = struct.Struct("<IBBHQ")
_HELLO = struct.Struct("<HHIIIQ32s")
_SLICE = struct.Struct("<iii32s")
_COUNTS = struct.Struct("<II")
_REPLY = struct.Struct("<II")
_CODE = struct.Struct("<H")
HEADER_BYTES = _HEADER.size
HELLO_BYTES = _HELLO.size
SLICE_BYTES = _SLICE.size
REPLY_BYTES = _REPLY.size
MAX_HELLO_BYTES = HELLO_BYTES + MAX_SLICES * SLICE_BYTES
MAX_REQUEST_ID = 2**64 - 1

Buffer = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    HELLO = 1
    REQUEST = 2
    REPLY = 3
    ERROR = 4
    CANCEL = 5
    PING = 6
    PONG = 7
    GOODBYE = 8


class Status(IntEnum):
    COMPUTED = 0
    CANCELLED = 1


class ErrorCode(IntEnum):
    """Why a request, or a session, is refused."""

    PROTOCOL = 1
    """A frame that has no place here."""
    VERSION = 2
    """No version both ends speak."""
    SLICE = 3
    """The worker does not hold this slice."""
    REQUEST = 4
    """Counts, indices or sizes contradict each other or pass a limit."""
    DTYPE = 5
    """Values in a dtype the worker did not offer."""
    OVER_BUDGET = 6
    """More work in flight than the worker said it takes."""
    INTERNAL = 7
    """The worker failed at it."""


class V3Error(ValueError):
    """Bytes that break the contract. ``code`` is what an ERROR frame says of it."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.PROTOCOL) -> None:
        super().__init__(message)
        self.code = code

    @property
    def reason(self) -> str:
        """A stable lower_snake name."""
        return self.code.name.lower()


@dataclass(frozen=True, slots=True)
class Header:
    n_bytes: int
    kind: int
    """A ``FrameKind``, or a number that is none."""
    flags: int
    slice: int
    request_id: int


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    request_id: int = 0
    slice: int = 0
    flags: int = 0
    payload: Buffer = b""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A frame whose payload is thrown away as it comes, and why; ``error`` is None if that is as it should be."""

    header: Header
    error: V3Error | None


@dataclass(frozen=True, slots=True)
class HeldSlice:
    """Experts [begin, end) of one layer, and the shard digest (SHA-256; zero: not known) of what holds them."""

    layer: int
    begin: int
    end: int
    digest: bytes = bytes(32)


@dataclass(frozen=True, slots=True)
class Hello:
    n_embd: int
    slices: tuple[HeldSlice, ...] = ()
    model_digest: bytes = bytes(32)
    dtypes: int = Dtype.F32.bit
    byte_budget: int = DEFAULT_BYTE_BUDGET
    versions: tuple[int, int] = (VERSION, VERSION)


def encode_header(kind: FrameKind, n_bytes: int, request_id: int = 0, slice_: int = 0, flags: int = 0) -> bytes:
    return _HEADER.pack(n_bytes, kind, flags, slice_, request_id)


def encode(frame: Frame) -> bytes:
    """The bytes of a frame whose payload is at hand."""
    payload = bytes(frame.payload)
    return encode_header(frame.kind, len(payload), frame.request_id, frame.slice, frame.flags) + payload


class FrameReader:
    """Frames out of one direction of a stream, its opening word included.

    ``admit`` is asked about every header before its payload is kept. It returns None to keep it, or says why the
    payload is skipped, by ``Skipped``; it raises ``V3Error`` to end the session. Memory grows with bytes that came and
    were admitted, never with a size that was announced.
    """

    __slots__ = ("_admit", "_buffer", "_error", "_header", "_opened", "_skip")

    def __init__(self, admit: Callable[[Header], Skipped | None]) -> None:
        self._admit = admit
        self._buffer = bytearray()
        self._header: Header | None = None
        self._skip = 0
        self._opened = False
        self._error: V3Error | None = None

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    @property
    def whole(self) -> bool:
        """Whether the stream may end here: between two frames."""
        return not self._buffer and self._header is None and not self._skip

    def feed(self, data: Buffer) -> Iterator[Frame | Skipped]:
        """Take what arrived, and give out each frame as soon as it is whole.

        Raises:
            V3Error: the stream cannot be read on; the same error on every later call.
        """
        if self._error is not None:
            raise self._error
        if self._skip >= len(data):
            self._skip -= len(data)
            return
        self._buffer += memoryview(data)[self._skip :]
        self._skip = 0
        try:
            while (found := self._next()) is not None:
                yield found
        except V3Error as error:
            self.stop(error)
            raise

    def stop(self, error: V3Error) -> None:
        """Read nothing more: ``feed`` raises ``error`` from now on."""
        self._error = error
        self._buffer = bytearray()

    def _next(self) -> Frame | Skipped | None:
        if not self._opened:
            if not OPENING.startswith(self._buffer[:4]):
                raise V3Error("the stream does not open with the word of version 3")
            if len(self._buffer) < 4:
                return None
            del self._buffer[:4]
            self._opened = True
        if self._header is None:
            if len(self._buffer) < HEADER_BYTES:
                return None
            n_bytes, kind, flags, slice_, request_id = _HEADER.unpack_from(self._buffer)
            header = Header(n_bytes, kind, flags, slice_, request_id)
            skipped = _misfit(header) or self._admit(header)
            if skipped is not None:
                if n_bytes > MAX_SKIP_BYTES:
                    raise V3Error(f"a frame claims {n_bytes} bytes")
                self._skip_payload(n_bytes)
                return skipped
            self._header = header
        size = HEADER_BYTES + self._header.n_bytes
        if len(self._buffer) < size:
            return None
        if len(self._buffer) == size:  # the usual case: no copy of what may be large
            whole, self._buffer = self._buffer, bytearray()
        else:
            whole = self._buffer[:size]
            del self._buffer[:size]  # moves the start, not the bytes
        header, self._header = self._header, None
        payload = memoryview(whole)[HEADER_BYTES:]
        return Frame(FrameKind(header.kind), header.request_id, header.slice, header.flags, payload)

    def _skip_payload(self, n_bytes: int) -> None:
        here = min(n_bytes, len(self._buffer) - HEADER_BYTES)
        del self._buffer[: HEADER_BYTES + here]
        self._skip = n_bytes - here


# The most a payload of a kind can have, where that does not depend on what was agreed.
_MOST_BYTES = {
    FrameKind.HELLO: MAX_HELLO_BYTES,
    FrameKind.ERROR: _CODE.size + MAX_TEXT_BYTES,
    FrameKind.CANCEL: 0,
    FrameKind.PING: MAX_PING_BYTES,
    FrameKind.PONG: MAX_PING_BYTES,
    FrameKind.GOODBYE: MAX_TEXT_BYTES,
}


def _misfit(header: Header) -> Skipped | None:
    """Refuse what no state of a session can take."""
    try:
        kind = FrameKind(header.kind)
    except ValueError:
        return Skipped(header, V3Error(f"there is no frame kind {header.kind}"))
    if header.n_bytes > _MOST_BYTES.get(kind, MAX_SKIP_BYTES):
        return Skipped(header, V3Error(f"a {kind.name} of {header.n_bytes} bytes is too long"))
    has_values = kind in (FrameKind.REQUEST, FrameKind.REPLY)
    if not has_values and (header.flags or header.slice):
        return Skipped(header, V3Error(f"a {kind.name} has no flags and no slice"))
    needs_id = has_values or kind is FrameKind.CANCEL
    if (needs_id and not header.request_id) or (not needs_id and header.request_id and kind is not FrameKind.ERROR):
        return Skipped(header, V3Error(f"a {kind.name} with request id {header.request_id} has no meaning"))
    return None


def encode_hello(hello: Hello) -> bytes:
    """The opening word and the HELLO."""
    head = _HELLO.pack(
        *hello.versions, hello.n_embd, hello.dtypes, len(hello.slices), hello.byte_budget, hello.model_digest
    )
    slices = b"".join(_SLICE.pack(each.layer, each.begin, each.end, each.digest) for each in hello.slices)
    return OPENING + encode(Frame(FrameKind.HELLO, payload=head + slices))


def decode_hello(payload: Buffer) -> Hello:
    """Raises ``V3Error`` for one that contradicts itself, or shares no version with us."""
    if len(payload) < HELLO_BYTES:
        raise V3Error(f"a HELLO of {len(payload)} bytes is too short")
    lowest, highest, n_embd, dtypes, n_slices, byte_budget, digest = _HELLO.unpack_from(payload)
    # Whatever else a later version says, it says its versions first.
    if not lowest <= VERSION <= highest:
        raise V3Error(f"the peer speaks versions {lowest} to {highest}, not {VERSION}", ErrorCode.VERSION)
    if n_slices > MAX_SLICES or len(payload) != HELLO_BYTES + n_slices * SLICE_BYTES:
        raise V3Error(f"a HELLO of {len(payload)} bytes does not hold {n_slices} slices")
    if not 1 <= n_embd <= MAX_N_EMBD:
        raise V3Error(f"n_embd {n_embd} does not lie in [1, {MAX_N_EMBD}]")
    if not dtypes & Dtype.F32.bit:
        raise V3Error("every peer takes f32", ErrorCode.DTYPE)
    slices = tuple(HeldSlice(*fields) for fields in _SLICE.iter_unpack(memoryview(payload)[HELLO_BYTES:]))
    for each in slices:
        if each.layer < 0 or not 0 <= each.begin < each.end <= MAX_PAIRS:
            raise V3Error(f"[{each.begin}, {each.end}) of layer {each.layer} is no slice", ErrorCode.SLICE)
    return Hello(n_embd, slices, digest, dtypes, byte_budget, (lowest, highest))


def request_bytes(dtype: Dtype, n_embd: int, n_rows: int, n_pairs: int) -> int:
    """Size of a REQUEST's payload."""
    return _COUNTS.size + 8 * n_pairs + values_bytes(dtype, n_rows, n_embd)


def reply_bytes(dtype: Dtype, n_embd: int, n_rows: int) -> int:
    """Size of a computed REPLY's payload."""
    return _REPLY.size + values_bytes(dtype, n_rows, n_embd)


def cost_bytes(dtype: Dtype, n_embd: int, n_bytes: int) -> int:
    """What a REQUEST of ``n_bytes`` counts against the byte budget: itself, and a reply in f32 to as many rows as it
    could hold. Both ends know it from the header alone."""
    return n_bytes + reply_bytes(Dtype.F32, n_embd, n_bytes // values_bytes(dtype, 1, n_embd))


def encode_request(request_id: int, slice_: int, dtype: Dtype, request: Request) -> list[Buffer]:
    """A REQUEST frame in pieces, for one vectored write. ``ids`` are local; ``values.carries`` must hold of the rows.

    Raises ``V3Error`` for a request that the wire cannot carry.
    """
    n_rows, n_pairs = request.n_rows, request.n_pairs
    _check_counts(n_rows, n_pairs)
    if request.weights is None:
        raise V3Error("a request without weights goes out on v1 only", ErrorCode.REQUEST)
    _check_indices(request.row_idx, request.ids, n_rows, MAX_PAIRS)
    size = request_bytes(dtype, request.n_embd, n_rows, n_pairs)
    head = encode_header(FrameKind.REQUEST, size, request_id, slice_, dtype) + _COUNTS.pack(n_rows, n_pairs)
    return [
        head
        + np.asarray(request.weights, "<f4").tobytes()
        + request.row_idx.astype("<u2").tobytes()
        + request.ids.astype("<u2").tobytes(),
        *encode_rows(dtype, request.rows),
    ]


def decode_request(payload: Buffer, dtype: Dtype, n_embd: int, n_local: int) -> Request:
    """Raises ``V3Error``: counts, size or indices contradict each other or the slice."""
    if len(payload) < _COUNTS.size:
        raise V3Error("a REQUEST without counts", ErrorCode.REQUEST)
    n_rows, n_pairs = _COUNTS.unpack_from(payload)
    _check_counts(n_rows, n_pairs)
    if len(payload) != request_bytes(dtype, n_embd, n_rows, n_pairs):
        raise V3Error(
            f"{n_rows} rows of {n_embd} values and {n_pairs} pairs are not {len(payload)} bytes", ErrorCode.REQUEST
        )
    at = _COUNTS.size
    weights = np.frombuffer(payload, "<f4", n_pairs, at)
    row_idx = np.frombuffer(payload, "<u2", n_pairs, at + 4 * n_pairs).astype(np.int32)
    ids = np.frombuffer(payload, "<u2", n_pairs, at + 6 * n_pairs).astype(np.int32)
    _check_indices(row_idx, ids, n_rows, n_local)
    rows = decode_rows(dtype, payload, at + 8 * n_pairs, n_rows, n_embd)
    return Request(Wire.V3, rows, row_idx, ids, weights)


def encode_reply(request_id: int, slice_: int, dtype: Dtype, sums: F32Array, took_us: int = 0) -> list[Buffer]:
    """A computed REPLY in pieces; ``sums`` is (R, E)."""
    size = reply_bytes(dtype, sums.shape[1], sums.shape[0])
    head = encode_header(FrameKind.REPLY, size, request_id, slice_, dtype)
    return [head + _REPLY.pack(Status.COMPUTED, min(took_us, 2**32 - 1)), *encode_rows(dtype, sums)]


def encode_cancelled(request_id: int, slice_: int) -> bytes:
    return encode(Frame(FrameKind.REPLY, request_id, slice_, payload=_REPLY.pack(Status.CANCELLED, 0)))


def decode_reply(payload: Buffer, dtype: Dtype, n_rows: int, n_embd: int) -> tuple[F32Array | None, int]:
    """The (R, E) sums, None for a cancelled request, and the microseconds the worker took.

    Raises ``V3Error`` if the size is not that of the request's rows.
    """
    if len(payload) < _REPLY.size:
        raise V3Error(f"a REPLY of {len(payload)} bytes is too short")
    status, took_us = _REPLY.unpack_from(payload)
    if status == Status.CANCELLED and len(payload) == _REPLY.size:
        return None, took_us
    if status != Status.COMPUTED or len(payload) != reply_bytes(dtype, n_embd, n_rows):
        raise V3Error(f"a REPLY of status {status} and {len(payload)} bytes answers no request of {n_rows} rows")
    return decode_rows(dtype, payload, _REPLY.size, n_rows, n_embd), took_us


def encode_error(request_id: int, code: ErrorCode, text: str) -> bytes:
    payload = _CODE.pack(code) + text.encode(errors="replace")[:MAX_TEXT_BYTES]
    return encode(Frame(FrameKind.ERROR, request_id, payload=payload))


def decode_error(payload: Buffer) -> V3Error:
    """The error a peer names; unknown codes read as INTERNAL, and the text is made fit to print."""
    if len(payload) < _CODE.size:
        raise V3Error("an ERROR without a code")
    (number,) = _CODE.unpack_from(payload)
    try:
        code = ErrorCode(number)
    except ValueError:
        code = ErrorCode.INTERNAL
    return V3Error(printable(payload[_CODE.size :]) or code.name.lower(), code)


def printable(text: Buffer) -> str:
    """A peer's words, as far as they can be logged."""
    said = bytes(text[:MAX_TEXT_BYTES]).decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in said).strip()


def _check_counts(n_rows: int, n_pairs: int) -> None:
    for name, count, most in (("n_rows", n_rows, MAX_ROWS), ("n_pairs", n_pairs, MAX_PAIRS)):
        if not 1 <= count <= most:
            raise V3Error(f"{name} is {count}; it must lie in [1, {most}]", ErrorCode.REQUEST)


def _check_indices(row_idx: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], n_rows: int, n_local: int) -> None:
    if int(row_idx.min()) < 0 or int(row_idx.max()) >= n_rows:
        raise V3Error(f"a row index lies outside [0, {n_rows})", ErrorCode.REQUEST)
    if int(ids.min()) < 0 or int(ids.max()) >= n_local:
        raise V3Error(f"a local expert id lies outside [0, {n_local})", ErrorCode.REQUEST)
