"""The expert market: who holds what, what was promised to whom, and which window is wanted most.

Pure state: no clock and no socket, every method takes ``now`` in seconds. Rules of the public contract (node contract
section 2, gateway contract 5.1 and 5.2), with its defects mended: everything belongs to the wallet of the caller's
token and is keyed by (wallet, worker id), and a reported window counts as a replica only if it answers a promise or
has done acknowledged work.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir_console.errors import LedgerError, NetworkError, UsageError
from kvasir_console.relay.wire.preamble import Wire

STALE_S = 120.0
PROMISE_S = 120.0
MAX_WORKERS = 4096
MAX_WORKERS_PER_WALLET = 256
MAX_PROMISES_PER_WALLET = 8
MAX_SEGMENTS = 256
MAX_SESSION_LENGTH = 128
MAX_WORKER_ID_LENGTH = 200
SHARD_EXPERTS = 64
"""Most experts of one shard, so the widest window worth assigning."""

RESERVED_PREFIXES = ("ring-", "bridge-", "operator-", "service-", "kvasir-")
PLATFORM_KEYS = ("os", "device_kind", "accelerator", "backend")
_OS = frozenset({"macos", "ios", "android", "windows", "linux"})
_ACCELERATORS = frozenset({"cpu", "gpu", "npu"})
_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]+")


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


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """Experts [begin, end) of one layer of a model."""

    model: str
    layer: int
    begin: int
    end: int

    def within(self, other: Window) -> bool:
        return (
            self.model == other.model
            and self.layer == other.layer
            and other.begin <= self.begin
            and self.end <= other.end
        )


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
class Report:
    """One coverage post, checked."""

    worker_id: str
    model: str
    windows: tuple[Window, ...]
    session: str
    wires: Wire
    platform: Mapping[str, str]


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


def parse_report(body: Mapping[str, Any], *, service: bool = False) -> Report:
    """Read a coverage post (gateway contract 1.6).

    A segment is an array of three integers; other things among the segments are dropped in silence, as the public
    bridge does, and so are ranges that no layer can have.

    Raises:
        UsageError: ``missing_field``, or ``bad_relay_session`` for a session name that is malformed or reserved.
    """
    worker_id, model = body.get("worker_id"), body.get("model")
    if not isinstance(worker_id, str) or not _PRINTABLE.fullmatch(worker_id) or len(worker_id) > MAX_WORKER_ID_LENGTH:
        raise UsageError("missing_field", "worker_id is needed: 1 to 200 printable characters.")
    if not isinstance(model, str) or not _PRINTABLE.fullmatch(model) or len(model) > MAX_WORKER_ID_LENGTH:
        raise UsageError("missing_field", "model is needed.")
    model = short_model_name(model)
    segments = body.get("segments")
    windows = [
        window
        for segment in (segments if isinstance(segments, list) else ())
        if (window := _window(model, segment)) is not None
    ]
    wires = body.get("wires")
    return Report(
        worker_id=worker_id,
        model=model,
        windows=tuple(dict.fromkeys(windows[:MAX_SEGMENTS])),
        session=session_name(worker_id, body.get("url"), service=service),
        wires=_wires(wires) if isinstance(wires, list) else Wire.V2,
        platform=_platform(body),
    )


def session_name(worker_id: str, url: object = None, *, service: bool = False) -> str:
    """The relay session a worker dials: the one ``url`` names as ``relay:<session>``, else ``expert-<worker id>``.

    Raises:
        UsageError: ``bad_relay_session``.
    """
    if isinstance(url, str) and url.startswith("relay:"):
        name = url.removeprefix("relay:")
        if not _SESSION.fullmatch(name):
            raise UsageError(
                "bad_relay_session",
                "A session name has 1 to 128 letters, digits, dots, dashes, underscores; a letter or digit first.",
            )
    else:
        name = "expert-" + re.sub(r"[^A-Za-z0-9._-]", "-", worker_id)
        if len(name) > MAX_SESSION_LENGTH:
            name = f"{name[: MAX_SESSION_LENGTH - 9]}-{hashlib.sha256(worker_id.encode()).hexdigest()[:8]}"
    if not service and name.lower().startswith(RESERVED_PREFIXES):
        raise UsageError("bad_relay_session", f"Session names that begin like {name[:16]} are the operator's.")
    return name


def short_model_name(model: str) -> str:
    """The last path component, as the public bridge reads a model's name."""
    return model.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _window(model: str, segment: object) -> Window | None:
    if not isinstance(segment, list) or len(segment) != 3:
        return None
    layer, begin, end = (_whole(number) for number in segment)
    if layer is None or begin is None or end is None or begin >= end:
        return None
    return Window(model, layer, begin, end)


def _whole(number: object) -> int | None:
    """A whole number in [0, 2**31), also when JSON wrote it as ``3.0``."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < 2**31:
        return None
    return int(number) if number == int(number) else None


def _wires(names: Sequence[object]) -> Wire:
    known = {"v1": Wire.V1, "v2": Wire.V2, "v2f16": Wire.V2F16}
    found = Wire(0)
    for name in names[:16]:
        if isinstance(name, str):
            found |= known.get(name, Wire(0))
    return found or Wire.V2


def _platform(body: Mapping[str, Any]) -> dict[str, str]:
    """Self-declared facts about the machine, bounded; they are shown, never believed."""
    texts = {key: value[:64] for key in PLATFORM_KEYS if isinstance(value := body.get(key), str)}
    return {
        "os": texts.get("os", "") if texts.get("os") in _OS else "unknown",
        "device_kind": texts.get("device_kind", ""),
        "accelerator": texts.get("accelerator", "") if texts.get("accelerator") in _ACCELERATORS else "cpu",
        "backend": texts.get("backend", ""),
    }
