"""Ring frames: layout, checksum, bounds, payloads and the checks of a HELLO."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.errors import EngineError, KvasirError, RequestError
from kvasir_console.relay.wire import ring
from kvasir_console.relay.wire.ring import (
    Admit,
    DType,
    Frame,
    FrameDecoder,
    FrameKind,
    Hello,
    Item,
    Progress,
    RingError,
)

U32 = st.integers(0, 2**32 - 1)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(list(FrameKind)))
    epoch, flags = draw(U32), draw(st.integers(0, 2**16 - 1))
    rows = st.integers(1, 5) if kind is FrameKind.HIDDEN else st.integers(0, 5)
    item = st.builds(Item, st.integers(0, 2**64 - 1), U32, U32, rows, U32)
    least, most = {FrameKind.ADMIT: (1, 1), FrameKind.ERROR: (0, 4)}.get(kind, (1, 6))
    if kind in (FrameKind.HELLO, FrameKind.PING, FrameKind.PONG, FrameKind.LOST, FrameKind.PROGRESS):
        least = most = 0
    items = tuple(draw(st.lists(item, min_size=least, max_size=most)))
    size = {
        FrameKind.HELLO: st.just(60),
        FrameKind.HIDDEN: st.integers(1, 8).map(lambda width: 4 * width * sum(i.rows for i in items)),
        FrameKind.TOKEN: st.just(4 * len(items)),
        FrameKind.RELEASE: st.just(0),
        FrameKind.ROLL: st.just(0),
        FrameKind.PROGRESS: st.just(24),
    }.get(kind, st.integers(0, 64))
    length = draw(size)
    return Frame(kind, epoch, items, draw(st.binary(min_size=length, max_size=length)), flags, draw(U32), draw(U32))


def frame_bytes(
    kind: int = 7,
    count: int = 0,
    payload: bytes = b"",
    *,
    magic: bytes = b"KVRG",
    version: int = 2,
    table: bytes = b"",
    announced: int | None = None,
    times: tuple[int, int] = (0, 0),
    zero: bytes = bytes(4),
) -> bytes:
    """A frame written from the layout in the module's docstring, not by the module."""
    size = len(payload) if announced is None else announced
    head = magic + struct.pack("<BBHIIIII", version, kind, 0, 9, count, size, *times) + zero + table + payload
    return head + struct.pack("<I", google_crc32c.value(head))


def test_the_checksum_is_the_one_of_rfc_3720() -> None:
    assert google_crc32c.value(b"123456789") == 0xE3069283
    sent = ring.encode(Frame(FrameKind.PING, 9, payload=b"123456789"))
    assert sent[-4:] == struct.pack("<I", google_crc32c.value(sent[:-4]))


def test_the_layout_of_a_frame_is_fixed() -> None:
    item = Item(request_id=2**63 + 5, step=1, position=77, rows=2, flags=3)
    payload = np.arange(6, dtype="<f4").tobytes()
    sent = ring.encode(Frame(FrameKind.HIDDEN, 9, (item,), payload, slowest_us=70_000, inside_us=2**32 + 5))
    table = struct.pack("<QIIII", 2**63 + 5, 1, 77, 2, 3)
    assert sent == frame_bytes(3, 1, payload, table=table, times=(70_000, 2**32 - 1))
    assert len(sent) == 32 + 24 + 24 + 4


@settings(deadline=None)
@given(st.lists(frames(), min_size=1, max_size=3), st.integers(1, 50))
def test_frames_survive_the_wire_in_pieces_of_any_size(sent: list[Frame], piece: int) -> None:
    stream = b"".join(ring.encode(frame) for frame in sent)
    decoder, seen = FrameDecoder(), []
    for offset in range(0, len(stream), piece):
        decoder.feed(stream[offset : offset + piece])
        while (frame := decoder.next()) is not None:
            seen.append(frame)
    decoder.eof()
    assert seen == sent


@settings(deadline=None)
@given(frames(), st.data())
def test_one_flipped_bit_is_refused(frame: Frame, data: st.DataObject) -> None:
    sent = bytearray(ring.encode(frame))
    bit = data.draw(st.integers(0, 8 * len(sent) - 1))
    sent[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RingError):
        ring.decode(bytes(sent))


@settings(deadline=None)
@given(frames(), st.data())
def test_a_frame_that_breaks_off_is_refused(frame: Frame, data: st.DataObject) -> None:
    sent = ring.encode(frame)
    cut = data.draw(st.integers(0, len(sent) - 1))
    with pytest.raises(RingError):
        ring.decode(sent[:cut])


@settings(deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_give_frames_or_a_ring_error(data: bytes, headed: bool) -> None:
    decoder, stream = FrameDecoder(), (b"KVRG\x02" if headed else b"") + data
    decoder.feed(stream)
    seen = []
    with contextlib.suppress(RingError):
        while (frame := decoder.next()) is not None:
            seen.append(frame)
        decoder.eof()
    again = b"".join(ring.encode(frame) for frame in seen)
    assert stream.startswith(again)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame_bytes(magic=b"KVRX"), "magic"),
        (frame_bytes(version=1), "version"),
        (frame_bytes(kind=0), "kind"),
        (frame_bytes(kind=13), "kind"),
        (frame_bytes(zero=b"\0" * 3 + b"\1"), "reserved"),
        (frame_bytes(kind=3, count=4097), "count"),
        (frame_bytes(kind=3, count=2**32 - 1), "count"),
        (frame_bytes(kind=3, count=0), "count"),
        (frame_bytes(kind=2, count=2), "count"),
        (frame_bytes(kind=3, count=1, announced=64 * 2**20 + 1), "payload_bytes"),
        (frame_bytes(kind=1, announced=2**32 - 1), "payload_bytes"),
        (frame_bytes(kind=5, count=1, announced=1), "payload_bytes"),
        (frame_bytes(kind=7, payload=bytes(65)), "payload_bytes"),
        (frame_bytes(kind=1, payload=bytes(59)), "payload_bytes"),
        (frame_bytes(kind=4, count=2, payload=bytes(4), table=bytes(48)), "payload_bytes"),
        (frame_bytes(kind=3, count=1, payload=bytes(8), table=struct.pack("<QIIII", 1, 0, 0, 3, 0)), "rows"),
        (frame_bytes(kind=3, count=1, payload=bytes(8), table=struct.pack("<QIIII", 1, 0, 0, 0, 0)), "rows"),
        (frame_bytes(kind=5, count=1, table=struct.pack("<QIIII", 1, 0, 0, 65537, 0)), "rows"),
        (frame_bytes()[:-1] + b"\0", "checksum"),
    ],
)
def test_a_frame_that_lies_is_refused_by_name(sent: bytes, reason: str) -> None:
    decoder = FrameDecoder()
    decoder.feed(sent)
    with pytest.raises(RingError) as caught:
        decoder.next()
    assert caught.value.reason == reason


def test_sizes_are_refused_from_the_header_alone() -> None:
    decoder = FrameDecoder()
    decoder.feed(frame_bytes(kind=3, count=1, announced=64 * 2**20 + 1)[:32])
    with pytest.raises(RingError):
        decoder.next()


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameKind.PING, 2**32),
        Frame(FrameKind.PING, -1),
        Frame(FrameKind.RELEASE, 1, (Item(-1),)),
        Frame(FrameKind.RELEASE, 1, tuple(Item(n) for n in range(4097))),
        Frame(FrameKind.TOKEN, 1, (Item(1),), b""),
    ],
)
def test_no_frame_is_sent_that_its_receiver_would_refuse(frame: Frame) -> None:
    with pytest.raises(RingError):
        ring.encode(frame)


async def test_frames_are_read_from_a_stream_until_its_clean_end() -> None:
    first = Frame(FrameKind.TOKEN, 3, (Item(1), Item(2)), ring.encode_tokens([5, 6]))
    second = Frame(FrameKind.RELEASE, 3, (Item(1),))
    reader = asyncio.StreamReader()
    reader.feed_data(ring.encode(first) + ring.encode(second))
    reader.feed_eof()
    assert await ring.read_frame(reader) == first
    assert await ring.read_frame(reader) == second
    with pytest.raises(asyncio.IncompleteReadError):
        await ring.read_frame(reader)


@pytest.mark.parametrize("cut", [1, 31, 32, 40, -1])
async def test_a_stream_that_breaks_off_in_a_frame_is_a_ring_error(cut: int) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(ring.encode(Frame(FrameKind.RELEASE, 3, (Item(1),)))[:cut])
    reader.feed_eof()
    with pytest.raises(RingError) as caught:
        await ring.read_frame(reader)
    assert caught.value.reason == "truncated"


def test_only_an_older_epoch_is_stale() -> None:
    assert [ring.is_stale(epoch, 7) for epoch in (0, 6, 7, 8)] == [True, True, False, False]


MINE = Hello(bytes(range(32)), 576, DType.F32, 0, 15, 30, rank=0, size=2)
THEIRS = replace(MINE, layer_begin=15, layer_end=30, rank=1)


def test_a_hello_has_a_fixed_layout() -> None:
    assert THEIRS.encode() == bytes(range(32)) + struct.pack("<7I", 576, 0, 15, 30, 30, 1, 2)
    assert Hello.decode(THEIRS.encode()) == THEIRS


def test_neighbours_that_fit_are_accepted_on_every_edge() -> None:
    ring.check_hello(MINE, THEIRS)
    ring.check_hello(THEIRS, MINE)  # the closing edge
    middle = replace(MINE, layer_begin=10, layer_end=20, rank=1, size=3)
    ring.check_hello(middle, replace(middle, layer_begin=20, layer_end=30, rank=2))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (MINE, replace(THEIRS, model_digest=bytes(32)), "hello_model_digest"),
        (MINE, replace(THEIRS, n_embd=2048), "hello_n_embd"),
        (MINE, replace(THEIRS, dtype=DType.F16), "hello_dtype"),
        (MINE, replace(THEIRS, n_layer=31), "hello_n_layer"),
        (MINE, replace(THEIRS, size=3), "hello_size"),
        (MINE, MINE, "hello_rank"),
        (replace(MINE, size=3), replace(THEIRS, rank=2, size=3), "hello_rank"),
        (MINE, replace(THEIRS, layer_begin=16), "hello_layers"),
        (MINE, replace(THEIRS, layer_begin=14), "hello_layers"),
        (replace(THEIRS, layer_end=29), MINE, "hello_layers"),
        (THEIRS, replace(MINE, layer_begin=1), "hello_layers"),
    ],
)
def test_neighbours_that_do_not_fit_are_told_why(before: Hello, after: Hello, reason: str) -> None:
    with pytest.raises(RingError) as caught:
        ring.check_hello(before, after)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "payload",
    [
        bytes(60),
        bytes(32) + struct.pack("<7I", 576, 2, 0, 15, 30, 0, 2),
        bytes(32) + struct.pack("<7I", 576, 0, 15, 15, 30, 0, 2),
        bytes(32) + struct.pack("<7I", 576, 0, 0, 31, 30, 0, 2),
        bytes(32) + struct.pack("<7I", 576, 0, 0, 15, 30, 2, 2),
        bytes(32) + struct.pack("<7I", 2**32 - 1, 0, 0, 15, 30, 0, 2),
        bytes(59),
        b"",
    ],
)
def test_a_hello_that_contradicts_itself_is_refused(payload: bytes) -> None:
    with pytest.raises(RingError):
        Hello.decode(payload)


@pytest.mark.parametrize("dtype", list(DType))
def test_hidden_states_cross_as_rows_of_all_items(dtype: DType) -> None:
    rows = np.array([[0.5, -2, 65504], [1, 0, -0.25], [3, 4, 5]], dtype=np.float32)
    frame = Frame(FrameKind.HIDDEN, 1, (Item(1, rows=2), Item(2, rows=1)), ring.encode_hidden(rows, dtype))
    assert len(frame.payload) == rows.size * (4 if dtype is DType.F32 else 2)
    read = ring.decode_hidden(ring.decode(ring.encode(frame)), 3, dtype)
    assert read.dtype == np.float32
    assert read.flags.writeable
    assert np.array_equal(read, rows)
    with pytest.raises(RingError):
        ring.decode_hidden(frame, 4, dtype)
    with pytest.raises(RingError):
        ring.decode_hidden(Frame(FrameKind.PING, 1), 3, dtype)


def test_tokens_are_one_for_each_item() -> None:
    frame = Frame(FrameKind.TOKEN, 1, (Item(1), Item(2)), ring.encode_tokens([0, 2**31 - 1]))
    assert frame.payload == struct.pack("<ii", 0, 2**31 - 1)
    assert ring.decode_tokens(frame) == (0, 2**31 - 1)
    for bad in ([-1], [2**31]):
        with pytest.raises(RingError):
            ring.encode_tokens(bad)
    with pytest.raises(RingError):
        ring.decode_tokens(replace(frame, payload=struct.pack("<ii", 1, -1)))
    with pytest.raises(RingError):
        ring.decode_tokens(replace(frame, payload=bytes(4)))


def admit_frame(payload: bytes) -> Frame:
    return Frame(FrameKind.ADMIT, 1, (Item(1),), payload)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=4),
    st.lists(st.integers(0, 2**31 - 1), max_size=20),
)
def test_an_admission_survives_its_frame(params: dict, tokens: list[int]) -> None:
    admit = Admit(params, tuple(tokens))
    assert ring.decode_admit(admit_frame(ring.encode_admit(admit))) == admit


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\1\0\0",
        struct.pack("<I", 3) + b"{}",
        struct.pack("<I", 2**32 - 1) + b"{}",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 2) + b"{]",
        struct.pack("<I", 9) + b'{"a":NaN}',
        struct.pack("<I", 2) + b"\xff\xfe",
        struct.pack("<I", 2) + b"{}" + b"\0\0\0",
        struct.pack("<I", 2) + b"{}" + struct.pack("<i", -1),
        struct.pack("<I", 200_000) + b"[" * 200_000,
    ],
)
def test_an_admission_that_is_malformed_is_refused(payload: bytes) -> None:
    with pytest.raises(RingError):
        ring.decode_admit(admit_frame(payload))


def test_parameters_that_are_not_json_are_not_sent() -> None:
    for params in ({"a": float("nan")}, {"a": object()}, {"a": "x" * 2**20}):
        with pytest.raises(RingError):
            ring.encode_admit(Admit(params))


def test_an_error_keeps_its_kind_and_cannot_write_on_a_terminal() -> None:
    error = ring.decode_error(ring.encode_error(RequestError("too_long", "The prompt is too long.", "Shorten it.")))
    assert type(error) is RequestError
    assert error.as_dict() == RequestError("too_long", "The prompt is too long.", "Shorten it.").as_dict()
    hostile = json.dumps({"kind": "EngineError", "code": "x", "message": "\x1b[2Jhere\u202e", "hint": 7}).encode()
    read = ring.decode_error(hostile)
    assert (type(read), read.message, read.hint) == (EngineError, "[2Jhere", "")


@settings(deadline=None)
@given(st.text(), st.integers(0, 3))
def test_any_error_text_fits_its_frame(text: str, power: int) -> None:
    payload = ring.encode_error(KvasirError("code", text * 10**power, "\ud800\x00" * 2000))
    assert len(payload) <= 64 * 2**10
    assert ring.decode_error(payload).code == "code"


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_of_an_error_give_an_error_or_a_ring_error(payload: bytes) -> None:
    with contextlib.suppress(RingError):
        assert isinstance(ring.decode_error(payload), KvasirError)


COUNT = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 2**64 - 1), st.tuples(U32, COUNT, COUNT), max_size=6))
def test_what_a_successor_has_survives_its_frames(held: dict[int, tuple[int, int, int]]) -> None:
    sent = {key: ring.Held(step, min(final, length), length) for key, (step, final, length) in held.items()}
    (frame,) = ring.encode_held(3, sent)
    assert ring.decode_held(ring.decode(ring.encode(frame))) == sent


@settings(deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 2**64 - 1), st.tuples(U32, st.lists(st.integers(0, 2**31 - 1), max_size=5), st.integers(0, 9))
    )
)
def test_what_rank_0_knows_survives_its_frames(known: dict[int, tuple[int, list[int], int]]) -> None:
    sent = {key: ring.Known(step, len(tokens) + more, tuple(tokens)) for key, (step, tokens, more) in known.items()}
    (frame,) = ring.encode_known(3, sent)
    assert ring.decode_known(ring.decode(ring.encode(frame))) == sent


def test_more_than_a_frame_holds_goes_into_several() -> None:
    held = {n: ring.Held(n, n, n) for n in range(5000)}
    frames = ring.encode_held(3, held)
    assert [(len(frame.items), frame.flags) for frame in frames] == [(4096, 1), (904, 0)]
    assert ring.decode_held(frames[0]) | ring.decode_held(frames[1]) == held
    known = {n: ring.Known(1, 40_000, (5,) * 40_000) for n in range(3)}
    frames = ring.encode_known(3, known)
    assert [frame.flags for frame in frames] == [1, 1, 0]
    assert ring.decode_known(frames[2]) == {2: known[2]}
    for frame in frames:
        assert ring.decode(ring.encode(frame)) == frame


@pytest.mark.parametrize(
    ("read", "frame"),
    [
        (ring.decode_held, Frame(FrameKind.HELD, 1, (Item(1, 0, 6, 0, 5),))),
        (ring.decode_held, Frame(FrameKind.HELD, 1, (Item(1, 0, 5, 0, 5),), bytes(4))),
        (ring.decode_held, Frame(FrameKind.ROLL, 1)),
        (ring.decode_known, Frame(FrameKind.HELD, 1, (Item(1, 0, 5, 2, 0),), bytes(4))),
        (ring.decode_known, Frame(FrameKind.HELD, 1, (Item(1, 0, 1, 2, 0),), bytes(8))),
        (ring.decode_known, Frame(FrameKind.HELD, 1, (Item(1, 0, 1, 1, 0),), struct.pack("<i", -1))),
    ],
)
def test_a_held_frame_that_contradicts_itself_is_refused(read, frame: Frame) -> None:
    with pytest.raises(RingError):
        read(frame)


@given(st.integers(1, 1024).flatmap(lambda size: st.tuples(st.just(size), st.frozensets(st.integers(0, size - 1)))))
def test_lost_edges_survive_the_wire(case: tuple[int, frozenset[int]]) -> None:
    size, edges = case
    frame = ring.decode(ring.encode(ring.encode_lost(9, edges)))
    assert (frame.kind, frame.epoch, frame.items) == (FrameKind.LOST, 9, ())
    assert ring.decode_lost(frame, size) == edges


@pytest.mark.parametrize(
    ("payload", "reason"),
    [(b"\0", "payload_bytes"), (b"\3\0", "edges"), (b"\1\0\1\0", "edges"), (b"\2\0\1\0", "edges")],
)
def test_a_lost_frame_that_names_what_there_is_not_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(RingError) as caught:
        ring.decode_lost(Frame(FrameKind.LOST, 9, payload=payload), 3)
    assert caught.value.reason == reason


COUNTERS = st.integers(0, 2**64 - 1)


@given(st.builds(Progress, COUNTERS, COUNTERS, st.integers(0, 1023), st.integers(0, 2**32 - 1)))
def test_progress_survives_the_wire(progress: Progress) -> None:
    frame = ring.decode(ring.encode(ring.encode_progress(9, progress)))
    assert (frame.kind, frame.epoch, frame.items) == (FrameKind.PROGRESS, 9, ())
    assert ring.decode_progress(frame, 1024) == progress


def test_progress_is_bounded_and_names_a_rank_that_there_is() -> None:
    longest = ring.decode_progress(ring.encode_progress(1, Progress(0, 0, 2, 2**40)), 3)
    assert longest.busy_ms == 2**32 - 1
    for frame, reason in (
        (ring.encode_progress(1, Progress(rank=3)), "rank"),
        (Frame(FrameKind.PROGRESS, 1, payload=bytes(23)), "payload_bytes"),
        (Frame(FrameKind.LOST, 1, payload=bytes(24)), "kind"),
    ):
        with pytest.raises(RingError) as caught:
            ring.decode_progress(frame, 3)
        assert caught.value.reason == reason
