"""A model in several files, as llama.cpp's ``gguf-split`` and gguf-py write it.

Each part is a legal GGUF named ``<model>-00001-of-00003.gguf``, numbered from one, with ``split.no`` (from zero),
``split.count`` and ``split.tensors.count`` (of all parts together). The first part has the model's metadata, and
sometimes no tensors; each part has the directory of its own tensors.

Pure functions of names and parsed headers: nothing is opened here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from kvasir_console.engine.checkpoint.header import MAX_TENSORS, Header, TensorInfo, shown
from kvasir_console.errors import ModelError

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
"""What says how a model was cut, not what it is."""
MAX_PARTS = 1024
_NAME = re.compile(r"(?P<model>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SplitPart:
    """What a part says of itself: it is part ``number``, from 0, of ``count``."""

    number: int
    count: int
    n_tensors: int | None
    """Of all parts; ``None`` if it does not say."""


def read_split(header: Header, file: str) -> SplitPart | None:
    """What ``file`` is a part of; ``None`` for a whole model. A count of 0 is what joining leaves behind.

    Raises:
        ModelError: ``gguf_parts_disagree``; the keys make no part.
    """
    number, count, n_tensors = (_number(header, key, file) for key in SPLIT_KEYS)
    if count is None or count < 2:
        return None
    if count > MAX_PARTS:
        _refuse(file, f"its split.count is {count}, more than {MAX_PARTS}")
    if number is None or number >= count:
        _refuse(file, f"its split.no is {number}, but split.count is {count}")
    return SplitPart(number, count, n_tensors)


def model_of(file: str) -> str | None:
    """The name of the model of which ``file`` is a part, if it is named like one."""
    match = _NAME.fullmatch(file)
    return match["model"] if match and int(match["count"]) > 1 else None


def part_names(file: str, part: SplitPart) -> list[str]:
    """The names of all parts, beside ``file``, which is ``part``.

    Raises:
        ModelError: ``gguf_parts_disagree``; the name is not that of this part, so the others cannot be named.
    """
    match = _NAME.fullmatch(file)
    if match is None or (int(match["number"]), int(match["count"])) != (part.number + 1, part.count):
        wanted = f"-{part.number + 1:05d}-of-{part.count:05d}.gguf"
        _refuse(file, f"it is part {part.number + 1} of {part.count}, but its name does not end in {wanted}")
    return [f"{match['model']}-{number:05d}-of-{part.count:05d}.gguf" for number in range(1, part.count + 1)]


def joined(headers: Sequence[Header], files: Sequence[str]) -> dict[str, TensorInfo]:
    """The tensors of all parts, in their order, each with the number of its part.

    Raises:
        ModelError: ``gguf_parts_disagree``, naming the part and the key or tensor.
    """
    first = read_split(headers[0], files[0])
    tensors: dict[str, TensorInfo] = {}
    for number, (header, file) in enumerate(zip(headers, files, strict=True)):
        part = read_split(header, file)
        if part is None or first is None or (part.number, part.count) != (number, len(headers)):
            told = f"part {part.number + 1} of {part.count}" if part else "no part"
            _refuse(file, f"it says that it is {told}, not part {number + 1} of {len(headers)}")
        if part.n_tensors != first.n_tensors:
            _refuse(file, f"its split.tensors.count is {part.n_tensors}, that of the first part {first.n_tensors}")
        told_model = headers[0].metadata.get("general.architecture")
        if header.metadata.get("general.architecture", told_model) != told_model:
            _refuse(file, "its general.architecture is not that of the first part")
        for tensor in header.tensors.values():
            if tensor.name in tensors:
                _refuse(file, f"the tensor {tensor.name} is also in part {tensors[tensor.name].part + 1}")
            tensors[tensor.name] = replace(tensor, part=number)
        if len(tensors) > MAX_TENSORS:
            _refuse(file, f"with it the model has more than {MAX_TENSORS} tensors")
    stated = first.n_tensors if first else None
    if stated is not None and stated != len(tensors):
        _refuse(files[0], f"split.tensors.count is {stated}, but the {len(headers)} parts hold {len(tensors)} tensors")
    return tensors


def part_missing(names: Sequence[str], missing: Sequence[str]) -> ModelError:
    """The refusal of a model some of whose parts are not beside the others."""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return ModelError(
        "gguf_part_missing",
        f"The model is in {len(names)} parts, and {shown(missing[0])}{more} is not beside the others.",
        "Fetch the missing parts into the same folder; all of them are needed.",
    )


def _number(header: Header, key: str, file: str) -> int | None:
    value = header.metadata.get(key)
    if value is not None and (type(value) is not int or value < 0):
        _refuse(file, f"its {key} is {value!r:.40}, not a number")
    return value


def _refuse(file: str, reason: str) -> NoReturn:
    raise ModelError(
        "gguf_parts_disagree",
        f"{shown(file)} is refused: {reason}.",
        "Fetch all parts of one model again, under the names they were published with.",
    )
