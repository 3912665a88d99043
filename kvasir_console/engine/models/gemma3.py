"""The gemma3 architecture, its text part: dense, with layers that look back a short way and layers that look back all.

Contract: as ``llama`` has it. The network (Gemma Team, arXiv 2503.19786):

    x = sqrt(D) * embed(token)
    x = x + rms_norm(attention(rms_norm(x)))          norms before and after; queries and keys normed head by head
    x = x + rms_norm(feed_forward(rms_norm(x)))       GELU gating
    logits = embed^T (rms_norm(x))                    the output projection is the embedding table

Every sixth layer is global: it sees all positions, and its angles follow the file's base. The others are local: they
see the last ``sliding_window`` positions, and their angles follow a base of 10,000. Rotary pairs are half a head apart.
A GGUF stores norm weights with the one added that the network adds to them.

Dimensions: T rows, D n_embd, H query heads, J key-value heads, h head_dim, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_console.engine.attention import Attention
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.experts import ExpertBank, ExpertCompute
from kvasir_console.engine.kernels import geglu, rms_norm, rotate_halves, turns
from kvasir_console.engine.kvcache import Span, positions
from kvasir_console.engine.linear import Linear
from kvasir_console.engine.models.ends import Ends
from kvasir_console.engine.models.fused import fuse, packed
from kvasir_console.engine.models.rope import frequencies, geometric
from kvasir_console.engine.native import DecoderLayer, Dense
from kvasir_console.engine.weights import WindowReader

_LOCAL_BASE = 10_000.0
_GLOBAL_EVERY = 6
_LAYERS_OF_27B = 62
"""The only size whose scores are not scaled by the head's own width, and nothing else in a file tells it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer. Matrices that read the same rows are one."""

    attn_norm: Tensor  # (D,)
    qkv: Linear  # ((H + 2J) h, D)
    qk_norm: Tensor  # (H + J, h)
    attn_output: Linear  # (D, H h)
    post_attention_norm: Tensor  # (D,)
    ffn_norm: Tensor  # (D,)
    gate_up: Linear  # (2F, D)
    down: Linear  # (D, F)
    post_ffw_norm: Tensor  # (D,)

    @classmethod
    def load(cls, read: WindowReader, shape: ModelShape, layer: int) -> Block:
        name = f"blk.{layer}."
        q_norm, k_norm = (read.vector(f"{name}attn_{part}_norm.weight") for part in "qk")
        return cls(
            attn_norm=read.vector(name + "attn_norm.weight"),
            qkv=read.matrix(*(f"{name}attn_{part}.weight" for part in "qkv")),
            qk_norm=torch.cat((q_norm.expand(shape.n_head, -1), k_norm.expand(shape.n_head_kv, -1))),
            attn_output=read.matrix(name + "attn_output.weight"),
            post_attention_norm=read.vector(name + "post_attention_norm.weight"),
            ffn_norm=read.vector(name + "ffn_norm.weight"),
            gate_up=read.matrix(name + "ffn_gate.weight", name + "ffn_up.weight"),
            down=read.matrix(name + "ffn_down.weight"),
            post_ffw_norm=read.vector(name + "post_ffw_norm.weight"),
        )


class Gemma3:
    """Layers ``[begin, end)`` of a gemma3 model."""

    def __init__(
        self, read: WindowReader, shape: ModelShape, begin: int, end: int, banks: Mapping[int, ExpertBank]
    ) -> None:
        self._shape = shape
        self._begin = begin
        self._ends = Ends.load(read, shape, begin, end)
        self._blocks = [Block.load(read, shape, layer) for layer in range(begin, end)]
        self._global = frequencies(read, shape)  # (rope_dim / 2,) f64
        self._local = geometric(_LOCAL_BASE, shape.rope_dim)  # (rope_dim / 2,) f64
        width = shape.n_embd // shape.n_head if shape.n_layer == _LAYERS_OF_27B else shape.head_dim
        self._scale = width**-0.5
        self._window = shape.sliding_window or None
        self._fused = fuse(
            read.forms.library,
            shape,
            begin,
            banks,
            lambda: [self._compiled(block, layer) for layer, block in enumerate(self._blocks, begin)],
            {},
            self._angles,
            self._plain,
        )
        self.panels = self._fused is not None

    def embed(self, tokens: Tensor) -> Tensor:
        """(T,) to (T, D)."""
        return self._ends.embed(tokens) * math.sqrt(self._shape.n_embd)

    def forward(self, hidden: Tensor, spans: Sequence[Span], experts: ExpertCompute | None) -> Tensor:
        """(T, D) to (T, D); rows were reserved in the spans' caches and are committed by the caller."""
        if self._fused is not None:
            return self._fused.forward(hidden, spans, self._angles(spans), experts)
        return self._plain(hidden, spans, experts)

    def _plain(
        self, hidden: Tensor, spans: Sequence[Span], _: ExpertCompute | None, count: int | None = None
    ) -> Tensor:
        """Through the first ``count`` layers, operation by operation."""
        x, shape, eps = hidden, self._shape, self._shape.norm_eps
        far, near = (each.to(hidden.device) for each in self._angles(spans))
        all_before = Attention(spans, shape.n_head, self._scale, hidden.device)
        last_few = Attention(spans, shape.n_head, self._scale, hidden.device, window=self._window)
        for index, block in enumerate(self._blocks[:count]):
            angles, attend = (far, all_before) if _is_global(self._begin + index) else (near, last_few)
            mixed = self._attention(block, index, rms_norm(x, block.attn_norm, eps), angles, attend)
            x = x + rms_norm(mixed, block.post_attention_norm, eps)
            fed = block.down(geglu(block.gate_up(rms_norm(x, block.ffn_norm, eps))))
            x = x + rms_norm(fed, block.post_ffw_norm, eps)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """(R, D) to (R, V)."""
        return self._ends.head(hidden)

    def _attention(self, block: Block, index: int, x: Tensor, angles: Tensor, attend: Attention) -> Tensor:
        H, J, h = self._shape.n_head, self._shape.n_head_kv, self._shape.head_dim
        qkv = block.qkv(x).view(-1, H + 2 * J, h)  # (T, ., h)
        qk = rms_norm(qkv[:, : H + J], None, self._shape.norm_eps) * block.qk_norm  # (T, H + J, h)
        rotate_halves(qk[..., : self._shape.rope_dim], angles)
        kv = torch.stack((qk[:, H:], qkv[:, H + J :]), dim=1)  # (T, 2, J, h)
        return block.attn_output(attend(index, qk[:, :H], kv))

    def _angles(self, spans: Sequence[Span]) -> list[Tensor]:
        """Of global layers, and of local ones."""
        places = positions(spans)
        return [turns(places, frequencies) for frequencies in (self._global, self._local)]

    def _compiled(self, block: Block, layer: int) -> DecoderLayer:
        """A layer as the compiled kernels take it."""
        shape = self._shape
        return DecoderLayer(
            attn_norm=block.attn_norm,
            qkv=packed(block.qkv),
            qk_norm=block.qk_norm,
            attn_output=packed(block.attn_output),
            post_attention_norm=block.post_attention_norm,
            ffn_norm=block.ffn_norm,
            feed_forward=Dense(packed(block.gate_up), packed(block.down), "gelu"),
            post_ffn_norm=block.post_ffw_norm,
            n_head=shape.n_head,
            attention_scale=self._scale,
            eps=shape.norm_eps,
            rope_dim=shape.rope_dim,
            rope_halves=True,
            rope_table=0 if _is_global(layer) else 1,
            window=None if _is_global(layer) else self._window,
        )


def _is_global(layer: int) -> bool:
    return layer % _GLOBAL_EVERY == _GLOBAL_EVERY - 1
