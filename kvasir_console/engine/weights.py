"""Tensors of a checkpoint as float32 matrices, dequantised once and held once.

Blocks are read from the file's map a chunk at a time, straight into their place in the result, so loading needs the
result and a few megabytes, however large a matrix is. No raw bytes are kept.

A matrix (n_out, n_in) that multiplies rows lies in memory input-major, as the transpose of a contiguous (n_in, n_out):
a single row's product then reads memory in order, half as fast again as the other way round (26 against 17 GB/s here).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.gguf import Checkpoint, TensorInfo
from kvasir_console.engine.quant import dequantize
from kvasir_console.errors import ModelError

CHUNK_VALUES = 2**20
"""Values dequantised at a time, unless one row has more."""

OnRead = Callable[[int], None]
"""Told the number of stored bytes read since it was told last."""


def read_rows(
    checkpoint: Checkpoint, tensor: TensorInfo, out: Tensor, *, first_byte: int = 0, on_read: OnRead | None = None
) -> None:
    """Dequantise consecutive rows of ``tensor``, from ``first_byte`` on, into ``out`` (rows, n_in).

    Raises:
        ModelError: ``unsupported_quant``, from ``quant.dequantize``.
    """
    n_rows, n_in = out.shape
    row_bytes = tensor.n_bytes // math.prod(tensor.dims[1:])
    step = max(1, CHUNK_VALUES // n_in)
    scratch = torch.empty(min(step, n_rows) * row_bytes, dtype=torch.uint8)
    for row in range(0, n_rows, step):
        count = min(step, n_rows - row)
        begin = first_byte + row * row_bytes
        raw = scratch[: count * row_bytes]
        raw.numpy()[:] = np.frombuffer(checkpoint.raw(tensor, begin, begin + count * row_bytes), dtype=np.uint8)
        out[row : row + count] = dequantize(raw.to(out.device), tensor.type).view(count, n_in)
        if on_read is not None:
            on_read(count * row_bytes)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


class WindowReader:
    """Hands out a window's tensors by name, each once, and knows which nobody asked for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Iterable[TensorInfo],
        *,
        device: torch.device | str = "cpu",
        on_read: OnRead | None = None,
    ) -> None:
        self.metadata: Mapping[str, Any] = checkpoint.metadata
        self._checkpoint = checkpoint
        self._left = {tensor.name: tensor for tensor in tensors}
        self._device = device
        self._on_read = on_read

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def vector(self, name: str) -> Tensor:
        """A tensor of one dimension, (n,)."""
        return self.table(name).view(-1)

    def table(self, name: str) -> Tensor:
        """A matrix (n, width) whose rows are looked up: contiguous."""
        tensor = self._left.pop(name)
        out = torch.empty(math.prod(tensor.dims[1:]), tensor.dims[0], dtype=torch.float32, device=self._device)
        read_rows(self._checkpoint, tensor, out, on_read=self._on_read)
        return out

    def matrix(self, *names: str) -> Tensor:
        """A matrix (n_out, n_in), or several with the same ``n_in`` one below the other in one storage; input-major."""
        tensors = [self._left.pop(name) for name in names]
        heights = [math.prod(tensor.dims[1:]) for tensor in tensors]
        out = torch.empty(tensors[0].dims[0], sum(heights), dtype=torch.float32, device=self._device).t()
        for tensor, part in zip(tensors, torch.split(out, heights), strict=True):
            read_rows(self._checkpoint, tensor, part, on_read=self._on_read)
        return out

    def finish(self) -> None:
        """Check that every tensor was taken: one that is left would be missing from the computation.

        Raises:
            ModelError: ``unsupported_tensor``, naming it.
        """
        if self._left:
            name = min(self._left)
            raise ModelError(
                "unsupported_tensor",
                f"{self._checkpoint.path.name} holds {name}, which this engine's {self._checkpoint.architecture} "
                "does not compute.",
                "Choose a checkpoint without it, or another architecture.",
            )
