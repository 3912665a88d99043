"""The damaged and unusual files of the conformance vectors, all of them, against the reader and the shape."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.shard import verify_shard
from kvasir_console.engine.checkpoint.window import stage_tensors
from kvasir_console.errors import ModelError

DATA = Path(__file__).parents[3] / "data" / "conformance" / "gguf_bad"
INDEX = json.loads((DATA / "index.json").read_text())
VALID = {tensor["name"]: tensor for tensor in INDEX["valid"]["tensors"]}
WINDOWS = list(combinations(range(INDEX["valid"]["block_count"] + 1), 2))


def identified(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["file"]) for case in cases]


def load(case: dict[str, Any], window: tuple[int, int] | None = None) -> dict[str, str]:
    """Open a file, check it for ``window`` and give the SHA-256 of the bytes of each tensor of that window."""
    with Checkpoint.open(DATA / case["file"]) as checkpoint:
        shape = ModelShape.of(checkpoint, window)
        tensors = stage_tensors(checkpoint, shape, *(window or (0, shape.n_layer)))
        return {tensor.name: hashlib.sha256(checkpoint.raw(tensor)).hexdigest() for tensor in tensors}


def refusal(case: dict[str, Any], window: tuple[int, int] | None = None) -> str:
    """The message with which a file is refused, within the vectors' bounds of time and memory."""
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            load(case, window)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < INDEX["deadline_s"]
    assert peak_bytes < INDEX["extra_memory_limit_bytes"]
    assert str(caught.value).isprintable()
    return str(caught.value).lower()


def right_contents(window: tuple[int, int], blocks: int = INDEX["valid"]["block_count"]) -> dict[str, str]:
    first, last = window[0] == 0, window[1] == blocks
    return {
        name: tensor["sha256"]
        for name, tensor in VALID.items()
        if (name.startswith("token_embd") and first)
        or (name.startswith("output") and last)
        or (name.startswith("blk.") and window[0] <= int(name.split(".")[1]) < window[1])
    }


@pytest.mark.parametrize("case", identified([case for case in INDEX["files"] if case["expect"] == "refused"]))
def test_a_damaged_file_is_refused_by_name(case: dict[str, Any]) -> None:
    message = refusal(case)
    assert any(name.lower() in message for name in case["names_any"]), message


@pytest.mark.parametrize("case", identified([case for case in INDEX["files"] if case["expect"] == "refused"]))
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window_of_a_damaged_file_loads_only_if_the_damage_lies_outside(
    case: dict[str, Any], window: tuple[int, int]
) -> None:
    if list(window) not in case["unaffected_windows"]:
        refusal(case, window)
        return
    try:
        loaded = load(case, window)
    except ModelError:
        return
    assert loaded == right_contents(window, blocks=5 if case["file"] == "block_count_5.gguf" else 3)


@pytest.mark.parametrize("case", identified([case for case in INDEX["files"] if case["expect"] == "loads"]))
def test_an_unusual_but_legal_file_loads_with_the_right_contents(case: dict[str, Any]) -> None:
    windows = [tuple(window) for window in case.get("loads_windows", WINDOWS)]
    for window in windows:
        assert load(case, window) == right_contents(window)
    if "loads_windows" in case:
        refusal(case)


@pytest.mark.parametrize("case", identified([case for case in INDEX["files"] if case["expect"] == "either"]))
def test_a_disputed_file_is_refused_cleanly_or_loaded_rightly(case: dict[str, Any]) -> None:
    try:
        loaded = load(case)
    except ModelError:
        refusal(case)
        return
    assert loaded == right_contents((0, INDEX["valid"]["block_count"]))


def test_the_valid_file_has_the_directory_that_the_vectors_give() -> None:
    with Checkpoint.open(DATA / INDEX["valid"]["file"]) as checkpoint:
        assert checkpoint.architecture == INDEX["valid"]["architecture"]
        assert checkpoint.parts[0].header.data_start == INDEX["valid"]["data_start"]
        found = [
            {
                "name": tensor.name,
                "dims": list(tensor.dims),
                "type": tensor.type.name,
                "file_offset": tensor.offset,
                "bytes": tensor.n_bytes,
                "sha256": hashlib.sha256(checkpoint.raw(tensor)).hexdigest(),
            }
            for tensor in checkpoint.tensors.values()
        ]
    assert found == INDEX["valid"]["tensors"]


@pytest.mark.parametrize("case", identified(INDEX["shards"]))
def test_a_shard_loads_only_as_what_was_asked_for(case: dict[str, Any]) -> None:
    begin, end = case["asked"]["experts"]
    asked = {"model": "conformance-small-f32", "layer": case["asked"]["layer"], "begin": begin, "end": end}
    with Checkpoint.open(DATA / case["file"]) as checkpoint:
        if case["expect"] == "loads":
            info = verify_shard(checkpoint, **asked)
            assert (info.layer, info.begin, info.end) == (case["asked"]["layer"], begin, end)
            assert (info.n_embd, info.n_ff) == (8, 12)
            return
        with pytest.raises(ModelError) as caught:
            verify_shard(checkpoint, **asked)
    message = str(caught.value).lower()
    assert any(name.lower() in message for name in case["names_any"]), message
