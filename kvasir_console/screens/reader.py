"""Reads every node once a second and hands on one frozen value for all of them. No Textual here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir_console.errors import KvasirError
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.screens.source import SnapshotSource

log = logging.getLogger(__name__)

SILENT_S = 5.0
"""A node that has not answered for this long counts as disconnected."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as it is known now: its latest snapshot, and since when it has not answered."""

    title: str
    snapshot: NodeSnapshot | None = None
    """``None`` before the first answer; afterwards the last one, however old."""
    lost_since_s: float | None = None
    """Unix time since when it has been unreachable; ``None`` while it answers."""
    error: str = ""

    @property
    def name(self) -> str:
        return self.snapshot.name if self.snapshot is not None and self.snapshot.name else self.title

    @property
    def lost(self) -> bool:
        return self.lost_since_s is not None


@dataclass(slots=True)
class _Line:
    source: SnapshotSource
    view: NodeView
    asked_s: float = 0.0
    task: asyncio.Task[NodeSnapshot] | None = None


class Reader:
    """Asks all sources at once. One that is slow delays the others by ``patience_s`` at most, and is asked once."""

    def __init__(
        self, sources: Sequence[SnapshotSource], clock: Callable[[], float], *, patience_s: float = 0.5
    ) -> None:
        self._lines = [_Line(source, NodeView(source.title)) for source in sources]
        self._clock = clock
        self._patience_s = patience_s
        self._reading = asyncio.Lock()

    @property
    def views(self) -> tuple[NodeView, ...]:
        return tuple(line.view for line in self._lines)

    async def read(self) -> tuple[NodeView, ...]:
        """One round. Never raises because of a node."""
        async with self._reading:
            for line in self._lines:
                if line.task is None:
                    line.asked_s = self._clock()
                    line.task = asyncio.ensure_future(line.source.snapshot())
            await asyncio.wait([line.task for line in self._lines if line.task], timeout=self._patience_s)
            for line in self._lines:
                line.view = self._judged(line)
            return self.views

    async def close(self) -> None:
        tasks = [line.task for line in self._lines if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _judged(self, line: _Line) -> NodeView:
        view, task = line.view, line.task
        if task is None or not task.done():
            if self._clock() - line.asked_s < SILENT_S:
                return view
            return _lost(view, line.asked_s, "The node does not answer.")
        line.task = None
        try:
            return NodeView(view.title, task.result())
        except asyncio.CancelledError:
            return view
        except KvasirError as error:
            return _lost(view, self._clock(), str(error))
        except Exception as error:
            log.exception("the snapshot of %s failed", view.title)
            return _lost(view, self._clock(), f"The console could not read it ({type(error).__name__}).")


def _lost(view: NodeView, since_s: float, error: str) -> NodeView:
    since = since_s if view.lost_since_s is None else view.lost_since_s
    return NodeView(view.title, view.snapshot, since, error)
