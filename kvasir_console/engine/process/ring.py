"""Ring stages: each rank computes its own window and passes only hidden states on.

Edges are byte streams that both ends dialled out for; the hub splices them. This rank's *next* edge leads to its
successor, its *prev* edge comes from its predecessor; the last rank's next edge is the closing edge to rank 0 and
carries sampled tokens. Either end of an edge writes its role byte ('P' to its successor, 'N' to its predecessor)
and a HELLO; an edge is used once both HELLOs agree on model, sizes, epoch and contiguous windows.

Rank 0 is driven by a scheduler (``ring_pipeline``). ADMIT announces a sequence to every rank (the last needs the
sampling parameters and the prompt), HIDDEN carries rows of any number of sequences, TOKEN comes back, RELEASE frees a
sequence everywhere. A rank that refuses or fails a sequence says so by an ERROR that travels on to rank 0; no other
sequence notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvasir_console.engine.process.answers import Answers
from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.ring_window import Advanced, RingWindow
from kvasir_console.engine.process.router import Router
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.relay.wire import ring as wire

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RingConfig:
    """Where this engine stands in its ring; assigned by a signed plan."""

    id: str
    epoch: int
    rank: int
    size: int
    n_layer: int

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(slots=True)
class _Edge:
    """One end of an edge. ``ready`` once the peer's HELLO was accepted."""

    name: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ready: bool = False


class RingNode:
    """One rank: two edges, its window and, at rank 0, the answers that steps wait for."""

    def __init__(
        self,
        config: RingConfig,
        stage: Stage,
        model_digest: bytes,
        compute: Compute,
        budget: KvBudget,
        router: Router | None = None,
    ) -> None:
        self.config = config
        self._stage = stage
        self._digest = model_digest
        self._compute = compute
        self.window = RingWindow(stage, budget, samples=config.is_last, router=router)
        self.answers = Answers(stage.shape.n_vocab)
        self._next: _Edge | None = None
        self._prev: _Edge | None = None
        self._send_lock = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return bool(self._next and self._next.ready and self._prev and self._prev.ready)

    def stats(self) -> dict[str, Any]:
        """Where this rank stands, and its counters."""
        return {
            **asdict(self.config),
            "next_ready": bool(self._next and self._next.ready),
            "prev_ready": bool(self._prev and self._prev.ready),
            "sequences": len(self.window),
            "rows": self.window.rows,
            "sampled": self.window.sampled,
            "kv": self.kv_stats(),
        }

    def kv_stats(self) -> dict[str, Any]:
        budget = self.window.budget
        return {"budget_bytes": budget.total_bytes, "reserved_bytes": budget.reserved_bytes, "kept_bytes": 0}

    async def serve_next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the edge to the successor until it ends; only HELLO and ERROR come back on it."""
        edge = _Edge("next", reader, writer)
        await self._serve(edge, role=b"P", peer_role=b"N")

    async def serve_prev(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the edge from the predecessor until it ends."""
        edge = _Edge("prev", reader, writer)
        await self._serve(edge, role=b"N", peer_role=b"P")

    async def _serve(self, edge: _Edge, *, role: bytes, peer_role: bytes) -> None:
        older = self._next if edge.name == "next" else self._prev
        if older is not None:
            older.writer.close()
        if edge.name == "next":
            self._next = edge
        else:
            self._prev = edge
        why = "the peer closed it"
        try:
            edge.writer.write(role + wire.encode(self.frame(wire.FrameKind.HELLO, payload=self._hello().encode())))
            await edge.writer.drain()
            if await edge.reader.readexactly(1) != peer_role:
                raise wire.RingError("the edge's role byte is not the peer's")
            while True:
                frame = await wire.read_frame(edge.reader)
                if frame.epoch != self.config.epoch:
                    raise wire.RingError(f"a frame of epoch {frame.epoch} came to a ring of epoch {self.config.epoch}")
                await self._handle(edge, frame)
        except (wire.RingError, KvasirError) as error:
            why = str(error)
        except (OSError, EOFError) as error:
            why = str(error) or why
        finally:
            self._close(edge, why)

    def _close(self, edge: _Edge, why: str) -> None:
        log.info("ring %s rank %d: the %s edge ends: %s", self.config.id, self.config.rank, edge.name, why)
        edge.ready = False
        with contextlib.suppress(OSError):
            edge.writer.close()
        if edge is self._next:
            self._next = None
        if edge is self._prev:
            self._prev = None
        # Without an edge no sequence of this epoch can go on: their hidden states are lost with it.
        self.window.clear()
        self.answers.fail_all(ring_broken(why))

    def _hello(self) -> wire.Hello:
        return wire.Hello(
            model_digest=self._digest,
            n_embd=self._stage.shape.n_embd,
            dtype=wire.DType.F32,
            layer_begin=self._stage.begin,
            layer_end=self._stage.end,
            n_layer=self.config.n_layer,
            rank=self.config.rank,
            size=self.config.size,
        )

    def frame(self, kind: wire.FrameKind, items: tuple[wire.Item, ...] = (), payload: bytes = b"") -> wire.Frame:
        return wire.Frame(kind=kind, epoch=self.config.epoch, items=items, payload=payload)

    async def send_next(self, frame: wire.Frame) -> None:
        """Send, and wait until the edge can take more."""
        async with self._send_lock:
            await self.post_next(frame).drain()

    def post_next(self, frame: wire.Frame) -> asyncio.StreamWriter:
        """Send without waiting: for what must not be held up by a rank that hangs."""
        edge = self._next
        if edge is None or not edge.ready:
            raise ring_broken("the edge to the next rank is not connected")
        edge.writer.write(wire.encode(frame))
        return edge.writer

    async def _handle(self, edge: _Edge, frame: wire.Frame) -> None:
        match frame.kind:
            case wire.FrameKind.HELLO:
                self._accept(edge, wire.Hello.decode(frame.payload))
                return
            case _ if not edge.ready:
                raise wire.RingError("a frame came before HELLO")
            case wire.FrameKind.ERROR if self.config.rank > 0:
                for item in frame.items:
                    self.window.release(item.request_id)
                await self.send_next(frame)
            case wire.FrameKind.ERROR:
                error = wire.decode_error(frame.payload)
                for item in frame.items:
                    if item.request_id in self.window:
                        self.answers.fail(item.request_id, error)
            case wire.FrameKind.TOKEN if self.config.rank == 0:
                for item, token in zip(frame.items, wire.decode_tokens(frame), strict=True):
                    self.answers.receive(item.request_id, token)
            case wire.FrameKind.ADMIT if self.config.rank > 0:
                await self._admit(frame)
            case wire.FrameKind.HIDDEN if self.config.rank > 0:
                await self._advance(frame)
            case wire.FrameKind.RELEASE:
                if self.config.rank > 0:
                    for item in frame.items:
                        self.window.release(item.request_id)
                    self._compute.freed()
                    if not self.config.is_last:
                        await self.send_next(frame)
            case _:
                raise wire.RingError(f"rank {self.config.rank} does not take {frame.kind.name} on its {edge.name} edge")

    def _accept(self, edge: _Edge, theirs: wire.Hello) -> None:
        mine = self._hello()
        before, after = (mine, theirs) if edge.name == "next" else (theirs, mine)
        wire.check_hello(before, after)
        edge.ready = True
        log.info(
            "ring %s rank %d: the %s edge is joined to rank %d (layers [%d, %d))",
            self.config.id,
            self.config.rank,
            edge.name,
            theirs.rank,
            theirs.layer_begin,
            theirs.layer_end,
        )

    async def _admit(self, frame: wire.Frame) -> None:
        admit = wire.decode_admit(frame)
        (item,) = frame.items
        try:
            self.window.admit(item.request_id, admit.params, admit.prompt_tokens)
        except KvasirError as error:
            await self._refuse(item, error)
        else:
            if not self.config.is_last:
                await self.send_next(frame)

    async def _advance(self, frame: wire.Frame) -> None:
        """Run this rank's window over the rows of a HIDDEN frame; pass them on, or their tokens if this is the last."""
        rows = torch.from_numpy(wire.decode_hidden(frame, self._stage.shape.n_embd))
        advanced = await self._compute.run(lambda: self.window.advance(frame.items, rows))
        for item, error in advanced.errors:
            await self._refuse(item, error)
        if not self.config.is_last:
            await self.pass_on(advanced)
        elif advanced.tokens:
            items = tuple(item for item, _ in advanced.tokens)
            payload = wire.encode_tokens([token for _, token in advanced.tokens])
            await self.send_next(self.frame(wire.FrameKind.TOKEN, items, payload))

    async def pass_on(self, advanced: Advanced) -> None:
        if advanced.items:
            payload = wire.encode_hidden(advanced.hidden.cpu().numpy())
            await self.send_next(self.frame(wire.FrameKind.HIDDEN, advanced.items, payload))

    async def _refuse(self, item: wire.Item, error: KvasirError) -> None:
        self.window.release(item.request_id)
        await self.send_next(self.frame(wire.FrameKind.ERROR, (item,), wire.encode_error(error)))

    def leave(self) -> None:
        """Close both edges."""
        for edge in (self._next, self._prev):
            if edge is not None:
                edge.writer.close()


def ring_broken(why: str) -> EngineError:
    return EngineError("ring_broken", f"The ring cannot answer: {why}.", "Try again once its ranks have dialled in.")
