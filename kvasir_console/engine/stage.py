"""A stage: the layers ``[begin, end)`` of a model in this process, their experts included.

Only the window's tensors are read; each is held once, in the form that ``forms`` chose. A stage of the whole model is
the trunk. Nothing here requires gradients. Callers on a hot path enter ``torch.inference_mode`` themselves, and then
always: a cache that grew under it can only be written under it.

A row's values depend on the tokens before it and on the forms, but not on the rows it comes with, on how layers are
grouped into stages, on threads, on where prefill is cut, or (top-2 routing) on where experts are computed.
``Stage.row_invariant`` says whether that holds on this machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.window import stage_tensors
from kvasir_console.engine.experts import ExpertBank, ExpertCompute
from kvasir_console.engine.forms import REFERENCE, Forms
from kvasir_console.engine.kvcache import KVCache, KVLayout, Span
from kvasir_console.engine.linear import Linear, row_invariant
from kvasir_console.engine.models import MODELS, Model
from kvasir_console.engine.weights import Holding, WindowReader
from kvasir_console.errors import EngineError, ModelError, RequestError

__all__ = ["ExpertCompute", "Span", "Stage"]

log = logging.getLogger(__name__)


class Stage:
    """A loaded window. Not for several threads at once."""

    def __init__(
        self,
        shape: ModelShape,
        begin: int,
        end: int,
        model: Model,
        holdings: Sequence[Holding],
        banks: Mapping[int, ExpertBank],
        kv_type: str,
        device: torch.device | str,
    ) -> None:
        self.shape = shape
        self.begin, self.end = begin, end
        self.first, self.last = begin == 0, end == shape.n_layer
        self.banks = banks
        """By layer, for the MoE layers of this window."""
        self.kv_layout = KVLayout(end - begin, shape.n_head_kv, shape.head_dim, kv_type, model.panels)
        self._model = model
        self.holdings = [*holdings, *(holding for bank in banks.values() for holding in bank.holdings)]
        self._device = device
        self.row_invariant = self._measure_row_invariance()
        """Whether this machine's kernels give a row the same bits in any company."""
        for bank in banks.values():
            bank.pairs[:] = 0  # checks are no work

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        begin: int,
        end: int,
        *,
        forms: Forms = REFERENCE,
        device: torch.device | str = "cpu",
        expert_forms: Forms | None = None,
        experts_device: torch.device | str | None = None,
        kv_type: str = "f32",
        progress: Callable[[int, int], None] | None = None,
    ) -> Stage:
        """Read the window from a whole model or from a stage file.

        Args:
            forms: how matrices are held.
            experts_device: where the routed experts are held and computed, if not on ``device``; ``expert_forms`` how.
            kv_type: kind of a cached key or value, one of ``kvcache.KV_TYPES``.
            progress: called with the stored bytes read so far and their total.

        Raises:
            ModelError: the file is refused: an unknown architecture, tensor or type, or a window it does not hold.
            EngineError: the KV kind is unknown or does not fit the model.
        """
        build = MODELS.get(checkpoint.architecture)
        if build is None:
            raise ModelError(
                "unsupported_architecture",
                f"{checkpoint.path.name} is a {checkpoint.architecture!r:.60} model, which this engine cannot compute.",
                "Choose one of: " + ", ".join(sorted(MODELS)) + ".",
            )
        shape = ModelShape.of(checkpoint, (begin, end))
        tensors = stage_tensors(checkpoint, shape, begin, end)
        total_bytes = sum(tensor.n_bytes for tensor in tensors)
        done_bytes = 0

        def on_read(n_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += n_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)

        network = stage_tensors(checkpoint, shape, begin, end, experts=False)
        banks = {
            layer: ExpertBank.load(
                checkpoint,
                layer,
                0,
                shape.n_expert,
                forms=expert_forms or forms,
                device=experts_device or device,
                on_read=on_read,
            )
            for layer in shape.moe_layers
            if begin <= layer < end
        }
        reader = WindowReader(checkpoint, network, forms, device=device, on_read=on_read)
        model = build(reader, shape, begin, end, banks)
        reader.finish()
        return cls(shape, begin, end, model, reader.holdings, banks, kv_type, device)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for a sequence of at most ``capacity`` positions.

        Raises:
            RequestError: ``context_length_exceeded``; the model was not made for so many.
        """
        if capacity > self.shape.context_length:
            raise RequestError(
                "context_length_exceeded",
                f"{capacity} positions are asked for; this model's context holds {self.shape.context_length}.",
                "Shorten the prompt or ask for fewer tokens.",
            )
        return KVCache(self.kv_layout, capacity, device=self._device)

    def cache_bytes(self, capacity: int) -> int:
        """Bytes that a cache of ``capacity`` positions takes at most."""
        return self.kv_layout.capacity_bytes(capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids (T,) to their rows (T, D).

        Raises:
            RequestError: ``token_out_of_range``.
            EngineError: ``not_the_first_stage``.
        """
        if not self.first:
            raise EngineError("not_the_first_stage", f"Layers [{self.begin}, {self.end}) hold no embedding table.")
        tokens = tokens.to(self._device)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.shape.n_vocab:
            raise RequestError("token_out_of_range", f"Token ids must be in [0, {self.shape.n_vocab}).")
        return self._model.embed(tokens)

    def forward(self, hidden: Tensor, spans: Sequence[Span], experts: ExpertCompute | None = None) -> Tensor:
        """Pass rows of one or several sequences through the window and keep their keys and values.

        Args:
            hidden: (T, D) f32, the rows of all ``spans``, in their order.
            spans: what the rows are. Each names another cache, made by ``new_cache``, that holds exactly ``position``
                rows before and ``position + rows`` after.
            experts: where the routed experts are computed; ``None`` means by this stage's own banks.

        Returns:
            (T, D) f32. A row's bits do not depend on the spans it comes with, if ``row_invariant``.

        Raises:
            RequestError: ``context_length_exceeded``; a cache is full.
            EngineError: ``wrong_position``, ``wrong_width``, ``wrong_spans``; or what ``experts`` raises. All caches
                are then as before.
        """
        if hidden.dim() != 2 or hidden.shape[1] != self.shape.n_embd:
            raise EngineError(
                "wrong_width", f"Rows of shape {list(hidden.shape)} came to a model of width {self.shape.n_embd}."
            )
        counts = [span.rows for span in spans]
        if sum(counts) != hidden.shape[0] or len({id(span.cache) for span in spans}) != len(spans):
            raise EngineError("wrong_spans", f"{hidden.shape[0]} rows came for spans of {counts} rows.")
        if not hidden.shape[0]:
            return hidden
        try:
            for span in spans:
                span.cache.reserve(span.position, span.rows)
            hidden = self._model.forward(hidden.to(self._device), spans, experts)
        except BaseException:
            for span in spans:
                span.cache.discard()
            raise
        for span in spans:
            span.cache.commit(span.rows)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, D) rows that left the last layer to (R, V) f32.

        Raises:
            EngineError: ``not_the_last_stage``.
        """
        if not self.last:
            raise EngineError("not_the_last_stage", f"Layers [{self.begin}, {self.end}) hold no output projection.")
        return self._model.head(hidden)

    @property
    def tensor_names(self) -> list[str]:
        """The tensors of the file that are held, each once."""
        return list(dict.fromkeys(name for holding in self.holdings for name in holding.names))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every storage held that torch can show, by the names of the tensors in it (``Holding.named_tensors``)."""
        for holding in self.holdings:
            yield from holding.named_tensors()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of weights held, each storage counted once."""
        return sum(holding.n_bytes for holding in self.holdings)

    def _measure_row_invariance(self) -> bool:
        linears = [holding.held for holding in self.holdings if not isinstance(holding.held, Tensor)]
        of_each_shape = {(each.kind, each.n_out, each.n_in): each for each in linears if isinstance(each, Linear)}
        invariant = all(row_invariant(linear, device=self._device) for linear in of_each_shape.values())
        if not invariant:
            log.warning(
                "matrix products on this machine round a row differently in different company: other threads, "
                "batches or holders may change a token"
            )
        return invariant
