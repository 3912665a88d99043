"""From metered work to KVR. Pure functions of whole numbers; nothing here rounds a remainder away.

Units and KVR are counted in millionths (``micro_units``, ``micro_kvr``). One unit is 10**6 paid bytes of expert work,
or 1000 token rows through a whole model; a ring node with k of n layers earns k/n of those. A credit is

    micro_kvr = micro_units x tier x bonus x rate

exactly, paid in whole micro-KVR; what does not fit is carried as a fraction, so that at any time
``credited + carried`` equals the exact sum.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

from kvasir_console.errors import LedgerError

MICRO = 1_000_000
"""Micro-units in a unit, micro-KVR in a KVR."""
MICRO_UNITS_PER_PAID_BYTE = 1
MICRO_UNITS_PER_TOKEN_ROW = 1_000
RATE = Fraction(1, 100)
"""KVR for a unit."""
GATEWAY_BONUS = Fraction(3, 2)
"""Multiplier of a node that also hosts its network's gateway."""
MINIMUM_CLAIM_MICRO_KVR = 1 * MICRO

_ROW_BYTES_PER_VALUE = 2
_PAIR_BYTES = 10
_JSON_COUNT = re.compile(r"(?=.{1,64}$)(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?")
_MAX_COUNTER_UNITS = 10**30


@dataclass(frozen=True, slots=True)
class Tier:
    """A speed class and what it multiplies a node's units by."""

    name: str
    multiplier: Fraction


UNRATED = Tier("unrated", Fraction(1))
"""A node nobody has measured: neither rewarded nor punished."""
TIERS: tuple[tuple[int, Tier], ...] = (
    (90, Tier("S", Fraction(3, 2))),
    (60, Tier("A", Fraction(5, 4))),
    (30, Tier("B", Fraction(1))),
    (0, Tier("C", Fraction(7, 10))),
)
"""Least tokens per second of each tier, fastest first."""


def tier(tokens_per_second: float | None) -> Tier:
    """The tier of a measured speed; ``None``, or what cannot be a measurement (negative, NaN, infinite), is unrated."""
    if tokens_per_second is None or not math.isfinite(tokens_per_second):
        return UNRATED
    return next((each for least, each in TIERS if tokens_per_second >= least), UNRATED)


def paid_bytes(n_embd: int, rows: int, pairs: int) -> int:
    """What acknowledged expert work counts, whatever wire carried it: the size of its ``v2f16`` form.

    Args:
        n_embd: values in a hidden state.
        rows: hidden states a worker was sent and answered.
        pairs: (row, expert) pairs among them.
    """
    return _ROW_BYTES_PER_VALUE * n_embd * _count(rows) + _PAIR_BYTES * _count(pairs)


def expert_micro_units(paid: int) -> int:
    """Micro-units of ``paid`` bytes of expert work."""
    return _count(paid) * MICRO_UNITS_PER_PAID_BYTE


def ring_micro_units(token_rows: int) -> int:
    """Micro-units of ``token_rows`` through a whole model, to be split among its stages (``RingSplit``)."""
    return _count(token_rows) * MICRO_UNITS_PER_TOKEN_ROW


@dataclass(frozen=True, slots=True)
class Credit:
    """What to add to a balance now, and what to carry to the next credit."""

    micro_kvr: int
    carried: Fraction
    """Less than one micro-KVR."""


def credit(
    micro_units: int,
    tier_multiplier: Fraction | int = 1,
    bonus: Fraction | int = 1,
    rate: Fraction | int = RATE,
    carried: Fraction | int = 0,
) -> Credit:
    """Turn units into KVR: the exact amount plus what was carried, split into whole micro-KVR and the rest.

    Raises:
        ValueError: a negative argument. Money is taken back by an entry of its own, never by a negative credit.
    """
    if min(tier_multiplier, bonus, rate, carried) < 0:
        raise ValueError("a credit has no negative part")
    exact = _count(micro_units) * Fraction(tier_multiplier) * bonus * rate + carried
    whole = math.floor(exact)
    return Credit(whole, exact - whole)


@dataclass(frozen=True, slots=True)
class RingSplit:
    """The running total of a ring's work and how it falls to the stages.

    The total, not each request, is cut at the window boundaries: a stage [a, b) of n layers has earned
    ``floor(total b / n) - floor(total a / n)``. Those add up to the total, and each stays within one micro-unit of its
    exact share for ever, however small the requests are. A new placement starts a new split.
    """

    windows: tuple[tuple[int, int], ...]
    """Layers [begin, end) of each stage in order; together all of the model's layers."""
    total_micro_units: int = 0

    def __post_init__(self) -> None:
        ends = [0, *(end for _, end in self.windows)]
        if not self.windows or any(
            begin != previous or end <= begin for previous, (begin, end) in zip(ends, self.windows, strict=False)
        ):
            raise LedgerError(
                "ring_windows",
                "The windows of a ring must follow one another from layer 0 without a gap or an overlap.",
            )
        _count(self.total_micro_units)

    @property
    def n_layers(self) -> int:
        return self.windows[-1][1]

    @property
    def earned_micro_units(self) -> tuple[int, ...]:
        """Micro-units each stage has earned so far."""
        cuts = [self.total_micro_units * edge // self.n_layers for edge in (0, *(end for _, end in self.windows))]
        return tuple(after - before for before, after in pairwise(cuts))

    def add(self, token_rows: int) -> tuple[RingSplit, tuple[int, ...]]:
        """The split after ``token_rows`` more, and the micro-units to credit to each stage for them."""
        after = RingSplit(self.windows, self.total_micro_units + ring_micro_units(token_rows))
        pairs = zip(self.earned_micro_units, after.earned_micro_units, strict=True)
        return after, tuple(new - old for old, new in pairs)


@dataclass(frozen=True, slots=True)
class CounterStep:
    """What one reading of a foreign cumulative counter is worth."""

    credit_micro_units: int
    baseline: int
    """To be stored in the same transaction as the credit, and given with the next reading."""


def counter_delta(baseline: int, reading: object) -> CounterStep:
    """The growth of a cumulative counter since ``baseline`` (0 before the first reading).

    A reading below the baseline means that the counter began anew, so all of it is new. One that is no count (absent,
    negative, not a whole number) changes nothing.
    """
    if not isinstance(reading, int) or isinstance(reading, bool) or reading < 0:
        return CounterStep(0, baseline)
    return CounterStep(reading - baseline if reading >= baseline else reading, reading)


def relay_work_bytes(ws2tcp: int, tcp2ws: int) -> int:
    """Bytes a legacy relay session is paid for: the larger direction. Each flush credits its growth."""
    return max(_count(ws2tcp), _count(tcp2ws))


def counter_micro_units(text: str) -> int:
    """Micro-units of a count of units as it stands in a JSON reply, read as a decimal.

    The source keeps binary floats, so a count may be off by a little on either side; it is rounded to the nearest
    millionth. Counters are cumulative, so this never adds up.

    Args:
        text: the number's own characters; parsing it as a float first loses digits above 2**53.

    Raises:
        LedgerError: ``counter_malformed``: not a JSON number, negative, or absurdly large.
    """
    # The bounds keep a hostile "1e999" from becoming a number of as many digits.
    if not _JSON_COUNT.fullmatch(text) or (units := Decimal(text)) > _MAX_COUNTER_UNITS:
        raise LedgerError("counter_malformed", "A contribution counter is not a plausible number.")
    return round(Fraction(units) * MICRO)


def claimable(pending_micro_kvr: int, minimum_micro_kvr: int = MINIMUM_CLAIM_MICRO_KVR) -> bool:
    """Whether a balance has reached the operator's minimum payout. Nothing pending is never claimable."""
    return pending_micro_kvr >= max(minimum_micro_kvr, 1)


def micro_text(micro: int) -> str:
    """Micro-units or micro-KVR as a decimal number of units or KVR, without trailing zeros: ``1.277952``, ``0.01``."""
    whole, rest = divmod(abs(micro), MICRO)
    return f"{'-' if micro < 0 else ''}{whole}{f'.{rest:06}'.rstrip('0') if rest else ''}"


def _count(number: int) -> int:
    if number < 0:
        raise ValueError("work is never negative")
    return number
