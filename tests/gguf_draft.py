"""A GGUF taken apart so that any of its statements can be made false, and put together again.

Written from the GGUF specification for the mutation tests; it checks nothing and knows nothing of the product.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q",
         F64: "<d"}  # fmt: skip


@dataclass(slots=True)
class Entry:
    """A metadata entry; ``value`` is as stored, after the type."""

    key: bytes
    type: int
    value: bytes


@dataclass(slots=True)
class Tensor:
    """A directory entry with its bytes; ``offset`` is a lie, if it is not ``None``."""

    name: bytes
    dims: list[int]
    type: int
    data: bytes
    offset: int | None = None


@dataclass(slots=True)
class Draft:
    """A file; the two counts are lies, if they are not ``None``."""

    entries: list[Entry]
    tensors: list[Tensor]
    version: int = 3
    alignment: int = 32
    n_entries: int | None = None
    n_tensors: int | None = None
    sections: list[int] = field(default_factory=list)
    """Where metadata, directory and data began when it was last put together."""

    def find(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key == key.encode()), None)

    def put(self, key: str, kind: int, value: Any) -> None:
        """Set an entry, or add it."""
        entry = self.find(key)
        if entry is None:
            self.entries.append(entry := Entry(key.encode(), kind, b""))
        entry.type, entry.value = kind, encoded(kind, value)

    def tensor(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name.encode()), None)

    @property
    def architecture(self) -> str:
        entry = self.find("general.architecture")
        return entry.value[8:].decode(errors="replace") if entry and entry.type == TEXT else "llama"

    def bytes(self) -> bytes:
        """The file."""
        out = bytearray(b"GGUF" + struct.pack("<I", self.version & 0xFFFFFFFF))
        out += u64(len(self.tensors) if self.n_tensors is None else self.n_tensors)
        out += u64(len(self.entries) if self.n_entries is None else self.n_entries)
        self.sections = [len(out)]
        for entry in self.entries:
            out += text(entry.key) + struct.pack("<I", entry.type & 0xFFFFFFFF) + entry.value
        self.sections.append(len(out))
        at = 0
        for tensor in self.tensors:
            out += text(tensor.name) + struct.pack("<I", len(tensor.dims)) + b"".join(u64(n) for n in tensor.dims)
            out += struct.pack("<I", tensor.type & 0xFFFFFFFF) + u64(at if tensor.offset is None else tensor.offset)
            at += len(tensor.data) + -len(tensor.data) % self.alignment
        out += bytes(-len(out) % self.alignment)
        self.sections.append(len(out))
        for tensor in self.tensors:
            out += tensor.data + bytes(-len(tensor.data) % self.alignment)
        return bytes(out)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value & (2**64 - 1))


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def encoded(kind: int, value: Any) -> bytes:
    """A value as stored. An array is ``(item type, items)``; numbers that do not fit wrap around."""
    if kind == TEXT:
        return text(value if isinstance(value, bytes) else str(value).encode())
    if kind == ARRAY:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(encoded(item, each) for each in items)
    if kind in (F32, F64):
        return struct.pack(FORMS[kind], float(value))
    form = FORMS[kind]
    size = struct.calcsize(form)
    return (int(value) & (2 ** (8 * size) - 1)).to_bytes(size, "little")


def parsed(data: bytes) -> Draft:
    """A valid file, taken apart."""
    at = 24
    version, n_tensors, n_entries = struct.unpack_from("<IQQ", data, 4)

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return data[at - count : at]

    def number(form: str) -> int:
        return int(struct.unpack(form, take(struct.calcsize(form)))[0])

    def value(kind: int) -> bytes:
        begin = at
        if kind == TEXT:
            take(number("<Q"))
        elif kind == ARRAY:
            item, count = number("<I"), number("<Q")
            for _ in range(count):
                value(item)
        else:
            take(struct.calcsize(FORMS[kind]))
        return data[begin:at]

    entries = []
    for _ in range(n_entries):
        key, kind = take(number("<Q")), number("<I")
        entries.append(Entry(key, kind, value(kind)))
    directory = []
    for _ in range(n_tensors):
        name, count = take(number("<Q")), number("<I")
        directory.append((name, [number("<Q") for _ in range(count)], number("<I"), number("<Q")))
    draft = Draft(entries, [], version)
    alignment = draft.find("general.alignment")
    draft.alignment = struct.unpack("<I", alignment.value)[0] if alignment else 32
    start = at + -at % draft.alignment
    ends = sorted({offset for _, _, _, offset in directory} | {len(data) - start})
    for name, dims, kind, offset in directory:
        # With the padding after it, which the next offset bounds.
        end = ends[ends.index(offset) + 1]
        draft.tensors.append(Tensor(name, dims, kind, data[start + offset : start + end]))
    return draft


def split(draft: Draft, counts: list[int]) -> list[Draft]:
    """``draft`` in parts of so many tensors, as llama.cpp's gguf-split lays them out: all metadata in the first."""
    if sum(counts) != len(draft.tensors):
        raise ValueError(f"{counts} are not {len(draft.tensors)} tensors")
    left = list(draft.tensors)
    parts = []
    for number, count in enumerate(counts):
        part = Draft([*draft.entries] if number == 0 else [], left[:count], draft.version, draft.alignment)
        if number and draft.alignment != 32:
            part.put("general.alignment", U32, draft.alignment)
        part.put("split.no", U16, number)
        part.put("split.count", U16, len(counts))
        part.put("split.tensors.count", I32, len(draft.tensors))
        parts.append(part)
        left = left[count:]
    return parts


def write_parts(parts: list[Draft], folder: Path, model: str = "tiny") -> list[Path]:
    """Write parts under the names that gguf-split gives them."""
    paths = [folder / f"{model}-{number:05d}-of-{len(parts):05d}.gguf" for number in range(1, len(parts) + 1)]
    for part, path in zip(parts, paths, strict=True):
        path.write_bytes(part.bytes())
    return paths
