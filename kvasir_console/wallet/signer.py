"""The signer process: it alone holds the wallet's key, from unlock to lock.

    python -m kvasir_console.child PARENT kvasir_console.wallet.signer --vault FILE --socket PATH --host HOST[:PORT]
        [--kinds KIND ...] [--cluster GENESIS --mint ADDRESS] [--idle-lock-s S]

It answers control messages on a Unix socket that only this user can reach:

    status                       -> {locked, address, host, second_factor}
    unlock {passphrase}          -> the same
    lock                         -> the same
    contacts                     -> {contacts: {name: address}}
    sign {intent: {...}, code?}  -> {signature: base64, text}  (``wallet.intents``; nothing else is ever signed)
    exit                         -> {}

``text`` is what was signed, and for a transfer its description. Transfers count against the day's limit and need a
one-time code where a second factor is enrolled. The key is wiped by ``lock``, after an idle time if one is set, when
the machine was suspended, on SIGTERM or SIGHUP, and so when the process that started this one is gone (``child``).
Passphrases and keys stand in no log, no error and no ``repr``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from kvasir_console import logs
from kvasir_console.child import forbid_core_dumps
from kvasir_console.errors import KvasirError, SystemResourceError
from kvasir_console.paths import check_socket_path, private_directory
from kvasir_console.relay.wire import control
from kvasir_console.wallet import private_file
from kvasir_console.wallet.peer import check_same_user
from kvasir_console.wallet.signer_core import Signer

__all__ = ["MAX_CONNECTIONS", "Signer", "main", "serve"]

MAX_MESSAGE_BYTES = 128 * 2**10
MAX_CONNECTIONS = 32
REQUEST_TIMEOUT_S = 30.0
WATCH_S = 1.0

_log = logging.getLogger(__name__)


async def serve(signer: Signer, path: Path) -> None:
    """Answer requests on ``path`` until the signer stops; then lock and remove it.

    Raises:
        SystemResourceError: another signer answers there, or the socket cannot be made.
    """
    listener = _listen(path)
    connections: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[asyncio.current_task()] = writer
        try:
            if len(connections) <= MAX_CONNECTIONS:
                check_same_user(writer)
                await _converse(signer, reader, writer)
        except (KvasirError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            _log.debug("a connection ended: %s", type(error).__name__)
        finally:
            del connections[asyncio.current_task()]
            writer.close()

    server = await asyncio.start_unix_server(connection, sock=listener)
    watch = asyncio.create_task(_watch(signer))
    try:
        await signer.stopping.wait()
    finally:
        signer.lock()
        watch.cancel()
        server.close()
        for writer in connections.values():
            writer.close()
        await asyncio.gather(*filter(None, connections))  # each sees its end and returns
        await server.wait_closed()
        path.unlink(missing_ok=True)


async def _converse(signer: Signer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not signer.stopping.is_set():
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            message = await control.read_message(reader, MAX_MESSAGE_BYTES)
        await control.write_message(writer, await signer.handle(message))


async def _watch(signer: Signer) -> None:
    """Lock when idle or suspended."""
    while True:
        await asyncio.sleep(WATCH_S)
        signer.lock_if_left()


def _listen(path: Path) -> socket.socket:
    check_socket_path(path)
    if path.parent.exists():
        private_file.check_directory(path.parent)
    else:
        private_directory(path.parent)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1.0)
        # A socket file that nobody answers is what a killed signer left.
        if probe.connect_ex(os.fspath(path)) == 0:
            raise SystemResourceError("signer_running", f"Another signer answers at {path}.", "Stop that one first.")
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise SystemResourceError("socket_unavailable", f"No socket can be made at {path}: {error.strerror}.") from None
    finally:
        os.umask(mask)
    return listener


async def _run(arguments: argparse.Namespace) -> None:
    signer = Signer(
        arguments.vault,
        arguments.host,
        kinds=arguments.kinds,
        cluster=arguments.cluster,
        mint=arguments.mint,
        idle_lock_s=arguments.idle_lock_s,
    )
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(each, signer.stopping.set)
    # Ctrl-C reaches every process of the terminal; the console decides when the signer goes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    await serve(signer, arguments.socket)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvasir-console signer", description="Holds a wallet's key and signs intents."
    )
    parser.add_argument("--vault", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--host", required=True, help="the gateway every signature is bound to: host or host:port")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="kinds of intents that are signed (default: all)")
    parser.add_argument(
        "--cluster", default="", help="genesis hash of the cluster that transfers are bound to (none: none is signed)"
    )
    parser.add_argument("--mint", default="", help="the KVR token's mint on that cluster")
    parser.add_argument("--idle-lock-s", type=float, default=0.0, help="lock after so many idle seconds (0: never)")
    arguments = parser.parse_args(argv)
    forbid_core_dumps()
    logs.configure(to_stderr=True)
    try:
        asyncio.run(_run(arguments))
    except KvasirError as error:
        _log.error("%s", error)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
