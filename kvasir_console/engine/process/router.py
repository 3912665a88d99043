"""The expert router: which pairs leave this machine, to whom, and what their answers are worth.

Routing is decided once, here (*router authority*): a remote worker is a pure function of rows and expert ids. A pair
whose expert a live session holds may be dispatched (``coverage`` says to whom, ``elastic`` when); every other pair is
computed by the local bank. If a session breaks, is late or answers nonsense, its pairs are computed elsewhere or here
in the same step (``star``), so a token never depends on who was alive, and ``sums`` adds them up such that it does not
depend on who computed either.

Answers are looked at (``checks``): all of them until a slice is proven, a random share after that. What is paid is
what was acknowledged here; the gateway reads it as ``coverage``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvasir_console.engine.experts import RemoteExperts
from kvasir_console.engine.process import coverage
from kvasir_console.engine.process.accounts import Accounts
from kvasir_console.engine.process.examiner import Answered, Examiner, some_rows
from kvasir_console.engine.process.hedging import HedgeBudget
from kvasir_console.engine.process.roster import REST_S, Policy, Roster, Session
from kvasir_console.engine.process.star import Ask, Part, Released, gather
from kvasir_console.engine.process.sums import F32, I64, Pairs, Sum, empty_sum
from kvasir_console.engine.process.tally import StepTally
from kvasir_console.engine.process.worker import DigestOf, Worker, WorkerError, choose_wire
from kvasir_console.engine.stage import ExpertCompute, Stage
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Preamble, Wire
from kvasir_console.relay.wire.values import Dtype

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Over this engine's life."""

    steps: int = 0
    """Layers' steps that waited for a network."""
    asks: int = 0
    hedges: int = 0
    wait_ms: float = 0.0
    """Time in which nothing was left to compute but answers were missing."""


class Router:
    """Dispatches expert pairs of one stage. ``serve`` runs on the loop; ``compute`` runs on the compute thread.

    Args:
        wire: asked of workers that speak it; ``dtype`` is what version 3 of it writes values in.
        digest_of: the shard digest a slice must have; ``None`` believes what workers say.
        evidence_directory: where wrong answers are kept; ``None`` keeps none.
        released: entered while a step waits for answers, so that another may compute.
        on_quarantine: told on the loop whom the checks have caught.
    """

    def __init__(
        self,
        stage: Stage,
        model_digest: bytes,
        *,
        wire: Wire = Wire.V2,
        dtype: Dtype = Dtype.F32,
        digest_of: DigestOf | None = None,
        timeout_s: float = 10.0,
        policy: Policy | None = None,
        evidence_directory: Path | None = None,
        released: Released = contextlib.nullcontext,
        on_quarantine: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._digest = model_digest
        self._wanted = wire
        self._dtype = dtype
        self._digest_of = digest_of
        self._timeout_s = timeout_s
        self.policy = policy or Policy()
        self._released = released
        self._on_quarantine = on_quarantine
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._roster = Roster(self.policy)
        self._accounts = Accounts(self.policy.trial_pairs)
        self._examiner = Examiner(
            stage,
            model_digest,
            self._accounts,
            share=self.policy.check_share,
            seed=self.policy.seed,
            evidence_directory=evidence_directory,
            caught=self._tell_caught,
        )
        self._budget = HedgeBudget(self.policy.hedge_share)
        self._tasks: set[asyncio.Task[None]] = set()
        self.counters = Counters()
        self.pairs_remote = {layer: np.zeros(bank.end - bank.begin, np.int64) for layer, bank in stage.banks.items()}
        """By layer: pairs of each expert that a remote session computed. The banks count their own."""

    # -- sessions ---------------------------------------------------------------------------------------------------

    async def serve(self, preamble: Preamble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep one spliced session until it ends. Raises ``ValueError`` if the preamble does not fit this model."""
        if preamble.model_digest != self._digest:
            raise ValueError("the session serves another model")
        for layer, begin, end in preamble.windows:
            bank = self._stage.banks.get(layer)
            if bank is None or not bank.begin <= begin < end <= bank.end:
                raise ValueError(f"layer {layer} has no experts [{begin}, {end})")
        if self._accounts.quarantined(preamble.session, preamble.wallet):
            raise ValueError(f"session {preamble.session} is quarantined")
        key = _key(preamble.session, preamble.wallet)
        worker = Worker(
            preamble,
            choose_wire(self._wanted, preamble.wires, self._dtype),
            reader,
            writer,
            functools.partial(self._accounts.of, preamble.session, preamble.wallet),
            n_embd=self._stage.shape.n_embd,
            dtype=self._dtype,
            digest_of=self._digest_of,
        )
        await worker.open()
        if self._accounts.quarantined(preamble.session, preamble.wallet):  # it may have been caught meanwhile
            worker.drop("quarantined")
            raise ValueError(f"session {preamble.session} is quarantined")
        if older := self._roster.get(key):
            self._drop(older, "replaced by a newer connection")
        session = self._roster.add(key, worker, self._clock())
        for held in worker.slices:
            log.info("session %s serves layer %d experts [%d, %d)", worker.name, held.layer, held.begin, held.end)
        why = await worker.run()
        log.info("session %s ends: %s", worker.name, why)
        self._drop(session, why)

    def coverage(self) -> list[dict[str, Any]]:
        """Every slice ever served, with its acknowledged work (micro-units are ``paid_bytes``)."""
        return self._accounts.coverage()

    def stats(self) -> dict[str, Any]:
        """For the ``stats`` verb."""
        now = self._clock()
        held = {
            layer: [holder for _, holder in self._roster.holders(layer, now)] for layer in sorted(self._stage.banks)
        }
        sizes = {layer: bank.end - bank.begin for layer, bank in self._stage.banks.items()}
        return {
            **asdict(self.counters),
            "checked_pairs": self._examiner.checked_pairs,
            "mismatches": self._examiner.mismatches,
            "disputes": self._examiner.disputes,
            "saturated": self._roster.elastic.saturated,
            "streaming": self._roster.elastic.streaming,
            "coverage": coverage.describe(sizes, held),
        }

    def quarantine(self, name: str, wallet: str | None = None) -> bool:
        """Refuse a session from now on and void what it is owed; the operator's word or another engine's finding."""
        found = self._accounts.convict(name, wallet) is not None
        for session in self._roster:
            if session.worker.name == name and wallet in (None, session.worker.wallet):
                self._drop(session, "quarantined")
        return found

    def pardon(self, name: str, wallet: str) -> bool:
        """Lift a session's quarantine: it may come back, and has to be proven anew. Whether there was one."""
        return self._accounts.pardon(name, wallet)

    def close(self) -> None:
        """End all sessions; workers dial again if there is something to serve."""
        for session in self._roster:
            self._drop(session, "the engine loads another model or leaves")

    @property
    def live(self) -> bool:
        """Whether any session is connected whose experts may be asked for now."""
        return bool(len(self._roster)) and self._roster.elastic.streaming

    def observe(self, streams: int) -> None:
        """A step of so many streams is about to be computed."""
        self._roster.elastic.observe(streams, self._clock())

    def _drop(self, session: Session, why: str) -> None:
        self._roster.remove(session)
        if not session.worker.broken:
            log.info("session %s ends: %s", session.worker.name, why)
        session.worker.drop(why)

    # -- a layer's step, on the compute thread --------------------------------------------------------

    def expert_compute(self, tally: StepTally) -> ExpertCompute:
        """The function a forward pass calls for each MoE layer; it counts into ``tally`` and heeds its ``network``."""

        def compute(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self._compute(layer, x, ids, weights, tally)

        return RemoteExperts(compute, self._roster.layers())

    def _compute(
        self,
        layer: int,
        x: torch.Tensor,  # (T, D)
        ids: torch.Tensor,  # (T, K)
        weights: torch.Tensor,  # (T, K)
        tally: StepTally,
    ) -> torch.Tensor:  # (T, D)
        T, K = ids.shape
        step = tally.take(layer, T)
        bank = self._stage.banks[layer]
        pairs, total = Pairs.of(ids, weights), empty_sum(x, K)
        self._examiner.arbitrate()
        parts: list[Part] = []
        away = np.zeros(len(pairs), dtype=np.bool_)
        allowed = np.repeat(tally.network[step], K)
        counts = np.bincount(pairs.ids[allowed], minlength=bank.end)
        for key, experts in self._roster.plan(layer, counts, self._clock()).items():
            mine = allowed & np.isin(pairs.ids, experts)
            part = self._part(key, layer, x, pairs.where(mine), total.frame(pairs.where(mine)))
            if part is not None:
                away |= mine
                parts.append(part)

        def local(some: Pairs) -> None:
            tally.count_local(some.rows + step.start)
            total.local(bank, x, some)

        def remote(some: Pairs) -> None:
            tally.count_remote(some.rows + step.start)
            self.pairs_remote[layer] += np.bincount(some.ids - bank.begin, minlength=bank.end - bank.begin)

        for session in self._roster.probes(layer):
            self._probe(session, layer, x, pairs, total)

        if not parts:
            local(pairs)
            return total.result()
        self.ask([ask for part in parts for ask in part.asks])
        if not away.all():
            local(pairs.where(~away))
        for part in parts:
            self._prepare(part)
        self.counters.steps += 1
        waited = self._clock()
        gather(
            self,
            parts,
            total,
            local,
            self._clock,
            self._released,
            remote,
            lambda some: tally.count_failovers(some.rows + step.start),
        )
        spent_s = self._clock() - waited
        waited_s = max(0.0, max(part.answered_at for part in parts) - waited)
        tally.wait(spent_s, min(waited_s, spent_s))
        self.counters.wait_ms += waited_s * 1e3
        return total.result()

    def _probe(self, session: Session, layer: int, x: torch.Tensor, pairs: Pairs, total: Sum) -> None:
        """Ask a doubtful session for one row, and wait for nothing."""
        held = session.worker.holds(layer) or range(0)
        mine = pairs.where(np.flatnonzero((pairs.ids >= held.start) & (pairs.ids < held.stop))[:1])
        part = self._part(session.key, layer, x, mine, total.frame(mine))
        if part is not None:
            self.ask(part.asks)
            for ask in part.asks:
                self.leave(ask)

    def _prepare(self, part: Part) -> None:
        """Get ready to look at an answer while it travels. Under load another wallet's worker does."""
        session = self._connected(part.asks[0])
        if session is None or not len(part.drawn):
            return
        if self._roster.elastic.saturated and session.worker.stats[part.layer].proven:
            strangers = [
                holder
                for other, holder in self._roster.holders(part.layer, self._clock())
                if holder.wallet != session.worker.wallet and other.worker.stats[part.layer].proven
            ]
            part.cross = coverage.replica(part.experts, strangers, part.asked)
        if part.cross is None:
            self._examiner.prepare(part, session.worker)

    def _part(self, key: str, layer: int, x: torch.Tensor, pairs: Pairs, frame: tuple[I64, I64]) -> Part | None:
        session = self._roster.get(key)
        sent, row_idx = frame
        # Between the plan and now another connection may have taken its place, with other experts.
        if (
            session is None
            or layer not in session.worker.stats
            or not len(pairs)
            or not session.worker.fits(len(sent), len(pairs))
        ):
            return None
        request = dispatch.Request(
            wire=session.worker.wire,
            rows=np.ascontiguousarray(x[torch.from_numpy(sent)].float().cpu().numpy()),
            row_idx=row_idx.astype(np.int32),
            ids=pairs.ids.astype(np.int32),
            weights=pairs.weights,
        )
        drawn = self._examiner.draw(key, session.worker, layer, row_idx, len(sent))
        part = Part(layer, pairs, sent, row_idx, request, drawn)
        part.asks.append(self.make_ask(key, part))
        return part

    # -- what a star asks of its desk (``star.Desk``), on the compute thread ----------------------------

    def make_ask(self, key: str, part: Part) -> Ask:
        session, now = self._roster.get(key), self._clock()
        late_ms = session.pace.late_ms(len(part.pairs)) if session else 0.0
        part.asked.append(key)
        # Whoever took its place just now may hold other layers: nothing is asked then.
        worker = session.worker if session is not None and part.layer in session.worker.stats else None
        return Ask(key, part, now, now + min(late_ms / 1e3, self._timeout_s), worker)

    def ask(self, asks: Sequence[Ask]) -> None:
        self.counters.asks += len(asks)
        for ask in asks:
            if len(ask.part.asked) == 1:
                self._budget.asked()
            if session := self._connected(ask):
                session.open_asks.add(ask)
        self._loop.call_soon_threadsafe(self._start, list(asks))

    def other(self, part: Part, *, hedge: bool) -> str | None:
        holders, wallets = [], set()
        for session, holder in self._roster.holders(part.layer, self._clock()):
            if session.key in part.asked:
                wallets.add(holder.wallet)
            elif session.worker.stats[part.layer].proven and session.worker.fits(len(part.sent), len(part.pairs)):
                holders.append(holder)
        strangers = [holder for holder in holders if holder.wallet not in wallets]
        found = coverage.replica(part.experts, strangers, part.asked) or coverage.replica(
            part.experts, holders, part.asked
        )
        if hedge:
            if found is not None and not self._budget.take():
                found = None
            self.counters.hedges += 1
            for ask in part.asks:
                if slow := self._connected(ask):
                    slow.worker.stats[part.layer].hedges += 1
        return found

    def accept(self, ask: Ask, values: F32) -> bool:
        part, session = ask.part, self._connected(ask)
        if session is None:
            return False  # it was caught, dropped or replaced while this answer waited
        worker, stats = session.worker, session.worker.stats[part.layer]
        cross = self._roster.get(part.cross)
        # Who answers instead of whoever was late may be the very one who was to be asked for a check.
        stranger = cross is None or cross.worker.wallet != worker.wallet
        if part.cross is not None and stats.proven and stranger:
            one = Answered(worker, values[part.drawn])
            self._loop.call_soon_threadsafe(self._spawn, self._cross_check(part, part.drawn, one))
            self._accounts.pay(stats, part.request)
            return True
        if not stats.proven and len(part.drawn) < len(part.sent):
            return False
        checked_pairs = self._examiner.passes(ask.key, worker, part, values)
        if checked_pairs is None:
            return False
        self._accounts.pay(stats, part.request, checked_pairs)
        return True

    def leave(self, ask: Ask) -> None:
        ask.reply.add_done_callback(functools.partial(self._came_late, ask))

    def _connected(self, ask: Ask) -> Session | None:
        """The session that was asked, if it is still the same connection."""
        session = self._roster.get(ask.key)
        return session if session is not None and session.worker is ask.worker else None

    # -- frames, on the loop ------------------------------------------------------------------------------------------

    def _start(self, asks: list[Ask]) -> None:
        for ask in asks:
            self._spawn(self._answer(ask))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_caught(self, worker: Worker, facts: dict[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._caught, worker, facts)

    def _caught(self, worker: Worker, facts: dict[str, Any]) -> None:
        for session in self._roster:
            if session.worker is worker:
                self._drop(session, "quarantined")
        if self._on_quarantine is not None:
            self._on_quarantine(facts)

    async def _answer(self, ask: Ask) -> None:
        """Ask, and set the reply, whatever comes."""
        session = self._connected(ask)
        if session is None:
            ask.reply.set_exception(ConnectionResetError("the session is closed"))
            return
        worker = session.worker
        started = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                values = await worker.ask(ask.part.layer, ask.part.request, pay=False)
        except (OSError, EOFError, TimeoutError, ValueError, WorkerError) as error:
            worker.stats[ask.part.layer].failures += 1
            refused = isinstance(error, WorkerError) and error.reason != "not_finite"
            if refused:
                session.rests_until = self._clock() + REST_S
                log.info("session %s refuses a request: %s", worker.name, error)
            else:
                if isinstance(error, TimeoutError):
                    self._roster.hung(session)
                self._drop(session, f"{type(error).__name__}: {error}")
            ask.reply.set_exception(error)
        except BaseException:
            ask.reply.cancel()
            raise
        else:
            ask.answered_at = self._clock()
            self._roster.answered(session, len(ask.part.pairs), (self._clock() - started) * 1e3)
            ask.reply.set_result(values)
        finally:
            session.open_asks.discard(ask)

    def _came_late(self, ask: Ask, reply: Any) -> None:
        """An answer that another one, or this machine, was faster than. It is paid if its slice is proven and it says
        the same; if it does not, it is found out who is wrong."""
        session, part = self._connected(ask), ask.part
        if reply.cancelled() or reply.exception() is not None or session is None:
            return
        stats = session.worker.stats[part.layer]
        if not stats.proven:
            return
        rows = np.arange(len(part.sent))
        other = None if part.answerer is None or part.answer is None else Answered(part.answerer, part.answer)
        late = Answered(session.worker, reply.result(), part.request)
        if self._examiner.compare(part, rows, late, other):
            self._accounts.pay(stats, part.request)

    async def _cross_check(self, part: Part, rows: I64, one: Answered) -> None:
        """Ask another wallet's worker for the drawn rows of an answer."""
        session = self._roster.get(part.cross)
        request = some_rows(part.request, rows)
        try:
            if session is None:
                raise ConnectionResetError("the session is closed")
            async with asyncio.timeout(self._timeout_s):
                values = await session.worker.ask(part.layer, request, pay=False)
        except (OSError, EOFError, TimeoutError, ValueError, WorkerError):
            # Whoever is asked can tell a check by its few rows: silence must not be a way past it.
            self._examiner.compare(part, rows, one, None)
            return
        if self._examiner.compare(part, rows, one, Answered(session.worker, values, request)):
            self._accounts.pay(session.worker.stats[part.layer], request)
            self._examiner.checked_pairs += request.n_pairs


def _key(session: str, wallet: str) -> str:
    """Session names are scoped to the wallet."""
    return f"{session}@{wallet}"
