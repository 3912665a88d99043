"""The 256 bytes that open a spliced connection."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.relay.wire import preamble
from kvasir_console.relay.wire.preamble import Kind, Preamble, PreambleError, Wire

WALLET = "HAgk14JpMQLgt6rVgv7cBQFJWFto5Dqxi472uT3DKpqk"
I32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=32)
PREAMBLES = st.builds(
    Preamble,
    kind=st.sampled_from(Kind),
    session=TEXT,
    wallet=st.sampled_from(["", WALLET]),
    model_digest=st.binary(min_size=32, max_size=32),
    layer=I32,
    begin=I32,
    end=I32,
    epoch=st.integers(0, 2**32 - 1),
    wires=st.integers(0, 7).map(Wire),
)


def test_the_layout_is_the_one_in_the_table() -> None:
    made = Preamble(Kind.DISPATCH, "expert-1", WALLET, bytes(range(32)), 7, 16, 24, 3, Wire.V2 | Wire.V2F16)
    data = made.encode()
    assert len(data) == preamble.SIZE == 256
    assert data[:4] == b"KVSP"
    assert struct.unpack_from("<HHiiiII", data, 4) == (1, 1, 7, 16, 24, 3, 6)
    assert data[28:60] == bytes(range(32))
    assert data[60:188] == b"expert-1" + bytes(120)
    assert data[188:232] == WALLET.encode()
    assert data[232:] == bytes(24)


@settings(deadline=None)
@given(PREAMBLES)
def test_a_preamble_reads_back(made: Preamble) -> None:
    assert Preamble.decode(made.encode()) == made


@settings(deadline=None)
@given(st.binary(min_size=256, max_size=256) | st.binary(max_size=300), st.booleans())
def test_any_bytes_give_a_preamble_or_its_error(data: bytes, headed: bool) -> None:
    if headed:
        data = b"KVSP\x01\x00\x01\x00" + data[8:]
    with contextlib.suppress(PreambleError):
        assert len(Preamble.decode(data).encode()) == len(data)


@pytest.mark.parametrize(
    "broken",
    [
        Preamble(Kind.EXPERTS, "x").encode()[:-1],
        Preamble(Kind.EXPERTS, "x").encode() + b"\0",
        b"KVSX" + Preamble(Kind.EXPERTS, "x").encode()[4:],
        b"KVSP\x02\x00" + Preamble(Kind.EXPERTS, "x").encode()[6:],
        b"KVSP\x01\x00\x00\x00" + Preamble(Kind.EXPERTS, "x").encode()[8:],
        b"KVSP\x01\x00\x63\x00" + Preamble(Kind.EXPERTS, "x").encode()[8:],
        Preamble(Kind.EXPERTS, "x").encode()[:60] + b"\xff" * 128 + bytes(68),
        Preamble(Kind.EXPERTS, "x").encode()[:188] + b"\xc3\xa9" * 22 + bytes(24),
    ],
)
def test_what_is_no_preamble_of_this_version_is_refused(broken: bytes) -> None:
    with pytest.raises(PreambleError):
        Preamble.decode(broken)


@pytest.mark.parametrize(
    "made",
    [
        Preamble(Kind.EXPERTS, "x" * 129),
        Preamble(Kind.EXPERTS, "é" * 65),
        Preamble(Kind.EXPERTS, "x", "w" * 45),
        Preamble(Kind.EXPERTS, "x", model_digest=bytes(31)),
    ],
)
def test_a_field_that_does_not_fit_is_refused(made: Preamble) -> None:
    with pytest.raises(PreambleError):
        made.encode()
