"""What a node holds: experts of one layer, or a window of layers; how each is fetched, loaded and offered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from kvasir_console.engine.process.client import EngineClient
from kvasir_console.errors import KvasirError, NetworkError, SystemResourceError
from kvasir_console.node.hubpin import HubPin
from kvasir_console.node.market import Assignment
from kvasir_console.node.placement.plan import Plan, PlannedStage, verify_plan
from kvasir_console.node.shards import fetch_expert_shard, fetch_stage
from kvasir_console.node.snapshot import SliceView
from kvasir_console.relay.uplink import STAR_EDGE, expert_url, ring_url
from kvasir_console.relay.wire.preamble import WIRE_NAMES, Kind, Preamble, wires_named

Progress = Callable[[int, int | None], None]
DRAIN_S = 1.5
"""How long trunks are waited for when a node gives up its experts."""


@dataclass(frozen=True, slots=True)
class RelaySession:
    """One session to dial: its name, the relay's URL (no token in it), and what the engine is told."""

    name: str
    url: str
    preamble: Preamble


class Holding(Protocol):
    @property
    def fetched(self) -> tuple[Path, ...]:
        """The verified files, once they were fetched."""
        ...

    def describe(self) -> str: ...
    def view(self) -> SliceView: ...
    async def fetch(
        self, client: httpx.AsyncClient, token: str, directory: Path, budget_bytes: int, progress: Progress
    ) -> None: ...
    async def load(self, client: EngineClient, progress: Progress) -> None: ...
    def coverage(self) -> dict[str, Any]: ...
    def account(self) -> str:
        """The worker that the gateway counts this work for."""
        ...

    def sessions(self, gateway: str) -> list[RelaySession]: ...


def session_name(worker_id: str) -> str:
    """The relay session of a worker (contract section 5.1)."""
    return f"expert-{worker_id}"


@dataclass(slots=True)
class ExpertHolding:
    """Experts [begin, end) of one MoE layer, assigned by the market; on dispatch v3 of further layers too."""

    assignment: Assignment
    worker_id: str
    wallet: str
    file: Path | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[Assignment, ...] = ()
    """Of the same model, each of another layer. Those that do not fit are given up when they are fetched."""
    files: tuple[Path, ...] = ()
    """Of ``more``."""

    @property
    def fetched(self) -> tuple[Path, ...]:
        return () if self.file is None else (self.file, *self.files)

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        return (self.assignment, *self.more)

    def describe(self) -> str:
        a = self.assignment
        first = f"experts {a.begin} to {a.end - 1} of layer {a.layer}"
        others = "".join(f", {each.begin} to {each.end - 1} of layer {each.layer}" for each in self.more)
        return f"{first}{others} of {a.model}"

    def view(self) -> SliceView:
        a = self.assignment
        return SliceView(
            kind="experts",
            model=a.model,
            layer=a.layer,
            begin=a.begin,
            end=a.end,
            total=a.n_expert,
            tensor_bytes=self.info.get("tensor_bytes"),
            model_digest=str(self.info.get("model_digest", "")),
        )

    async def fetch(
        self, client: httpx.AsyncClient, token: str, directory: Path, budget_bytes: int, progress: Progress
    ) -> None:
        fetched: list[tuple[Assignment, Path]] = []
        for each in self.assignments:
            try:
                file = await fetch_expert_shard(
                    client, token, directory, each, budget_bytes=budget_bytes, progress=progress
                )
            except SystemResourceError:
                if not fetched:
                    raise
                break  # what was fetched is enough to serve
            budget_bytes -= file.stat().st_size
            fetched.append((each, file))
        (_, self.file), *others = fetched
        self.more, self.files = tuple(each for each, _ in others), tuple(file for _, file in others)

    async def load(self, client: EngineClient, progress: Progress) -> None:
        a = self.assignment
        files = (self.file, *self.files)
        slices = [
            {"path": str(file), "layer": each.layer, "experts": [each.begin, each.end]}
            for each, file in zip(self.assignments, files, strict=True)
        ]
        # One slice is named as it always was.
        fields = slices[0] if len(slices) == 1 else {"slices": slices}
        self.info = await client.load(progress, model=a.model, role="experts", **fields)
        if self.info["n_embd"] != a.n_embd:
            raise NetworkError(
                "assignment_mismatch",
                f"The market said n_embd {a.n_embd}, the shard has {self.info['n_embd']}.",
                "The node asks for another slice.",
            )

    async def drain(self, client: EngineClient) -> None:
        """Let trunks have the answers they wait for, and go elsewhere with the next question, as far as that goes."""
        with contextlib.suppress(KvasirError, OSError):  # a timeout is one too
            async with asyncio.timeout(DRAIN_S + 0.5):
                await client.call("drain", timeout_s=DRAIN_S)

    def coverage(self) -> dict[str, Any]:
        a = self.assignment
        return {
            "model": a.model,
            "segments": [[each.layer, each.begin, each.end] for each in self.assignments],
            "n_layer": a.n_layer,
            "n_expert": a.n_expert,
            "url": f"relay:{session_name(self.worker_id)}",
            "wires": list(WIRE_NAMES),
        }

    def account(self) -> str:
        return self.worker_id

    def sessions(self, gateway: str) -> list[RelaySession]:
        a = self.assignment
        name = session_name(self.worker_id)
        preamble = Preamble(
            kind=Kind.EXPERTS,
            session=name,
            wallet=self.wallet,
            model_digest=bytes.fromhex(str(self.info["model_digest"])),
            layer=a.layer,
            begin=a.begin,
            end=a.end,
            wires=wires_named(WIRE_NAMES),
            more=tuple((each.layer, each.begin, each.end) for each in self.more),
        )
        return [RelaySession(name, expert_url(gateway, name), preamble)]


@dataclass(slots=True)
class RingHolding:
    """The window a signed plan gives this wallet."""

    plan: Plan
    wallet: str
    context_length: int
    kv_budget_bytes: int = 0
    evidence: Path | None = None
    """Where wrong answers of the stage's workers are kept; the engine's own place if not said."""
    file: Path | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fetched(self) -> tuple[Path, ...]:
        return () if self.file is None else (self.file,)

    @property
    def stage(self) -> PlannedStage:
        stage = self.plan.stage_of(self.wallet)
        if stage is None:
            raise NetworkError("not_in_plan", f"The plan of {self.plan.model} does not name this wallet.")
        return stage

    def describe(self) -> str:
        stage = self.stage
        return f"layers {stage.begin} to {stage.end - 1} of {self.plan.model}"

    def view(self) -> SliceView:
        stage = self.stage
        return SliceView(
            kind="layers",
            model=self.plan.model,
            layer=None,
            begin=stage.begin,
            end=stage.end,
            total=self.plan.n_layer,
            tensor_bytes=self.info.get("tensor_bytes"),
            model_digest=self.plan.model_digest,
        )

    async def fetch(
        self, client: httpx.AsyncClient, token: str, directory: Path, budget_bytes: int, progress: Progress
    ) -> None:
        stage = self.stage
        self.file = await fetch_stage(
            client,
            token,
            directory,
            model=self.plan.model,
            model_digest=self.plan.model_digest,
            begin=stage.begin,
            end=stage.end,
            budget_bytes=budget_bytes,
            progress=progress,
        )

    async def load(self, client: EngineClient, progress: Progress) -> None:
        stage = self.stage
        self.info = await client.load(
            progress,
            path=str(self.file),
            model=self.plan.model,
            role="stage",
            layers=[stage.begin, stage.end],
            context_length=self.context_length,
            kv_budget_bytes=self.kv_budget_bytes,
            ring=ring_fields(self.plan, stage),
            **({} if self.evidence is None else {"evidence_directory": str(self.evidence)}),
        )

    async def replan(self, client: EngineClient, plan: Plan) -> None:
        """Take a newer plan in which the window ``stays``. Raises ``EngineError``."""
        await client.call("replan", ring=ring_fields(plan, self.stage))
        self.plan = plan

    def stays(self, plan: Plan) -> bool:
        """Whether a newer plan leaves this window where it is."""
        same = (plan.ring, plan.model_digest, len(plan.stages)) == (
            self.plan.ring,
            self.plan.model_digest,
            len(self.plan.stages),
        )
        stage = plan.stage_of(self.wallet)
        moved = stage is None or stage.window != self.stage.window
        return same and not moved and plan.generation > self.plan.generation

    def coverage(self) -> dict[str, Any]:
        return {"model": self.plan.model, "segments": [], "n_layer": self.plan.n_layer}

    def account(self) -> str:
        return f"ring-{self.plan.ring}-{self.stage.rank}"

    def sessions(self, gateway: str) -> list[RelaySession]:
        rank, size = self.stage.rank, len(self.plan.stages)
        edges = [(Kind.RING_NEXT, str(rank), "P"), (Kind.RING_PREV, str((rank - 1) % size), "N")]
        if rank == 0:
            edges.append((Kind.ENTRY, "entry", "N"))
        return [self._session(gateway, kind, edge, role) for kind, edge, role in edges]

    @property
    def routes(self) -> bool:
        """Whether the window has layers whose experts others may compute."""
        return any(self.stage.begin <= layer < self.stage.end for layer in self.info.get("moe_layers", ()))

    def waiting_session(self, gateway: str, slot: int) -> RelaySession:
        """The session number ``slot`` of those that wait for workers."""
        return self._session(gateway, Kind.ROUTER, f"{STAR_EDGE}{slot}", "P")

    def _session(self, gateway: str, kind: Kind, edge: str, role: str) -> RelaySession:
        name = f"{self.plan.ring}/{edge}/{role}"
        preamble = Preamble(
            kind=kind,
            session=name,
            wallet=self.wallet,
            model_digest=bytes.fromhex(self.plan.model_digest),
            begin=self.stage.begin,
            end=self.stage.end,
            epoch=self.plan.generation,
        )
        return RelaySession(name, ring_url(gateway, self.plan.ring, edge, role), preamble)


def ring_fields(plan: Plan, stage: PlannedStage) -> dict[str, Any]:
    """What an engine is told of its place in a ring."""
    return {
        "id": plan.ring,
        "epoch": plan.generation,
        "rank": stage.rank,
        "size": len(plan.stages),
        "n_layer": plan.n_layer,
    }


def choose_plan(signed: Iterable[Mapping[str, Any]], hub_key: str, wallet: str, pin: Path) -> Plan | None:
    """The first plan that gives ``wallet`` a window, out of ``verified_plans``."""
    plans = verified_plans(signed, hub_key, pin)
    return next((plan for plan in plans if plan.stage_of(wallet) is not None), None)


def verified_plans(signed: Iterable[Mapping[str, Any]], hub_key: str, pin: Path) -> list[Plan]:
    """Plans, verified with the hub key pinned on first sight in the file ``pin``.

    Raises:
        NetworkError: the gateway announces another hub key than the pinned one, or a plan's signature is wrong.
        SystemResourceError: the pin cannot be read or written.
    """
    offered = list(signed)
    if not offered or not hub_key:
        return []
    known = HubPin(pin)
    known.follow(hub_key, ())
    plans = [verify_plan(plan, hub_key) for plan in offered]
    known.keep(hub_key)
    return plans
