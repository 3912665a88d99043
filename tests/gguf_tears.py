"""Bytes of a GGUF torn without regard to what they say. Seeded."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from gguf_statements import HUGE, SIZES

Tear = Callable[[random.Random, bytearray, list[int], bytes], str]


def _place(rng: random.Random, data: bytearray, sections: list[int]) -> int:
    """Somewhere: mostly in the header, where bytes mean something."""
    end = min(len(data), sections[-1]) if rng.random() < 0.85 else len(data)
    return rng.randrange(max(1, end))


def _flip(rng: random.Random, data: bytearray, sections: list[int], _: bytes) -> str:
    places = [_place(rng, data, sections) for _ in range(rng.choice((1, 1, 2, 8, 64)))]
    for at in places:
        if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return f"bits flipped at {places[:4]}"


def _word(rng: random.Random, data: bytearray, sections: list[int], _: bytes) -> str:
    at = _place(rng, data, sections)
    form = rng.choice(("<I", "<Q"))
    value = rng.choice((*SIZES, *HUGE)) & (2 ** (8 * struct.calcsize(form)) - 1)
    data[at : at + struct.calcsize(form)] = struct.pack(form, value)
    return f"{value} written at {at}"


def _run(rng: random.Random, data: bytearray, sections: list[int], _: bytes) -> str:
    at, count = _place(rng, data, sections), rng.choice((1, 4, 16, 256))
    data[at : at + count] = rng.choice((b"\0", b"\xff", b"A")) * count
    return f"{count} bytes overwritten at {at}"


def _cut(rng: random.Random, data: bytearray, sections: list[int], _: bytes) -> str:
    at = rng.choice((*sections, *(each - 1 for each in sections), len(data) - 1, _place(rng, data, sections)))
    del data[at:]
    return f"truncated at {at}"


def _splice(rng: random.Random, data: bytearray, sections: list[int], donor: bytes) -> str:
    at, count = _place(rng, data, sections), rng.choice((1, 8, 32, 1000))
    match rng.randrange(4):
        case 0:
            del data[at : at + count]
            return f"{count} bytes removed at {at}"
        case 1:
            data[at:at] = rng.randbytes(count)
            return f"{count} random bytes inserted at {at}"
        case 2:
            data[at:at] = data[at : at + count]
            return f"{count} bytes repeated at {at}"
        case _:
            data[at:] = donor[at:]
            return f"goes on as another file from {at}"


def _append(rng: random.Random, data: bytearray, _: list[int], donor: bytes) -> str:
    data += rng.choice((b"\0" * 5, donor, rng.randbytes(100)))
    return "more at the end"


TEARS: tuple[Tear, ...] = (_flip, _flip, _word, _word, _run, _cut, _splice, _splice, _append)
