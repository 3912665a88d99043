"""The fixed preamble that opens every spliced connection to an engine's data socket.

Whoever splices (the hub on the operator's machine, the uplink on a node's) writes these 256 bytes first, so the
engine knows whose bytes follow before it reads any. It never crosses the relay. A session that was admitted with more
than one window has the others after it.

    offset  bytes  field
         0      4  magic "KVSP"
         4      2  version, u16 = 1
         6      2  kind, u16 (``Kind``)
         8      4  layer, i32 (-1 where it does not apply)
        12      8  range begin and end, i32 each: experts of the layer, or layers of the window
        20      4  epoch, u32: the generation of the placement plan
        24      4  wires, u32: the dispatch wires the worker speaks (``Wire`` bits)
        28     32  model digest (SHA-256)
        60    128  session name, UTF-8, NUL padded
       188     44  wallet, base58, NUL padded
       232      2  how many further windows follow, u16
       234     22  zero
       256     12  layer, begin and end of a further window, i32 each; repeated
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from kvasir_console.relay.wire.control import Reader

_STRUCT = struct.Struct("<4sHHiiiII32s128s44sH22x")
_WINDOW = struct.Struct("<iii")
SIZE = _STRUCT.size
MAGIC = b"KVSP"
VERSION = 1
MAX_WINDOWS = 256
_MORE_AT = 232


class Kind(IntEnum):
    """What the engine is to do with the bytes that follow."""

    DISPATCH = 1
    """Trunk side: a worker's session; the engine is the client of the dispatch stream."""
    EXPERTS = 2
    """Worker side: requests of a trunk; the engine serves the dispatch stream."""
    RING_NEXT = 3
    """Ring edge to the successor: this engine is the predecessor on it."""
    RING_PREV = 4
    """Ring edge from the predecessor: this engine is the successor on it."""
    ENTRY = 5
    """A gateway's generation session: control messages, generation verbs only."""
    ROUTER = 6
    """Ring stage side: a session that waits for a worker; what comes first is the hub's ``DISPATCH`` preamble."""


class Wire(IntFlag):
    """Dispatch wires, as bits."""

    V1 = 1
    V2 = 2
    V2F16 = 4
    V3 = 8


WIRE_NAMES: Mapping[str, Wire] = {"v1": Wire.V1, "v2": Wire.V2, "v2f16": Wire.V2F16, "v3": Wire.V3}
"""As ``/api/config`` and coverage reports name them."""


def wires_named(names: Iterable[object]) -> Wire:
    """The wires a report names; those of another generation are not known here and left out."""
    found = Wire(0)
    for name in names:
        if isinstance(name, str):
            found |= WIRE_NAMES.get(name, Wire(0))
    return found


class PreambleError(ValueError):
    """The 256 bytes are not a preamble of this version."""


@dataclass(frozen=True, slots=True)
class Preamble:
    kind: Kind
    session: str
    wallet: str = ""
    model_digest: bytes = bytes(32)
    layer: int = -1
    begin: int = 0
    end: int = 0
    epoch: int = 0
    wires: Wire = Wire.V2
    more: tuple[tuple[int, int, int], ...] = ()
    """Further windows (layer, begin, end) that the session was admitted with."""

    @property
    def windows(self) -> tuple[tuple[int, int, int], ...]:
        return ((self.layer, self.begin, self.end), *self.more)

    def encode(self) -> bytes:
        session, wallet = self.session.encode(), self.wallet.encode()
        if len(session) > 128 or len(wallet) > 44 or len(self.model_digest) != 32 or len(self.more) >= MAX_WINDOWS:
            raise PreambleError("a field of the preamble is too long")
        head = _STRUCT.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.layer,
            self.begin,
            self.end,
            self.epoch,
            self.wires,
            self.model_digest,
            session,
            wallet,
            len(self.more),
        )
        return head + b"".join(_WINDOW.pack(*window) for window in self.more)

    @classmethod
    def decode(cls, data: bytes) -> Preamble:
        """Raises ``PreambleError`` on anything but a well-formed preamble of this version."""
        if len(data) != SIZE + further_bytes(data):
            raise PreambleError(f"a preamble has {SIZE} bytes and those of its further windows, not {len(data)}")
        magic, version, kind, layer, begin, end, epoch, wires, digest, session, wallet, _ = _STRUCT.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise PreambleError("the connection does not begin with a preamble of version 1")
        try:
            return cls(
                kind=Kind(kind),
                session=session.rstrip(b"\0").decode(),
                wallet=wallet.rstrip(b"\0").decode("ascii"),
                model_digest=digest,
                layer=layer,
                begin=begin,
                end=end,
                epoch=epoch,
                wires=Wire(wires),
                more=tuple(_WINDOW.iter_unpack(data[SIZE:])),
            )
        except ValueError as error:
            raise PreambleError(f"a field of the preamble is not legal: {error}") from error


def further_bytes(head: bytes) -> int:
    """How many bytes of further windows follow the first 256. Raises ``PreambleError`` for too many."""
    if len(head) < SIZE:
        raise PreambleError(f"a preamble has at least {SIZE} bytes, not {len(head)}")
    count = int.from_bytes(head[_MORE_AT : _MORE_AT + 2], "little")
    if count >= MAX_WINDOWS:
        raise PreambleError(f"a session with {count} further windows")
    return count * _WINDOW.size


async def read_preamble(reader: Reader) -> Preamble:
    """Read one preamble off a stream. Raises ``PreambleError``, ``EOFError`` or ``OSError``."""
    head = await reader.readexactly(SIZE)
    return Preamble.decode(head + await reader.readexactly(further_bytes(head)))
