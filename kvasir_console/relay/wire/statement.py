"""Statements: what a hub says a worker did for it, signed, cumulative, each naming the one before.

    kvasir-statement-v1 LF {canonical JSON}

There is one chain for each (wallet, worker). It goes on over redials and restarts of either side: counters never
fall, sequences leave nothing out, and every statement holds the SHA-256 of its predecessor's text (zeros for the
first). The hub's ed25519 key signs the text; another key follows only by a rotation that the old key signed.

A node acknowledges a statement it agrees with by a signature over ``kvasir-acknowledge-v1`` and the statement's hash.

Signatures are checked by the function that the caller hands in: this package holds no cryptography but hashes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvasir_console.errors import NetworkError
from kvasir_console.relay.wire.signed import canonical_json

__all__ = [
    "GENESIS",
    "Head",
    "Rotation",
    "SignedStatement",
    "Statement",
    "acknowledgement_text",
    "anchor",
    "follow_rotations",
    "held_digest",
    "verify_chain",
]

PREFIX = "kvasir-statement-v1"
ACKNOWLEDGE_PREFIX = "kvasir-acknowledge-v1"
ROTATION_PREFIX = "kvasir-hub-key-v1"
GENESIS = "0" * 64
"""What the first statement of a chain names as its predecessor."""
MAX_TEXT_BYTES = 2048
MAX_ROTATIONS = 64
_MAX_COUNT = 2**63 - 1
_HEX = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,44}")
_NAME = re.compile(r"[!-~]{1,256}")
_RUN = re.compile(r"[0-9a-f]{16,64}")
_COUNTERS = ("bytes_up", "bytes_down", "rows", "pairs")

Verify = Callable[[str, bytes, bytes], bool]
"""(key in base58, message, signature) to whether the key signed the message."""


@dataclass(frozen=True, slots=True)
class Statement:
    """Totals since the chain began. Raises ``NetworkError`` ``statement_malformed`` for fields out of bounds."""

    key: str
    """The hub's key that signs it, base58."""
    wallet: str
    worker: str
    run: str
    """The hub process that wrote it: 16 to 64 hexadecimal digits."""
    sequence: int
    """1 for the first, then one more each."""
    model_digest: str
    shard_digest: str
    """Of what the worker last held (``held_digest``); zeros where the hub does not know it."""
    bytes_up: int
    """Payload from the node, counted by the hub when it was delivered."""
    bytes_down: int
    """Payload to the node, counted once the node confirmed that it came."""
    rows: int
    """Acknowledged by the trunk, as are ``pairs``."""
    pairs: int
    first_at: int
    """Unix seconds of the chain's first and latest counted work."""
    last_at: int
    previous: str
    """SHA-256 of the predecessor's text."""

    def __post_init__(self) -> None:
        legal = (
            all(type(getattr(self, name)) is int for name in (*_COUNTERS, "sequence", "first_at", "last_at"))
            and all(0 <= getattr(self, name) <= _MAX_COUNT for name in (*_COUNTERS, "first_at", "last_at"))
            and 1 <= self.sequence <= _MAX_COUNT
            and self.first_at <= self.last_at
            and _matches(_HEX, self.model_digest, self.shard_digest, self.previous)
            and _matches(_KEY, self.key, self.wallet)
            and _matches(_NAME, self.worker)
            and _matches(_RUN, self.run)
        )
        if not legal:
            raise _malformed("a field is missing or out of bounds")

    def text(self) -> str:
        """What is signed."""
        return f"{PREFIX}\n{canonical_json(asdict(self))}"

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()

    @classmethod
    def parse(cls, text: str) -> Statement:
        """The inverse of ``text``, for exactly the texts it writes. Raises ``NetworkError``."""
        statement = cls(**_object(text, PREFIX, {field.name for field in fields(cls)}))
        if statement.text() != text:
            raise _malformed("it is not written in canonical form")
        return statement


@dataclass(frozen=True, slots=True)
class SignedStatement:
    statement: Statement
    signature: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """Where somebody stands in a chain: the latest statement that was accepted. ``None`` before the first."""

    sequence: int = 0
    hash: str = GENESIS
    latest: Statement | None = None


def verify_chain(
    signed: Iterable[SignedStatement], keys: Sequence[str], verify: Verify, wallet: str, worker: str, head: Head
) -> Head:
    """The head after ``signed``, which must go on exactly where ``head`` is.

    Args:
        keys: the hub's keys in their order, the announced one last; a chain never goes back to an older one.

    Raises:
        NetworkError: ``statement_forged`` (signature, key, or another's), ``statement_chain`` (something was left out,
            reordered or exchanged), ``statement_shrunk`` (a total fell), ``statement_malformed``.
    """
    for each in signed:
        statement = each.statement
        if (statement.wallet, statement.worker) != (wallet, worker):
            raise _refused("statement_forged", "a statement is for another worker")
        if statement.key not in keys or not verify(statement.key, statement.text().encode(), each.signature):
            raise _refused("statement_forged", f"statement {statement.sequence} is not signed by the hub's key")
        if statement.sequence != head.sequence + 1 or statement.previous != head.hash:
            raise _refused("statement_chain", f"statement {statement.sequence} does not follow {head.sequence}")
        before = head.latest
        if before is not None:
            if before.key in keys and keys.index(statement.key) < keys.index(before.key):
                raise _refused("statement_forged", f"statement {statement.sequence} is signed by a key given up")
            if any(getattr(statement, name) < getattr(before, name) for name in (*_COUNTERS, "last_at")):
                raise _refused("statement_shrunk", f"statement {statement.sequence} counts less than the one before")
            if statement.first_at != before.first_at:
                raise _refused("statement_chain", f"statement {statement.sequence} begins at another time")
        head = Head(statement.sequence, statement.hash, statement)
    return head


def anchor(signed: SignedStatement) -> Head:
    """Where a node that has seen nothing of a chain begins: before its first statement, or before the oldest kept."""
    statement = signed.statement
    return Head(statement.sequence - 1, statement.previous)


def held_digest(slices: Iterable[tuple[int, int, int, str]]) -> str:
    """The one digest of everything a worker holds, of (layer, begin, end, shard digest) of each of its slices.

    Of one slice it is that slice's; of several the SHA-256 of their canonical JSON, ascending. Zeros if there is none,
    or if the digest of one of them is not known (zeros or empty): a worker on an older wire announces none.
    """
    held = sorted(slices)
    if not held or any(not _matches(_HEX, digest) or digest == GENESIS for *_, digest in held):
        return GENESIS
    if len(held) == 1:
        return held[0][3]
    return hashlib.sha256(canonical_json([list(each) for each in held]).encode()).hexdigest()


def acknowledgement_text(wallet: str, worker: str, sequence: int, digest: str) -> str:
    """What a node signs to say that it agrees with a statement."""
    legal = _matches(_KEY, wallet) and _matches(_NAME, worker) and _matches(_HEX, digest) and sequence >= 1
    if not legal:
        raise _malformed("there is no such statement to acknowledge")
    body = {"hash": digest, "sequence": sequence, "wallet": wallet, "worker": worker}
    return f"{ACKNOWLEDGE_PREFIX}\n{canonical_json(body)}"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The old key says which key follows it."""

    old: str
    new: str
    at: int
    """Unix seconds."""
    signature: bytes = b""

    def __post_init__(self) -> None:
        if not _matches(_KEY, self.old, self.new) or type(self.at) is not int or not 0 <= self.at <= _MAX_COUNT:
            raise _malformed("a key rotation is out of bounds")

    def text(self) -> str:
        return f"{ROTATION_PREFIX}\n{canonical_json({'at': self.at, 'new': self.new, 'old': self.old})}"

    @classmethod
    def parse(cls, text: str, signature: bytes) -> Rotation:
        """Raises ``NetworkError``."""
        rotation = cls(**_object(text, ROTATION_PREFIX, {"old", "new", "at"}), signature=signature)
        if rotation.text() != text:
            raise _malformed("it is not written in canonical form")
        return rotation


def follow_rotations(pinned: str, announced: str, rotations: Sequence[Rotation], verify: Verify) -> tuple[str, ...]:
    """All keys that lead to ``announced``, each signed for by the one before; ``pinned`` (if any) is among them.

    Raises:
        NetworkError: ``hub_key_changed``: nothing leads from the pinned key to the announced one.
    """
    keys = [announced]
    for rotation in list(rotations)[-MAX_ROTATIONS:][::-1]:
        if rotation.new != keys[0] or rotation.old in keys:
            break
        if not verify(rotation.old, rotation.text().encode(), rotation.signature):
            break
        keys.insert(0, rotation.old)
    if pinned and pinned not in keys:
        raise NetworkError(
            "hub_key_changed",
            "The gateway announces another hub key than the one this node knows, and the old key did not sign for it.",
            "Ask the operator before anything else.",
        )
    return tuple(keys)


def _object(text: str, prefix: str, names: set[str]) -> Mapping[str, Any]:
    head, _, body = text.partition("\n")
    if head != prefix or len(text) > MAX_TEXT_BYTES or not text.isascii():
        raise _malformed(f"it is no {prefix} of at most {MAX_TEXT_BYTES} bytes")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or set(found) != names:
        raise _malformed("it does not have the fields it must have")
    return found


def _matches(pattern: re.Pattern[str], *values: object) -> bool:
    return all(isinstance(value, str) and pattern.fullmatch(value) for value in values)


def _malformed(what: str) -> NetworkError:
    return _refused("statement_malformed", what)


def _refused(code: str, what: str) -> NetworkError:
    return NetworkError(code, f"A statement of the hub is refused: {what}.", "Nothing was acknowledged.")
