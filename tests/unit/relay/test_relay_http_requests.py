from __future__ import annotations

from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.relay.http_requests import HeadError, RequestHead, RequestStream


def test_a_head_is_read_into_its_parts():
    head = RequestHead.parse(
        b"GET /api/expert-relay?session=a%20b&token=t HTTP/1.1\r\nHost: x\r\nX-A:  1 \r\n"
        b"Connection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\n\r\n"
    )
    assert (head.method, head.path, head.version) == (b"GET", "/api/expert-relay", b"HTTP/1.1")
    assert head.fields[1] == (b"x-a", b"1")
    assert head.upgrade
    assert head.websocket


def test_an_upgrade_field_alone_asks_for_nothing():
    assert not RequestHead.parse(b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n").upgrade  # RFC 9110 section 7.8


def test_what_the_client_says_about_its_address_is_replaced():
    stream = RequestStream("192.0.2.7", "https")
    out = stream.feed(
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 1.1.1.1\r\nx_forwarded_for: 1.1.1.1\r\nX-Real-IP: 1.1.1.1\r\n"
        b"Forwarded: for=1.1.1.1\r\nX-Forwarded-Proto: http\r\nAccept: */*\r\n\r\n"
    )
    assert b"1.1.1.1" not in out
    assert out == (
        b"GET / HTTP/1.1\r\nhost: x\r\naccept: */*\r\nx-forwarded-for: 192.0.2.7\r\nx-forwarded-proto: https\r\n\r\n"
    )


def test_later_requests_of_a_connection_cannot_lie_either():
    stream = RequestStream("192.0.2.7", "http")
    stream.feed(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
    assert stream.idle
    out = stream.feed(b"GET /b HTTP/1.1\r\nX-Forwarded-For: 1.1.1.1\r\n\r\n")
    assert out == b"GET /b HTTP/1.1\r\nx-forwarded-for: 192.0.2.7\r\nx-forwarded-proto: http\r\n\r\n"


@pytest.mark.parametrize("trailer", [b"T: x\n", b"\n", b"T: \n", b"no colon", b"T : x", b"T: \x00", b" T: x"])
def test_a_trailer_hides_no_request(trailer):
    """h11 and others end a trailer at a bare LF: what follows would be a request that the front never saw."""
    smuggled = b"GET /hidden HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 1.1.1.1\r\n\r\n"
    stream = RequestStream("192.0.2.7", "https")
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    with pytest.raises(HeadError) as caught:
        stream.feed(head + trailer + b"\r\n" + smuggled)
    assert caught.value.status == 400
    passed = RequestStream("192.0.2.7", "https").feed(head + b"T: x\r\nU:\r\n\r\n")
    assert passed.endswith(b"0\r\nT: x\r\nU:\r\n\r\n")


def test_a_body_that_looks_like_a_request_stays_a_body():
    body = b"GET / HTTP/1.1\r\nX-Forwarded-For: 1.1.1.1\r\n\r\n"
    stream = RequestStream("192.0.2.7", "http")
    assert stream.feed(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body).endswith(body)
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (
        len(body),
        body,
    )
    assert stream.feed(chunked).partition(b"\r\n\r\n")[2] == chunked.partition(b"\r\n\r\n")[2]
    assert stream.idle


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", 400),
        (b"G\xc3T / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\nX: c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\rX: c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 0x5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length:\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding:\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcde\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 300, 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20000, 431),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 70000, 431),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 70000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", 404),
    ],
)
def test_what_two_readers_could_take_differently_is_refused(raw, status):
    with pytest.raises(HeadError) as refusal:
        RequestStream("192.0.2.7", "http").feed(raw)
    assert refusal.value.status == status


_TOKENS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12)
_BODIES = st.one_of(
    st.none(),
    st.binary(max_size=300),
    st.lists(st.binary(min_size=1, max_size=80), max_size=5),
)


@given(
    requests=st.lists(st.tuples(_TOKENS, _TOKENS, _BODIES), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 4000), max_size=12),
)
def test_another_reader_finds_the_same_requests_however_the_bytes_are_cut(requests, cuts):
    raw = b"".join(_request(path, name, body) for path, name, body in requests)
    stream = RequestStream("192.0.2.7", "http")
    edges = [0, *sorted({min(cut, len(raw)) for cut in cuts}), len(raw)]
    out = b"".join(stream.feed(raw[start:end]) for start, end in pairwise(edges))
    assert stream.idle
    assert _read_by_h11(out) == [
        (f"/{path}".encode(), b"192.0.2.7", body if isinstance(body, bytes) else b"".join(body or []))
        for path, _, body in requests
    ]


@given(st.binary(max_size=400))
def test_no_bytes_break_it(data):
    stream = RequestStream("192.0.2.7", "http")
    stream.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    try:
        out = stream.feed(data)
    except HeadError:
        return
    assert len(out) <= len(data) + 80 * data.count(b"HTTP/1")  # the two fields that say where a request came from


def _request(path, name, body):
    head = f"POST /{path} HTTP/1.1\r\nHost: h\r\nx-{name}: v\r\nX-Forwarded-For: 6.6.6.6\r\n".encode()
    if body is None:
        return head + b"\r\n"
    if isinstance(body, bytes):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunks = b"".join(b"%x;e=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in body)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def _read_by_h11(data):
    connection, found = h11.Connection(h11.SERVER), []
    connection.receive_data(data)
    while isinstance(event := connection.next_event(), h11.Request):
        addresses = [value for name, value in event.headers if name == b"x-forwarded-for"]
        target, body = event.target, b""
        while isinstance(piece := connection.next_event(), h11.Data):
            body += bytes(piece.data)
        assert isinstance(piece, h11.EndOfMessage)
        [address] = addresses
        found.append((target, address, body))
        connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()
    return found
