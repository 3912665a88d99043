"""What an engine process has loaded: a stage with its generator, or an expert bank with its server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.engine.chat import ChatTemplate
from kvasir_console.engine.checkpoint.digest import model_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.expert_server import ExpertServer
from kvasir_console.engine.process.generate import Generator
from kvasir_console.engine.process.pipeline import LocalPipeline
from kvasir_console.engine.process.ring import RingConfig, RingNode
from kvasir_console.engine.process.router import Router
from kvasir_console.engine.stage import Stage
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.errors import EngineError, ModelError
from kvasir_console.relay.wire.preamble import Wire

Progress = Callable[[int, int], None]
CONTEXT_CAP = 8192
"""A request never takes more positions than this unless the owner's configuration says so."""


@dataclass(slots=True)
class Loaded:
    """The engine's one load. Fields that do not apply to its role are ``None``."""

    info: dict[str, Any]
    stage: Stage | None = None
    bank: ExpertBank | None = None
    router: Router | None = None
    ring: RingNode | None = None
    generator: Generator | None = None
    experts: ExpertServer | None = None

    def close(self) -> None:
        """Let go of edges and of the template's child process."""
        if self.ring is not None:
            self.ring.close()
        if self.generator is not None:
            self.generator.close()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of weights held now, each storage counted once."""
        held = self.stage or self.bank
        return 0 if held is None else held.tensor_bytes


async def load(fields: dict[str, Any], compute: Compute, runtime: Path, device: str, progress: Progress) -> Loaded:
    """Carry out a ``load`` verb. Raises ``ModelError`` for a bad file, ``EngineError`` for a bad request."""
    try:
        path, role = Path(fields["path"]), str(fields["role"])
        if role == "experts":
            return await _load_experts(path, fields, compute, device)
        if role == "stage":
            return await _load_stage(path, fields, compute, runtime, device, progress)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError("bad_load_request", f"The load request is incomplete or malformed: {error!r}.") from error
    raise EngineError("unknown_role", f"An engine loads 'stage' or 'experts', not {role!r}.")


async def _load_experts(path: Path, fields: dict[str, Any], compute: Compute, device: str) -> Loaded:
    layer, (begin, end) = int(fields["layer"]), fields["experts"]
    started = time.monotonic()

    def read() -> tuple[ExpertBank, dict[str, Any]]:
        with Checkpoint.open(path) as checkpoint:
            bank = ExpertBank.load(checkpoint, layer, int(begin), int(end), device=device)
            return bank, _common(checkpoint, fields)

    bank, info = await compute.run(read)
    info |= {
        "n_embd": bank.n_embd,
        "n_ff": bank.n_ff,
        "layer": bank.layer,
        "experts": [bank.begin, bank.end],
        "layers": None,
        "tensor_bytes": bank.tensor_bytes,
        "tensor_count": 3,
        "load_s": time.monotonic() - started,
    }
    return Loaded(info=info, bank=bank, experts=ExpertServer(bank, compute))


async def _load_stage(
    path: Path, fields: dict[str, Any], compute: Compute, runtime: Path, device: str, progress: Progress
) -> Loaded:
    begin, end = (int(layer) for layer in fields["layers"])
    started = time.monotonic()

    def read() -> tuple[Stage, dict[str, Any], Tokenizer | None, ChatTemplate | None]:
        with Checkpoint.open(path) as checkpoint:
            stage = Stage.load(checkpoint, begin, end, device=device, progress=progress)
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
        "tensor_count": sum(1 for _ in stage.named_tensors()),
        "load_s": time.monotonic() - started,
    }
    loaded = Loaded(info=info, stage=stage)
    digest = bytes.fromhex(info["model_digest"])
    if ring := fields.get("ring"):
        loaded.ring = RingNode(RingConfig(**ring), stage, digest, compute)
        pipeline: Any = loaded.ring
    elif stage.first and stage.last:
        loaded.router = router = Router(
            stage,
            digest,
            wire=Wire[str(fields.get("dispatch_wire", "v2")).upper()],
            timeout_s=float(fields.get("dispatch_timeout_s", 10.0)),
        )
        pipeline = LocalPipeline(
            stage,
            compute,
            network=lambda tally: router.expert_compute(tally, network=True),
            local=lambda tally: router.expert_compute(tally, network=False),
        )
    else:
        raise ModelError(
            "window_without_ring",
            f"Layers [{begin}, {end}) of {stage.shape.n_layer} are part of a model, but no ring was named.",
            "A partial window serves as a stage of a ring; a trunk loads every layer.",
        )
    if tokenizer is not None and template is not None:
        loaded.generator = Generator(
            pipeline, tokenizer, template, context_length=context_length, trace_directory=runtime
        )
    return loaded


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
