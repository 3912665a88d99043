"""KV caches: they grow by the block, stay inside their capacity, share beginnings, and forget what is cut off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.kvcache import BLOCK_ROWS, KV_TYPES, KVCache, KVLayout, Span, positions
from kvasir_console.errors import EngineError, RequestError

N_LAYER, J, H = 2, 3, 4
LAYOUT = KVLayout(N_LAYER, J, H)
BLOCK_BYTES = 2 * N_LAYER * BLOCK_ROWS * J * H * 4


def fill(cache: KVCache, count: int, offset: int = 0) -> None:
    """Append ``count`` rows whose keys are their positions, plus the layer; values are the negative of that."""
    position = cache.length
    cache.reserve(position, count)
    rows = torch.arange(position, position + count, dtype=torch.float32).view(-1, 1, 1).expand(-1, J, H) + offset
    for layer in range(N_LAYER):
        kv = torch.stack((rows + layer, -rows - layer), dim=1)
        for begin in range(position, position + count):
            cache.write(layer, begin, kv[begin - position : begin - position + 1])
    cache.commit(count)


def rows_of(cache: KVCache, layer: int = N_LAYER - 1) -> torch.Tensor:
    """(2, J, rows, h) of all blocks."""
    return torch.cat([block.read(layer) for block in cache.blocks], dim=2)


def wanted(length: int) -> torch.Tensor:
    keys = torch.arange(length, dtype=torch.float32).view(1, -1, 1).expand(J, -1, H) + N_LAYER - 1
    return torch.stack((keys, -keys))


def test_memory_follows_the_rows_by_the_block():
    cache = KVCache(LAYOUT, 10_000)
    assert cache.n_bytes == 0
    fill(cache, 1)
    assert cache.n_bytes == BLOCK_BYTES
    fill(cache, BLOCK_ROWS - 1)
    assert cache.n_bytes == BLOCK_BYTES
    fill(cache, 1)
    assert cache.n_bytes == 2 * BLOCK_BYTES
    assert sum(block.values.nbytes for block in cache.blocks) == 2 * BLOCK_BYTES
    cache.truncate(1)
    assert cache.n_bytes == BLOCK_BYTES
    assert LAYOUT.capacity_bytes(1) == BLOCK_BYTES
    assert LAYOUT.capacity_bytes(BLOCK_ROWS + 1) == 2 * BLOCK_BYTES


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_rows_keep_their_values_however_they_came(counts):
    cache = KVCache(LAYOUT, 2000)
    for count in counts:
        fill(cache, count)
    length = sum(counts)
    held = rows_of(cache)
    assert cache.length == length
    assert held.shape == (2, J, -(-length // BLOCK_ROWS) * BLOCK_ROWS, H)
    assert torch.equal(held[:, :, :length], wanted(length))
    assert not held[:, :, length:].any()


def test_a_full_cache_refuses_and_stays_usable():
    cache = KVCache(LAYOUT, 5)
    fill(cache, 4)
    with pytest.raises(RequestError) as refusal:
        cache.reserve(4, 2)
    assert refusal.value.code == "context_length_exceeded"
    fill(cache, 1)
    assert cache.length == 5


@pytest.mark.parametrize("position", [2, 4])
def test_rows_are_neither_skipped_nor_written_twice(position):
    cache = KVCache(LAYOUT, 10)
    fill(cache, 3)
    with pytest.raises(EngineError) as mistake:
        cache.reserve(position, 1)
    assert mistake.value.code == "wrong_position"


@pytest.mark.parametrize("cut", [250, 256, 0])
def test_a_cut_leaves_nothing_behind(cut):
    cache = KVCache(LAYOUT, 600)
    fill(cache, 300)
    cache.truncate(cut)
    assert cache.length == cut
    fill(cache, 1)
    held = rows_of(cache)
    assert torch.equal(held[:, :, : cut + 1], wanted(cut + 1))
    assert not held[:, :, cut + 1 :].any()


def test_an_attempt_that_failed_is_forgotten():
    cache = KVCache(LAYOUT, 600)
    fill(cache, 250)
    cache.reserve(250, 100)
    cache.write(0, 250, torch.full((6, 2, J, H), float("nan")))
    cache.discard()
    assert (cache.length, cache.n_bytes) == (250, BLOCK_BYTES)
    assert torch.isfinite(rows_of(cache, 0)).all()
    fill(cache, 50)
    assert torch.equal(rows_of(cache)[:, :, :300], wanted(300))


@pytest.mark.parametrize("position", [-1, 4])
def test_a_cut_lies_inside_the_sequence(position):
    cache = KVCache(LAYOUT, 10)
    fill(cache, 3)
    with pytest.raises(EngineError):
        cache.truncate(position)
    with pytest.raises(EngineError):
        cache.fork(position, 10)


def test_forks_share_whole_blocks_and_go_their_own_ways():
    cache = KVCache(LAYOUT, 1000)
    fill(cache, 600)
    fork = cache.fork(550, 700)
    assert [a is b for a, b in zip(cache.blocks, fork.blocks, strict=True)] == [True, True, False]
    fill(fork, 100, offset=10_000)
    fill(cache, 50)
    assert torch.equal(rows_of(cache)[:, :, :650], wanted(650))
    assert torch.equal(rows_of(fork)[:, :, :550], wanted(550))
    assert (rows_of(fork)[0, :, 550:650] >= 10_000).all()


@pytest.mark.parametrize("cut", [300, 100, 256, 0])
def test_a_cut_in_a_shared_block_is_seen_by_one_sequence_only(cut):
    cache = KVCache(LAYOUT, 1000)
    fill(cache, 520)
    fork = cache.fork(520, 1000)
    for first, second in ((cache, fork), (fork, cache)):
        other = rows_of(second)[:, :, :520].clone()
        first.truncate(cut)
        fill(first, 30, offset=5)
        assert torch.equal(rows_of(second)[:, :, :520], other)
        first.truncate(cut)
        fill(first, 520 - cut)
        assert torch.equal(rows_of(first)[:, :, :520], wanted(520))


def test_a_fork_must_fit_its_capacity():
    cache = KVCache(LAYOUT, 1000)
    fill(cache, 300)
    with pytest.raises(RequestError) as refusal:
        cache.fork(300, 299)
    assert refusal.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("kv_type", "bound"), [("f32", 0.0), ("f16", 2**-11), ("bf16", 2**-8)])
def test_values_are_rounded_once_to_their_kind(kv_type, bound):
    cache = KVCache(KVLayout(1, J, H, kv_type), 10)
    kv = torch.randn(10, 2, J, H, generator=torch.Generator().manual_seed(1))
    cache.reserve(0, 10)
    cache.write(0, 0, kv)
    held = rows_of(cache, 0)[:, :, :10].permute(2, 0, 1, 3)
    assert ((held - kv).abs() <= bound * kv.abs()).all()
    assert cache.blocks[0].values.dtype == KV_TYPES[kv_type]


def test_q8_0_is_that_of_ggml():
    layout = KVLayout(2, J, 64, "q8_0")
    cache = KVCache(layout, 10)
    kv = torch.randn(7, 2, J, 64, generator=torch.Generator().manual_seed(2))
    kv[3] = 0
    cache.reserve(0, 7)
    cache.write(1, 0, kv)
    held = rows_of(cache, 1)[:, :, :7].permute(2, 0, 1, 3).numpy()
    ggml = dequantize(quantize(kv.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    # ggml divides by the scale before it is rounded to half precision, which may tip a value to its neighbour
    step = np.abs(kv.numpy()).reshape(7, 2, J, 2, 32).max(-1, keepdims=True) / 127
    assert (np.abs(held - ggml).reshape(7, 2, J, 2, 32) <= 1.01 * step).all()
    assert (np.abs(held - kv.numpy()).reshape(7, 2, J, 2, 32) <= 0.52 * step).all()
    assert not held[3].any()
    assert layout.row_bytes == 2 * 2 * J * (64 + 2 * 2)
    assert sum(t.nbytes for t in (cache.blocks[0].values, cache.blocks[0].scales)) == cache.n_bytes


def test_kinds_that_do_not_fit_are_refused():
    with pytest.raises(EngineError) as refusal:
        KVLayout(1, J, 48, "q8_0")
    assert refusal.value.code == "unsupported_kv_type"
    with pytest.raises(EngineError, match="q9"):
        KVLayout(1, J, 48, "q9")


def test_an_empty_sequence_is_no_sequence():
    with pytest.raises(RequestError):
        KVCache(LAYOUT, 0)


def test_positions_are_those_of_all_spans_in_turn():
    first, second = KVCache(LAYOUT, 10), KVCache(LAYOUT, 10)
    assert positions([Span(first, 3, 2), Span(second, 0, 3)]).tolist() == [3, 4, 0, 1, 2]
