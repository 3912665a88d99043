"""HTTP/1.1 requests on their way through the front: found, bounded, and told whose they are. No I/O.

A connection is a sequence of requests (RFC 9112), and each head can lie about where it comes from. So heads are
rewritten one by one, and bodies are passed on untouched. Anything that two readers could frame differently is
refused, because then the next head would be somebody else's choice (RFC 9112 section 11.2, request smuggling).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

HEAD_BYTES = 64 * 1024
_CHUNK_LINE_BYTES = 256
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[!-~]+")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t -~\x80-\xff]*)?")
# What a client must not say about itself; a proxy further in would believe it.
_FORWARDING = {b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-real-ip"}


class HeadError(ValueError):
    """The request cannot be passed on; ``status`` is the HTTP status to answer with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """One request line and its header fields; names in lower case, values stripped."""

    method: bytes
    target: bytes
    version: bytes
    fields: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def parse(cls, raw: bytes) -> RequestHead:
        """Read a head that ends with its blank line. Raises ``HeadError``."""
        line, *lines = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
        parts = line.split(b" ")
        if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
            raise HeadError(400, "the request line is malformed")
        if parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise HeadError(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        head = cls(parts[0], parts[1], parts[2], tuple(_field(each) for each in lines))
        head.content_length()
        return head

    def values(self, name: bytes) -> list[bytes]:
        """The elements of a comma-separated field, lower case."""
        return [
            element.strip(b" \t").lower() for key, value in self.fields if key == name for element in value.split(b",")
        ]

    @property
    def path(self) -> str:
        """The target without its query, as sent: still percent-encoded."""
        return self.target.partition(b"?")[0].decode("ascii")

    @property
    def upgrade(self) -> bool:
        """Whether the client asks to leave HTTP/1.1, for whatever protocol."""
        return b"upgrade" in self.values(b"connection") and bool(self.values(b"upgrade"))

    @property
    def websocket(self) -> bool:
        return self.upgrade and b"websocket" in self.values(b"upgrade")

    def content_length(self) -> int | None:
        """Body bytes that follow, or ``None`` for a chunked body. Raises ``HeadError`` if that is not clear."""
        lengths, codings = self.values(b"content-length"), self.values(b"transfer-encoding")
        if codings:
            if lengths or codings != [b"chunked"] or self.version != b"HTTP/1.1":
                raise HeadError(400, "the length of the body is not clear")
            return None
        if len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
            raise HeadError(400, "the length of the body is not clear")
        return int(lengths[0]) if lengths else 0

    def forwarded(self, peer: str, scheme: str) -> bytes:
        """The head for the gateway: what the client said about its address replaced by what is so."""
        fields = [(name, value) for name, value in self.fields if name.replace(b"_", b"-") not in _FORWARDING]
        fields += [(b"x-forwarded-for", peer.encode("ascii")), (b"x-forwarded-proto", scheme.encode("ascii"))]
        lines = [b" ".join((self.method, self.target, self.version))]
        lines += [name + b": " + value for name, value in fields]
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _field(line: bytes) -> tuple[bytes, bytes]:
    """A header or trailer field without its line end. Raises ``HeadError``.

    A bare LF in it would be the end of a line, or of the whole message, to another reader.
    """
    name, colon, value = line.partition(b":")
    if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise HeadError(400, "a header field is malformed")
    return name.lower(), value.strip(b" \t")


class _Part(Enum):
    HEAD = auto()
    BODY = auto()
    CHUNK_LINE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()


class RequestStream:
    """The bytes of one client connection in; the bytes for the gateway out."""

    def __init__(self, peer: str, scheme: str, *, head_bytes: int = HEAD_BYTES) -> None:
        self._peer = peer
        self._scheme = scheme
        self._head_bytes = head_bytes
        self._part = _Part.HEAD
        self._pending = bytearray()
        self._searched = 0
        self._left = 0

    @property
    def idle(self) -> bool:
        """Between two requests: nothing of the next one has come."""
        return self._part is _Part.HEAD and not self._pending

    def feed(self, data: bytes) -> bytes:
        """What to send on now that ``data`` has come.

        Raises:
            HeadError: what came cannot be passed on; neither can anything after it.
        """
        self._pending += data
        out = bytearray()
        while self._pending and self._step(out):
            pass
        return bytes(out)

    def _step(self, out: bytearray) -> bool:
        """Move one part, or as much of it as has come, to ``out``; false if more must come first."""
        match self._part:
            case _Part.HEAD:
                return self._head(out)
            case _Part.BODY | _Part.CHUNK:
                piece = self._take(min(self._left, len(self._pending)))
                out += piece
                self._left -= len(piece)
                if self._left == 0:
                    self._part = _Part.HEAD if self._part is _Part.BODY else _Part.CHUNK_END
                return True
            case _Part.CHUNK_LINE:
                return self._chunk_line(out)
            case _Part.CHUNK_END:
                if len(self._pending) < 2:
                    return False
                if self._pending[:2] != b"\r\n":
                    raise HeadError(400, "a chunk does not end where it says")
                out += self._take(2)
                self._part = _Part.CHUNK_LINE
                return True
            case _Part.TRAILER:
                return self._trailer(out)

    def _head(self, out: bytearray) -> bool:
        while self._pending.startswith(b"\r\n"):  # RFC 9112 section 2.2: some clients add one after a body
            del self._pending[:2]
        end = self._pending.find(b"\r\n\r\n", max(0, self._searched - 3))
        if end < 0:
            self._searched = len(self._pending)
            if self._searched > self._head_bytes:
                raise HeadError(431, "the request head is too long")
            return False
        self._searched = 0
        if end + 4 > self._head_bytes:
            raise HeadError(431, "the request head is too long")
        head = RequestHead.parse(self._take(end + 4))
        if head.upgrade:
            raise HeadError(404, "an upgrade must be the first request of its connection")
        out += head.forwarded(self._peer, self._scheme)
        length = head.content_length()
        if length is None:
            self._part = _Part.CHUNK_LINE
        elif length > 0:
            self._part, self._left = _Part.BODY, length
        return True

    def _chunk_line(self, out: bytearray) -> bool:
        end = self._pending.find(b"\r\n", 0, _CHUNK_LINE_BYTES)
        if end < 0:
            if len(self._pending) >= _CHUNK_LINE_BYTES:
                raise HeadError(400, "a chunk size is malformed")
            return False
        line = self._take(end + 2)
        match = _CHUNK_LINE.fullmatch(line[:-2])
        if match is None:
            raise HeadError(400, "a chunk size is malformed")
        out += line
        self._left = int(match[1], 16)
        self._part = _Part.CHUNK if self._left else _Part.TRAILER
        if not self._left:
            self._left = self._head_bytes
        return True

    def _trailer(self, out: bytearray) -> bool:
        end = self._pending.find(b"\r\n")
        if (len(self._pending) if end < 0 else end + 2) > self._left:
            raise HeadError(431, "the trailer is too long")
        if end < 0:
            return False
        line = self._take(end + 2)
        if line != b"\r\n":
            _field(line[:-2])
        out += line
        self._left -= len(line)
        if line == b"\r\n":
            self._part, self._left = _Part.HEAD, 0
        return True

    def _take(self, size: int) -> bytes:
        piece = bytes(self._pending[:size])
        del self._pending[:size]
        return piece
