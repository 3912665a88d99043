"""The expert router: which pairs go to which remote session, and what happens when one fails.

Routing is decided once, here (*router authority*): a remote worker is a pure function of rows and expert ids. A pair
whose expert a live session holds is dispatched; every other pair is computed by the local bank. If a session breaks,
times out or answers with something that is not finite, its pairs are computed elsewhere or locally in the same step,
so a token never depends on who was alive.

Sums are regrouped by holder: each holder returns the weighted sum of its own pairs, and the sums are added in f32,
local first, then by session name. With two experts a token the regrouping is exact; with more it differs from the
local order by rounding only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kvasir_console.engine.process.tally import StepTally
from kvasir_console.engine.process.worker import SessionStats, Slice, Worker, WorkerError
from kvasir_console.engine.stage import ExpertCompute, Stage
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Preamble, Wire

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of one layer: ``rows`` (P,) index the batch, ``ids`` (P,) are global expert ids, ``weights`` (P,) f32."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def __len__(self) -> int:
        return int(self.rows.numel())

    @property
    def distinct_rows(self) -> int:
        return len(np.unique(self.rows.numpy()))

    def where(self, mask: torch.Tensor) -> _Pairs:
        return _Pairs(self.rows[mask], self.ids[mask], self.weights[mask])


class Router:
    """Dispatches expert pairs of one trunk. ``serve`` runs on the loop; ``compute`` runs on the compute thread."""

    def __init__(self, stage: Stage, model_digest: bytes, *, wire: Wire = Wire.V2, timeout_s: float = 10.0) -> None:
        self._stage = stage
        self._digest = model_digest
        self._wanted = wire
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, Worker] = {}
        self._stats: dict[tuple[str, str, int, int, int], SessionStats] = {}

    def coverage(self) -> list[dict[str, Any]]:
        """Every session ever served, with its acknowledged work (micro-units are ``paid_bytes``)."""
        return [asdict(stats) for stats in self._stats.values()]

    async def serve(self, preamble: Preamble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep one spliced session until it ends. Raises ``ValueError`` if the preamble does not fit this model."""
        bank = self._stage.banks.get(preamble.layer)
        if preamble.model_digest != self._digest:
            raise ValueError("the session serves another model")
        if bank is None or not bank.begin <= preamble.begin < preamble.end <= bank.end:
            raise ValueError(f"layer {preamble.layer} has no experts [{preamble.begin}, {preamble.end})")
        if self._quarantined(preamble.session):
            raise ValueError(f"session {preamble.session} is quarantined")
        if older := self._live.get(preamble.session):
            self._drop(older, "replaced by a newer connection")
        wire = self._wanted if self._wanted & preamble.wires else Wire.V2
        worker = Worker(preamble, wire, reader, writer, functools.partial(self._account, preamble))
        self._live[worker.name] = worker
        for held in worker.slices:
            log.info("session %s serves layer %d experts [%d, %d)", worker.name, held.layer, held.begin, held.end)
        why = await worker.run()
        log.info("session %s ends: %s", worker.name, why)
        self._drop(worker, why)

    def _account(self, preamble: Preamble, held: Slice) -> SessionStats:
        key = (preamble.session, preamble.wallet, held.layer, held.begin, held.end)
        return self._stats.setdefault(key, SessionStats(*key))

    def _quarantined(self, name: str) -> bool:
        return any(stats.quarantined for stats in self._stats.values() if stats.session == name)

    def quarantine(self, name: str) -> bool:
        """Refuse a session from now on; its unacknowledged work earns nothing."""
        found = False
        for stats in self._stats.values():
            if stats.session == name:
                stats.quarantined = found = True
        if worker := self._live.get(name):
            self._drop(worker, "quarantined")
        return found

    @property
    def live(self) -> bool:
        """Whether any session is connected."""
        return bool(self._live)

    def expert_compute(self, tally: StepTally) -> ExpertCompute:
        """The function a forward pass calls for each MoE layer; it counts into ``tally`` and heeds its ``network``."""

        def compute(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self._compute(layer, x, ids, weights, tally)

        return compute

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
        pairs = _Pairs(torch.arange(T).repeat_interleave(K), ids.reshape(-1).cpu(), weights.reshape(-1))
        taken = torch.from_numpy(~tally.network[step]).repeat_interleave(K)
        local = taken.clone()
        sent: list[tuple[Worker, _Pairs, concurrent.futures.Future[torch.Tensor]]] = []
        for worker, held in self._holders(layer):
            mine = (pairs.ids >= held.start) & (pairs.ids < held.stop) & ~taken
            if not bool(mine.any()) or not worker.fits((part := pairs.where(mine)).distinct_rows, len(part)):
                continue
            taken |= mine
            sent.append((worker, part, self._send(worker, layer, x, part)))
        out = self._local(layer, x, pairs.where(local | ~taken), tally, step)
        for worker, part, future in sent:
            partial = self._collect(worker, layer, future)
            if partial is None:
                tally.count_failovers(part.rows.numpy() + step.start)
                out += self._elsewhere(layer, x, part, tally, step, {worker.name})
            else:
                tally.count_remote(part.rows.numpy() + step.start)
                out += partial
        return out

    def _elsewhere(
        self, layer: int, x: torch.Tensor, pairs: _Pairs, tally: StepTally, step: slice, failed: set[str]
    ) -> torch.Tensor:
        """Compute pairs whose session failed: by a replica that holds them all, else locally."""
        for worker, held in self._holders(layer):
            inside = bool(((pairs.ids >= held.start) & (pairs.ids < held.stop)).all())
            if worker.name in failed or not inside:
                continue
            partial = self._collect(worker, layer, self._send(worker, layer, x, pairs))
            if partial is not None:
                tally.count_remote(pairs.rows.numpy() + step.start)
                return partial
            failed.add(worker.name)
        return self._local(layer, x, pairs, tally, step)

    def _local(self, layer: int, x: torch.Tensor, pairs: _Pairs, tally: StepTally, step: slice) -> torch.Tensor:
        bank = self._stage.banks[layer]
        tally.count_local(pairs.rows.numpy() + step.start)
        return bank.weighted_sum(x, pairs.rows, pairs.ids - bank.begin, pairs.weights)

    def _holders(self, layer: int) -> Iterator[tuple[Worker, range]]:
        """Live workers of a layer and what they hold, in a fixed order, so that sums are added in a fixed order."""
        for worker in sorted(self._live.values(), key=lambda worker: worker.name):
            held = worker.holds(layer)
            if held is not None and not worker.broken:
                yield worker, held

    def _send(
        self, worker: Worker, layer: int, x: torch.Tensor, pairs: _Pairs
    ) -> concurrent.futures.Future[torch.Tensor]:
        """Start a request; the future holds the (T, D) weighted sum of these pairs."""
        distinct, index = torch.unique(pairs.rows, return_inverse=True)
        request = dispatch.Request(
            wire=worker.wire,
            rows=np.ascontiguousarray(x[distinct].cpu().numpy()),
            row_idx=index.numpy().astype(np.int32),
            ids=pairs.ids.numpy().astype(np.int32),
            weights=pairs.weights.cpu().numpy(),
        )
        coroutine = self._request(worker, layer, request, distinct, x.shape[0])
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _collect(
        self, worker: Worker, layer: int, future: concurrent.futures.Future[torch.Tensor]
    ) -> torch.Tensor | None:
        try:
            return future.result()
        except (OSError, EOFError, TimeoutError, ValueError, WorkerError, concurrent.futures.CancelledError) as error:
            worker.stats[layer].failures += 1
            self._loop.call_soon_threadsafe(self._drop, worker, f"{type(error).__name__}: {error}")
            return None

    async def _request(
        self, worker: Worker, layer: int, request: dispatch.Request, distinct: torch.Tensor, batch: int
    ) -> torch.Tensor:
        async with asyncio.timeout(self._timeout_s):
            partial = await worker.ask(layer, request)
        out = torch.zeros(batch, request.n_embd)
        out[distinct] = torch.from_numpy(partial)
        return out

    def _drop(self, worker: Worker, why: str) -> None:
        if self._live.get(worker.name) is worker:
            del self._live[worker.name]
        if not worker.broken:
            log.info("session %s ends: %s", worker.name, why)
        worker.drop(why)
