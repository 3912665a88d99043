"""Base58 of any length, bounded, for the fields Solana's JSON writes that way (instruction data, small accounts).

Hand-written: the Solana bindings know only 32 and 64 bytes. The time grows with the square of the length, hence the
bound.
"""

from __future__ import annotations

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES = {character: value for value, character in enumerate(_ALPHABET)}
MAX_BYTES = 10_240
"""The longest data of one instruction (a program calling another)."""
MAX_CHARACTERS = 1683
"""The longest transaction, 1232 bytes."""
MAX_STORED_CHARACTERS = 14_000
"""The longest text ``encode`` gives."""


def encode(data: bytes) -> str:
    """Raises ``ValueError`` above ``MAX_BYTES``."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"base58 is for at most {MAX_BYTES} bytes")
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def decode(text: str, limit: int = MAX_CHARACTERS) -> bytes:
    """Raises ``ValueError`` for another alphabet or above ``limit`` characters."""
    if len(text) > limit:
        raise ValueError(f"base58 is for at most {limit} characters")
    number = 0
    for character in text:
        value = _VALUES.get(character)
        if value is None:
            raise ValueError("not base58")
        number = number * 58 + value
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
