"""The dispatch wires against the vectors in tests/data/conformance/dispatch and against themselves."""

from __future__ import annotations

import json
import struct
import tracemalloc
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.dispatch import DispatchError, Request, RequestDecoder
from kvasir_console.relay.wire.preamble import Wire

DATA = Path(__file__).parents[3] / "data" / "conformance" / "dispatch"
CASES = json.loads((DATA / "cases.json").read_text())
HOSTILE = json.loads((DATA / "hostile.json").read_text())
BY_NAME = {case["name"]: case for case in CASES["cases"]}
SHARDS = {shard["name"]: shard for shard in CASES["shards"]}
WIRES = {"v1": Wire.V1, "v2": Wire.V2, "v2f16": Wire.V2F16}
ALL_WIRES = tuple(WIRES.values())


def decoder_for(shard: str) -> RequestDecoder:
    begin, end = SHARDS[shard]["experts"]
    return RequestDecoder(SHARDS[shard]["n_embd"], end - begin)


@cache
def weights_of(shard: str) -> dict[str, np.ndarray]:
    """gate, up (n_local, n_ff, E) and down (n_local, E, n_ff), by gguf-py."""
    reader = gguf.GGUFReader(DATA / SHARDS[shard]["file"])
    return {
        tensor.name.split(".")[2]: np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        for tensor in reader.tensors
    }


def reference_outputs(shard: str, request: Request) -> np.ndarray:
    """down(silu(gate x) * up x) in numpy float32: (pairs, E) for v1, the weighted (rows, E) sums otherwise."""
    w = weights_of(shard)
    outputs = np.empty((request.n_pairs, request.n_embd), dtype=np.float32)
    for pair, (row, expert) in enumerate(zip(request.row_idx, request.ids, strict=True)):
        x = request.rows[row]
        gate = w["ffn_gate_exps"][expert] @ x
        outputs[pair] = w["ffn_down_exps"][expert] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up_exps"][expert] @ x))
    if request.weights is None:
        return outputs
    sums = np.zeros_like(request.rows)
    np.add.at(sums, request.row_idx, outputs * request.weights[:, None])
    return sums


def assert_reply(case: dict, reply: bytes) -> None:
    n_embd = case["reply_shape"][1]
    got = dispatch.decode_reply(WIRES[case["wire"]], reply, n_embd).astype(np.float64)
    due = dispatch.decode_reply(WIRES[case["wire"]], bytes.fromhex(case["reply_hex"]), n_embd).astype(np.float64)
    assert got.shape == tuple(case["reply_shape"])
    assert np.abs(got - due).max() <= case["max_abs_error"]
    for mine, theirs in zip(got, due, strict=True):
        if theirs.any():
            cosine = mine @ theirs / (np.linalg.norm(mine) * np.linalg.norm(theirs))
            assert cosine >= case["min_row_cosine"]


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_a_request_decodes_to_its_fields_and_encodes_to_its_bytes(case: dict) -> None:
    sent = bytes.fromhex(case["request_hex"])
    decoder = decoder_for(case["shard"])
    decoder.feed(sent)
    request = decoder.next()
    assert request is not None
    assert request.wire is WIRES[case["wire"]]
    if request.wire is Wire.V1:
        assert (request.n_used, request.n_rows) == (case["n_used"], case["n_tokens"])
        assert request.n_pairs == case["n_used"] * case["n_tokens"]
        assert request.row_idx.tolist() == [pair // case["n_used"] for pair in range(request.n_pairs)]
        assert request.rows.tobytes() == sent[8 : 8 + request.rows.nbytes]
    else:
        assert (request.n_rows, request.n_pairs) == (case["n_rows"], case["n_pairs"])
        value = "<f4" if request.wire is Wire.V2 else "<f2"
        assert request.rows.astype(value).tobytes() == sent[12 : 12 + request.rows.astype(value).nbytes]
        ids = sent[len(sent) - request.n_pairs * (4 + np.dtype(value).itemsize) :][: 4 * request.n_pairs]
        assert request.ids.tobytes() == ids
    assert dispatch.encode_request(request, request.wire) == sent
    assert dispatch.request_bytes(request.wire, request.n_embd, request.n_rows, request.n_pairs) == len(sent)
    assert decoder.next() is None
    decoder.eof()


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_a_reply_keeps_its_bytes_and_a_numpy_expert_gives_it(case: dict) -> None:
    given_reply = bytes.fromhex(case["reply_hex"])
    wire, (rows, n_embd) = WIRES[case["wire"]], case["reply_shape"]
    outputs = dispatch.decode_reply(wire, given_reply, n_embd)
    assert outputs.dtype == np.float32
    assert outputs.shape == (rows, n_embd)
    assert dispatch.encode_reply(wire, outputs) == given_reply
    decoder = decoder_for(case["shard"])
    decoder.feed(bytes.fromhex(case["request_hex"]))
    request = decoder.next()
    assert request is not None
    assert dispatch.reply_bytes(wire, n_embd, request.n_rows, request.n_pairs) == len(given_reply)
    assert_reply(case, dispatch.encode_reply(wire, reference_outputs(case["shard"], request)))


@pytest.mark.parametrize("session", CASES["sessions"], ids=lambda session: session["name"])
def test_requests_of_one_connection_come_out_in_order_however_they_are_delivered(session: dict) -> None:
    cases = [BY_NAME[name] for name in session["requests"]]
    requests = [bytes.fromhex(case["request_hex"]) for case in cases]
    stream = b"".join(requests)
    delivery = session["delivery"]
    if delivery == "request_by_request":
        pieces = requests
    elif delivery == "one_write":
        pieces = [stream]
    else:
        size = int(delivery.removeprefix("pieces_of_"))
        pieces = [stream[offset : offset + size] for offset in range(0, len(stream), size)]
    decoder = decoder_for(session["shard"])
    replies = []
    for piece in pieces:
        decoder.feed(piece)
        while (request := decoder.next()) is not None:
            replies.append(dispatch.encode_reply(request.wire, reference_outputs(session["shard"], request)))
    decoder.eof()
    assert len(replies) == len(cases)
    for case, reply in zip(cases, replies, strict=True):
        assert_reply(case, reply)


@pytest.mark.parametrize("piece", [1, 2**16], ids=["byte_by_byte", "one_write"])
@pytest.mark.parametrize("case", HOSTILE["cases"], ids=lambda case: case["name"])
def test_a_hostile_request_ends_the_connection_after_the_good_ones_are_answered(case: dict, piece: int) -> None:
    sent = bytes.fromhex(case["send_hex"])
    decoder = decoder_for(case["shard"])
    replies: list[bytes] = []

    def take() -> None:
        for offset in range(0, len(sent), piece):
            decoder.feed(sent[offset : offset + piece])
            while (request := decoder.next()) is not None:
                replies.append(dispatch.encode_reply(request.wire, reference_outputs(case["shard"], request)))

    if not sent:
        take()
        decoder.eof()  # a connection without a request ends cleanly
    elif case["then"] == "wait":
        with pytest.raises(DispatchError):
            take()
        with pytest.raises(DispatchError):
            decoder.next()  # and there is no way back
        with pytest.raises(DispatchError):
            decoder.eof()
    else:
        with pytest.raises(DispatchError):  # noqa: PT012 - at the header or at the end, but nowhere else
            take()
            decoder.eof()
    assert len(replies) == len(case["replies_before_close"])
    for reply, due in zip(replies, case["replies_before_close"], strict=True):
        assert_reply(BY_NAME[due], reply)


@pytest.mark.parametrize("case", HOSTILE["not_a_number"], ids=lambda case: case["name"])
def test_a_row_that_is_no_number_leaves_the_other_row_alone(case: dict) -> None:
    decoder = decoder_for("small-f32")
    decoder.feed(bytes.fromhex(case["request_hex"]))
    request = decoder.next()
    assert request is not None
    with np.errstate(invalid="ignore"):
        row = reference_outputs("small-f32", request)[1]
    due = np.frombuffer(bytes.fromhex(case["reply_row_1_hex"]), dtype="<f4")
    assert np.abs(row - due).max() <= case["max_abs_error"]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (struct.pack("<i", -4), "marker"),
        (struct.pack("<i", 0), "marker"),
        (struct.pack("<i", 65), "n_used"),
        (struct.pack("<i", 4), "expert_twice"),
        (struct.pack("<ii", 1, 8193), "n_tokens"),
        (struct.pack("<ii", -2, 8193), "n_rows"),
        (struct.pack("<iii", -3, 1, 65537), "n_pairs"),
    ],
)
def test_a_count_is_refused_as_soon_as_it_is_there(header: bytes, reason: str) -> None:
    decoder = RequestDecoder(n_embd=8, n_local=3)
    decoder.feed(header[:-1])
    assert decoder.next() is None
    decoder.feed(header[-1:])
    with pytest.raises(DispatchError) as caught:
        decoder.next()
    assert caught.value.reason == reason


def test_a_legal_header_allocates_nothing_and_an_unaffordable_one_is_refused() -> None:
    header = struct.pack("<iii", -2, 8192, 65536)
    decoder = RequestDecoder(n_embd=7168, n_local=64)
    tracemalloc.start()
    decoder.feed(header)
    assert decoder.next() is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**16
    body = 4 * 7168 * 8192 + 12 * 65536
    assert decoder.wanted_bytes == body
    tight = RequestDecoder(n_embd=7168, n_local=64, byte_budget=body)
    tight.feed(header)
    with pytest.raises(DispatchError) as caught:
        tight.next()
    assert caught.value.reason == "byte_budget"


def test_a_whole_request_is_read_where_it_lies() -> None:
    rows = np.ones((512, 2048), dtype=np.float32)
    index = np.arange(512, dtype=np.int32)
    weighted = Request(Wire.V2, rows, index, np.zeros(512, np.int32), np.ones(512, np.float32))
    sent = dispatch.encode_request(weighted, Wire.V2)
    decoder = RequestDecoder(n_embd=2048, n_local=1)
    for offset in range(0, len(sent), 65536):
        decoder.feed(sent[offset : offset + 65536])
    tracemalloc.start()
    request = decoder.next()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert request is not None
    assert peak < rows.nbytes // 8
    assert np.array_equal(request.rows, rows)
    assert request.rows.flags.writeable


def test_paid_bytes_are_the_v2f16_body_and_so_the_same_on_every_wire() -> None:
    for n_embd, rows, pairs in ((8, 3, 7), (3072, 8192, 65536)):
        body = dispatch.request_bytes(Wire.V2F16, n_embd, rows, pairs) - 12
        assert dispatch.paid_bytes(n_embd, rows, pairs) == body == 2 * n_embd * rows + 10 * pairs


def test_the_published_cost_of_v1_at_3072_and_top_8() -> None:
    """The contract's measurement, one token: about 110 KB both ways, one hidden row a pair."""
    assert dispatch.reply_bytes(Wire.V1, 3072, 8, 8) == 98304
    assert dispatch.request_bytes(Wire.V1, 3072, 1, 8) == 8 + 12288 + 32


def test_local_ids_are_counted_from_the_begin_of_the_range() -> None:
    assert dispatch.local_ids(np.array([64, 65, 127]), 64, 128).tolist() == [0, 1, 63]
    for outside in (63, 128, -1, 2**33 + 64):
        with pytest.raises(DispatchError):
            dispatch.local_ids(np.array([64, outside]), 64, 128)


def test_a_weighted_request_goes_out_on_v1_as_one_row_a_pair() -> None:
    rows = np.array([[1, 2], [3, 4]], dtype=np.float32)
    request = Request(
        Wire.V2, rows, np.array([1, 0, 1], np.int32), np.array([0, 1, 2], np.int32), np.ones(3, np.float32)
    )
    expected = struct.pack("<ii6f3i", 1, 3, 3, 4, 1, 2, 3, 4, 0, 1, 2)
    assert dispatch.encode_request(request, Wire.V1) == expected
    assert len(expected) == dispatch.request_bytes(Wire.V1, 2, 3, 3)


def test_what_a_wire_cannot_carry_is_refused_before_it_is_sent() -> None:
    def request(pairs: int, rows: int = 1, row: int = 0, expert: int = 0) -> Request:
        return Request(
            Wire.V2,
            np.zeros((rows, 1), np.float32),
            np.full(pairs, row, np.int32),
            np.full(pairs, expert, np.int32),
            np.ones(pairs, np.float32),
        )

    raw = Request(Wire.V1, np.zeros((1, 1), np.float32), np.zeros(2, np.int32), np.zeros(2, np.int32), None, n_used=2)
    short = Request(
        Wire.V2, np.zeros((1, 1), np.float32), np.zeros(2, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)
    )
    for bad, wire, reason in (
        (request(8193), Wire.V1, "n_tokens"),
        (request(65537), Wire.V2, "n_pairs"),
        (request(1, rows=8193), Wire.V2F16, "n_rows"),
        (request(1, row=1), Wire.V2, "row_index"),
        (request(1, expert=-1), Wire.V1, "expert_id"),
        (request(1), Wire.V1 | Wire.V2, "wire"),
        (raw, Wire.V1, "expert_twice"),
        (raw, Wire.V2, "weights"),
        (short, Wire.V2, "shape"),
    ):
        with pytest.raises(DispatchError) as caught:
            dispatch.encode_request(bad, wire)
        assert caught.value.reason == reason


def test_values_beyond_f16_are_seen_before_they_become_infinite() -> None:
    def request(value: float) -> Request:
        return Request(
            Wire.V2,
            np.array([[value]], np.float32),
            np.zeros(1, np.int32),
            np.zeros(1, np.int32),
            np.ones(1, np.float32),
        )

    assert dispatch.fits_f16(request(-65504.0))
    assert not dispatch.fits_f16(request(65536.0))
    assert not dispatch.fits_f16(request(float("nan")))


@pytest.mark.parametrize("size", [0, 4, 31, 33])
def test_a_reply_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(DispatchError):
        dispatch.decode_reply(Wire.V2, bytes(size), 8)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, int]:
    """A request whose values f16 holds exactly, and the number of local experts."""
    wire = draw(st.sampled_from(ALL_WIRES))
    n_embd, rows, n_local = draw(st.integers(1, 9)), draw(st.integers(1, 7)), draw(st.integers(1, 6))
    values = st.floats(-1000, 1000, width=16)
    states = draw(hnp.arrays(np.float32, (rows, n_embd), elements=values))
    if wire is Wire.V1:
        n_used = draw(st.integers(1, n_local))
        chosen = [draw(st.permutations(range(n_local)))[:n_used] for _ in range(rows)]
        ids = np.array(chosen, dtype=np.int32).reshape(-1)
        return Request(wire, states, np.repeat(np.arange(rows, dtype=np.int32), n_used), ids, None, n_used), n_local
    pairs = draw(st.integers(1, 12))
    row_idx = draw(hnp.arrays(np.int32, pairs, elements=st.integers(0, rows - 1)))
    ids = draw(hnp.arrays(np.int32, pairs, elements=st.integers(0, n_local - 1)))
    return Request(wire, states, row_idx, ids, draw(hnp.arrays(np.float32, pairs, elements=values))), n_local


@settings(deadline=None)
@given(requests(), st.integers(1, 40))
def test_a_request_survives_its_wire_in_pieces_of_any_size(made: tuple[Request, int], piece: int) -> None:
    request, n_local = made
    sent = dispatch.encode_request(request, request.wire)
    assert len(sent) == dispatch.request_bytes(request.wire, request.n_embd, request.n_rows, request.n_pairs)
    decoder = RequestDecoder(request.n_embd, n_local)
    stream, seen = sent * 2, []
    for offset in range(0, len(stream), piece):
        decoder.feed(stream[offset : offset + piece])
        while (read := decoder.next()) is not None:
            seen.append(read)
        assert decoder.buffered_bytes == 0 or decoder.wanted_bytes > 0
    decoder.eof()
    assert len(seen) == 2
    for read in seen:
        assert (read.wire, read.n_used) == (request.wire, request.n_used)
        assert np.array_equal(read.rows, request.rows)
        assert np.array_equal(read.row_idx, request.row_idx)
        assert np.array_equal(read.ids, request.ids)
        assert all(array.flags.aligned for array in (read.rows, read.row_idx, read.ids))
        assert dispatch.encode_request(read, read.wire) == sent
        if request.weights is not None:
            assert read.weights is not None
            assert np.array_equal(read.weights, request.weights)


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", *(struct.pack("<i", first) for first in (1, 2, -2, -3))]))
def test_any_bytes_give_lawful_requests_or_a_dispatch_error(tail: bytes, first: bytes) -> None:
    decoder = RequestDecoder(n_embd=2, n_local=3)
    decoder.feed(first + tail)
    try:
        while (request := decoder.next()) is not None:
            assert 0 <= request.ids.min() <= request.ids.max() < 3
            assert 0 <= request.row_idx.min() <= request.row_idx.max() < request.n_rows
        decoder.eof()
    except DispatchError:
        pass
