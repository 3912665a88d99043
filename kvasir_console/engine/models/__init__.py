"""The architectures this engine computes: one file each, read from top to bottom, that opens with its contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.experts import ExpertBank, ExpertCompute
from kvasir_console.engine.kvcache import Span
from kvasir_console.engine.models.gemma3 import Gemma3
from kvasir_console.engine.models.llama import Llama
from kvasir_console.engine.weights import WindowReader


class Model(Protocol):
    """A window of an architecture; ``llama`` says what each method does."""

    panels: bool
    """Whether its caches keep keys in panels (``kvcache.KVLayout``)."""

    def embed(self, tokens: Tensor) -> Tensor: ...
    def forward(self, hidden: Tensor, spans: Sequence[Span], experts: ExpertCompute | None) -> Tensor: ...
    def head(self, hidden: Tensor) -> Tensor: ...


MODELS: Mapping[str, Callable[[WindowReader, ModelShape, int, int, Mapping[int, ExpertBank]], Model]] = {
    "gemma3": Gemma3,
    "llama": Llama,
}
"""By ``general.architecture``."""
