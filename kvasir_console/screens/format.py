"""Numbers and names as a person reads them. An unknown value is ``N/A``, never a zero; money is never a float."""

from __future__ import annotations

import re
import time
from urllib.parse import urlsplit

from kvasir_console.wallet.token import format_kvr

NA = "N/A"
_FRACTION = re.compile(r"([0-9]{1,60})/([0-9]{1,60})")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def micro(value: int | None) -> str:
    """A count of millionths (micro-KVR, micro-units) with six places, exactly: 1234567 is ``1.234567``."""
    return NA if value is None else format_kvr(value)


def kvr(value: int | None) -> str:
    """Micro-KVR as KVR."""
    return NA if value is None else f"{micro(value)} KVR"


def carried(value: str | None) -> str:
    """The carried part of a micro-KVR, given as ``num/den``: as it is when short, else three rounded-down places."""
    if value is None:
        return NA
    match = _FRACTION.fullmatch(value)
    if match is None or int(match[2]) == 0:
        return NA
    numerator, denominator = int(match[1]), int(match[2])
    if numerator == 0:
        return "0"
    if len(value) <= 9:
        return value
    return f"≈ {numerator // denominator}.{numerator * 1000 // denominator % 1000:03d}"


def count(value: int | None) -> str:
    return NA if value is None else f"{value:,}"


def compact(value: int | None) -> str:
    """A count in at most five characters: ``999``, ``1.23k``, ``45.6M``. Cut, not rounded up."""
    if value is None:
        return NA
    power = 0
    scaled = value
    while scaled >= 1000 and power < len(_THOUSANDS) - 1:
        scaled //= 1000
        power += 1
    if power == 0:
        return str(value)
    thousandths = value * 1000 // 1000**power
    places = max(0, 3 - len(str(scaled)))
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}"
    return text[: len(str(scaled)) + (1 + places if places else 0)] + _THOUSANDS[power]


def rate(value: float | None) -> str:
    """A rate per second with three significant places below 1000."""
    if value is None:
        return NA
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def size(value: int | None) -> str:
    """Bytes in binary units with three significant places."""
    if value is None:
        return NA
    if value < 1024:
        return f"{value} B"
    scaled = float(value)
    unit = 0
    while scaled >= 999.5 and unit < len(_BYTES) - 1:
        scaled /= 1024
        unit += 1
    return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {_BYTES[unit]}"


def sizes(part: int | None, whole: int | None) -> str:
    """``9.00 of 15.6 GiB``: the unit once if it is the same."""
    first, second = size(part), size(whole)
    if part is not None and whole is not None and first.split()[-1] == second.split()[-1]:
        first = first.split()[0]
    return f"{first} of {second}"


def percent(part: int | None, whole: int | None) -> int | None:
    """Whole per cent, rounded down, so that 100 means all of it."""
    if part is None or not whole:
        return None
    return max(0, min(100, part * 100 // whole))


def duration(seconds: float | None) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 14 min``, ``5 d 3 h``."""
    if seconds is None:
        return NA
    total = max(0, int(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def milliseconds(value: float | None) -> str:
    if value is None:
        return NA
    return f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"


def clock(unix_s: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def short(address: str, ends: int = 4) -> str:
    """Both ends of an address, digest or signature."""
    if not address:
        return NA
    return address if len(address) <= 2 * ends + 1 else f"{address[:ends]}…{address[-ends:]}"


def host(url: str) -> str:
    """Host and port of a URL; the text itself if it is none."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2] or url
    except ValueError:
        return url
