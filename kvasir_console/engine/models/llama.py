"""The llama architecture, dense or mixture-of-experts, over float32 weights: the exact reference.

Contract: a ``Llama`` holds the layers ``[begin, end)``, with the embedding table if it begins the model and the final
norm and output projection if it ends it. Rows are consecutive tokens of one sequence:

    hidden = embed(tokens)                                   (T,) -> (T, D)
    hidden = forward(hidden, cache, position, experts)       (T, D) -> (T, D)
    logits = head(hidden)                                    (R, D) -> (R, V)

``forward`` takes at most the rows of one KV block (``kvcache.BLOCK_ROWS``) and never crosses the end of a block; the
caller cuts. Attention then sums over whole blocks, and a row's bits depend only on whether it comes among few rows or
many (see ``kernels``).

The network (Touvron et al., arXiv 2302.13971; the mixture, Jiang et al., arXiv 2401.04088):

    x = x + attention(rms_norm(x))            grouped queries, rotary positions, causal
    x = x + feed_forward(rms_norm(x))         SwiGLU, or the weighted sum of a token's best K experts

In a GGUF of this architecture the rows of the query and key matrices are permuted, so that the pairs that rotary
embedding turns lie side by side.

Dimensions: T rows (T' padded by ``pad_rows``), D n_embd, H query heads, J key-value heads, G = H / J, h head_dim,
S positions in the cache's blocks, F feed-forward width, E experts, K experts used, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.experts import ExpertCompute
from kvasir_console.engine.kernels import ROW_TILE, linear, pad_rows, rms_norm, swiglu, tile_rows
from kvasir_console.engine.kvcache import KVCache, blocks_end
from kvasir_console.engine.weights import WindowReader
from kvasir_console.errors import ModelError


@dataclass(frozen=True, slots=True)
class Dense:
    """A SwiGLU network."""

    gate_up: Tensor  # (2F, D)
    down: Tensor  # (D, F)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses each row's experts; the experts themselves are the stage's, or other machines'."""

    weight: Tensor  # (E, D)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one layer, float32. Matrices that read the same rows are one storage."""

    attn_norm: Tensor  # (D,)
    qkv: Tensor  # ((H + 2J) h, D)
    attn_output: Tensor  # (D, H h)
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

    def __init__(self, read: WindowReader, shape: ModelShape, begin: int, end: int) -> None:
        first, last = begin == 0, end == shape.n_layer
        self._shape = shape
        self._begin = begin
        tied = shape.tied_output and last
        table: Tensor | None = None
        if tied:
            table = read.matrix("token_embd.weight")
        elif first:
            table = read.table("token_embd.weight")
        self._embedding = table if first else None  # (V, D)
        self._blocks = [Block.load(read, layer) for layer in range(begin, end)]
        self._output_norm = read.vector("output_norm.weight") if last else None  # (D,)
        self._output: Tensor | None = None  # (V, D)
        if last:
            self._output = table if tied else read.matrix("output.weight")
        self._frequencies = _frequencies(read, shape)  # (rope_dim / 2,) f64

    def embed(self, tokens: Tensor) -> Tensor:
        """(T,) to (T, D)."""
        assert self._embedding is not None  # noqa: S101 - the stage refuses before
        return self._embedding.index_select(0, tokens)  # contiguous, whichever way the table lies

    def forward(self, hidden: Tensor, cache: KVCache, position: int, experts: ExpertCompute) -> Tensor:
        """(T, D) at ``position`` to (T, D); rows were reserved in ``cache`` and are committed by the caller."""
        T = hidden.shape[0]
        x = pad_rows(hidden)  # (T', D)
        eps = self._shape.norm_eps
        turns = self._turns(position, x.shape[0]).to(hidden.device)
        mask = _causal_mask(position, T + -T % ROW_TILE, blocks_end(position + T), hidden.device)
        for index, block in enumerate(self._blocks):
            x = x + self._attention(block, index, rms_norm(x, block.attn_norm, eps), T, turns, mask, cache)
            normed = rms_norm(x, block.ffn_norm, eps)
            network = block.feed_forward
            if isinstance(network, Router):
                ids, weights = self._route(network, normed, T)
                x[:T] += experts(self._begin + index, normed[:T], ids, weights)
            else:
                x += linear(swiglu(linear(normed, network.gate_up)), network.down)
        return x[:T]

    def head(self, hidden: Tensor) -> Tensor:
        """(R, D) to (R, V)."""
        assert self._output_norm is not None  # noqa: S101 - the stage refuses before
        assert self._output is not None  # noqa: S101
        normed = rms_norm(pad_rows(hidden), self._output_norm, self._shape.norm_eps)
        return linear(normed, self._output)[: hidden.shape[0]]

    def _attention(
        self, block: Block, index: int, x: Tensor, T: int, turns: Tensor, mask: Tensor, cache: KVCache
    ) -> Tensor:
        H, J, h = self._shape.n_head, self._shape.n_head_kv, self._shape.head_dim
        qkv = linear(x, block.qkv).view(-1, H + 2 * J, h)  # (T', ., h)
        _rotate(qkv[:, : H + J, : self._shape.rope_dim], turns)
        keys, values = cache.write(index, qkv[:T, H : H + J], qkv[:T, H + J :])  # (S, J, h)
        # One product covers the G queries of each of the rows, so few rows would be few for one G and many for another.
        q = tile_rows(qkv[:, :H] * h**-0.5)  # (T", H, h)
        G, rows = H // J, len(q)
        q = q.view(rows, J, G, h).permute(1, 2, 0, 3).reshape(J, G * rows, h)
        scores = torch.bmm(q, keys.permute(1, 2, 0)).view(J, G, rows, -1)  # (J, G, T", S)
        attention = scores.add_(mask).softmax(dim=-1).view(J, G * rows, -1)
        mixed = torch.bmm(attention, values.transpose(0, 1)).view(J, G, rows, h)
        return linear(mixed.permute(2, 0, 1, 3).reshape(rows, H * h)[: len(x)], block.attn_output)

    def _route(self, router: Router, x: Tensor, T: int) -> tuple[Tensor, Tensor]:
        """The K most probable experts of each of T rows, the lowest id first among equals, and their weights."""
        shape = self._shape
        probabilities = linear(x, router.weight)[:T].softmax(dim=-1)  # (T, E)
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        weights = ordered[:, : shape.n_expert_used]  # (T, K)
        if shape.expert_weights_norm:
            # Added one by one: the order is the same for any number of rows.
            weights = weights / functools.reduce(torch.add, weights.unbind(1)).unsqueeze(1)
        return ids[:, : shape.n_expert_used], weights * shape.expert_weights_scale

    def _turns(self, position: int, count: int) -> Tensor:
        """(count, 1, rope_dim / 2) complex64: the turn of each pair at each position from ``position`` on."""
        positions = torch.arange(position, position + count, dtype=torch.float64)
        angles = torch.outer(positions, self._frequencies)
        # In double precision up to here: at position 8192 a float32 angle is off by half a thousandth.
        return torch.complex(angles.cos().float(), angles.sin().float()).unsqueeze(1)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor held, by its name in the file."""
        shape = self._shape
        heads = [shape.n_head * shape.head_dim] + [shape.n_head_kv * shape.head_dim] * 2
        if self._embedding is not None:
            yield "token_embd.weight", self._embedding
        for layer, block in enumerate(self._blocks, self._begin):
            name = f"blk.{layer}."
            yield name + "attn_norm.weight", block.attn_norm
            yield from zip((f"{name}attn_{part}.weight" for part in "qkv"), torch.split(block.qkv, heads), strict=True)
            yield name + "attn_output.weight", block.attn_output
            yield name + "ffn_norm.weight", block.ffn_norm
            if isinstance(block.feed_forward, Router):
                yield name + "ffn_gate_inp.weight", block.feed_forward.weight
            else:
                gate, up = block.feed_forward.gate_up.chunk(2)
                yield name + "ffn_gate.weight", gate
                yield name + "ffn_up.weight", up
                yield name + "ffn_down.weight", block.feed_forward.down
        if self._output_norm is not None and self._output is not None:
            yield "output_norm.weight", self._output_norm
            if not shape.tied_output:
                yield "output.weight", self._output
            elif self._embedding is None:
                yield "token_embd.weight", self._output


def _rotate(x: Tensor, turns: Tensor) -> None:
    """Turn pairs (2i, 2i + 1) of (T', heads, rope_dim) in place (Su et al., arXiv 2104.09864)."""
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(turns)


def _causal_mask(position: int, count: int, S: int, device: torch.device) -> Tensor:
    """(count, S): 0 where row ``position + t`` may look, minus infinity at later positions."""
    rows = torch.arange(position, position + count, device=device).unsqueeze(1)
    later = torch.arange(S, device=device) > rows
    return torch.zeros(count, S, device=device).masked_fill_(later, -math.inf)


def _frequencies(read: WindowReader, shape: ModelShape) -> Tensor:
    """Angle per position of each pair, (rope_dim / 2,) f64, with the file's linear scaling and per-pair factors."""
    even = torch.arange(0, shape.rope_dim, 2, dtype=torch.float64)
    frequencies = shape.rope_freq_base ** (-even / shape.rope_dim) / _linear_scaling(read.metadata)
    if "rope_freqs.weight" not in read:
        return frequencies
    return frequencies / read.vector("rope_freqs.weight").cpu().double()


def _linear_scaling(metadata: Mapping[str, Any]) -> float:
    """The divisor of positions. Raises ``ModelError`` for a kind of scaling that is not linear."""
    kind = metadata.get("llama.rope.scaling.type", "linear")
    factor = metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear", 1.0))
    if kind == "none":
        return 1.0
    if kind != "linear" or not isinstance(factor, float | int) or not 1 <= factor <= 1e6:
        raise ModelError(
            "unsupported_rope_scaling",
            f"llama.rope.scaling of type {kind!r:.40} and factor {factor!r:.40} is not computed by this engine.",
            "Choose a checkpoint without it.",
        )
    return float(factor)
