"""Whole layers against a plain network in double precision, for each kind of layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from native_blocks import random_rows, weights
from torch import Tensor

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.native import Batch, DecoderLayer, Dense, Layers, Library, Mixed, NativeExperts, NativeLinear
from kvasir_console.engine.native.experts import weighted_sum
from kvasir_console.engine.native.ops import route
from kvasir_console.errors import EngineError

D, H, J, h, WIDTH, E, USED, EPS = 64, 4, 2, 32, 96, 5, 2, 1e-5
T = 30


class Weights:
    """Matrices by name, packed, and as the f64 values they stand for."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.exact: dict[int, Tensor] = {}
        self._seed = 0

    def matrix(self, n_in: int, *heights: int, kind: GGMLType = GGMLType.Q8_0) -> NativeLinear:
        parts = []
        for height in heights:
            self._seed += 1
            parts.append((random_rows(kind, height, n_in, seed=self._seed, size=0.1), int(kind), height))
        linear = NativeLinear.pack(parts, n_in, self.library)
        self.exact[id(linear)] = torch.cat([weights(raw, kind).double() for raw, _, _ in parts])
        return linear

    def vector(self, *shape: int) -> Tensor:
        self._seed += 1
        return 1 + 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(self._seed))

    def product(self, x: Tensor, linear: NativeLinear) -> Tensor:
        return x @ self.exact[id(linear)].T


def _llama(w: Weights) -> DecoderLayer:
    return DecoderLayer(
        attn_norm=w.vector(D),
        qkv=w.matrix(D, H * h, J * h, J * h),
        attn_output=w.matrix(H * h, D),
        ffn_norm=w.vector(D),
        feed_forward=Dense(w.matrix(D, WIDTH, WIDTH), w.matrix(WIDTH, D)),
        n_head=H,
        attention_scale=h**-0.5,
        eps=EPS,
        rope_dim=h,
    )


def _qwen2(w: Weights) -> DecoderLayer:
    bias = w.vector((H + 2 * J) * h)
    return replace(_llama(w), qkv_bias=bias, attn_output_bias=w.vector(D), rope_halves=True, rope_dim=h // 2)


def _gemma3(w: Weights) -> DecoderLayer:
    layer = _llama(w)
    assert isinstance(layer.feed_forward, Dense)
    return replace(
        layer,
        feed_forward=replace(layer.feed_forward, activation="gelu"),
        qk_norm=w.vector(H + J, h),
        post_attention_norm=w.vector(D),
        post_ffn_norm=w.vector(D),
        rope_halves=True,
        rope_table=1,
        window=9,
    )


def _mixture(w: Weights) -> DecoderLayer:
    experts = NativeExperts(
        [w.matrix(D, WIDTH, WIDTH) for _ in range(E)], [w.matrix(WIDTH, D) for _ in range(E)], w.library
    )
    return replace(_llama(w), feed_forward=Mixed(w.matrix(D, E, kind=GGMLType.F32), experts, USED, scale=1.5))


KINDS = {"llama": _llama, "qwen2": _qwen2, "gemma3": _gemma3, "mixture": _mixture}


def _norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight.double(), EPS)


def _network(w: Weights, gate_up: NativeLinear, down: NativeLinear, activation: str, x: Tensor) -> Tensor:
    gate, up = w.product(x, gate_up).chunk(2, dim=-1)
    return w.product((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up, down)


def _exact_layer(w: Weights, layer: DecoderLayer, x: Tensor, tables: list[Tensor]) -> Tensor:
    """(T, D) f64 rows from position 0 on."""
    qkv = w.product(_norm(x, layer.attn_norm), layer.qkv)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias
    heads = qkv.view(-1, H + 2 * J, h)
    qk, values = heads[:, : H + J], heads[:, H + J :]
    if layer.qk_norm is not None:
        qk = F.rms_norm(qk, (h,), None, EPS) * layer.qk_norm
    turned, rest = qk[..., : layer.rope_dim], qk[..., layer.rope_dim :]
    turns = tables[layer.rope_table].to(torch.complex128).unsqueeze(1)
    if layer.rope_halves:
        pairs = torch.complex(*turned.chunk(2, dim=-1)) * turns
        turned = torch.cat((pairs.real, pairs.imag), dim=-1)
    else:
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * turns
        turned = torch.view_as_real(pairs).flatten(-2)
    qk = torch.cat((turned, rest), dim=-1)
    places = torch.arange(len(x))
    seen = places <= places.unsqueeze(1)
    if layer.window is not None:
        seen &= places > places.unsqueeze(1) - layer.window
    mixed = F.scaled_dot_product_attention(
        qk[:, :H].transpose(0, 1),
        qk[:, H:].transpose(0, 1).repeat_interleave(H // J, dim=0),
        values.transpose(0, 1).repeat_interleave(H // J, dim=0),
        attn_mask=seen,
        scale=layer.attention_scale,
    )
    attended = w.product(mixed.transpose(0, 1).flatten(1), layer.attn_output)
    if layer.attn_output_bias is not None:
        attended = attended + layer.attn_output_bias
    x = x + _norm(attended, layer.post_attention_norm)
    normed = _norm(x, layer.ffn_norm)
    if isinstance(layer.feed_forward, Dense):
        dense = layer.feed_forward
        fed = _network(w, dense.gate_up, dense.down, dense.activation, normed)
    else:
        assert isinstance(layer.feed_forward, Mixed)
        mixed_layer = layer.feed_forward
        best, chosen = w.product(normed, mixed_layer.router).softmax(-1).topk(mixed_layer.n_used)
        factors = best / best.sum(-1, keepdim=True) * mixed_layer.scale
        pairs_of = zip(mixed_layer.experts._gate_up, mixed_layer.experts._down, strict=True)
        answers = torch.stack([_network(w, *pair, "silu", normed) for pair in pairs_of], dim=1)  # (T, E, D)
        fed = (answers.gather(1, chosen.unsqueeze(-1).expand(-1, -1, D)) * factors.unsqueeze(-1)).sum(1)
    return x + _norm(fed, layer.post_ffn_norm)


class Model:
    """Two layers of a kind, and sequences for them."""

    def __init__(self, library: Library, kind: str) -> None:
        self.w = Weights(library)
        self.layers = Layers([KINDS[kind](self.w) for _ in range(2)], n_head_kv=J, head_dim=h, library=library)

    def tables(self, positions: Tensor) -> list[Tensor]:
        dim = self.layers.layers[0].rope_dim
        angles = [
            torch.outer(positions.double(), base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim))
            for base in (10_000.0, 500.0)
        ]
        return [torch.polar(torch.ones_like(each), each).to(torch.complex64) for each in angles]

    def blocks(self) -> list[Tensor]:
        return [torch.full((2, 2, J, 256, h), torch.nan)]

    def batch(self, *spans: tuple[int, int, list[Tensor]]) -> Batch:
        return Batch([(*span, []) for span in spans], n_layer=2, n_head_kv=J, head_dim=h)

    def forward(self, x: Tensor, *spans: tuple[int, int, list[Tensor]]) -> Tensor:
        positions = torch.cat([torch.arange(position, position + rows) for position, rows, _ in spans])
        out = x.clone()
        self.layers.forward(out, self.batch(*spans), self.tables(positions))
        return out


def _x(seed: int = 0) -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_exact_within_rounding(library, kind):
    model, x = Model(library, kind), _x()
    exact, tables = x.double(), model.tables(torch.arange(T))
    for layer in model.layers.layers:
        exact = _exact_layer(model.w, layer, exact, tables)
    got = model.forward(x, (0, T, model.blocks()))
    assert (got.double() - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_however_sequences_are_cut_and_batched(library, kind):
    model, x, other = Model(library, kind), _x(), _x(1)
    whole = model.forward(x, (0, T, model.blocks()))
    alone = model.forward(other, (0, T, model.blocks()))
    blocks = model.blocks()
    steps = [model.forward(x[at : at + 1], (at, 1, blocks)) for at in range(T)]
    assert torch.equal(torch.cat(steps), whole)
    first, second = model.blocks(), model.blocks()
    done: tuple[list[Tensor], list[Tensor]] = ([], [])
    for begin, middle, end in ((0, 13, 1), (13, 20, 2), (20, 30, 30)):
        rows = torch.cat((x[begin:middle], other[sum(map(len, done[1])) : end]))
        at = sum(map(len, done[1]))
        out = model.forward(rows, (begin, middle - begin, first), (at, end - at, second))
        done[0].append(out[: middle - begin])
        done[1].append(out[middle - begin :])
    assert torch.equal(torch.cat(done[0]), whole)
    assert torch.equal(torch.cat(done[1]), alone)
    try:
        library.set_threads(1)
        assert torch.equal(model.forward(x, (0, T, model.blocks())), whole)
    finally:
        library.set_threads(2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layers_halves_give_the_bits_of_the_whole(library, kind):
    model, x = Model(library, kind), _x()
    whole = model.forward(x, (0, T, model.blocks()))
    got, batch, tables = x.clone(), model.batch((0, T, model.blocks())), model.tables(torch.arange(T))
    for index, layer in enumerate(model.layers.layers):
        if not isinstance(layer.feed_forward, Mixed):
            model.layers.forward(got, batch, tables, index, index + 1)
            continue
        normed = model.layers.attention_half(index, got, batch, tables)
        mixture = layer.feed_forward
        ids, factors = route(
            library, mixture.router(normed), mixture.n_used, normalised=mixture.normalised, scale=mixture.scale
        )
        row_idx = torch.arange(T).repeat_interleave(USED)
        terms = mixture.experts.outputs(normed, row_idx, ids.view(-1))
        got += weighted_sum(library, terms, row_idx, factors.view(-1), T)
    assert torch.equal(got, whole)


def test_what_each_expert_does_is_counted(library):
    w, counts = Weights(library), torch.zeros(E, dtype=torch.int64)
    layer = _mixture(w)
    assert isinstance(layer.feed_forward, Mixed)
    layer = replace(layer, feed_forward=replace(layer.feed_forward, pairs=counts))
    layers = Layers([layer], n_head_kv=J, head_dim=h, library=library)
    batch = Batch([(0, T, [torch.zeros(1, 2, J, 256, h)], [])], n_layer=1, n_head_kv=J, head_dim=h)
    turns = [torch.ones(T, h // 2, dtype=torch.complex64)]
    normed = layers.attention_half(0, _x(), batch, turns)
    ids, _ = route(library, layer.feed_forward.router(normed), USED, normalised=True, scale=1.0)
    for times in (1, 2):
        layers.forward(_x(), batch, turns)
        assert torch.equal(counts, times * torch.bincount(ids.view(-1), minlength=E))
    wrong = replace(layer, feed_forward=replace(layer.feed_forward, pairs=counts[:-1]))
    with pytest.raises(EngineError):
        Layers([wrong], n_head_kv=J, head_dim=h, library=library)


def test_a_layer_whose_network_is_elsewhere_has_a_first_half_only(library):
    w = Weights(library)
    layers = Layers([replace(_llama(w), feed_forward=None)], n_head_kv=J, head_dim=h, library=library)
    batch = Batch([(0, T, [torch.zeros(1, 2, J, 256, h)], [])], n_layer=1, n_head_kv=J, head_dim=h)
    turns = [torch.ones(T, h // 2, dtype=torch.complex64)]
    assert layers.attention_half(0, _x(), batch, turns).shape == (T, D)
    with pytest.raises(EngineError) as refused:
        layers.forward(_x(), batch, turns)
    assert refused.value.code == "not_whole"


def test_rows_turns_and_caches_that_do_not_fit_are_refused(library):
    model = Model(library, "gemma3")
    blocks, tables = model.blocks(), model.tables(torch.arange(T))
    batch = model.batch((0, T, blocks))
    wide = [torch.zeros(2, 2, J, 256, 2 * h)]
    other = Batch([(0, T, wide, [])], n_layer=2, n_head_kv=J, head_dim=2 * h)
    for x, rows_of, turns in (
        (_x()[:-1], batch, tables),
        (_x().double(), batch, tables),
        (torch.zeros(T, D + 1), batch, tables),
        (_x(), other, tables),
        (_x(), batch, tables[:1]),
        (_x(), batch, [tables[0], tables[1][:-1]]),
        (_x(), batch, [table.to(torch.complex128) for table in tables]),
    ):
        with pytest.raises(EngineError):
            model.layers.forward(x, rows_of, turns)
    with pytest.raises(EngineError):
        model.layers.forward(_x(), batch, tables, 1, 3)
    with pytest.raises(EngineError):
        model.layers.attention_half(2, _x(), batch, tables)


def test_layers_whose_parts_do_not_fit_are_refused(library):
    w = Weights(library)
    good = _llama(w)
    assert isinstance(good.feed_forward, Dense)
    for bad in (
        replace(good, attn_norm=torch.zeros(D + 1)),
        replace(good, attn_output=w.matrix(D, D)),
        replace(good, n_head=3),
        replace(good, rope_dim=h + 2),
        replace(good, window=0),
        replace(good, qk_norm=torch.zeros(H, h)),
        replace(good, feed_forward=replace(good.feed_forward, down=w.matrix(WIDTH, 2 * D))),
        replace(good, feed_forward=replace(good.feed_forward, gate_up=w.matrix(D, WIDTH))),
    ):
        with pytest.raises(EngineError):
            Layers([bad], n_head_kv=J, head_dim=h, library=library)
