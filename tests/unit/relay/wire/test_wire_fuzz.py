"""Everything that reads a peer's bytes against 20,000 broken inputs; ``make soak`` sends a million."""

from __future__ import annotations

import random

import pytest

import codec_fuzz

TARGETS = codec_fuzz.targets()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_broken_inputs_are_read_or_refused_within_bounds(target: codec_fuzz.Target) -> None:
    codec_fuzz.fuzz(target, -(-20_000 // len(TARGETS)))


def wrong(read: object) -> codec_fuzz.Target:
    return codec_fuzz.Target("wrong", (b"sound",), read)  # type: ignore[arg-type]


def test_a_reader_that_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_fuzz, "BOUND_S", 0.2)

    def crashes(pieces: list[bytes]) -> bool:
        return b"".join(pieces) == b"sound" or bool(1 // 0)

    def grows(pieces: list[bytes]) -> bool:
        return len(pieces) == 1 or len(bytearray(2**20)) > 0

    def hangs(pieces: list[bytes]) -> bool:
        while len(pieces) > 1:
            try:
                sum(range(1000))
            except Exception:
                raise AssertionError from None
        return True

    for read, what in ((crashes, "ZeroDivisionError"), (grows, "bytes for the"), (hangs, "HangError")):
        with pytest.raises(AssertionError, match=what):
            codec_fuzz.fuzz(wrong(read), 50)


def test_the_same_seed_gives_the_same_inputs() -> None:
    for target in TARGETS:
        one, other = (random.Random(5) for _ in range(2))
        assert [codec_fuzz.made(target, one) for _ in range(20)] == [codec_fuzz.made(target, other) for _ in range(20)]
