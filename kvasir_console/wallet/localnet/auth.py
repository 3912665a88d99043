"""The file that holds the ``Authorization`` header of an RPC: one line, readable by its owner only."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from kvasir_console.errors import SystemResourceError
from kvasir_console.paths import private_directory

_MAX_BYTES = 4096


def read_auth_file(file: Path) -> str:
    """The header's value, for example ``Bearer 3q2…``.

    Raises:
        SystemResourceError: it is missing, open to others, or not one line of printable ASCII.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SystemResourceError(
            "auth_file_unreadable",
            f"The RPC authorization file {file} cannot be read: {error.strerror or error}.",
            "Start the ledger once to make it, or correct wallet.rpc_auth_file.",
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
        raise SystemResourceError(
            "auth_file_open", f"{file} can be read by other users.", f"Close it with: chmod 600 '{file}'"
        )
    value = content.decode("ascii", errors="replace").strip()
    if not value or len(content) > _MAX_BYTES or not value.isascii() or not value.isprintable():
        raise SystemResourceError("auth_file_malformed", f"{file} does not hold one line of printable ASCII.")
    return value


def ensure_auth_file(file: Path) -> str:
    """The value in ``file``, after making it (0600, a fresh 256-bit bearer token) if there is none.

    Raises:
        SystemResourceError: as ``read_auth_file``, or it cannot be made.
    """
    if not file.exists():
        if not file.parent.is_dir():
            private_directory(file.parent)
        new = file.with_name(f".{file.name}.{secrets.token_hex(8)}.new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(descriptor, "w", encoding="ascii") as stream:
                    stream.write(f"Bearer {secrets.token_urlsafe(32)}\n")
                    stream.flush()
                    os.fsync(descriptor)
                os.link(new, file)  # whole or not at all, and never over one that appeared meanwhile
            finally:
                new.unlink(missing_ok=True)
        except FileExistsError:
            pass
        except OSError as error:
            raise SystemResourceError(
                "auth_file_unwritable", f"The RPC authorization file {file} cannot be made: {error.strerror or error}."
            ) from error
    return read_auth_file(file)
