"""What a GGUF file says about its vocabulary, checked before anything is built from it.

Keys are those of the GGUF specification (``tokenizer.ggml.*``). The file is hostile until checked: every list has the
type, length and range it must have, or a ``ModelError`` names the key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from kvasir_console.errors import ModelError

MAX_TOKENS = 1 << 20
"""Largest vocabulary accepted; the largest in use have about 300,000 tokens."""
MAX_MERGES = 1 << 21
MAX_TOKEN_CHARS = 4096

_PREFIX = "tokenizer.ggml."

END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)
"""Texts of tokens that end a turn in the model families that have them; files seldom list more than one by id."""


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checked vocabulary. Token ids are indices into ``tokens``; all texts differ."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: bytes
    """A ``TokenType`` per token."""
    ids: dict[str, int]
    scores: tuple[float, ...]
    """SentencePiece scores, higher merges first; empty when the file has none."""
    merges: tuple[tuple[str, str], ...]
    """Byte-pair merges, first merged first; empty when the file has none."""
    bos_id: int | None
    unknown_id: int | None
    eos_ids: frozenset[int]
    """Every token that ends a generation."""
    add_bos: bool | None
    """Does a prompt begin with ``bos_id``; None when the file does not say."""
    add_space_prefix: bool | None

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read and check the tokenizer keys of a checkpoint's metadata.

        Raises:
            ModelError: ``bad_tokenizer``, naming the key that is absent, of the wrong type or out of range.
        """
        model = _text(metadata, "model", required=True)
        tokens = _tokens(metadata)
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(t for i, t in enumerate(tokens) if ids[t] != i)
            raise bad_tokenizer("tokens", f"holds {_shown(twice)} more than once")
        types = bytearray(_types(metadata, len(tokens)))
        bos, unknown = (_token_id(metadata, key, len(tokens)) for key in ("bos_token_id", "unknown_token_id"))
        ends = {_token_id(metadata, key, len(tokens)) for key in ("eos_token_id", "eot_token_id", "eom_token_id")}
        ends |= {ids[text] for text in END_OF_TURN if text in ids}
        if {"<|return|>", "<|call|>"} <= ids.keys():
            ends.discard(ids.get("<|end|>"))  # in the harmony format it ends a channel's message, not the turn
        for text in END_OF_TURN:
            if text in ids:
                types[ids[text]] = TokenType.CONTROL  # some files call them normal text, which would split them
        return cls(
            model=model,
            pre=_text(metadata, "pre"),
            tokens=tokens,
            types=bytes(types),
            ids=ids,
            scores=_scores(metadata, len(tokens)),
            merges=_merges(metadata),
            bos_id=bos,
            unknown_id=unknown,
            eos_ids=frozenset(end for end in ends if end is not None),
            add_bos=_flag(metadata, "add_bos_token"),
            add_space_prefix=_flag(metadata, "add_space_prefix"),
        )


def bad_tokenizer(key: str, what: str) -> ModelError:
    """The refusal of a vocabulary, naming the key (without its prefix) at fault."""
    return ModelError(
        "bad_tokenizer",
        f"the tokenizer of this file cannot be used: {_PREFIX}{key} {what}.",
        "Fetch the file again, or convert it again with a current converter.",
    )


def _shown(text: str) -> str:
    """A token's text for a message: no control characters, not longer than a line."""
    return ascii(text[:40])


def _text(metadata: Mapping[str, Any], key: str, *, required: bool = False) -> str:
    value = metadata.get(_PREFIX + key)
    if value is None and not required:
        return ""
    if value is None:
        raise bad_tokenizer(key, "is absent")
    if not isinstance(value, str):
        raise bad_tokenizer(key, "is not text")
    return value


def _flag(metadata: Mapping[str, Any], key: str) -> bool | None:
    value = metadata.get(_PREFIX + key)
    if value is not None and not isinstance(value, bool):
        raise bad_tokenizer(key, "is not true or false")
    return value


def _token_id(metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < n_tokens:
        raise bad_tokenizer(key, f"is not a token id below {n_tokens}")
    return value


def _list(metadata: Mapping[str, Any], key: str, limit: int) -> list[Any] | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad_tokenizer(key, "is not a list")
    if len(value) > limit:
        raise bad_tokenizer(key, f"has {len(value)} entries; at most {limit} are accepted")
    return value


def _tokens(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    value = _list(metadata, "tokens", MAX_TOKENS)
    if not value:
        raise bad_tokenizer("tokens", "is absent or empty")
    for i, token in enumerate(value):
        if not isinstance(token, str):
            raise bad_tokenizer("tokens", f"holds something that is not text at {i}")
        if len(token) > MAX_TOKEN_CHARS:
            raise bad_tokenizer("tokens", f"holds a token of {len(token)} characters at {i}")
    # an empty text could not be told from nothing; llama.cpp gives such tokens this name
    return tuple(token or f"[EMPTY_{i}]" for i, token in enumerate(value))


def _types(metadata: Mapping[str, Any], n_tokens: int) -> bytes:
    value = _list(metadata, "token_type", MAX_TOKENS)
    if value is None:
        return bytes([TokenType.NORMAL]) * n_tokens
    if len(value) != n_tokens:
        raise bad_tokenizer("token_type", f"has {len(value)} entries for {n_tokens} tokens")
    try:
        types = bytes(value)
    except (TypeError, ValueError):
        raise bad_tokenizer("token_type", "holds something that is not a token type") from None
    if max(types) > max(TokenType):
        raise bad_tokenizer("token_type", f"holds the unknown type {max(types)}")
    return types


def _scores(metadata: Mapping[str, Any], n_tokens: int) -> tuple[float, ...]:
    value = _list(metadata, "scores", MAX_TOKENS)
    if value is None:
        return ()
    if len(value) != n_tokens:
        raise bad_tokenizer("scores", f"has {len(value)} entries for {n_tokens} tokens")
    if not all(isinstance(score, int | float) and math.isfinite(score) for score in value):
        raise bad_tokenizer("scores", "holds something that is not a finite number")
    return tuple(value)


def _merges(metadata: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    value = _list(metadata, "merges", MAX_MERGES)
    if value is None:
        return ()
    pairs: dict[tuple[str, str], None] = {}
    for i, merge in enumerate(value):
        if not isinstance(merge, str) or len(merge) > 2 * MAX_TOKEN_CHARS:
            raise bad_tokenizer("merges", f"holds something that is not a pair of tokens at {i}")
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise bad_tokenizer("merges", f"holds {_shown(merge)} at {i}, which is not two tokens")
        pairs[left, right] = None  # of a pair that is there twice, the first place counts
    return tuple(pairs)
