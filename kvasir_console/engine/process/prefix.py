"""Prompts that begin alike: blocks of keys and values kept after their request, and handed to the next one.

A block is a whole ``PREFILL_CHUNK`` of positions, the unit in which a cold prompt is computed, so a request that begins
from kept blocks has the bits of one that computed them itself. Blocks form a tree: each is found by its parent and its
own tokens, compared token by token. The least recently used leaf goes first, so what remains is always whole prefixes.

A request may name a session. Its blocks are then found only by requests of that session: a conversation keeps its
own prefix, and nobody learns from a reply's speed what others have asked.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from kvasir_console.engine.kvcache import BLOCK_ROWS, KVCache

PREFILL_CHUNK = BLOCK_ROWS
"""Prompts are cut at multiples of this many rows, always, so that a replay meets the same matrix shapes."""


@dataclass(slots=True)
class _Node:
    """One kept block. ``cache`` is a fork that ends with it; what lies before it is shared with its ancestors."""

    key: _Key
    cache: KVCache
    n_bytes: int
    children: int = 0
    parent: _Node | None = None
    number: int = field(default=0)


_Key = tuple[int | str, bytes]
"""The parent's number, or the session at the root; and the block's tokens."""


class PrefixStore:
    """Kept blocks of one stage. Not for several threads at once; caches are only handed out and forked."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[_Key, _Node] = OrderedDict()  # least recently used first
        self._numbers = itertools.count(1)
        self.n_bytes = 0
        self.lookups = 0
        self.hits = 0
        self.tokens_reused = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, tokens: list[int], session: str) -> tuple[KVCache, int] | None:
        """The cache that holds the longest kept prefix of ``tokens`` in whole blocks, and its length in tokens."""
        node: _Node | None = None
        for key_tokens in _blocks(tokens):
            following = self._nodes.get(_key(node, session, key_tokens))
            if following is None:
                break
            node = following
            self._nodes.move_to_end(node.key)
        self.lookups += 1
        if node is None:
            return None
        length = node.cache.length
        self.hits += 1
        self.tokens_reused += length
        return node.cache, length

    def missing(self, tokens: list[int], session: str) -> range:
        """Which whole blocks of ``tokens`` are not kept yet."""
        node: _Node | None = None
        total = len(tokens) // PREFILL_CHUNK
        for index, key_tokens in enumerate(_blocks(tokens)):
            following = self._nodes.get(_key(node, session, key_tokens))
            if following is None:
                return range(index, total)
            node = following
        return range(total, total)

    def put(self, tokens: list[int], session: str, caches: dict[int, KVCache], block_bytes: int) -> None:
        """Keep blocks of ``tokens``: ``caches`` holds, by the index of a block, a fork that ends with it.

        Blocks that are there already stay; a block whose parent is neither there nor given is left out.
        """
        node: _Node | None = None
        for index, key_tokens in enumerate(_blocks(tokens)):
            key = _key(node, session, key_tokens)
            following = self._nodes.get(key)
            if following is None:
                if index not in caches:
                    return
                following = _Node(key, caches[index], block_bytes, parent=node, number=next(self._numbers))
                self._nodes[key] = following
                self.n_bytes += block_bytes
                if node is not None:
                    node.children += 1
            self._nodes.move_to_end(key)
            node = following

    def drop(self, n_bytes: int) -> None:
        """Forget least recently used leaves until at least ``n_bytes`` are free, or nothing is left."""
        while n_bytes > 0 and self._nodes:
            # A node was used no later than its children, so the first without any is the first that may go.
            node = next(node for node in self._nodes.values() if not node.children)
            del self._nodes[node.key]
            if node.parent is not None:
                node.parent.children -= 1
            self.n_bytes -= node.n_bytes
            n_bytes -= node.n_bytes


def _blocks(tokens: list[int]) -> list[bytes]:
    whole = len(tokens) // PREFILL_CHUNK * PREFILL_CHUNK
    ids = np.asarray(tokens[:whole], dtype=np.int32).reshape(-1, PREFILL_CHUNK)
    return [row.tobytes() for row in ids]


def _key(parent: _Node | None, session: str, tokens: bytes) -> _Key:
    return (session if parent is None else parent.number, tokens)
