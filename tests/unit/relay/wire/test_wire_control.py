"""Control messages: layout, bounds, and what a bad one raises."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.errors import KvasirError, ModelError, NetworkError
from kvasir_console.relay.wire import control

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), VALUES, max_size=5)


def stream(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def read_all(data: bytes, **options: Any) -> list[control.Message]:
    async def run() -> list[control.Message]:
        reader, messages = stream(data), []
        while not reader.at_eof():
            messages.append(await control.read_message(reader, **options))
        return messages

    return asyncio.run(run())


def test_a_message_is_a_length_and_compact_utf8_json() -> None:
    body = '{"id":1,"verb":"größe"}'.encode()
    assert control.encode({"id": 1, "verb": "größe"}) == struct.pack("<I", len(body)) + body


@settings(deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_messages_survive_the_stream_in_order(messages: list[dict[str, Any]]) -> None:
    assert read_all(b"".join(control.encode(message) for message in messages)) == messages


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_messages_a_network_error_or_the_end(data: bytes) -> None:
    with contextlib.suppress(NetworkError, asyncio.IncompleteReadError):
        assert all(isinstance(message, dict) for message in read_all(data))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[]", "control_message_malformed"),
        (b"", "control_message_malformed"),
        (b"{", "control_message_malformed"),
        (b'{"a":"\xff"}', "control_message_malformed"),
        (b"[" * 200_000, "control_message_malformed"),
    ],
)
async def test_a_message_that_is_no_object_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(NetworkError) as caught:
        await control.read_message(stream(struct.pack("<I", len(body)) + body))
    assert caught.value.code == code


async def test_a_length_beyond_the_limit_is_refused_before_its_body_is_read() -> None:
    for size, options in ((2**32 - 1, {}), (control.MAX_MESSAGE_BYTES + 1, {}), (11, {"limit": 10})):
        with pytest.raises(NetworkError) as caught:
            await control.read_message(stream(struct.pack("<I", size)), **options)
        assert caught.value.code == "control_message_too_long"
    with pytest.raises(NetworkError):
        control.encode({"text": "x" * control.MAX_MESSAGE_BYTES})


@pytest.mark.parametrize("data", [b"", b"\1\0", struct.pack("<I", 2) + b"{"])
async def test_a_stream_that_ends_is_told_apart_from_a_bad_one(data: bytes) -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        await control.read_message(stream(data))


async def test_a_written_message_is_what_encode_gives() -> None:
    class Sink:
        def __init__(self) -> None:
            self.data = b""
            self.drained = 0

        def write(self, data: bytes, /) -> None:
            self.data += data

        async def drain(self) -> None:
            self.drained = len(self.data)

    sink = Sink()
    await control.write_message(sink, {"id": 3})
    assert sink.data == control.encode({"id": 3})
    assert sink.drained == len(sink.data)


def test_answers_carry_the_id_of_their_request() -> None:
    assert control.reply({"id": 7, "verb": "stats"}, tokens=3) == {"id": 7, "ok": True, "tokens": 3}
    error = ModelError("model_missing", "No model is there.", "Fetch it.")
    answer = control.failure({"id": 7}, error)
    assert answer["id"] == 7
    assert "ok" not in answer
    read = KvasirError.from_dict(answer["error"])
    assert type(read) is ModelError
    assert read.as_dict() == error.as_dict()
