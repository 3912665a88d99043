"""A request's names: its id for the caller and the books, its key for the engines that run it.

Both are random, unless the caller sends ``Idempotency-Key``. Then they are a digest of that key and the body, so that a
caller whose gateway was lost sends the same again and gets the answer that is being given, and it is booked once.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_console.errors import UsageError

HEADER = "idempotency-key"
MAX_KEY_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class RequestName:
    """``id`` is ``chatcmpl-`` and 24 hex digits; ``key`` is 1 to 2^63 - 1; ``given`` if the caller chose it."""

    id: str
    key: int
    given: bool


def name_request(headers: Mapping[str, str], body: Mapping[str, Any]) -> RequestName:
    """The names of a chat request. Raises ``UsageError`` for a key that is too long."""
    wanted = headers.get(HEADER, "")
    if not wanted:
        return _named(secrets.token_bytes(32), given=False)
    if len(wanted) > MAX_KEY_CHARACTERS:
        raise UsageError("bad_idempotency_key", f"{HEADER} has at most {MAX_KEY_CHARACTERS} characters.")
    text = f"kvasir-request-v1\n{wanted}\n{json.dumps(body, sort_keys=True)}"
    return _named(hashlib.sha256(text.encode(errors="surrogatepass")).digest(), given=True)


def fresh_id() -> str:
    """An id for the books alone: what was booked under the request's own ended before it was complete."""
    return f"chatcmpl-{secrets.token_hex(12)}"


def _named(digest: bytes, *, given: bool) -> RequestName:
    key = int.from_bytes(digest[:8], "little") % (2**63 - 1) + 1
    return RequestName(f"chatcmpl-{digest[8:20].hex()}", key, given)
