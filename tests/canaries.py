"""A planted secret in every spelling it could be written in, and where they are looked for."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote_from_bytes

from kvasir_console.wallet.localnet import base58

SHORTEST = 8
"""A spelling below this many bytes would be found by chance."""


def spellings(secret: bytes | str) -> frozenset[bytes]:
    """All of them, forwards and backwards, each as bytes, as ASCII and as UTF-16."""
    data = secret.encode() if isinstance(secret, str) else secret
    texts = _texts(data) | _texts(data[::-1])
    if isinstance(secret, str):
        words = secret.split()
        texts |= {secret, secret.upper(), json.dumps(secret)[1:-1], "".join(words), "\n".join(words), ",".join(words)}
        texts |= {json.dumps(words)[1:-1], json.dumps(words, separators=(",", ":"))[1:-1], "-".join(words)}
    every = {data}
    for text in texts:
        every |= {text.encode(), text.encode("utf-16-le"), text.encode("utf-16-be")}
    every |= {each[::-1] for each in every}
    return frozenset(each for each in every if len(each) >= SHORTEST)


def _texts(data: bytes) -> set[str]:
    texts = {
        data.hex(),
        data.hex().upper(),
        data.hex(":"),
        data.hex(" "),
        base58.encode(data),
        quote_from_bytes(data, ""),
    }
    texts |= {repr(data)[2:-1], str(int.from_bytes(data))}
    for numbers in (list(data), [each - 256 if each > 127 else each for each in data]):
        texts |= {separator.join(map(str, numbers)) for separator in (", ", ",", " ")}
    for encode in (base64.b64encode, base64.urlsafe_b64encode, base64.b32encode, base64.b85encode):
        texts |= set(_wherever_it_stands(data, encode))
    return texts


def _wherever_it_stands(data: bytes, encode: Callable[[bytes], bytes]) -> Iterator[str]:
    """What such an encoding of a longer text has in common whatever stands before and after the secret."""
    for before in range(5):
        one, other = (
            encode(bytes([fill]) * before + data + bytes([fill]) * 7).decode().rstrip("=") for fill in (0x00, 0xFF)
        )
        places = [place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a == b]
        if places:
            yield one[places[0] : places[-1] + 1]


def found_in(content: bytes, canaries: Iterable[bytes]) -> list[bytes]:
    return [each for each in canaries if each in content]


def found_in_files(directory: Path, canaries: Iterable[bytes]) -> tuple[int, list[tuple[Path, bytes]]]:
    """How many files were read, and what was found in which."""
    wanted, read, found = tuple(canaries), 0, []
    for file in directory.rglob("*"):
        if file.is_file() and not file.is_symlink():
            read += 1
            found += [(file, each) for each in found_in(file.read_bytes(), wanted)]
    return read, found


def found_in_processes(canaries: Iterable[bytes]) -> tuple[int, list[tuple[str, bytes]]]:
    """How many processes could be looked at, and what was found in whose arguments or environment."""
    wanted, read, found = tuple(canaries), 0, []
    for name in filter(str.isdigit, os.listdir("/proc")):
        for part in ("cmdline", "environ"):
            try:
                content = Path("/proc", name, part).read_bytes()
            except OSError:  # it ended, or is another user's
                continue
            read += part == "cmdline"
            found += [(f"{name}/{part}", each) for each in found_in(content, wanted)]
    return read, found
