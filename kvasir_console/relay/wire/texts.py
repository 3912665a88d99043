"""JSON as a peer may send it: UTF-8, not nested without end, and text that can be written again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

# Half of a surrogate pair is no character: whoever logged, stored or passed it on would fail, much later.
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(data: bytes | bytearray, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not UTF-8, not JSON, nested too deeply, or has halves of surrogate pairs in it.
    """
    try:
        value = json.loads(data.decode(), parse_constant=parse_constant)
        if _HALVES.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    return value
