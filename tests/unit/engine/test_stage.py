"""Stages: any split of the layers, and any home of the experts, gives the same bits; and only the window is held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from kvasir_console.engine import weights as weights_module
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shard import write_expert_shard, write_stage
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import EngineError, ModelError, RequestError

from builders import Quant, write_tiny_llama

MIXED = (Quant.F32, Quant.F16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1)
N_LAYER = 3
TOKENS = np.random.default_rng(3).integers(0, 288, 280)


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    return write_tiny_llama(path, n_layer=N_LAYER, weight_type=MIXED, tied=True, seed=11)


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("moe") / "moe.gguf"
    return write_tiny_llama(path, n_layer=N_LAYER, n_expert=4, n_expert_used=2, weight_type=MIXED, seed=12)


@pytest.fixture(scope="module", params=["dense", "moe"])
def path(request, dense_path, moe_path) -> Path:
    return dense_path if request.param == "dense" else moe_path


def load(path: Path, begin: int = 0, end: int = N_LAYER) -> Stage:
    with Checkpoint.open(path) as checkpoint:
        return Stage.load(checkpoint, begin, end)


def ring(stages: list[Stage], cuts: list[int], experts=None) -> torch.Tensor:
    """Logits of every position of ``TOKENS``, fed in pieces of ``cuts`` rows through ``stages`` in turn."""
    caches = [stage.new_cache(len(TOKENS)) for stage in stages]
    at, rows = 0, []
    for count in cuts:
        hidden = stages[0].embed(torch.from_numpy(TOKENS[at : at + count]))
        for stage, cache in zip(stages, caches, strict=True):
            hidden = stage.forward(hidden, cache, at, experts)
        rows.append(hidden)
        at += count
    return stages[-1].logits(torch.cat(rows))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


WHOLE = [256, 20, 1, 1, 2]


@pytest.mark.parametrize("ends", [[1, 3], [2, 3], [1, 2, 3]], ids=str)
def test_windows_give_the_bits_of_the_whole(path, ends):
    windows = [load(path, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(ring(windows, WHOLE), ring([load(path)], WHOLE))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_do_not_change_a_bit(path, count):
    stage = load(path)
    if not stage.row_invariant:
        pytest.skip("this machine's matrix products are not row-invariant")
    with threads(1):
        once = ring([stage], WHOLE)
    with threads(count):
        assert torch.equal(ring([stage], WHOLE), once)


def test_prefill_may_be_cut_anywhere_in_a_dense_model(dense_path):
    stage = load(dense_path)
    if not stage.row_invariant:
        pytest.skip("this machine's matrix products are not row-invariant")
    assert torch.equal(ring([stage], [4, 5, 12, 100, 7, 147, 5]), ring([stage], [280]))


def test_few_rows_have_the_bits_of_single_rows(path):
    stage = load(path)
    if not stage.row_invariant:
        pytest.skip("this machine's matrix products are not row-invariant")
    assert torch.equal(ring([stage], [270, 2, 3, 3, 2]), ring([stage], [270, *[1] * 10]))


def test_experts_elsewhere_give_the_bits_of_experts_here(moe_path, tmp_path):
    """Two holders with a shard file each: their partial sums add up to the local one, bit for bit, with top-2."""
    shards: dict[int, list[ExpertBank]] = {}
    with Checkpoint.open(moe_path) as source:
        for layer in range(N_LAYER):
            for begin, end in ((0, 1), (1, 4)):
                shard = tmp_path / f"{layer}-{begin}.gguf"
                write_expert_shard(source, shard, model="tiny", layer=layer, begin=begin, end=end)
                with Checkpoint.open(shard) as checkpoint:
                    shards.setdefault(layer, []).append(ExpertBank.load(checkpoint, layer, begin, end))
    calls = 0

    def elsewhere(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        total = torch.zeros_like(x)
        rows = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
        for bank in shards[layer]:
            mine = ((ids >= bank.begin) & (ids < bank.end)).reshape(-1)
            sent, row_idx = torch.unique(rows[mine], return_inverse=True)
            pairs = row_idx, ids.reshape(-1)[mine] - bank.begin, weights.reshape(-1)[mine]
            total[sent] += bank.weighted_sum(x[sent], *pairs)
            calls += 1
        return total

    stage = load(moe_path)
    assert torch.equal(ring([stage], WHOLE, elsewhere), ring([stage], WHOLE))
    assert calls == 2 * N_LAYER * len(WHOLE)


@pytest.mark.parametrize("window", [(0, 3), (0, 1), (1, 2), (2, 3)], ids=str)
def test_only_the_window_is_held_once_and_with_its_values(path, window):
    begin, end = window
    reader = GGUFReader(path)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)

    def belongs(name: str) -> bool:
        if name.startswith("blk."):
            return begin <= int(name.split(".")[1]) < end
        ends = {"token_embd.weight": begin == 0 or (tied and end == N_LAYER)}
        return ends.get(name, end == N_LAYER)

    wanted = {tensor.name: tensor for tensor in reader.tensors if belongs(tensor.name)}
    stage = load(path, begin, end)
    held = list(stage.named_tensors())
    assert sorted(name for name, _ in held) == sorted(wanted)
    assert stage.tensor_bytes == sum(4 * int(tensor.n_elements) for tensor in wanted.values())
    for name, tensor in held:
        values = dequantize(wanted[name].data, wanted[name].tensor_type)
        assert np.array_equal(tensor.numpy(), values.reshape(tensor.shape)), name


def test_a_tied_table_is_one_storage(dense_path):
    stage = load(dense_path)
    names = [name for name, _ in stage.named_tensors()]
    assert names.count("token_embd.weight") == 1
    assert "output.weight" not in names
    row = stage.embed(torch.tensor([5]))
    dict(stage.named_tensors())["token_embd.weight"][:] *= 2
    assert torch.equal(stage.embed(torch.tensor([5])), 2 * row)
    hidden = torch.ones(1, 64)
    doubled = stage.logits(hidden)
    dict(stage.named_tensors())["token_embd.weight"][:] /= 2
    assert torch.equal(stage.logits(hidden) * 2, doubled)


@pytest.mark.parametrize("window", [(0, 1), (1, 3)], ids=str)
def test_a_stage_file_loads_as_the_window_it_was_cut_from(path, window, tmp_path):
    with Checkpoint.open(path) as source:
        write_stage(source, tmp_path / "stage.gguf", model="tiny", begin=window[0], end=window[1])
    cut, whole = load(tmp_path / "stage.gguf", *window), load(path, *window)
    mine, theirs = dict(cut.named_tensors()), dict(whole.named_tensors())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_progress_ends_at_the_bytes_of_the_window(moe_path):
    seen: list[tuple[int, int]] = []
    with Checkpoint.open(moe_path) as checkpoint:
        Stage.load(checkpoint, 1, 2, progress=lambda done, total: seen.append((done, total)))
    expected = sum(int(tensor.n_bytes) for tensor in GGUFReader(moe_path).tensors if tensor.name.startswith("blk.1."))
    done = [first for first, _ in seen]
    assert {total for _, total in seen} == {expected}
    assert done == sorted(set(done))
    assert done[-1] == expected


def test_matrices_are_dequantised_in_bounded_pieces(path, monkeypatch):
    sizes: list[int] = []
    original = weights_module.dequantize

    def measured(raw: torch.Tensor, kind: int) -> torch.Tensor:
        values = original(raw, kind)
        sizes.append(values.numel())
        return values

    whole = {name: tensor.clone() for name, tensor in load(path).named_tensors()}
    monkeypatch.setattr(weights_module, "dequantize", measured)
    monkeypatch.setattr(weights_module, "CHUNK_VALUES", 1000)
    for name, tensor in load(path).named_tensors():
        assert torch.equal(tensor, whole[name]), name
    assert max(sizes) <= 1000
    assert sum(sizes) == sum(tensor.numel() for tensor in whole.values())


def test_a_failed_forward_leaves_the_cache_as_it_was(moe_path):
    stage = load(moe_path)
    cache, other = stage.new_cache(280), stage.new_cache(280)
    prompt = stage.embed(torch.from_numpy(TOKENS[:30]))
    follow = stage.embed(torch.from_numpy(TOKENS[30:32]))
    for each in (cache, other):
        stage.forward(prompt, each, 0)

    def broken(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if layer == 1:
            raise EngineError("holder_gone", "The holder is gone.")
        return torch.full_like(x, float("nan"))

    with pytest.raises(EngineError, match="gone"):
        stage.forward(stage.embed(torch.from_numpy(TOKENS[30:40])), cache, 30, broken)
    assert cache.length == 30
    assert torch.equal(stage.forward(follow, cache, 30), stage.forward(follow, other, 30))


def test_a_replay_gives_the_bits_of_the_first_time(path):
    stage = load(path)
    cache = stage.new_cache(280)
    first = stage.forward(stage.embed(torch.from_numpy(TOKENS[:260])), cache, 0)
    last = stage.forward(stage.embed(torch.from_numpy(TOKENS[260:261])), cache, 260)
    cache.truncate(256)
    again = stage.forward(stage.embed(torch.from_numpy(TOKENS[256:260])), cache, 256)
    assert torch.equal(again, first[256:])
    assert torch.equal(stage.forward(stage.embed(torch.from_numpy(TOKENS[260:261])), cache, 260), last)


def test_nothing_records_gradients(path):
    stage = load(path)
    hidden = stage.forward(stage.embed(torch.arange(5)), stage.new_cache(5), 0)
    assert not stage.logits(hidden).requires_grad
    assert not any(tensor.requires_grad for _, tensor in stage.named_tensors())


def test_no_rows_are_no_work(dense_path):
    stage = load(dense_path)
    cache = stage.new_cache(5)
    assert stage.forward(stage.embed(torch.empty(0, dtype=torch.int64)), cache, 0).shape == (0, 64)
    assert cache.length == 0


def test_requests_that_cannot_be_served_are_refused(dense_path):
    stage = load(dense_path)
    with pytest.raises(RequestError) as refusal:
        stage.new_cache(513)
    assert refusal.value.code == "context_length_exceeded"
    for token in (-1, 288):
        with pytest.raises(RequestError) as refusal:
            stage.embed(torch.tensor([0, token]))
        assert refusal.value.code == "token_out_of_range"
    cache = stage.new_cache(10)
    with pytest.raises(RequestError) as refusal:
        stage.forward(stage.embed(torch.arange(11)), cache, 0)
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(EngineError) as mistake:
        stage.forward(stage.embed(torch.arange(2)), cache, 1)
    assert mistake.value.code == "wrong_position"
    with pytest.raises(EngineError) as mistake:
        stage.forward(torch.zeros(2, 63), cache, 0)
    assert mistake.value.code == "wrong_width"


def test_inner_windows_neither_embed_nor_finish(dense_path):
    middle = load(dense_path, 1, 2)
    with pytest.raises(EngineError) as mistake:
        middle.embed(torch.arange(2))
    assert mistake.value.code == "not_the_first_stage"
    with pytest.raises(EngineError) as mistake:
        middle.logits(torch.zeros(1, 64))
    assert mistake.value.code == "not_the_last_stage"


def test_an_unknown_architecture_is_refused(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    renamed = path.read_bytes().replace(
        b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00drama"
    )
    path.write_bytes(renamed)
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match="drama") as refusal:
        Stage.load(checkpoint, 0, 2)
    assert refusal.value.code == "unsupported_architecture"
