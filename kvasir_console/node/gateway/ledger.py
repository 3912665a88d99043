"""Balances and claims over the store: every credit and every change of a claim is one transaction.

What holds at any time, for every row: ``credited + carried = sum of (units x multiplier x rate)`` exactly, and
``0 <= claimed <= credited``; ``audit`` makes those sums again from what is stored. A claim takes what is pending from
its wallet's rows when it is reserved, so what two claims that race can pay is what there was, once; one that failed on
chain gives it back.

States of a claim:

* ``reserved``: waits for the payout process.
* ``signed``: a transaction for it is stored; then ``sent``, once it was given to the chain.
* ``confirmed``: paid.
* ``failed``: the transaction landed with an error, so the amount is pending again.
* ``expired``: the transaction can no longer land; it waits for a second look, and then to be signed anew.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row
from sqlalchemy.exc import IntegrityError

from kvasir_console.errors import LedgerError
from kvasir_console.node.gateway.audit import audit
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import accounts, attempts, claim_items, claims, counters, credited_units
from kvasir_console.wallet import settlement

MAX_COUNTER_MICRO_UNITS = 2**62
_MAX_INTEGER = 2**63 - 1
"""What a column holds. SQLite would go on beyond it with floats."""


class ClaimState(StrEnum):
    RESERVED = "reserved"
    SIGNED = "signed"
    """A transaction for it is stored; whether it was sent is not known."""
    SENT = "sent"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    EXPIRED = "expired"


OPEN_STATES = (ClaimState.RESERVED, ClaimState.SIGNED, ClaimState.SENT, ClaimState.EXPIRED)
_SIGNABLE = (ClaimState.RESERVED, ClaimState.EXPIRED)
_BEFORE: Mapping[ClaimState, tuple[ClaimState, ...]] = {
    ClaimState.SENT: (ClaimState.SIGNED, ClaimState.SENT),
    # An RPC that knew more than the one before it: what landed has landed.
    ClaimState.CONFIRMED: (ClaimState.SIGNED, ClaimState.SENT, ClaimState.EXPIRED),
    ClaimState.FAILED: (ClaimState.SIGNED, ClaimState.SENT, ClaimState.EXPIRED),
    ClaimState.EXPIRED: (ClaimState.SIGNED, ClaimState.SENT),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a cumulative counter of work.

    ``run_id`` names the run the counter belongs to: within a run it only grows. An empty one is a foreign source that
    does not tell its runs apart, whose counter may begin anew.
    """

    wallet: str
    worker_id: str
    kind: str
    run_id: str
    micro_units: int
    model: str = ""
    perf_tps: float | None = None
    bonus: Fraction = Fraction(1)
    """What the operator multiplies this wallet's work by."""
    platform: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Account:
    """What one worker of a wallet earned with one kind of work."""

    wallet: str
    worker_id: str
    kind: str
    model: str
    micro_units: int
    multiplier: Fraction
    credited_micro_kvr: int
    carried: Fraction
    """Of a micro-KVR, below 1."""
    claimed_micro_kvr: int
    platform: Mapping[str, str]
    created_at: int
    last_work_at: int

    @property
    def pending_micro_kvr(self) -> int:
        return self.credited_micro_kvr - self.claimed_micro_kvr


@dataclass(frozen=True, slots=True)
class Claim:
    claim_id: str
    wallet: str
    micro_kvr: int
    state: ClaimState
    signature: str | None
    raw: bytes | None
    last_valid_block_height: int | None
    slot: int
    """Its transaction cannot have landed before; 0 if that is not known."""
    error: str
    created_at: int
    updated_at: int


class Ledger:
    """Credits, balances and claims. Methods block; call them from a thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def credit(self, reading: Reading, now: int) -> int:
        """Credit what a counter grew by since it was last credited; the micro-KVR added.

        Raises:
            LedgerError: ``counter_implausible`` for a reading no real counter can have.
        """
        if not 0 <= reading.micro_units <= MAX_COUNTER_MICRO_UNITS:
            raise LedgerError(
                "counter_implausible",
                f"The counter of {reading.worker_id} reads {reading.micro_units} micro-units.",
                "Nothing was credited for it.",
            )
        try:
            return self._credit(reading, now)
        except IntegrityError:
            # Another gateway on the same database made this reading's first row; now it is there to be found.
            return self._credit(reading, now)

    def _credit(self, reading: Reading, now: int) -> int:
        with self._store.write() as connection:
            grown = _advance_counter(connection, reading)
            return _credit_units(connection, reading, grown, now) if grown else 0

    def account(self, wallet: str, worker_id: str, kind: str) -> Account | None:
        with self._store.read() as connection:
            row = connection.execute(sa.select(accounts).where(*_account_key(wallet, worker_id, kind))).one_or_none()
            return None if row is None else _account(row)

    def accounts(self, wallet: str | None = None) -> tuple[Account, ...]:
        """Every row, or those of one wallet, oldest first."""
        query = sa.select(accounts).order_by(accounts.c.created_at, accounts.c.wallet, accounts.c.worker_id)
        if wallet is not None:
            query = query.where(accounts.c.wallet == wallet)
        with self._store.read() as connection:
            return tuple(_account(row) for row in connection.execute(query))

    def reserve(self, wallet: str, minimum_micro_kvr: int, now: int) -> Claim:
        """Turn everything pending of ``wallet`` into a claim.

        Raises:
            LedgerError: ``nothing_pending``, ``below_minimum`` or ``claim_too_large``.
        """
        with self._store.write() as connection:
            rows = connection.execute(
                sa.select(accounts)
                .where(accounts.c.wallet == wallet)
                .order_by(accounts.c.worker_id, accounts.c.kind)
                .with_for_update()
            ).all()
            pending = [(row, row.credited_micro_kvr - row.claimed_micro_kvr) for row in rows]
            total = sum(amount for _, amount in pending)
            if total > _MAX_INTEGER:
                raise LedgerError(
                    "claim_too_large", f"{wallet} has more to claim than one claim holds.", "Tell the operator."
                )
            if total <= 0:
                raise LedgerError("nothing_pending", f"{wallet} has nothing to claim.")
            if not settlement.claimable(total, minimum_micro_kvr):
                raise LedgerError(
                    "below_minimum",
                    f"{settlement.micro_text(total)} KVR are pending; the least this gateway pays out is "
                    f"{settlement.micro_text(minimum_micro_kvr)} KVR.",
                    "Claim again when more was earned.",
                )
            claim_id = uuid.uuid4().hex
            connection.execute(
                claims.insert().values(
                    id=claim_id,
                    wallet=wallet,
                    micro_kvr=total,
                    state=ClaimState.RESERVED.value,
                    error="",
                    created_at=now,
                    updated_at=now,
                )
            )
            for row, amount in pending:
                if amount == 0:
                    continue
                key = {"wallet": row.wallet, "worker_id": row.worker_id, "kind": row.kind}
                connection.execute(claim_items.insert().values(claim_id=claim_id, micro_kvr=amount, **key))
                connection.execute(
                    accounts.update()
                    .where(*_account_key(**key))
                    .values(claimed_micro_kvr=accounts.c.claimed_micro_kvr + amount)
                )
            return _claim(connection.execute(sa.select(claims).where(claims.c.id == claim_id)).one())

    def claim(self, claim_id: str) -> Claim | None:
        with self._store.read() as connection:
            row = connection.execute(sa.select(claims).where(claims.c.id == claim_id)).one_or_none()
            return None if row is None else _claim(row)

    def claims(self, wallet: str | None = None, *, limit: int = 1000) -> tuple[Claim, ...]:
        """The latest claims, oldest first."""
        query = sa.select(claims).order_by(claims.c.number.desc()).limit(limit)
        if wallet is not None:
            query = query.where(claims.c.wallet == wallet)
        with self._store.read() as connection:
            return tuple(_claim(row) for row in reversed(connection.execute(query).all()))

    def open_claims(self) -> tuple[Claim, ...]:
        """What the payout process has to do, oldest first."""
        query = sa.select(claims).where(claims.c.state.in_(OPEN_STATES)).order_by(claims.c.number)
        with self._store.read() as connection:
            return tuple(_claim(row) for row in connection.execute(query))

    def paid_micro_kvr(self, wallet: str) -> int:
        """The sum of confirmed claims."""
        query = sa.select(sa.func.coalesce(sa.func.sum(claims.c.micro_kvr), 0)).where(
            claims.c.wallet == wallet, claims.c.state == ClaimState.CONFIRMED.value
        )
        with self._store.read() as connection:
            return int(connection.scalar(query) or 0)

    def record_attempt(
        self, claim_id: str, signature: str, raw: bytes, last_valid_block_height: int, now: int, slot: int = 0
    ) -> Claim | None:
        """Store a signed transaction before it is sent; ``None`` if the claim was taken by another process."""
        with self._store.write() as connection:
            taken = connection.execute(
                claims.update()
                .where(claims.c.id == claim_id, claims.c.state.in_(_SIGNABLE))
                .values(
                    state=ClaimState.SIGNED.value,
                    signature=signature,
                    raw=raw,
                    last_valid_block_height=last_valid_block_height,
                    slot=slot,
                    error="",
                    updated_at=now,
                )
            ).rowcount
            if not taken:
                return None
            connection.execute(
                attempts.insert().values(
                    signature=signature, claim_id=claim_id, outcome=ClaimState.SIGNED.value, at=now
                )
            )
            return _claim(connection.execute(sa.select(claims).where(claims.c.id == claim_id)).one())

    def advance(self, claim: Claim, state: ClaimState, now: int, error: str = "") -> bool:
        """Move a claim on from the transaction ``claim`` names; ``False`` if it is no longer about that one."""
        with self._store.write() as connection:
            moved = connection.execute(
                claims.update()
                .where(
                    claims.c.id == claim.claim_id,
                    claims.c.signature == claim.signature,
                    claims.c.state.in_(_BEFORE[state]),
                )
                .values(state=state.value, error=error, updated_at=now)
            ).rowcount
            if not moved:
                return False
            connection.execute(
                attempts.update().where(attempts.c.signature == claim.signature).values(outcome=state.value, at=now)
            )
            if state is ClaimState.FAILED:
                _give_back(connection, claim.claim_id)
            return True

    def note(self, claim: Claim, error: str, now: int) -> None:
        """Write beside an open claim why it does not move."""
        with self._store.write() as connection:
            connection.execute(
                claims.update()
                .where(claims.c.id == claim.claim_id, claims.c.state.in_(OPEN_STATES))
                .values(error=error, updated_at=now)
            )

    def audit(self) -> tuple[str, ...]:
        """What does not add up, in words; empty when every balance is exactly what its work and its claims make it."""
        with self._store.read() as connection:
            return audit(connection)

    def attempts(self, claim_id: str) -> tuple[tuple[str, str], ...]:
        """(signature, outcome) of every transaction signed for a claim, in order."""
        with self._store.read() as connection:
            query = sa.select(attempts).where(attempts.c.claim_id == claim_id).order_by(attempts.c.number)
            return tuple((row.signature, row.outcome) for row in connection.execute(query))


def _advance_counter(connection: Connection, reading: Reading) -> int:
    key = (
        counters.c.run_id == reading.run_id,
        counters.c.wallet == reading.wallet,
        counters.c.worker_id == reading.worker_id,
        counters.c.kind == reading.kind,
    )
    baseline = connection.scalar(sa.select(counters.c.baseline).where(*key).with_for_update())
    if reading.run_id:
        # Within a run a counter only grows; an older reading that arrives late is worth nothing.
        after = max(baseline or 0, reading.micro_units)
        grown = after - (baseline or 0)
    else:
        step = settlement.counter_delta(baseline or 0, reading.micro_units)
        after, grown = step.baseline, step.credit_micro_units
    if baseline is None:
        connection.execute(
            counters.insert().values(
                run_id=reading.run_id,
                wallet=reading.wallet,
                worker_id=reading.worker_id,
                kind=reading.kind,
                baseline=after,
            )
        )
    elif after != baseline:
        connection.execute(counters.update().where(*key).values(baseline=after))
    return grown


def _credit_units(connection: Connection, reading: Reading, micro_units: int, now: int) -> int:
    key = _account_key(reading.wallet, reading.worker_id, reading.kind)
    row = connection.execute(sa.select(accounts).where(*key).with_for_update()).one_or_none()
    multiplier = settlement.tier(reading.perf_tps).multiplier * reading.bonus
    carried = Fraction(0) if row is None else _carried(row)
    credit = settlement.credit(micro_units, multiplier, carried=carried)
    total_units = micro_units + (0 if row is None else row.micro_units)
    total_credited = credit.micro_kvr + (0 if row is None else row.credited_micro_kvr)
    if max(total_units, total_credited) > _MAX_INTEGER:
        raise LedgerError(
            "counter_implausible",
            f"The work of {reading.worker_id} would come to {total_units} micro-units.",
            "Nothing was credited for it.",
        )
    values = {
        "micro_units": total_units,
        "credited_micro_kvr": total_credited,
        "model": reading.model,
        "source_run_id": reading.run_id,
        "multiplier": fraction_text(multiplier),
        "carry_num": str(credit.carried.numerator),
        "carry_den": str(credit.carried.denominator),
        "platform": json.dumps(dict(reading.platform), sort_keys=True),
        "last_work_at": now,
    }
    if row is None:
        connection.execute(
            accounts.insert().values(
                wallet=reading.wallet,
                worker_id=reading.worker_id,
                kind=reading.kind,
                claimed_micro_kvr=0,
                created_at=now,
                **values,
            )
        )
    else:
        connection.execute(accounts.update().where(*key).values(**values))
    _count_units(connection, reading, fraction_text(multiplier), micro_units)
    return credit.micro_kvr


def _count_units(connection: Connection, reading: Reading, multiplier: str, micro_units: int) -> None:
    key = {
        "wallet": reading.wallet,
        "worker_id": reading.worker_id,
        "kind": reading.kind,
        "multiplier": multiplier,
    }
    counted = connection.execute(
        credited_units.update()
        .where(*(credited_units.c[name] == value for name, value in key.items()))
        .values(micro_units=credited_units.c.micro_units + micro_units)
    ).rowcount
    if not counted:
        connection.execute(credited_units.insert().values(**key, micro_units=micro_units))


def _give_back(connection: Connection, claim_id: str) -> None:
    """In the order in which a claim takes its rows, so that two of them never wait for each other."""
    items = (
        sa.select(claim_items)
        .where(claim_items.c.claim_id == claim_id)
        .order_by(claim_items.c.worker_id, claim_items.c.kind)
    )
    for item in connection.execute(items).all():
        connection.execute(
            accounts.update()
            .where(*_account_key(item.wallet, item.worker_id, item.kind))
            .values(claimed_micro_kvr=accounts.c.claimed_micro_kvr - item.micro_kvr)
        )


def _account_key(wallet: str, worker_id: str, kind: str) -> tuple[sa.ColumnElement[bool], ...]:
    return accounts.c.wallet == wallet, accounts.c.worker_id == worker_id, accounts.c.kind == kind


def _carried(row: Row[Any]) -> Fraction:
    return Fraction(int(row.carry_num), int(row.carry_den))


def fraction_text(value: Fraction) -> str:
    """``num/den``, also for whole numbers."""
    return f"{value.numerator}/{value.denominator}"


def _account(row: Row[Any]) -> Account:
    return Account(
        wallet=row.wallet,
        worker_id=row.worker_id,
        kind=row.kind,
        model=row.model,
        micro_units=row.micro_units,
        multiplier=Fraction(row.multiplier),
        credited_micro_kvr=row.credited_micro_kvr,
        carried=_carried(row),
        claimed_micro_kvr=row.claimed_micro_kvr,
        platform=json.loads(row.platform),
        created_at=row.created_at,
        last_work_at=row.last_work_at,
    )


def _claim(row: Row[Any]) -> Claim:
    return Claim(
        claim_id=row.id,
        wallet=row.wallet,
        micro_kvr=row.micro_kvr,
        state=ClaimState(row.state),
        signature=row.signature,
        raw=row.raw,
        last_valid_block_height=row.last_valid_block_height,
        slot=row.slot,
        error=row.error,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
