"""Amounts of the two tokens a wallet moves, as people write them: exact, with every decimal. Pure and light."""

from __future__ import annotations

import re

from kvasir_console.errors import UsageError

KVR, SOL = "KVR", "SOL"
DECIMALS = {KVR: 6, SOL: 9}
MAX_AMOUNT = 2**64 - 1
"""The largest amount an account holds, in micro-KVR or lamports."""

_AMOUNT = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,9}))?")


def amount_text(token: str, amount: int) -> str:
    """``1500000`` of KVR as ``"1.500000 KVR"``."""
    decimals = DECIMALS[token]
    whole, part = divmod(abs(amount), 10**decimals)
    return f"{'-' if amount < 0 else ''}{whole}.{part:0{decimals}d} {token}"


def parse_amount(text: str, token: str) -> int:
    """``"1.5"`` of KVR as ``1500000``: ASCII digits, no sign, exponent or separators, no more decimals than there are.

    Raises:
        UsageError: ``amount_malformed`` or ``amount_too_large``.
    """
    match, decimals = _AMOUNT.fullmatch(text.strip()), DECIMALS[token]
    part = (match[2] or "") if match else ""
    if match is None or len(part) > decimals:
        raise UsageError(
            "amount_malformed",
            f"{text[:40]!r} is not an amount of {token}.",
            f"Write digits with at most {decimals} decimals and a point, like 12.5.",
        )
    amount: int = int(match[1]) * 10**decimals + int(part.ljust(decimals, "0"))
    if amount > MAX_AMOUNT:
        raise UsageError("amount_too_large", f"{text.strip()} {token} is more than an account can hold.")
    return amount
