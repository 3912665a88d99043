"""KV caches: they grow by the block, stay inside their capacity, and forget what is cut off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.kvcache import BLOCK_ROWS, KVCache
from kvasir_console.errors import EngineError, RequestError

N_LAYER, J, H = 2, 3, 4
BLOCK_BYTES = 2 * N_LAYER * BLOCK_ROWS * J * H * 4


def fill(cache: KVCache, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append ``count`` rows whose values are their positions; returns the last layer's keys and values."""
    position = cache.length
    cache.reserve(position, count)
    rows = torch.arange(position, position + count, dtype=torch.float32).view(-1, 1, 1).expand(-1, J, H)
    for layer in range(N_LAYER):
        keys, values = cache.write(layer, rows + layer, -rows - layer)
    cache.commit(count)
    return keys, values


def test_memory_follows_the_rows_by_the_block():
    cache = KVCache(N_LAYER, J, H, 10_000)
    assert cache.n_bytes == 0
    fill(cache, 1)
    assert cache.n_bytes == BLOCK_BYTES
    fill(cache, BLOCK_ROWS - 1)
    assert cache.n_bytes == BLOCK_BYTES
    fill(cache, 1)
    assert cache.n_bytes == 2 * BLOCK_BYTES


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_rows_keep_their_values_however_they_came(counts):
    cache = KVCache(N_LAYER, J, H, 2000)
    for count in counts:
        keys, values = fill(cache, count)
    length = sum(counts)
    wanted = torch.arange(length, dtype=torch.float32).view(-1, 1, 1).expand(-1, J, H) + N_LAYER - 1
    assert cache.length == length
    assert keys.shape == values.shape == (-(-length // BLOCK_ROWS) * BLOCK_ROWS, J, H)
    assert torch.equal(keys[:length], wanted)
    assert torch.equal(values[:length], -wanted)
    assert not keys[length:].any()
    assert not values[length:].any()


def test_a_full_cache_refuses_and_stays_usable():
    cache = KVCache(N_LAYER, J, H, 5)
    fill(cache, 4)
    with pytest.raises(RequestError) as refusal:
        cache.reserve(4, 2)
    assert refusal.value.code == "context_length_exceeded"
    fill(cache, 1)
    assert cache.length == 5


@pytest.mark.parametrize("position", [2, 4])
def test_rows_are_neither_skipped_nor_written_twice(position):
    cache = KVCache(N_LAYER, J, H, 10)
    fill(cache, 3)
    with pytest.raises(EngineError) as mistake:
        cache.reserve(position, 1)
    assert mistake.value.code == "wrong_position"


def test_a_cut_leaves_nothing_behind():
    cache = KVCache(N_LAYER, J, H, 600)
    fill(cache, 300)
    cache.truncate(250)
    keys, values = fill(cache, 1)
    assert cache.length == 251
    assert len(keys) == BLOCK_ROWS
    assert not keys[251:].any()
    assert not values[251:].any()
    assert keys[250, 0, 0] == 250 + N_LAYER - 1
    keys, _ = fill(cache, 100)
    assert keys[350, 0, 0] == 350 + N_LAYER - 1


@pytest.mark.parametrize("position", [-1, 4])
def test_a_cut_lies_inside_the_sequence(position):
    cache = KVCache(N_LAYER, J, H, 10)
    fill(cache, 3)
    with pytest.raises(EngineError):
        cache.truncate(position)


def test_an_empty_sequence_is_no_sequence():
    with pytest.raises(RequestError):
        KVCache(N_LAYER, J, H, 0)
