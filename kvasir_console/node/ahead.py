"""Windows that a node stands by for: their files, fetched and verified before anybody asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kvasir_console.node.holding import RingHolding
from kvasir_console.node.placement.plan import Plan, PlannedStage

Identity = tuple[int, ...]


def identity(files: Iterable[Path]) -> Identity | None:
    """Changes whenever the content of one of the files may have."""
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple(part for each in found for part in (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns))


class Ahead:
    """By model and layers. A file that was touched since it was verified counts as none."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, int, int], tuple[Path, Identity]] = {}

    def find(self, plan: Plan, stage: PlannedStage) -> tuple[Path, Identity] | None:
        """The verified file of a window, and what it was like then."""
        found = self._files.get(_key(plan, stage))
        return found if found is not None and identity(found[:1]) == found[1] else None

    def keep(self, plan: Plan, stage: PlannedStage, file: Path | None) -> None:
        """A window's file was verified just now."""
        if file is not None and (found := identity((file,))) is not None:
            self._files[_key(plan, stage)] = file, found


def as_if_served(plan: Plan, stage: PlannedStage, wallet: str) -> RingHolding:
    """The window as ``wallet`` would hold it: for fetching it, no engine loads it so."""
    return RingHolding(replace(plan, stages=(replace(stage, wallet=wallet, replicas=()),)), wallet, context_length=0)


def _key(plan: Plan, stage: PlannedStage) -> tuple[str, int, int]:
    return plan.model_digest, stage.begin, stage.end
