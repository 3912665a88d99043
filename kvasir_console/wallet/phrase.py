"""Recovery phrases (BIP39, English): made, read as people type them, and turned into a seed.

A refusal never repeats a word of the phrase: even a misspelt one tells most of the right one, and errors end up in
logs. It names the place instead.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from functools import cache
from typing import Literal

from mnemonic import Mnemonic

from kvasir_console.errors import UsageError, WalletError

LENGTHS = (12, 15, 18, 21, 24)
"""Word counts BIP39 knows. New phrases have 12 or 24; the others are read."""

Reason = Literal["checksum", "word", "length"]

_NUMBERING = re.compile(r"\d+[.):]?")


def generate(words: int = 24) -> str:
    """A fresh phrase of 12 words (128 bits) or 24 words (256 bits). Raises ``UsageError`` for other counts."""
    if words not in (12, 24):
        raise UsageError("phrase_words", f"A new recovery phrase has 12 or 24 words, not {words}.")
    phrase: str = _bip39().to_mnemonic(secrets.token_bytes(words * 4 // 3))
    return phrase


def normalise(text: str) -> str:
    """The phrase BIP39 hashes: NFKD, lower case, single spaces. Says nothing about whether it is valid."""
    return " ".join(unicodedata.normalize("NFKD", text).lower().split())


def check(text: str) -> str:
    """The canonical form of a phrase as somebody typed or pasted it.

    Raises:
        WalletError: ``phrase_length``, ``phrase_word`` or ``phrase_checksum``.
    """
    phrase = normalise(text)
    words = phrase.split()
    for place, word in enumerate(words, 1):
        # Invisible characters come with text copied from web pages. Dropping or splitting at them would be a guess.
        if any(unicodedata.category(letter) in ("Cf", "Cc") for letter in word):
            raise _refusal("word", f"Word {place} holds an invisible character.", "Type that word by hand.")
    if any(_NUMBERING.fullmatch(word) for word in words):
        raise _refusal("length", "The phrase holds numbers between its words.", "Leave the numbering out.")
    if len(words) not in LENGTHS:
        raise _refusal("length", f"A recovery phrase has 12 or 24 words; this one has {len(words)}.", "Count again.")
    for place, word in enumerate(words, 1):
        if word not in _vocabulary():
            raise _refusal(
                "word",
                f"Word {place} is not in the BIP39 English word list.",
                "Check its spelling; abbreviations are not accepted.",
            )
    if not _bip39().check(phrase):
        raise _refusal(
            "checksum",
            "The words are all known, but their checksum is wrong.",
            "One word is wrong, or two have changed places.",
        )
    return phrase


def seed(phrase: str, passphrase: str = "") -> bytes:
    """The 64-byte BIP39 seed of a phrase (PBKDF2-HMAC-SHA512, 2048 rounds). Raises ``WalletError`` as ``check``.

    Args:
        phrase: in any spelling ``check`` accepts.
        passphrase: BIP39's extra word; Kvasir wallets have none. It is not the vault's passphrase.
    """
    return bytes(Mnemonic.to_seed(check(phrase), passphrase))


def _refusal(reason: Reason, message: str, hint: str) -> WalletError:
    return WalletError(f"phrase_{reason}", message, hint)


@cache
def _bip39() -> Mnemonic:
    return Mnemonic("english")


@cache
def _vocabulary() -> frozenset[str]:
    return frozenset(_bip39().wordlist)
