"""Workers that were caught with a wrong answer: cases, what they void, and what lifting one means.

A case is one conviction by one engine run. Whose word it is decides how far it reaches:

* An engine of this gateway: the worker is quarantined everywhere, and all that was metered and not credited is void.
* A ring's stage, by its signed report: the worker is kept away from that stage, and what that stage's reports metered
  and was not credited is void. A stage is a stranger; it could have left that work out of its reports as well, so its
  word takes nothing from the worker that it had not in its hands.

The operator may lift all cases of a worker, or of all workers of a wallet. They may serve again and have to be proven
anew; what was void stays void. A stage has at most one open case against a session, whatever it says; what other runs
of it still hold against the session is lifted with that case, or it would be a new one at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from kvasir_console.errors import LedgerError
from kvasir_console.node.gateway.store import Store
from kvasir_console.node.gateway.tables import counters, meter, quarantines, stage_reports
from kvasir_console.relay.wire.stage_report import StageReport
from kvasir_console.relay.wire.statement import GENESIS

log = logging.getLogger(__name__)

OWN = ""
"""Who caught a worker, where it was an engine of this gateway."""


class Standing(Enum):
    """What the books say of a case that an engine still holds against a worker."""

    OPEN = 1
    LIFTED = 2
    """The engine has not heard of it yet."""


@dataclass(frozen=True, slots=True)
class Case:
    wallet: str
    worker_id: str
    caught_by: str
    """A stage's wallet, or ``OWN``."""
    run_id: str
    session: str
    number: int
    """The how manieth conviction of this session in this run."""
    at: int
    fault: str = ""
    evidence: str = ""
    """A file on the machine that caught it."""
    evidence_digest: str = ""
    report: str = ""
    """What a stage signed, with its signature."""
    signature: str = ""
    lifted_at: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Quarantines:
    """The cases in the database: several gateways and the operator's commands share them. Methods block."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def quarantined(self, wallet: str, worker_id: str, stage: str = OWN) -> bool:
        """Whether a worker was caught by an engine of this database, or by ``stage``."""
        with self._store.read() as connection:
            return bool(open_cases(connection, wallet, worker_id) & {OWN, stage})

    def catch(self, case: Case) -> Standing:
        """Enter a case, unless it is known."""
        with self._store.read() as connection:
            known = _standing(connection, case)
        if known is not None:
            return known
        with self._store.write() as connection:
            return catch(connection, case)

    def cases(self, *, lifted: bool = False) -> tuple[Case, ...]:
        """All open cases, oldest first; with ``lifted`` those too that were lifted."""
        query = sa.select(quarantines).order_by(quarantines.c.at, quarantines.c.wallet, quarantines.c.worker_id)
        if not lifted:
            query = query.where(quarantines.c.lifted_at.is_(None))
        with self._store.read() as connection:
            return tuple(_case(row) for row in connection.execute(query))

    def against(self, wallet: str, worker_id: str = "") -> tuple[Case, ...]:
        """All that a lift would lift: of one worker, or of every one of the wallet."""
        with self._store.read() as connection:
            return (*_open(connection, wallet, worker_id), *_unlisted(connection, wallet, worker_id))

    def lift(self, wallet: str, worker_id: str, now: int, shown: Iterable[Case] | None = None) -> tuple[Case, ...]:
        """Lift every case of a worker, or without one of every worker of the wallet; which those were.

        Args:
            shown: what a person agreed to, if one was asked. More of the same (another conviction of a session by whom
                it was caught before) is lifted with it.

        Raises:
            LedgerError: ``quarantine_changed``; something else came since. Nothing is lifted.
        """
        with self._store.write() as connection:
            found, more = _open(connection, wallet, worker_id), _unlisted(connection, wallet, worker_id)
            if shown is not None and not {*map(_subject, (*found, *more))} <= {*map(_subject, shown)}:
                raise LedgerError(
                    "quarantine_changed",
                    "Another case came while you were asked. Nothing was lifted.",
                    "Look again, then answer.",
                )
            for case in found:  # these, and none that another gateway enters meanwhile
                connection.execute(quarantines.update().where(*_same(case)).values(lifted_at=now))
            for case in more:
                connection.execute(quarantines.insert().values(**asdict(replace(case, lifted_at=now))))
        return (*found, *more)


def _subject(case: Case) -> tuple[str, ...]:
    """Who holds something against whom."""
    return case.wallet, case.worker_id, case.caught_by, case.session


def case_of(report: StageReport, signature: str, worker_id: str, at: int) -> Case:
    """What a stage's report holds against a worker."""
    return Case(
        wallet=report.wallet,
        worker_id=worker_id,
        caught_by=report.stage,
        run_id=stage_run_id(report.stage, report.run),
        session=report.session,
        number=report.convictions,
        at=at,
        fault=report.fault,
        evidence_digest="" if report.evidence == GENESIS else report.evidence,
        report=report.text(),
        signature=signature,
    )


def _open(connection: Connection, wallet: str, worker_id: str) -> tuple[Case, ...]:
    query = sa.select(quarantines).where(*_of(wallet, worker_id), quarantines.c.lifted_at.is_(None))
    order = (quarantines.c.at, quarantines.c.worker_id)
    return tuple(_case(row) for row in connection.execute(query.order_by(*order).with_for_update()))


def _unlisted(connection: Connection, wallet: str, worker_id: str) -> tuple[Case, ...]:
    """What stages hold against workers by their latest reports, beside the case that was open already."""
    of = stage_reports.c
    named = (of.wallet == wallet, *((of.worker_id == worker_id,) if worker_id else ()))
    query = sa.select(of.text, of.signature, of.worker_id, of.opened_at).where(
        *named, of.text.contains('"quarantined":true', autoescape=True)
    )
    cases = []
    for row in connection.execute(query.order_by(of.opened_at)):
        report = StageReport.parse(row.text)
        case = case_of(report, row.signature, row.worker_id, int(row.opened_at))
        if report.quarantined and _standing(connection, case) is None:
            cases.append(case)
    return tuple(cases)


def open_cases(connection: Connection, wallet: str, worker_id: str) -> set[str]:
    """Who holds a case against a worker."""
    query = sa.select(quarantines.c.caught_by).where(*_of(wallet, worker_id), quarantines.c.lifted_at.is_(None))
    return set(connection.scalars(query))


def catch(connection: Connection, case: Case) -> Standing:
    """Enter a case, unless it is known, and void what it voids."""
    known = _standing(connection, case)
    if known is not None:
        return known
    if case.caught_by != OWN and _open_by_stage(connection, case):
        return Standing.OPEN  # it is kept away already: a stage cannot fill the books with convictions
    connection.execute(quarantines.insert().values(**asdict(case)))
    who = f"the stage of {case.caught_by}" if case.caught_by else case.run_id
    log.warning("%s caught %s of %s: what was not credited is void", who, case.worker_id, case.wallet)
    rows = sa.select(meter).where(meter.c.wallet == case.wallet, meter.c.worker_id == case.worker_id)
    for row in connection.execute(rows.with_for_update()).all():
        if case.caught_by in (OWN, caught_in(row.run_id)):
            kept = min(int(row.micro_units), credited(connection, row.run_id, row.wallet, row.worker_id, row.kind))
            connection.execute(
                meter.update()
                .where(*(meter.c[name] == getattr(row, name) for name in ("run_id", "wallet", "worker_id", "kind")))
                .values(micro_units=kept, voided=row.voided + row.micro_units - kept)
            )
    return Standing.OPEN


def _open_by_stage(connection: Connection, case: Case) -> bool:
    """Whether the stage has an open case against this session."""
    query = sa.select(quarantines.c.number).where(
        *_of(case.wallet, case.worker_id),
        quarantines.c.caught_by == case.caught_by,
        quarantines.c.session == case.session,
        quarantines.c.lifted_at.is_(None),
    )
    return connection.execute(query.limit(1)).one_or_none() is not None


def _standing(connection: Connection, case: Case) -> Standing | None:
    query = sa.select(quarantines.c.lifted_at).where(*_same(case))
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    return Standing.OPEN if row.lifted_at is None else Standing.LIFTED


def credited(connection: Connection, run_id: str, wallet: str, worker_id: str, kind: str) -> int:
    """How much of a counter was credited, in micro-units."""
    key = {"run_id": run_id, "wallet": wallet, "worker_id": worker_id, "kind": kind}
    query = sa.select(counters.c.baseline).where(*(counters.c[name] == value for name, value in key.items()))
    return int(connection.scalar(query) or 0)


def stage_run_id(stage: str, run: str) -> str:
    """The name in the books of a run of a ring's stage."""
    return f"stage:{stage}:{run}"


def caught_in(run_id: str) -> str:
    """Who speaks for a run: a stage's wallet, or ``OWN``."""
    kind, _, rest = run_id.partition(":")
    return rest.partition(":")[0] if kind == "stage" else OWN


def _of(wallet: str, worker_id: str) -> Sequence[sa.ColumnElement[bool]]:
    """Cases of a worker, or without one of every worker of the wallet."""
    mine = quarantines.c.wallet == wallet
    return (mine, quarantines.c.worker_id == worker_id) if worker_id else (mine,)


def _same(case: Case) -> list[sa.ColumnElement[bool]]:
    return [column == getattr(case, column.name) for column in quarantines.primary_key]


def _case(row: sa.Row[Any]) -> Case:
    return Case(**row._mapping)
