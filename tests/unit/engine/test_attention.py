"""Attention over paged caches against float64 attention over whole sequences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from kvasir_console.engine import attention
from kvasir_console.engine.attention import Attention
from kvasir_console.engine.kvcache import KVCache, KVLayout, Span

H, J, h = 6, 2, 8
SCALE = 0.3
CPU = torch.device("cpu")


def exact(q: np.ndarray, kv: np.ndarray, position: int, window: int | None) -> np.ndarray:
    """Row by row and head by head."""
    out = np.zeros((len(q), H, h))
    for row in range(len(q)):
        end = position + row + 1
        begin = 0 if window is None else max(0, end - window)
        for head in range(H):
            keys, values = kv[begin:end, 0, head // (H // J)], kv[begin:end, 1, head // (H // J)]
            scores = np.exp(SCALE * keys @ q[row, head])
            out[row, head] = scores @ values / scores.sum()
    return out.reshape(len(q), H * h)


def sequence(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, H, h, generator=generator), torch.randn(length, 2, J, h, generator=generator)


def attend(cache: KVCache, q: torch.Tensor, kv: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """The next rows of one sequence."""
    span = Span(cache, cache.length, len(q))
    cache.reserve(cache.length, len(q))
    mixed = Attention([span], H, SCALE, CPU, window=window)(0, q, kv)
    cache.commit(len(q))
    return mixed


@pytest.mark.parametrize("window", [None, 1, 5, 256, 300])
def test_rows_see_what_came_before_them(window):
    q, kv = sequence(600, 1)
    cache = KVCache(KVLayout(1, J, h), 600)
    cuts = [0, 3, 250, 255, 256, 257, 520, 600]
    got = torch.cat([attend(cache, q[a:b], kv[a:b], window) for a, b in pairwise(cuts)])
    wanted = exact(q.double().numpy(), kv.double().numpy(), 0, window)
    assert np.abs(got.numpy() - wanted).max() < 2e-6


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("scores", [None, 1], ids=["heads together", "heads one by one"])
def test_company_and_cuts_change_no_bit(window, scores, monkeypatch):
    lengths, counts = [0, 200, 255, 511], [300, 1, 2, 7]
    sequences = [sequence(a + b, seed) for seed, (a, b) in enumerate(zip(lengths, counts, strict=True))]
    alone, spans = [], []
    for (q, kv), length, count in zip(sequences, lengths, counts, strict=True):
        cache, twin = (KVCache(KVLayout(1, J, h), 600) for _ in range(2))
        for each in (cache, twin) if length else ():
            attend(each, q[:length], kv[:length], window)
        alone.append(
            torch.cat([attend(twin, q[i : i + 1], kv[i : i + 1], window) for i in range(length, length + count)])
        )
        spans.append(Span(cache, length, count))
        cache.reserve(length, count)
    if scores is not None:
        monkeypatch.setattr(attention, "_SCORES", scores)
    q, kv = (torch.cat([each[i][-span.rows :] for each, span in zip(sequences, spans, strict=True)]) for i in (0, 1))
    together = Attention(spans, H, SCALE, CPU, window=window)(0, q, kv)
    assert torch.equal(together, torch.cat(alone))


def test_a_window_does_not_touch_blocks_it_cannot_see():
    q, kv = sequence(700, 3)
    cache = KVCache(KVLayout(1, J, h), 700)
    attend(cache, q[:690], kv[:690])
    cache.blocks[0].values.fill_(float("nan"))
    assert torch.isfinite(attend(cache, q[690:], kv[690:], 200)).all()
    assert not torch.isfinite(attend(cache.fork(690, 700), q[690:], kv[690:])).any()
