"""The error tree: exit codes that scripts rely on, and errors that cross a process boundary."""

from __future__ import annotations

import json

import pytest

from kvasir_console import errors
from kvasir_console.errors import ExitCode, KvasirError

KINDS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KvasirError)]


def test_the_documented_exit_codes_never_change():
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FAILURE": 1,
        "USAGE": 2,
        "NETWORK": 3,
        "WALLET": 4,
        "MODEL": 5,
        "ENGINE": 6,
        "LEDGER": 7,
        "RESOURCE": 8,
        "INTERRUPTED": 130,
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_json_with_its_kind(kind):
    sent = kind("some_code", "Something happened to X.", "Do Y.")
    received = KvasirError.from_dict(json.loads(json.dumps(sent.as_dict())))
    assert type(received) is kind
    assert (received.code, received.message, received.hint) == ("some_code", "Something happened to X.", "Do Y.")
    assert str(received) == "Something happened to X. Do Y."


def test_every_kind_tells_a_process_and_a_server_how_it_failed():
    for kind in KINDS:
        assert kind.exit_code is not ExitCode.OK
        assert 400 <= kind.http_status < 600
    assert errors.RequestError.exit_code is ExitCode.ENGINE
    assert errors.RequestError.http_status == 400


@pytest.mark.parametrize("sent", [{}, {"kind": "SystemExit", "code": 5}, None, "no", ["kind"], {"kind": None}])
def test_what_is_no_error_becomes_a_plain_one(sent):
    received = KvasirError.from_dict(sent)
    assert type(received) is KvasirError
    assert received.message
    assert received.exit_code is ExitCode.FAILURE


def test_an_error_without_a_hint_reads_as_its_message():
    assert str(KvasirError("x", "That failed.")) == "That failed."
