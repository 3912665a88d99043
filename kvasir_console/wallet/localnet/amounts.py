"""``uiTokenAmount``, the form in which Solana's RPC writes an amount of tokens."""

from __future__ import annotations

from typing import Any


def token_amount(amount: int, decimals: int) -> dict[str, Any]:
    """Exact as text; the float is Solana's, for display only."""
    text = str(amount).rjust(decimals + 1, "0")
    exact = f"{text[:-decimals]}.{text[-decimals:]}".rstrip("0").rstrip(".") if decimals else text
    return {
        "amount": str(amount),
        "decimals": decimals,
        "uiAmount": amount / 10**decimals,
        "uiAmountString": exact,
    }
