"""Ring stages: each rank computes its own window and passes only hidden states on.

Edges are byte streams that both ends dialled out for; the hub splices them. This rank's *next* edge leads to its
successor, its *prev* edge comes from its predecessor; the last rank's next edge is the closing edge to rank 0 and
carries sampled tokens. Either end of an edge writes its role byte ('P' to its successor, 'N' to its predecessor)
and a HELLO; an edge is used once both HELLOs agree on model, sizes, epoch and contiguous windows.

Rank 0 runs the generation loop over ``RingPipeline``. ADMIT announces a sequence to every rank (the last needs the
sampling parameters), HIDDEN carries rows, TOKEN comes back, RELEASE frees the sequence everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvasir_console.engine.kvcache import KVCache
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.pipeline import Sequence, SequenceParams, Tally
from kvasir_console.engine.sampling import SamplingParams, sample
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import EngineError, KvasirError, RequestError
from kvasir_console.relay.wire import ring as wire

log = logging.getLogger(__name__)

MAX_SEQUENCES = 64
WANT_TOKEN = 1
"""Item flag: the last rank samples after this item's last row."""


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


@dataclass(slots=True)
class _Held:
    """What a rank keeps for one sequence."""

    cache: KVCache
    sampling: SamplingParams | None


class RingNode:
    """One rank: two edges, the caches of admitted sequences, and (rank 0) the requests that wait for tokens."""

    def __init__(self, config: RingConfig, stage: Stage, model_digest: bytes, compute: Compute) -> None:
        self.config = config
        self._stage = stage
        self._digest = model_digest
        self._compute = compute
        self._next: _Edge | None = None
        self._prev: _Edge | None = None
        self._held: dict[int, _Held] = {}
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._ids = itertools.count(secrets.randbits(48) << 8)
        self._send_lock = asyncio.Lock()
        self.rows = 0
        self.sampled = 0

    @property
    def ready(self) -> bool:
        return bool(self._next and self._next.ready and self._prev and self._prev.ready)

    def stats(self) -> dict[str, Any]:
        return {
            **asdict(self.config),
            "next_ready": bool(self._next and self._next.ready),
            "prev_ready": bool(self._prev and self._prev.ready),
            "sequences": len(self._held),
            "rows": self.rows,
            "sampled": self.sampled,
        }

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
            edge.writer.write(role + wire.encode(self._frame(wire.FrameKind.HELLO, payload=self._hello().encode())))
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
        self._held.clear()
        self._fail_waiting(_broken(why))

    def _fail_waiting(self, error: KvasirError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

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

    def _frame(self, kind: wire.FrameKind, items: tuple[wire.Item, ...] = (), payload: bytes = b"") -> wire.Frame:
        return wire.Frame(kind=kind, epoch=self.config.epoch, items=items, payload=payload)

    async def _send_next(self, frame: wire.Frame) -> None:
        edge = self._next
        if edge is None or not edge.ready:
            raise _broken("the edge to the next rank is not connected")
        async with self._send_lock:
            edge.writer.write(wire.encode(frame))
            await edge.writer.drain()

    async def _handle(self, edge: _Edge, frame: wire.Frame) -> None:
        match frame.kind:
            case wire.FrameKind.HELLO:
                self._accept(edge, wire.Hello.decode(frame.payload))
                return
            case _ if not edge.ready:
                raise wire.RingError("a frame came before HELLO")
            case wire.FrameKind.ERROR if self.config.rank > 0:
                for item in frame.items:
                    self._held.pop(item.request_id, None)
                await self._send_next(frame)
            case wire.FrameKind.ERROR:
                error = wire.decode_error(frame.payload)
                for item in frame.items:
                    if (future := self._waiting.pop(item.request_id, None)) and not future.done():
                        future.set_exception(error)
            case wire.FrameKind.TOKEN if self.config.rank == 0:
                for item, token in zip(frame.items, wire.decode_tokens(frame), strict=True):
                    if (future := self._waiting.pop(item.request_id, None)) and not future.done():
                        future.set_result(int(token))
            case wire.FrameKind.ADMIT if self.config.rank > 0:
                self._admit(frame)
                if not self.config.is_last:
                    await self._send_next(frame)
            case wire.FrameKind.HIDDEN if self.config.rank > 0:
                await self._advance(frame)
            case wire.FrameKind.RELEASE:
                if self.config.rank > 0:
                    for item in frame.items:
                        self._held.pop(item.request_id, None)
                    if not self.config.is_last:
                        await self._send_next(frame)
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

    def _admit(self, frame: wire.Frame) -> None:
        admit = wire.decode_admit(frame)
        for item in frame.items:
            if len(self._held) >= MAX_SEQUENCES:
                raise wire.RingError(f"rank {self.config.rank} already holds {MAX_SEQUENCES} sequences")
            try:
                sampling = SamplingParams(**admit.params["sampling"]) if self.config.is_last else None
                cache = self._stage.new_cache(int(admit.params["capacity"]))
            except (KeyError, TypeError, ValueError, KvasirError) as error:
                raise wire.RingError(f"an ADMIT frame is refused: {error}") from error
            self._held[item.request_id] = _Held(cache, sampling)

    async def _advance(self, frame: wire.Frame) -> None:
        """Run this rank's window over the rows of a HIDDEN frame; pass them on, or sample if this is the last."""
        rows = wire.decode_hidden(frame, self._stage.shape.n_embd)
        outputs: list[torch.Tensor] = []
        sampled: list[tuple[wire.Item, int]] = []
        known: list[wire.Item] = []
        at = 0
        for item in frame.items:
            part = torch.from_numpy(np.array(rows[at : at + item.rows], dtype=np.float32))
            at += item.rows
            held = self._held.get(item.request_id)
            if held is None:
                continue  # released while the frame was on its way
            try:
                hidden, token = await self._compute.run(partial(self._step, held, part, item))
            except KvasirError as error:
                await self._refuse(item, error)
                continue
            known.append(item)
            outputs.append(hidden)
            if token is not None:
                sampled.append((item, token))
        if not self.config.is_last and known:
            payload = torch.cat(outputs).numpy().astype("<f4", copy=False).tobytes()
            await self._send_next(self._frame(wire.FrameKind.HIDDEN, tuple(known), payload))
        if sampled:
            items = tuple(item for item, _ in sampled)
            tokens = np.array([token for _, token in sampled], dtype="<i4").tobytes()
            self.sampled += len(sampled)
            await self._send_next(self._frame(wire.FrameKind.TOKEN, items, tokens))

    def _step(self, held: _Held, rows: torch.Tensor, item: wire.Item) -> tuple[torch.Tensor, int | None]:
        hidden = self._stage.forward(rows, held.cache, item.position)
        self.rows += item.rows
        if not (self.config.is_last and item.flags & WANT_TOKEN) or held.sampling is None:
            return hidden, None
        logits = self._stage.logits(hidden[-1:])[0]
        return hidden, sample(logits, held.sampling, item.position + item.rows)

    async def _refuse(self, item: wire.Item, error: KvasirError) -> None:
        self._held.pop(item.request_id, None)
        await self._send_next(self._frame(wire.FrameKind.ERROR, (item,), wire.encode_error(error)))

    async def open(self, params: SequenceParams) -> Sequence:
        """Rank 0: admit a sequence to every rank. Raises ``EngineError`` while the ring is not joined."""
        if self.config.rank != 0:
            raise EngineError("not_the_first_rank", f"Rank {self.config.rank} of a ring takes no requests.")
        if params.trace is not None:
            raise RequestError("no_trace_on_a_ring", "A ring's logits stay on its last rank; trace a trunk instead.")
        if not self.ready:
            raise _broken("its ranks are not all connected")
        if len(self._held) >= MAX_SEQUENCES:
            raise EngineError("ring_busy", f"The ring already runs {MAX_SEQUENCES} requests.", "Try again shortly.")
        request_id = next(self._ids)
        self._held[request_id] = _Held(self._stage.new_cache(params.capacity), None)
        body = {"sampling": asdict(params.sampling), "capacity": params.capacity}
        item = wire.Item(request_id=request_id, sequence=0, position=0, rows=0, flags=0)
        payload = wire.encode_admit(wire.Admit(params=body, prompt_tokens=params.prompt_tokens))
        await self._send_next(self._frame(wire.FrameKind.ADMIT, (item,), payload))
        return _RingSequence(self, request_id)

    async def _feed(self, request_id: int, tokens: list[int], position: int, want_token: bool) -> int | None:
        held = self._held.get(request_id)
        if held is None:
            raise _broken("an edge was lost while the request ran")
        hidden = await self._compute.run(
            lambda: self._stage.forward(
                self._stage.embed(torch.tensor(tokens, dtype=torch.int64)), held.cache, position
            )
        )
        self.rows += len(tokens)
        future: asyncio.Future[int] | None = None
        if want_token:
            future = asyncio.get_running_loop().create_future()
            self._waiting[request_id] = future
        item = wire.Item(
            request_id=request_id,
            sequence=0,
            position=position,
            rows=len(tokens),
            flags=WANT_TOKEN if want_token else 0,
        )
        payload = hidden.numpy().astype("<f4", copy=False).tobytes()
        await self._send_next(self._frame(wire.FrameKind.HIDDEN, (item,), payload))
        return None if future is None else await future

    async def _release(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)
        if self._held.pop(request_id, None) is None:
            return
        item = wire.Item(request_id=request_id, sequence=0, position=0, rows=0, flags=0)
        with contextlib.suppress(KvasirError, OSError):
            await self._send_next(self._frame(wire.FrameKind.RELEASE, (item,)))

    def close(self) -> None:
        for edge in (self._next, self._prev):
            if edge is not None:
                edge.writer.close()


class _RingSequence:
    """A request of rank 0 on its way around the ring."""

    def __init__(self, node: RingNode, request_id: int) -> None:
        self._node = node
        self._id = request_id
        self.tally = Tally()

    async def step(self, tokens: list[int], position: int, *, want_token: bool) -> int | None:
        token = await self._node._feed(self._id, tokens, position, want_token)
        self.tally.rows += len(tokens)
        return token

    async def close(self) -> str | None:
        await self._node._release(self._id)
        return None


def _broken(why: str) -> EngineError:
    return EngineError("ring_broken", f"The ring cannot answer: {why}.", "Try again once its ranks have dialled in.")
