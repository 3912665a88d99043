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

from kvasir_console.engine import linear as linear_module
from kvasir_console.engine.checkpoint.gguf import Checkpoint, TensorInfo
from kvasir_console.engine.checkpoint.shard import write_expert_shard, write_stage
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.forms import REFERENCE, Forms, compiled
from kvasir_console.engine.kvcache import KVCache
from kvasir_console.engine.native import Library
from kvasir_console.engine.stage import Span, Stage
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


def load(path: Path, begin: int = 0, end: int = N_LAYER, forms: Forms = REFERENCE, **arguments) -> Stage:
    with Checkpoint.open(path) as checkpoint:
        return Stage.load(checkpoint, begin, end, forms=forms, **arguments)


@pytest.fixture(scope="module")
def stage(path, forms) -> Stage:
    stage = load(path, forms=forms)
    if not stage.row_invariant:
        pytest.skip("this machine's matrix products are not row-invariant")
    return stage


def feed(stage: Stage, cache: KVCache, count: int, experts=None) -> torch.Tensor:
    """The next ``count`` of ``TOKENS`` through a whole model: (count, 64)."""
    tokens = torch.from_numpy(TOKENS[cache.length : cache.length + count])
    return stage.forward(stage.embed(tokens), [Span(cache, cache.length, count)], experts)


def ring(stages: list[Stage], cuts: list[int], experts=None) -> torch.Tensor:
    """Logits of every position of ``TOKENS``, fed in pieces of ``cuts`` rows through ``stages`` in turn."""
    caches = [stage.new_cache(len(TOKENS)) for stage in stages]
    at, rows = 0, []
    for count in cuts:
        hidden = stages[0].embed(torch.from_numpy(TOKENS[at : at + count]))
        for stage, cache in zip(stages, caches, strict=True):
            hidden = stage.forward(hidden, [Span(cache, at, count)], experts)
        rows.append(hidden)
        at += count
    return stages[-1].logits(torch.cat(rows))


@contextmanager
def threads(count: int, library: Library | None) -> Iterator[None]:
    before = torch.get_num_threads(), library and library.threads
    torch.set_num_threads(count)
    if library is not None:
        library.set_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        if library is not None:
            library.set_threads(before[1] or 1)


WHOLE = [256, 20, 1, 1, 2]


@pytest.mark.parametrize("ends", [[1, 3], [2, 3], [1, 2, 3]], ids=str)
def test_windows_give_the_bits_of_the_whole(path, forms, ends):
    windows = [load(path, begin, end, forms) for begin, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(ring(windows, WHOLE), ring([load(path, forms=forms)], WHOLE))


@pytest.mark.parametrize("count", [2, 3])
def test_threads_do_not_change_a_bit(stage, forms, count):
    with threads(1, forms.library):
        once = ring([stage], WHOLE)
    with threads(count, forms.library):
        assert torch.equal(ring([stage], WHOLE), once)


@pytest.mark.parametrize("cuts", [[4, 5, 12, 100, 7, 147, 5], [1, 2, 3, 250, 1, 2, 3, 1, 17]], ids=str)
def test_a_prompt_may_be_cut_anywhere(stage, cuts):
    assert torch.equal(ring([stage], cuts), ring([stage], [280]))


def test_rows_of_many_sequences_have_the_bits_they_have_alone(stage):
    """Decode steps, a prompt's beginning, and one that crosses a block of the cache, in every mixture."""
    lengths = [0, 3, 17, 30, 100, 254, 255, 256]
    counts = [20, 1, 1, 3, 1, 5, 1, 1]
    alone, spans, rows = [], [], []
    for length, count in zip(lengths, counts, strict=True):
        cache, twin = stage.new_cache(280), stage.new_cache(280)
        for each in (cache, twin) if length else ():
            feed(stage, each, length)
        tokens = torch.from_numpy(TOKENS[length : length + count])
        rows.append(stage.embed(tokens))
        alone.append(stage.logits(stage.forward(rows[-1], [Span(twin, length, count)])))
        spans.append(Span(cache, length, count))
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    together = stage.forward(torch.cat([rows[i] for i in order]), [spans[i] for i in order])
    assert torch.equal(stage.logits(together), torch.cat([alone[i] for i in order]))
    after = stage.embed(torch.tensor([7] * 8))
    ends = [Span(span.cache, span.position + span.rows, 1) for span in spans]
    one_by_one = [stage.forward(row.unsqueeze(0), [end]) for row, end in zip(after[:4], ends[:4], strict=True)]
    for end in ends[:4]:
        end.cache.truncate(end.position)
    assert torch.equal(stage.forward(after, ends)[:4], torch.cat(one_by_one))


def test_forms_agree(path, forms):
    wanted = ring([load(path)], [280])
    bound = {"reference": 0.0, "native": 2e-5, "eager": 3e-2}[forms.name]
    assert float((ring([load(path, forms=forms)], [280]) - wanted).abs().max() / wanted.abs().max()) <= bound


def test_experts_may_be_held_otherwise_than_the_layers(moe_path, forms):
    """As they are where layers are on an accelerator and experts in memory; where they are must not matter here."""
    wanted = ring([load(moe_path)], WHOLE)
    split = load(moe_path, forms=forms, expert_forms=REFERENCE, experts_device="cpu")
    assert float((ring([split], WHOLE) - wanted).abs().max() / wanted.abs().max()) <= 3e-2
    exact = load(moe_path, forms=REFERENCE, expert_forms=forms, experts_device="cpu")
    bound = {"reference": 0.0, "native": 2e-5, "eager": 3e-2}[forms.name]
    assert float((ring([exact], WHOLE) - wanted).abs().max() / wanted.abs().max()) <= bound
    for stage in (split, exact):
        assert [int(bank.pairs.sum()) for bank in stage.banks.values()] == [2 * len(TOKENS)] * N_LAYER
    kinds = {type(holding.held) for bank in split.banks.values() for holding in bank.holdings}
    assert kinds == {type(holding.held) for bank in load(moe_path).banks.values() for holding in bank.holdings}


@pytest.mark.parametrize(("kv_type", "bound"), [("f16", 2e-3), ("bf16", 2e-2), ("q8_0", 3e-2)])
def test_smaller_caches_change_little(path, forms, kv_type, bound, tmp_path_factory):
    wide = write_tiny_llama(
        tmp_path_factory.mktemp("wide") / "wide.gguf", n_embd=128, n_head=4, n_head_kv=2, n_layer=N_LAYER
    )
    plain, small = load(wide, forms=forms), load(wide, forms=forms, kv_type=kv_type)
    wanted = ring([plain], WHOLE)
    got = ring([small], WHOLE)
    assert 0 < float((got - wanted).abs().max() / wanted.abs().max()) < bound
    assert small.cache_bytes(256) < 0.6 * plain.cache_bytes(256)
    assert torch.equal(ring([small], [280]), got)


def test_a_fork_goes_on_as_the_sequence_it_came_from(stage):
    cache = stage.new_cache(280)
    feed(stage, cache, 270)
    fork = cache.fork(256, 280)
    feed(stage, fork, 14)
    assert torch.equal(feed(stage, fork, 5), feed(stage, cache, 5))


def test_experts_elsewhere_give_the_bits_of_experts_here(moe_path, forms, tmp_path):
    """Two holders with a shard file each: their partial sums add up to the local one, bit for bit, with top-2."""
    shards: dict[int, list[ExpertBank]] = {}
    with Checkpoint.open(moe_path) as source:
        for layer in range(N_LAYER):
            for begin, end in ((0, 1), (1, 4)):
                shard = tmp_path / f"{layer}-{begin}.gguf"
                write_expert_shard(source, shard, model="tiny", layer=layer, begin=begin, end=end)
                with Checkpoint.open(shard) as checkpoint:
                    bank = ExpertBank.load(checkpoint, layer, begin, end, forms=forms)
                    shards.setdefault(layer, []).append(bank)
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

    stage = load(moe_path, forms=forms)
    assert torch.equal(ring([stage], WHOLE, elsewhere), ring([stage], WHOLE))
    assert calls == 2 * N_LAYER * len(WHOLE)
    for layer, banks in shards.items():
        assert np.array_equal(np.concatenate([bank.pairs for bank in banks]), stage.banks[layer].pairs), layer
        assert stage.banks[layer].pairs.sum() == 2 * len(TOKENS)


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
    assert sorted(stage.tensor_names) == sorted(wanted)
    held: dict[str, list[np.ndarray]] = {}
    for name, tensor in stage.named_tensors():
        held.setdefault(name, []).append(tensor.numpy())
    as_stored = {"token_embd.weight"} if begin == 0 and not (tied and end == N_LAYER) else set()
    assert stage.tensor_bytes == sum(
        int(tensor.n_bytes if name in as_stored else 4 * tensor.n_elements) for name, tensor in wanted.items()
    )
    for name, parts in held.items():
        raw, kind = wanted[name].data, wanted[name].tensor_type
        values = raw.view(np.uint8) if name in as_stored else dequantize(raw, kind)
        assert np.array_equal(np.concatenate(parts).reshape(-1), values.reshape(-1)), name


@pytest.mark.parametrize("window", [(0, 3), (0, 1), (1, 2), (2, 3)], ids=str)
def test_packed_weights_are_hardly_larger_than_the_file(path, library, window):
    with Checkpoint.open(path) as checkpoint:
        stage = Stage.load(checkpoint, *window, forms=compiled(library))
        stored = sum(checkpoint.tensors[name].n_bytes for name in stage.tensor_names)
    assert stored <= stage.tensor_bytes <= 1.1 * stored
    assert len({tensor.data_ptr() for _, tensor in stage.named_tensors()}) == len(
        [holding for holding in stage.holdings if holding.n_bytes]
    )


@pytest.mark.parametrize("window", [(0, 1), (1, 2), (2, 3)], ids=str)
def test_bytes_outside_the_window_mean_nothing(path, forms, window, tmp_path):
    """Every byte of the file's other tensors is replaced; results stay as they were."""
    begin, end = window
    whole = load(path, begin, end, forms)
    poisoned = bytearray(path.read_bytes())
    with Checkpoint.open(path) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            if name not in whole.tensor_names:
                poisoned[tensor.offset : tensor.offset + tensor.n_bytes] = b"\xff" * tensor.n_bytes
    copy = tmp_path / "poisoned.gguf"
    copy.write_bytes(poisoned)
    windowed = load(copy, begin, end, forms)
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(4))
    for stage in (whole, windowed):
        assert torch.isfinite(stage.forward(x, [Span(stage.new_cache(30), 0, 30)])).all()
    first, second = (stage.forward(x, [Span(stage.new_cache(30), 0, 30)]) for stage in (whole, windowed))
    assert torch.equal(first, second)
    if end == N_LAYER:
        assert torch.equal(whole.logits(x), windowed.logits(x))
    if begin == 0:
        assert torch.equal(whole.embed(torch.arange(288)), windowed.embed(torch.arange(288)))


def test_a_tied_table_is_one_storage(dense_path, library):
    for forms in (REFERENCE, compiled(library)):
        stage = load(dense_path, forms=forms)
        assert [holding.names for holding in stage.holdings if "token_embd.weight" in holding.names] == [
            ("token_embd.weight",)
        ]
    stage = load(dense_path)
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


def test_matrices_are_read_in_bounded_pieces(path, forms, monkeypatch):
    sizes: list[int] = []
    original = Checkpoint.raw

    def measured(self: Checkpoint, tensor: TensorInfo, begin: int = 0, end: int | None = None) -> memoryview:
        raw = original(self, tensor, begin, end)
        sizes.append(len(raw) // tensor.type.block_bytes * tensor.type.block_values)
        return raw

    whole = ring([load(path, forms=forms)], [280])
    monkeypatch.setattr(Checkpoint, "raw", measured)
    monkeypatch.setattr(linear_module, "CHUNK_VALUES", 1000)
    assert torch.equal(ring([load(path, forms=forms)], [280]), whole)
    assert max(sizes) <= 16 * 96


def test_a_failed_forward_leaves_the_caches_as_they_were(moe_path, forms):
    stage = load(moe_path, forms=forms)
    caches = [stage.new_cache(280) for _ in range(4)]
    for each in caches:
        feed(stage, each, 30)
    before = [each.n_bytes for each in caches]

    def broken(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if layer == 1:
            raise EngineError("holder_gone", "The holder is gone.")
        return torch.full_like(x, float("nan"))

    hit, twins = caches[:2], caches[2:]
    rows = stage.embed(torch.from_numpy(TOKENS[:250]))
    with pytest.raises(EngineError, match="gone"):
        stage.forward(rows, [Span(hit[0], 30, 10), Span(hit[1], 30, 240)], broken)
    full = stage.new_cache(4)
    with pytest.raises(RequestError):
        stage.forward(rows[:15], [Span(hit[0], 30, 10), Span(full, 0, 5)])
    assert [each.length for each in (*hit, full)] == [30, 30, 0]
    assert [each.n_bytes for each in caches] == before
    for each, twin in zip(hit, twins, strict=True):
        assert torch.equal(feed(stage, each, 2), feed(stage, twin, 2))


def test_a_replay_gives_the_bits_of_the_first_time(stage):
    cache = stage.new_cache(280)
    first = feed(stage, cache, 260)
    last = feed(stage, cache, 1)
    for position, cuts in ((256, [4, 1]), (3, [1, 1, 250, 3, 2, 1]), (259, [1, 1])):
        cache.truncate(position)
        again = torch.cat([feed(stage, cache, count) for count in cuts])
        assert torch.equal(again, torch.cat((first, last))[position:])


def test_nothing_records_gradients(path):
    stage = load(path)
    hidden = stage.forward(stage.embed(torch.arange(5)), [Span(stage.new_cache(5), 0, 5)])
    assert not stage.logits(hidden).requires_grad
    assert not any(tensor.requires_grad for _, tensor in stage.named_tensors())


def test_no_rows_are_no_work(dense_path):
    stage = load(dense_path)
    cache = stage.new_cache(5)
    assert stage.forward(stage.embed(torch.empty(0, dtype=torch.int64)), [Span(cache, 0, 0)]).shape == (0, 64)
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
    with pytest.raises(EngineError) as mistake:
        load(dense_path, kv_type="f8")
    assert mistake.value.code == "unknown_kv_type"
    cache = stage.new_cache(10)
    with pytest.raises(RequestError) as refusal:
        stage.forward(stage.embed(torch.arange(11)), [Span(cache, 0, 11)])
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(EngineError) as mistake:
        stage.forward(stage.embed(torch.arange(2)), [Span(cache, 1, 2)])
    assert mistake.value.code == "wrong_position"
    with pytest.raises(EngineError) as mistake:
        stage.forward(torch.zeros(2, 63), [Span(cache, 0, 2)])
    assert mistake.value.code == "wrong_width"
    for spans in ([Span(cache, 0, 1)], [], [Span(cache, 0, 1), Span(cache, 1, 1)]):
        with pytest.raises(EngineError) as mistake:
            stage.forward(stage.embed(torch.arange(2)), spans)
        assert mistake.value.code == "wrong_spans"
    assert cache.length == 0


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
