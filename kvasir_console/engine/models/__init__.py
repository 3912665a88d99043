"""The architectures this engine computes: one file each, read from top to bottom, that opens with its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.experts import ExpertCompute
from kvasir_console.engine.kvcache import KVCache
from kvasir_console.engine.models.llama import Llama
from kvasir_console.engine.weights import WindowReader


class Model(Protocol):
    """A window of an architecture; ``llama`` says what each method does."""

    def embed(self, tokens: Tensor) -> Tensor: ...
    def forward(self, hidden: Tensor, cache: KVCache, position: int, experts: ExpertCompute) -> Tensor: ...
    def head(self, hidden: Tensor) -> Tensor: ...
    def named_tensors(self) -> Iterator[tuple[str, Tensor]]: ...


MODELS: Mapping[str, Callable[[WindowReader, ModelShape, int, int], Model]] = {"llama": Llama}
"""By ``general.architecture``."""
