from __future__ import annotations

import pytest
from checkpoint_models import peer_tensors, write_llama

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.shard import write_expert_shard
from kvasir_console.engine.checkpoint.window import expert_ranges, stage_tensors
from kvasir_console.errors import ModelError


def names(path, begin: int, end: int, **options) -> set[str]:
    with Checkpoint.open(path) as checkpoint:
        return {t.name for t in stage_tensors(checkpoint, ModelShape.of(checkpoint), begin, end, **options)}


def ends(found: set[str]) -> set[str]:
    return {name for name in found if not name.startswith("blk.")}


def test_the_table_of_a_tied_model_goes_to_both_ends(tmp_path) -> None:
    path = write_llama(tmp_path / "tied.gguf")
    assert ends(names(path, 0, 1)) == {"token_embd.weight"}
    assert ends(names(path, 1, 2)) == set()
    assert ends(names(path, 2, 3)) == {"token_embd.weight", "output_norm.weight"}


def test_the_table_of_an_untied_model_goes_to_the_first_stage_only(tmp_path) -> None:
    path = write_llama(tmp_path / "untied.gguf", tied=False)
    assert ends(names(path, 2, 3)) == {"output.weight", "output_norm.weight"}


def test_windows_that_cover_the_model_hold_every_tensor(tmp_path) -> None:
    path = write_llama(tmp_path / "untied.gguf", experts=2, tied=False)
    held = names(path, 0, 2), names(path, 2, 3)
    assert held[0] | held[1] == set(peer_tensors(path))
    assert not held[0] & held[1]


def test_a_window_without_experts_keeps_its_router(tmp_path) -> None:
    path = write_llama(tmp_path / "moe.gguf", experts=2)
    without = names(path, 0, 3, experts=False)
    assert names(path, 0, 3) - without == {
        f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(3) for part in ("gate", "up", "down")
    }


def test_expert_ranges_are_the_bytes_of_just_these_experts_in_a_model_and_in_a_shard(tmp_path) -> None:
    path = write_llama(tmp_path / "moe.gguf", experts=6)
    with Checkpoint.open(path) as model:
        write_expert_shard(model, tmp_path / "shard.gguf", model="m", layer=1, begin=2, end=5)
        wanted = [bytes(model.raw(*place)) for place in expert_ranges(model, 1, 3, 5)]
    stored = peer_tensors(path)
    for raw, part in zip(wanted, ("gate", "up", "down"), strict=True):
        tensor = stored[f"blk.1.ffn_{part}_exps.weight"][2]
        assert raw == tensor[len(tensor) * 3 // 6 : len(tensor) * 5 // 6]
    with Checkpoint.open(tmp_path / "shard.gguf") as shard:
        assert [bytes(shard.raw(*place)) for place in expert_ranges(shard, 1, 3, 5)] == wanted
        for layer, begin, end in ((1, 0, 3), (1, 4, 6), (2, 2, 5)):
            with pytest.raises(ModelError):
                expert_ranges(shard, layer, begin, end)


def test_a_dense_layer_has_no_expert_ranges(tmp_path) -> None:
    with (
        Checkpoint.open(write_llama(tmp_path / "dense.gguf")) as dense,
        pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_exps\.weight"),
    ):
        expert_ranges(dense, 0, 0, 1)
