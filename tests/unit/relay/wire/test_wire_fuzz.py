"""Every codec against 20,000 broken streams; ``make soak`` sends a million."""

from __future__ import annotations

import pytest

import codec_fuzz

TARGETS = codec_fuzz.targets()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_broken_streams_are_read_or_refused_within_bounds(target: codec_fuzz.Target) -> None:
    codec_fuzz.fuzz(target, 20_000 // len(TARGETS))
