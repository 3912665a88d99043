"""The expert dispatch stream, wires v1, v2 and v2f16, byte for byte (sans-I/O).

The trunk sends requests, the worker answers each in turn; there is no handshake, no request id and no error frame: a
worker that dislikes a byte closes. Everything is little-endian; E is ``n_embd``; expert ids are local to the worker's
range.

    v1      i32 n_used, i32 n_tokens, f32 rows[n_tokens, E], i32 ids[n_tokens, n_used]
            reply f32[n_tokens * n_used, E]: each expert's raw output
    v2      i32 -2, i32 n_rows, i32 n_pairs, f32 rows[n_rows, E], i32 row_idx[n_pairs], i32 ids[n_pairs],
            f32 weights[n_pairs]
            reply f32[n_rows, E]: the weighted sums
    v2f16   first word -3; rows, weights and the reply are f16, the rest as v2

Source: the public node contract, section 4. Its reference workers accept any sizes up to the caps; here a request and
its reply must also fit a byte budget, and a count is refused as soon as its four bytes are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvasir_console.relay.wire.preamble import Wire

MAX_USED = 64
MAX_TOKENS = 8192
MAX_ROWS = 8192
MAX_PAIRS = 65536
# Takes the largest coordinator request at n_embd 7168 (235 MB) and its equally large reply.
DEFAULT_BYTE_BUDGET = 512 * 2**20

_MARKER = {Wire.V2: -2, Wire.V2F16: -3}
_V1_HEADER = struct.Struct("<ii")
_V2_HEADER = struct.Struct("<iii")
_WORD = struct.Struct("<i")

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]


class DispatchError(ValueError):
    """A request or reply breaks the contract; ``reason`` is a stable lower_snake name."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One dispatch request, the same whatever wire carries it.

    ``weights`` is None in a v1 request, whose reply is one raw output a pair; there ``row_idx`` names each row
    ``n_used`` times, in order.
    """

    wire: Wire
    rows: F32Array
    """(R, E) hidden states, one a distinct token."""
    row_idx: I32Array
    """(P,) the row of each pair."""
    ids: I32Array
    """(P,) the local expert of each pair."""
    weights: F32Array | None
    """(P,) the router's final weight of each pair."""
    n_used: int = 1

    @property
    def n_rows(self) -> int:
        return int(self.rows.shape[0])

    @property
    def n_pairs(self) -> int:
        return int(self.ids.shape[0])

    @property
    def n_embd(self) -> int:
        return int(self.rows.shape[1])


def request_bytes(wire: Wire, n_embd: int, rows: int, pairs: int) -> int:
    """Size of a request. In v1 ``rows`` is n_tokens: a trunk sends as many rows as pairs."""
    if wire is Wire.V1:
        return _V1_HEADER.size + 4 * n_embd * rows + 4 * pairs
    value = 2 if wire is Wire.V2F16 else 4
    return _V2_HEADER.size + value * n_embd * rows + (8 + value) * pairs


def reply_bytes(wire: Wire, n_embd: int, rows: int, pairs: int) -> int:
    """Size of the reply: (pairs, E) f32 in v1, (rows, E) f32 in v2, f16 in v2f16."""
    if wire is Wire.V1:
        return 4 * n_embd * pairs
    return (2 if wire is Wire.V2F16 else 4) * n_embd * rows


def paid_bytes(n_embd: int, rows: int, pairs: int) -> int:
    """What an acknowledged request earns, whatever wire carried it: its v2f16 body."""
    return 2 * n_embd * rows + 10 * pairs


def local_ids(ids: ArrayLike, begin: int, end: int) -> I32Array:
    """Global expert ids as ids local to [begin, end). Raises ``DispatchError`` for one outside."""
    given = np.asarray(ids, dtype=np.int64)
    if given.size and (given.min() < begin or given.max() >= end):
        raise DispatchError(f"an expert id lies outside the range [{begin}, {end})", "expert_id")
    return (given - begin).astype(np.int32)


def encode_request(request: Request, wire: Wire) -> bytes:
    """``request`` on ``wire``. Raises ``DispatchError`` if it exceeds what the wire can carry.

    A weighted request on v1 becomes n_used = 1 with a row for each pair; the weights stay with the caller, who
    applies them to the reply. A value that f16 cannot hold becomes an infinity on v2f16: see ``fits_f16``.
    """
    _check_shapes(request)
    rows, pairs = request.n_rows, request.n_pairs
    _check_indices(request.row_idx, request.ids, rows, None)
    ids = np.ascontiguousarray(request.ids, dtype="<i4")
    row_idx = np.ascontiguousarray(request.row_idx, dtype="<i4")
    if wire is Wire.V1:
        if request.weights is None:
            n_used, sent = request.n_used, request.rows
            _check_twice(request.ids, n_used)
        else:
            n_used, sent = 1, request.rows[request.row_idx]
        tokens = int(sent.shape[0])
        _check_count("n_used", n_used, MAX_USED)
        _check_count("n_tokens", tokens, MAX_TOKENS)
        return b"".join((_V1_HEADER.pack(n_used, tokens), np.ascontiguousarray(sent, dtype="<f4").data, ids.data))
    if request.weights is None:
        raise DispatchError("a request without weights can go out on v1 only", "weights")
    _check_count("n_rows", rows, MAX_ROWS)
    _check_count("n_pairs", pairs, MAX_PAIRS)
    value = _value_type(wire)
    with np.errstate(over="ignore"):
        states = np.ascontiguousarray(request.rows, dtype=value)
        weights = np.ascontiguousarray(request.weights, dtype=value)
    return b"".join((_V2_HEADER.pack(_MARKER[wire], rows, pairs), states.data, row_idx.data, ids.data, weights.data))


def fits_f16(request: Request) -> bool:
    """Whether v2f16 would carry every finite value of ``request`` as a finite value."""
    largest = np.float32(65504.0)
    given = (request.rows,) if request.weights is None else (request.rows, request.weights)
    return all(bool(np.all(np.abs(values) <= largest)) for values in given)


def encode_reply(wire: Wire, outputs: F32Array) -> bytes:
    """The reply: ``outputs`` is (pairs, E) for v1, (rows, E) for v2 and v2f16; f16 is rounded once, here."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(outputs, dtype=_value_type(wire)).tobytes()


def decode_reply(wire: Wire, data: bytes | bytearray | memoryview, n_embd: int) -> F32Array:
    """The f32 outputs of a reply of ``reply_bytes``: (pairs, E) for v1, (rows, E) otherwise.

    Raises ``DispatchError`` if ``data`` is not whole rows.
    """
    value = _value_type(wire)
    if len(data) == 0 or len(data) % (n_embd * value.itemsize):
        raise DispatchError(f"a reply of {len(data)} bytes is not whole rows of {n_embd} values", "reply_size")
    return np.frombuffer(data, dtype=value).astype(np.float32).reshape(-1, n_embd)


class RequestDecoder:
    """Requests out of a byte stream, on the worker's side.

    Feed what arrives, then call ``next`` until it gives None. Each violation raises ``DispatchError``, and the same
    error again on every later call: the connection has to be closed. Memory grows with the bytes that came, never
    with the counts that were announced. A caller who stops reading while a request is computed holds at most one
    request and one read.
    """

    __slots__ = ("_buffer", "_error", "_header", "byte_budget", "n_embd", "n_local")

    def __init__(self, n_embd: int, n_local: int, *, byte_budget: int = DEFAULT_BYTE_BUDGET) -> None:
        if n_embd < 1 or n_local < 1:
            raise ValueError("n_embd and n_local are at least 1")
        self.n_embd = n_embd
        self.n_local = n_local
        self.byte_budget = byte_budget
        self._buffer = bytearray()
        self._header: _Header | None = None
        self._error: DispatchError | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes fed and not yet given out."""
        return len(self._buffer)

    @property
    def wanted_bytes(self) -> int:
        """How many bytes the next step needs at least; 0 if ``next`` can take it now."""
        if self._header is not None:
            needed = self._header.total_bytes
        elif len(self._buffer) < _WORD.size or _WORD.unpack_from(self._buffer)[0] > 0:
            needed = _V1_HEADER.size
        else:
            needed = _V2_HEADER.size
        return max(0, needed - len(self._buffer))

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        if self._error is None:
            self._buffer += data

    def next(self) -> Request | None:
        """The next whole request, or None while its end has not come."""
        if self._error is not None:
            raise self._error
        try:
            if self._header is None:
                self._header = self._read_header()
            header = self._header
            if header is None or len(self._buffer) < header.total_bytes:
                return None
            body = self._take(header.total_bytes)
            self._header = None
            return _read_body(header, body, self.n_embd, self.n_local)
        except DispatchError as error:
            self._error = error
            self._buffer = bytearray()
            raise

    def eof(self) -> None:
        """The stream has ended. Raises ``DispatchError`` if it ended inside a request."""
        if self._error is not None:
            raise self._error
        if self._buffer:
            self._error = DispatchError(f"the stream ended after {len(self._buffer)} bytes of a request", "truncated")
            raise self._error

    def _read_header(self) -> _Header | None:
        words = [_WORD.unpack_from(self._buffer, offset)[0] for offset in range(0, min(len(self._buffer), 12) & ~3, 4)]
        if not words:
            return None
        if words[0] > 0:
            return self._read_v1_header(words)
        wire = {-2: Wire.V2, -3: Wire.V2F16}.get(words[0])
        if wire is None:
            raise DispatchError(f"a request begins with {words[0]}, which names no wire", "marker")
        for name, count, most in zip(("n_rows", "n_pairs"), words[1:], (MAX_ROWS, MAX_PAIRS), strict=False):
            _check_count(name, count, most)
        if len(words) < 3:
            return None
        return self._affordable(wire, words[1], words[2], 1)

    def _read_v1_header(self, words: list[int]) -> _Header | None:
        n_used = words[0]
        _check_count("n_used", n_used, MAX_USED)
        if n_used > self.n_local:
            raise DispatchError(f"{n_used} experts a token of {self.n_local} must name one twice", "expert_twice")
        if len(words) < 2:
            return None
        n_tokens = words[1]
        _check_count("n_tokens", n_tokens, MAX_TOKENS)
        return self._affordable(Wire.V1, n_tokens, n_used * n_tokens, n_used)

    def _affordable(self, wire: Wire, rows: int, pairs: int, n_used: int) -> _Header:
        total = request_bytes(wire, self.n_embd, rows, pairs)
        work = total + reply_bytes(wire, self.n_embd, rows, pairs)
        if work > self.byte_budget:
            raise DispatchError(
                f"a request and its reply take {work} bytes; the budget is {self.byte_budget}", "byte_budget"
            )
        return _Header(wire, rows, pairs, n_used, total)

    def _take(self, size: int) -> bytearray:
        if len(self._buffer) == size:  # the usual case on a strictly sequential stream: no copy
            body, self._buffer = self._buffer, bytearray()
            return body
        body = self._buffer[:size]
        del self._buffer[:size]  # moves the start, not the bytes
        return body


@dataclass(frozen=True, slots=True)
class _Header:
    wire: Wire
    rows: int
    pairs: int
    n_used: int
    total_bytes: int


def _read_body(header: _Header, body: bytearray, n_embd: int, n_local: int) -> Request:
    rows, pairs = header.rows, header.pairs
    if header.wire is Wire.V1:
        offset = _V1_HEADER.size
        states = _array(body, "<f4", rows * n_embd, offset).reshape(rows, n_embd)
        ids = _array(body, "<i4", pairs, offset + 4 * rows * n_embd)
        row_idx = np.repeat(np.arange(rows, dtype=np.int32), header.n_used)
        _check_indices(row_idx, ids, rows, n_local)
        _check_twice(ids, header.n_used)
        return Request(Wire.V1, states, row_idx, ids, None, header.n_used)
    value = _value_type(header.wire)
    offset = _V2_HEADER.size
    row_idx_at = offset + value.itemsize * rows * n_embd
    ids_at, weights_at = row_idx_at + 4 * pairs, row_idx_at + 8 * pairs
    row_idx, ids = _array(body, "<i4", pairs, row_idx_at), _array(body, "<i4", pairs, ids_at)
    _check_indices(row_idx, ids, rows, n_local)
    states = _array(body, value, rows * n_embd, offset).astype(np.float32, copy=False).reshape(rows, n_embd)
    weights = _array(body, value, pairs, weights_at).astype(np.float32, copy=False)
    return Request(header.wire, states, row_idx, ids, weights)


def _array(body: bytearray, dtype: Any, count: int, offset: int) -> NDArray[Any]:
    """A view of ``body``; a copy only where the bytes lie so that a kernel could not read them in place."""
    return np.require(np.frombuffer(body, dtype=dtype, count=count, offset=offset), requirements="A")


def _value_type(wire: Wire) -> np.dtype[Any]:
    if wire not in (Wire.V1, Wire.V2, Wire.V2F16):
        raise DispatchError(f"{wire!r} is not one wire", "wire")
    return np.dtype("<f2" if wire is Wire.V2F16 else "<f4")


def _check_count(name: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise DispatchError(f"{name} is {count}; it must lie in [1, {most}]", name)


def _check_shapes(request: Request) -> None:
    pairs = (request.n_pairs,)
    weights = request.weights
    if request.rows.ndim != 2 or request.row_idx.shape != pairs or (weights is not None and weights.shape != pairs):
        raise DispatchError("rows are (R, E); row_idx, ids and weights are (P,)", "shape")
    if weights is None and request.n_used * request.n_rows != request.n_pairs:
        raise DispatchError("a request without weights has n_used ids for each row", "shape")


def _check_indices(row_idx: I32Array, ids: I32Array, rows: int, n_local: int | None) -> None:
    if ids.size == 0:
        raise DispatchError("a request has at least one pair", "n_pairs")
    if int(row_idx.min()) < 0 or int(row_idx.max()) >= rows:
        raise DispatchError(f"a row index lies outside [0, {rows})", "row_index")
    if int(ids.min()) < 0 or (n_local is not None and int(ids.max()) >= n_local):
        raise DispatchError("a local expert id is negative or past the last expert", "expert_id")


def _check_twice(ids: I32Array, n_used: int) -> None:
    """ggml's CUDA path reads out of bounds when a token names one expert twice, so v1 forbids it."""
    if n_used > 1:
        chosen = np.sort(ids.reshape(-1, n_used), axis=1)
        if bool(np.any(chosen[:, 1:] == chosen[:, :-1])):
            raise DispatchError("a token names the same expert twice", "expert_twice")
