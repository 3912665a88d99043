"""The signer process: it alone holds the wallet's key, from unlock to lock.

    python -m kvasir_console.wallet.signer --vault FILE --socket PATH --host HOST[:PORT] [--idle-lock-s S]

It answers control messages on a Unix socket that only this user can reach:

    status                -> {locked, address, host}
    unlock {passphrase}   -> {locked, address, host}
    lock                  -> {locked, address, host}
    sign {intent: {...}}  -> {signature: base64, text}     (``wallet.intents``; nothing else is ever signed)
    exit                  -> {}

The key is wiped by ``lock``, after an idle time if one is set, on SIGTERM or SIGHUP, and when the process that started
it is gone. Passphrases and keys stand in no log, no error and no ``repr``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from kvasir_console import logs
from kvasir_console.errors import KvasirError, SystemResourceError, UsageError, WalletError
from kvasir_console.paths import check_socket_path, private_directory
from kvasir_console.relay.wire import control
from kvasir_console.wallet import intents, private_file
from kvasir_console.wallet.keys import Key
from kvasir_console.wallet.peer import check_same_user
from kvasir_console.wallet.vault import open_vault, public_accounts

MAX_MESSAGE_BYTES = 128 * 2**10
MAX_CONNECTIONS = 32
REQUEST_TIMEOUT_S = 30.0
MAX_UNLOCK_DELAY_S = 60.0
PARENT_POLL_S = 1.0

_PR_SET_DUMPABLE = 4
_log = logging.getLogger(__name__)


class Signer:
    """The key, and the rules of its use. Knows no socket."""

    def __init__(
        self,
        vault: Path,
        host: str,
        *,
        idle_lock_s: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Read the vault's address. Raises ``WalletError`` if there is no readable vault.

        Args:
            host: the gateway's host, or host and port, that every intent must name.
            idle_lock_s: lock after so long without a signature or an unlock; 0 never.
        """
        self._vault, self._host, self._idle_lock_s = vault, host, idle_lock_s
        self._monotonic, self._now = monotonic, now
        self._address = public_accounts(vault)[0].address
        self._key: Key | None = None
        self._unlocking = asyncio.Lock()
        self._locks = 0
        self._failures = 0
        self._next_try_s = 0.0
        self._used_s = monotonic()
        self.stopping = asyncio.Event()

    async def handle(self, message: control.Message) -> control.Message:
        """The reply to one request; a refusal is a reply too."""
        try:
            match message.get("verb"):
                case "status":
                    return control.reply(message, **self._status())
                case "unlock":
                    await self._unlock(message.pop("passphrase", None))
                    return control.reply(message, **self._status())
                case "lock":
                    self.lock()
                    return control.reply(message, **self._status())
                case "sign":
                    return control.reply(message, **self._sign(message.get("intent")))
                case "exit":
                    self.lock()
                    self.stopping.set()
                    return control.reply(message)
                case _:
                    raise UsageError("unknown_verb", "The signer knows status, unlock, lock, sign and exit.")
        except KvasirError as error:
            return control.failure(message, error)
        except Exception as error:
            # The text of a foreign exception may repeat what it choked on; its type cannot.
            _log.error("a request failed with %s", type(error).__name__)
            return control.failure(message, WalletError("signer_failed", "The signer could not do that."))

    def lock(self) -> None:
        """Wipe the key. An unlock that is still deriving comes to nothing."""
        self._locks += 1
        if self._key is not None:
            self._key.wipe()
            self._key = None
            _log.info("locked")

    def lock_if_idle(self) -> None:
        if self._key is not None and self._idle_lock_s and self._monotonic() - self._used_s >= self._idle_lock_s:
            self.lock()

    def _status(self) -> dict[str, object]:
        return {"locked": self._key is None, "address": self._address, "host": self._host}

    async def _unlock(self, passphrase: object) -> None:
        if not isinstance(passphrase, str):
            raise UsageError("passphrase_missing", "To unlock, give a passphrase.")
        async with self._unlocking:
            wait_s = self._next_try_s - self._monotonic()
            if wait_s > 0:
                raise WalletError(
                    "unlock_throttled", "Too many wrong passphrases.", f"Try again in {wait_s:.0f} seconds."
                )
            before = self._locks
            try:
                key = await asyncio.to_thread(_open_key, self._vault, passphrase)
            except WalletError as error:
                if error.code == "wrong_passphrase":
                    self._failures += 1
                    self._next_try_s = self._monotonic() + min(2.0 ** (self._failures - 1), MAX_UNLOCK_DELAY_S)
                    _log.warning("wrong passphrase, attempt %d", self._failures)
                raise
            self._failures = 0
            if self._locks != before:
                key.wipe()
                raise WalletError("wallet_locked", "The wallet was locked while it was being unlocked.")
            if self._key is not None:
                self._key.wipe()
            self._key, self._address, self._used_s = key, key.address, self._monotonic()
            _log.info("unlocked %s", key.address)

    def _sign(self, fields: object) -> dict[str, object]:
        intent = intents.parse(fields)
        text = intent.text(intents.Context(self._host, self._address, self._now()))
        self.lock_if_idle()
        if self._key is None:
            raise WalletError("wallet_locked", "The wallet is locked.", "Unlock it first.")
        signature = self._key.sign(text.encode())
        self._used_s = self._monotonic()
        _log.info("signed: %s", intent.describe().replace("\n", ";"))
        return {"signature": base64.b64encode(signature).decode(), "text": text}


def _open_key(vault: Path, passphrase: str) -> Key:
    with open_vault(vault, passphrase) as opened:
        return opened.key()


async def serve(signer: Signer, path: Path) -> None:
    """Answer requests on ``path`` until the signer stops or this process is orphaned; then lock and remove it.

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
    parent = asyncio.create_task(_watch(signer, os.getppid()))
    try:
        await signer.stopping.wait()
    finally:
        signer.lock()
        parent.cancel()
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


async def _watch(signer: Signer, parent: int) -> None:
    """Lock when idle; stop when the process that started this one is gone."""
    # The kernel's own notice (PR_SET_PDEATHSIG) fires when the starting *thread* ends, which is too early.
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_POLL_S)
        signer.lock_if_idle()
    _log.warning("the process that started the signer is gone")
    signer.stopping.set()


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


def harden() -> None:
    """Leave no core dump and let no other program of this user read the memory. Best effort."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


async def _run(arguments: argparse.Namespace) -> None:
    signer = Signer(arguments.vault, arguments.host, idle_lock_s=arguments.idle_lock_s)
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
    parser.add_argument("--idle-lock-s", type=float, default=0.0, help="lock after so many idle seconds (0: never)")
    arguments = parser.parse_args(argv)
    harden()
    logs.configure(to_stderr=True)
    try:
        asyncio.run(_run(arguments))
    except KvasirError as error:
        _log.error("%s", error)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
