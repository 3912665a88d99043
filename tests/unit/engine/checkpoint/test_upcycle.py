from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
from checkpoint_models import peer_metadata, peer_tensors, write_llama
from gguf.quants import dequantize

from kvasir_console.engine.checkpoint.digest import model_digest, source_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.inspect import inspect
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.upcycle import upcycle
from kvasir_console.errors import ModelError
from kvasir_console.node.catalogue import CATALOGUE

BLIND = (3, 40)


def make(source, destination, **options):
    with Checkpoint.open(source) as checkpoint:
        upcycle(checkpoint, destination, **{"name": "tiny 8x", "noise": 0.1, "router_blind": BLIND, **options})
    return destination


def values(path) -> dict[str, np.ndarray]:
    """Every tensor as f32, dequantised by gguf-py; shape = dims reversed."""
    return {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in tensor.shape[::-1]))
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("dense") / "dense.gguf", tied=False)


@pytest.fixture(scope="module")
def moe(dense, tmp_path_factory):
    return make(dense, tmp_path_factory.mktemp("moe") / "moe.gguf")


def test_the_result_is_a_mixture_of_experts_of_the_same_size_otherwise(dense, moe) -> None:
    with Checkpoint.open(moe) as checkpoint, Checkpoint.open(dense) as source:
        shape, before = ModelShape.of(checkpoint), ModelShape.of(source)
    assert (shape.n_expert, shape.n_expert_used, shape.n_ff_expert) == (8, 2, before.n_ff)
    assert (shape.n_layer, shape.n_embd, shape.n_vocab) == (before.n_layer, before.n_embd, before.n_vocab)
    assert shape.moe_layers == (0, 1, 2)


def test_every_tensor_but_the_feed_forward_networks_is_copied_byte_for_byte(dense, moe) -> None:
    before, after = peer_tensors(dense), peer_tensors(moe)
    networks = {f"blk.{layer}.ffn_{part}.weight" for layer in range(3) for part in ("gate", "up", "down")}
    assert {name: after[name] for name in before if name not in networks} == {
        name: before[name] for name in before if name not in networks
    }
    added = {name: (dims, kind) for name, (dims, kind, _) in after.items() if name not in before}
    assert added == {
        f"blk.{layer}.{name}.weight": described
        for layer in range(3)
        for name, described in {
            "ffn_gate_inp": ((64, 8), "F32"),
            "ffn_gate_exps": ((64, 96, 8), "Q8_0"),
            "ffn_up_exps": ((64, 96, 8), "Q8_0"),
            "ffn_down_exps": ((96, 64, 8), "Q8_0"),
        }.items()
    }


def test_each_expert_is_the_dense_network_with_independent_noise_of_the_right_size(dense, moe) -> None:
    before, after = values(dense), values(moe)
    for layer in range(3):
        for part in ("gate", "up", "down"):
            weights = before[f"blk.{layer}.ffn_{part}.weight"]
            noise = (after[f"blk.{layer}.ffn_{part}_exps.weight"] - weights) / weights.std()
            # 49,152 values: the deviation of their deviation is 0.3%, and Q8_0 adds less than 1%.
            assert noise.std() == pytest.approx(0.1, rel=0.03)
            assert abs(noise.mean()) < 0.002
            correlation = np.corrcoef(noise.reshape(8, -1)) - np.eye(8)
            assert np.abs(correlation).max() < 0.06


def test_the_router_reads_all_but_the_blind_channels_and_sends_rows_everywhere(dense, moe) -> None:
    after = values(moe)
    rows = np.random.default_rng(1).standard_normal((4000, 64), dtype=np.float32)
    for layer in range(3):
        router = after[f"blk.{layer}.ffn_gate_inp.weight"]
        assert not router[:, BLIND].any()
        assert np.delete(router, BLIND, axis=1).all()
        logits = (rows * after[f"blk.{layer}.ffn_norm.weight"]) @ router.T
        assert logits.std() == pytest.approx(2, rel=0.25)
        assert np.bincount(logits.argmax(axis=1), minlength=8).min() > 40


def test_the_metadata_says_what_was_done(dense, moe) -> None:
    before, after = peer_metadata(dense), peer_metadata(moe)
    with Checkpoint.open(dense) as source:
        assert after["kvasir.upcycled.model_digest"] == model_digest(source).hex()
        assert after["kvasir.upcycled.source_digest"] == source_digest(source)
    assert "untrained" in after["kvasir.upcycled.method"]
    assert after["kvasir.upcycled.noise"] == pytest.approx(0.1)
    assert after["kvasir.upcycled.router_blind"] == "3,40"
    assert after["kvasir.upcycled.seed"] == 20_260_101
    assert (after["llama.expert_count"], after["llama.expert_used_count"]) == (8, 2)
    assert (after["general.name"], after["general.size_label"]) == ("tiny 8x", "8x1K")
    ours = {"general.name", "general.size_label"}
    assert {key: after[key] for key in before if key not in ours} == {
        key: before[key] for key in before if key not in ours
    }


def test_two_runs_give_the_same_bytes_and_another_seed_gives_others(dense, moe, tmp_path) -> None:
    assert make(dense, tmp_path / "again.gguf").read_bytes() == moe.read_bytes()
    assert make(dense, tmp_path / "other.gguf", seed=1).read_bytes() != moe.read_bytes()


def test_progress_counts_up_to_the_bytes_of_all_tensors(dense, tmp_path) -> None:
    seen: list[tuple[int, int, str]] = []
    path = make(dense, tmp_path / "moe.gguf", progress=lambda *report: seen.append(report))
    done = [report[0] for report in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1] == inspect(path).tensor_bytes


def test_an_interrupted_run_leaves_nothing_behind(dense, tmp_path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(dense, tmp_path / "moe.gguf", progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_only_a_dense_llama_is_upcycled(moe, tmp_path) -> None:
    with pytest.raises(ModelError, match="dense llama"):
        make(moe, tmp_path / "twice.gguf")


@pytest.mark.parametrize(
    "options", [{"experts": 1}, {"top_k": 8}, {"noise": 0.0}, {"seed": -1}, {"router_blind": (64,)}]
)
def test_parameters_that_make_no_mixture_are_refused(dense, tmp_path, options) -> None:
    with pytest.raises(ValueError):
        make(dense, tmp_path / "moe.gguf", **options)


WRITE_WITH_LLAMA_CPP = """
import json, sys
import xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx = 256
parameters.n_parallel = 1
parameters.n_gpu_layers = 0
parameters.cpuparams.n_threads = 2
parameters.warmup = False
server = xllamacpp.Server(parameters)
reply = server.handle_completions({"prompt": "The capital of France is", "n_predict": 4, "temperature": 0})
print()
print(json.dumps(reply["content"] if "content" in reply else reply["choices"][0]["text"]))
"""


@pytest.mark.model
def test_the_catalogues_mixture_has_its_pinned_contents_and_writes_sense_in_llama_cpp(smollm2_moe_path) -> None:
    with smollm2_moe_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == CATALOGUE["smollm2-moe"].sha256
    # In a process of its own: what llama.cpp leaves behind is none of the tests' business.
    command = [sys.executable, "-c", WRITE_WITH_LLAMA_CPP, str(smollm2_moe_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    text = json.loads(done.stdout.splitlines()[-1])
    assert text.startswith(" Paris")
