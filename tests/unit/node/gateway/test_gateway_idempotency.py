"""Names of requests: random, or the caller's."""

from __future__ import annotations

import re

import pytest

from kvasir_console.errors import UsageError
from kvasir_console.node.gateway.idempotency import name_request

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "seed": 3}


def test_the_same_key_and_body_are_the_same_request() -> None:
    again = dict(reversed(BODY.items()))
    name = name_request({"idempotency-key": "abc"}, BODY)
    assert name_request({"idempotency-key": "abc"}, again) == name
    assert re.fullmatch("chatcmpl-[0-9a-f]{24}", name.id)
    assert 0 < name.key < 2**63


@pytest.mark.parametrize(
    ("headers", "body"),
    [({"idempotency-key": "abd"}, BODY), ({"idempotency-key": "abc"}, BODY | {"seed": 4}), ({}, BODY)],
)
def test_anything_else_is_another_request(headers: dict[str, str], body: dict[str, object]) -> None:
    name, other = name_request({"idempotency-key": "abc"}, BODY), name_request(headers, body)
    assert name.id != other.id
    assert name.key != other.key


def test_without_a_key_every_request_is_one_of_its_own() -> None:
    assert len({name_request({}, BODY) for _ in range(50)}) == 50


def test_a_key_that_is_too_long_is_refused() -> None:
    with pytest.raises(UsageError):
        name_request({"idempotency-key": "x" * 256}, BODY)
