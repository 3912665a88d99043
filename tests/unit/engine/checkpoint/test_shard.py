from __future__ import annotations

import hashlib
import os
from pathlib import Path

import gguf
import pytest
from checkpoint_models import peer_metadata, peer_tensors, write_llama

from kvasir_console.engine.checkpoint.digest import model_digest, source_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.shard import (
    read_expert_shard,
    verify_shard,
    verify_stage,
    write_expert_shard,
    write_stage,
)
from kvasir_console.errors import ModelError, SystemResourceError

ASKED = {"model": "tiny-moe", "layer": 1, "begin": 2, "end": 5}


@pytest.fixture
def moe(tmp_path) -> Path:
    return write_llama(tmp_path / "moe.gguf", experts=6)


def cut_shard(source: Path, destination: Path) -> Path:
    with Checkpoint.open(source) as checkpoint:
        write_expert_shard(checkpoint, destination, **ASKED)
    return destination


def cut_stage(source: Path, destination: Path, begin: int, end: int) -> Path:
    with Checkpoint.open(source) as checkpoint:
        write_stage(checkpoint, destination, model="tiny-moe", begin=begin, end=end)
    return destination


def test_an_expert_shard_is_laid_out_as_the_contract_says(moe, tmp_path) -> None:
    shard = cut_shard(moe, tmp_path / "shard.gguf")
    fields = gguf.GGUFReader(shard).fields
    assert list(fields)[3:16] == [
        "general.architecture",
        "general.alignment",
        "kvasir.expert_shard.model",
        "kvasir.expert_shard.layer",
        "kvasir.expert_shard.expert_begin",
        "kvasir.expert_shard.expert_end",
        "kvasir.expert_shard.n_expert_total",
        "kvasir.expert_shard.n_embd",
        "kvasir.expert_shard.n_ff",
        "kvasir.expert_shard.source_digest",
        "llama.embedding_length",
        "llama.block_count",
        "llama.expert_count",
    ]
    values = peer_metadata(shard)
    assert [values[f"kvasir.expert_shard.{key}"] for key in ("layer", "expert_begin", "expert_end")] == [1, 2, 5]
    assert [values[f"kvasir.expert_shard.{key}"] for key in ("n_expert_total", "n_embd", "n_ff")] == [6, 64, 96]
    assert [values[f"llama.{key}"] for key in ("embedding_length", "block_count", "expert_count")] == [64, 3, 6]
    stored, source = peer_tensors(shard), peer_tensors(moe)
    assert list(stored) == [f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
    for name, (dims, kind, raw) in stored.items():
        whole = source[name]
        assert (dims, kind) == ((*whole[0][:2], 3), whole[1])
        assert raw == whole[2][len(whole[2]) * 2 // 6 : len(whole[2]) * 5 // 6]
        assert values[f"kvasir.expert_shard.sha256.{name}"] == hashlib.sha256(raw).hexdigest()


def test_cutting_twice_gives_the_same_bytes(moe, tmp_path) -> None:
    first, second = cut_shard(moe, tmp_path / "a.gguf"), cut_shard(moe, tmp_path / "b.gguf")
    assert first.read_bytes() == second.read_bytes()
    stages = [cut_stage(moe, tmp_path / f"{name}.gguf", 1, 3) for name in ("c", "d")]
    assert stages[0].read_bytes() == stages[1].read_bytes()


def test_a_shard_is_verified_against_what_was_asked(moe, tmp_path) -> None:
    with Checkpoint.open(moe) as source:
        digest, identity = model_digest(source), source_digest(source)
    with Checkpoint.open(cut_shard(moe, tmp_path / "shard.gguf")) as shard:
        info = verify_shard(shard, **ASKED, n_embd=64, model_digest=digest, require_hashes=True)
        assert (info.model, info.n_expert_total, info.source_digest) == ("tiny-moe", 6, identity)
        assert model_digest(shard) == digest
        for wrong in (
            {"model": "other"},
            {"layer": 2},
            {"begin": 1},
            {"end": 4},
            {"n_embd": 32},
            {"model_digest": bytes(32)},
        ):
            with pytest.raises(ModelError):
                verify_shard(shard, **{**ASKED, **wrong})


def flip(path: Path, at: int) -> Path:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    return path


def test_one_flipped_bit_in_any_tensor_is_found_and_named(moe, tmp_path) -> None:
    shard = cut_shard(moe, tmp_path / "shard.gguf")
    with Checkpoint.open(shard) as checkpoint:
        places = {name: tensor.offset + tensor.n_bytes // 2 for name, tensor in checkpoint.tensors.items()}
    for name, at in places.items():
        flip(shard, at)
        with Checkpoint.open(shard) as checkpoint, pytest.raises(ModelError, match=name):
            verify_shard(checkpoint, **ASKED)
        flip(shard, at)
    stage = cut_stage(moe, tmp_path / "stage.gguf", 1, 2)
    with Checkpoint.open(stage) as checkpoint:
        at = checkpoint.tensors["blk.1.attn_norm.weight"].offset
    with Checkpoint.open(flip(stage, at)) as checkpoint, pytest.raises(ModelError, match=r"blk\.1\.attn_norm\.weight"):
        verify_stage(checkpoint, model="tiny-moe", begin=1, end=2)


def test_a_public_shard_without_hashes_passes_unless_hashes_are_required() -> None:
    public = Path(__file__).parents[3] / "data" / "conformance" / "dispatch" / "shard_q8.gguf"
    asked = {"model": "conformance-q8", "layer": 7, "begin": 1, "end": 5}
    with Checkpoint.open(public) as shard:
        assert verify_shard(shard, **asked).n_ff == 96
        with pytest.raises(ModelError, match="SHA-256"):
            verify_shard(shard, **asked, require_hashes=True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (1, 2), (2, 3), (0, 3)])
def test_a_stage_keeps_its_sources_metadata_shape_and_bytes(tmp_path, tied: bool, begin: int, end: int) -> None:
    source = write_llama(tmp_path / "moe.gguf", experts=2, tied=tied)
    stage = cut_stage(source, tmp_path / "stage.gguf", begin, end)
    kept = {key: value for key, value in peer_metadata(stage).items() if not key.startswith("kvasir.")}
    assert kept == {**peer_metadata(source), "general.alignment": 32}
    whole = peer_tensors(source)
    assert all(tensor == whole[name] for name, tensor in peer_tensors(stage).items())
    with Checkpoint.open(stage) as checkpoint, Checkpoint.open(source) as model:
        shape = verify_stage(checkpoint, model="tiny-moe", begin=begin, end=end, model_digest=model_digest(model))
        assert (shape.n_layer, shape.tied_output, shape.moe_layers) == (3, tied, tuple(range(begin, end)))
        assert (shape.n_vocab, shape.n_ff_expert) == (40, 96)
        assert model_digest(checkpoint) == model_digest(model)
        assert source_digest(checkpoint) == source_digest(model)


def test_a_stage_says_what_it_holds_and_is_held_to_it(moe, tmp_path) -> None:
    with Checkpoint.open(cut_stage(moe, tmp_path / "stage.gguf", 1, 3)) as stage:
        assert ModelShape.of(stage, (2, 3)).n_layer == 3
        with pytest.raises(ModelError, match="the stage"):
            ModelShape.of(stage, (0, 2))
        for wrong in ({"begin": 0}, {"end": 2}, {"model": "other"}, {"model_digest": bytes(32)}):
            with pytest.raises(ModelError):
                verify_stage(stage, **{"model": "tiny-moe", "begin": 1, "end": 3, **wrong})
    with Checkpoint.open(moe) as whole, pytest.raises(ModelError, match="no stage"):
        verify_stage(whole, model="tiny-moe", begin=0, end=3)


def test_shards_and_stages_cut_from_a_stage_are_those_cut_from_the_model(moe, tmp_path) -> None:
    wide = cut_stage(moe, tmp_path / "wide.gguf", 0, 2)
    assert cut_shard(wide, tmp_path / "a.gguf").read_bytes() == cut_shard(moe, tmp_path / "b.gguf").read_bytes()
    narrow = cut_stage(wide, tmp_path / "c.gguf", 1, 2)
    assert narrow.read_bytes() == cut_stage(moe, tmp_path / "d.gguf", 1, 2).read_bytes()
    with Checkpoint.open(wide) as stage, pytest.raises(ModelError, match="the stage"):
        write_expert_shard(stage, tmp_path / "e.gguf", model="tiny-moe", layer=2, begin=0, end=1)


@pytest.mark.parametrize(("layer", "begin", "end"), [(1, 0, 7), (1, 3, 3), (3, 0, 1), (-1, 0, 1), (1, -1, 2)])
def test_experts_that_are_not_there_are_refused_never_clamped(moe, tmp_path, layer, begin, end) -> None:
    with Checkpoint.open(moe) as source, pytest.raises(ModelError):
        write_expert_shard(source, tmp_path / "shard.gguf", model="m", layer=layer, begin=begin, end=end)
    assert os.listdir(tmp_path) == ["moe.gguf"]


def test_a_disk_that_refuses_leaves_nothing_behind(moe, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with Checkpoint.open(moe) as source, pytest.raises(SystemResourceError, match="cannot be written"):
        write_stage(source, tmp_path / "file" / "stage.gguf", model="m", begin=0, end=1)
    (tmp_path / "target.gguf").mkdir()
    with Checkpoint.open(moe) as source, pytest.raises(SystemResourceError, match="cannot be written"):
        write_stage(source, tmp_path / "target.gguf", model="m", begin=0, end=1)
    assert sorted(os.listdir(tmp_path)) == ["file", "moe.gguf", "target.gguf"]


def test_a_whole_model_is_no_expert_shard(moe) -> None:
    with Checkpoint.open(moe) as source, pytest.raises(ModelError, match="expert_begin"):
        read_expert_shard(source)
