"""``bench experts`` on a tiny model: real processes, TLS and a link with a round trip; every field, no speed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvasir_console.bench import experts

import builders

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]


async def test_every_field_is_measured_over_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = builders.write_tiny_llama(
        tmp_path / "moe.gguf", n_layer=3, n_expert=4, n_expert_used=2, context_length=2048, seed=6
    )
    for name, value in (("FILES", 2), ("STREAM_TOKENS", 12), ("SINGLE_TOKENS", 12), ("CONTINUED_TOKENS", 24)):
        monkeypatch.setattr(experts, name, value)
    options = experts.Options(model, pairs=1, rtt_ms=2.0, draft_rtt_ms=4.0, streams=4, layers_remote=2, threads=1)
    said: list[str] = []
    report = await experts.run(options, said.append)
    assert report["layers_remote"] == [0, 2]
    assert report["batch512_over_batch1"] > 1
    assert report["batch512_over_batch1_rtt0"] > 1
    assert math.isfinite(report["single_stream_added_ms"])  # a difference of two times: a busy machine hides it
    assert report["aggregate_loss"] < 1
    assert report["aggregate_remote_share"] > 0
    assert report["tokens_per_round_trip"] >= 1
    assert set(report["bars"]) == {
        "batch512_over_batch1",
        "single_stream_added_ms",
        "aggregate_loss",
        "tokens_per_round_trip",
    }
    assert report["router"]["mismatches"] == 0
    assert len(experts.describe(report).splitlines()) == 6


def test_the_files_to_continue_are_drawn_by_the_seed(tmp_path: Path) -> None:
    from kvasir_console.engine.checkpoint.gguf import Checkpoint
    from kvasir_console.engine.tokens import Tokenizer

    path = builders.write_tiny_llama(tmp_path / "t.gguf", n_layer=1)
    with Checkpoint.open(path) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    first, again, other = (experts.python_files(tokenizer, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert all(len(tokens) == experts.FILE_TOKENS for tokens in first)
