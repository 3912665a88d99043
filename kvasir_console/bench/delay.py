"""The delay proxy: a process that stands in for the wide-area network on TCP links of one machine.

``python -m kvasir_console.bench.delay --seed 7`` reads one JSON object a line from standard input, answers each with
one line, and ends with its input. ``links.py`` is the other end. Requests name what to do and a link:

* ``open``: listen on ``host`` and ``port`` of loopback (127.0.0.1 and a free one) and forward to ``to`` (a port of
  127.0.0.1); takes the fields of ``Shape``. Answers ``port``.
* ``set``: change fields of a link's ``Shape``; bytes under way keep their times.
* ``stall``: hold everything for ``for_s`` (``null``: until ``resume``), as a half-open path does. Nothing is lost.
* ``resume``: end a stall.
* ``cut``: reset the link's connections now, or the one that has passed ``after_bytes`` more in ``direction``
  (``up``, ``down``): in the middle of a frame.
* ``down``: ``on`` true resets the connections and refuses new ones until it is false again.
* ``stats``: counts of every link.

A link gives each direction half of its RTT, counted from when the system received the bytes, so that the proxy's own
waking is no part of it. Random draws come from (seed, link name) only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import ipaddress
import json
import random
import select
import selectors
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["Shape", "main"]

CHUNK_BYTES = 2**18
HELD_BYTES = 2**25
"""What one direction of a connection holds before its sender is held up: 128 ms at 250 MB/s."""
_ROUTER_BYTES = 2**18
"""The buffer of a slow link beyond what fits on the wire."""
_UP, _DOWN = 0, 1
_DIRECTIONS = {"up": _UP, "down": _DOWN}
_PR_SET_TIMERSLACK = 29
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("qq")
SPIN_S = 1e-4
"""The last part of a wait is spent awake: a thread that sleeps is late by some tens of microseconds."""
_MOST_LATE_S = 5e-3
"""A reading of the system's clock that says more has gone wrong, or the clock was set."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a link behaves."""

    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    """Each piece is late by up to this, evenly drawn; the order stays."""
    up_mb_s: float | None = None
    """From who dials to who listens, in 10^6 bytes a second, shared by the link's connections; ``None``: no limit."""
    down_mb_s: float | None = None
    stall_every_s: float | None = None
    """Mean time between stalls of ``stall_ms``, exponentially drawn."""
    stall_ms: float = 0.0
    cut_every_mb: float | None = None
    """Mean number of 10^6 bytes, both ways, between cuts, exponentially drawn."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is None and field.default is None:
                continue
            if not number or not 0 <= value <= 1e9 or (field.default is None and value == 0):
                raise ValueError(f"{field.name} cannot be {value!r}")

    def rate(self, direction: int) -> float | None:
        """Bytes a second."""
        mb_s = self.down_mb_s if direction == _DOWN else self.up_mb_s
        return None if mb_s is None else mb_s * 1e6

    def held_bytes(self, direction: int) -> int:
        rate = self.rate(direction)
        return HELD_BYTES if rate is None else min(HELD_BYTES, int(rate * self.rtt_ms / 1e3) + _ROUTER_BYTES)


class Link:
    """One listening port, its connections and its shape."""

    def __init__(self, name: str, to: int, shape: Shape, seed: int, host: str, port: int) -> None:
        self.name = name
        self.shape = shape
        self.bytes = [0, 0]
        self.cuts = 0
        self.stalls = 0
        self.accepted = 0
        self.stalled_until = 0.0
        self.down = False
        self.connections: set[Connection] = set()
        self._to = to
        self._rng = random.Random(f"{seed}:{name}")  # noqa: S311
        self._free_at = [0.0, 0.0]
        self._cut_after: list[int | None] = [None, None]
        self._cut_in: float | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server((host, port), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept)
        self.reshape(shape)

    def reshape(self, shape: Shape) -> None:
        self.shape = shape
        self._cut_in = self._rng.expovariate(1 / (shape.cut_every_mb * 1e6)) if shape.cut_every_mb else None
        self._plan_stall()

    def _plan_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if self.shape.stall_every_s:
            wait_s = self._rng.expovariate(1 / self.shape.stall_every_s)
            self._stall_timer = self._loop.call_later(wait_s, self._next_stall)

    def arrival(self, direction: int, size: int, connected_at: float, late_s: float) -> float:
        """When bytes that were read now, ``late_s`` after they came, come out at the other side."""
        start = max(self._loop.time() - late_s, connected_at)
        rate = self.shape.rate(direction)
        if rate is not None:
            start = self._free_at[direction] = max(start, self._free_at[direction]) + size / rate
        late_ms = self.shape.rtt_ms / 2
        if self.shape.jitter_ms:
            late_ms += self._rng.uniform(0, self.shape.jitter_ms)
        return start + late_ms / 1e3

    def allowance(self, direction: int) -> int | None:
        """How many more bytes pass before a cut; ``None``: no cut is due."""
        ordered = self._cut_after[direction]
        drawn = None if self._cut_in is None else int(self._cut_in)
        return min((count for count in (ordered, drawn) if count is not None), default=None)

    def passed(self, direction: int, size: int) -> bool:
        """Count bytes; whether the connection that passed them is to be cut."""
        self.bytes[direction] += size
        cut = False
        ordered = self._cut_after[direction]
        if ordered is not None:
            cut = ordered <= size
            self._cut_after[direction] = None if cut else ordered - size
        if self._cut_in is not None and self.shape.cut_every_mb:
            self._cut_in -= size
            if self._cut_in < 1:
                self._cut_in = self._rng.expovariate(1 / (self.shape.cut_every_mb * 1e6))
                cut = True
        self.cuts += cut
        return cut

    def stall(self, for_s: float | None) -> None:
        self.stalls += 1
        self.stalled_until = max(self.stalled_until, self._loop.time() + (for_s if for_s is not None else 1e9))

    def resume(self) -> None:
        self.stalled_until = 0.0
        for connection in list(self.connections):
            connection.pump()

    def cut(self, direction: int | None, after_bytes: int) -> None:
        if direction is not None and after_bytes > 0:
            self._cut_after[direction] = after_bytes
            return
        for connection in list(self.connections):
            self.cuts += 1
            connection.abort()

    def stats(self) -> dict[str, Any]:
        return {
            "up_bytes": self.bytes[_UP],
            "down_bytes": self.bytes[_DOWN],
            "connections": len(self.connections),
            "accepted": self.accepted,
            "cuts": self.cuts,
            "stalls": self.stalls,
        }

    def _next_stall(self) -> None:
        self.stall(self.shape.stall_ms / 1e3)
        self._plan_stall()

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        near.setblocking(False)
        if self.down:
            _reset(near)
            return
        self.accepted += 1
        task = self._loop.create_task(self._connect(near, self._loop.time() + self.shape.rtt_ms / 1e3))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, near: socket.socket, connected_at: float) -> None:
        """``connected_at``: when a TCP handshake over this link would have been over."""
        far = socket.socket()
        far.setblocking(False)
        try:
            await self._loop.sock_connect(far, ("127.0.0.1", self._to))
        except OSError:
            far.close()
            _reset(near)
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # only Linux says when bytes came
                end.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.connections.add(Connection(self, near, far, connected_at))


class Connection:
    """Two sockets joined by two pipes."""

    def __init__(self, link: Link, near: socket.socket, far: socket.socket, connected_at: float) -> None:
        self._link = link
        self._ends = (near, far)
        self._pipes = (Pipe(self, link, near, far, _UP, connected_at), Pipe(self, link, far, near, _DOWN, connected_at))

    def pump(self) -> None:
        for pipe in self._pipes:
            pipe.pump()

    def ended(self) -> None:
        if all(pipe.over for pipe in self._pipes):
            self._close()

    def abort(self) -> None:
        """Reset both sides."""
        self._close(_reset)

    def _close(self, close: Any = socket.socket.close) -> None:
        self._link.connections.discard(self)
        for pipe in self._pipes:
            pipe.stop()
        for end in self._ends:
            close(end)


class Pipe:
    """One direction of one connection: bytes wait in order for the time they arrive at."""

    def __init__(
        self,
        connection: Connection,
        link: Link,
        source: socket.socket,
        sink: socket.socket,
        direction: int,
        connected_at: float,
    ) -> None:
        self.over = False
        self._connection = connection
        self._link = link
        self._source = source
        self._sink = sink
        self._direction = direction
        self._connected_at = connected_at
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[float, memoryview]] = deque()
        self._held = 0
        self._latest = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reading = False
        self._blocked = False
        self._stopped = False
        self._read_on()

    def stop(self) -> None:
        self._stopped = True
        self._loop.remove_reader(self._source)
        self._loop.remove_writer(self._sink)
        if self._timer is not None:
            self._timer.cancel()

    def pump(self) -> None:
        """Send what has arrived; the next call is arranged for."""
        while self._queue and not self._blocked and not self._stopped:
            due, data = self._queue[0]
            due = max(due, self._link.stalled_until)
            if due > self._loop.time():
                self._wake_at(due)
                return
            if len(data) == 0:
                self._end()
                return
            self._send(data)

    def _send(self, data: memoryview) -> None:
        allowance = self._link.allowance(self._direction)
        if allowance is not None:
            data = data[: max(1, allowance)]
        try:
            sent = self._sink.send(data)
        except BlockingIOError:
            self._blocked = True
            self._loop.add_writer(self._sink, self._writable)
            return
        except OSError:
            self._connection.abort()
            return
        due, whole = self._queue.popleft()
        if sent < len(whole):
            self._queue.appendleft((due, whole[sent:]))
        self._held -= sent
        if self._link.passed(self._direction, sent):
            self._connection.abort()
        elif not self._reading and self._held < self._link.shape.held_bytes(self._direction):
            self._read_on()

    def _end(self) -> None:
        """The source has closed its side and everything before that has arrived."""
        self._queue.clear()
        self.over = True
        try:
            self._sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._connection.abort()
            return
        self._connection.ended()

    def _read_on(self) -> None:
        if not self._stopped and not self.over:
            self._reading = True
            self._loop.add_reader(self._source, self._readable)

    def _readable(self) -> None:
        try:
            data, told, _, _ = self._source.recvmsg(CHUNK_BYTES, socket.CMSG_SPACE(_TIMESPEC.size))
        except BlockingIOError:
            return
        except OSError:
            self._connection.abort()
            return
        due = self._link.arrival(self._direction, len(data), self._connected_at, _late_s(told))
        self._latest = max(self._latest, due)
        self._queue.append((self._latest, memoryview(data)))
        self._held += len(data)
        if not data or self._held >= self._link.shape.held_bytes(self._direction):
            self._loop.remove_reader(self._source)
            self._reading = not data  # an ended source is not read again
        if len(self._queue) == 1:
            self.pump()

    def _writable(self) -> None:
        self._loop.remove_writer(self._sink)
        self._blocked = False
        self.pump()

    def _wake_at(self, due: float) -> None:
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self.pump()


class Control:
    """What the process is asked, one JSON object a line."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._links: dict[str, Link] = {}

    def answer(self, line: bytes) -> dict[str, Any]:
        request: dict[str, Any] = {}
        try:
            request = json.loads(line)
            return {"id": request.get("id"), "ok": True, **self._do(request)}
        except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
            identifier = request.get("id") if isinstance(request, dict) else None
            return {"id": identifier, "ok": False, "error": f"{type(error).__name__}: {error}"}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        verb = request["do"]
        if verb == "stats":
            return {"links": {name: link.stats() for name, link in self._links.items()}}
        name = request["link"]
        asked = {field.name: request[field.name] for field in fields(Shape) if field.name in request}
        if verb == "open":
            if name in self._links:
                raise ValueError(f"link {name} is open already")
            host, port = str(request.get("host", "127.0.0.1")), int(request.get("port", 0))
            if not ipaddress.ip_address(host).is_loopback:
                raise ValueError(f"{host} is no address of loopback")
            link = self._links[name] = Link(name, int(request["to"]), Shape(**asked), self._seed, host, port)
            return {"port": link.port}
        link = self._links[name]
        if verb == "set":
            link.reshape(replace(link.shape, **asked))
        elif verb == "stall":
            link.stall(request.get("for_s"))
        elif verb == "resume":
            link.resume()
        elif verb == "cut":
            direction = request.get("direction")
            link.cut(None if direction is None else _DIRECTIONS[direction], int(request.get("after_bytes", 0)))
        elif verb == "down":
            link.down = bool(request["on"])
            if link.down:
                link.cut(None, 0)
        else:
            raise ValueError(f"there is nothing like {verb}")
        return {}


def _late_s(told: list[tuple[int, int, bytes]]) -> float:
    """How long ago the system received the bytes that were read now (the last of them); 0 if it does not say."""
    for level, kind, stamp in told:
        if (level, kind, len(stamp)) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS, _TIMESPEC.size):
            seconds, nanoseconds = _TIMESPEC.unpack(stamp)
            late_s = (time.time_ns() - seconds * 10**9 - nanoseconds) / 1e9
            return late_s if 0 <= late_s <= _MOST_LATE_S else 0.0
    return 0.0


def _reset(end: socket.socket) -> None:
    """Close with an RST instead of a FIN."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def _loop() -> asyncio.AbstractEventLoop:
    """A loop whose timers are right to some microseconds; epoll alone waits in whole milliseconds."""
    if not hasattr(selectors, "EpollSelector"):
        return asyncio.new_event_loop()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1)

    class Precise(selectors.EpollSelector):
        def select(self, timeout: float | None = None) -> Any:
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            if timeout > SPIN_S:
                # A long sleep ends late, in proportion; so most of it first, and the loop comes back for the rest.
                part_s = timeout - SPIN_S if timeout < 5e-4 else max(timeout * 0.97 - 4e-4, 1e-4)
                select.select([self.fileno()], [], [], part_s)
                return super().select(0)
            until = time.monotonic() + timeout
            while not (events := super().select(0)) and time.monotonic() < until:
                pass
            return events

    return asyncio.SelectorEventLoop(Precise())


async def _serve(seed: int) -> None:
    loop = asyncio.get_running_loop()
    control = Control(seed)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(control.answer(line)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvasir_console.bench.delay", description="The delay proxy.")
    parser.add_argument("--seed", type=int, default=0)
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(_serve(parser.parse_args().seed))


if __name__ == "__main__":
    main()
