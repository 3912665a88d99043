"""How much may leave the wallet in one day: the limits are in the vault, what was signed for today is in a file.

The amount is on the disk before a transfer is signed: a crash in between costs some of the day's allowance, never the
limit itself. A payment that expired and is signed again is counted once: its digest is kept with how often it was
signed. The signer cannot see whether the first signature landed, so that holds for ``FREE_SIGNINGS`` more only. Days
are UTC. A clock that goes back does not begin a new day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from kvasir_console.errors import WalletError
from kvasir_console.wallet import private_file
from kvasir_console.wallet.money import amount_text

MAX_FILE_BYTES = 64 * 2**10
FREE_SIGNINGS = 2
"""How often a payment is signed again on one day without being counted again (``sender.MAX_SIGNINGS`` less one)."""
MAX_PAYMENTS = 256
"""Payments remembered on one day; one that was forgotten counts anew."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def spending_file(vault: Path) -> Path:
    return vault.with_name("spending.json")


def today_utc() -> date:
    return datetime.now(UTC).date()


@dataclass(frozen=True, slots=True)
class Spending:
    """What was signed for on one day."""

    day: date
    spent: Mapping[str, int] = field(default_factory=dict)
    """By token, in its smallest unit."""
    payments: Mapping[str, int] = field(default_factory=dict)
    """How often each payment was signed, by its digest, oldest first."""

    def with_payment(self, digest: str) -> dict[str, int]:
        others = [(each, count) for each, count in self.payments.items() if each != digest]
        return dict([*others[-(MAX_PAYMENTS - 1) :], (digest, self.payments.get(digest, 0) + 1)])

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 2,
            "day": self.day.isoformat(),
            "spent": dict(self.spent),
            "payments": dict(self.payments),
        }


class DailyLimit:
    """Counts what is signed for, token by token, against the limits of one vault."""

    def __init__(self, file: Path, limits: Mapping[str, int], today: Callable[[], date] = today_utc) -> None:
        """``limits`` are in the token's smallest unit; a token without one is not counted."""
        self._file, self._limits, self._today = file, dict(limits), today

    def spend(self, token: str, amount: int, payment: str = "") -> None:
        """Take ``amount`` off today's allowance.

        Args:
            payment: digest of the whole payment and its id, in hex; "" for one that is counted each time.

        Raises:
            WalletError: ``daily_limit``, or ``spending_state`` when the file cannot be understood.
            SystemResourceError: it cannot be written.
        """
        limit = self._limits.get(token)
        if limit is None:
            return
        with private_file.exclusive(self._file):
            today = self._read()
            already = today.spent.get(token, 0)
            counted = 0 < today.payments.get(payment, 0) <= FREE_SIGNINGS
            if not counted and already + amount > limit:
                raise WalletError(
                    "daily_limit",
                    f"{amount_text(token, amount)} is more than the day's limit leaves "
                    f"({amount_text(token, max(limit - already, 0))} of {amount_text(token, limit)}).",
                    "It begins anew at midnight UTC; kvasir-console wallet limit changes it.",
                )
            spent = today.spent if counted else {**today.spent, token: already + amount}
            payments = today.with_payment(payment) if payment else today.payments
            data = json.dumps(Spending(today.day, spent, payments).to_json()).encode()
            private_file.write(self._file, data, replace=True)

    def _read(self) -> Spending:
        today = self._today()
        try:
            found = parse_spending(private_file.read(self._file, MAX_FILE_BYTES))
        except WalletError as error:
            if error.code != "vault_missing":
                raise
            return Spending(today)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise WalletError(
                "spending_state",
                f"{self._file} is damaged: it says what was sent today.",
                "Remove it to begin the day anew.",
            ) from None
        return found if found.day >= today else Spending(today)


def parse_spending(data: bytes) -> Spending:
    """Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` for what ``to_json`` does not write.

    Version 1 knew no payments.
    """
    document = json.loads(data)
    version = document["version"]
    payments = document["payments"] if version == 2 else {}
    spent = document["spent"]
    if type(version) is not int or version not in (1, 2):
        raise ValueError("another version")
    if any(type(number) is not int or number < 0 for number in (*spent.values(), *payments.values())):
        raise ValueError("a number")
    if len(payments) > MAX_PAYMENTS or not all(_DIGEST.fullmatch(each) for each in payments):
        raise ValueError("a payment")
    return Spending(date.fromisoformat(document["day"]), spent, payments)
