"""The header of a GGUF file (versions 2 and 3, little-endian), read without trusting it.

A model file is hostile until checked: every count and length is compared with what the file can hold before anything
is allocated for it, and a refusal names the key or tensor, with its control characters escaped.

Layout (GGUF specification in the ggml repository): ``GGUF``, version u32, tensor count u64, metadata count u64; then
the metadata (key, type u32, value), then the tensor directory (name, dimension count u32, dimensions u64, type u32,
offset u64 from the start of the data), then padding to ``general.alignment``, then the data. A string is a u64 length
and UTF-8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.errors import ModelError

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256 * 2**20
MAX_METADATA_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 63
"""ggml keeps tensor names in 64 bytes with a final zero."""
MAX_STRING_BYTES = 16 * 2**20
MAX_ARRAY_ITEMS = 2**23
"""Items of all arrays together; the largest vocabularies with their merges have about 2 million."""
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_SCALARS = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_HINT = "The file is damaged or was made by a faulty tool; fetch it again."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor directory, checked against the file.

    ``dims`` are in ggml's order: the first is contiguous, so a matrix is ``(n_in, n_out)`` and a bank of experts
    ``(n_in, n_out, n_expert)``. ``offset`` counts bytes from the start of the file, or of the part of a split model.
    """

    name: str
    dims: tuple[int, ...]
    type: GGMLType
    offset: int
    n_bytes: int
    part: int = 0
    """Which file of a split model, from 0."""


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. ``spans`` gives, for each key, where its entry (key, type, value) lies in the file."""

    version: int
    metadata: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    tensors: dict[str, TensorInfo]
    data_start: int


def shown(text: str, limit: int = 80) -> str:
    """``text`` fit for a message: nothing a terminal would act on, and not longer than ``limit`` characters."""
    clean = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text[:limit]
    )
    return clean if len(text) <= limit else f"{clean}…"


def parse_header(data: memoryview, file: str) -> Header:
    """Parse and check the header of a whole GGUF file.

    Args:
        data: every byte of the file; only the header is read.
        file: the file's name, for messages.

    Raises:
        ModelError: ``gguf_malformed``, naming the key or tensor where the damage shows.
    """
    cursor = _Cursor(data, file)
    version = _read_preamble(cursor)
    n_tensors = cursor.unsigned(_U64, "the tensor count")
    n_keys = cursor.unsigned(_U64, "the metadata count")
    # The shortest tensor entry has 25 bytes and the shortest metadata entry 13.
    if n_tensors > min(MAX_TENSORS, cursor.left // 25):
        cursor.refuse(f"it claims {n_tensors} tensors, more than it can hold")
    if n_keys > min(MAX_METADATA_KEYS, cursor.left // 13):
        cursor.refuse(f"it claims {n_keys} metadata keys, more than it can hold")
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for number in range(n_keys):
        begin = cursor.at
        key = _read_name(cursor, f"metadata key {number}", MAX_KEY_BYTES)
        if key in metadata:
            cursor.refuse(f"the metadata key {key} appears twice")
        value_type = cursor.unsigned(_U32, f"the type of metadata key {key}")
        if key == "general.alignment" and value_type != _UINT32:
            cursor.refuse(f"general.alignment must be a u32, not metadata type {value_type}")
        metadata[key] = _read_value(cursor, value_type, f"metadata key {key}", 0)
        spans[key] = (begin, cursor.at)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if alignment < 8 or alignment & (alignment - 1):
        cursor.refuse(f"general.alignment is {alignment}, not a power of two of at least 8")
    entries = [_read_entry(cursor, number) for number in range(n_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            cursor.refuse(f"the tensor {entry.name} appears twice")
        tensors[entry.name] = _placed(cursor, entry, data_start, alignment, len(data))
    _refuse_overlap(cursor, tensors)
    return Header(version, metadata, spans, tensors, data_start)


class _Cursor:
    """A read position that never passes the end of the header."""

    __slots__ = ("at", "data", "end", "file", "items")

    def __init__(self, data: memoryview, file: str) -> None:
        self.data = data
        self.at = 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.file = shown(file)
        self.items = 0

    @property
    def left(self) -> int:
        return self.end - self.at

    def refuse(self, reason: str) -> NoReturn:
        raise ModelError("gguf_malformed", f"{self.file} is refused: {reason}.", _HINT)

    def refuse_short(self, what: str) -> NoReturn:
        limit = f", or has more than {MAX_HEADER_BYTES >> 20} MiB of header" if self.end < len(self.data) else ""
        self.refuse(f"{what} ends past the end of the file, which is truncated{limit}")

    def unsigned(self, form: struct.Struct, what: str) -> int:
        if form.size > self.left:
            self.refuse_short(what)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return int(value)

    def text(self, what: str, limit: int) -> str:
        length = self.unsigned(_U64, f"the length of {what}")
        if length > self.left:
            self.refuse_short(f"{what} has a length of {length} bytes and")
        if length > limit:
            self.refuse(f"{what} is too long: a length of {length} bytes, where {limit} is the limit")
        begin, self.at = self.at, self.at + length
        try:
            return str(self.data[begin : self.at], "utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8")


def _read_preamble(cursor: _Cursor) -> int:
    if not len(cursor.data):
        cursor.refuse("the file is empty")
    if cursor.left < len(MAGIC):
        cursor.refuse_short("the magic")
    magic = bytes(cursor.data[: len(MAGIC)])
    if magic != MAGIC:
        cursor.refuse(f"its magic is {magic!r}, not {MAGIC!r}, so it is not a GGUF file")
    cursor.at = len(MAGIC)
    version = cursor.unsigned(_U32, "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (2, 3):
            cursor.refuse(f"version {swapped} is stored in big-endian byte order, which is not supported")
        cursor.refuse(f"GGUF version {version} is not supported (2 and 3 are)")
    return version


def _read_name(cursor: _Cursor, what: str, limit: int) -> str:
    name = cursor.text(f"the name of {what}", limit)
    if not name or not name.isprintable():
        cursor.refuse(f"the name of {what} is empty or has control characters: '{shown(name)}'")
    return name


def _read_value(cursor: _Cursor, value_type: int, what: str, depth: int) -> Any:
    what = shown(what)
    if value_type == _STRING:
        return cursor.text(what, MAX_STRING_BYTES)
    if value_type == _ARRAY:
        return _read_array(cursor, what, depth)
    form = _SCALARS.get(value_type)
    if form is None:
        cursor.refuse(f"{what} has the unknown type {value_type}")
    if form.size > cursor.left:
        cursor.refuse_short(what)
    (value,) = form.unpack_from(cursor.data, cursor.at)
    cursor.at += form.size
    return value


def _read_array(cursor: _Cursor, what: str, depth: int) -> list[Any]:
    if depth == MAX_ARRAY_DEPTH:
        cursor.refuse(f"{what} is an array nested more than {MAX_ARRAY_DEPTH} deep")
    item_type = cursor.unsigned(_U32, f"the item type of the array {what}")
    count = cursor.unsigned(_U64, f"the length of the array {what}")
    form = _SCALARS.get(item_type)
    if form is None and item_type not in (_STRING, _ARRAY):
        cursor.refuse(f"the array {what} has items of the unknown type {item_type}")
    least = form.size if form else 8 if item_type == _STRING else 12
    if count > cursor.left // least:
        cursor.refuse_short(f"the array {what} has a length of {count} items and")
    cursor.items += count
    if cursor.items > MAX_ARRAY_ITEMS:
        cursor.refuse(f"with the array {what} its metadata has more than {MAX_ARRAY_ITEMS} array items")
    if form:
        begin, cursor.at = cursor.at, cursor.at + count * form.size
        # Each item was bounded above, so this list has as many entries as the file has values.
        return [value for (value,) in form.iter_unpack(cursor.data[begin : cursor.at])]
    if item_type == _STRING:
        return list(_read_strings(cursor, count, what))
    return [_read_array(cursor, what, depth + 1) for _ in range(count)]


def _read_strings(cursor: _Cursor, count: int, what: str) -> Iterator[str]:
    # The vocabulary's loop: hundreds of thousands of items, so the happy path calls nothing but struct and str.
    data, at, end = cursor.data, cursor.at, cursor.end
    length_of = _U64.unpack_from
    for number in range(count):
        if end - at < 8:
            cursor.refuse_short(f"item {number} of the array {what}")
        length = length_of(data, at)[0]
        at += 8
        if length > end - at or length > MAX_STRING_BYTES:
            cursor.refuse_short(f"item {number} of the array {what} has a length of {length} bytes and")
        try:
            yield str(data[at : at + length], "utf-8")
        except UnicodeDecodeError:
            cursor.refuse(f"item {number} of the array {what} is not UTF-8")
        at += length
    cursor.at = at


def _read_entry(cursor: _Cursor, number: int) -> TensorInfo:
    """One directory entry, its offset still relative to the data and its size not yet compared with the file."""
    name = _read_name(cursor, f"tensor {number}", MAX_NAME_BYTES)
    what = f"the tensor {name}"
    n_dims = cursor.unsigned(_U32, f"the dimension count of {what}")
    if not 1 <= n_dims <= MAX_DIMENSIONS:
        cursor.refuse(f"{what} has {n_dims} dimensions, where 1 to {MAX_DIMENSIONS} are possible")
    dims = tuple(cursor.unsigned(_U64, f"dimension {axis} of {what}") for axis in range(n_dims))
    number_of_type = cursor.unsigned(_U32, f"the type of {what}")
    offset = cursor.unsigned(_U64, f"the offset of {what}")
    try:
        ggml_type = GGMLType(number_of_type)
    except ValueError:
        cursor.refuse(f"{what} has the unknown type {number_of_type}")
    if 0 in dims:
        cursor.refuse(f"{what} has a dimension of zero: {list(dims)}")
    if dims[0] % ggml_type.block_values:
        cursor.refuse(f"a row of {what} has {dims[0]} values, not whole {ggml_type.name} blocks")
    n_bytes = dims[0] // ggml_type.block_values * ggml_type.block_bytes
    for rows in dims[1:]:
        n_bytes *= rows
    return TensorInfo(name, dims, ggml_type, offset, n_bytes)


def _placed(cursor: _Cursor, entry: TensorInfo, data_start: int, alignment: int, file_bytes: int) -> TensorInfo:
    if entry.offset % alignment:
        cursor.refuse(f"the offset {entry.offset} of the tensor {entry.name} is not a multiple of {alignment}")
    begin = data_start + entry.offset
    if begin + entry.n_bytes > file_bytes:
        cursor.refuse(
            f"the tensor {entry.name} of {entry.n_bytes} bytes at {begin} ends past the end of the file "
            f"({file_bytes} bytes), which is truncated"
        )
    return TensorInfo(entry.name, entry.dims, entry.type, begin, entry.n_bytes)


def _refuse_overlap(cursor: _Cursor, tensors: dict[str, TensorInfo]) -> None:
    for one, next_one in pairwise(sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.n_bytes))):
        if one.offset + one.n_bytes > next_one.offset:
            cursor.refuse(f"the tensors {one.name} and {next_one.name} overlap")
