"""Ring frames, read and written: the frame itself (``ring_frame``), what each kind's payload holds, HELLO's checks.

    HELLO    model digest (32 bytes), then u32 each: n_embd, dtype, layer_begin, layer_end, n_layer, rank, size
    ADMIT    u32 length, that many bytes of JSON (sampling parameters, the prompt's length), then i32 token ids
             (prompt and what was chosen before)
    HIDDEN   (rows of all items, n_embd) in the dtype both ranks said in HELLO
    TOKEN    i32 token id for each item
    ERROR    JSON of ``KvasirError.as_dict``; the items, if any, are the requests it ends
    HELD     what a successor has of each sequence, after HELLO. Along an edge of rows: item.step its last step,
             item.position the rows that are final, item.flags all its rows; no payload. From rank 0 to the last rank:
             item.step the step that waits for tokens, item.position the tokens known, item.rows how many of them the
             payload holds, i32 each, from the sequence's first on. Frame flag 1: more of it follows
    ROLL     nothing; the items are all sequences that live
    LOST     u16 each, ascending: the edges that are lost as far as the sender knows (edge i leads from rank i to the
             next), the one it is said on not among them; empty once they are back
    PROGRESS u64 rows that the last rank computed for the first time, u64 rows that the sender and the ranks behind it
             computed again, u32 the rank among them that has been at one frame for longest, u32 for how long, ms
    RELEASE  nothing; PING and PONG at most 64 bytes, returned as they came

Every decoder raises ``RingError`` and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_console.errors import KvasirError
from kvasir_console.relay.wire.ring_frame import (
    HELLO_BYTES,
    MAX_ERROR_BYTES,
    MAX_ITEMS,
    MAX_PAYLOAD_BYTES,
    MAX_RANKS,
    MAX_ROWS,
    PROGRESS_BYTES,
    Frame,
    FrameDecoder,
    FrameKind,
    Item,
    RingError,
    decode,
    encode,
    is_stale,
    read_frame,
)
from kvasir_console.relay.wire.texts import loads

__all__ = [
    "MAX_ITEMS",
    "MAX_PAYLOAD_BYTES",
    "MAX_RANKS",
    "MAX_ROWS",
    "Admit",
    "DType",
    "Frame",
    "FrameDecoder",
    "FrameKind",
    "Held",
    "Hello",
    "Item",
    "Known",
    "Progress",
    "RingError",
    "check_hello",
    "decode",
    "decode_admit",
    "decode_error",
    "decode_held",
    "decode_hidden",
    "decode_known",
    "decode_lost",
    "decode_progress",
    "decode_tokens",
    "encode",
    "encode_admit",
    "encode_error",
    "encode_held",
    "encode_hidden",
    "encode_known",
    "encode_lost",
    "encode_progress",
    "encode_tokens",
    "is_stale",
    "read_frame",
]

MAX_ADMIT_JSON_BYTES = 2**20
_MAX_N_EMBD = 2**20
_MAX_LAYERS = 4096
_MAX_ERROR_TEXT = 2000

_HELLO = struct.Struct("<32s7I")
_LENGTH = struct.Struct("<I")
_PROGRESS = struct.Struct("<QQII")
MORE = 1
"""Flag of a HELD frame that another one continues."""


class DType(IntEnum):
    """How hidden states cross an edge."""

    F32 = 0
    F16 = 1

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype("<f4" if self is DType.F32 else "<f2")


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame on an edge, each way: which window of which model a rank holds."""

    model_digest: bytes
    n_embd: int
    dtype: DType
    layer_begin: int
    layer_end: int
    n_layer: int
    rank: int
    size: int

    def encode(self) -> bytes:
        self._check()
        return _HELLO.pack(
            self.model_digest,
            self.n_embd,
            self.dtype,
            self.layer_begin,
            self.layer_end,
            self.n_layer,
            self.rank,
            self.size,
        )

    @classmethod
    def decode(cls, payload: bytes) -> Hello:
        if len(payload) != HELLO_BYTES:
            raise RingError(f"a HELLO payload of {len(payload)} bytes; it has {HELLO_BYTES}", "payload_bytes")
        digest, n_embd, dtype, begin, end, n_layer, rank, size = _HELLO.unpack(payload)
        if dtype not in tuple(DType):
            raise RingError(f"a HELLO names the unknown dtype {dtype}", "hello_dtype")
        hello = cls(digest, n_embd, DType(dtype), begin, end, n_layer, rank, size)
        hello._check()
        return hello

    def _check(self) -> None:
        if len(self.model_digest) != 32:
            raise RingError("a model digest has 32 bytes", "hello_model_digest")
        if not 1 <= self.n_embd <= _MAX_N_EMBD:
            raise RingError(f"a HELLO has n_embd {self.n_embd}", "hello_n_embd")
        if not 0 <= self.layer_begin < self.layer_end <= self.n_layer <= _MAX_LAYERS:
            raise RingError(
                f"a HELLO has layers [{self.layer_begin}, {self.layer_end}) of {self.n_layer}", "hello_layers"
            )
        if not 0 <= self.rank < self.size <= MAX_RANKS:
            raise RingError(f"a HELLO has rank {self.rank} of {self.size}", "hello_rank")


def check_hello(before: Hello, after: Hello) -> None:
    """Raises ``RingError`` naming the first thing in which a rank and its successor do not fit.

    From the last rank to rank 0 runs the closing edge, which carries tokens: there the whole ring must begin at layer
    0 and end at the last. Everywhere else the successor must begin where its predecessor ends.
    """
    for name in ("model_digest", "n_layer", "n_embd", "dtype", "size"):
        ours, theirs = getattr(before, name), getattr(after, name)
        if ours != theirs:
            shown = [value.hex()[:12] if isinstance(value, bytes) else str(int(value)) for value in (ours, theirs)]
            raise RingError(
                f"rank {before.rank} has {name} {shown[0]}, its successor {after.rank} has {shown[1]}", f"hello_{name}"
            )
    if after.rank != (before.rank + 1) % before.size:
        raise RingError(
            f"rank {after.rank} does not follow rank {before.rank} in a ring of {before.size}", "hello_rank"
        )
    closing = after.rank == 0
    if closing and (after.layer_begin != 0 or before.layer_end != before.n_layer):
        raise RingError(
            f"the ring begins at layer {after.layer_begin} and ends at {before.layer_end} of {before.n_layer}",
            "hello_layers",
        )
    if not closing and before.layer_end != after.layer_begin:
        raise RingError(
            f"rank {before.rank} ends at layer {before.layer_end}, rank {after.rank} begins at {after.layer_begin}",
            "hello_layers",
        )


def encode_hidden(rows: NDArray[np.float32], dtype: DType = DType.F32) -> bytes:
    """(R, n_embd) hidden states as a HIDDEN payload."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(rows, dtype=dtype.numpy).tobytes()


def decode_hidden(frame: Frame, n_embd: int, dtype: DType = DType.F32) -> NDArray[np.float32]:
    """The hidden states of a HIDDEN frame as a fresh (R, n_embd) f32 array, R the rows of all its items."""
    _expect(frame, FrameKind.HIDDEN)
    if len(frame.payload) != frame.rows * n_embd * dtype.numpy.itemsize:
        raise RingError(f"a HIDDEN payload of {len(frame.payload)} bytes for {frame.rows} rows", "payload_bytes")
    return np.frombuffer(frame.payload, dtype=dtype.numpy).astype(np.float32).reshape(frame.rows, n_embd)


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """One token id for each item as a TOKEN payload."""
    return _pack_tokens(tokens)


def decode_tokens(frame: Frame) -> tuple[int, ...]:
    """The token ids of a TOKEN frame, one for each item."""
    _expect(frame, FrameKind.TOKEN)
    tokens = _unpack_tokens(frame.payload)
    if len(tokens) != len(frame.items):
        raise RingError(f"a TOKEN frame of {len(frame.items)} items holds {len(tokens)} tokens", "payload_bytes")
    return tokens


@dataclass(frozen=True, slots=True)
class Admit:
    """How a rank is to run a sequence, and the history it starts from."""

    params: Mapping[str, Any]
    """Sampling parameters and sampler state, JSON values."""
    prompt_tokens: tuple[int, ...] = ()


def encode_admit(admit: Admit) -> bytes:
    """``admit`` as an ADMIT payload."""
    try:
        text = json.dumps(dict(admit.params), separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RingError("the parameters of an ADMIT are not JSON", "admit_json") from error
    if len(text) > MAX_ADMIT_JSON_BYTES:
        raise RingError(f"the parameters of an ADMIT take {len(text)} bytes", "admit_json")
    return _LENGTH.pack(len(text)) + text + _pack_tokens(admit.prompt_tokens)


def decode_admit(frame: Frame) -> Admit:
    """What an ADMIT frame says."""
    _expect(frame, FrameKind.ADMIT)
    payload = frame.payload
    if len(payload) < _LENGTH.size:
        raise RingError("an ADMIT payload is too short", "payload_bytes")
    (size,) = _LENGTH.unpack_from(payload)
    if size > MAX_ADMIT_JSON_BYTES or _LENGTH.size + size > len(payload):
        raise RingError(f"an ADMIT announces {size} bytes of JSON", "admit_json")
    params = _load_object(payload[_LENGTH.size : _LENGTH.size + size], "admit_json")
    return Admit(params, _unpack_tokens(payload[_LENGTH.size + size :]))


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank has of a sequence: ``length`` rows, ``final`` of which nobody will change, the last of ``step``."""

    step: int
    final: int
    length: int


def encode_held(epoch: int, held: Mapping[int, Held]) -> list[Frame]:
    """HELD frames of a successor, at least one."""
    items = [Item(key, each.step, each.final, 0, each.length) for key, each in held.items()]
    parts = [tuple(items[at : at + MAX_ITEMS]) for at in range(0, len(items), MAX_ITEMS)] or [()]
    return _continued(epoch, [(part, b"") for part in parts])


def decode_held(frame: Frame) -> dict[int, Held]:
    """What a successor's HELD frame says, by request id."""
    _expect(frame, FrameKind.HELD)
    if frame.payload:
        raise RingError("a HELD frame of rows has a payload", "payload_bytes")
    if any(item.position > item.flags for item in frame.items):
        raise RingError("a HELD frame has more final rows than rows", "rows")
    return {item.request_id: Held(item.step, item.position, item.flags) for item in frame.items}


@dataclass(frozen=True, slots=True)
class Known:
    """What rank 0 knows of a sequence: ``count`` tokens, the first ``len(tokens)`` of which are here, and the step
    whose answer it waits for (0 for none)."""

    step: int
    count: int
    tokens: tuple[int, ...] = ()


def encode_known(epoch: int, known: Mapping[int, Known]) -> list[Frame]:
    """HELD frames of rank 0, at least one; tokens beyond what a frame holds are left out."""
    parts: list[tuple[tuple[Item, ...], bytes]] = []
    items: list[Item] = []
    payload: list[bytes] = []
    rows = 0
    for key, each in known.items():
        tokens = each.tokens[:MAX_ROWS]
        if items and (rows + len(tokens) > MAX_ROWS or len(items) == MAX_ITEMS):
            parts.append((tuple(items), b"".join(payload)))
            items, payload, rows = [], [], 0
        items.append(Item(key, each.step, each.count, len(tokens), 0))
        payload.append(_pack_tokens(tokens))
        rows += len(tokens)
    parts.append((tuple(items), b"".join(payload)))
    return _continued(epoch, parts)


def decode_known(frame: Frame) -> dict[int, Known]:
    """What rank 0's HELD frame says, by request id."""
    _expect(frame, FrameKind.HELD)
    tokens = _unpack_tokens(frame.payload)
    if len(tokens) != frame.rows or any(item.rows > item.position for item in frame.items):
        raise RingError(f"a HELD frame of {frame.rows} tokens holds {len(tokens)}", "payload_bytes")
    known: dict[int, Known] = {}
    at = 0
    for item in frame.items:
        known[item.request_id] = Known(item.step, item.position, tokens[at : at + item.rows])
        at += item.rows
    return known


def _continued(epoch: int, parts: Sequence[tuple[tuple[Item, ...], bytes]]) -> list[Frame]:
    last = len(parts) - 1
    return [
        Frame(FrameKind.HELD, epoch, items, payload, MORE if index < last else 0)
        for index, (items, payload) in enumerate(parts)
    ]


def encode_lost(epoch: int, edges: Iterable[int]) -> Frame:
    """A LOST frame."""
    payload = np.asarray(sorted(set(edges)), dtype="<u2").tobytes()
    return Frame(FrameKind.LOST, epoch, payload=payload)


def decode_lost(frame: Frame, size: int) -> frozenset[int]:
    """The edges that a LOST frame names, in a ring of ``size`` ranks."""
    _expect(frame, FrameKind.LOST)
    if len(frame.payload) % 2:
        raise RingError(f"{len(frame.payload)} bytes are not whole numbers of edges", "payload_bytes")
    edges: list[int] = np.frombuffer(frame.payload, dtype="<u2").tolist()
    if any(before >= after for before, after in pairwise(edges)) or any(edge >= size for edge in edges):
        raise RingError(f"a LOST frame names edges that a ring of {size} does not have, or one twice", "edges")
    return frozenset(edges)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank says of itself and those behind it; its counters begin anew with a process."""

    fresh: int = 0
    """Rows that the last rank computed for the first time."""
    again: int = 0
    """Rows that any of them computed again."""
    rank: int = 0
    """The one that has been at one frame for longest, for ``busy_ms``; 0: nobody is at work."""
    busy_ms: int = 0


def encode_progress(epoch: int, progress: Progress) -> Frame:
    """A PROGRESS frame; its counters wrap around."""
    busy_ms = min(progress.busy_ms, 2**32 - 1)
    payload = _PROGRESS.pack(progress.fresh % 2**64, progress.again % 2**64, progress.rank, busy_ms)
    return Frame(FrameKind.PROGRESS, epoch, payload=payload)


def decode_progress(frame: Frame, size: int) -> Progress:
    """What a PROGRESS frame says, in a ring of ``size`` ranks."""
    _expect(frame, FrameKind.PROGRESS)
    if len(frame.payload) != PROGRESS_BYTES:
        raise RingError(f"a PROGRESS payload of {len(frame.payload)} bytes; it has {PROGRESS_BYTES}", "payload_bytes")
    progress = Progress(*_PROGRESS.unpack(frame.payload))
    if progress.rank >= size:
        raise RingError(f"a PROGRESS frame names rank {progress.rank} of {size}", "rank")
    return progress


def encode_error(error: KvasirError) -> bytes:
    """An ERROR payload; long texts are cut."""
    fields = {key: value[:_MAX_ERROR_TEXT] for key, value in error.as_dict().items()}
    return json.dumps(fields, ensure_ascii=False).encode(errors="replace")


def decode_error(payload: bytes) -> KvasirError:
    """The error of an ERROR payload, with control characters taken out: the text may end on a terminal."""
    if len(payload) > MAX_ERROR_BYTES:
        raise RingError("an ERROR payload is too long", "payload_bytes")
    fields = _load_object(payload, "error_json")
    return KvasirError.from_dict({key: _printable(value) for key, value in fields.items() if isinstance(value, str)})


def _printable(text: str) -> str:
    return "".join(character for character in text[:_MAX_ERROR_TEXT] if character.isprintable())


def _expect(frame: Frame, kind: FrameKind) -> None:
    if frame.kind is not kind:
        raise RingError(f"a {frame.kind.name} frame came where {kind.name} is due", "kind")


def _load_object(text: bytes, reason: str) -> dict[str, Any]:
    try:
        value = loads(text, _refuse_constant)
    except ValueError as error:
        raise RingError("a payload is not JSON", reason) from error
    if not isinstance(value, dict):
        raise RingError("a payload is not a JSON object", reason)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31):
        raise RingError("a token id is negative or does not fit 31 bits", "token_id")
    return ids.astype("<i4").tobytes()


def _unpack_tokens(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise RingError(f"{len(data)} bytes are not whole token ids", "payload_bytes")
    ids = np.frombuffer(data, dtype="<i4")
    if ids.size and int(ids.min()) < 0:
        raise RingError("a token id is negative", "token_id")
    return tuple(ids.tolist())
