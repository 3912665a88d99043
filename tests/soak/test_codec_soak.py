"""A million broken inputs against everything that reads what a peer sends."""

from __future__ import annotations

import pytest

import codec_fuzz

TARGETS = codec_fuzz.targets()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_million_broken_inputs(target: codec_fuzz.Target) -> None:
    report = codec_fuzz.fuzz(target, -(-1_000_000 // len(TARGETS)), seed=1)
    print(report.row())
    assert report.taken + report.refused == report.inputs
