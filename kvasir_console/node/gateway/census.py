"""The expert market: who holds what, what was promised to whom, and which window is wanted most.

Pure state: no clock and no socket, every method takes ``now`` in seconds. Rules of the public contract (node contract
section 2, gateway contract 5.1 and 5.2), with its defects mended: everything belongs to the wallet of the caller's
token and is keyed by (wallet, worker id), and a reported window counts as a replica only if it answers a promise or
has done acknowledged work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir_console.errors import LedgerError, NetworkError
from kvasir_console.node.gateway.coverage import Reached, Report, Window
from kvasir_console.relay.wire.preamble import Wire

STALE_S = 120.0
PROMISE_S = 120.0
MAX_WORKERS = 4096
MAX_WORKERS_PER_WALLET = 256
MAX_PROMISES_PER_WALLET = 8
SHARD_EXPERTS = 64
"""Most experts of one shard, so the widest window worth assigning."""


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A mixture-of-experts model whose experts are wanted."""

    model: str
    n_layer: int
    n_embd: int
    n_expert: int
    moe_layers: tuple[int, ...]
    digest: bytes
    """SHA-256 of the canonical header (design section 5)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of experts of one layer that equally many replicas hold."""

    begin: int
    end: int
    replicas: int
    target: int

    @property
    def scarcity(self) -> float:
        """How much is missing: 0 (enough) to 1 (nobody), to three decimals."""
        return round(max(0, self.target - self.replicas) / self.target, 3) if self.target else 0.0


@dataclass(frozen=True, slots=True)
class Assignment:
    window: Window
    segment: Segment
    model: OfferedModel


@dataclass(frozen=True, slots=True)
class Worker:
    wallet: str
    worker_id: str
    session: str
    model: str
    windows: tuple[Window, ...]
    counted: frozenset[Window]
    """Windows that count as replicas: they answered a promise, or have served."""
    wires: Wire
    platform: Mapping[str, str] = field(default_factory=dict)
    claimed_at: float = 0.0
    last_at: float = 0.0
    stands_by: bool = False
    """It has what its wallet stands by for in the model's ring."""
    direct: Reached | None = None
    direct_live: bool = False


class Census:
    """The market's state. Models are set once by ``offer``; reports come and go stale."""

    def __init__(self, target_replicas: int = 2) -> None:
        self.target_replicas = target_replicas
        self._models: dict[str, OfferedModel] = {}
        self._workers: dict[tuple[str, str], Worker] = {}
        self._sessions: dict[str, tuple[str, str]] = {}
        self._promises: dict[tuple[str, Window], float] = {}
        self._stale: list[Worker] = []

    def offer(self, models: Iterable[OfferedModel]) -> None:
        """Say which models want experts from now on."""
        self._models = {model.model: model for model in sorted(models, key=lambda each: each.model)}

    @property
    def models(self) -> Mapping[str, OfferedModel]:
        return self._models

    def expire(self, now: float) -> None:
        """Drop stale workers with their sessions, and promises nobody answered."""
        gone = [worker for worker in self._workers.values() if now - worker.last_at > STALE_S]
        for worker in gone:
            del self._workers[worker.wallet, worker.worker_id]
            self._sessions.pop(worker.session, None)
        self._stale += gone
        self._promises = {key: at for key, at in self._promises.items() if now - at <= PROMISE_S}

    def take_stale(self, now: float) -> tuple[Worker, ...]:
        """The workers that went stale since this was last asked and have not come back."""
        self.expire(now)
        gone, self._stale = self._stale, []
        return tuple(worker for worker in gone if worker.session not in self._sessions)

    def workers(self, now: float, wallet: str | None = None) -> tuple[Worker, ...]:
        self.expire(now)
        found = (worker for worker in self._workers.values() if wallet in (None, worker.wallet))
        return tuple(sorted(found, key=lambda worker: (worker.wallet, worker.worker_id)))

    def worker(self, wallet: str, worker_id: str, now: float) -> Worker | None:
        self.expire(now)
        return self._workers.get((wallet, worker_id))

    def session(self, name: str, now: float) -> Worker | None:
        """Who registered a session name, while that registration lives."""
        self.expire(now)
        key = self._sessions.get(name)
        return None if key is None else self._workers[key]

    def segments(self, now: float) -> dict[tuple[str, int], tuple[Segment, ...]]:
        """For each (model, layer) that wants experts: how often each is held or promised, as runs of equal count."""
        self.expire(now)
        held: dict[tuple[str, int], list[Window]] = defaultdict(list)
        for window in (
            *(w for worker in self._workers.values() for w in worker.counted),
            *(w for _, w in self._promises),
        ):
            held[window.model, window.layer].append(window)
        return {
            (model.model, layer): count_segments(model.n_expert, held[model.model, layer], self.target_replicas)
            for model in self._models.values()
            for layer in model.moe_layers
        }

    def demand(self, now: float, model: str | None = None) -> dict[str, Any]:
        """The answer of ``/api/expert-demand``."""
        wanted = [each for each in self._models.values() if model in (None, each.model)]
        segments = self.segments(now)
        return {
            "target_replicas": self.target_replicas,
            "recruiting": True,
            "models": [
                {
                    "model": each.model,
                    "n_layer": each.n_layer,
                    "n_expert": each.n_expert,
                    "target_replicas": self.target_replicas,
                    "recruiting": True,
                    "layers": [
                        {
                            "layer": layer,
                            "segments": [
                                {
                                    "experts": [segment.begin, segment.end],
                                    "replicas": segment.replicas,
                                    "target": segment.target,
                                    "scarcity": segment.scarcity,
                                }
                                for segment in segments[each.model, layer]
                            ],
                        }
                        for layer in each.moe_layers
                    ],
                }
                for each in wanted
            ],
        }

    def volunteer(self, wallet: str, now: float, model: str | None = None, max_experts: int = 0) -> Assignment | str:
        """Promise ``wallet`` the window that is wanted most, or say why there is none.

        The highest scarcity wins, then the widest run, then the first layer; the window is cut from the run's start.
        What the wallet holds or was promised already comes last: two replicas on one machine are worth little more
        than one.
        """
        segments = self.segments(now)
        if model is not None and model not in self._models:
            return f"No model named {model} wants experts here."
        if sum(1 for owner, _ in self._promises if owner == wallet) >= MAX_PROMISES_PER_WALLET:
            return f"This wallet has {MAX_PROMISES_PER_WALLET} windows promised that it has not reported yet."
        mine = [window for owner, window in self._promises if owner == wallet]
        mine += [window for worker in self._workers.values() if worker.wallet == wallet for window in worker.windows]
        best: tuple[tuple[bool, float, int], Assignment] | None = None
        for (name, layer), runs in segments.items():
            if model not in (None, name):
                continue
            own = [window for window in mine if window.model == name and window.layer == layer]
            for segment in (segment for segment in runs if segment.scarcity > 0):
                apart = _outside(segment.begin, segment.end, own)
                for begin, end in apart or [(segment.begin, segment.end)]:
                    rank = (bool(apart), segment.scarcity, end - begin)
                    if best is None or rank > best[0]:
                        width = min(end - begin, max_experts or SHARD_EXPERTS, SHARD_EXPERTS)
                        window = Window(name, layer, begin, begin + width)
                        best = (rank, Assignment(window, segment, self._models[name]))
        if best is None:
            return "Every expert has the replicas it needs."
        self._promises[wallet, best[1].window] = now
        return best[1]

    def report(self, wallet: str, report: Report, now: float) -> Worker:
        """Take in a coverage post.

        Raises:
            LedgerError: ``relay_session_taken``: the session name is another worker's.
            NetworkError: ``census_full``.
        """
        self.expire(now)
        key = (wallet, report.worker_id)
        owner = self._sessions.get(report.session)
        if owner not in (None, key):
            raise LedgerError(
                "relay_session_taken",
                f"The session name {report.session} is registered by another worker.",
                "Choose another worker id, or another session name in url.",
            )
        known = self._workers.get(key)
        if known is None:
            mine = sum(1 for each, _ in self._workers if each == wallet)
            if len(self._workers) >= MAX_WORKERS or mine >= MAX_WORKERS_PER_WALLET:
                raise NetworkError(
                    "census_full", "The census has no room for another worker.", "Try again in a few minutes."
                )
        elif known.session != report.session:
            self._sessions.pop(known.session, None)
        counted = set() if known is None else set(known.counted & frozenset(report.windows))
        for window in report.windows:
            promise = next((key for key in self._promises if key[0] == wallet and window.within(key[1])), None)
            if promise is not None:
                del self._promises[promise]
                counted.add(window)
        worker = Worker(
            wallet=wallet,
            worker_id=report.worker_id,
            session=report.session,
            model=report.model,
            windows=report.windows,
            counted=frozenset(counted),
            wires=report.wires,
            platform=report.platform,
            claimed_at=now if known is None or known.session != report.session else known.claimed_at,
            last_at=now,
            stands_by=report.stands_by,
            direct=report.direct,
            direct_live=report.direct_live,
        )
        self._workers[key] = worker
        self._sessions[report.session] = key
        return worker

    def served(self, session: str, wallet: str, layer: int, begin: int, end: int) -> None:
        """A session did acknowledged work for a window: it is a replica from now on, promise or not."""
        key = self._sessions.get(session)
        if key is None or key[0] != wallet:
            return
        worker = self._workers[key]
        window = Window(worker.model, layer, begin, end)
        if window in worker.windows and window not in worker.counted:
            self._workers[key] = replace(worker, counted=worker.counted | {window})

    def wired(self, worker: Worker) -> bool:
        """Whether a relay of this worker has something to connect to: its first window is of a model served here."""
        return bool(worker.windows) and self.fits(worker.windows[0])

    def fits(self, window: Window) -> bool:
        model = self._models.get(window.model)
        return model is not None and window.layer in model.moe_layers and window.end <= model.n_expert


def count_segments(n_expert: int, windows: Iterable[Window], target: int) -> tuple[Segment, ...]:
    """Runs of equal replica count that together are exactly [0, n_expert)."""
    steps: Counter[int] = Counter()
    for window in windows:
        begin, end = max(0, window.begin), min(n_expert, window.end)
        if begin < end:
            steps[begin] += 1
            steps[end] -= 1
    segments: list[Segment] = []
    replicas = begin = 0
    for edge in [*sorted(edge for edge, step in steps.items() if step), n_expert]:
        if edge > begin:
            segments.append(Segment(begin, edge, replicas, target))
            begin = edge
        replicas += steps[edge]
    return tuple(segments)


def _outside(begin: int, end: int, windows: Sequence[Window]) -> list[tuple[int, int]]:
    """The parts of [begin, end) that no window covers."""
    parts = [(begin, end)]
    for window in windows:
        parts = [
            piece
            for left, right in parts
            for piece in ((left, min(right, window.begin)), (max(left, window.end), right))
            if piece[0] < piece[1]
        ]
    return parts
