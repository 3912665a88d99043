"""A window's layers in one call of the compiled kernels.

A model file says what a layer is twice: as operations in reading order, and, for the kernels, as a ``DecoderLayer``.
When the window is loaded both pass the same few rows through its first layers; if they disagree, or if a matrix is not
in the kernels' form, the operations are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.experts import ExpertBank, ExpertCompute, RemoteExperts, local_experts
from kvasir_console.engine.kvcache import KVCache, KVLayout, Span
from kvasir_console.engine.linear import Linear
from kvasir_console.engine.native import Batch, DecoderLayer, Layers, Library, Mixed, NativeLinear, ops

log = logging.getLogger(__name__)

MAX_DEVIATION = 1e-3
"""Of a compiled row from the one by operations, as a part of the largest value in it."""
_CHECKED_ROWS = (5, 1)
_CHECKED_LAYERS = 6
_HEAD_VALUES = 16
"""A head is a multiple of so many."""


class NotCompiledError(Exception):
    """A layer cannot be handed to the compiled kernels; the text says why."""


def packed(matrix: Linear) -> NativeLinear:
    """``matrix``, if the kernels can take it. Raises ``NotCompiledError``."""
    if not isinstance(matrix, NativeLinear):
        raise NotCompiledError(f"a matrix is held as {matrix.kind}")
    return matrix


class Fused:
    """Consecutive layers, the first of which is layer ``begin`` of the model.

    Args:
        routers: by index in the window, of the layers with routed experts. Their ``DecoderLayer`` has no second half:
            whoever is asked computes it. Where that is this window's own banks, and the kernels can take them, layers
            run in one call all the same, with the same bits.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        shape: ModelShape,
        begin: int,
        library: Library,
        routers: Mapping[int, NativeLinear],
        banks: Mapping[int, ExpertBank],
    ) -> None:
        self.layers = tuple(layers)
        self._layers = Layers(layers, n_head_kv=shape.n_head_kv, head_dim=shape.head_dim, library=library)
        self._shape = shape
        self._begin = begin
        self._library = library
        self._routers = routers
        self._own = local_experts(banks)
        self._whole = self._with_experts(banks)

    def _with_experts(self, banks: Mapping[int, ExpertBank]) -> Layers | None:
        """The layers with their experts in them, which still count the pairs of each; ``None`` if one is not packed."""
        shape, layers = self._shape, list(self.layers)
        for index, router in self._routers.items():
            bank = banks[self._begin + index]
            if bank.compiled is None:
                return None
            mixed = Mixed(
                router,
                bank.compiled,
                shape.n_expert_used,
                shape.expert_weights_norm,
                shape.expert_weights_scale,
                torch.from_numpy(bank.pairs),
            )
            layers[index] = replace(layers[index], feed_forward=mixed)
        return Layers(layers, n_head_kv=shape.n_head_kv, head_dim=shape.head_dim, library=self._library)

    def forward(
        self,
        hidden: Tensor,
        spans: Sequence[Span],
        turns: Sequence[Tensor],
        experts: ExpertCompute | None,
        end: int | None = None,
    ) -> Tensor:
        """(T, D) to (T, D) through the layers up to ``end``; ``turns`` are the layers' tables of angles."""
        x = hidden.contiguous().clone()
        n_layer = len(self.layers)
        batch = Batch(
            [(span.position, span.rows, *_storages(span.cache)) for span in spans],
            n_layer=n_layer,
            n_head_kv=self._shape.n_head_kv,
            head_dim=self._shape.head_dim,
        )
        at, end = 0, n_layer if end is None else end
        if experts is None and self._whole is not None:
            self._whole.forward(x, batch, turns, 0, end)
            return x
        away, between = set(self._routers), self._layers
        if isinstance(experts, RemoteExperts) and self._whole is not None:
            away, between = {layer - self._begin for layer in experts.layers} & away, self._whole
        for index in sorted(away):
            if index >= end:
                break
            if at < index:
                between.forward(x, batch, turns, at, index)
            normed = self._layers.attention_half(index, x, batch, turns)
            x += (experts or self._own)(self._begin + index, normed, *self._route(index, normed))
            at = index + 1
        if at < end:
            between.forward(x, batch, turns, at, end)
        return x

    def _route(self, index: int, normed: Tensor) -> tuple[Tensor, Tensor]:
        shape = self._shape
        return ops.route(
            self._library,
            self._routers[index](normed),
            shape.n_expert_used,
            normalised=shape.expert_weights_norm,
            scale=shape.expert_weights_scale,
        )


def fuse(
    library: Library | None,
    shape: ModelShape,
    begin: int,
    banks: Mapping[int, ExpertBank],
    layers: Callable[[], Sequence[DecoderLayer]],
    routers: Mapping[int, Linear],
    angles: Callable[[Sequence[Span]], Sequence[Tensor]],
    plain: Callable[[Tensor, Sequence[Span], None, int], Tensor],
) -> Fused | None:
    """The window for the compiled kernels, if there are any, if they can take it, and if they agree with torch.

    Args:
        layers: describes the layers, or raises ``NotCompiledError``.
        routers: by index in the window.
        angles: the layers' tables of turns for rows.
        plain: passes rows through some first layers of the window by operations.
    """
    if library is None:
        return None
    try:
        if shape.head_dim % _HEAD_VALUES:
            raise NotCompiledError(f"its heads have {shape.head_dim} values")
        packed_routers = {index: packed(router) for index, router in routers.items()}
        fused = Fused(layers(), shape, begin, library, packed_routers, banks)
    except NotCompiledError as reason:
        log.info("torch computes what lies between matrices: %s", reason)
        return None
    n_layer = len(fused.layers)
    error = _deviation(
        lambda x, spans: fused.forward(x, spans, angles(spans), None, min(n_layer, _CHECKED_LAYERS)),
        lambda x, spans: plain(x, spans, None, min(n_layer, _CHECKED_LAYERS)),
        KVLayout(n_layer, shape.n_head_kv, shape.head_dim),
        shape.n_embd,
    )
    if error <= MAX_DEVIATION:
        return fused
    log.warning("the compiled layers differ by %.1e from torch's: torch computes what lies between matrices", error)
    return None


def _deviation(
    fused: Callable[[Tensor, Sequence[Span]], Tensor],
    plain: Callable[[Tensor, Sequence[Span]], Tensor],
    layout: KVLayout,
    n_embd: int,
) -> float:
    """How far the two are apart for a few rows and one after them."""
    count = sum(_CHECKED_ROWS)
    x = torch.randn(count, n_embd, generator=torch.Generator().manual_seed(2))
    results = []
    for forward, panels in ((fused, True), (plain, False)):
        cache, rows = KVCache(replace(layout, panels=panels), count), []
        for part in torch.split(x, list(_CHECKED_ROWS)):
            cache.reserve(cache.length, len(part))
            rows.append(forward(part, [Span(cache, cache.length, len(part))]))
            cache.commit(len(part))
        results.append(torch.cat(rows))
    compiled, wanted = results
    return float(((compiled - wanted).abs().amax(1) / wanted.abs().amax(1)).max())


def _storages(cache: KVCache) -> tuple[list[Tensor], list[Tensor]]:
    return [block.values for block in cache.blocks], [
        block.scales for block in cache.blocks if block.scales is not None
    ]
