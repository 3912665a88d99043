"""The engine's two sockets: control messages on one, spliced byte streams on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvasir_console.engine.process.router import Router
from kvasir_console.engine.process.verbs import ENTRY_VERBS, Engine, VerbSession
from kvasir_console.paths import check_socket_path
from kvasir_console.relay.wire.preamble import Kind, Preamble, PreambleError, read_preamble

log = logging.getLogger(__name__)

PREAMBLE_TIMEOUT_S = 10.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class EngineServer:
    """Listens on ``NAME.ctl`` and ``NAME.data`` in the private runtime directory until ``exit``."""

    def __init__(self, engine: Engine, runtime: Path, name: str) -> None:
        self._engine = engine
        self._control = check_socket_path(runtime / f"{name}.ctl")
        self._data = check_socket_path(runtime / f"{name}.data")
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        servers = [
            await _listen(self._control, self._accept(self._serve_control)),
            await _listen(self._data, self._accept(self._serve_data)),
        ]
        log.info("the engine listens on %s", self._control)
        try:
            await self._engine.exiting.wait()
        finally:
            for server in servers:
                server.close()
            for task in self._tasks:
                task.cancel()
            for path in (self._control, self._data):
                path.unlink(missing_ok=True)

    def _accept(self, serve: Serve) -> Serve:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - asyncio runs every connection in a task
            self._tasks.add(task)
            try:
                await serve(reader, writer)
            except (OSError, EOFError) as error:
                log.debug("a connection ended: %r", error)
            except asyncio.CancelledError:
                pass  # the process is leaving
            except Exception:
                log.exception("a connection failed")
            finally:
                self._tasks.discard(task)
                with contextlib.suppress(OSError):
                    writer.close()

        return accepted

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await VerbSession(self._engine, reader, writer).run()

    async def _serve_data(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PREAMBLE_TIMEOUT_S):
                preamble = await read_preamble(reader)
            await self._route(preamble, reader, writer)
        except (PreambleError, TimeoutError, ValueError) as error:
            log.warning("a data connection is refused: %s", error)

    async def _route(self, preamble: Preamble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loaded = self._engine.loaded
        if loaded is None:
            raise ValueError("nothing is loaded yet")
        if preamble.kind is Kind.DISPATCH and loaded.router is not None:
            await loaded.router.serve(preamble, reader, writer)
        elif preamble.kind is Kind.ROUTER and loaded.router is not None:
            await _serve_worker(loaded.router, reader, writer)
        elif preamble.kind is Kind.EXPERTS and loaded.experts is not None:
            await loaded.experts.serve(preamble, reader, writer)
        elif preamble.kind is Kind.RING_NEXT and loaded.ring is not None:
            await loaded.ring.serve_next(reader, writer)
        elif preamble.kind is Kind.RING_PREV and loaded.ring is not None:
            await loaded.ring.serve_prev(reader, writer)
        elif preamble.kind is Kind.ENTRY and loaded.generator is not None:
            await VerbSession(self._engine, reader, writer, allowed=ENTRY_VERBS).run()
        else:
            raise ValueError(f"this engine's load does not serve {preamble.kind.name}")


async def _serve_worker(router: Router, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the hub joins a worker to this session, which it says first. Raises ``ValueError``."""
    worker = await read_preamble(reader)
    if worker.kind is not Kind.DISPATCH:
        raise PreambleError(f"a worker's session began as {worker.kind.name}")
    await router.serve(worker, reader, writer)


async def _listen(path: Path, serve: Serve) -> asyncio.Server:
    path.unlink(missing_ok=True)
    previous = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(serve, str(path), limit=2**20)
    finally:
        os.umask(previous)
