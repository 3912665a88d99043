"""Frames of the dispatch stream, version 3: layout, round trips, truncation at every byte, hostile counts."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvasir_console.relay.wire import dispatch_v3 as v3
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.dispatch_v3 import ErrorCode, Frame, FrameKind, FrameReader, HeldSlice, Hello, V3Error
from kvasir_console.relay.wire.preamble import Wire
from kvasir_console.relay.wire.values import ALL_DTYPES, Dtype

E, N_LOCAL = 6, 5


def everything(_header: v3.Header) -> None:
    """Admit all."""


def joined(pieces: list[v3.Buffer]) -> bytes:
    return b"".join(pieces)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    n_rows, n_pairs = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    rows = draw(hnp.arrays(np.float32, (n_rows, E), elements=st.floats(-1000, 1000, width=32)))
    row_idx = draw(hnp.arrays(np.int32, n_pairs, elements=st.integers(0, n_rows - 1)))
    ids = draw(hnp.arrays(np.int32, n_pairs, elements=st.integers(0, N_LOCAL - 1)))
    weights = draw(hnp.arrays(np.float32, n_pairs, elements=st.floats(-2, 2, width=32)))
    return Request(Wire.V3, rows, row_idx, ids, weights)


HELLOS = st.builds(
    Hello,
    n_embd=st.integers(1, v3.MAX_N_EMBD),
    slices=st.lists(
        st.builds(
            lambda layer, begin, width, digest: HeldSlice(layer, begin, begin + width, digest),
            st.integers(0, 2**31 - 1),
            st.integers(0, 1000),
            st.integers(1, 1000),
            st.binary(min_size=32, max_size=32),
        ),
        max_size=4,
    ).map(tuple),
    model_digest=st.binary(min_size=32, max_size=32),
    dtypes=st.integers(0, ALL_DTYPES).map(lambda mask: mask | 1),
    byte_budget=st.integers(0, 2**64 - 1),
    versions=st.tuples(st.integers(0, 3), st.integers(3, 2**16 - 1)),
)


def one_frame(data: bytes) -> Frame:
    reader = FrameReader(everything)
    (frame,) = reader.feed(v3.OPENING + data)
    assert isinstance(frame, Frame)
    assert reader.whole
    return frame


@settings(deadline=None)
@given(HELLOS)
def test_a_hello_reads_back(hello: Hello) -> None:
    data = v3.encode_hello(hello)
    assert data[:4] == struct.pack("<i", -4)
    frame = one_frame(data[4:])
    assert frame.kind is FrameKind.HELLO
    assert v3.decode_hello(frame.payload) == hello


def test_the_layout_is_the_one_in_the_table() -> None:
    rows = np.array([[1, 2], [3, 4]], np.float32)
    request = Request(
        Wire.V3, rows, np.array([1, 0, 1], np.int32), np.array([4, 0, 2], np.int32), np.ones(3, np.float32)
    )
    data = joined(v3.encode_request(7, 3, Dtype.F32, request))
    due = struct.pack("<IBBHQ", 48, 2, 0, 3, 7) + struct.pack("<II", 2, 3) + struct.pack("<3f", 1, 1, 1)
    due += struct.pack("<3H", 1, 0, 1) + struct.pack("<3H", 4, 0, 2) + struct.pack("<4f", 1, 2, 3, 4)
    assert data == due
    reply = joined(v3.encode_reply(7, 3, Dtype.F16, rows, 1234))
    assert reply == struct.pack("<IBBHQ", 16, 3, 1, 3, 7) + struct.pack("<II", 0, 1234) + struct.pack("<4e", 1, 2, 3, 4)
    assert v3.encode_error(9, ErrorCode.SLICE, "no") == struct.pack("<IBBHQH", 4, 4, 0, 0, 9, 3) + b"no"
    assert v3.encode_cancelled(7, 3) == struct.pack("<IBBHQII", 8, 3, 0, 3, 7, 1, 0)


@settings(deadline=None)
@given(requests(), st.sampled_from(Dtype), st.integers(1, v3.MAX_REQUEST_ID), st.integers(0, 2**16 - 1))
def test_a_request_reads_back(request: Request, dtype: Dtype, request_id: int, slice_: int) -> None:
    data = joined(v3.encode_request(request_id, slice_, dtype, request))
    frame = one_frame(data)
    assert (frame.kind, frame.request_id, frame.slice, frame.flags) == (FrameKind.REQUEST, request_id, slice_, dtype)
    assert len(frame.payload) == v3.request_bytes(dtype, E, request.n_rows, request.n_pairs)
    got = v3.decode_request(frame.payload, dtype, E, N_LOCAL)
    assert np.array_equal(got.row_idx, request.row_idx)
    assert np.array_equal(got.ids, request.ids)
    assert np.array_equal(got.weights, request.weights)
    if dtype is Dtype.F32:
        assert np.array_equal(got.rows, request.rows)
    else:
        assert np.abs(got.rows - request.rows).max() <= max(np.abs(request.rows).max() / 200, 1e-6)


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(E)), elements=st.floats(-100, 100, width=32)),
    st.integers(0, 2**40),
)
def test_a_reply_reads_back(sums: np.ndarray, took_us: int) -> None:
    frame = one_frame(joined(v3.encode_reply(1, 0, Dtype.F32, sums, took_us)))
    got, took = v3.decode_reply(frame.payload, Dtype.F32, len(sums), E)
    assert np.array_equal(got, sums)
    assert took == min(took_us, 2**32 - 1)
    with pytest.raises(V3Error):
        v3.decode_reply(frame.payload, Dtype.F32, len(sums) + 1, E)
    cancelled = one_frame(v3.encode_cancelled(1, 0))
    assert v3.decode_reply(cancelled.payload, Dtype.F32, len(sums), E) == (None, 0)


@settings(deadline=None)
@given(requests(), st.sampled_from(Dtype))
def test_truncated_at_any_byte_nothing_is_given_out_and_the_payload_alone_is_refused(
    request: Request, dtype: Dtype
) -> None:
    data = v3.OPENING + joined(v3.encode_request(1, 0, dtype, request))
    for cut in range(len(data)):
        reader = FrameReader(everything)
        assert list(reader.feed(data[:cut])) == []
        assert not reader.whole or cut in (0, 4)
    payload = data[4 + v3.HEADER_BYTES :]
    for cut in range(len(payload)):
        with pytest.raises(V3Error):
            v3.decode_request(payload[:cut], dtype, E, N_LOCAL)
    with pytest.raises(V3Error):
        v3.decode_request(payload + b"\0", dtype, E, N_LOCAL)


FRAMES = st.one_of(
    requests().map(lambda request: joined(v3.encode_request(1, 0, Dtype.F16, request))),
    st.binary(max_size=64).map(lambda nonce: v3.encode(Frame(FrameKind.PING, payload=nonce))),
    st.just(v3.encode(Frame(FrameKind.CANCEL, 5))),
    st.text(max_size=20).map(lambda text: v3.encode_error(3, ErrorCode.INTERNAL, text)),
    st.integers(0, 300).map(lambda size: struct.pack("<IBBHQ", size, 77, 0, 0, 0) + bytes(size)),
)


@settings(deadline=None)
@given(st.lists(FRAMES, max_size=6), st.data())
def test_the_frames_do_not_depend_on_how_the_bytes_are_cut(frames: list[bytes], data: st.DataObject) -> None:
    stream = v3.OPENING + b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))

    def read(pieces: list[bytes]) -> list[tuple[object, ...]]:
        reader = FrameReader(everything)
        found = [each for piece in pieces for each in reader.feed(piece)]
        assert reader.whole
        return [
            ("skipped", each.header)
            if isinstance(each, v3.Skipped)
            else (each.kind, each.request_id, bytes(each.payload))
            for each in found
        ]

    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(pieces) == read([stream]) == read([stream[at : at + 1] for at in range(len(stream))])
    assert len(read(pieces)) == len(frames)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_give_frames_or_a_named_refusal(data: bytes, opened: bool) -> None:
    reader = FrameReader(everything)
    with suppress(V3Error):
        for found in reader.feed((v3.OPENING if opened else b"") + data):
            if not isinstance(found, Frame):
                assert found.error is not None
                continue
            decoders = {
                FrameKind.HELLO: lambda payload: v3.decode_hello(payload),
                FrameKind.REQUEST: lambda payload: v3.decode_request(payload, Dtype.INT8, E, N_LOCAL),
                FrameKind.REPLY: lambda payload: v3.decode_reply(payload, Dtype.BF16, 2, E),
                FrameKind.ERROR: lambda payload: v3.decode_error(payload),
            }
            if found.kind in decoders:
                with suppress(V3Error):
                    decoders[found.kind](found.payload)
    assert reader.buffered_bytes <= len(data) + 4


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<IBBHQ", 2**32 - 1, 2, 0, 0, 1),  # a request of 4 GiB
        struct.pack("<IBBHQ", 2**32 - 1, 77, 0, 0, 1),
        struct.pack("<IBBHQ", 2**31, 1, 0, 0, 0),
        struct.pack("<IBBHQ", 2**30 + 1, 6, 0, 0, 0),
    ],
)
def test_what_claims_too_much_ends_the_session_at_its_header(head: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(V3Error, match="claims"):
            list(FrameReader(everything).feed(v3.OPENING + head))
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "n_bytes", "flags", "slice_", "request_id"),
    [
        (FrameKind.HELLO, v3.MAX_HELLO_BYTES + 1, 0, 0, 0),
        (FrameKind.PING, 65, 0, 0, 0),
        (FrameKind.PONG, 8, 1, 0, 0),
        (FrameKind.ERROR, 515, 0, 0, 1),
        (FrameKind.GOODBYE, 513, 0, 0, 0),
        (FrameKind.CANCEL, 1, 0, 0, 1),
        (FrameKind.CANCEL, 0, 0, 0, 0),
        (FrameKind.CANCEL, 0, 0, 1, 1),
        (FrameKind.REQUEST, 100, 0, 0, 0),
        (FrameKind.REPLY, 100, 0, 0, 0),
        (FrameKind.PING, 8, 0, 0, 3),
        (0, 8, 0, 0, 0),
        (9, 8, 0, 0, 0),
    ],
)
def test_a_misfit_is_skipped_and_the_next_frame_is_read(
    kind: int, n_bytes: int, flags: int, slice_: int, request_id: int
) -> None:
    ping = v3.encode(Frame(FrameKind.PING, payload=b"n"))
    stream = v3.OPENING + struct.pack("<IBBHQ", n_bytes, kind, flags, slice_, request_id) + bytes(n_bytes) + ping
    reader = FrameReader(everything)
    skipped, frame = [each for at in range(0, len(stream), 7) for each in reader.feed(stream[at : at + 7])]
    assert isinstance(skipped, v3.Skipped)
    assert isinstance(frame, Frame)
    assert (frame.kind, bytes(frame.payload)) == (FrameKind.PING, b"n")


def test_skipped_bytes_are_not_kept() -> None:
    reader = FrameReader(lambda header: v3.Skipped(header, None))
    list(reader.feed(v3.OPENING + struct.pack("<IBBHQ", 2**30, 2, 0, 0, 1)))
    for _ in range(64):
        assert list(reader.feed(bytes(2**16))) == []
        assert reader.buffered_bytes == 0
    assert not reader.whole


COUNTS = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(COUNTS, COUNTS, st.binary(max_size=200), st.sampled_from(Dtype))
def test_hostile_counts_are_refused_before_anything_is_allocated(
    n_rows: int, n_pairs: int, rest: bytes, dtype: Dtype
) -> None:
    payload = struct.pack("<II", n_rows, n_pairs) + rest
    tracemalloc.start()
    try:
        with suppress(V3Error):
            got = v3.decode_request(payload, dtype, E, N_LOCAL)
            assert v3.request_bytes(dtype, E, got.n_rows, got.n_pairs) == len(payload)
        assert tracemalloc.get_traced_memory()[1] < 2**17
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        v3.encode_hello(Hello(8))[20:-1],
        v3.encode_hello(Hello(8))[20:] + b"\0",
        v3.encode_hello(Hello(0))[20:],
        v3.encode_hello(Hello(2**16 + 1))[20:],
        v3.encode_hello(Hello(8, dtypes=2))[20:],
        v3.encode_hello(Hello(8, versions=(4, 9)))[20:],
        v3.encode_hello(Hello(8, versions=(1, 2)))[20:],
        v3.encode_hello(Hello(8, (HeldSlice(0, 4, 4),)))[20:],
        v3.encode_hello(Hello(8, (HeldSlice(-1, 0, 4),)))[20:],
        v3.encode_hello(Hello(8, (HeldSlice(0, -1, 4),)))[20:],
        v3.encode_hello(Hello(8, (HeldSlice(0, 0, 65537),)))[20:],
        struct.pack("<HHIIIQ32s", 3, 3, 8, 1, 257, 0, bytes(32)) + bytes(257 * 44),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(hello: bytes) -> None:
    with pytest.raises(V3Error):
        v3.decode_hello(hello)


def test_a_version_nobody_shares_is_named() -> None:
    later = struct.pack("<HH", 4, 6) + bytes(60)  # whatever a later HELLO looks like after its versions
    with pytest.raises(V3Error) as caught:
        v3.decode_hello(later)
    assert caught.value.code is ErrorCode.VERSION


def test_a_peers_words_are_made_fit_to_print() -> None:
    error = v3.decode_error(struct.pack("<H", 3) + b"a\x1b[2J\xff\n" + "é".encode())
    assert error.code is ErrorCode.SLICE
    assert str(error) == "a [2J\ufffd é"
    assert v3.decode_error(struct.pack("<H", 999)).code is ErrorCode.INTERNAL
    assert str(v3.decode_error(struct.pack("<H", 6))) == "over_budget"


def pair(row: int = 0, expert: int = 0, *, n_rows: int = 1, weighted: bool = True) -> Request:
    index, ids = np.array([row], np.int32), np.array([expert], np.int32)
    return Request(Wire.V3, np.ones((n_rows, 2), np.float32), index, ids, np.ones(1, np.float32) if weighted else None)


@pytest.mark.parametrize("request_", [pair(0, 65536), pair(0, -1), pair(1), pair(n_rows=8193), pair(weighted=False)])
def test_what_the_wire_cannot_carry_is_not_written(request_: Request) -> None:
    with pytest.raises(V3Error) as caught:
        v3.encode_request(1, 0, Dtype.F32, request_)
    assert caught.value.code is ErrorCode.REQUEST
