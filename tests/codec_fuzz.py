"""Fuzzing of whatever reads bytes of a peer: broken copies of real streams, in pieces, under bounds of time and memory.

A reader passes an input by taking it or by raising its own error. It fails by any other exception, by computing for
more than ``BOUND_S``, by keeping more than it was fed, or by allocating more than its ``Target.most_bytes``.

    python tests/codec_fuzz.py --count 1000000 [--only NAME] [--seed N]

prints a table of what came of them; ``fuzz_wire`` and ``fuzz_texts`` hold the readers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import signal
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

BOUND_BYTES = 2**18
BOUND_S = 5.0
"""Of this process's own computing for one input; nothing here takes a hundredth of it."""
LARGE_BYTES = 2**14
# What an attacker tries first where a count or a length stands.
_NUMBERS = (0, 1, 2, 3, 127, 128, 255, 256, 8192, 8193, 65535, 65536, 65537, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1)
# And where a value stands in a text.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 255, 256, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40),
    *(0.5, 3.0, -0.0, 1e308, -1e308, float("inf"), float("nan"), 1e-320),
    *("", " ", "0", "\0", "\n", "é", "\ud800", "\u202e", "a" * 300, "../../x", "%00", "{}", "1e999", "-", "\x1b[2J"),
    *([], [[]], {}, {"": {}}, [None], [0] * 40, {"id": 1}, [[[[[[[[1]]]]]]]]),
)


class HangError(BaseException):
    """The reader did not come back; no ``except Exception`` of its may swallow this."""


@dataclass(frozen=True)
class Target:
    """A reader under attack."""

    name: str
    samples: tuple[bytes, ...]
    """Real inputs, each of them taken."""
    read: Callable[[list[bytes]], bool]
    """Reads pieces of one input: whether it was taken, or refused. Anything it raises is a failure."""
    mend: Callable[[bytearray, random.Random], None] = lambda _data, _rng: None
    """Makes a broken input pass what guards the rest, such as a checksum."""
    shape: Callable[[random.Random], bytearray] | None = None
    """Makes an input of its own, for what is more than bytes; ``broken`` follows for some."""
    factor: float = 4.0
    """Bytes that may be allocated for each that came: objects are larger than what they are read from."""
    constant: int = BOUND_BYTES

    def most_bytes(self, size: int) -> float:
        return self.constant + self.factor * size


@dataclass
class Report:
    """What came of the inputs to one target."""

    name: str
    inputs: int = 0
    taken: int = 0
    refused: int = 0
    fed_bytes: int = 0
    slowest_ms: float = 0.0
    peak_bytes: int = 0
    took_s: float = 0.0
    slowest: bytes = field(default=b"", repr=False)

    def row(self) -> str:
        return (
            f"| {self.name} | {self.inputs:,} | {self.taken:,} | {self.refused:,} | {self.slowest_ms:.1f} | "
            f"{self.peak_bytes / 1024:.0f} |"
        )


HEADING = "| reader | inputs | taken | refused | slowest, ms | most memory, KiB |\n|---|---|---|---|---|---|"


def broken(rng: random.Random, samples: Sequence[bytes], data: bytearray | None = None) -> bytearray:
    """A real stream (or ``data``) with one to four things done to it."""
    data = bytearray(rng.choice(samples)) if data is None else data
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 16))
            case 3:
                del data[at : at + rng.randint(1, 16)]
            case 4:  # a number where one may stand
                width, code = rng.choice([(2, "<H"), (4, "<I"), (4, "<I"), (8, "<Q")])
                at -= at % 2
                number = rng.choice(_NUMBERS) % 2 ** (8 * width)
                data[at : at + width] = struct.pack(code, number)
            case 5:  # a part of another stream
                other = rng.choice(samples)
                begin = rng.randrange(len(other))
                data[at:at] = other[begin : begin + rng.randint(1, 64)]
            case 6:
                data += data[at : at + rng.randint(1, 200)]
            case _:
                data[at : at + 8] = rng.randbytes(8)
    return data


def altered(rng: random.Random, value: Any) -> Any:
    """A JSON value with one to three things done to it: another value, a field lost, doubled, renamed or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holders = [each for each in _holders(value) if each]
        if not holders:
            return copy.deepcopy(rng.choice(VALUES))
        holder = rng.choice(holders)
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        match rng.randrange(7):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
            case 3:
                del holder[key]
            case 4 if isinstance(holder, dict):
                holder[rng.choice(["", "id", "key", "\ud800", str(key).upper(), f"{key} "])] = copy.deepcopy(
                    holder[key]
                )
            case 4 if isinstance(holder, list) and len(holder) < 10_000:
                holder.extend(copy.deepcopy(holder[key]) for _ in range(rng.choice([1, 2, 300])))
            case 5:
                other = rng.choice(holders)
                holder[key] = copy.deepcopy(rng.choice([*other.values()] if isinstance(other, dict) else other))
            case _ if type(holder[key]) is int:
                holder[key] += rng.choice([-1, 1, 2**32, -(2**32)])
            case _:
                holder[key] = {"": holder[key]}
    return value


def _holders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _holders(each)


def dumped(rng: random.Random, value: Any) -> bytes:
    """A JSON text of ``value``, now and then one that another reader would read otherwise."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=rng.choice([(",", ":"), (", ", ": ")]))
    match rng.randrange(40):
        case 0:
            text = "[" * 3000 + text
        case 1:
            text = '{"a":' * 1500 + text + "}" * 1500
        case 2:
            text = text.replace("{", '{"id":1,"id":2,', 1)
        case 3:
            text = text.replace("0", "1" * 5000, 1)
        case 4:
            text = text.replace("1", "1e999", 1)
    return text.encode(errors="surrogatepass")


def plain(value: Any) -> bytes:
    """A real input."""
    return json.dumps(value).encode()


def json_shape(samples: Sequence[Any]) -> Callable[[random.Random], bytearray]:
    """Inputs that are JSON texts of altered samples; some of them broken further."""

    def shape(rng: random.Random) -> bytearray:
        data = bytearray(dumped(rng, altered(rng, rng.choice(samples))))
        return broken(rng, [bytes(data) or b"{}"], data) if rng.random() < 0.2 else data

    return shape


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """The stream in one to five pieces."""
    edges = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(5)))
    return [data[begin:end] for begin, end in zip([0, *edges], [*edges, len(data)], strict=True)]


def made(target: Target, rng: random.Random) -> bytes:
    """The next input to a target."""
    choice = rng.random()
    if choice < 0.03:
        return rng.randbytes(rng.randint(0, 400))
    if choice < 0.033:  # large ones, for what grows with its input
        data = broken(rng, target.samples)
        return bytes(data * (LARGE_BYTES // max(1, len(data)) + 1))[:LARGE_BYTES]
    data = broken(rng, target.samples) if target.shape is None else target.shape(rng)
    target.mend(data, rng)
    return bytes(data)


@contextlib.contextmanager
def bounded_time() -> Iterator[Callable[[], None]]:
    """Gives out what starts the clock anew; it runs only while this process computes."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def hang(*_: object) -> None:
        raise HangError(f"more than {BOUND_S} s")

    before = signal.signal(signal.SIGVTALRM, hang)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_VIRTUAL, BOUND_S) and None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(target: Target, count: int, seed: int = 0) -> Report:
    """Attack a reader ``count`` times. Raises ``AssertionError`` with the input that it does not stand."""
    rng = random.Random(f"{target.name}:{seed}")
    report = Report(target.name)
    for sample in target.samples:
        assert target.read([sample]), f"{target.name} refuses the real input {sample.hex()}"
    begun = time.perf_counter()
    tracemalloc.start()
    try:
        with bounded_time() as start:
            for number in range(count):
                data = made(target, rng)
                pieces = cut(rng, data)
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                start()
                at = time.process_time()
                try:
                    taken = target.read(pieces)
                except (Exception, HangError) as error:
                    raise AssertionError(f"{target.name}, input {number}: {error!r} for {data.hex()}") from error
                took_ms = (time.process_time() - at) * 1e3
                grown = tracemalloc.get_traced_memory()[1] - before
                assert grown <= target.most_bytes(len(data)), (
                    f"{target.name}, input {number}: {grown} bytes for the {len(data)} of {data.hex()}"
                )
                report.taken += taken
                report.fed_bytes += len(data)
                report.peak_bytes = max(report.peak_bytes, grown)
                if took_ms > report.slowest_ms:
                    report.slowest_ms, report.slowest = took_ms, data
    finally:
        tracemalloc.stop()
    report.inputs, report.refused = count, count - report.taken
    report.took_s = time.perf_counter() - begun
    return report


def targets() -> list[Target]:
    """Every reader, those of binary frames first."""
    import fuzz_peers
    import fuzz_texts
    import fuzz_wire

    return [*fuzz_wire.targets(), *fuzz_peers.targets(), *fuzz_texts.targets()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack every reader of peers' bytes.")
    parser.add_argument("--count", type=int, default=20_000, help="inputs, of all targets together")
    parser.add_argument("--only", default="", help="targets whose name has this in it")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chosen = [target for target in targets() if given.only in target.name]
    each = -(-given.count // len(chosen))
    print(HEADING)
    reports = []
    for target in chosen:
        reports.append(fuzz(target, each, given.seed))
        print(reports[-1].row(), flush=True)
    total = sum(report.inputs for report in reports)
    took_s, fed = sum(report.took_s for report in reports), sum(report.fed_bytes for report in reports)
    print(f"{total:,} inputs, {fed / 2**20:.0f} MiB, {took_s:.0f} s, seed {given.seed}", file=sys.stderr)


if __name__ == "__main__":
    main()
