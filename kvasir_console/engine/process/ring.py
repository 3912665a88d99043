"""Ring stages: each rank computes its own window and passes only hidden states on.

Edges are byte streams that both ends dialled out for; the hub splices them. This rank's *next* edge leads to its
successor, its *prev* edge comes from its predecessor; the last rank's next edge is the closing edge to rank 0 and
carries sampled tokens. Either end of an edge writes its role byte ('P' to its successor, 'N' to its predecessor)
and a HELLO; once both agree on model, sizes, epoch and contiguous windows, the successor says in HELD what it has, and
the predecessor goes on from there.

Rank 0 is driven by a scheduler (``ring_pipeline``). ADMIT announces a sequence to every rank (the last needs the
sampling parameters and the prompt), HIDDEN carries rows of any number of sequences, TOKEN comes back, RELEASE frees a
sequence everywhere. A rank that refuses or fails a sequence says so by an ERROR that travels on to rank 0; no other
sequence notices. An edge that ends loses no sequence (docs/reliability.md): a link (``ring_link``) keeps what was sent.
Which edges are lost is said in LOST, and how far the ranks have come in PROGRESS, so that rank 0 knows for how long
nothing came of what it waits for (``ring_whole``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kvasir_console.engine.process.answers import Answers
from kvasir_console.engine.process.budget import KvBudget
from kvasir_console.engine.process.compute import Compute
from kvasir_console.engine.process.pipeline import MAX_RING_SEQUENCES
from kvasir_console.engine.process.ring_edge import SILENCE_S, Edge, StaleError
from kvasir_console.engine.process.ring_link import RowLink, TokenLink
from kvasir_console.engine.process.ring_whole import Wholeness, Work
from kvasir_console.engine.process.ring_window import Advanced, RingWindow
from kvasir_console.engine.process.router import Router
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import EngineError, KvasirError
from kvasir_console.relay.wire import ring as wire
from kvasir_console.relay.wire.ring import Frame, FrameKind

log = logging.getLogger(__name__)

FRAME_BYTES, ITEM_BYTES = 512, 256
INBOX_BYTES = 64 * 2**20
"""Frames that came and wait for the compute thread; more are not read from the edges."""
ROLL_S = 10.0
"""How often rank 0 says which sequences live."""
TEND_S = 0.5
BEHIND_S = 60.0
"""How long a rank of an older epoch waits for the plan that names it in the newer one; then it exits."""


@dataclass(frozen=True, slots=True)
class RingConfig:
    """Where this engine stands in its ring; assigned by a signed plan.

    ``recover_s``: how long rank 0 keeps its requests while the ring is not whole, or nothing comes out of it.
    ``silence_s``: how long a peer may say nothing.
    """

    id: str
    epoch: int
    rank: int
    size: int
    n_layer: int
    recover_s: float = 120.0
    silence_s: float = SILENCE_S

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


class RingNode:
    """One rank: two edges, its window, what it sent, and, at rank 0, the answers that steps wait for.

    Frames of both edges are dealt with one after the other, in the order in which they came.
    """

    def __init__(
        self,
        config: RingConfig,
        stage: Stage,
        model_digest: bytes,
        compute: Compute,
        budget: KvBudget,
        router: Router | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._stage = stage
        self._digest = model_digest
        self._compute = compute
        self._clock = clock
        self.window = RingWindow(stage, budget, samples=config.is_last, router=router)
        self.answers = Answers(stage.shape.n_vocab, clock)
        self.rows = RowLink(stage.shape.n_embd, self.frame)
        self.tokens = TokenLink(self.frame)
        self.known: Callable[[], dict[int, wire.Known]] = dict
        """What rank 0 knows of its sequences; its pipeline sets it."""
        self.on_times: Callable[[Frame], None] = _ignore
        """Told of every TOKEN frame at rank 0: it carries what the walk round the ring took."""
        self.on_retired: Callable[[], None] = _nothing
        """A newer plan does not name this rank: it has to go."""
        self._next: Edge | None = None
        self._prev: Edge | None = None
        self._waiting: set[Edge] = set()
        """Connections whose peer has not said HELLO yet."""
        self._held_by_next: dict[int, wire.Held] = {}
        self._known_by_next: dict[int, wire.Known] = {}
        self._inbox: asyncio.Queue[tuple[Edge, Frame | None, float]] = asyncio.Queue()
        self._inbox_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._missing: dict[int, int] = {}
        self._whole = Wholeness(config.rank, config.size, config.recover_s, clock())
        self._frame_at: float | None = None
        """Since when the rows of one frame have been computed here."""
        self._behind_at: float | None = None
        self._cuts = 0
        self._tasks = [
            asyncio.create_task(work, name=f"ring-{config.rank}-{name}")
            for name, work in (("work", self._work()), ("tend", self._tend()))
        ]

    @property
    def ready(self) -> bool:
        return bool(self._next and self._next.ready and self._prev and self._prev.ready)

    @property
    def broken(self) -> bool:
        """Whether nothing has come of the ring for longer than requests are kept."""
        return self._whole.spent

    def wholeness(self) -> dict[str, Any]:
        """What this rank knows of the ring: which edges are lost, for how long nothing came, in words."""
        return self._whole.as_fields()

    @property
    def missing(self) -> str:
        """Who is missed, in words; empty while the ring is whole and moves."""
        return self._whole.missing

    def stats(self) -> dict[str, Any]:
        """Where this rank stands, and its counters."""
        return {
            **asdict(self.config),
            "next_ready": bool(self._next and self._next.ready),
            "prev_ready": bool(self._prev and self._prev.ready),
            **self.wholeness(),
            "next_rtt_ms": self._next.rtt_ms if self._next else None,
            "behind": self._behind_at is not None,
            "cuts": self._cuts,
            "sequences": len(self.window),
            "rows": self.window.rows,
            "recomputed_rows": self.window.recomputed_rows,
            "sampled": self.window.sampled,
            "kv": self.kv_stats(),
        }

    def kv_stats(self) -> dict[str, Any]:
        budget = self.window.budget
        return {"budget_bytes": budget.total_bytes, "reserved_bytes": budget.reserved_bytes, "kept_bytes": 0}

    # Edges

    async def serve_next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the edge to the successor until it ends; HELLO, HELD and ERROR come back on it."""
        await self._serve(self._edge("next", reader, writer), role=b"P", peer_role=b"N")

    async def serve_prev(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the edge from the predecessor until it ends."""
        await self._serve(self._edge("prev", reader, writer), role=b"N", peer_role=b"P")

    def _edge(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Edge:
        silence_s = self.config.silence_s
        return Edge(name, reader, writer, ping_s=silence_s / 3, silence_s=silence_s, clock=self._clock)

    async def _serve(self, edge: Edge, *, role: bytes, peer_role: bytes) -> None:
        self._waiting.add(edge)
        why = "it failed"
        try:
            hello = self.frame(FrameKind.HELLO, payload=self._hello().encode())
            why = await edge.run(role, peer_role, hello, self._received)
        except StaleError as error:
            why = str(error)
            if error.mine and self._behind_at is None:
                self._behind_at = self._clock()
        finally:
            self._waiting.discard(edge)
            self._lose(edge, why)

    def _lose(self, edge: Edge, why: str) -> None:
        """An edge is over. What it carried is in the links, and goes on with the next one."""
        edge.close(why)
        if edge not in (self._next, self._prev):
            log.debug("ring %s rank %d: a %s edge ends: %s", self.config.id, self.config.rank, edge.name, why)
            return
        log.info("ring %s rank %d: the %s edge ends: %s", self.config.id, self.config.rank, edge.name, why)
        self._cuts += 1
        if edge is self._next:
            self._next = None
            self._held_by_next, self._known_by_next = {}, {}
            self.rows.lost()
            self.tokens.lost()
        else:
            self._prev = None
        self._look()

    async def _received(self, edge: Edge, frame: Frame) -> None:
        """Queue a frame; with much in the queue, until there is room again."""
        if frame.kind is FrameKind.HELLO:
            self._accept(edge, wire.Hello.decode(frame.payload))
            return
        if frame.kind in (FrameKind.LOST, FrameKind.PROGRESS):
            self._whole.heard(edge, frame)
            return
        self._inbox_bytes += _held_bytes(frame)
        self._inbox.put_nowait((edge, frame, self._clock()))
        if self._inbox_bytes > INBOX_BYTES:
            self._room.clear()
            await self._room.wait()

    def _accept(self, edge: Edge, theirs: wire.Hello) -> None:
        mine = self._hello()
        before, after = (mine, theirs) if edge.name == "next" else (theirs, mine)
        wire.check_hello(before, after)
        # Only now: a connection that does not get so far must not displace one that works.
        older = self._next if edge.name == "next" else self._prev
        if older is not None and older is not edge:
            self._lose(older, "a newer connection replaces it")
        self._waiting.discard(edge)
        edge.ready = True
        if edge.name == "next":
            self._next = edge
        else:
            self._prev = edge
            self._inbox.put_nowait((edge, None, self._clock()))  # HELD, after all that came before
        self._look()
        log.info(
            "ring %s rank %d: the %s edge is joined to rank %d (layers [%d, %d))",
            self.config.id,
            self.config.rank,
            edge.name,
            theirs.rank,
            theirs.layer_begin,
            theirs.layer_end,
        )

    def _look(self) -> None:
        """An edge came or went, or time has passed: see how the ring is, and tell the neighbours."""
        now, window = self._clock(), self.window
        if self.config.rank == 0:  # its steps are the pipeline's
            busy_s = self._compute.computing_s
        else:
            busy_s = 0.0 if self._frame_at is None else now - self._frame_at
        work = Work(window.rows - window.recomputed_rows, window.recomputed_rows, busy_s)
        waiting = self.answers.waiting
        said = self.missing
        self._whole.look(now, self._prev, self._next, work, waiting=waiting, epoch=self.config.epoch)
        if self.missing != said:
            log.info("ring %s rank %d: %s", self.config.id, self.config.rank, self.missing or "the ring is whole")

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

    def frame(self, kind: FrameKind, items: tuple[wire.Item, ...] = (), payload: bytes = b"") -> Frame:
        return Frame(kind=kind, epoch=self.config.epoch, items=items, payload=payload)

    def post_next(self, frames: Iterable[Frame]) -> None:
        """Send on the edge to the successor, without waiting; nothing while it is lost (the links know)."""
        if self._next is not None and self._next.ready:
            self._next.post(frames)

    def replan(self, config: RingConfig) -> None:
        """Take a newer epoch of the plan that leaves this rank where it is. Raises ``EngineError``."""
        if replace(config, epoch=self.config.epoch) != self.config or config.epoch < self.config.epoch:
            raise EngineError("other_window", "The new plan does not leave this rank where it is.", "Load it anew.")
        if config.epoch == self.config.epoch:
            return
        self.config = config
        self._behind_at = None
        for edge in self._edges():
            self._lose(edge, f"the ring is at epoch {config.epoch} now")

    def leave(self) -> None:
        """Close both edges, for good."""
        for edge in self._edges():
            edge.close("this rank leaves")
        self._room.set()
        for task in self._tasks:
            task.cancel()

    def _edges(self) -> list[Edge]:
        return [*self._waiting, *(edge for edge in (self._next, self._prev) if edge is not None)]

    # Frames, in their order

    async def _work(self) -> None:
        while True:
            edge, frame, came = await self._inbox.get()
            try:
                if frame is None:
                    self._say_held(edge)
                    continue
                self._inbox_bytes -= _held_bytes(frame)
                if self._inbox_bytes <= INBOX_BYTES:
                    self._room.set()
                await self._handle(edge, frame, came)
                if self._next is not None and self.config.rank:  # rank 0 passes nothing on, and is always read
                    await self._next.room()
            except (wire.RingError, KvasirError) as error:
                self._lose(edge, str(error))
            except Exception as error:
                log.exception("a frame of the %s edge failed", edge.name)
                self._lose(edge, f"a frame of it failed: {type(error).__name__}")

    async def _handle(self, edge: Edge, frame: Frame, came: float) -> None:
        first = self.config.rank == 0
        match frame.kind:
            case FrameKind.HELD if edge.name == "next":
                self._take_held(edge, frame)
            case FrameKind.ERROR if first:
                error = wire.decode_error(frame.payload)
                for item in frame.items:
                    if item.request_id in self.window:
                        self.answers.fail(item.request_id, error)
            case FrameKind.ERROR:
                payload = wire.encode_error(wire.decode_error(frame.payload))  # it is kept: no longer than ours are
                for item in frame.items:
                    self._end(item.request_id, payload)
            case FrameKind.TOKEN if first:
                self.on_times(frame)
                for item, token in zip(frame.items, wire.decode_tokens(frame), strict=True):
                    if self.answers.receive(item.request_id, item.step, item.position + item.rows, token):
                        self._whole.patience.anew()
            case FrameKind.ADMIT if not first:
                self._admit(frame)
            case FrameKind.HIDDEN if not first:
                await self._advance(frame, came)
            case FrameKind.RELEASE:
                if not first:
                    for item in frame.items:
                        self.release(item.request_id)
            case FrameKind.ROLL if not first:
                self._roll({item.request_id for item in frame.items})
                if not self.config.is_last:
                    self.post_next([frame])
            case _:
                raise wire.RingError(f"rank {self.config.rank} does not take {frame.kind.name} on its {edge.name} edge")

    def _say_held(self, edge: Edge) -> None:
        """Tell the predecessor what is here."""
        if edge is not self._prev or not edge.ready:
            return
        if self.config.rank == 0:
            edge.post(wire.encode_known(self.config.epoch, self.known()))
        else:
            edge.post(wire.encode_held(self.config.epoch, self.window.held()))

    def _take_held(self, edge: Edge, frame: Frame) -> None:
        """The successor says what it has, perhaps in several frames: go on from there."""
        if edge is not self._next:
            return
        more = bool(frame.flags & wire.MORE)
        if self.config.is_last:
            self._known_by_next |= wire.decode_known(frame)
            _check_count(self._known_by_next)
            if not more:
                known, self._known_by_next = self._known_by_next, {}
                self.window.tell({key: each.tokens for key, each in known.items()})
                edge.post(self.tokens.joined(known))
            return
        self._held_by_next |= wire.decode_held(frame)
        _check_count(self._held_by_next)
        if not more:
            held, self._held_by_next = self._held_by_next, {}
            edge.post(self.rows.joined(held))

    def _admit(self, frame: Frame) -> None:
        admit = wire.decode_admit(frame)
        (item,) = frame.items
        try:
            self.window.admit(item.request_id, admit.params, admit.prompt_tokens)
        except KvasirError as error:
            self._end(item.request_id, wire.encode_error(error))
            return
        self._missing.pop(item.request_id, None)
        if self.config.is_last:
            self.tokens.admit(item.request_id)
        else:
            prompt_length = self.window.prompt_length(item.request_id)
            self.post_next(self.rows.admit(item.request_id, frame.payload, prompt_length))

    async def _advance(self, frame: Frame, came: float) -> None:
        """Run this rank's window over the rows of a HIDDEN frame; pass them on, or their tokens if this is the last."""
        rows = torch.from_numpy(wire.decode_hidden(frame, self._stage.shape.n_embd))
        took_s = 0.0

        def advance() -> Advanced:
            nonlocal took_s
            started = self._clock()
            advanced = self.window.advance(frame.items, rows)
            took_s = self._clock() - started
            return advanced

        self._frame_at = self._clock()
        try:
            advanced = await self._compute.run(advance)
        finally:
            self._frame_at = None
        for item, error in advanced.errors:
            self._end(item.request_id, wire.encode_error(error))
        slowest_us = max(frame.slowest_us, int(took_s * 1e6))
        inside_us = frame.inside_us + int((self._clock() - came) * 1e6)
        if self.config.is_last:
            self.post_next(self.tokens.tokens(advanced.tokens, (slowest_us, inside_us)))
        else:
            self.pass_on(advanced, (slowest_us, inside_us))

    def pass_on(self, advanced: Advanced, times: tuple[int, int]) -> None:
        """Log the rows of a step, and send what the successor lacks."""
        if advanced.items:
            self.post_next(self.rows.rows(advanced.items, advanced.hidden.cpu().numpy(), times))

    def release(self, request_id: int) -> bool:
        """Free a sequence here and on every rank behind; whether it was here."""
        held = self.window.release(request_id)
        self.post_next((self.tokens if self.config.is_last else self.rows).release(request_id))
        self._missing.pop(request_id, None)
        if held:
            self._compute.freed()
        return held

    def _end(self, request_id: int, error: bytes) -> None:
        """A sequence that this rank or one before it cannot go on with: rank 0 hears of it."""
        self.window.release(request_id)
        self.post_next((self.tokens if self.config.is_last else self.rows).error(request_id, error))

    def _roll(self, living: set[int]) -> None:
        """Let go of what was missing in two rolls: its release was lost with the rank that knew of it."""
        missing = {key: self._missing.get(key, 0) + 1 for key in self.window.held() if key not in living}
        gone = [key for key, times in missing.items() if times > 1]
        for request_id in gone:
            log.info("ring %s rank %d: sequence %d is let go of", self.config.id, self.config.rank, request_id)
            self.release(request_id)
        self._missing = {key: times for key, times in missing.items() if times == 1}
        (self.tokens if self.config.is_last else self.rows).notices.keep(living)

    # What has to be looked after

    async def _tend(self) -> None:
        """What others told of, rolls, deadlines."""
        rolled = self._clock()
        while True:
            await asyncio.sleep(TEND_S)
            self._look()
            now = self._clock()
            if self.config.rank == 0:
                self._give_up()
            if self._behind_at is not None and now - self._behind_at > BEHIND_S:
                log.error("ring %s rank %d: the ring is at a newer epoch", self.config.id, self.config.rank)
                self._behind_at = now
                self.on_retired()
            if self.config.rank == 0 and self.rows.live and now - rolled >= ROLL_S:
                rolled = now
                items = tuple(wire.Item(key, rows=0) for key in self.window.held())  # no more than a frame takes
                self.post_next([self.frame(FrameKind.ROLL, items)])

    def _give_up(self) -> None:
        """End what has waited for longer than requests are kept, or was overtaken by twice as much."""
        if self.broken:
            self.answers.fail_all(ring_broken(self.missing))
            self._whole.given_up()
        for request_id in self.answers.overtaken(2 * self.config.recover_s):
            log.warning("ring %s: an answer was lost on its way; its request ends", self.config.id)
            self.answers.fail(request_id, ring_broken("it lost this request's rows"))


def _check_count(entries: dict[int, Any]) -> None:
    if len(entries) > MAX_RING_SEQUENCES:
        raise wire.RingError(f"a peer holds more than {MAX_RING_SEQUENCES} sequences", "count")


def _held_bytes(frame: Frame) -> int:
    """About what a frame takes while it waits: its items are objects by then."""
    return FRAME_BYTES + ITEM_BYTES * len(frame.items) + len(frame.payload)


def _ignore(_frame: Frame) -> None:
    pass


def _nothing() -> None:
    pass


def ring_broken(why: str) -> EngineError:
    return EngineError("ring_broken", f"The ring cannot answer: {why}.", "Try again soon.")
