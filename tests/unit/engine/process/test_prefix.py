"""Kept prefixes: found block by block, apart by session, dropped from the leaves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.kvcache import KVCache, KVLayout
from kvasir_console.engine.process.prefix import PREFILL_CHUNK, PrefixStore

BLOCK = 10


def block(value: int) -> list[int]:
    return [value] * PREFILL_CHUNK


def cache(blocks: int) -> KVCache:
    made = KVCache(KVLayout(1, 1, 2), blocks * PREFILL_CHUNK)
    made.reserve(0, blocks * PREFILL_CHUNK)
    made.commit(blocks * PREFILL_CHUNK)
    return made


def keep(store: PrefixStore, tokens: list[int], session: str = "") -> None:
    count = len(tokens) // PREFILL_CHUNK
    store.put(tokens, session, {index: cache(index + 1) for index in range(count)}, BLOCK)


def found(store: PrefixStore, tokens: list[int], session: str = "") -> int:
    result = store.find(tokens, session)
    return 0 if result is None else result[1]


def test_the_longest_prefix_in_whole_blocks_is_found():
    store = PrefixStore()
    keep(store, block(1) + block(2) + block(3)[:-1])
    assert len(store) == 2
    assert found(store, block(1) + block(2) + block(3)) == 2 * PREFILL_CHUNK
    assert found(store, block(1) + block(9)) == PREFILL_CHUNK
    assert found(store, block(1)[:-1]) == 0
    assert found(store, block(2)) == 0


def test_a_block_is_the_same_only_behind_the_same_blocks():
    store = PrefixStore()
    keep(store, block(1) + block(2))
    keep(store, block(3))
    assert found(store, block(3) + block(2)) == PREFILL_CHUNK


def test_one_token_makes_the_difference():
    store = PrefixStore()
    keep(store, block(1))
    other = block(1)
    other[-1] = 2
    assert found(store, other) == 0


def test_sessions_find_their_own_only():
    store = PrefixStore()
    keep(store, block(1), "mine")
    assert found(store, block(1), "mine") == PREFILL_CHUNK
    assert found(store, block(1), "yours") == 0
    assert found(store, block(1)) == 0


def test_what_is_there_is_not_missing():
    store = PrefixStore()
    keep(store, block(1))
    assert store.missing(block(1) + block(2) + block(3) + [4], "") == range(1, 3)
    assert not store.missing([*block(1), 4], "")


def test_the_least_recently_used_leaf_goes_first():
    store = PrefixStore()
    keep(store, block(1) + block(2))
    keep(store, block(1) + block(3))
    assert found(store, block(1) + block(2)) == 2 * PREFILL_CHUNK  # used again
    store.drop(1)
    assert found(store, block(1) + block(3)) == PREFILL_CHUNK
    assert found(store, block(1) + block(2)) == 2 * PREFILL_CHUNK
    store.drop(2 * BLOCK)
    assert len(store) == store.n_bytes == 0


def test_a_block_without_its_parent_is_not_kept():
    store = PrefixStore()
    store.put(block(1) + block(2), "", {1: cache(2)}, BLOCK)
    assert len(store) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 40)), max_size=12))
def test_the_store_is_always_whole_prefixes_and_knows_its_size(turns):
    store, kept = PrefixStore(), set()
    for path, dropped in turns:
        tokens = [token for value in path for token in block(value)]
        keep(store, tokens)
        kept |= {tuple(path[: n + 1]) for n in range(len(path))}
        store.drop(dropped)
        there = {
            path for path in kept if found(store, [t for v in path for t in block(v)]) == len(path) * PREFILL_CHUNK
        }
        assert len(there) == len(store)
        assert store.n_bytes == BLOCK * len(store)
        assert all(path[:-1] in there or len(path) == 1 for path in there)
        kept = there
