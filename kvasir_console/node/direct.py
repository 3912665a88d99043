"""A node's ring edges that bypass the relay: who may knock, whom to dial, and which relay session stands aside.

Off unless ``node.direct`` is set. An edge goes through the relay first, and whenever its direct path is gone; the
engine takes whichever connection said HELLO last, and nothing is lost by a change (``docs/reliability.md``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir_console.config import NodeConfig
from kvasir_console.errors import ConfigError, KvasirError
from kvasir_console.relay.backoff import Backoff
from kvasir_console.relay.direct import (
    Carry,
    DirectListener,
    Identity,
    Introduction,
    dial,
    on_loopback,
    parse_address,
    parse_listen,
    same_ticket,
)
from kvasir_console.relay.splice import SocketEnd, pump, race
from kvasir_console.relay.uplink import Uplink
from kvasir_console.relay.wire.preamble import Preamble

log = logging.getLogger(__name__)

STEADY_S = 30.0
"""A direct edge that lasted so long was worth it: the next try comes soon."""
ENGINE_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 10.0
"""A path over which the other engine says nothing at all for so long is given up; the relay has the edge until then."""
MAX_AT_ONCE = 2
"""Connections of one edge: the one that works, and one that is to replace it."""


@dataclass(slots=True, eq=False)
class _Edge:
    """One end of an edge. ``live`` connections carry it past the relay."""

    introduction: Introduction
    preamble: Preamble
    uplink: Uplink
    live: int = 0
    since: float = 0.0
    """When a direct path began to carry it, on the event loop's clock."""
    bytes_up: int = 0
    bytes_down: int = 0
    trouble: str = ""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class DirectView:
    """What carries a session instead of its uplink. ``since_s`` is how long ago it began."""

    since_s: float
    bytes_up: int
    bytes_down: int


class DirectEdges:
    """``start``, then ``follow`` whatever the gateway says; ``close`` ends all."""

    def __init__(self, config: NodeConfig, gateway: str, engine_socket: Path) -> None:
        """Raises ``ConfigError`` for addresses that are none."""
        self.enabled = config.direct
        self._listen = config.direct_listen
        self._address = config.direct_address or config.direct_listen
        self._loopback = on_loopback(gateway)
        self._engine_socket = engine_socket
        self._identity: Identity | None = None
        self._listener: DirectListener | None = None
        self._edges: dict[tuple[str, int, str], _Edge] = {}
        check(config)

    async def start(self) -> None:
        """Listen, if the owner wants that. Raises ``ConfigError`` if it cannot be had."""
        if not self.enabled or not self._listen:
            return
        self._identity = await asyncio.to_thread(Identity.make)
        self._listener = DirectListener(self._identity, self._admit)
        await self._listener.start(self._listen)
        host, port = parse_listen(self._address)
        self._address = self._address if port else f"{host}:{self._listener.port}"
        log.info("neighbours of a ring are listened for on %s", self._address)

    def announcement(self) -> dict[str, str] | None:
        """For the coverage report: where this node is reached, and by which certificate it is known."""
        if self._identity is None:
            return None
        return {"address": self._address, "certificate": self._identity.fingerprint}

    @property
    def live(self) -> bool:
        """Whether any edge bypasses the relay now."""
        return any(edge.live for edge in self._edges.values())

    def view(self, session: str) -> DirectView | None:
        """What carries ``session``, if that is not its uplink."""
        edge = next((each for each in self._edges.values() if each.live and each.preamble.session == session), None)
        if edge is None:
            return None
        return DirectView(asyncio.get_running_loop().time() - edge.since, edge.bytes_up, edge.bytes_down)

    async def follow(
        self, introductions: Iterable[Introduction], sessions: Mapping[str, tuple[Preamble, Uplink]]
    ) -> None:
        """Keep to what the gateway says now. ``sessions`` by name, ``ring/edge/role``."""
        wanted = {(each.ring, each.edge, each.role): each for each in introductions}
        for key, edge in list(self._edges.items()):
            if not _stands(edge.introduction, wanted.get(key)):
                await self._end(key)
        for key, introduction in wanted.items():
            found = sessions.get("/".join(map(str, key)))
            if key in self._edges or found is None:
                continue
            edge = self._edges[key] = _Edge(introduction, *found)
            if introduction.role == "P" and introduction.address:
                self._start(edge, self._keep_dialling(edge))

    async def drop(self) -> None:
        """End every edge; the listener stays."""
        for key in list(self._edges):
            await self._end(key)

    async def close(self) -> None:
        await self.drop()
        if self._listener is not None:
            await self._listener.close()
            self._listener = None

    def _start(self, edge: _Edge, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"direct {edge.preamble.session}")
        edge.tasks.add(task)
        task.add_done_callback(edge.tasks.discard)

    async def _end(self, key: tuple[str, int, str]) -> None:
        edge = self._edges.pop(key)
        tasks = list(edge.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_dialling(self, edge: _Edge) -> None:
        backoff = Backoff()
        while True:
            started = time.monotonic()
            try:
                other = await dial(edge.introduction, loopback=self._loopback)
            except KvasirError as error:
                if error.message != edge.trouble:
                    log.info("edge %s: %s", edge.preamble.session, error)
                edge.trouble = error.message
            else:
                edge.trouble = ""
                try:
                    await self._carry(edge, other)
                finally:
                    await other.close()
            if time.monotonic() - started > STEADY_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def _admit(self, ring: str, number: int, ticket: bytes) -> Carry | None:
        edge = self._edges.get((ring, number, "N"))
        if edge is None or not same_ticket(edge.introduction.ticket, ticket) or len(edge.tasks) >= MAX_AT_ONCE:
            return None

        async def carry(other: SocketEnd) -> None:
            task = asyncio.current_task()
            if task is not None:
                edge.tasks.add(task)
                task.add_done_callback(edge.tasks.discard)
            await self._carry(edge, other)

        return carry

    async def _carry(self, edge: _Edge, other: SocketEnd) -> None:
        """Join the other end to this node's engine until one of them ends.

        The relay's session stands aside once the other engine has said something.
        """
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_S):
                engine = SocketEnd(*await asyncio.open_unix_connection(self._engine_socket))
        except OSError:  # a timeout is one too
            return
        heard = asyncio.Event()

        def up(size: int) -> None:
            edge.bytes_up += size

        def down(size: int) -> None:
            edge.bytes_down += size
            if not heard.is_set():
                heard.set()
                edge.live += 1
                edge.since = asyncio.get_running_loop().time()
                edge.uplink.stand_aside()
                log.info("edge %s goes past the relay", edge.preamble.session)

        async def silence() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    await heard.wait()
                await asyncio.Event().wait()  # from now on the engines look after each other

        try:
            await engine.write(edge.preamble.encode())
            await race(pump(other, engine, down), pump(engine, other, up), silence())
        except ConnectionError:
            pass  # one side is gone
        finally:
            edge.live -= heard.is_set()
            if heard.is_set() and not edge.live:
                log.info("edge %s goes through the relay again", edge.preamble.session)
                edge.uplink.resume()
            await engine.close()


def _stands(known: Introduction, now: Introduction | None) -> bool:
    """Whether an edge may stay as it is. A gateway that was started again knows nobody's address for a while."""
    if now is None or now.ticket != known.ticket:
        return False
    return not now.address or (now.address, now.certificate) == (known.address, known.certificate)


def check(config: NodeConfig) -> None:
    """Raises ``ConfigError`` for addresses that are none, or that nothing would come of."""
    for name, text, parse in (
        ("direct_listen", config.direct_listen, parse_listen),
        ("direct_address", config.direct_address, parse_address),
    ):
        if not text:
            continue
        try:
            parse(text)
        except ValueError as error:
            raise ConfigError("bad_direct", f"node.{name}: {error}.", "Write HOST:PORT.") from error
        if not config.direct:
            raise ConfigError("bad_direct", f"node.{name} is set, node.direct is not.", "Set node.direct = true.")
    if config.direct_address and not config.direct_listen:
        raise ConfigError("bad_direct", "node.direct_address needs node.direct_listen.", "Say where to listen.")
