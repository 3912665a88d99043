"""Writing GGUF v3: a header made of ready entries, then tensors streamed one by one.

The bytes are a pure function of the arguments, and the file appears under its name only when it is complete and on
disk. ``gguf.GGUFWriter`` is not used because it keeps what it writes in memory and cannot copy metadata as stored.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.errors import SystemResourceError

Buffer: TypeAlias = bytes | bytearray | memoryview

ALIGNMENT = 32
_UINT32, _FLOAT32, _BOOL, _STRING = 4, 6, 7, 8


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor to write. ``contents`` gives its ``n_bytes`` stored bytes in order, when its turn comes."""

    name: str
    dims: tuple[int, ...]
    type: GGMLType
    n_bytes: int
    contents: Callable[[], Iterable[Buffer]]


def u32_entry(key: str, value: int) -> bytes:
    return _text(key) + struct.pack("<II", _UINT32, value)


def f32_entry(key: str, value: float) -> bytes:
    return _text(key) + struct.pack("<If", _FLOAT32, value)


def bool_entry(key: str, value: bool) -> bytes:
    return _text(key) + struct.pack("<I?", _BOOL, value)


def text_entry(key: str, value: str) -> bytes:
    return _text(key) + struct.pack("<I", _STRING) + _text(value)


def write_gguf(destination: Path, metadata: Sequence[Buffer], tensors: Sequence[TensorPart]) -> None:
    """Write ``destination`` by way of a temporary file beside it.

    Args:
        metadata: whole entries (key, type, value), ``general.alignment`` among them if it is to be stated; the
            alignment is 32.
        tensors: in the order of the directory and of the data.

    Raises:
        SystemResourceError: ``disk_write_failed``; nothing is left under either name.
    """
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=f"{destination.name}.", suffix=".part", dir=destination.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_header(metadata, tensors))
                for tensor in tensors:
                    written = sum(file.write(chunk) for chunk in tensor.contents())
                    if written != tensor.n_bytes:
                        raise ValueError(f"{tensor.name} came to {written} bytes, not {tensor.n_bytes}")
                    file.write(bytes(-written % ALIGNMENT))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, destination)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise
        sync_directory(destination.parent)
    except OSError as error:
        raise SystemResourceError(
            "disk_write_failed",
            f"{destination} cannot be written: {error.strerror or error}.",
            "Make room on the disk, or choose another folder with KVASIR_CACHE.",
        ) from error


def sync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _header(metadata: Sequence[Buffer], tensors: Sequence[TensorPart]) -> bytes:
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for entry in metadata:
        header += entry
    offset = 0
    for tensor in tensors:
        header += _text(tensor.name)
        header += struct.pack(f"<I{len(tensor.dims)}QIQ", len(tensor.dims), *tensor.dims, tensor.type, offset)
        offset += -(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT
    return bytes(header + bytes(-len(header) % ALIGNMENT))
