"""A GGUF file, open: its metadata and tensor directory in memory, its tensor bytes through a map of the file.

The header is parsed and checked by ``header.py`` when the file is opened; the tensors are not read until asked for, and
then without a copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.checkpoint.header import Header, TensorInfo, parse_header, shown
from kvasir_console.errors import ModelError

__all__ = ["Checkpoint", "GGMLType", "TensorInfo", "shown"]


class Checkpoint:
    """A checked GGUF file. Close it, or use it as a context manager."""

    __slots__ = ("_header", "_map", "_view", "file_bytes", "metadata", "path", "tensors")

    def __init__(self, path: Path, mapped: mmap.mmap, header: Header) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = MappingProxyType(header.metadata)
        """Key to ``str``, ``int``, ``float``, ``bool`` or ``list``."""
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(header.tensors)
        """Name to directory entry, in the order of the directory."""
        self.file_bytes = len(mapped)
        self._map = mapped
        self._view = memoryview(mapped)
        self._header = header

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Map ``path`` and check its header.

        Raises:
            ModelError: ``model_unreadable`` if it cannot be opened or is not an ordinary file, ``gguf_malformed`` if
                its contents are refused; the message names the key or tensor.
        """
        mapped = _map_file(path)
        try:
            with memoryview(mapped) as view:
                header = parse_header(view, path.name)
        except BaseException:
            with contextlib.suppress(BufferError):
                mapped.close()
            raise
        return cls(path, mapped, header)

    @property
    def architecture(self) -> str:
        """``general.architecture``. Raises ``ModelError`` if it is absent or not a name."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise ModelError(
                "model_contradictory",
                f"{shown(self.path.name)}: general.architecture is {'absent' if name is None else 'not a name'}.",
                "The file is no model; fetch another.",
            )
        return name

    @property
    def data_start(self) -> int:
        """Where the header with its padding ends, in bytes from the start of the file."""
        return self._header.data_start

    def header_bytes(self) -> memoryview:
        """The header with its padding, as stored."""
        return self._view[: min(self.data_start, self.file_bytes)]

    def metadata_bytes(self, key: str) -> memoryview:
        """One metadata entry (key, type and value) exactly as stored."""
        begin, end = self._header.spans[key]
        return self._view[begin:end]

    def raw(self, tensor: TensorInfo, begin: int = 0, end: int | None = None) -> memoryview:
        """The stored bytes ``[begin, end)`` of ``tensor``, read-only and without a copy.

        ``begin`` and ``end`` count from the tensor's first byte; ``end`` defaults to its last.
        """
        end = tensor.n_bytes if end is None else end
        if not 0 <= begin <= end <= tensor.n_bytes:
            raise ValueError(f"bytes [{begin}, {end}) do not lie in {tensor.name} of {tensor.n_bytes} bytes")
        return self._view[tensor.offset + begin : tensor.offset + end]

    def bytes_at(self, begin: int, end: int) -> memoryview:
        """The bytes ``[begin, end)`` of the file, clipped to it."""
        return self._view[begin:end]

    def close(self) -> None:
        """Unmap the file. Views that are still held keep the map alive until they are dropped."""
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map_file(path: Path) -> mmap.mmap:
    try:
        # Without O_NONBLOCK the open itself would wait on a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(
                    "model_unreadable", f"{shown(str(path), 400)} is not an ordinary file.", "Give the path of a GGUF."
                )
            if status.st_size == 0:
                raise ModelError(
                    "gguf_malformed", f"{shown(path.name)} is refused: the file is empty.", "Fetch the file again."
                )
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelError(
            "model_unreadable",
            f"{shown(str(path), 400)} cannot be opened: {error.strerror or error}.",
            "Check the path and its permissions.",
        ) from error
