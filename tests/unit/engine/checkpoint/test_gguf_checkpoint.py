from __future__ import annotations

import os

import pytest
from checkpoint_models import write_llama

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.errors import ModelError


def test_raw_gives_the_stored_bytes_of_a_range_without_a_copy(tmp_path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    stored = path.read_bytes()
    with Checkpoint.open(path) as checkpoint:
        tensor = checkpoint.tensors["blk.1.attn_q.weight"]
        view = checkpoint.raw(tensor, 20, 60)
        assert view.readonly
        assert view == stored[tensor.offset + 20 : tensor.offset + 60]
        assert checkpoint.file_bytes == len(stored)
        assert checkpoint.parts[0].header_bytes == stored[: checkpoint.parts[0].header.data_start]
        view.release()


@pytest.mark.parametrize(("begin", "end"), [(-1, 10), (10, 5), (0, 10**9)])
def test_raw_never_leaves_the_tensor(tmp_path, begin: int, end: int) -> None:
    with Checkpoint.open(write_llama(tmp_path / "tiny.gguf")) as checkpoint:
        tensor = checkpoint.tensors["blk.1.attn_q.weight"]
        with pytest.raises(ValueError, match=r"blk\.1\.attn_q\.weight"):
            checkpoint.raw(tensor, begin, end)


def test_bytes_that_are_still_held_outlive_the_checkpoint(tmp_path) -> None:
    checkpoint = Checkpoint.open(write_llama(tmp_path / "tiny.gguf"))
    tensor = checkpoint.tensors["output_norm.weight"]
    view = checkpoint.raw(tensor)
    before = bytes(view)
    checkpoint.close()
    assert bytes(view) == before


def test_what_is_not_an_ordinary_file_is_refused_without_waiting(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelError) as caught:
            Checkpoint.open(path)
        assert caught.value.code == "model_unreadable"
