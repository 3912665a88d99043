"""The llama architecture, dense or mixture-of-experts.

Contract: a ``Llama`` holds the layers ``[begin, end)``, with the embedding table if it begins the model and the final
norm and output projection if it ends it. Rows are consecutive tokens of the sequences in ``spans``:

    hidden = embed(tokens)                     (T,) -> (T, D)
    hidden = forward(hidden, spans, experts)   (T, D) -> (T, D)
    logits = head(hidden)                      (R, D) -> (R, V)

The network (Touvron et al., arXiv 2302.13971; the mixture, Jiang et al., arXiv 2401.04088):

    x = x + attention(rms_norm(x))            grouped queries, rotary positions, causal
    x = x + feed_forward(rms_norm(x))         SwiGLU, or the weighted sum of a token's best K experts

In a GGUF of this architecture the rows of the query and key matrices are permuted, so that the pairs that rotary
embedding turns lie side by side.

Dimensions: T rows, D n_embd, H query heads, J key-value heads, h head_dim, F feed-forward width, E experts, K experts
used, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_console.engine import native
from kvasir_console.engine.attention import Attention
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.experts import ExpertBank, ExpertCompute, local_experts
from kvasir_console.engine.kernels import rms_norm, rotate_pairs, swiglu, turns
from kvasir_console.engine.kvcache import Span, positions
from kvasir_console.engine.linear import Linear
from kvasir_console.engine.models.ends import Ends
from kvasir_console.engine.models.fused import fuse, packed
from kvasir_console.engine.models.rope import frequencies
from kvasir_console.engine.native import DecoderLayer
from kvasir_console.engine.weights import WindowReader


@dataclass(frozen=True, slots=True)
class Dense:
    """A SwiGLU network."""

    gate_up: Linear  # (2F, D)
    down: Linear  # (D, F)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses each row's experts; the experts themselves are the stage's, or other machines'."""

    weight: Linear  # (E, D)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer. Matrices that read the same rows are one."""

    attn_norm: Tensor  # (D,)
    qkv: Linear  # ((H + 2J) h, D)
    attn_output: Linear  # (D, H h)
    ffn_norm: Tensor  # (D,)
    feed_forward: Dense | Router

    @classmethod
    def load(cls, read: WindowReader, layer: int) -> Block:
        name = f"blk.{layer}."
        return cls(
            attn_norm=read.vector(name + "attn_norm.weight"),
            qkv=read.matrix(*(f"{name}attn_{part}.weight" for part in "qkv")),
            attn_output=read.matrix(name + "attn_output.weight"),
            ffn_norm=read.vector(name + "ffn_norm.weight"),
            feed_forward=Router(read.matrix(name + "ffn_gate_inp.weight"))
            if name + "ffn_gate_inp.weight" in read
            else Dense(
                gate_up=read.matrix(name + "ffn_gate.weight", name + "ffn_up.weight"),
                down=read.matrix(name + "ffn_down.weight"),
            ),
        )


class Llama:
    """Layers ``[begin, end)`` of a llama model."""

    def __init__(
        self, read: WindowReader, shape: ModelShape, begin: int, end: int, banks: Mapping[int, ExpertBank]
    ) -> None:
        self._shape = shape
        self._begin = begin
        self._ends = Ends.load(read, shape, begin, end)
        self._blocks = [Block.load(read, layer) for layer in range(begin, end)]
        self._frequencies = frequencies(read, shape)  # (rope_dim / 2,) f64
        self._scale = shape.head_dim**-0.5
        self._own_experts = local_experts(banks)
        self._fused = fuse(
            read.forms.library,
            shape,
            begin,
            banks,
            lambda: [self._compiled(block) for block in self._blocks],
            {i: b.feed_forward.weight for i, b in enumerate(self._blocks) if isinstance(b.feed_forward, Router)},
            self._angles,
            self._plain,
        )
        self.panels = self._fused is not None

    def embed(self, tokens: Tensor) -> Tensor:
        """(T,) to (T, D)."""
        return self._ends.embed(tokens)

    def forward(self, hidden: Tensor, spans: Sequence[Span], experts: ExpertCompute | None) -> Tensor:
        """(T, D) to (T, D); rows were reserved in the spans' caches and are committed by the caller.

        ``experts`` computes the routed experts; ``None`` means by this machine's own banks.
        """
        if self._fused is not None:
            return self._fused.forward(hidden, spans, self._angles(spans), experts)
        return self._plain(hidden, spans, experts)

    def _plain(
        self, hidden: Tensor, spans: Sequence[Span], experts: ExpertCompute | None, count: int | None = None
    ) -> Tensor:
        """Through the first ``count`` layers, operation by operation."""
        x, eps = hidden, self._shape.norm_eps
        experts = experts or self._own_experts
        attend = Attention(spans, self._shape.n_head, self._scale, hidden.device)
        (angles,) = (each.to(hidden.device) for each in self._angles(spans))
        for index, block in enumerate(self._blocks[:count]):
            x = x + self._attention(block, index, rms_norm(x, block.attn_norm, eps), angles, attend)
            normed = rms_norm(x, block.ffn_norm, eps)
            network = block.feed_forward
            if isinstance(network, Router):
                x = x + experts(self._begin + index, normed, *self._route(network, normed))
            else:
                x = x + network.down(swiglu(network.gate_up(normed)))
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """(R, D) to (R, V)."""
        return self._ends.head(hidden)

    def _attention(self, block: Block, index: int, x: Tensor, angles: Tensor, attend: Attention) -> Tensor:
        H, J, h = self._shape.n_head, self._shape.n_head_kv, self._shape.head_dim
        qkv = block.qkv(x).view(-1, H + 2 * J, h)  # (T, ., h)
        rotate_pairs(qkv[:, : H + J, : self._shape.rope_dim], angles)
        mixed = attend(index, qkv[:, :H], qkv[:, H:].view(-1, 2, J, h))  # (T, H h)
        return block.attn_output(mixed)

    def _route(self, router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        """The K most probable experts of each row, the lowest id first among equals, and their weights: (T, K) each."""
        shape = self._shape
        probabilities = router.weight(x).softmax(dim=-1)  # (T, E)
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        weights = ordered[:, : shape.n_expert_used]  # (T, K)
        if shape.expert_weights_norm:
            # Added one by one: the order is the same for any number of rows.
            weights = weights / functools.reduce(torch.add, weights.unbind(1)).unsqueeze(1)
        if shape.expert_weights_scale != 1:
            weights = weights * shape.expert_weights_scale
        return ids[:, : shape.n_expert_used], weights

    def _angles(self, spans: Sequence[Span]) -> list[Tensor]:
        return [turns(positions(spans), self._frequencies)]

    def _compiled(self, block: Block) -> DecoderLayer:
        """A layer as the compiled kernels take it; routed experts are not part of it."""
        shape, network = self._shape, block.feed_forward
        return DecoderLayer(
            attn_norm=block.attn_norm,
            qkv=packed(block.qkv),
            attn_output=packed(block.attn_output),
            ffn_norm=block.ffn_norm,
            feed_forward=None
            if isinstance(network, Router)
            else native.Dense(packed(network.gate_up), packed(network.down)),
            n_head=shape.n_head,
            attention_scale=self._scale,
            eps=shape.norm_eps,
            rope_dim=shape.rope_dim,
        )
