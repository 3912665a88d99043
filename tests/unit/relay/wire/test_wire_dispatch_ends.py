"""Both ends of a version 3 session joined in memory, with the bytes cut anywhere, and each against a hostile other."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir_console.relay.wire import dispatch_v3 as v3
from kvasir_console.relay.wire.dispatch import Request
from kvasir_console.relay.wire.dispatch_ends import (
    MAX_ERRORS,
    MAX_IN_FLIGHT,
    Answered,
    Asked,
    CancelAsked,
    Complaint,
    Failed,
    Greeted,
    Parting,
    Ponged,
    TrunkEnd,
    WorkerEnd,
)
from kvasir_console.relay.wire.dispatch_v3 import ErrorCode, Frame, FrameKind, HeldSlice, Hello, V3Error
from kvasir_console.relay.wire.preamble import Wire
from kvasir_console.relay.wire.values import ALL_DTYPES, Dtype

E = 4
SLICES = (HeldSlice(0, 0, 4, bytes(range(32))), HeldSlice(2, 8, 10))
WORKER = Hello(E, SLICES, bytes(32), ALL_DTYPES, 4000)


def request(n_rows: int = 1, expert: int = 0, fill: float = 1.0) -> Request:
    rows = np.full((n_rows, E), fill, np.float32)
    ids = np.full(n_rows, expert, np.int32)
    return Request(Wire.V3, rows, np.arange(n_rows, dtype=np.int32), ids, np.ones(n_rows, np.float32))


def sent_by(end: TrunkEnd | WorkerEnd) -> bytes:
    data, end.outgoing = b"".join(end.outgoing), []
    return data


def joined(hello: Hello = WORKER) -> tuple[TrunkEnd, WorkerEnd]:
    trunk, worker = TrunkEnd(Hello(E)), WorkerEnd(hello)
    assert [type(each) for each in worker.receive(sent_by(trunk))] == [Greeted]
    assert list(trunk.receive(sent_by(worker))) == [Greeted(hello)]
    return trunk, worker


def frame(kind: int, payload: bytes = b"", request_id: int = 0, slice_: int = 0, flags: int = 0) -> bytes:
    return struct.pack("<IBBHQ", len(payload), kind, flags, slice_, request_id) + payload


def test_the_hello_says_what_is_held() -> None:
    trunk, _ = joined()
    assert trunk.peer is not None
    assert trunk.peer.slices == SLICES
    assert trunk.offers(Dtype.INT8)
    assert not TrunkEnd(Hello(E)).offers(Dtype.F32)


def test_answers_come_in_any_order_and_say_which_they_are() -> None:
    trunk, worker = joined()
    first, second = trunk.ask(0, Dtype.F32, request(2)), trunk.ask(1, Dtype.F16, request(1, 1))
    asked = list(worker.receive(sent_by(trunk)))
    assert [(each.request_id, each.slice, each.dtype) for each in asked if isinstance(each, Asked)] == [
        (first, 0, Dtype.F32),
        (second, 1, Dtype.F16),
    ]
    assert worker.in_flight_bytes == trunk.in_flight_bytes > 0
    worker.answer(second, np.full((1, E), 2, np.float32), 7)
    worker.answer(first, np.full((2, E), 1, np.float32), 9)
    answers = [each for each in trunk.receive(sent_by(worker)) if isinstance(each, Answered)]
    assert [(each.request_id, each.took_us, each.sums.shape) for each in answers] == [
        (second, 7, (1, E)),
        (first, 9, (2, E)),
    ]
    assert worker.in_flight_bytes == trunk.in_flight_bytes == worker.in_flight == trunk.in_flight == 0


def test_sums_that_the_dtype_cannot_carry_come_back_in_f32() -> None:
    trunk, worker = joined()
    trunk.ask(0, Dtype.F16, request())
    list(worker.receive(sent_by(trunk)))
    worker.answer(1, np.full((1, E), 1e6, np.float32))
    (answer,) = trunk.receive(sent_by(worker))
    assert isinstance(answer, Answered)
    assert np.array_equal(answer.sums, np.full((1, E), 1e6, np.float32))


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(2, bytes(40), 1, slice_=2), ErrorCode.SLICE),
        (frame(2, bytes(40), 1, flags=4), ErrorCode.DTYPE),
        (frame(2, bytes(40), 1), ErrorCode.REQUEST),
        (frame(2, struct.pack("<II", 1, 1) + bytes(8 + 4 * E - 1), 1), ErrorCode.REQUEST),
        (frame(2, struct.pack("<IIfHH", 1, 1, 1, 1, 0) + bytes(4 * E), 1), ErrorCode.REQUEST),
        (frame(2, struct.pack("<IIfHH", 1, 1, 1, 0, 4) + bytes(4 * E), 1), ErrorCode.REQUEST),
        (frame(2, bytes(4001), 1), ErrorCode.OVER_BUDGET),
        (frame(6, bytes(65)), ErrorCode.PROTOCOL),
        (frame(99, bytes(10)), ErrorCode.PROTOCOL),
    ],
)
def test_a_bad_request_is_answered_by_an_error_and_the_session_lives(bad: bytes, code: ErrorCode) -> None:
    trunk, worker = joined()
    assert list(worker.receive(bad)) == []
    assert worker.in_flight == worker.in_flight_bytes == 0
    reader = v3.FrameReader(lambda _: None)
    (said,) = reader.feed(v3.OPENING + sent_by(worker))
    assert isinstance(said, Frame)
    assert said.kind is FrameKind.ERROR
    assert v3.decode_error(said.payload).code is code
    good = b"".join(v3.encode_request(2, 0, Dtype.F32, request()))
    assert [type(each) for each in worker.receive(good)] == [Asked]
    del trunk


def test_a_refused_request_fails_alone() -> None:
    trunk, worker = joined()
    first, second = trunk.ask(0, Dtype.F32, request(1, 0)), trunk.ask(1, Dtype.F32, request(1, 3))
    list(worker.receive(sent_by(trunk)))  # slice 1 has two experts
    worker.answer(first, np.ones((1, E), np.float32))
    events = list(trunk.receive(sent_by(worker)))
    failed = [each for each in events if isinstance(each, Failed)]
    assert [(each.request_id, each.error.code) for each in failed] == [(second, ErrorCode.REQUEST)]
    assert [each.request_id for each in events if isinstance(each, Answered)] == [first]
    assert trunk.in_flight == 0


def test_a_cancelled_request_is_over_whichever_way_it_ends() -> None:
    trunk, worker = joined()
    ids = [trunk.ask(0, Dtype.F32, request()) for _ in range(3)]
    list(worker.receive(sent_by(trunk)))
    worker.answer(ids[0], np.ones((1, E), np.float32))
    for each in ids:
        trunk.cancel(each)
        trunk.cancel(each)
    assert list(trunk.receive(sent_by(worker))) == []  # the first was on its way already
    asked = list(worker.receive(sent_by(trunk)))
    assert asked == [CancelAsked(ids[1]), CancelAsked(ids[2])]
    worker.cancelled(ids[1])
    worker.fail(ids[2], ErrorCode.INTERNAL, "too late")
    assert list(trunk.receive(sent_by(worker))) == []
    assert trunk.in_flight == trunk.in_flight_bytes == worker.in_flight == worker.in_flight_bytes == 0


def test_an_answer_cancelled_while_it_arrives_is_swallowed() -> None:
    trunk, worker = joined()
    number = trunk.ask(0, Dtype.F32, request(3))
    list(worker.receive(sent_by(trunk)))
    worker.answer(number, np.ones((3, E), np.float32))
    data = sent_by(worker)
    assert list(trunk.receive(data[:20])) == []
    trunk.cancel(number)
    assert list(trunk.receive(data[20:])) == []
    assert trunk.in_flight == 0


def test_the_budget_bounds_what_is_in_flight_at_both_ends() -> None:
    trunk, worker = joined()
    taken = 0
    while trunk.room(Dtype.F32, 4, 4):
        trunk.ask(0, Dtype.F32, request(4))
        taken += 1
    assert taken == 4000 // v3.cost_bytes(Dtype.F32, E, v3.request_bytes(Dtype.F32, E, 4, 4)) > 5
    assert trunk.possible(Dtype.F32, 4, 4)
    assert not trunk.possible(Dtype.F32, 200, 200)
    asked = list(worker.receive(sent_by(trunk)))
    assert len(asked) == taken
    assert worker.in_flight_bytes <= WORKER.byte_budget
    extra = b"".join(v3.encode_request(1000, 0, Dtype.F32, request(4)))
    assert list(worker.receive(extra)) == []
    with pytest.raises(V3Error, match="nobody asked"):  # the refusal is of a request this trunk never made
        list(trunk.receive(sent_by(worker)))


def test_a_worker_holds_a_bounded_number_of_requests() -> None:
    trunk, worker = joined(Hello(E, SLICES, bytes(32), ALL_DTYPES, 2**30))
    for _ in range(MAX_IN_FLIGHT):
        assert trunk.room(Dtype.F32, 1, 1)
        trunk.ask(0, Dtype.F32, request())
    assert not trunk.room(Dtype.F32, 1, 1)
    trunk.ask(0, Dtype.F32, request())
    assert len(list(worker.receive(sent_by(trunk)))) == MAX_IN_FLIGHT
    assert worker.refused == 1


def test_a_trunk_that_only_errs_is_left() -> None:
    _, worker = joined()
    for number in range(1, MAX_ERRORS + 1):
        list(worker.receive(frame(2, bytes(8), number, slice_=9)))
        worker.outgoing.clear()
    with pytest.raises(V3Error, match="refused"):
        list(worker.receive(frame(2, bytes(8), MAX_ERRORS + 1, slice_=9)))


def test_ping_brings_its_bytes_back_and_one_is_under_way_at_a_time() -> None:
    trunk, worker = joined()
    assert trunk.ping(b"12345678")
    assert not trunk.ping(b"87654321")
    assert list(worker.receive(sent_by(trunk))) == []
    assert list(trunk.receive(sent_by(worker))) == [Ponged()]
    assert trunk.ping(b"again")
    list(worker.receive(sent_by(trunk)))
    worker.outgoing = [frame(7, b"other")]
    with pytest.raises(V3Error, match="PONG"):
        list(trunk.receive(sent_by(worker)))
    trunk, worker = joined()
    assert list(trunk.receive(frame(6, b"are you there"))) == []
    assert sent_by(trunk) == frame(7, b"are you there")


def test_a_worker_that_leaves_answers_what_it_has() -> None:
    trunk, worker = joined()
    number = trunk.ask(0, Dtype.F32, request())
    worker.goodbye("the machine restarts")
    assert list(trunk.receive(sent_by(worker))) == [Parting("the machine restarts")]
    assert [type(each) for each in worker.receive(sent_by(trunk))] == [Asked]
    worker.answer(number, np.ones((1, E), np.float32))
    assert [type(each) for each in trunk.receive(sent_by(worker))] == [Answered]
    trunk.goodbye("")
    assert list(worker.receive(sent_by(trunk))) == [Parting("")]
    assert worker.leaving
    with pytest.raises(V3Error, match="after GOODBYE"):
        list(worker.receive(b"".join(v3.encode_request(2, 0, Dtype.F32, request()))))


@pytest.mark.parametrize(
    "pushed",
    [
        frame(3, bytes(8 + 4 * E), 5),  # never asked
        frame(3, bytes(8 + 4 * E), 1, slice_=1),
        frame(3, bytes(8 + 4 * E), 1, flags=2),
        frame(3, bytes(8 + 8 * E), 1),
        frame(3, bytes(9), 1),
        frame(3, struct.pack("<II", 1, 0), 1),  # cancelled, says the worker
        frame(3, struct.pack("<II", 2, 0) + bytes(4 * E), 1),
        frame(4, b"", 1),
        frame(2, bytes(8), 1),
        frame(5, b"", 1),
        frame(7, b"x"),
        frame(42, b"x"),
        v3.encode_hello(WORKER)[4:],
        struct.pack("<IBBHQ", 2**32 - 1, 3, 0, 0, 1),
    ],
)
def test_what_was_not_asked_for_ends_the_session_at_the_trunk(pushed: bytes) -> None:
    trunk, _ = joined()
    trunk.ask(0, Dtype.F32, request())
    with pytest.raises(V3Error):
        list(trunk.receive(pushed))
    with pytest.raises(V3Error):
        list(trunk.receive(b"\0"))


@pytest.mark.parametrize("again", [None, frame(4, b"\0\0", 1), frame(3, struct.pack("<II", 1, 0), 1)])
def test_a_replayed_answer_counts_once_and_ends_the_session(again: bytes | None) -> None:
    trunk, worker = joined()
    trunk.ask(0, Dtype.F32, request())
    list(worker.receive(sent_by(trunk)))
    worker.answer(1, np.ones((1, E), np.float32))
    answer = sent_by(worker)
    assert [type(each) for each in trunk.receive(answer)] == [Answered]
    with pytest.raises(V3Error, match="nobody asked"):
        list(trunk.receive(again or answer))


@pytest.mark.parametrize(
    "said",
    [
        frame(3, bytes(8), 1),
        frame(7, b"x"),
        v3.encode_hello(Hello(E))[4:],
        b"".join(v3.encode_request(1, 0, Dtype.F32, request())) * 2,  # an id twice
        struct.pack("<IBBHQ", 2**31, 2, 0, 0, 1),
    ],
)
def test_what_a_trunk_does_not_send_ends_the_session_at_the_worker(said: bytes) -> None:
    _, worker = joined()
    with pytest.raises(V3Error) as caught:
        list(worker.receive(said))
    worker.last_words(caught.value)
    trunk, _ = joined()
    (event,) = trunk.receive(b"".join(worker.outgoing[-1:]))
    assert isinstance(event, Complaint)
    assert str(event.error) == str(caught.value)


@pytest.mark.parametrize("opening", [b"\xfc\xff\xff\xfe", b"\xfe\xff\xff\xff", v3.OPENING + frame(6, b"x")])
def test_nothing_comes_before_the_hello(opening: bytes) -> None:
    with pytest.raises(V3Error):
        list(WorkerEnd(WORKER).receive(opening))
    with pytest.raises(V3Error):
        list(TrunkEnd(Hello(E)).receive(opening))


def test_ends_of_different_models_part() -> None:
    trunk = TrunkEnd(Hello(E + 1))
    worker = WorkerEnd(WORKER)
    with pytest.raises(V3Error, match="n_embd"):
        list(worker.receive(sent_by(trunk)))
    with pytest.raises(V3Error, match="n_embd"):
        list(trunk.receive(v3.encode_hello(WORKER)))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 10), st.binary(max_size=80), st.integers(0, 3), st.integers(0, 2), st.integers(0, 4))
    ),
    st.booleans(),
)
def test_no_frames_in_any_order_do_harm(frames: list[tuple[int, bytes, int, int, int]], greeted: bool) -> None:
    stream = b"".join(frame(*fields) for fields in frames)
    if greeted:
        trunk, worker = joined()
        trunk.ask(0, Dtype.F32, request())
        trunk.outgoing.clear()
    else:
        trunk, worker, stream = TrunkEnd(Hello(E)), WorkerEnd(WORKER), v3.OPENING + stream
    tracemalloc.start()
    try:
        with suppress(V3Error):
            list(worker.receive(stream))
        with suppress(V3Error):
            list(trunk.receive(stream))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert 0 <= worker.in_flight_bytes <= WORKER.byte_budget
    assert 0 <= trunk.in_flight <= 1


class Conversation(RuleBasedStateMachine):
    """Both ends, with the bytes between them delivered in pieces of any size: accounts agree once all has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.worker = TrunkEnd(Hello(E)), WorkerEnd(WORKER)
        self.forth, self.back = b"", b""
        self.asked: dict[int, float] = {}
        self.cancelled: set[int] = set()
        self.queue: list[Asked] = []

    def collect(self) -> None:
        self.forth += sent_by(self.trunk)
        self.back += sent_by(self.worker)

    @rule(n_rows=st.integers(1, 5), dtype=st.sampled_from(Dtype), fill=st.integers(-9, 9))
    def ask(self, n_rows: int, dtype: Dtype, fill: int) -> None:
        if self.trunk.room(dtype, n_rows, n_rows):
            self.asked[self.trunk.ask(0, dtype, request(n_rows, 1, fill))] = fill

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[number]
        self.cancelled.add(number)
        self.trunk.cancel(number)

    @rule(size=st.integers(1, 300))
    def deliver_forth(self, size: int) -> None:
        self.collect()
        data, self.forth = self.forth[:size], self.forth[size:]
        for event in self.worker.receive(data):
            if isinstance(event, Asked):
                self.queue.append(event)
            elif isinstance(event, CancelAsked):
                waiting = [each for each in self.queue if each.request_id == event.request_id]
                for each in waiting:
                    self.queue.remove(each)
                    self.worker.cancelled(each.request_id)

    @rule(size=st.integers(1, 300))
    def deliver_back(self, size: int) -> None:
        self.collect()
        data, self.back = self.back[:size], self.back[size:]
        for event in self.trunk.receive(data):
            if isinstance(event, Answered):
                fill = self.asked.pop(event.request_id)
                assert event.request_id not in self.cancelled
                assert np.allclose(event.sums, 2 * fill, rtol=1e-2)
            elif isinstance(event, Failed):
                assert self.asked.pop(event.request_id) is not None

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), fails=st.booleans())
    def compute(self, data: st.DataObject, fails: bool) -> None:
        each = self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1)))
        if fails:
            self.worker.fail(each.request_id, ErrorCode.INTERNAL, "broken")
        else:
            self.worker.answer(each.request_id, each.request.rows * 2)

    @rule()
    def ping(self) -> None:
        self.trunk.ping(b"nonce")

    @invariant()
    def within_budget(self) -> None:
        assert 0 <= self.worker.in_flight_bytes <= WORKER.byte_budget
        assert 0 <= self.trunk.in_flight_bytes <= WORKER.byte_budget

    def teardown(self) -> None:
        for each in self.queue:
            self.worker.answer(each.request_id, each.request.rows * 2)
        self.queue = []
        for _ in range(6):
            self.deliver_forth(2**20)
            for each in self.queue:
                self.worker.answer(each.request_id, each.request.rows * 2)
            self.queue = []
            self.deliver_back(2**20)
        assert not self.asked
        assert self.trunk.in_flight == self.trunk.in_flight_bytes == 0
        assert self.worker.in_flight == self.worker.in_flight_bytes == 0


TestConversation = Conversation.TestCase
TestConversation.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.parametrize("size", [1, 3, 17])
def test_a_session_in_small_pieces(size: int) -> None:
    trunk, worker = TrunkEnd(Hello(E)), WorkerEnd(WORKER)
    for piece in pieces(sent_by(trunk), size):
        list(worker.receive(piece))
    for piece in pieces(sent_by(worker), size):
        list(trunk.receive(piece))
    trunk.ask(1, Dtype.BF16, request(2, 1))
    asked = [each for piece in pieces(sent_by(trunk), size) for each in worker.receive(piece)]
    assert [type(each) for each in asked] == [Asked]
