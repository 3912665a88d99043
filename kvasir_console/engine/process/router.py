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
import contextlib
import logging
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from kvasir_console.engine.process.tally import StepTally
from kvasir_console.engine.stage import ExpertCompute, Stage
from kvasir_console.relay.wire import dispatch
from kvasir_console.relay.wire.preamble import Preamble, Wire

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024


@dataclass(slots=True)
class SessionStats:
    """Acknowledged work of one session name over this engine's life; it outlives the connection."""

    session: str
    wallet: str
    layer: int
    begin: int
    end: int
    wire: str = ""
    requests: int = 0
    rows: int = 0
    pairs: int = 0
    paid_bytes: int = 0
    failures: int = 0
    in_flight: int = 0
    connected: bool = False
    rtt_ms: float | None = None
    """Smoothed time from request to reply: network and the worker's compute."""
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request on its way: the reply has exactly ``size`` bytes."""

    size: int
    reply: asyncio.Future[bytes]


@dataclass(slots=True)
class Session:
    """One live connection to a remote worker."""

    preamble: Preamble
    wire: Wire
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    stats: SessionStats
    pending: deque[_Pending] = field(default_factory=deque)
    broken: bool = False


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of one layer: ``rows`` (P,) index the batch, ``ids`` (P,) are global expert ids, ``weights`` (P,) f32."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def __len__(self) -> int:
        return int(self.rows.numel())

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
        self._live: dict[str, Session] = {}
        self._stats: dict[tuple[str, str, int, int, int], SessionStats] = {}
        self.pairs_remote = {layer: np.zeros(bank.end - bank.begin, np.int64) for layer, bank in stage.banks.items()}
        """By layer: pairs of each expert that a remote session computed. The banks count their own."""

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
        key = (preamble.session, preamble.wallet, preamble.layer, preamble.begin, preamble.end)
        stats = self._stats.setdefault(key, SessionStats(*key))
        if stats.quarantined:
            raise ValueError(f"session {preamble.session} is quarantined")
        wire = self._wanted if self._wanted & preamble.wires else Wire.V2
        stats.wire, stats.connected = (wire.name or "").lower(), True
        session = Session(preamble, wire, reader, writer, stats)
        if older := self._live.get(preamble.session):
            self._drop(older, "replaced by a newer connection")
        self._live[preamble.session] = session
        log.info("session %s serves layer %d experts [%d, %d)", *key[:1], *key[2:])
        try:
            await _receive(session)
            why = "the worker closed the stream"
        except (OSError, EOFError, ValueError) as error:
            why = str(error)
        self._drop(session, why)

    def quarantine(self, name: str) -> bool:
        """Refuse a session from now on; its unacknowledged work earns nothing."""
        found = False
        for stats in self._stats.values():
            if stats.session == name:
                stats.quarantined = found = True
        if session := self._live.get(name):
            self._drop(session, "quarantined")
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
        sent: list[tuple[Session, _Pairs, concurrent.futures.Future[torch.Tensor]]] = []
        for session in self._holders(layer):
            mine = (pairs.ids >= session.preamble.begin) & (pairs.ids < session.preamble.end) & ~taken
            if not bool(mine.any()) or not _fits(part := pairs.where(mine), session.wire):
                continue
            taken |= mine
            sent.append((session, part, self._send(session, x, part)))
        out = self._local(layer, x, pairs.where(local | ~taken), tally, step).to(x.device)
        for session, part, future in sent:
            partial = self._collect(session, future)
            if partial is None:
                tally.count_failovers(part.rows.numpy() + step.start)
                out += self._elsewhere(layer, x, part, tally, step, {session.preamble.session}).to(out.device)
            else:
                self._count(layer, part, tally, step)
                out += partial.to(out.device)
        return out

    def _elsewhere(
        self, layer: int, x: torch.Tensor, pairs: _Pairs, tally: StepTally, step: slice, failed: set[str]
    ) -> torch.Tensor:
        """Compute pairs whose session failed: by a replica that holds them all, else locally."""
        for session in self._holders(layer):
            held = session.preamble
            inside = bool(((pairs.ids >= held.begin) & (pairs.ids < held.end)).all())
            if held.session in failed or not inside:
                continue
            partial = self._collect(session, self._send(session, x, pairs))
            if partial is not None:
                self._count(layer, pairs, tally, step)
                return partial
            failed.add(held.session)
        return self._local(layer, x, pairs, tally, step)

    def _count(self, layer: int, pairs: _Pairs, tally: StepTally, step: slice) -> None:
        """Pairs that a session computed."""
        tally.count_remote(pairs.rows.numpy() + step.start)
        counts = self.pairs_remote[layer]
        counts += np.bincount(pairs.ids.numpy() - self._stage.banks[layer].begin, minlength=len(counts))

    def _local(self, layer: int, x: torch.Tensor, pairs: _Pairs, tally: StepTally, step: slice) -> torch.Tensor:
        bank = self._stage.banks[layer]
        tally.count_local(pairs.rows.numpy() + step.start)
        return bank.weighted_sum(x, pairs.rows, pairs.ids - bank.begin, pairs.weights)

    def _holders(self, layer: int) -> list[Session]:
        """Live sessions of a layer in a fixed order, so that sums are added in a fixed order."""
        live = [s for s in list(self._live.values()) if s.preamble.layer == layer and not s.broken]
        return sorted(live, key=lambda session: session.preamble.session)

    def _send(self, session: Session, x: torch.Tensor, pairs: _Pairs) -> concurrent.futures.Future[torch.Tensor]:
        """Start a request; the future holds the (T, D) weighted sum of these pairs."""
        distinct, index = torch.unique(pairs.rows, return_inverse=True)
        request = dispatch.Request(
            wire=session.wire,
            rows=np.ascontiguousarray(x[distinct].cpu().numpy()),
            row_idx=index.numpy().astype(np.int32),
            ids=(pairs.ids - session.preamble.begin).numpy().astype(np.int32),
            weights=pairs.weights.cpu().numpy(),
        )
        return asyncio.run_coroutine_threadsafe(self._request(session, request, distinct, x.shape[0]), self._loop)

    def _collect(self, session: Session, future: concurrent.futures.Future[torch.Tensor]) -> torch.Tensor | None:
        try:
            return future.result()
        except (OSError, EOFError, TimeoutError, ValueError, concurrent.futures.CancelledError) as error:
            session.stats.failures += 1
            self._loop.call_soon_threadsafe(self._drop, session, f"{type(error).__name__}: {error}")
            return None

    async def _request(
        self, session: Session, request: dispatch.Request, distinct: torch.Tensor, batch: int
    ) -> torch.Tensor:
        n_rows, n_embd = request.rows.shape
        n_pairs = len(request.ids)
        # Hidden states beyond half precision's range would become infinite on the thrifty wire.
        wire = session.wire if session.wire is not Wire.V2F16 or dispatch.fits_f16(request) else Wire.V2
        encoded = dispatch.encode_request(request, wire)
        size = dispatch.reply_bytes(wire, n_embd, n_rows, n_pairs)
        waiting = _Pending(size, self._loop.create_future())
        session.stats.in_flight += n_pairs
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                if session.broken:
                    raise ConnectionResetError("the session is closed")
                session.pending.append(waiting)
                session.writer.write(encoded)
                await session.writer.drain()
                reply = await waiting.reply
        finally:
            session.stats.in_flight -= n_pairs
        partial = _weighted(request, dispatch.decode_reply(wire, reply, n_embd), wire)
        if not np.isfinite(partial).all() and np.isfinite(request.rows).all():
            raise ValueError("the worker answered with values that are not finite")
        self._acknowledge(session.stats, n_embd, n_rows, n_pairs, (time.monotonic() - started) * 1e3)
        out = torch.zeros(batch, n_embd)
        out[distinct] = torch.from_numpy(partial)
        return out

    def _acknowledge(self, stats: SessionStats, n_embd: int, n_rows: int, n_pairs: int, elapsed_ms: float) -> None:
        stats.requests += 1
        stats.rows += n_rows
        stats.pairs += n_pairs
        stats.paid_bytes += dispatch.paid_bytes(n_embd, n_rows, n_pairs)
        stats.rtt_ms = elapsed_ms if stats.rtt_ms is None else 0.8 * stats.rtt_ms + 0.2 * elapsed_ms

    def _drop(self, session: Session, why: str) -> None:
        if session.broken:
            return
        session.broken = True
        name = session.preamble.session
        if self._live.get(name) is session:
            del self._live[name]
            session.stats.connected = False
        log.info("session %s ends: %s", name, why)
        with contextlib.suppress(OSError):
            session.writer.close()
        while session.pending:
            waiting = session.pending.popleft()
            if not waiting.reply.done():
                waiting.reply.set_exception(ConnectionResetError(why))


async def _receive(session: Session) -> None:
    """Hand each reply to the request it answers. Replies come in the order of requests: the wire has no ids.

    Raises:
        ValueError: the worker sent bytes that nobody asked for.
        EOFError: the stream ended in the middle of a reply.
    """
    while data := await session.reader.read(_READ_BYTES):
        while data:
            if not session.pending:
                raise ValueError("the worker sent bytes that nobody asked for")
            waiting = session.pending[0]
            missing = waiting.size - len(data)
            body = data[: waiting.size] if missing <= 0 else data + await session.reader.readexactly(missing)
            session.pending.popleft()
            if not waiting.reply.done():
                waiting.reply.set_result(body)
            data = data[waiting.size :]


def _fits(pairs: _Pairs, wire: Wire) -> bool:
    """Whether one request of this wire can carry the pairs (v1 repeats a row for each of its pairs)."""
    if wire is Wire.V1:
        return len(pairs) <= dispatch.MAX_TOKENS
    return len(pairs) <= dispatch.MAX_PAIRS and int(pairs.rows[-1] - pairs.rows[0]) < dispatch.MAX_ROWS


def _weighted(request: dispatch.Request, reply: np.ndarray[Any, Any], wire: Wire) -> np.ndarray[Any, Any]:
    """The (rows, D) weighted sums of a reply. v1 carries raw outputs, one a pair; the router weighs them itself."""
    if wire is not Wire.V1:
        return np.ascontiguousarray(reply, dtype=np.float32)
    out = np.zeros_like(request.rows)
    assert request.weights is not None  # noqa: S101 - set by _send for every wire
    for pair, row in enumerate(request.row_idx):
        out[row] += request.weights[pair] * reply[pair]
    return out
