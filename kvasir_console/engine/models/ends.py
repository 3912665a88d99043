"""The two ends of a decoder, as far as a window has them: the embedding table, and the final norm with the output
projection, which may be the same table. A model file says what is done to rows in between."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.kernels import rms_norm
from kvasir_console.engine.linear import Linear, Table
from kvasir_console.engine.weights import WindowReader


@dataclass(frozen=True, slots=True)
class Ends:
    """What the first and the last window of a model hold beside its layers."""

    embedding: Table | None  # (V, D), in the first
    output_norm: Tensor | None  # (D,), in the last
    output: Linear | None  # (V, D), in the last
    eps: float

    @classmethod
    def load(cls, read: WindowReader, shape: ModelShape, begin: int, end: int) -> Ends:
        """For the layers ``[begin, end)``. A table that is also the output projection is held once."""
        first, last = begin == 0, end == shape.n_layer
        embedding: Table | None = None
        output: Linear | None = None
        if last and shape.tied_output:
            embedding, output = read.tied("token_embd.weight", lookups=first)
        elif first:
            embedding = read.table("token_embd.weight")
        if last and output is None:
            output = read.matrix("output.weight")
        norm = read.vector("output_norm.weight") if last else None
        return cls(embedding, norm, output, shape.norm_eps)

    def embed(self, tokens: Tensor) -> Tensor:
        """(T,) to (T, D)."""
        assert self.embedding is not None  # noqa: S101 - the stage refuses before
        return self.embedding.rows(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """(R, D) to (R, V)."""
        assert self.output is not None and self.output_norm is not None  # noqa: S101, PT018 - the stage refuses before
        return self.output(rms_norm(hidden, self.output_norm, self.eps))
