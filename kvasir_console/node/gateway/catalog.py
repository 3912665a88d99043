"""The models this gateway serves, read from their checkpoints' headers, and the slices cut from them for nodes.

A slice is cut once into the cache directory and served as a file, so a download can be resumed. Its folder is named
by the checkpoint's identity, time of change included: another file under the same name never serves an old slice.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvasir_console.config import ServedModel
from kvasir_console.engine.checkpoint.digest import model_digest, source_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.checkpoint.shard import write_expert_shard, write_stage
from kvasir_console.errors import ConfigError, UsageError
from kvasir_console.node.gateway.census import SHARD_EXPERTS, OfferedModel
from kvasir_console.node.gateway.coverage import short_model_name

CACHE_BYTES = 16 * 2**30
"""Most bytes of slices kept; the least recently served go first."""
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    id: str
    name: str
    """For people: ``general.name`` of the checkpoint, else the id."""
    path: Path
    placement: str
    ring: tuple[tuple[str, int, int], ...]
    replicas: tuple[tuple[str, ...], ...]
    """By stage of the ring, the wallets that stand by for it."""
    shape: ModelShape
    digest: bytes
    source_digest: str
    revision: str
    """Names this very file: digest, source digest, size and time of change, in 16 hexadecimal digits."""

    @property
    def offered(self) -> OfferedModel | None:
        """What the expert market offers of it, if it has experts."""
        if not self.shape.moe_layers:
            return None
        return OfferedModel(
            self.id, self.shape.n_layer, self.shape.n_embd, self.shape.n_expert, self.shape.moe_layers, self.digest
        )


def read_catalog(models: tuple[ServedModel, ...]) -> dict[str, CatalogModel]:
    """Open every configured model. Blocks; call it from a thread.

    Raises:
        ConfigError: an id that cannot stand in a path, or that is given twice.
        ModelError: a checkpoint is refused.
    """
    catalog: dict[str, CatalogModel] = {}
    for model in models:
        if not _MODEL_ID.fullmatch(model.id) or model.id in catalog:
            raise ConfigError(
                "served_model_id",
                f"gateway.models: {model.id!r} is no model id, or stands twice.",
                "Use letters, digits, dots, dashes and underscores, each id once.",
            )
        path = Path(model.path).expanduser()
        with Checkpoint.open(path) as checkpoint:
            shape = ModelShape.of(checkpoint)
            name = checkpoint.metadata.get("general.name")
            catalog[model.id] = CatalogModel(
                id=model.id,
                name=_shown(name) if isinstance(name, str) and name.strip() else model.id,
                path=path,
                placement=model.placement,
                ring=model.ring,
                replicas=model.replicas or ((),) * len(model.ring),
                shape=shape,
                digest=(digest := model_digest(checkpoint)),
                source_digest=(source := source_digest(checkpoint)),
                revision=_revision((part.path for part in checkpoint.parts), digest, source),
            )
    return catalog


class Slices:
    """Cuts and keeps slices. One is cut at a time: cutting is bound by the disk, and nodes can wait."""

    def __init__(self, directory: Path, catalog: Mapping[str, CatalogModel], *, cache_bytes: int = CACHE_BYTES) -> None:
        self._directory = directory
        self._catalog = catalog
        self._cache_bytes = cache_bytes
        self._cutting = asyncio.Lock()

    def model(self, name: str) -> CatalogModel:
        """Raises ``UsageError`` ``unknown_model``."""
        model = self._catalog.get(short_model_name(name))
        if model is None:
            raise UsageError("unknown_model", f"No model named {_shown(name)} is served here.")
        return model

    async def expert_shard(self, model: CatalogModel, layer: int, begin: int, end: int) -> Path:
        """The file with experts [begin, end) of a layer. A range is refused, never clamped.

        Raises:
            UsageError: ``no_such_experts`` or ``too_many_experts``.
            ModelError, SystemResourceError: it cannot be cut.
        """
        if layer not in model.shape.moe_layers or not 0 <= begin < end <= model.shape.n_expert:
            raise UsageError(
                "no_such_experts", f"{model.id} has no experts [{begin}, {end}) in layer {layer}.", "Volunteer again."
            )
        if end - begin > SHARD_EXPERTS:
            raise UsageError("too_many_experts", f"A shard has at most {SHARD_EXPERTS} experts, not {end - begin}.")

        def cut(target: Path) -> None:
            with Checkpoint.open(model.path) as source:
                write_expert_shard(source, target, model=model.id, layer=layer, begin=begin, end=end)

        return await self._slice(self._file(model, f"L{layer}_e{begin:03d}-{end:03d}"), cut)

    async def stage(self, model: CatalogModel, begin: int, end: int) -> Path:
        """The file with the layers [begin, end). Raises as ``expert_shard`` does."""
        if not 0 <= begin < end <= model.shape.n_layer:
            raise UsageError("no_such_layers", f"{model.id} has no layers [{begin}, {end}).")

        def cut(target: Path) -> None:
            with Checkpoint.open(model.path) as source:
                write_stage(source, target, model=model.id, begin=begin, end=end)

        return await self._slice(self._file(model, f"layers_{begin:03d}-{end:03d}"), cut)

    def _file(self, model: CatalogModel, name: str) -> Path:
        return self._directory / f"{model.id}-{model.revision}" / f"{name}.gguf"

    async def _slice(self, target: Path, cut: Callable[[Path], None]) -> Path:
        if not await asyncio.to_thread(_touch, target):
            async with self._cutting:
                if not await asyncio.to_thread(_touch, target):
                    await asyncio.to_thread(self._cut, target, cut)
        return target

    def _cut(self, target: Path, cut: Callable[[Path], None]) -> None:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        cut(target)
        files = [(file, file.stat()) for file in self._directory.glob("*/*.gguf")]
        total = 0
        for file, status in sorted(files, key=lambda each: each[1].st_atime_ns, reverse=True):
            total += status.st_size
            if total > self._cache_bytes and file != target:
                file.unlink(missing_ok=True)


def _touch(file: Path) -> bool:
    """Whether ``file`` is there. Marks it as used now by its access time: its ETag is made of the other one."""
    try:
        os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


def _revision(paths: Iterable[Path], digest: bytes, source: str) -> str:
    statuses = [path.stat() for path in paths]
    identity = " ".join([digest.hex(), source, *(f"{each.st_size} {each.st_mtime_ns}" for each in statuses)])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _shown(text: str) -> str:
    """``text`` for a person: nothing a terminal would act on, and not too long."""
    return "".join(character for character in text if character.isprintable())[:80]
