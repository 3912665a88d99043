"""What a session key may do for a wallet: the details of a signed ``delegate`` action, written and read in one place.

A delegation lets another key prove participation and sign about statements (acknowledge the hub's, and report what the
workers of a ring's stage did), and nothing else, for at most thirty days; so a node goes on earning while its wallet is
locked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_console.errors import WalletError
from kvasir_console.wallet.keys import is_address

SCOPE = ("participation", "statements")
MAX_LIFETIME_S = 30 * 86_400
CLOCK_SKEW_S = 60


@dataclass(frozen=True, slots=True)
class Delegation:
    key: str
    """The session key's address: base58 of an ed25519 public key."""
    until_s: int
    """Unix seconds of its end; 0 takes the key's rights away."""

    def details(self) -> dict[str, Any]:
        return {"key": self.key, "scope": list(SCOPE), "until": self.until_s}

    def check(self, wallet: str, now_s: float) -> None:
        """Raises ``WalletError`` ``delegation_malformed`` for a key that is none, or a lifetime beyond thirty days."""
        if not is_address(self.key) or self.key == wallet:
            raise _malformed("its key is no other ed25519 key")
        if self.until_s and not now_s < self.until_s <= now_s + MAX_LIFETIME_S + CLOCK_SKEW_S:
            raise _malformed(f"it does not end within {MAX_LIFETIME_S // 86_400} days")


def parse_details(details: Mapping[str, Any]) -> Delegation:
    """Raises ``WalletError`` ``delegation_malformed`` for anything but what ``details`` writes."""
    key, until_s = details.get("key"), details.get("until")
    if not isinstance(key, str) or type(until_s) is not int or until_s < 0:
        raise _malformed("its fields are not a key and an end")
    delegation = Delegation(key, until_s)
    if dict(details) != delegation.details():
        raise _malformed("it asks for other rights than a session key may have")
    return delegation


def _malformed(what: str) -> WalletError:
    return WalletError("delegation_malformed", f"A delegation is refused: {what}.", "Unlock the wallet again.")
