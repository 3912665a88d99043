"""HTTP and WebSocket around the ledger: loopback only, one path, a bearer check before anything is read, and one
worker thread.

The ledger and its SQLite file belong to that thread, so the order of calls is the order of slots, and a write that
waits for the disk never holds up the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from kvasir_console.errors import SystemResourceError
from kvasir_console.wallet.localnet import rpc
from kvasir_console.wallet.localnet.ledger import Ledger
from kvasir_console.wallet.localnet.methods import METHODS
from kvasir_console.wallet.localnet.subscriptions import Subscriptions

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 * 1024
MAX_CONNECTIONS = 256
_JSON = "application/json"
_T = TypeVar("_T")

OnLedger = Callable[[Callable[[Ledger], _T]], Awaitable[_T]]
"""Runs a function with the ledger, on the ledger's thread."""


def make_app(auth: str, run: OnLedger[Any], slot_s: float, *, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The application: ``POST /`` and a WebSocket at ``/``, both with ``Authorization: <auth>``.

    A POST answers 401 without the right header, 413 above ``max_body_bytes``, 204 when no reply is wanted, else 200
    with JSON-RPC.
    """

    def known(connection: Request | WebSocket) -> bool:
        return hmac.compare_digest(connection.headers.get("authorization", "").encode(), auth.encode())

    async def handle(request: Request) -> Response:
        if not known(request):
            return _refusal(401, "this RPC needs its Authorization header", {"WWW-Authenticate": "Bearer"})
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_body_bytes:
                    return _refusal(413, f"a request has at most {max_body_bytes} bytes", {"Connection": "close"})
        except ClientDisconnect:
            return Response(status_code=400)
        reply = await run(lambda ledger: rpc.answer(ledger, METHODS, bytes(body)))
        return Response(status_code=204) if reply is None else Response(reply, media_type=_JSON)

    async def subscribe(socket: WebSocket) -> None:
        if not known(socket):
            await socket.send_denial_response(_refusal(401, "this RPC needs its Authorization header", {}))
            return
        await socket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            await _serve_subscriptions(socket, run, slot_s)

    return Starlette(routes=[Route("/", handle, methods=["POST"]), WebSocketRoute("/", subscribe)])


async def _serve_subscriptions(socket: WebSocket, run: OnLedger[Any], slot_s: float) -> None:
    """Answer the client and, while it waits for something, look every slot whether that has come."""
    subscriptions = Subscriptions()
    incoming: asyncio.Task[bytes] | None = None
    try:
        while True:
            incoming = incoming or asyncio.create_task(_receive(socket))
            done, _ = await asyncio.wait({incoming}, timeout=slot_s if subscriptions.waiting else None)
            if done:
                message, incoming = incoming.result(), None
                reply = await run(partial(_answer, subscriptions, message))
                if reply is not None:
                    await socket.send_text(reply.decode())
            for notification in await run(subscriptions.due) if subscriptions.waiting else ():
                await socket.send_text(notification.decode())
    finally:
        if incoming is not None:
            incoming.cancel()


def _answer(subscriptions: Subscriptions, message: bytes, ledger: Ledger) -> bytes | None:
    return subscriptions.answer(ledger, message)


async def _receive(socket: WebSocket) -> bytes:
    """The next message, text or binary alike. Raises ``WebSocketDisconnect``."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text = message.get("text")
    return text.encode() if text is not None else bytes(message["bytes"])


def _refusal(status: int, message: str, headers: dict[str, str]) -> Response:
    return Response(json.dumps({"error": message}), status_code=status, headers=headers, media_type=_JSON)


async def serve(
    directory: Path, port: int, auth: str, *, slot_ms: int, ready: Callable[[int, str], None] | None = None
) -> None:
    """Open the ledger in ``directory`` and serve it until SIGTERM or SIGINT.

    Args:
        port: TCP port on 127.0.0.1; 0 takes a free one.
        auth: value of the ``Authorization`` header to ask for.
        ready: called once with the port and the genesis hash when requests are accepted.

    Raises:
        SystemResourceError: the port or the ledger file is not available.
        LedgerError: the ledger file is damaged.
    """
    loop = asyncio.get_running_loop()
    with _listen(port) as listener, ThreadPoolExecutor(1, "ledger") as worker:
        ledger = await loop.run_in_executor(worker, lambda: Ledger.open(directory, slot_ms=slot_ms))
        try:
            app = make_app(auth, lambda do: loop.run_in_executor(worker, do, ledger), ledger.slot_ms / 1000)
            config = uvicorn.Config(
                app,
                http="h11",
                ws="websockets-sansio",
                ws_max_size=MAX_BODY_BYTES,
                ws_max_queue=8,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
            server = _Server(config, lambda: ready(listener.getsockname()[1], ledger.genesis_hash) if ready else None)
            await server.serve(sockets=[listener])
        finally:
            await loop.run_in_executor(worker, ledger.close)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT. The inherited form raises the signal again afterwards, which would end the
        process before the ledger is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _listen(port: int) -> socket.socket:
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it each answer waits 40 ms for an ACK.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise SystemResourceError(
            "port_unavailable",
            f"The ledger cannot listen on {HOST}:{port}: {error.strerror or error}.",
            "Stop what uses the port, or give --port 0 for a free one.",
        ) from error
    return listener
