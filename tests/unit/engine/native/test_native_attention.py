"""Attention over cache blocks against softmax in double precision, for every kind of cache."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvasir_console.engine.native import Batch, Library
from kvasir_console.engine.native.attention import attend, keys_in_order, write_kv
from kvasir_console.errors import EngineError

KINDS = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
# query heads, key-value heads, head size, window
SHAPES = [(9, 3, 64, None), (4, 1, 256, 100), (6, 6, 96, 7), (4, 2, 32, 1)]
LAYERS, LAYER = 2, 1


@dataclass
class Sequence:
    """One cache, and what was written to it."""

    kind: torch.dtype
    J: int
    h: int
    blocks: list[Tensor]
    scales: list[Tensor]

    @classmethod
    def empty(cls, kind: torch.dtype, J: int, h: int, capacity: int, fill: float = 0.0) -> Sequence:
        count = -(-capacity // 256)
        shape = (LAYERS, 2, J, 256)
        scales = []
        if kind == torch.int8:
            scales = [torch.full((*shape, h // 32), fill, dtype=torch.float16) for _ in range(count)]
            blocks = [torch.zeros(*shape, h, dtype=kind) for _ in range(count)]
        else:
            blocks = [torch.full((*shape, h), fill, dtype=kind) for _ in range(count)]
        return cls(kind, J, h, blocks, scales)

    def span(self, position: int, rows: int) -> tuple[int, int, list[Tensor], list[Tensor]]:
        return position, rows, self.blocks, self.scales

    def batch(self, position: int, rows: int) -> Batch:
        return Batch([self.span(position, rows)], n_layer=LAYERS, n_head_kv=self.J, head_dim=self.h)

    def stored(self, part: int, rows: int) -> Tensor:
        """Keys (part 0) or values (1) of LAYER by position: (rows, J, h) f32."""

        def by_position(tensor: Tensor) -> Tensor:
            return keys_in_order(tensor[LAYER, part]) if part == 0 else tensor[LAYER, part]

        values = torch.cat([by_position(block).float() for block in self.blocks], dim=1)
        if self.scales:
            scales = torch.cat([by_position(block).float() for block in self.scales], dim=1)
            values = (values.unflatten(-1, (-1, 32)) * scales.unsqueeze(-1)).flatten(-2)
        return values[:, :rows].transpose(0, 1)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _exact(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """(T, H, h) rows from position 0 on, f64."""
    T, H, _ = q.shape
    G = H // keys.shape[1]
    keys, values = (part.double().repeat_interleave(G, dim=1) for part in (keys, values))
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * scale
    rows, columns = torch.arange(T).unsqueeze(1), torch.arange(T)
    hidden = (columns > rows) | (columns <= rows - (window or T))
    mixed = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)
    return mixed.reshape(T, -1)


def _rounded(kv: Tensor, kind: torch.dtype) -> Tensor:
    """What a cache of ``kind`` keeps of f32 values: (T, J, h)."""
    if kind != torch.int8:
        return kv.to(kind).float()
    groups = kv.unflatten(-1, (-1, 32))
    step = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((groups / step.where(step > 0, 1)).round().clamp(-127, 127) * step).flatten(-2)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_keys_and_values_are_kept_rounded_once(library, kind):
    sequence = Sequence.empty(kind, 3, 64, 300)
    kv = _random(300, 2, 3, 64) * torch.logspace(-6, 3, 300).view(-1, 1, 1, 1)
    kv[7], kv[8, :, :, 32:] = 0, 0
    for begin, end in ((0, 1), (1, 250), (250, 300)):
        write_kv(library, sequence.batch(begin, end - begin), LAYER, kv[begin:end])
    for part in (0, 1):
        assert torch.equal(sequence.stored(part, 300), _rounded(kv[:, part], kind))
    assert not any(bool(block[0].any()) for block in sequence.blocks)  # the other layer


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("H", "J", "h", "window"), SHAPES)
def test_attention_is_exact_within_rounding_and_the_same_in_any_company(library: Library, kind, H, J, h, window):
    T, scale = 400, h**-0.5
    # Where nothing was written lies NaN, which must not be seen.
    sequence = Sequence.empty(kind, J, h, T, fill=math.nan)
    q, kv = _random(T, H, h, seed=1), _random(T, 2, J, h, seed=2)
    write_kv(library, sequence.batch(0, 290), LAYER, kv[:290])

    def rows(position: int, count: int) -> Tensor:
        part = q[position : position + count]
        return attend(library, sequence.batch(position, count), LAYER, part, scale=scale, window=window)

    early = rows(0, 290)
    write_kv(library, sequence.batch(290, 110), LAYER, kv[290:])
    whole = rows(0, T)
    exact = _exact(q, sequence.stored(0, T), sequence.stored(1, T), scale, window)
    assert (whole.double() - exact).abs().max() < 1e-5
    assert torch.equal(early, whole[:290])
    for position in (0, 1, 15, 16, 31, 32, 99, 100, 255, 256, 399):
        assert torch.equal(rows(position, 1), whole[position : position + 1])
    cuts = (0, 2, 9, 100, 255, 256, 257, 399, 400)
    assert torch.equal(torch.cat([rows(a, b - a) for a, b in itertools.pairwise(cuts)]), whole)
    try:
        library.set_threads(1)
        assert torch.equal(rows(0, T), whole)
    finally:
        library.set_threads(2)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_of_several_sequences_go_together(library, kind):
    J, h, H = 2, 32, 4
    lengths = ((0, 5), (300, 1), (40, 0), (250, 20))
    sequences = [Sequence.empty(kind, J, h, 600) for _ in lengths]
    alone, spans, queries, rows = [], [], [], []
    for index, (sequence, (position, count)) in enumerate(zip(sequences, lengths, strict=True)):
        past, q, kv = (_random(n, 2 * J, h, seed=10 * index + n) for n in (position, count, count))
        write_kv(library, sequence.batch(0, position), LAYER, past.unflatten(1, (2, J)))
        twin = Sequence(kind, J, h, [b.clone() for b in sequence.blocks], [s.clone() for s in sequence.scales])
        write_kv(library, twin.batch(position, count), LAYER, kv.unflatten(1, (2, J)))
        alone.append(attend(library, twin.batch(position, count), LAYER, q, scale=0.25))
        spans.append(sequence.span(position, count))
        queries.append(q)
        rows.append(kv)
    batch = Batch(spans, n_layer=LAYERS, n_head_kv=J, head_dim=h)
    write_kv(library, batch, LAYER, torch.cat(rows).unflatten(1, (2, J)))
    together = attend(library, batch, LAYER, torch.cat(queries), scale=0.25)
    assert together.shape == (26, H * h)
    assert torch.equal(together, torch.cat(alone))


def test_a_value_that_is_no_number_touches_no_earlier_row(library):
    sequence = Sequence.empty(torch.float32, 1, 16, 64)
    kv, q = _random(40, 2, 1, 16), _random(40, 1, 16)
    write_kv(library, sequence.batch(0, 40), LAYER, kv)
    clean = attend(library, sequence.batch(0, 40), LAYER, q, scale=1.0)
    kv[30] = math.nan
    write_kv(library, sequence.batch(0, 40), LAYER, kv)
    for row in (0, 15, 29):
        assert torch.equal(
            attend(library, sequence.batch(row, 1), LAYER, q[row : row + 1], scale=1.0), clean[row : row + 1]
        )
    assert bool(attend(library, sequence.batch(30, 1), LAYER, q[30:31], scale=1.0).isnan().all())


def test_caches_that_do_not_fit_are_refused(library):
    good = Sequence.empty(torch.float32, 2, 32, 256)
    wide = Sequence.empty(torch.float32, 2, 64, 256)
    with pytest.raises(EngineError):
        good.batch(250, 7)
    with pytest.raises(EngineError):
        good.batch(-1, 1)
    with pytest.raises(EngineError):
        Batch([wide.span(0, 1)], n_layer=LAYERS, n_head_kv=2, head_dim=32)
    with pytest.raises(EngineError):
        Batch([(0, 1, [good.blocks[0].transpose(-1, -2)], [])], n_layer=LAYERS, n_head_kv=2, head_dim=256)
    with pytest.raises(EngineError):
        Batch([(0, 1, [good.blocks[0].double()], [])], n_layer=LAYERS, n_head_kv=2, head_dim=32)
    with pytest.raises(EngineError):  # q8_0 without its scales
        Batch(
            [(0, 1, [torch.zeros(LAYERS, 2, 2, 256, 32, dtype=torch.int8)], [])],
            n_layer=LAYERS,
            n_head_kv=2,
            head_dim=32,
        )
    with pytest.raises(EngineError):
        Sequence.empty(torch.float32, 1, 24, 1).batch(0, 1)
    batch = good.batch(0, 3)
    for q in (_random(2, 4, 32), _random(3, 5, 32), _random(3, 4, 16), _random(3, 32, 4).transpose(1, 2)):
        with pytest.raises(EngineError):
            attend(library, batch, LAYER, q, scale=1.0)
    with pytest.raises(EngineError):
        attend(library, batch, LAYERS, _random(3, 4, 32), scale=1.0)
    with pytest.raises(EngineError):
        write_kv(library, batch, LAYER, _random(3, 2, 1, 32))
