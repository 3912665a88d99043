"""The node's own socket: a console attaches to a running node, a script asks it for its state.

Only this user can reach it (a 0600 socket in a 0700 directory, and both ends look who the other is). Verbs: ``status``,
``claim``, ``unlock``, ``lock``, ``stop``, and ``differ`` (``overrides``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kvasir_console.errors import KvasirError, NetworkError, SystemResourceError, UsageError
from kvasir_console.node.snapshot import NodeSnapshot
from kvasir_console.paths import check_socket_path
from kvasir_console.relay.wire import control
from kvasir_console.wallet.peer import check_same_user

log = logging.getLogger(__name__)

Handler = Callable[[control.Message], Awaitable[dict[str, Any]]]


class AdminServer:
    """Serves control messages with the handlers it is given.

    A lock file beside the socket, held for the server's life, keeps a second node with the same home out; the kernel
    lets it go whatever ends the first one, and the socket file that a killed node left is then replaced.
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self._path = check_socket_path(path)
        self._handlers = handlers
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> AdminServer:
        """Raises ``SystemResourceError``: another node holds this socket, or it cannot be made."""
        try:
            self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._path.unlink(missing_ok=True)
                previous = os.umask(0o177)
                try:
                    self._server = await asyncio.start_unix_server(self._serve, str(self._path))
                finally:
                    os.umask(previous)
            except BaseException:
                os.close(self._lock)
                raise
        except BlockingIOError as error:
            raise SystemResourceError(
                "node_already_runs",
                f"Another node already runs with this home (it holds {self._path}).",
                "Stop it, or set KVASIR_HOME to another folder.",
            ) from error
        except OSError as error:
            raise SystemResourceError(
                "socket_unavailable", f"No socket can be made at {self._path}: {error.strerror or error}."
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            check_same_user(writer)
            while True:
                message = await control.read_message(reader, limit=64 * 1024)
                await control.write_message(writer, await self._answer(message))
        except (EOFError, OSError, KvasirError, asyncio.CancelledError):
            pass  # the other end left, or sent something that is not a message
        finally:
            self._writers.discard(writer)
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
        except Exception:
            log.exception("the verb %s failed", message.get("verb"))
            return control.failure(message, KvasirError("internal", "The node failed on this; its log says why."))


class AdminClient:
    """One connection to a running node's socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, verb: str, **fields: Any) -> control.Message:
        """Raises ``NetworkError`` when no node answers there, ``WalletError`` ``other_user`` when it is another user's,
        or the error the node sent."""
        async with self._lock:
            try:
                if self._stream is None:
                    self._stream = await asyncio.open_unix_connection(str(self._path))
                    check_same_user(self._stream[1])  # a passphrase may be sent, and the path is no secret
                reader, writer = self._stream
                await control.write_message(writer, {"id": 1, "verb": verb, **fields})
                message = await control.read_message(reader)
            except (OSError, EOFError) as error:
                await self.close()
                raise NetworkError(
                    "no_node_there",
                    f"No node answers on {self._path}.",
                    "Start one with kvasir-console --headless, or set KVASIR_HOME to that of the one that runs.",
                ) from error
            except BaseException:
                await self.close()  # a late answer would be taken for the next call's
                raise
        if "error" in message:
            raise KvasirError.from_dict(message["error"])
        return message

    async def snapshot(self) -> NodeSnapshot:
        """Raises ``NetworkError`` as ``call``, and for a node of another version whose state reads differently."""
        message = await self.call("status")
        try:
            return NodeSnapshot.from_json(message["snapshot"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NetworkError(
                "snapshot_malformed",
                "The running node describes itself in another form than this program reads.",
                "It is probably of another version: start it again.",
            ) from error

    async def close(self) -> None:
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None
