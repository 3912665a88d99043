"""SentencePiece byte-pair encoding by scores (``tokenizer.ggml.model`` = ``llama``).

The pair whose joined text is the best-scored token is merged first, the leftmost among equals, until no pair is left;
a character that is no token becomes its UTF-8 bytes (Kudo and Richardson 2018, and the encoder that llama.cpp checks
models with). The ``tokenizers`` library has no such model: its BPE orders *pairs*, so two ways to build one token would
differ in rank where here they tie.
"""

from __future__ import annotations

import heapq

from kvasir_console.engine.vocab import TokenType, Vocabulary, bad_tokenizer

WORD_START = "▁"
"""U+2581, which stands for a space inside tokens."""

_NEVER_FROM_TEXT = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)


class ScoredMerges:
    """Text to token ids, for text that holds no special token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.scores:
            raise bad_tokenizer("scores", "is absent, and a vocabulary of this model is nothing without it")
        types = vocabulary.types
        self._ids = {text: i for text, i in vocabulary.ids.items() if types[i] not in _NEVER_FROM_TEXT}
        self._scores = vocabulary.scores
        self._longest = max(map(len, self._ids), default=0)
        self._byte_ids = _byte_ids(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, spaces as ``WORD_START``. Takes O(n log n) time whatever the text."""
        symbols = list(text.replace(" ", WORD_START))
        previous = list(range(-1, len(symbols) - 1))
        following = [*range(1, len(symbols)), -1]
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            length = len(symbols[left]) + len(symbols[right])
            if length > self._longest:
                return
            token = self._ids.get(symbols[left] + symbols[right])
            if token is not None:
                heapq.heappush(queue, (-self._scores[token], left, right, length))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            # an absorbed symbol is empty and a merged one is longer, so a stale entry never has its length
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after = following[right]
            following[left] = after
            if after >= 0:
                previous[after] = left
                offer(left, after)
            if previous[left] >= 0:
                offer(previous[left], left)

        ids: list[int] = []
        for symbol in symbols:
            if not symbol:
                continue
            token = self._ids.get(symbol)
            if token is not None:
                ids.append(token)
            else:
                ids.extend(self._byte_ids[byte] for byte in symbol.encode())
        return ids


def _byte_ids(vocabulary: Vocabulary) -> list[int]:
    """The token of each byte, or the unknown token for bytes that have none."""
    found = []
    for byte in range(256):
        token = vocabulary.ids.get(f"<0x{byte:02X}>", vocabulary.unknown_id)
        if token is None:
            raise bad_tokenizer("tokens", f"has neither a token for the byte 0x{byte:02X} nor an unknown token")
        found.append(token)
    return found
