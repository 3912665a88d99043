"""A model's GGUF, open: its metadata and tensor directory in memory, its tensor bytes through a map of the file.

The header is parsed and checked by ``header.py`` when the file is opened; the tensors are not read until asked for, and
then without a copy. A model in several files (``split.py``) is one checkpoint with a map for each.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.checkpoint.header import Header, TensorInfo, parse_header, shown
from kvasir_console.engine.checkpoint.split import SPLIT_KEYS, joined, part_missing, part_names, read_split
from kvasir_console.errors import ModelError

__all__ = ["Checkpoint", "GGMLType", "Part", "TensorInfo", "shown"]


class Part:
    """One file of a checkpoint: its header, and its bytes."""

    __slots__ = ("_map", "header", "path", "view")

    def __init__(self, path: Path, mapped: mmap.mmap, view: memoryview, header: Header) -> None:
        self.path = path
        self.header = header
        self.view = view
        """Every byte of the file, read-only."""
        self._map = mapped

    @classmethod
    def open(cls, path: Path) -> Part:
        """Map ``path`` and check its header. Raises ``ModelError``."""
        mapped = _map_file(path)
        view = memoryview(mapped)
        try:
            return cls(path, mapped, view, parse_header(view, path.name))
        except BaseException:
            view.release()
            with contextlib.suppress(BufferError):
                mapped.close()
            raise

    @property
    def n_bytes(self) -> int:
        return len(self.view)

    @property
    def header_bytes(self) -> memoryview:
        """The header with its padding, as stored."""
        return self.view[: self.header.data_start]

    def close(self) -> None:
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class Checkpoint:
    """A checked model, stage or shard. Close it, or use it as a context manager."""

    __slots__ = ("_parts", "metadata", "path", "tensors")

    def __init__(self, path: Path, parts: Sequence[Part], tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        metadata = parts[0].header.metadata
        self.metadata: Mapping[str, Any] = MappingProxyType(
            {key: value for key, value in metadata.items() if key not in SPLIT_KEYS}
        )
        """Key to ``str``, ``int``, ``float``, ``bool`` or ``list``; without how the model is cut into files."""
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        """Name to directory entry, in the order of the parts and their directories."""
        self._parts = tuple(parts)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Map ``path`` and check its header; if it is a part of a split model, with all the others beside it.

        Raises:
            ModelError: ``model_unreadable`` if it cannot be opened or is not an ordinary file, ``gguf_malformed`` if
                its contents are refused; the message names the key or tensor. ``gguf_part_missing``,
                ``gguf_parts_disagree``: the parts of a split model are not all there, or not of one model.
        """
        given = Part.open(path)
        parts = [given]
        try:
            split = read_split(given.header, path.name)
            if split is None:
                return cls(path, parts, given.header.tensors)
            names = part_names(path.name, split)
            missing = [name for name in names if not path.with_name(name).exists()]
            if missing:
                raise part_missing(names, missing)
            parts = []
            for number, name in enumerate(names):
                parts.append(given if number == split.number else Part.open(path.with_name(name)))
            return cls(path, parts, joined([part.header for part in parts], names))
        except BaseException:
            for part in {id(part): part for part in (given, *parts)}.values():
                part.close()
            raise

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
    def parts(self) -> tuple[Part, ...]:
        """Its files in order; nearly always one."""
        return self._parts

    @property
    def file_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(part.n_bytes for part in self._parts)

    def metadata_bytes(self, key: str) -> memoryview:
        """One metadata entry (key, type and value) exactly as stored."""
        begin, end = self._parts[0].header.spans[key]
        return self._parts[0].view[begin:end]

    def raw(self, tensor: TensorInfo, begin: int = 0, end: int | None = None) -> memoryview:
        """The stored bytes ``[begin, end)`` of ``tensor``, read-only and without a copy.

        ``begin`` and ``end`` count from the tensor's first byte; ``end`` defaults to its last.
        """
        end = tensor.n_bytes if end is None else end
        if not 0 <= begin <= end <= tensor.n_bytes:
            raise ValueError(f"bytes [{begin}, {end}) do not lie in {tensor.name} of {tensor.n_bytes} bytes")
        return self._parts[tensor.part].view[tensor.offset + begin : tensor.offset + end]

    def close(self) -> None:
        """Unmap the files. Views that are still held keep a map alive until they are dropped."""
        for part in self._parts:
            part.close()

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
