"""Text to token ids and back, from a GGUF file's metadata alone.

Special tokens are cut out of the text first; what lies between goes through byte-pair merges (``gpt2`` vocabularies, by
the ``tokenizers`` library) or scored merges (``llama`` vocabularies, ``spm``). Ids agree with llama.cpp's, but for two
choices: a prompt that already begins with the beginning-of-sequence token does not get a second one, and no
end-of-sequence token is ever appended.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import tokenizers
from tokenizers.models import BPE

from kvasir_console.engine.pretokenize import PRE_TOKENIZATIONS
from kvasir_console.engine.spm import WORD_START, ScoredMerges
from kvasir_console.engine.vocab import TokenType, Vocabulary, bad_tokenizer
from kvasir_console.errors import ModelError, RequestError

__all__ = ["MAX_TEXT_CHARS", "TextStream", "Tokenizer"]

MAX_TEXT_CHARS = 1_000_000
"""Longest text that is tokenized; the worst text of this length takes a few seconds."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Words(Protocol):
    """Text without special tokens to ids."""

    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """The tokenizer of one checkpoint; immutable, and safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        pre_add_bos, self._words = _words(vocabulary)
        self._scored = vocabulary.model == "llama"
        self._space_prefix = self._scored and vocabulary.add_space_prefix is not False
        self._add_bos = pre_add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        if self._add_bos and vocabulary.bos_id is None:
            raise bad_tokenizer("bos_token_id", "is absent, and prompts of this model begin with it")
        always, parsed = _special_texts(vocabulary)
        self._always, self._parsed = _Cutter(always), _Cutter(parsed)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from a checkpoint's metadata (the keys ``tokenizer.ggml.*``).

        Raises:
            ModelError: ``bad_tokenizer`` names the key that is damaged; ``unsupported_tokenizer`` names the model or
                pre-tokenization that this engine does not know.
        """
        return cls(Vocabulary.read(metadata))

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence token, if there is one."""
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return self._vocabulary.eos_ids

    def token_id(self, text: str) -> int | None:
        """The token with exactly this text, as it stands in the file."""
        return self._vocabulary.ids.get(text)

    def token_text(self, token: int) -> str:
        """A token as it stands in the file (``<|im_end|>``, ``Ġworld``)."""
        return self._vocabulary.tokens[self._checked(token)]

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any text; a surrogate without its partner counts as U+FFFD.
            add_bos: begin with the beginning-of-sequence token; by default as the model wants it.
            parse_special: read control tokens written in the text (``<|im_start|>``) as those tokens. Text that a chat
                template rendered needs it; text that must stay text does not.

        Raises:
            RequestError: ``text_too_long``; or ``no_bos`` when a model without such a token is told to add it.
        """
        if len(text) > MAX_TEXT_CHARS:
            raise RequestError(
                "text_too_long",
                f"the text has {len(text)} characters; at most {MAX_TEXT_CHARS} are tokenized.",
                "Send less text.",
            )
        bos = self.bos_id
        if add_bos and bos is None:
            raise RequestError("no_bos", "this model has no beginning-of-sequence token.", "Leave add_bos out.")
        ids: list[int] = []
        cutter = self._parsed if parse_special else self._always
        after_special = True
        for piece in cutter.cut(_well_formed(text)):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
            else:
                ids.extend(self._words.encode(" " + piece if self._space_prefix and after_special else piece))
                after_special = False
        if bos is not None and (self._add_bos if add_bos is None else add_bos) and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ``ids``: their bytes joined and read as UTF-8, with U+FFFD for what is not UTF-8.

        A space that a ``llama`` vocabulary put before the first word is text like any other and stays.

        Raises:
            RequestError: ``bad_token`` for an id outside the vocabulary.
        """
        return b"".join(self.piece(i, skip_special=skip_special) for i in ids).decode("utf-8", "replace")

    def piece(self, token: int, *, skip_special: bool = False) -> bytes:
        """The bytes one token stands for; they may be part of a character. Unused tokens stand for nothing."""
        text = self._vocabulary.tokens[self._checked(token)]
        kind = self._vocabulary.types[token]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return b"" if skip_special else text.encode()
        if kind == TokenType.USER_DEFINED:
            return text.encode()
        if kind == TokenType.BYTE and (match := _BYTE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if kind != TokenType.NORMAL:
            return b""
        if self._scored:
            return text.replace(WORD_START, " ").encode()
        return b"".join(_BYTE_OF_CHAR.get(char) or char.encode() for char in text)

    def stream(self, *, skip_special: bool = False) -> TextStream:
        """A decoder for one sequence of tokens as they come."""
        return TextStream(self, skip_special=skip_special)

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise RequestError(
                "bad_token", f"{token} is not a token: this model has {self.n_vocab}.", "Send ids of this model."
            )
        return token


class TextStream:
    """Tokens to text, one at a time: whole characters only, and all the pieces join to ``decode`` of all the ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        return self._decoder.decode(self._tokenizer.piece(token, skip_special=self._skip_special))

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", True)


class _Cutter:
    """Finds special tokens in text: the leftmost, and of those that begin there the longest."""

    def __init__(self, texts: Mapping[str, int]) -> None:
        self._texts = dict(texts)
        lengths: dict[str, set[int]] = {}
        for text in texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(re.escape(first) for first in self._lengths)
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def cut(self, text: str) -> Iterator[str | int]:
        """Non-empty stretches of text, and ids of special tokens, in order."""
        begin = at = 0
        while self._first and (found := self._first.search(text, at)):
            at = found.start()
            token, length = self._token_at(text, at)
            if token is None:
                at += 1
                continue
            if begin < at:
                yield text[begin:at]
            yield token
            begin = at = at + length
        if begin < len(text):
            yield text[begin:]

    def _token_at(self, text: str, at: int) -> tuple[int | None, int]:
        for length in self._lengths[text[at]]:
            token = self._texts.get(text[at : at + length])
            if token is not None:
                return token, length
        return None, 0


def _special_texts(vocabulary: Vocabulary) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens cut out of any text (user-defined ones), and those plus what only trusted text may spell."""
    always: dict[str, int] = {}
    parsed: dict[str, int] = {}
    for token, kind in enumerate(vocabulary.types):
        if kind == TokenType.USER_DEFINED:
            always[vocabulary.tokens[token]] = token
        if kind in (TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN):
            parsed[vocabulary.tokens[token]] = token
    return always, parsed


def _words(vocabulary: Vocabulary) -> tuple[bool, _Words]:
    """Does the model begin with its first token by default, and its way from text to ids."""
    if vocabulary.model == "llama":
        return True, ScoredMerges(vocabulary)
    if vocabulary.model != "gpt2":
        raise _unsupported("model", vocabulary.model, ("gpt2", "llama"))
    pre = PRE_TOKENIZATIONS.get(vocabulary.pre)
    if pre is None:
        raise _unsupported("pre", vocabulary.pre, tuple(name for name in PRE_TOKENIZATIONS if name))
    if not vocabulary.merges:
        raise bad_tokenizer("merges", "is absent, and a vocabulary of this model is nothing without it")
    return pre.add_bos, _BytePairs(vocabulary, pre.whole_words, pre.build())


class _BytePairs:
    """Byte-level byte-pair encoding by the ``tokenizers`` library."""

    def __init__(self, vocabulary: Vocabulary, whole_words: bool, pre: tokenizers.pre_tokenizers.PreTokenizer) -> None:
        try:
            model = BPE(vocabulary.ids, list(vocabulary.merges), ignore_merges=whole_words)
        except Exception as error:  # the library raises bare Exception
            raise bad_tokenizer("merges", f"does not fit the tokens ({ascii(str(error))[:200]})") from error
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _unsupported(key: str, value: str, known: tuple[str, ...]) -> ModelError:
    return ModelError(
        "unsupported_tokenizer",
        f"tokenizer.ggml.{key} is {value[:60]!a}, which this engine does not know.",
        f"Use a model with one of: {', '.join(known)}.",
    )


def _well_formed(text: str) -> str:
    """Text that UTF-8 can hold: surrogate pairs joined, single surrogates replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _byte_characters() -> dict[str, bytes]:
    """GPT-2's printable stand-in of every byte, the other way round (Radford et al. 2019).

    Bytes that print in Latin-1 stand for themselves; the others, in order, are U+0100 and up.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(b): bytes([b]) for b in plain} | {chr(0x100 + n): bytes([b]) for n, b in enumerate(moved)}


_BYTE_OF_CHAR = _byte_characters()
