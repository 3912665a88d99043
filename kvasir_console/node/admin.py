"""The node's own socket: a console attaches to a running node, a script asks it for its state.

Only this user can reach it (a 0600 socket in a 0700 directory). Verbs: ``status``, ``claim``, ``unlock``, ``stop``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kvasir_console.errors import KvasirError, NetworkError, SystemResourceError, UsageError
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.paths import check_socket_path
from kvasir_console.relay.wire import control

log = logging.getLogger(__name__)

Handler = Callable[[control.Message], Awaitable[dict[str, Any]]]


class AdminServer:
    """Serves control messages with the handlers it is given."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self._path = check_socket_path(path)
        self._handlers = handlers

    async def __aenter__(self) -> AdminServer:
        if self._path.exists() and await _answers(self._path):
            raise SystemResourceError(
                "node_already_runs",
                f"Another node already runs with this home (it answers on {self._path}).",
                "Stop it, or set KVASIR_HOME to another folder.",
            )
        self._path.unlink(missing_ok=True)
        previous = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        finally:
            os.umask(previous)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                message = await control.read_message(reader, limit=64 * 1024)
                await control.write_message(writer, await self._answer(message))
        except (EOFError, OSError, KvasirError, asyncio.CancelledError):
            pass  # the other end left, or sent something that is not a message
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _answer(self, message: control.Message) -> control.Message:
        handler = self._handlers.get(str(message.get("verb")))
        try:
            if handler is None:
                raise UsageError("unknown_verb", f"The node takes no verb {message.get('verb')!r}.")
            return control.reply(message, **await handler(message))
        except KvasirError as error:
            return control.failure(message, error)


class AdminClient:
    """One connection to a running node's socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, verb: str, **fields: Any) -> control.Message:
        """Raises ``NetworkError`` when no node answers there, or the error the node sent."""
        async with self._lock:
            try:
                if self._stream is None:
                    self._stream = await asyncio.open_unix_connection(str(self._path))
                reader, writer = self._stream
                await control.write_message(writer, {"id": 1, "verb": verb, **fields})
                message = await control.read_message(reader)
            except (OSError, EOFError) as error:
                self._stream = None
                raise NetworkError(
                    "no_node_there", f"No node answers on {self._path}.", "Start one with kvasir-console --headless."
                ) from error
        if "error" in message:
            raise KvasirError.from_dict(message["error"])
        return message

    async def snapshot(self) -> NodeSnapshot:
        return NodeSnapshot.from_json((await self.call("status"))["snapshot"])

    async def close(self) -> None:
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None


async def _answers(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True
