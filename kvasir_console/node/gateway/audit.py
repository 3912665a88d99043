"""Whether the books are right: every sum made again from its parts, in one consistent view."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kvasir_console.node.gateway.tables import accounts, attempts, claim_items, claims, credited_units
from kvasir_console.wallet import settlement

_FAILED, _CONFIRMED = "failed", "confirmed"


def audit(connection: Connection) -> tuple[str, ...]:
    """What does not add up, in words.

    * credited + carried = the sum of units x multiplier x rate, exactly, and nothing carried is as much as a millionth;
    * what a row has claimed is what its claims took, but for those that failed and gave it back;
    * a claim is the sum of what it took, and is paid by one transaction, or by none.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
    return (*_check_accounts(connection), *_check_claims(connection))


def _check_accounts(connection: Connection) -> list[str]:
    exact: dict[tuple[str, str, str], Fraction] = defaultdict(Fraction)
    units: dict[tuple[str, str, str], int] = defaultdict(int)
    for row in connection.execute(sa.select(credited_units)):
        exact[_key(row)] += row.micro_units * Fraction(row.multiplier) * settlement.RATE
        units[_key(row)] += row.micro_units
    taken: dict[tuple[str, str, str], int] = defaultdict(int)
    items = sa.select(claim_items).join(claims, claims.c.id == claim_items.c.claim_id)
    for row in connection.execute(items.where(claims.c.state != _FAILED)):
        taken[_key(row)] += row.micro_kvr
    found = []
    for row in connection.execute(sa.select(accounts)):
        name = f"{row.wallet} {row.worker_id} {row.kind}"
        carried = Fraction(int(row.carry_num), int(row.carry_den))
        if row.credited_micro_kvr + carried != exact[_key(row)] or not 0 <= carried < 1:
            found.append(f"{name}: credited {row.credited_micro_kvr} and carried {carried}, earned {exact[_key(row)]}")
        if row.micro_units != units[_key(row)]:
            found.append(f"{name}: {row.micro_units} micro-units, credited for {units[_key(row)]}")
        if row.claimed_micro_kvr != taken[_key(row)]:
            found.append(f"{name}: claimed {row.claimed_micro_kvr}, its claims took {taken[_key(row)]}")
    return found


def _check_claims(connection: Connection) -> list[str]:
    items: dict[str, int] = defaultdict(int)
    for row in connection.execute(sa.select(claim_items.c.claim_id, claim_items.c.micro_kvr)):
        items[row.claim_id] += row.micro_kvr
    paid: dict[str, list[str]] = defaultdict(list)
    for row in connection.execute(sa.select(attempts).where(attempts.c.outcome == _CONFIRMED)):
        paid[row.claim_id].append(row.signature)
    found = []
    for row in connection.execute(sa.select(claims)):
        if row.micro_kvr != items[row.id]:
            found.append(f"claim {row.id}: {row.micro_kvr}, took {items[row.id]}")
        if paid[row.id] != ([row.signature] if row.state == _CONFIRMED else []):
            found.append(f"claim {row.id}: {row.state}, paid by {len(paid[row.id])} transactions")
    return found


def _key(row: Any) -> tuple[str, str, str]:
    return row.wallet, row.worker_id, row.kind
