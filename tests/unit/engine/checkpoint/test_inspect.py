from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from checkpoint_models import peer_tensors, write_llama

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.inspect import inspect
from kvasir_console.engine.checkpoint.shard import write_expert_shard, write_stage
from kvasir_console.errors import ModelError

DATA = Path(__file__).parents[3] / "data" / "conformance"


def test_a_model_is_described_by_what_gguf_py_finds_in_it(tmp_path) -> None:
    path = write_llama(tmp_path / "moe.gguf", experts=4)
    stored = peer_tensors(path)
    found = inspect(path)
    assert (found.architecture, found.name, found.holds) == ("llama", "tiny", "model")
    assert (found.layers, found.experts, found.experts_used) == (3, 4, 2)
    assert (found.embedding_length, found.context_length, found.vocabulary) == (64, 128, 40)
    assert found.parameters == sum(math.prod(dims) for dims, _, _ in stored.values())
    assert found.tensor_bytes == sum(len(raw) for _, _, raw in stored.values())
    assert found.file_bytes == path.stat().st_size
    assert found.quant_types == {"F32": 10, "Q4_1": 12, "Q8_0": 7, "Q4_0": 3}
    one_layer = [raw for name, (_, _, raw) in stored.items() if name.startswith("blk.1.")]
    experts = [raw for name, (_, _, raw) in stored.items() if name.startswith("blk.1.") and "_exps" in name]
    assert (found.layer_bytes[1].layer, found.layer_bytes[1].total_bytes) == (1, sum(map(len, one_layer)))
    assert found.layer_bytes[1].expert_bytes == sum(map(len, experts))
    assert found.bytes_per_expert == sum(map(len, experts)) // 4
    assert found.refusal == ""
    assert json.loads(json.dumps(found.to_json()))["layer_bytes"][2]["layer"] == 2


def test_parts_say_what_they_are_parts_of(tmp_path) -> None:
    path = write_llama(tmp_path / "moe.gguf", experts=4)
    with Checkpoint.open(path) as model:
        write_stage(model, tmp_path / "stage.gguf", model="m", begin=1, end=3)
        write_expert_shard(model, tmp_path / "shard.gguf", model="m", layer=2, begin=1, end=4)
    whole, stage, shard = (inspect(tmp_path / f"{name}.gguf") for name in ("moe", "stage", "shard"))
    assert (stage.holds, shard.holds) == ("layers [1, 3)", "layer 2 experts [1, 4)")
    assert whole.model_digest == stage.model_digest == shard.model_digest
    assert whole.source_digest == stage.source_digest
    assert whole.bytes_per_expert == shard.bytes_per_expert
    assert (stage.refusal, shard.refusal) == ("", "")


def test_a_public_shard_is_described_without_a_model_digest() -> None:
    found = inspect(DATA / "dispatch" / "shard_q8.gguf")
    assert (found.holds, found.experts, found.model_digest) == ("layer 7 experts [1, 5)", 8, "")


def test_a_model_that_cannot_be_used_is_described_with_the_reason() -> None:
    found = inspect(DATA / "gguf_bad" / "head_count_3.gguf")
    assert found.architecture == "qwen3moe"
    assert "attn_q" in found.refusal


def test_what_is_no_gguf_is_refused() -> None:
    with pytest.raises(ModelError):
        inspect(DATA / "gguf_bad" / "magic_wrong.gguf")
