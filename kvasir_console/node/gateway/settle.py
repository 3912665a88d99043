"""The settlement poll: reads the contributions as any gateway reads its hub's, and credits what grew."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import httpx

from kvasir_console.errors import ConfigError, KvasirError, LedgerError, NetworkError
from kvasir_console.node.gateway.coverage import PLATFORM_KEYS
from kvasir_console.node.gateway.identity import SERVICE_HEADER
from kvasir_console.node.gateway.ledger import Ledger, Reading
from kvasir_console.wallet import settlement
from kvasir_console.wallet.keys import is_address

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 64 * 2**20


class Settler:
    """Polls ``/api/contributions``.

    Args:
        client: its base URL is the hub; here a Unix socket of this machine.
        bonuses: what the operator multiplies the work of a wallet by. Only what is credited from now on.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        service_token: str,
        ledger: Ledger,
        *,
        poll_s: float,
        bonuses: Mapping[str, Fraction] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._service_token = service_token
        self._ledger = ledger
        self._poll_s = poll_s
        self._bonuses = dict(bonuses or {})
        self._clock = clock
        self._credited: dict[tuple[str, str, str, str], int] = {}
        """The last reading of each counter that was handed to the ledger: most of them stand still."""

    async def run(self) -> None:
        """Poll until cancelled. A poll that fails is tried again at the next turn; nothing is lost by it."""
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.poll()
            except KvasirError as error:
                log.warning("settlement: %s", error)

    async def poll(self) -> int:
        """Credit everything that grew; the micro-KVR credited.

        Raises:
            NetworkError: the hub does not answer, or with something else.
        """
        credited = 0
        readings: dict[tuple[str, str, str, str], int] = {}
        for row in await self._read():
            try:
                reading = parse_row(row)
                reading = replace(reading, bonus=self._bonuses.get(reading.wallet, reading.bonus))
                key = (reading.run_id, reading.wallet, reading.worker_id, reading.kind)
                if self._credited.get(key) != reading.micro_units:
                    credited += await asyncio.to_thread(self._ledger.credit, reading, int(self._clock()))
                readings[key] = reading.micro_units
            except LedgerError as error:
                # One bad row must not keep the others from their pay.
                log.error("a contribution is not credited: %s", error)
        self._credited = readings
        return credited

    async def _read(self) -> list[Any]:
        try:
            response = await self._client.get(
                "/api/contributions", headers={SERVICE_HEADER: self._service_token}, timeout=10.0
            )
        except httpx.HTTPError as error:
            raise NetworkError(
                "hub_unreachable", f"The hub does not answer ({type(error).__name__}).", "It is asked again."
            ) from error
        if response.status_code != 200 or len(response.content) > MAX_REPLY_BYTES:
            raise NetworkError("hub_refused", f"The hub answers {response.status_code} to the settlement poll.")
        try:
            # Counters are read as decimals: a float loses the last digits of a large one.
            rows = json.loads(response.content, parse_float=Decimal)["contributions"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NetworkError("hub_malformed", "The hub's contributions are malformed.") from error
        if not isinstance(rows, list):
            raise NetworkError("hub_malformed", "The hub's contributions are malformed.")
        return rows


def read_bonuses(wallets: str) -> dict[str, Fraction]:
    """The bonus of each wallet that ``gateway.bonus_wallets`` names. Raises ``ConfigError`` for what is no address."""
    for wallet in wallets.split():
        if not is_address(wallet):
            raise ConfigError(
                "bad_value",
                f"gateway.bonus_wallets: {wallet[:44]!r} is no Solana address.",
                "Name wallets, separated by spaces.",
            )
    return dict.fromkeys(wallets.split(), settlement.GATEWAY_BONUS)


def parse_row(row: Any) -> Reading:
    """One contribution, ours or a public bridge's.

    A bridge names no run and counts in decimal units; its rows then follow the contract's rule for counters that may
    begin anew. Raises ``LedgerError`` for a row that cannot be credited, saying whose it is.
    """
    if not isinstance(row, Mapping):
        raise LedgerError("contribution_malformed", "A contribution is not an object.")
    wallet, node_id = row.get("owner"), row.get("node_id")
    if not isinstance(wallet, str) or not is_address(wallet) or not isinstance(node_id, str) or not node_id:
        raise LedgerError("contribution_without_owner", f"The work of node {str(node_id)[:80]!r} names no wallet.")
    micro_units = row.get("micro_units")
    if micro_units is None:
        units = row.get("units")
        if isinstance(units, bool) or not isinstance(units, (int, Decimal)):
            raise LedgerError("counter_malformed", f"The counter of node {node_id[:80]!r} is not a number.")
        micro_units = settlement.counter_micro_units(str(units))
    if type(micro_units) is not int:
        raise LedgerError("counter_malformed", f"The counter of node {node_id[:80]!r} is not a whole number.")
    speed = row.get("perf_tps")
    return Reading(
        wallet=wallet,
        worker_id=node_id[:256],
        kind=_text(row, "kind", 16) or "legacy",
        run_id=_text(row, "run_id", 160),
        micro_units=micro_units,
        model=_text(row, "model", 256),
        perf_tps=float(speed) if isinstance(speed, (int, Decimal)) and not isinstance(speed, bool) else None,
        platform={key: _text(row, key, 64) for key in PLATFORM_KEYS},
    )


def _text(row: Mapping[str, Any], key: str, limit: int) -> str:
    value = row.get(key)
    return value[:limit] if isinstance(value, str) else ""
