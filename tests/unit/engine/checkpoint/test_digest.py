from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from checkpoint_models import peer_tensors, write_llama

from kvasir_console.engine.checkpoint.digest import model_digest, shard_digest, slice_digest, source_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import write_expert_shard
from kvasir_console.errors import ModelError

import builders

DATA = Path(__file__).parents[3] / "data" / "conformance" / "gguf_bad"


def digest_of(file: str) -> bytes:
    with Checkpoint.open(DATA / file) as checkpoint:
        return model_digest(checkpoint)


@pytest.mark.parametrize(
    "file",
    [
        "alignment_64.gguf",
        "alignment_8.gguf",
        "alignment_absent.gguf",
        "tensors_in_another_order.gguf",
        "table_order_differs_from_data_order.gguf",
        "no_padding_after_last_tensor.gguf",
        "trailing_garbage.gguf",
    ],
)
def test_the_model_digest_does_not_depend_on_where_the_tensors_lie(file: str) -> None:
    assert digest_of(file) == digest_of("valid.gguf")


@pytest.mark.parametrize(
    "file", ["all_metadata_types.gguf", "block_count_5.gguf", "tensor_missing.gguf", "tensor_with_other_shape.gguf"]
)
def test_the_model_digest_depends_on_metadata_and_directory(file: str) -> None:
    assert digest_of(file) != digest_of("valid.gguf")


def test_the_shard_digest_is_that_of_the_tensors_digests(tmp_path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    expected = hashlib.sha256()
    for name, (_, _, raw) in sorted(peer_tensors(path).items()):
        expected.update(name.encode() + b"\0" + hashlib.sha256(raw).digest())
    with Checkpoint.open(path) as checkpoint:
        assert shard_digest(checkpoint) == expected.digest()


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (1, 3), (3, 4)])
def test_the_digest_of_a_slice_is_that_of_the_shard_cut_from_it(tmp_path, begin: int, end: int) -> None:
    path = builders.write_tiny_llama(tmp_path / "moe.gguf", n_layer=2, n_expert=4, n_expert_used=2, seed=1)
    shard = tmp_path / "shard.gguf"
    with Checkpoint.open(path) as whole:
        write_expert_shard(whole, shard, model="moe", layer=1, begin=begin, end=end)
        cut = slice_digest(whole, 1, begin, end)
        assert cut != slice_digest(whole, 0, begin, end)
    with Checkpoint.open(shard) as part:
        assert cut == shard_digest(part) == slice_digest(part, 1, begin, end)
        with pytest.raises(ModelError):
            slice_digest(part, 0, begin, end)


@pytest.mark.parametrize("padding", [0, 3 * 2**20])
def test_the_source_digest_covers_size_header_and_both_ends(tmp_path, padding: int) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    stored = path.read_bytes() + bytes(padding)
    path.write_bytes(stored)
    with Checkpoint.open(path) as checkpoint:
        start = checkpoint.parts[0].header.data_start
        header, data = stored[:start], stored[start:]
        expected = hashlib.sha256(str(len(stored)).encode() + header + data[: 2**20] + stored[-(2**20) :])
        assert source_digest(checkpoint) == expected.hexdigest()


def test_a_shard_that_names_no_model_has_no_model_digest() -> None:
    with Checkpoint.open(DATA / "shard_valid.gguf") as shard, pytest.raises(ModelError, match=r"kvasir\.model_digest"):
        model_digest(shard)
