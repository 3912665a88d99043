"""What a ring's stage tells the hub of its workers, so that they are paid: read off the engine, signed, sent, kept.

Counters are those of one load of the engine, a *run*. What was not accepted yet is sent again with the next report,
also after the engine died: only what it did since it was last looked at is lost then.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.node.credentials import Credentials
from kvasir_console.node.holding import RingHolding
from kvasir_console.node.market import GatewayInfo, Market
from kvasir_console.node.placement.plan import Plan
from kvasir_console.node.session_key import SessionKey
from kvasir_console.relay.uplink import MAX_WAITING
from kvasir_console.relay.wire.stage_report import MAX_SLICES, SliceWork, StageReport, no_evidence, printable

__all__ = ["StageBook", "StageReporter"]

log = logging.getLogger(__name__)

REPORT_S = 2.0
"""Pause between two looks at the engine: the most work that its death can leave unpaid while the gateway answers."""
AT_ONCE = 64
MAX_KEPT = 1024
"""Workers of runs that are over whose last figures wait to be accepted."""
TRIES = 30
"""After so many refusals the figures of a run that is over are given up."""
ASK_EVERY = 5
"""Among so many sendings one says again whom the stage holds for quarantined, to hear whether that was lifted."""
_FOR_NOW = frozenset({"report_over_counted", "report_too_many_runs", "report_old_epoch", "store_busy"})
"""Refusals that another time may not meet: the hub counts bytes a moment late, a plan is a moment old."""

Send = Callable[[Sequence[Mapping[str, str]]], Awaitable[list[dict[str, Any]]]]
Pardon = Callable[[str, str], Awaitable[bool]]
_Key = tuple[str, str, str]
"""Run, wallet and session."""


@dataclass(frozen=True, slots=True)
class _Figures:
    """One worker's totals, as a report states them."""

    requests: int
    slices: tuple[SliceWork, ...]
    quarantined: bool
    convictions: int
    fault: str
    evidence: str


@dataclass(slots=True)
class _Worker:
    now: _Figures
    accepted: _Figures | None = None
    refusals: int = 0
    places: list[tuple[int, int, int]] = field(default_factory=list)


class StageBook:
    """``begin`` with every load, ``observe`` what the engine says, ``send`` what the hub has not accepted yet."""

    def __init__(self, wallet: str) -> None:
        self._wallet = wallet
        self._run = ""
        self._sequence = 0
        self._sendings = 0
        self._workers: dict[_Key, _Worker] = {}

    @property
    def run(self) -> str:
        return self._run

    def begin(self) -> str:
        """The engine was loaded: its counters are at zero. The new run's name."""
        self._run = secrets.token_hex(16)
        open_ = {key: each for key, each in self._workers.items() if each.now != each.accepted}
        self._workers = dict(list(open_.items())[-MAX_KEPT:])
        return self._run

    def observe(self, run: str, coverage: Iterable[Mapping[str, Any]]) -> None:
        """Take in the engine's counters of its workers (its ``coverage``)."""
        sessions: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for entry in coverage:
            sessions.setdefault((str(entry["wallet"]), str(entry["session"])), []).append(entry)
        for (wallet, session), entries in sessions.items():
            key = (run, wallet, session)
            worker = self._workers.get(key)
            places = [] if worker is None else worker.places
            figures = _figures(entries, places, () if worker is None else worker.now.slices)
            if worker is None:
                self._workers[key] = _Worker(figures, places=places)
            else:
                worker.now = figures

    async def send(self, plan: Plan, hub: str, key: SessionKey, send: Send, pardon: Pardon) -> list[str]:
        """Report what was not accepted yet; the codes of what was refused.

        Args:
            plan: the one in force, which names this wallet.
            hub: the hub's key as the gateway announces it.
            pardon: lifts what the running engine holds against a session of a wallet.

        Raises as ``send``.
        """
        self._sendings += 1
        asks = self._sendings % ASK_EVERY == 0
        due = [(name, each) for name, each in self._workers.items() if self._due(name, each, asks)][:AT_ONCE]
        if not due:
            return []
        told = [(name, worker, worker.now) for name, worker in due]
        reports = [self._signed(name, figures, plan, hub, key) for name, _, figures in told]
        refused = []
        for (name, worker, figures), answer in zip(told, await send(reports), strict=True):
            if answer.get("accepted") is True:
                worker.accepted, worker.refusals = figures, 0
                self._let_others_pass(name)
                if figures.quarantined and answer.get("lifted") is True and name[0] == self._run:
                    await pardon(name[2], name[1])
                continue
            refused.append(self._refused(name, worker, answer))
        return refused

    def _due(self, name: _Key, worker: _Worker, asks: bool) -> bool:
        return worker.now != worker.accepted or (asks and worker.now.quarantined and name[0] == self._run)

    def _refused(self, name: _Key, worker: _Worker, answer: Mapping[str, Any]) -> str:
        code = str(answer.get("code", ""))[:64]
        worker.refusals += 1
        if worker.refusals in (1, TRIES):
            log.warning("a report about %s is refused: %s %s", name[2], printable(code), printable(str(answer)))
        over = name[0] != self._run
        if over and (code not in _FOR_NOW or worker.refusals >= TRIES):
            self._workers.pop(name, None)
        elif worker.refusals > 1:
            self._let_others_pass(name)
        return code

    def _let_others_pass(self, name: _Key) -> None:
        """The next to be reported are those that waited; who was known when this was sent may be forgotten by now."""
        if (worker := self._workers.pop(name, None)) is not None:
            self._workers[name] = worker

    def _signed(self, name: _Key, figures: _Figures, plan: Plan, hub: str, key: SessionKey) -> dict[str, str]:
        run, wallet, session = name
        self._sequence += 1
        report = StageReport(
            hub=hub,
            stage=self._wallet,
            key=key.address,
            ring=plan.ring,
            epoch=plan.generation,
            run=run,
            sequence=self._sequence,
            model_digest=plan.model_digest,
            wallet=wallet,
            session=session,
            requests=figures.requests,
            slices=figures.slices,
            quarantined=figures.quarantined,
            convictions=figures.convictions,
            fault=figures.fault,
            evidence=figures.evidence,
        )
        text = report.text()
        return {"text": text, "signature": base64.b64encode(key.sign(text.encode())).decode()}


class StageReporter:
    """Keeps the book of one node's stage: ``run`` until cancelled, then ``finish``."""

    def __init__(
        self,
        market: Market,
        credentials: Credentials,
        wallet: str,
        stage: Callable[[], tuple[RingHolding, GatewayInfo] | None],
        on_newer_plan: Callable[[], None],
    ) -> None:
        """
        Args:
            stage: the window that the node holds now, if it holds one, and what its gateway said of itself.
            on_newer_plan: the gateway refused a report because the ring is another by now.
        """
        self._market = market
        self._credentials = credentials
        self._stage = stage
        self._on_newer_plan = on_newer_plan
        self._book = StageBook(wallet)
        self._read_off: tuple[EngineClient, str] | None = None
        """The engine that holds a ring's window, and the run that its counters are of."""

    def loaded(self, client: EngineClient, *, layers: bool) -> None:
        """An engine holds the node's slice now. ``layers``: a ring's window, not experts."""
        self._read_off = (client, self._book.begin()) if layers else None

    def lost(self) -> None:
        """The engine ended."""
        self._read_off = None

    async def run(self) -> None:
        """Tell the hub what the workers of this stage did, so that it pays them."""
        while True:
            await asyncio.sleep(REPORT_S)
            try:
                await self._report()
            except KvasirError as error:
                log.info("the stage's workers are not reported: %s", error)

    async def finish(self) -> None:
        """The last reports, as far as they are taken at once."""
        with contextlib.suppress(KvasirError, OSError):  # a timeout is one too
            async with asyncio.timeout(REPORT_S):
                for _ in range(MAX_WAITING // AT_ONCE):  # as many workers as a stage can have
                    await self._report()

    async def _report(self) -> None:
        """Look at the engine and report once. Raises ``KvasirError``."""
        stage, key = self._stage(), self._credentials.session_key
        if stage is None or key is None:
            return
        holding, info = stage
        if not info.stage_reports:
            return
        if self._read_off is not None:
            client, run = self._read_off
            with contextlib.suppress(EngineError):  # what it said before is still to be sent
                self._book.observe(run, await client.coverage())
        refused = await self._book.send(holding.plan, info.hub_key, key, self._send, self._pardon)
        if "report_old_epoch" in refused:
            self._on_newer_plan()

    async def _send(self, reports: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        return await self._credentials.with_token(lambda token: self._market.report_stage(token, reports))

    async def _pardon(self, session: str, wallet: str) -> bool:
        return self._read_off is not None and await self._read_off[0].pardon(session, wallet)


def _figures(
    entries: Sequence[Mapping[str, Any]], places: list[tuple[int, int, int]], before: Sequence[SliceWork]
) -> _Figures:
    """``places`` are the slices that reports name, and grows: a slice that was named once has to be named again, also
    when the engine has forgotten it since (``before`` is what it said last)."""
    slices = {each.place: replace(each, live=False) for each in before}
    for entry in entries:
        place = (int(entry["layer"]), int(entry["begin"]), int(entry["end"]))
        if place not in places:
            if len(places) >= MAX_SLICES:
                log.error("a worker held more than %d slices: layer %d [%d, %d) is not reported", MAX_SLICES, *place)
                continue
            places.append(place)
        slices[place] = SliceWork(
            *place,
            rows=int(entry["paid_rows"]),
            pairs=int(entry["paid_pairs"]),
            shard_digest=no_evidence(str(entry["shard_digest"])),
            live=bool(entry["connected"]),
        )
    caught = max(entries, key=lambda entry: int(entry["convictions"]))
    # An engine writes down why before it convicts, and may be read, or die, between the two.
    why = str(caught["fault"]) if int(caught["convictions"]) else ""
    return _Figures(
        requests=sum(int(entry["requests"]) for entry in entries),
        slices=tuple(slices[place] for place in sorted(slices)),
        quarantined=any(entry["quarantined"] for entry in entries),
        convictions=int(caught["convictions"]),
        fault=printable(why),
        evidence=no_evidence(str(caught["evidence_digest"])),
    )
