"""How much may leave the wallet in one day: the limits are in the vault, what was signed for today is in a file.

The amount is on the disk before a transfer is signed: a crash in between costs some of the day's allowance, never the
limit itself. Days are UTC. A clock that goes back does not begin a new day.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path

from kvasir_console.errors import WalletError
from kvasir_console.wallet import private_file
from kvasir_console.wallet.money import amount_text

MAX_FILE_BYTES = 4096


def spending_file(vault: Path) -> Path:
    return vault.with_name("spending.json")


def today_utc() -> date:
    return datetime.now(UTC).date()


class DailyLimit:
    """Counts what is signed for, token by token, against the limits of one vault."""

    def __init__(self, file: Path, limits: Mapping[str, int], today: Callable[[], date] = today_utc) -> None:
        """``limits`` are in the token's smallest unit; a token without one is not counted."""
        self._file, self._limits, self._today = file, dict(limits), today

    def spend(self, token: str, amount: int) -> None:
        """Take ``amount`` off today's allowance.

        Raises:
            WalletError: ``daily_limit``, or ``spending_state`` when the file cannot be understood.
            SystemResourceError: it cannot be written.
        """
        limit = self._limits.get(token)
        if limit is None:
            return
        with private_file.exclusive(self._file):
            day, spent = self._read()
            already = spent.get(token, 0)
            if already + amount > limit:
                raise WalletError(
                    "daily_limit",
                    f"{amount_text(token, amount)} is more than the day's limit leaves "
                    f"({amount_text(token, max(limit - already, 0))} of {amount_text(token, limit)}).",
                    "It begins anew at midnight UTC; kvasir-console wallet limit changes it.",
                )
            document = {"version": 1, "day": day.isoformat(), "spent": {**spent, token: already + amount}}
            private_file.write(self._file, json.dumps(document).encode(), replace=True)

    def _read(self) -> tuple[date, dict[str, int]]:
        today = self._today()
        try:
            document = json.loads(private_file.read(self._file, MAX_FILE_BYTES))
            day, spent = date.fromisoformat(document["day"]), document["spent"]
            if document["version"] != 1 or any(type(each) is not int or each < 0 for each in spent.values()):
                raise ValueError("another version")
        except WalletError as error:
            if error.code != "vault_missing":
                raise
            return today, {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise WalletError(
                "spending_state",
                f"{self._file} is damaged: it says what was sent today.",
                "Remove it to begin the day anew.",
            ) from None
        return (day, dict(spent)) if day >= today else (today, {})
