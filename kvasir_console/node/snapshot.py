"""What a node looks like at one moment: a frozen value that screens draw and the admin socket sends.

A value that is not known is ``None`` and is drawn as "N/A": never a false zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvasir_console.node.phase import Phase, PhaseState


@dataclass(frozen=True, slots=True)
class SliceView:
    """What this node holds. ``kind`` is ``experts`` (of ``layer``, ids [begin, end)) or ``layers`` [begin, end)."""

    kind: str
    model: str
    layer: int | None
    begin: int
    end: int
    total: int
    """Experts of the layer, or layers of the model."""
    tensor_bytes: int | None = None
    model_digest: str = ""


@dataclass(frozen=True, slots=True)
class RelayView:
    """One outbound session. ``state`` is ``closed``, ``dialling``, ``open``, ``waiting`` (for ``retry_in_s``), or
    ``direct``: a ring's edge that goes past the relay, which is *aside* just before and after.

    ``since_s`` is Unix time.
    """

    session: str
    state: str
    since_s: float
    rtt_ms: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    retry_in_s: float | None = None
    last_close: str = ""
    """Close code and its meaning, with the next action."""

    @property
    def carries(self) -> bool:
        """Whether the session's bytes have a way now."""
        return self.state in ("open", "direct")


@dataclass(frozen=True, slots=True)
class WorkView:
    """Work since the engine started, and the rate over the last ten seconds."""

    requests: int = 0
    rows: int = 0
    pairs: int = 0
    tokens: int = 0
    rows_per_s: float = 0.0
    tokens_per_s: float = 0.0
    history: tuple[float, ...] = ()
    """Rows (experts) or tokens (layers) per second, one value a second, newest last, at most 240."""
    expert_pairs: tuple[int, ...] = ()
    """How often each held expert was chosen since the engine loaded it; the first is ``held.begin``."""


@dataclass(frozen=True, slots=True)
class EarningsView:
    """Money as the gateway states it: micro-units and micro-KVR (10^-6). ``None`` before the first answer."""

    micro_units: int | None = None
    credited_micro_kvr: int | None = None
    carried_micro_kvr: str | None = None
    """Exact fraction of a micro-KVR, ``num/den``."""
    pending_micro_kvr: int | None = None
    paid_micro_kvr: int | None = None
    wallet_micro_kvr: int | None = None
    """Balance on chain."""
    minimum_claim_micro_kvr: int | None = None
    claim_state: str = ""
    last_signature: str = ""


@dataclass(frozen=True, slots=True)
class StatementView:
    """What this node counted beside what its hub states, cumulative. ``None`` before the first statement."""

    worker: str = ""
    sequence: int | None = None
    """Of the latest statement that was verified."""
    acknowledged: int = 0
    """The latest one this node signed for."""
    refused: str = ""
    """Why the latest answer was not taken, or the latest statement not acknowledged."""
    mine_bytes_up: int = 0
    mine_bytes_down: int = 0
    mine_rows: int = 0
    mine_pairs: int = 0
    stated_bytes_up: int | None = None
    stated_bytes_down: int | None = None
    stated_rows: int | None = None
    stated_pairs: int | None = None
    lost_bytes_up: int = 0
    """Sent on connections that broke before the hub had it; in none of the figures above."""
    disputed_bytes: int = 0
    """By which the hub claimed more for a connection than this node counted."""


@dataclass(frozen=True, slots=True)
class DownloadView:
    what: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class MachineView:
    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    engine_rss_bytes: int | None = None
    accelerator: str = "cpu"


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    at_s: float
    version: str
    pid: int
    engine_pid: int | None
    name: str
    worker_id: str
    wallet: str
    wallet_locked: bool
    gateway: str
    state: PhaseState
    held: SliceView | None = None
    relays: tuple[RelayView, ...] = ()
    work: WorkView = WorkView()
    earnings: EarningsView = EarningsView()
    statements: StatementView = StatementView()
    download: DownloadView | None = None
    machine: MachineView = MachineView()
    log: tuple[str, ...] = ()
    """Newest last, at most 200 lines."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodeSnapshot:
        """The inverse of ``to_json``. Raises ``TypeError``, ``KeyError`` or ``ValueError`` for another shape."""
        fields = dict(data)
        state = dict(fields["state"])
        fields["state"] = PhaseState(**{**state, "phase": Phase(state["phase"])})
        fields["held"] = None if fields["held"] is None else SliceView(**fields["held"])
        fields["relays"] = tuple(RelayView(**relay) for relay in fields["relays"])
        work = fields["work"]
        pairs = tuple(work.get("expert_pairs", ()))
        fields["work"] = WorkView(**{**work, "history": tuple(work["history"]), "expert_pairs": pairs})
        fields["earnings"] = EarningsView(**fields["earnings"])
        fields["statements"] = StatementView(**fields["statements"])
        fields["download"] = None if fields["download"] is None else DownloadView(**fields["download"])
        fields["machine"] = MachineView(**fields["machine"])
        fields["log"] = tuple(fields["log"])
        return cls(**fields)
