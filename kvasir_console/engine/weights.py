"""A window's tensors, handed out by name: vectors and tables as they are, matrices in the form that was chosen.

Blocks are read from the file's map a few megabytes at a time and packed into their place, so loading needs the result
and little more. ``Holding`` remembers what became of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.gguf import Checkpoint, TensorInfo
from kvasir_console.engine.forms import Forms
from kvasir_console.engine.linear import DenseLinear, Linear, Rows, StoredTable, Table
from kvasir_console.engine.quant import dequantize
from kvasir_console.errors import ModelError

OnRead = Callable[[int], None]
"""Told the number of stored bytes read since it was told last."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What is held for one or several tensors of the file, which lie one below the other."""

    names: tuple[str, ...]
    heights: tuple[int, ...]
    """Rows of each."""
    held: Tensor | Linear | Table

    @property
    def n_bytes(self) -> int:
        return self.held.nbytes if isinstance(self.held, Tensor) else self.held.n_bytes

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The storages by the names of the tensors in them; of f32 values, each tensor's own rows."""
        if isinstance(self.held, Tensor):
            yield self.names[0], self.held
        elif isinstance(self.held, DenseLinear):
            yield from zip(self.names, torch.split(self.held.weight, list(self.heights)), strict=True)
        else:
            yield from ((name, tensor) for name in self.names for tensor in self.held.tensors())


def stored_rows(
    checkpoint: Checkpoint, tensor: TensorInfo, begin: int = 0, end: int | None = None, on_read: OnRead | None = None
) -> Rows:
    """The rows in the bytes ``[begin, end)`` of ``tensor``."""
    n_in = tensor.dims[0]
    row_bytes = tensor.n_bytes // math.prod(tensor.dims[1:])
    end = tensor.n_bytes if end is None else end

    def read(first: int, last: int) -> Tensor:
        raw = checkpoint.raw(tensor, begin + first * row_bytes, begin + last * row_bytes)
        copy = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
        if on_read is not None:
            on_read(len(copy))
        return copy.view(last - first, row_bytes)

    return Rows(tensor.type, (end - begin) // row_bytes, n_in, read)


class WindowReader:
    """Hands out a window's tensors by name, each once, and knows which nobody asked for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Iterable[TensorInfo],
        forms: Forms,
        *,
        device: torch.device | str = "cpu",
        on_read: OnRead | None = None,
    ) -> None:
        self.metadata: Mapping[str, Any] = checkpoint.metadata
        self.holdings: list[Holding] = []
        """What was handed out, in that order."""
        self._checkpoint = checkpoint
        self._left = {tensor.name: tensor for tensor in tensors}
        self.forms = forms
        self._device = device
        self._on_read = on_read

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def vector(self, name: str) -> Tensor:
        """A tensor of one dimension, (n,) f32."""
        rows = self._rows(name)
        out = torch.cat([dequantize(raw.to(self._device).view(-1), rows.type) for _, raw in rows.chunks()])
        self.holdings.append(Holding((name,), (rows.count,), out))
        return out

    def table(self, name: str) -> Table:
        """A matrix whose rows are looked up, held as it is stored."""
        rows = self._rows(name)
        table = StoredTable.pack(rows, self._device, self.forms.library)
        self.holdings.append(Holding((name,), (rows.count,), table))
        return table

    def matrix(self, *names: str) -> Linear:
        """A matrix, or several with the same ``n_in`` one below the other."""
        parts = [self._rows(name) for name in names]
        linear = self.forms.linear(parts, self._device)
        self.holdings.append(Holding(names, tuple(part.count for part in parts), linear))
        return linear

    def tied(self, name: str, *, lookups: bool) -> tuple[Table | None, Linear]:
        """A matrix that multiplies rows and, if ``lookups``, whose own rows are looked up: one storage, unless its form
        cannot give rows back; then it is held twice, once as stored."""
        tensor = self._wanted(name)
        linear = self.matrix(name)
        if not lookups:
            return None, linear
        if isinstance(linear, Table):
            return linear, linear
        table = StoredTable.pack(stored_rows(self._checkpoint, tensor), self._device, self.forms.library)
        self.holdings.append(Holding((name,), (table.count,), table))
        return table, linear

    def _rows(self, name: str) -> Rows:
        tensor = self._wanted(name)
        del self._left[name]
        return stored_rows(self._checkpoint, tensor, on_read=self._on_read)

    def _wanted(self, name: str) -> TensorInfo:
        """Raises ``ModelError`` ``missing_tensor``: a file may be whole by its own account, and yet of another kind."""
        tensor = self._left.get(name)
        if tensor is None:
            raise ModelError(
                "missing_tensor",
                f"{self._checkpoint.path.name} holds no {name}, which this engine's {self._checkpoint.architecture} "
                "needs.",
                "Choose another checkpoint; this one is of a kind that is not computed.",
            )
        return tensor

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
