"""Reading a coverage report: what counts as a window, and whose a session name may be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import UsageError
from kvasir_console.node.gateway.coverage import (
    MAX_SEGMENTS,
    Report,
    Window,
    parse_report,
    session_name,
    short_model_name,
)
from kvasir_console.relay.wire.preamble import Wire


def report(**fields: Any) -> Report:
    return parse_report({"worker_id": "w", "model": "moe", **fields})


def test_only_arrays_of_three_whole_numbers_are_segments() -> None:
    segments: list[Any] = [
        [1, 0, 4],
        {"layer": 1, "begin": 0, "end": 8},
        [1, 0],
        [1, 0, 4, 5],
        ["1", "0", "4"],
        [True, 0, 4],
        [1, 4, 4],
        [1, -1, 4],
        [1, 0, 2**31],
        [1, 0, 1e300],
        [1, 0, 4.5],
        [2.0, 0, 8.0],
        None,
        [1, 0, 4],
    ]
    assert report(segments=segments).windows == (Window("moe", 1, 0, 4), Window("moe", 2, 0, 8))


def test_segments_are_bounded() -> None:
    many = [[layer, 0, 1] for layer in range(MAX_SEGMENTS + 10)]
    assert len(report(segments=many).windows) == MAX_SEGMENTS


@pytest.mark.parametrize("segments", ["x", {"a": 1}, None, 7])
def test_segments_that_are_no_array_are_none(segments: Any) -> None:
    assert parse_report({"worker_id": "w", "model": "m", "segments": segments}).windows == ()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"worker_id": "w"},
        {"model": "m"},
        {"worker_id": "", "model": "m"},
        {"worker_id": 7, "model": "m"},
        {"worker_id": "a\nb", "model": "m"},
        {"worker_id": "w" * 201, "model": "m"},
        {"worker_id": "w", "model": ["m"]},
    ],
)
def test_worker_id_and_model_are_needed(body: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_report(body)
    assert caught.value.code == "missing_field"


@pytest.mark.parametrize(
    ("wires", "expected"),
    [
        (None, Wire.V2),
        ([], Wire.V2),
        (["v9", 3], Wire.V2),
        (["v1", "v2", "v2f16"], Wire.V1 | Wire.V2 | Wire.V2F16),
        (["v4", "v3", "v2"], Wire.V2 | Wire.V3),
        (["v2f16"], Wire.V2F16),
        ("v1", Wire.V2),
    ],
)
def test_wires_are_what_the_node_says_or_v2(wires: Any, expected: Wire) -> None:
    assert report(wires=wires).wires == expected


def test_platform_words_outside_the_contract_are_unknown() -> None:
    known = report(os="macos", accelerator="npu", device_kind="laptop", backend="metal").platform
    assert known == {"os": "macos", "accelerator": "npu", "device_kind": "laptop", "backend": "metal"}
    other = report(os="beos", accelerator="tpu", device_kind="x" * 99, backend=5).platform
    assert other == {"os": "unknown", "accelerator": "cpu", "device_kind": "x" * 64, "backend": ""}


@pytest.mark.parametrize(("model", "short"), [("a/b/c.gguf", "c.gguf"), ("c", "c"), ("a\\b", "b"), ("a/b/", "b")])
def test_a_model_is_its_last_path_component(model: str, short: str) -> None:
    assert short_model_name(model) == short


# -- session names (gateway contract 5.1) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker_id", "url", "expected"),
    [
        ("server-abc-box", None, "expert-server-abc-box"),
        ("a b/c", None, "expert-a-b-c"),
        ("w", "relay:my.session_1-x", "my.session_1-x"),
        ("w", "tcp://host:1", "expert-w"),
        ("w", 5, "expert-w"),
        ("w" * 121, None, "expert-" + "w" * 121),
    ],
)
def test_session_names(worker_id: str, url: Any, expected: str) -> None:
    assert session_name(worker_id, url) == expected


def test_an_over_long_worker_id_gets_a_hash_and_stays_apart() -> None:
    one, other = (session_name("w" * 150 + end) for end in "ab")
    assert len(one) == len(other) == 128
    assert one != other


@pytest.mark.parametrize(
    "name", ["", "-x", ".x", "a b", "a/b", "x" * 129, "ring-1", "BRIDGE-1", "Operator-x", "service-1", "kvasir-1", "ä"]
)
def test_names_that_are_malformed_or_the_operators_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        session_name("w", f"relay:{name}")
    assert caught.value.code == "bad_relay_session"


def test_the_operators_machines_may_use_reserved_names() -> None:
    assert session_name("w", "relay:ring-1", service=True) == "ring-1"


@given(st.text(min_size=1, max_size=300))
def test_every_default_name_is_a_legal_one(worker_id: str) -> None:
    name = session_name(worker_id)
    assert session_name("w", f"relay:{name}") == name
