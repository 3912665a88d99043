"""One end of a ring edge: the role byte, HELLO, frames, and a deadline for a peer that says nothing.

An edge that waits for its peer waits for as long as it takes: the relay holds it. Once both HELLOs were read, either
end sends PING every ``ping_s``; an end that hears nothing for ``silence_s`` takes its peer for hung and cuts the edge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator

from kvasir_console.engine.process.link import CLOSE_TIMEOUT_S
from kvasir_console.errors import EngineError
from kvasir_console.relay.wire import ring as wire
from kvasir_console.relay.wire.ring import Frame, FrameKind

log = logging.getLogger(__name__)

PING_S = 5.0
SILENCE_S = 15.0
MAX_UNREAD_BYTES = 2**20
"""A peer that takes so little of what it is sent gets neither PONG nor PROGRESS; it hears of us by everything else."""
MAX_POSTED = 64
"""Posts that wait for a peer to take them, before ``room`` has to be waited for."""
_STAMP = struct.Struct("<d")

OnFrame = Callable[["Edge", Frame], Awaitable[None]]


class StaleError(wire.RingError):
    """The peer's plan is older than ours, or ours than the peer's (``mine``)."""

    def __init__(self, message: str, *, mine: bool) -> None:
        super().__init__(message, "stale_epoch")
        self.mine = mine


class Edge:
    """``run`` serves it until it ends; ``post`` never waits."""

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        ping_s: float = PING_S,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.ready = False
        self.closed = False
        self.rtt_ms: float | None = None
        self.said: frozenset[int] = frozenset()
        """Lost edges that the peer told of, and those that it was told of."""
        self.told_progress: wire.Progress | None = None
        self.told: frozenset[int] = frozenset()
        self._reader = reader
        self._writer = writer
        self._ping_s = ping_s
        self._silence_s = silence_s
        self._clock = clock
        self._heard = clock()
        self._listening = True
        """Not while what came has to wait here: what the peer says then is not read."""
        self._out: deque[Iterator[Frame]] = deque()
        self._more = asyncio.Event()
        self._taken = asyncio.Event()
        self._why = ""

    def post(self, frames: Iterable[Frame]) -> None:
        """Send frames after those posted before; each is made when it is its turn."""
        if not self.closed:
            self._out.append(iter(frames))
            self._more.set()

    @property
    def clogged(self) -> bool:
        """Whether the peer takes so little of what it is sent that no more of what it can do without is added."""
        return self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES

    async def room(self) -> None:
        """Wait while much that was posted is not taken; not for an edge that is closed."""
        while len(self._out) > MAX_POSTED and not self.closed:
            self._taken.clear()
            await self._taken.wait()

    def say(self, frame: Frame) -> None:
        """Send a frame now, whatever else waits."""
        if not self.closed:
            self._writer.write(wire.encode(frame))

    def close(self, why: str) -> None:
        """End the edge; ``run`` returns."""
        if not self.closed:
            self.closed = True
            self.ready = False
            self._why = why
            self._out.clear()
            self._more.set()
            self._taken.set()
            with contextlib.suppress(OSError):
                self._writer.close()
            transport = self._writer.transport
            if transport.get_write_buffer_size():  # a peer that reads nothing would keep ``run`` from its end
                asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, transport.abort)

    async def run(self, role: bytes, peer_role: bytes, hello: Frame, on_frame: OnFrame) -> str:
        """Serve the edge until it ends; returns why it did.

        Raises:
            StaleError: an epoch is over, the peer's (it was told so) or ours.
        """
        sending = asyncio.create_task(self._send(), name=f"edge-{self.name}-send")
        watching = asyncio.create_task(self._watch(hello.epoch), name=f"edge-{self.name}-watch")
        try:
            self._writer.write(role + wire.encode(hello))
            if await self._reader.readexactly(1) != peer_role:
                raise wire.RingError("the edge's role byte is not the peer's")
            while True:
                frame = await wire.read_frame(self)
                if self.closed:
                    break
                self._check_epoch(frame, hello.epoch)
                self._listening = False
                await self._take(frame, hello.epoch, on_frame)
                self._heard, self._listening = self._clock(), True
            return self._why
        except StaleError:
            raise
        except wire.RingError as error:
            return self._why or str(error)
        except (OSError, EOFError) as error:
            return self._why or str(error) or "the peer closed it"
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            self.close("it ended")

    async def readexactly(self, n: int) -> bytes:
        """As of a stream. Whatever comes is a sign of life: a large frame may take a slow link longer than silence may
        last."""
        data = bytearray()
        while len(data) < n:
            piece = await self._reader.read(n - len(data))
            if not piece:
                raise asyncio.IncompleteReadError(bytes(data), n)
            self._heard = self._clock()
            if len(piece) == n:
                return piece
            data += piece
        return bytes(data)

    async def _take(self, frame: Frame, epoch: int, on_frame: OnFrame) -> None:
        match frame.kind:
            case FrameKind.PING if self.clogged:
                pass
            case FrameKind.PING:
                self.say(Frame(FrameKind.PONG, epoch, payload=frame.payload))
            case FrameKind.PONG:
                if len(frame.payload) == _STAMP.size:
                    self.rtt_ms = (self._clock() - _STAMP.unpack(frame.payload)[0]) * 1e3
            case FrameKind.HELLO if self.ready:  # each would be answered by all that is known here
                raise wire.RingError("a second HELLO")
            case FrameKind.HELLO:
                await on_frame(self, frame)
            case _ if not self.ready:
                raise wire.RingError("a frame came before HELLO")
            case _:
                await on_frame(self, frame)

    def _check_epoch(self, frame: Frame, epoch: int) -> None:
        if wire.is_stale(frame.epoch, epoch):
            text = f"a frame of epoch {frame.epoch} came to a ring of epoch {epoch}"
            self.say(Frame(FrameKind.ERROR, epoch, payload=wire.encode_error(EngineError("stale_epoch", text))))
            raise StaleError(text, mine=False)
        if frame.epoch > epoch:
            raise StaleError(f"the ring is at epoch {frame.epoch}, this rank at {epoch}", mine=True)

    async def _send(self) -> None:
        try:
            while not self.closed:
                self._more.clear()
                while self._out:
                    frame = next(self._out[0], None)
                    if frame is None:
                        self._out.popleft()
                        self._taken.set()
                        continue
                    self._writer.write(wire.encode(frame))
                    await self._writer.drain()
                await self._more.wait()
        except OSError as error:
            self.close(str(error))
        except wire.RingError as error:
            log.error("the %s edge cannot send: %s", self.name, error)
            self.close(str(error))

    async def _watch(self, epoch: int) -> None:
        with contextlib.suppress(OSError):
            while not self.closed:
                asleep = self._clock()
                await asyncio.sleep(self._ping_s)
                if self._clock() - asleep > 2 * self._ping_s:
                    self._heard = self._clock()  # it was this process that was stopped, not the peer
                if not self.ready:
                    continue
                silent_s = self._clock() - self._heard
                if self._listening and silent_s > self._silence_s:
                    self.close(f"the peer said nothing for {silent_s:.0f} s")
                    return
                self.say(Frame(FrameKind.PING, epoch, payload=_STAMP.pack(self._clock())))
