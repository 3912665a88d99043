"""Whole decoder layers in one call, so that a small model's time goes to its weights and not to Python.

    x += post(attention(norm(x)))        post: another norm, or nothing
    x += post(feed_forward(norm(x)))     a gated network, or a mixture of them

That covers llama, qwen2 (biases), qwen3 (queries and keys normed head by head) and gemma3 (norms after, two kinds of
angles, a window), dense or mixed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_console.engine.native.attention import Batch
from kvasir_console.engine.native.experts import NativeExperts, network_view
from kvasir_console.engine.native.library import LayerView, Library, MixtureView, NetworkView
from kvasir_console.engine.native.linear import NativeLinear, check_rows
from kvasir_console.engine.native.ops import check_vector
from kvasir_console.errors import EngineError

__all__ = ["DecoderLayer", "Dense", "Layers", "Mixed"]


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated network."""

    gate_up: NativeLinear  # (2F, D)
    down: NativeLinear  # (D, F)
    activation: str = "silu"


@dataclass(frozen=True, slots=True)
class Mixed:
    """A router, and the experts it chooses among, all of the layer's."""

    router: NativeLinear  # (E, D)
    experts: NativeExperts
    n_used: int
    normalised: bool = True
    scale: float = 1.0
    pairs: Tensor | None = None
    """(E,) int64: to each expert's number the rows it was given are added."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Norms and biases are f32 vectors; ``None`` leaves a step out."""

    attn_norm: Tensor  # (D,)
    qkv: NativeLinear  # ((H + 2J) h, D)
    attn_output: NativeLinear  # (D, H h)
    ffn_norm: Tensor  # (D,)
    feed_forward: Dense | Mixed | None
    """``None`` where others compute it: such a layer only has a first half."""
    n_head: int
    attention_scale: float
    eps: float
    rope_dim: int
    rope_halves: bool = False
    rope_table: int = 0
    """Which of the tables of turns."""
    window: int | None = None
    qkv_bias: Tensor | None = None  # ((H + 2J) h,)
    qk_norm: Tensor | None = None  # (H + J, h)
    attn_output_bias: Tensor | None = None  # (D,)
    post_attention_norm: Tensor | None = None  # (D,)
    post_ffn_norm: Tensor | None = None  # (D,)


class Layers:
    """Consecutive layers of a model, ready to be called. ``index`` counts from the first, in the caches too."""

    __slots__ = ("_library", "_mixtures", "_views", "head_dim", "layers", "n_embd", "n_head_kv", "n_tables")

    def __init__(self, layers: Sequence[DecoderLayer], *, n_head_kv: int, head_dim: int, library: Library) -> None:
        self.layers = tuple(layers)
        self.n_head_kv, self.head_dim = n_head_kv, head_dim
        self.n_embd = self.layers[0].qkv.n_in
        self.n_tables = 1 + max(layer.rope_table for layer in self.layers)
        self._library = library
        self._mixtures: list[object] = []
        self._views = (LayerView * len(self.layers))(*map(self._view, range(len(self.layers)), self.layers))

    def forward(self, x: Tensor, batch: Batch, turns: Sequence[Tensor], begin: int = 0, end: int | None = None) -> None:
        """Pass the batch's rows through the layers ``[begin, end)``, in place, and keep their keys and values.

        Args:
            x: (R, D) f32.
            turns: by ``rope_table``, (R, ..., rope_dim / 2) complex64: how far each pair is turned in each row.

        Raises:
            EngineError: ``wrong_rows``, ``wrong_blocks``; a tensor does not fit. ``not_whole``; a layer has no second
                half here.
        """
        end = len(self.layers) if end is None else end
        if not 0 <= begin <= end <= len(self.layers):
            raise EngineError("wrong_rows", f"There are {len(self.layers)} layers, not layers [{begin}, {end}).")
        if any(layer.feed_forward is None for layer in self.layers[begin:end]):
            raise EngineError("not_whole", "A layer whose feed-forward network is elsewhere cannot be passed whole.")
        tables = self._check(x, batch, turns)
        self._library.call(
            "kv_layers", self._address(begin), end - begin, batch.pointer, tables, x.data_ptr(), x.stride(0)
        )

    def attention_half(self, index: int, x: Tensor, batch: Batch, turns: Sequence[Tensor]) -> Tensor:
        """Pass the rows through a layer's first half, in place; returns what its second begins with, norm(x) (R, D).

        Raises:
            EngineError: as ``forward``.
        """
        if not 0 <= index < len(self.layers):
            raise EngineError("wrong_rows", f"There are {len(self.layers)} layers, and no layer {index}.")
        tables = self._check(x, batch, turns)
        normed = torch.empty(x.shape)
        self._library.call(
            "kv_attention_half", self._address(index), batch.pointer, tables, x.data_ptr(), x.stride(0),
            normed.data_ptr(),
        )  # fmt: skip
        return normed

    def _address(self, index: int) -> int:
        return ctypes.addressof(self._views) + index * ctypes.sizeof(LayerView)

    def _check(self, x: Tensor, batch: Batch, turns: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        check_rows(x, self.n_embd)
        if x.shape[0] != batch.rows:
            raise EngineError("wrong_rows", f"{x.shape[0]} rows came for a batch of {batch.rows}.")
        if (batch.n_layer, batch.n_head_kv, batch.head_dim) != (len(self.layers), self.n_head_kv, self.head_dim):
            raise EngineError("wrong_blocks", "The batch's caches were made for other layers.")
        pairs = [2 * table.numel() for table in turns]
        if len(turns) < self.n_tables or any(
            pairs[layer.rope_table] != batch.rows * layer.rope_dim for layer in self.layers
        ):
            raise EngineError("wrong_rows", "The tables of turns do not fit the rows and the layers.")
        if any(table.dtype != torch.complex64 or not table.is_contiguous() or table.is_cuda for table in turns):
            raise EngineError("wrong_rows", "Turns must be complex64 values side by side.")
        return (ctypes.c_void_p * len(turns))(*(table.data_ptr() for table in turns))

    def _view(self, index: int, layer: DecoderLayer) -> LayerView:
        D, H, J, h = self.n_embd, layer.n_head, self.n_head_kv, self.head_dim
        width = (H + 2 * J) * h
        if (
            (layer.qkv.n_in, layer.qkv.n_out) != (D, width)
            or (layer.attn_output.n_in, layer.attn_output.n_out) != (H * h, D)
            or H % J
            or not 0 <= layer.rope_dim <= h
            or layer.rope_dim % 2
            or (layer.window is not None and layer.window < 1)
            or layer.rope_table < 0
        ):
            raise EngineError("wrong_rows", f"The matrices of layer {index} do not fit each other.")
        for vector in (layer.attn_norm, layer.ffn_norm, layer.post_attention_norm, layer.post_ffn_norm):
            check_vector(vector, D)
        check_vector(layer.qkv_bias, width)
        check_vector(layer.qk_norm, (H + J) * h)
        check_vector(layer.attn_output_bias, D)
        network, mixture = NetworkView(), None
        match layer.feed_forward:
            case Dense(gate_up, down, activation):
                if (gate_up.n_in, down.n_out) != (D, D):
                    raise EngineError("wrong_rows", f"The network of layer {index} does not fit it.")
                network = network_view(gate_up, down, activation)
            case Mixed(router, experts, n_used, normalised, scale, pairs):
                if (router.n_in, router.n_out, experts.n_embd) != (D, len(experts), D) or not (
                    1 <= n_used <= len(experts)
                ):
                    raise EngineError("wrong_rows", f"The mixture of layer {index} does not fit it.")
                if pairs is not None and (
                    pairs.shape != (len(experts),) or pairs.dtype != torch.int64 or not pairs.is_contiguous()
                ):
                    raise EngineError("wrong_rows", f"The experts of layer {index} are {len(experts)} to be counted.")
                mixture = MixtureView(router.pointer, experts.views, n_used, int(normalised), scale, _address(pairs))
                self._mixtures.append(mixture)
            case None:
                pass
        return LayerView(
            index=index,
            n_head=H,
            window=layer.window or 0,
            rope_dim=layer.rope_dim,
            rope_halves=int(layer.rope_halves),
            rope_table=layer.rope_table,
            eps=layer.eps,
            attention_scale=layer.attention_scale,
            attn_norm=layer.attn_norm.data_ptr(),
            qkv_bias=_address(layer.qkv_bias),
            qk_norm=_address(layer.qk_norm),
            post_attention_norm=_address(layer.post_attention_norm),
            ffn_norm=layer.ffn_norm.data_ptr(),
            post_ffn_norm=_address(layer.post_ffn_norm),
            qkv=layer.qkv.pointer,
            attn_output=layer.attn_output.pointer,
            attn_output_bias=_address(layer.attn_output_bias),
            network=network,
            mixture=ctypes.pointer(mixture) if mixture is not None else None,
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
