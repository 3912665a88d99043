"""A stage: the layers ``[begin, end)`` of a model in this process, their experts included.

Only the window's tensors are read; each is held once, in float32. A stage of the whole model is the trunk. Nothing here
requires gradients. Callers on a hot path enter ``torch.inference_mode`` themselves, and then always: a cache that grew
under it can only be written under it.

A row's values depend on the tokens before it, and on whether rows came in few at a time or many (``kernels``), but not
on how layers are grouped into stages, on threads, on where prefill is cut into pieces of at least ``ROW_TILE`` rows, or
(top-2 routing) on where experts are computed. ``Stage.row_invariant`` says whether that holds on this machine. A replay
that must give the same bits feeds a prompt as it was fed, and decoded tokens one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.window import stage_tensors
from kvasir_console.engine.experts import ExpertBank, ExpertCompute
from kvasir_console.engine.kernels import row_invariant
from kvasir_console.engine.kvcache import BLOCK_ROWS, KVCache
from kvasir_console.engine.models import MODELS, Model
from kvasir_console.engine.weights import WindowReader, storage_bytes
from kvasir_console.errors import EngineError, ModelError, RequestError

__all__ = ["ExpertCompute", "Stage"]

log = logging.getLogger(__name__)


class Stage:
    """A loaded window. Not for several threads at once."""

    def __init__(
        self,
        shape: ModelShape,
        begin: int,
        end: int,
        model: Model,
        banks: Mapping[int, ExpertBank],
        device: torch.device | str,
    ) -> None:
        self.shape = shape
        self.begin, self.end = begin, end
        self.first, self.last = begin == 0, end == shape.n_layer
        self.banks = banks
        """By layer, for the MoE layers of this window."""
        self._model = model
        self._device = device
        self.row_invariant = self._measure_row_invariance()
        """Whether this machine's kernels give a row the same bits in any company of its class (``kernels``)."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        begin: int,
        end: int,
        *,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Stage:
        """Read the window from a whole model or from a stage file.

        Args:
            progress: called with the stored bytes read so far and their total.

        Raises:
            ModelError: the file is refused: an unknown architecture, tensor or type, or a window it does not hold.
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
        reader = WindowReader(checkpoint, network, device=device, on_read=on_read)
        model = build(reader, shape, begin, end)
        reader.finish()
        banks = {
            layer: ExpertBank.load(checkpoint, layer, 0, shape.n_expert, device=device, on_read=on_read)
            for layer in shape.moe_layers
            if begin <= layer < end
        }
        return cls(shape, begin, end, model, banks, device)

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
        return KVCache(self.end - self.begin, self.shape.n_head_kv, self.shape.head_dim, capacity, device=self._device)

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

    def forward(self, hidden: Tensor, cache: KVCache, position: int, experts: ExpertCompute | None = None) -> Tensor:
        """Pass rows through the window and keep their keys and values.

        Args:
            hidden: (T, D) f32, the rows of positions ``[position, position + T)``.
            cache: made by ``new_cache``; holds exactly ``position`` rows before, and ``position + T`` after.
            experts: where the routed experts are computed; ``None`` means by this stage's own banks.

        Returns:
            (T, D) f32.

        Raises:
            RequestError: ``context_length_exceeded``; the cache is full.
            EngineError: ``wrong_position``, ``wrong_width``; or what ``experts`` raises. The cache is then as before.
        """
        if hidden.dim() != 2 or hidden.shape[1] != self.shape.n_embd:
            raise EngineError(
                "wrong_width", f"Rows of shape {list(hidden.shape)} came to a model of width {self.shape.n_embd}."
            )
        count = hidden.shape[0]
        if not count:
            return hidden
        cache.reserve(position, count)
        experts = experts or self._own_experts
        done: list[Tensor] = []
        try:
            for begin, end in _block_cuts(position, position + count):
                rows = hidden[begin - position : end - position].to(self._device)
                done.append(self._model.forward(rows, cache, begin, experts))
                cache.commit(end - begin)
        except BaseException:
            cache.truncate(position)
            raise
        return done[0] if len(done) == 1 else torch.cat(done)

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, D) rows that left the last layer to (R, V) f32.

        Raises:
            EngineError: ``not_the_last_stage``.
        """
        if not self.last:
            raise EngineError("not_the_last_stage", f"Layers [{self.begin}, {self.end}) hold no output projection.")
        return self._model.head(hidden)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor held, by its name in the file; of experts, the stage's own banks."""
        yield from self._model.named_tensors()
        for bank in self.banks.values():
            yield from bank.named_tensors()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of weights held, each storage counted once."""
        return storage_bytes(tensor for _, tensor in self.named_tensors())

    def _own_experts(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.banks[layer].routed(x, ids, weights)

    def _measure_row_invariance(self) -> bool:
        matrices = (tensor[0] if tensor.dim() == 3 else tensor for _, tensor in self.named_tensors())
        of_each_shape = {matrix.shape: matrix for matrix in matrices if matrix.dim() == 2}
        invariant = all(row_invariant(matrix) for matrix in of_each_shape.values())
        if not invariant:
            log.warning(
                "matrix products on this machine round a row differently in different company: other threads, "
                "batches or holders may change a token"
            )
        return invariant


def _block_cuts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """``[begin, end)`` cut at multiples of ``BLOCK_ROWS``."""
    while begin < end:
        cut = min(end, (begin // BLOCK_ROWS + 1) * BLOCK_ROWS)
        yield begin, cut
        begin = cut
