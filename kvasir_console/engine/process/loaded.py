"""What an engine process has loaded: a stage with its generator, or an expert bank with its server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from kvasir_console.engine.chat import ChatTemplate
from kvasir_console.engine.checkpoint.digest import model_digest, slice_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.choice import choose
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.forms import Forms
from kvasir_console.engine.kvcache import BLOCK_ROWS
from kvasir_console.engine.linear import Linear
from kvasir_console.engine.native import NativeLinear
from kvasir_console.engine.process.budget import budget_of
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.expert_server import ExpertServer
from kvasir_console.engine.process.generate import Generator
from kvasir_console.engine.process.groups import Groups
from kvasir_console.engine.process.local import LocalPipeline
from kvasir_console.engine.process.pipeline import MAX_RING_SEQUENCES, MAX_SEQUENCES, Pipeline
from kvasir_console.engine.process.ring import RingConfig, RingNode
from kvasir_console.engine.process.ring_pipeline import RingPipeline
from kvasir_console.engine.process.roster import Policy
from kvasir_console.engine.process.router import Router
from kvasir_console.engine.process.scheduler import MAX_QUEUE, Scheduler
from kvasir_console.engine.process.served import HeldBank
from kvasir_console.engine.process.worker import UNKNOWN_DIGEST, DigestOf, Slice
from kvasir_console.engine.stage import Stage
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.errors import EngineError, KvasirError, ModelError
from kvasir_console.paths import Paths
from kvasir_console.relay.wire.preamble import Wire
from kvasir_console.relay.wire.values import Dtype

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
Announce = Callable[[dict[str, Any]], None]
MAX_DIGESTS = 4096
"""Of slices that workers named, kept so that each is hashed once."""
MAX_SLICES = 64
"""Most banks of experts in one engine."""
CONTEXT_CAP = 8192
"""A request never takes more positions than this unless the owner's configuration says so."""


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Where and how this process computes; its owner's settings (``config.EngineConfig``)."""

    device: str = "cpu"
    kernels: str = "auto"
    kv_type: str = "f32"
    expert_device: str = ""
    """Where routed experts are held and computed; empty for ``device``."""
    threads: int = 0
    """That compute on the CPU; 0 for as many as torch has."""

    def check(self) -> None:
        """Raises ``EngineError`` (``no_such_device``) for a device that this machine does not have."""
        for device in filter(None, (self.device, self.expert_device)):
            try:
                torch.empty(1, device=device)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                raise EngineError(
                    "no_such_device",
                    f"Nothing can be computed on {device!r:.40}: {str(error).splitlines()[0]:.200}",
                    "Set engine.device and engine.expert_device to devices that torch has here, such as cpu.",
                ) from error

    def forms(self, device: str) -> Forms:
        """How matrices on a device are held. The first time on a machine this compiles for some seconds.

        Raises:
            EngineError: the kernels that the owner asked for cannot be had.
        """
        cache = Paths.from_environment().kernels
        return choose(self.kernels, device=device, cache=cache, threads=self.threads or torch.get_num_threads())


@dataclass(slots=True)
class Loaded:
    """The engine's one load. Fields that do not apply to its role are ``None``."""

    info: dict[str, Any]
    stage: Stage | None = None
    banks: tuple[ExpertBank, ...] = ()
    router: Router | None = None
    ring: RingNode | None = None
    generator: Generator | None = None
    experts: ExpertServer | None = None

    async def close(self) -> None:
        """Let go of requests, edges and the template's child process."""
        if self.ring is not None:
            self.ring.leave()
        if self.router is not None:
            self.router.close()
        if self.generator is not None:
            await self.generator.close()

    @property
    def compiled(self) -> bool:
        """Whether the compiled kernels multiply every matrix that is held."""
        held: list[Stage | ExpertBank] = [*self.banks, *([self.stage] if self.stage else [])]
        linears = [each.held for one in held for each in one.holdings if isinstance(each.held, Linear)]
        return all(linear.kind == NativeLinear.kind for linear in linears)

    @property
    def rows(self) -> int:
        """Token rows this engine has computed."""
        if self.ring is not None:
            return self.ring.window.rows
        return 0 if self.generator is None else self.generator.scheduler.rows

    @property
    def tensor_bytes(self) -> int:
        """Bytes of weights held now, each storage counted once."""
        held: list[Stage | ExpertBank] = [*self.banks, *([self.stage] if self.stage else [])]
        return sum(each.tensor_bytes for each in held)

    def activations(self) -> list[dict[str, Any]]:
        """How often each expert that is held here was chosen since the load, layer by layer.

        ``pairs`` were computed here, ``pairs_remote`` by sessions of this trunk; both count from ``begin``. Two numbers
        an expert are all that is ever kept.
        """
        remote = {} if self.router is None else self.router.pairs_remote
        banks = self.banks or ([] if self.stage is None else self.stage.banks.values())
        return [
            {
                "layer": bank.layer,
                "begin": bank.begin,
                "end": bank.end,
                "pairs": bank.pairs.tolist(),
                "pairs_remote": remote[bank.layer].tolist() if bank.layer in remote else [0] * len(bank.pairs),
            }
            for bank in banks
        ]


async def load(
    fields: dict[str, Any],
    compute: Compute,
    runtime: Path,
    options: ComputeOptions,
    progress: Progress,
    announce: Announce = lambda _: None,
) -> Loaded:
    """Carry out a ``load`` verb; ``announce`` takes events that answer no request.

    Raises ``ModelError`` for a bad file, ``EngineError`` for a bad request.
    """
    try:
        role = str(fields["role"])
        options.check()
        if role not in ("experts", "stage"):
            raise EngineError("unknown_role", f"An engine loads 'stage' or 'experts', not {role!r}.")
        threads = options.threads or torch.get_num_threads()
        await compute.run(lambda: torch.set_num_threads(threads))
        if role == "experts":
            loaded = await _load_experts(fields, compute, options)
        else:
            loaded = await _load_stage(Path(fields["path"]), fields, compute, runtime, options, progress, announce)
        if loaded.compiled:
            # After each of torch's operations its threads wait for the next one awake, on the processors that the
            # kernels' threads need; and what is left to torch is small.
            torch.set_num_threads(1)
            await compute.run(lambda: torch.set_num_threads(1))
        return loaded
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError("bad_load_request", f"The load request is incomplete or malformed: {error!r}.") from error


async def _load_experts(fields: dict[str, Any], compute: Compute, options: ComputeOptions) -> Loaded:
    """One bank, or with ``slices`` several: of any layers, ranges and models, each from a file of its own or not."""
    slices = [_Slice.of(each, fields) for each in fields.get("slices") or [fields]]
    if len(slices) > MAX_SLICES:
        raise EngineError("too_many_slices", f"{len(slices)} slices are asked for; an engine holds {MAX_SLICES}.")
    device = options.expert_device or options.device
    started = time.monotonic()

    def read() -> list[tuple[HeldBank, dict[str, Any]]]:
        forms = options.forms(device)
        return [_read_bank(each, forms, device) for each in slices]

    read_banks = await compute.run(read)
    held = [bank for bank, _ in read_banks]
    infos = [info for _, info in read_banks]
    totals = {key: sum(info[key] for info in infos) for key in ("tensor_bytes", "tensor_count")}
    info = infos[0] | totals | {"slices": infos, "layers": None, "load_s": time.monotonic() - started}
    return Loaded(info=info, banks=tuple(each.bank for each in held), experts=ExpertServer(held, compute))


@dataclass(frozen=True, slots=True)
class _Slice:
    """Experts [begin, end) of one layer of a file."""

    path: Path
    model: str
    layer: int
    begin: int
    end: int

    @classmethod
    def of(cls, fields: dict[str, Any], load: dict[str, Any]) -> _Slice:
        begin, end = fields["experts"]
        path = Path(fields["path"] if "path" in fields else load["path"])
        model = str(fields.get("model") or load.get("model") or path.stem)
        return cls(path, model, int(fields["layer"]), int(begin), int(end))


def _read_bank(part: _Slice, forms: Forms, device: str) -> tuple[HeldBank, dict[str, Any]]:
    with Checkpoint.open(part.path) as checkpoint:
        bank = ExpertBank.load(checkpoint, part.layer, part.begin, part.end, forms=forms, device=device)
        info = _common(checkpoint, {"model": part.model})
        digest = slice_digest(checkpoint, part.layer, part.begin, part.end)
    info |= {
        "n_embd": bank.n_embd,
        "n_ff": bank.n_ff,
        "layer": bank.layer,
        "experts": [bank.begin, bank.end],
        "tensor_bytes": bank.tensor_bytes,
        "tensor_count": 3,
        "shard_digest": digest.hex(),
    }
    return HeldBank(bank, bytes.fromhex(info["model_digest"]), digest), info


async def _load_stage(
    path: Path,
    fields: dict[str, Any],
    compute: Compute,
    runtime: Path,
    options: ComputeOptions,
    progress: Progress,
    announce: Announce,
) -> Loaded:
    begin, end = (int(layer) for layer in fields["layers"])
    started = time.monotonic()

    def read() -> tuple[Stage, dict[str, Any], Tokenizer | None, ChatTemplate | None]:
        with Checkpoint.open(path) as checkpoint:
            stage = Stage.load(
                checkpoint,
                begin,
                end,
                forms=options.forms(options.device),
                device=options.device,
                expert_forms=options.forms(options.expert_device) if options.expert_device else None,
                experts_device=options.expert_device or None,
                kv_type=options.kv_type,
                progress=progress,
            )
            tokenizer = template = None
            if stage.first:
                tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
                template = ChatTemplate.from_metadata(checkpoint.metadata, tokenizer)
            return stage, _common(checkpoint, fields) | _shape(stage.shape), tokenizer, template

    stage, info, tokenizer, template = await compute.run(read)
    wanted = int(fields.get("context_length") or 0) or CONTEXT_CAP
    context_length = min(stage.shape.context_length, wanted)
    info |= {
        "context_length": context_length,
        "layers": [stage.begin, stage.end],
        "layer": None,
        "experts": None,
        "tensor_bytes": stage.tensor_bytes,
        "tensor_count": len(stage.tensor_names),
        "load_s": time.monotonic() - started,
    }
    budget = budget_of(int(fields.get("kv_budget_bytes") or 0), options.device, int(fields.get("kv_sharers") or 1))
    info |= {
        "kv_budget_bytes": budget.total_bytes,
        "kv_tokens": budget.total_bytes // stage.cache_bytes(BLOCK_ROWS) * BLOCK_ROWS,
        "kv_type": options.kv_type,
    }
    loaded = Loaded(info=info, stage=stage)
    digest = bytes.fromhex(info["model_digest"])
    pipeline: Pipeline
    policy = Policy.parse(fields.get("dispatch_policy") or {})
    ring = fields.get("ring")
    if stage.banks or not ring:
        # Whoever holds a MoE layer owns its router, a ring's stage as much as a trunk.
        loaded.router = Router(
            stage,
            digest,
            wire=Wire[str(fields.get("dispatch_wire", "v3")).upper()],
            dtype=Dtype[str(fields.get("dispatch_dtype", "f32")).upper()],
            digest_of=_digests_of(path),
            timeout_s=float(fields.get("dispatch_timeout_s", 10.0)),
            policy=policy,
            # A ring's frames of one sequence may follow each other closely: they are computed one after the other.
            released=contextlib.nullcontext if ring else compute.released,
            evidence_directory=Path(fields.get("evidence_directory") or runtime / "evidence"),
            on_quarantine=lambda facts: announce({"event": "quarantined", **facts}),
        )
    if ring:
        loaded.ring = RingNode(RingConfig(**ring), stage, digest, compute, budget, loaded.router)
        info["kv_tokens"] = budget.total_bytes // loaded.ring.window.n_bytes(BLOCK_ROWS) * BLOCK_ROWS
        pipeline = RingPipeline(loaded.ring, stage, compute)
    elif stage.first and stage.last:
        pipeline = LocalPipeline(stage, compute, budget, loaded.router, Groups(policy.groups))
    else:
        raise ModelError(
            "window_without_ring",
            f"Layers [{begin}, {end}) of {stage.shape.n_layer} are part of a model, but no ring was named.",
            "A partial window serves as a stage of a ring; a trunk loads every layer.",
        )
    if tokenizer is not None and template is not None:
        scheduler = Scheduler(
            pipeline,
            max_queue=int(fields.get("max_queue", MAX_QUEUE)),
            max_running=MAX_RING_SEQUENCES if ring else MAX_SEQUENCES,
        )
        loaded.generator = Generator(
            scheduler, tokenizer, template, context_length=context_length, trace_directory=runtime
        )
    return loaded


def _digests_of(path: Path) -> DigestOf:
    """Shard digests of slices of the model at ``path``, each computed once, off the loop."""
    known: dict[Slice, bytes] = {}
    one_at_a_time = asyncio.Lock()

    def read(held: Slice) -> bytes:
        try:
            with Checkpoint.open(path) as checkpoint:
                return slice_digest(checkpoint, held.layer, held.begin, held.end)
        except (OSError, KvasirError) as error:
            log.warning("the digest of layer %d experts [%d, %d) is not known: %s", *astuple(held), error)
            return UNKNOWN_DIGEST

    async def digest_of(held: Slice) -> bytes:
        async with one_at_a_time:
            if held not in known:
                if len(known) >= MAX_DIGESTS:
                    known.clear()
                known[held] = await asyncio.to_thread(read, held)
            return known[held]

    return digest_of


def _common(checkpoint: Checkpoint, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architecture": checkpoint.architecture,
        "model": str(fields.get("model", checkpoint.path.stem)),
        "model_digest": model_digest(checkpoint).hex(),
        "source_bytes": checkpoint.file_bytes,
    }


def _shape(shape: ModelShape) -> dict[str, Any]:
    return {
        "n_layer": shape.n_layer,
        "n_embd": shape.n_embd,
        "n_ff": shape.n_ff_expert or shape.n_ff,
        "n_vocab": shape.n_vocab,
        "n_expert": shape.n_expert,
        "n_expert_used": shape.n_expert_used,
        "moe_layers": list(shape.moe_layers),
    }
