"""Reports of a ring's stage: what each worker computed for it, signed, cumulative, so that the hub can pay for it.

    kvasir-stage-report-v1 LF {canonical JSON}

A stage owns the router of its layers and is the only one that knows which answers it asked for, used and found right.
One report is about one worker session; its counters are totals of one *run* (one load of the stage's engine) and never
fall, so reports may be lost and sent again. The key is the stage's wallet or a session key it delegated to.

A stage is not believed beyond what the hub saw. ``check_growth`` holds a report against the one before it,
``check_passed`` against the bytes that the hub itself carried between the two. Signatures are checked by the caller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from kvasir_console.errors import NetworkError
from kvasir_console.relay.wire.dispatch import paid_bytes
from kvasir_console.relay.wire.signed import canonical_json
from kvasir_console.relay.wire.statement import GENESIS

__all__ = [
    "MAX_SLICES",
    "MAX_TEXT_BYTES",
    "SliceWork",
    "StageReport",
    "Work",
    "check_growth",
    "check_passed",
    "no_evidence",
    "printable",
]

PREFIX = "kvasir-stage-report-v1"
MAX_SLICES = 64
MAX_TEXT_BYTES = 24 * 1024
MAX_FAULT = 200
_MAX_COUNT = 2**53 - 1
"""Beyond it a product with a width would not fit a column of the books."""
_HEX = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,44}")
_NAME = re.compile(r"[!-~]{1,128}")
_RUN = re.compile(r"[0-9a-f]{32}")
_FAULT = re.compile(rf"[ -~]{{0,{MAX_FAULT}}}")


@dataclass(frozen=True, slots=True, order=True)
class SliceWork:
    """Experts [begin, end) of one layer, and what was computed with them.

    ``rows`` and ``pairs`` are those of answers that were asked for, used and found right: work whose pay is not held.
    """

    layer: int
    begin: int
    end: int
    rows: int
    pairs: int
    shard_digest: str
    """As the worker announced it and the stage compared it with its own file; zeros if the worker's wire has none."""
    live: bool
    """Whether the worker serves it now."""

    def __post_init__(self) -> None:
        legal = (
            all(_count(each) for each in (self.layer, self.begin, self.end, self.rows, self.pairs))
            and self.layer < 2**31
            and self.begin < self.end < 2**31
            and type(self.live) is bool
            and _matches(_HEX, self.shard_digest)
        )
        if not legal:
            raise _malformed("a slice is out of bounds")

    @property
    def place(self) -> tuple[int, int, int]:
        return self.layer, self.begin, self.end


@dataclass(frozen=True, slots=True)
class Work:
    """Rows and pairs, summed up."""

    rows: int = 0
    pairs: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.rows + other.rows, self.pairs + other.pairs)


@dataclass(frozen=True, slots=True)
class StageReport:
    """Totals of one run about one worker. Raises ``NetworkError`` ``report_malformed`` for fields out of bounds."""

    hub: str
    """The hub's key: a report for one gateway says nothing to another."""
    stage: str
    """The wallet that the plan names for the stage."""
    key: str
    """What signed: that wallet, or a session key of it."""
    ring: str
    epoch: int
    """The generation of the plan in force."""
    run: str
    """32 hexadecimal digits, random for each load of the stage's engine."""
    sequence: int
    """Each greater than the last of its run and worker."""
    model_digest: str
    wallet: str
    """The worker's, as is the session."""
    session: str
    requests: int
    slices: tuple[SliceWork, ...]
    """Ascending, each place once."""
    quarantined: bool
    convictions: int
    """How often the stage has caught the worker in this run."""
    fault: str
    """What it was caught at last; empty if never."""
    evidence: str
    """SHA-256 of the kept arrays (``engine/process/evidence.py``); zeros if none were kept."""

    def __post_init__(self) -> None:
        places = [each.place for each in self.slices]
        legal = (
            all(_count(each) for each in (self.epoch, self.sequence, self.requests, self.convictions))
            and self.sequence >= 1
            and self.epoch < 2**32
            and _matches(_KEY, self.hub, self.stage, self.key, self.wallet)
            and _matches(_NAME, self.ring, self.session)
            and _matches(_RUN, self.run)
            and _matches(_HEX, self.model_digest, self.evidence)
            and _matches(_FAULT, self.fault)
            and type(self.quarantined) is bool
            and (self.convictions > 0 or not (self.quarantined or self.fault))
            and 1 <= len(places) <= MAX_SLICES
            and all(one < other for one, other in pairwise(places))
        )
        if not legal:
            raise _malformed("a field is missing or out of bounds")

    @property
    def work(self) -> Work:
        return Work(sum(each.rows for each in self.slices), sum(each.pairs for each in self.slices))

    def text(self) -> str:
        """What is signed."""
        body = asdict(self)
        body["slices"] = [list(asdict(each).values()) for each in self.slices]
        return f"{PREFIX}\n{canonical_json(body)}"

    @classmethod
    def parse(cls, text: str) -> StageReport:
        """The inverse of ``text``, for exactly the texts it writes. Raises ``NetworkError``."""
        head, _, body = text.partition("\n")
        if head != PREFIX or len(text) > MAX_TEXT_BYTES or not text.isascii():
            raise _malformed(f"it is no {PREFIX} of at most {MAX_TEXT_BYTES} bytes")
        try:
            found: Any = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or set(found) != {field.name for field in fields(cls)}:
            raise _malformed("it does not have the fields it must have")
        report = cls(**{**found, "slices": _slices(found["slices"])})
        if report.text() != text:
            raise _malformed("it is not written in canonical form")
        return report


def check_growth(before: StageReport | None, report: StageReport) -> None:
    """Whether ``report`` may follow the one that was last accepted of its run and worker.

    Raises:
        NetworkError: ``report_replayed``: its sequence is not a later one; ``report_shrunk``: a counter fell, or a
            slice is missing.
    """
    if before is None:
        return
    if report.sequence <= before.sequence:
        raise _refused("report_replayed", f"report {report.sequence} does not come after {before.sequence}")
    now = {each.place: each for each in report.slices}
    for old in before.slices:
        new = now.get(old.place)
        if new is None or new.rows < old.rows or new.pairs < old.pairs:
            raise _refused("report_shrunk", f"report {report.sequence} counts less than the one before")
    if report.requests < before.requests or report.convictions < before.convictions:
        raise _refused("report_shrunk", f"report {report.sequence} counts less than the one before")


def check_passed(n_embd: int, work: Iterable[Work], down: int, up: int) -> int:
    """The bytes that are paid for ``work``, of all runs of a stage about one worker.

    Args:
        n_embd: values of a hidden state.
        down: bytes that the hub delivered from this stage to this worker, ever; ``up`` the other way.

    Raises:
        NetworkError: ``report_over_counted``: so much work did not pass. Its v2f16 form is the least a worker is paid
            for: 2·n_embd bytes a row and 10 a pair to the worker, and 2·n_embd a row back.
    """
    total = sum(work, Work())
    paid, answered = paid_bytes(n_embd, total.rows, total.pairs), 2 * n_embd * total.rows
    if paid > down or answered > up:
        raise _refused(
            "report_over_counted",
            f"{paid} bytes of work and {answered} of answers are claimed, {down} and {up} bytes passed the hub",
        )
    return paid


def _slices(given: object) -> tuple[SliceWork, ...]:
    if not isinstance(given, list) or len(given) > MAX_SLICES:
        raise _malformed(f"it has no list of at most {MAX_SLICES} slices")
    names = [field.name for field in fields(SliceWork)]
    if not all(isinstance(each, list) and len(each) == len(names) for each in given):
        raise _malformed("a slice does not have the fields it must have")
    return tuple(SliceWork(**dict(zip(names, each, strict=True))) for each in given)


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _matches(pattern: re.Pattern[str], *values: object) -> bool:
    return all(isinstance(value, str) and pattern.fullmatch(value) for value in values)


def no_evidence(digest: str) -> str:
    """A digest, or the zeros that say there is none."""
    return digest if _HEX.fullmatch(digest) else GENESIS


def printable(text: str) -> str:
    """A fault as a report may carry it."""
    return "".join(ch if " " <= ch <= "~" else "?" for ch in text)[:MAX_FAULT]


def _malformed(what: str) -> NetworkError:
    return _refused("report_malformed", what)


def _refused(code: str, what: str) -> NetworkError:
    return NetworkError(code, f"A stage's report is refused: {what}.", "Nothing was booked for it.")
