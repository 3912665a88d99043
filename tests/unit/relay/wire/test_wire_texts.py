"""JSON of a peer: what is taken can be written again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.relay.wire.texts import loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.booleans())
def test_what_json_writes_reads_as_it_was(value: object, ascii_only: bool) -> None:
    assert loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": "\\ud800"}',
        b'{"a": "\\uDC00\\uD800"}',
        b'{"\\udfff": 1}',
        b'"\xed\xa0\x80"',
        b'"\xff"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"",
        b"{",
    ],
)
def test_what_nobody_could_write_again_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        loads(text)


def test_a_whole_pair_is_one_character() -> None:
    assert loads(b'"\\ud83d\\ude00"') == "\N{GRINNING FACE}"


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        value = loads(data)
    except ValueError:
        return
    json.dumps(value, ensure_ascii=False).encode()
