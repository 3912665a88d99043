"""A signer for one command: a child process on a socket of its own, gone when the command is done.

So the command's own process, which parses answers from the network, never holds a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvasir_console.errors import KvasirError, SystemResourceError, WalletError
from kvasir_console.paths import check_socket_path
from kvasir_console.wallet.signer_client import SignerClient

STOP_S = 5.0
MAX_LOG_BYTES = 2**20


@asynccontextmanager
async def signer_session(
    vault: Path,
    runtime: Path,
    log_file: Path,
    *,
    host: str,
    kinds: Sequence[str],
    cluster: str = "",
    mint: str = "",
) -> AsyncIterator[SignerClient]:
    """A locked signer over ``vault``, bound to a host, kinds of intents, a cluster (by genesis hash) and a mint.

    Raises:
        WalletError: there is no readable vault, or the signer does not start.
        SystemResourceError: its log or socket cannot be made.
    """
    socket = check_socket_path(runtime / f"sign-{os.getpid()}.sock")
    arguments = (
        *("--vault", str(vault), "--socket", str(socket), "--host", host),
        *("--cluster", cluster, "--mint", mint, "--kinds", *kinds),
    )
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        if log_file.exists() and log_file.stat().st_size > MAX_LOG_BYTES:
            flags |= os.O_TRUNC
        log = os.open(log_file, flags, 0o600)
    except OSError as error:
        raise SystemResourceError("log_unavailable", f"{log_file} cannot be written: {error.strerror}.") from error
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvasir_console.child", str(os.getpid()), "kvasir_console.wallet.signer"),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    client = SignerClient(socket)
    try:
        try:
            await client.wait_ready()
        except WalletError:
            raise WalletError("signer_gone", "The signer does not start.", f"{log_file} says why.") from None
        yield client
    finally:
        try:
            await client.exit()
        except KvasirError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
