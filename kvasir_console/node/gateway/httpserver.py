"""The HTTP server: uvicorn on a Unix socket, in the loop of whoever runs it."""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from kvasir_console.errors import EngineError


@asynccontextmanager
async def serving(app: Starlette, socket: Path) -> AsyncIterator[None]:
    """Serve ``app`` on a Unix socket; answers that run at the end have two seconds to be completed."""
    socket.unlink(missing_ok=True)
    server = _Server(
        uvicorn.Config(
            app,
            uds=str(socket),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    task = asyncio.create_task(server.serve(), name="gateway-http")
    try:
        ready = asyncio.create_task(server.listening.wait())
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            task.result()
            raise EngineError("http_not_started", "The HTTP server of the gateway did not start.", "Read the log.")
        yield
    finally:
        server.should_exit = True
        await task
        socket.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process is stopped by whoever runs the service."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[sockets.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.listening.set()
