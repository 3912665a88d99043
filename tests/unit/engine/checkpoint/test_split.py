"""Models in several files, cut by a splitter of the tests' own, by gguf-py, and read by llama.cpp as well."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf_draft import I32, TEXT, U16, U32, Draft, Tensor, parsed, split, write_parts

from kvasir_console.bench import peer_llamacpp
from kvasir_console.engine.checkpoint.digest import model_digest, shard_digest, source_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.inspect import inspect
from kvasir_console.engine.checkpoint.shard import verify_stage, write_expert_shard, write_stage
from kvasir_console.engine.kvcache import Span
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import ModelError
from kvasir_console.node.models_command import describe

import builders

CUTS = {"three": [7, 8, 8], "metadata first": [0, 18, 5], "one each": [1] * 23}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return builders.write_tiny_llama(
        tmp_path / "whole.gguf", n_expert=4, n_expert_used=2, weight_type=(Quant.Q8_0, Quant.F16)
    )


@pytest.fixture
def parts(whole: Path) -> list[Draft]:
    return split(parsed(whole.read_bytes()), CUTS["three"])


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(path)
    return caught.value


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_any_part_opens_the_whole_model(whole: Path, tmp_path: Path, cut: list[int]) -> None:
    paths = write_parts(split(parsed(whole.read_bytes()), cut), tmp_path)
    with Checkpoint.open(whole) as expected:
        for path in {paths[0], paths[len(paths) // 2], paths[-1]}:
            with Checkpoint.open(path) as checkpoint:
                assert checkpoint.metadata == expected.metadata
                assert list(checkpoint.tensors) == list(expected.tensors)
                for name, tensor in expected.tensors.items():
                    assert checkpoint.raw(checkpoint.tensors[name]) == expected.raw(tensor)
                assert checkpoint.file_bytes == sum(each.stat().st_size for each in paths)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_a_split_model_has_the_digests_of_the_same_model_in_one_file(
    whole: Path, tmp_path: Path, cut: list[int]
) -> None:
    paths = write_parts(split(parsed(whole.read_bytes()), cut), tmp_path)
    with Checkpoint.open(whole) as one, Checkpoint.open(paths[1]) as several:
        assert model_digest(one) == model_digest(several)
        assert shard_digest(one) == shard_digest(several)
        assert source_digest(one) != source_digest(several)  # that is of files


def test_a_file_joined_by_llamacpp_is_a_whole_one_with_the_same_digest(whole: Path, tmp_path: Path) -> None:
    joined = parsed(whole.read_bytes())
    for key, kind, value in (("split.no", U16, 0), ("split.count", U16, 0), ("split.tensors.count", I32, 23)):
        joined.put(key, kind, value)
    (tmp_path / "joined.gguf").write_bytes(joined.bytes())
    with Checkpoint.open(whole) as one, Checkpoint.open(tmp_path / "joined.gguf") as other:
        assert model_digest(one) == model_digest(other)
        assert "split.count" not in other.metadata


def test_parts_written_by_gguf_py_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {f"blk.{i}.attn_q.weight": rng.standard_normal((4, 32), dtype=np.float32) for i in range(5)}
    writer = gguf.GGUFWriter(tmp_path / "peer.gguf", "llama", split_max_tensors=2, small_first_shard=True)
    for name, each in values.items():
        writer.add_tensor(name, each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(tmp_path.glob("peer-*.gguf"))
    assert len(files) == 4  # metadata alone, then 2 + 2 + 1
    for path in files:
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.architecture == "llama"
            stored = {n: np.frombuffer(bytes(checkpoint.raw(t)), "<f4") for n, t in checkpoint.tensors.items()}
        assert stored.keys() == values.keys()
        assert all(np.array_equal(stored[name], each.ravel()) for name, each in values.items())


@pytest.mark.parametrize("cut", ["three", "metadata first"])
def test_llamacpp_opens_the_parts_and_computes_what_we_compute(whole: Path, tmp_path: Path, cut: str) -> None:
    pytest.importorskip("xllamacpp")
    paths = write_parts(split(parsed(whole.read_bytes()), CUTS[cut]), tmp_path)
    tokens = [40, 7, 260, 99, 12]
    # In a process of its own: what llama.cpp leaves behind is none of the tests' business.
    request = {"op": "logits", "tokens": tokens, "path": str(tmp_path / "theirs.npy")}
    command = [sys.executable, peer_llamacpp.__file__, "xllamacpp", str(paths[0]), "1", "256"]
    subprocess.run(command, input=json.dumps(request) + "\n", text=True, check=True, capture_output=True, timeout=120)
    theirs = np.load(tmp_path / "theirs.npy")
    ours = _logits(paths[1], tokens).log_softmax(-1)
    assert theirs.shape == (288,)
    assert np.abs(ours.numpy() - theirs).max() < 0.1  # it rounds activations to 8 bits
    assert torch.equal(_logits(paths[1], tokens), _logits(whole, tokens))


def _logits(path: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode(), Checkpoint.open(path) as checkpoint:
        stage = Stage.load(checkpoint, 0, 2)
        hidden = stage.forward(stage.embed(torch.tensor(tokens)), [Span(stage.new_cache(16), 0, len(tokens))])
        return stage.logits(hidden[-1:])[0]


def test_windows_and_shards_cut_from_parts_are_those_of_the_whole(
    whole: Path, parts: list[Draft], tmp_path: Path
) -> None:
    paths = write_parts(parts, tmp_path)
    for name, path in (("whole", whole), ("split", paths[2])):
        with Checkpoint.open(path) as source:
            write_stage(source, tmp_path / f"{name}.stage", model="tiny", begin=1, end=2)
            write_expert_shard(source, tmp_path / f"{name}.shard", model="tiny", layer=0, begin=1, end=3)
            wanted = model_digest(source)
    for kind in ("stage", "shard"):
        with Checkpoint.open(tmp_path / f"whole.{kind}") as one, Checkpoint.open(tmp_path / f"split.{kind}") as other:
            assert shard_digest(one) == shard_digest(other)
            assert model_digest(other) == wanted
    with Checkpoint.open(tmp_path / "split.stage") as stage:
        verify_stage(stage, model="tiny", begin=1, end=2, model_digest=wanted)
        assert not [key for key in stage.metadata if key.startswith("split.")]


def test_a_summary_counts_all_parts(whole: Path, parts: list[Draft], tmp_path: Path) -> None:
    one, several = inspect(whole), inspect(write_parts(parts, tmp_path)[1])
    assert several.parameters == one.parameters
    assert several.layer_bytes == one.layer_bytes
    assert several.model_digest == one.model_digest
    assert not several.refusal
    assert (one.files, several.files) == (1, 3)
    assert f"({several.file_bytes / 1e6:.1f} MB in 3 files)" in describe(several)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_missing_part_is_named(parts: list[Draft], tmp_path: Path, absent: int) -> None:
    paths = write_parts(parts, tmp_path)
    paths[absent].unlink()
    error = refused(paths[(absent + 1) % 3])
    assert error.code == "gguf_part_missing"
    assert paths[absent].name in error.message
    assert "same folder" in error.hint


def test_of_many_missing_parts_one_is_named_and_the_rest_counted(parts: list[Draft], tmp_path: Path) -> None:
    paths = write_parts(parts, tmp_path)
    paths[0].unlink()
    paths[2].unlink()
    assert f"{paths[0].name} and 1 more" in refused(paths[1]).message


def test_a_part_under_another_name_is_refused(parts: list[Draft], tmp_path: Path) -> None:
    paths = write_parts(parts, tmp_path)
    for name in ("model.gguf", "tiny-00002-of-00003.gguf", "tiny-00001-of-00004.gguf", "-00001-of-00003.gguf"):
        shutil.copy(paths[0], tmp_path / "other.part")
        (tmp_path / "alone").mkdir(exist_ok=True)
        moved = tmp_path / "alone" / name
        shutil.move(tmp_path / "other.part", moved)
        error = refused(moved)
        assert error.code == "gguf_parts_disagree"
        assert "-00001-of-00003.gguf" in error.message


SPOILED: dict[str, tuple[Callable[[list[Draft]], None], str]] = {
    "another number": (lambda parts: parts[1].put("split.no", U16, 2), "it says that it is part 3 of 3, not part 2"),
    "another count": (lambda parts: parts[1].put("split.count", U16, 4), "it says that it is part 2 of 4"),
    "no part at all": (lambda parts: parts[1].put("split.count", U16, 0), "it says that it is no part"),
    "a count of thousands": (lambda parts: parts[0].put("split.count", U16, 60_000), "more than 1024"),
    "a number beyond": (lambda parts: parts[0].put("split.no", U16, 3), "split.no is 3, but split.count is 3"),
    "a count that is text": (lambda parts: parts[0].put("split.count", TEXT, "3"), "split.count is '3', not a number"),
    "a negative number": (lambda parts: parts[0].put("split.no", I32, -1), "split.no is -1, not a number"),
    "another tensor count": (lambda parts: parts[2].put("split.tensors.count", I32, 22), "split.tensors.count is 22"),
    "a tensor too few": (lambda parts: parts[2].tensors.pop() and None, "is 23, but the 3 parts hold 22 tensors"),
    "another architecture": (
        lambda parts: parts[1].put("general.architecture", TEXT, "gemma3"), "general.architecture is not that"
    ),
    "a tensor twice": (
        lambda parts: parts[2].tensors.append(copy.copy(parts[0].tensors[1])), "is also in part 1"
    ),
    "an own alignment": (lambda parts: parts[1].put("general.alignment", U32, 3), "not a power of two"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_parts_that_do_not_fit_each_other_are_refused(parts: list[Draft], tmp_path: Path, name: str) -> None:
    spoil, message = SPOILED[name]
    spoil(parts)
    error = refused(write_parts(parts, tmp_path)[0])
    assert message in error.message
    assert error.code in ("gguf_parts_disagree", "gguf_malformed")


def test_parts_may_have_alignments_of_their_own(whole: Path, parts: list[Draft], tmp_path: Path) -> None:
    parts[1].put("general.alignment", U32, 64)
    parts[1].alignment = 64
    paths = write_parts(parts, tmp_path)
    with Checkpoint.open(whole) as one, Checkpoint.open(paths[0]) as several:
        assert model_digest(one) == model_digest(several)
        assert shard_digest(one) == shard_digest(several)


def test_a_cut_off_part_is_refused_by_its_own_name(parts: list[Draft], tmp_path: Path) -> None:
    paths = write_parts(parts, tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-40])
    error = refused(paths[0])
    assert error.code == "gguf_malformed"
    assert paths[2].name in error.message


def test_a_model_of_one_part_is_an_ordinary_file(whole: Path, tmp_path: Path) -> None:
    (path,) = write_parts(split(parsed(whole.read_bytes()), [23]), tmp_path)
    moved = path.rename(tmp_path / "any name.gguf")
    with Checkpoint.open(moved) as one, Checkpoint.open(whole) as other:
        assert model_digest(one) == model_digest(other)


def test_bytes_of_every_part_can_be_held_after_closing(parts: list[Draft], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_parts(parts, tmp_path)[0])
    views = [checkpoint.raw(tensor) for tensor in checkpoint.tensors.values()]
    before = [bytes(view) for view in views]
    checkpoint.close()
    assert [bytes(view) for view in views] == before


def test_no_part_can_lead_out_of_its_folder(parts: list[Draft], tmp_path: Path) -> None:
    """Names come from the name that was given, never from what a file says."""
    parts[0].tensors.append(Tensor(b"../x", [32], 0, bytes(128)))
    for part in parts:
        part.put("split.tensors.count", I32, 24)
    paths = write_parts(parts, tmp_path)
    with Checkpoint.open(paths[0]) as checkpoint:
        assert {part.path.parent for part in checkpoint.parts} == {tmp_path}
