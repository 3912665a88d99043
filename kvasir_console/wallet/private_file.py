"""Files only their owner may see: written at once and whole, and not read if others could have.

A file is 0600 in a directory of 0700. A write goes to a new file in the same directory, is forced to the disk, and
takes its place in one step: whatever happens in between, the old file or the new one is there, whole. What a killed
writer left half-written is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvasir_console.errors import SystemResourceError, WalletError
from kvasir_console.paths import private_directory


def read(file: Path, limit: int) -> bytes:
    """The bytes of a private file.

    Raises:
        WalletError: ``vault_missing``, ``vault_mode`` (others may read or replace it) or ``vault_malformed`` (longer
            than ``limit`` bytes, or no regular file).
        SystemResourceError: it cannot be read.
    """
    try:
        check_directory(file.parent)
        stream = open(  # noqa: SIM115
            file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
        )
    except FileNotFoundError:
        raise missing(file) from None
    except OSError as error:
        raise _unavailable(file, error) from error
    with stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise WalletError("vault_malformed", f"{file} is not a regular file.")
        check_owner(file, status)
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise WalletError("vault_malformed", f"{file} is longer than {limit} bytes; that is no vault.")
    return data


def write(file: Path, data: bytes, *, replace: bool, keep_old: bool = False) -> None:
    """Write a private file durably; its directory is made if it is not there.

    Args:
        replace: take the place of a file that is there; otherwise that file is kept and the write refused.
        keep_old: leave the replaced file beside the new one, under its name and the time.

    Raises:
        WalletError: ``vault_exists``, or ``vault_mode`` for a directory others may look into.
        SystemResourceError: it cannot be written.
    """
    try:
        if file.parent.exists():
            check_directory(file.parent)
        else:
            private_directory(file.parent)
        _remove_abandoned(file)
        new = file.with_name(f".{file.name}.{secrets.token_hex(8)}.new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as stream:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # says that its writer lives
                stream.write(data)
                stream.flush()
                os.fsync(descriptor)
                if replace:
                    if keep_old and file.exists():
                        os.link(file, file.with_name(f"{file.name}.{time.time_ns()}.bak"))
                    os.replace(new, file)
                else:
                    os.link(new, file)  # refuses a name that is taken, in the same step
        finally:
            new.unlink(missing_ok=True)
        sync_directory(file.parent)
    except FileExistsError:
        raise exists(file) from None
    except OSError as error:
        raise _unavailable(file, error) from error


@contextlib.contextmanager
def exclusive(file: Path) -> Iterator[None]:
    """Hold ``file`` for a change that reads it first; others wait. A lock file stays beside it.

    Raises:
        WalletError: ``vault_missing``: its directory is not there; or ``vault_mode``.
        SystemResourceError: the lock file cannot be made.
    """
    try:
        check_directory(file.parent)
        descriptor = os.open(
            file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except FileNotFoundError:
        raise missing(file) from None
    except OSError as error:
        raise _unavailable(file, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Force a directory's entries to the disk: without it a new file may be gone after a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(file: Path) -> None:
    """Unfinished files of writers that were killed: nobody holds their lock any more."""
    pattern = re.compile(rf"\.{re.escape(file.name)}\.[0-9a-f]{{16}}\.new")
    for each in file.parent.iterdir():
        if pattern.fullmatch(each.name):
            with contextlib.suppress(OSError), open(each, "rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                each.unlink()


def check_directory(directory: Path) -> None:
    """Refuse a directory that is not 0700 and ours: whoever may write in it may exchange the files.

    It may be reached by a link of ours or the system's. It is not tightened here, for it may be one that others need.

    Raises:
        WalletError: ``vault_mode``.
        OSError: it is not there.
    """
    link = directory.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.getuid()):
        raise WalletError(
            "vault_mode",
            f"{directory} is a link that belongs to another user, who could lead it elsewhere.",
            "Name the directory itself.",
        )
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(20, "not a directory", str(directory))
    check_owner(directory, status)


def check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse what another user owns or may use. Raises ``WalletError`` ``vault_mode``."""
    if status.st_uid != os.getuid():
        raise WalletError("vault_mode", f"{path} belongs to another user.", "Use a file and a directory of your own.")
    if status.st_mode & 0o077:
        hint = f"Close it with: chmod 600 '{path}'"
        if stat.S_ISDIR(status.st_mode):  # which may be one that others need
            hint = f"Move the file into a folder of its own, or close this one with: chmod 700 '{path}'"
        raise WalletError("vault_mode", f"Other users may look into {path}.", hint)


def exists(file: Path) -> WalletError:
    return WalletError(
        "vault_exists",
        f"There is a wallet at {file} already, and it was left as it is.",
        "To replace it, add --force; the old file is kept beside the new one.",
    )


def missing(file: Path) -> WalletError:
    return WalletError("vault_missing", f"There is no wallet at {file}.", "Make one with kvasir-console wallet create.")


def _unavailable(file: Path, error: OSError) -> SystemResourceError:
    return SystemResourceError("file_unavailable", f"{file} cannot be used: {error.strerror or error}.")
