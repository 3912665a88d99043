"""Where a vault's passphrase comes from when nobody sits at the screen, and when somebody does.

To unlock, in this order: the systemd credential ``kvasir-passphrase``, the file or descriptor a flag names, the
desktop's key ring where the owner opted in (``passphrase_cache``), a question on the controlling terminal. For a new
passphrase a flag goes before the credential, and the key ring is not asked. There is no flag and no environment
variable that holds a passphrase: both are seen by other programs. Without any source a console runs locked, and earns
all the same.
"""

from __future__ import annotations

import getpass
import os
import stat
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

from kvasir_console.errors import UsageError, WalletError

CREDENTIAL = "kvasir-passphrase"
MAX_BYTES = 4096


def encode_passphrase(passphrase: str) -> bytes:
    """The bytes a key is derived from: UTF-8 of NFKD, so that every keyboard's spelling of a character is the same.

    Raises:
        WalletError: ``passphrase_text``: too long, or characters that were not text where they came from.
    """
    try:
        secret = unicodedata.normalize("NFKD", passphrase).encode()
    except UnicodeEncodeError:  # its message would repeat the passphrase
        raise WalletError("passphrase_text", "The passphrase holds bytes that are not text.") from None
    if len(secret) > MAX_BYTES:
        raise WalletError("passphrase_text", f"A passphrase has at most {MAX_BYTES} bytes.")
    return secret


def read_passphrase(
    *,
    file: Path | None = None,
    fd: int | None = None,
    env: Mapping[str, str] | None = None,
    cache: Callable[[], str | None] | None = None,
    prompt: str | None = "Passphrase: ",
    confirm: bool = False,
) -> str | None:
    """The passphrase, or ``None`` if no source has one.

    Args:
        file: a file owned by this user or root that nobody else may read (0600 or 0400).
        fd: an open descriptor, read to its end and closed.
        env: where ``CREDENTIALS_DIRECTORY`` is looked up; default ``os.environ``.
        cache: asks the key ring.
        prompt: what to ask on the terminal; ``None`` never asks.
        confirm: ask twice, for a new passphrase.

    Raises:
        UsageError: both ``file`` and ``fd``.
        WalletError: ``passphrase_file`` (unreadable, open to others, empty, too long, not UTF-8) or
            ``passphrase_differs``.
    """
    if file is not None and fd is not None:
        raise UsageError("passphrase_sources", "A passphrase comes from a file or from a descriptor, not from both.")
    credentials = (os.environ if env is None else env).get("CREDENTIALS_DIRECTORY", "")
    credential = Path(credentials) / CREDENTIAL if credentials else None
    if credential is not None and credential.exists() and not (confirm and (file is not None or fd is not None)):
        # systemd itself guards that directory, and gives a service's user access by group or ACL.
        return _from_file(credential, "passphrase", may_group_read=True)
    if file is not None:
        return read_secret_file(file)
    if fd is not None:
        return _from_descriptor(fd)
    if cache is not None and not confirm and (passphrase := cache()) is not None:
        return passphrase
    return None if prompt is None else _from_terminal(prompt, confirm)


def read_secret_file(file: Path, what: str = "passphrase") -> str:
    """The one line of a file that is this user's or root's and that nobody else may read.

    Raises:
        WalletError: ``passphrase_file`` (after ``what``), as ``read_passphrase``.
    """
    return _from_file(file, what, may_group_read=False)


def _from_file(file: Path, what: str, *, may_group_read: bool) -> str:
    code = f"{what}_file"
    try:
        stream = open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise WalletError(code, f"The {what} file {file} cannot be read: {error.strerror}.") from None
    with stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise WalletError(code, f"The {what} file {file} is not a regular file.")
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (0o037 if may_group_read else 0o077):
            raise WalletError(
                code,
                f"Other users may look into the {what} file {file}.",
                f"Close it with: chmod 600 '{file}'",
            )
        return _decode(stream.read(MAX_BYTES + 1), f"The {what} file {file}", code)


def _from_descriptor(fd: int) -> str:
    where = f"The passphrase descriptor {fd}"
    if fd < 0:
        raise WalletError("passphrase_file", f"{where} cannot be read: there is no such descriptor.")
    try:
        with open(fd, "rb") as stream:
            return _decode(stream.read(MAX_BYTES + 1), where)
    except OSError as error:
        raise WalletError("passphrase_file", f"{where} cannot be read: {error.strerror}.") from None


def _decode(data: bytes, where: str, code: str = "passphrase_file") -> str:
    """The text without the one line end that editors and ``echo`` leave."""
    if len(data) > MAX_BYTES:
        raise WalletError(code, f"{where} holds more than {MAX_BYTES} bytes.")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise WalletError(code, f"{where} does not hold UTF-8 text.") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise WalletError(code, f"{where} is empty.")
    return text


def _from_terminal(prompt: str, confirm: bool) -> str | None:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return None  # getpass would fall back to standard input and echo
    try:
        passphrase = getpass.getpass(prompt)
        if confirm and getpass.getpass("Again: ") != passphrase:
            raise WalletError("passphrase_differs", "The two passphrases are not the same.", "Try again.")
    except EOFError:
        return None
    return passphrase or None
