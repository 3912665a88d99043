"""Secrets that leave the vault: released against passphrase and second factor, to a person or a private file only."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from kvasir_console.errors import SystemResourceError, UsageError, WalletError
from kvasir_console.wallet import formats, private_file
from kvasir_console.wallet.twofactor import SecondFactor, state_file
from kvasir_console.wallet.vault import MIN_PASSPHRASE_CHARACTERS, OpenVault, open_vault


class Form(StrEnum):
    """What a secret can be written as."""

    WORDS = "words"
    CLI = "cli"
    """solana-keygen's file."""
    BASE58 = "base58"
    DESKTOP = "desktop"
    """The Kvasir desktop wallet's ``wallet.enc``."""
    BROWSER = "browser"
    """The Kvasir web wallet's envelope."""


ENCRYPTED = (Form.DESKTOP, Form.BROWSER)


def open_with_second_factor(vault: Path, passphrase: str, ask_code: Callable[[], str | None]) -> OpenVault:
    """Open a vault for something that only its owner may do: release a secret, or change what guards it.

    Args:
        ask_code: asked for a one-time or back-up code, only where a second factor is enrolled.

    Raises:
        WalletError: as ``open_vault`` and ``SecondFactor.check``; ``second_factor_needed`` without a code.
    """
    opened = open_vault(vault, passphrase)
    try:
        check_second_factor(vault, opened.second_factor, ask_code)
    except BaseException:
        opened.wipe()
        raise
    return opened


def check_second_factor(vault: Path, secret: bytes | None, ask_code: Callable[[], str | None]) -> None:
    """Raises ``WalletError`` unless no second factor is enrolled or a code is granted."""
    if secret is None:
        return
    code = ask_code()
    if not code:
        raise WalletError("second_factor_needed", "This needs a one-time code.", "Give it with --code, or type it.")
    SecondFactor(state_file(vault), secret).check(code)


def exported(opened: OpenVault, index: int, form: Form, passphrase: str | None = None) -> str:
    """The recovery phrase (``words``), or the key of ``accounts[index]``, as text.

    A desktop file holds the phrase if the account is the phrase's default one, else its key, as that wallet itself
    would; a browser envelope holds phrases only.

    Args:
        passphrase: what encrypted forms are encrypted under.

    Raises:
        WalletError: ``watch_only``, ``vault_no_phrase``, or ``passphrase_short``.
        UsageError: an encrypted form without a passphrase.
    """
    if form is Form.WORDS:
        return opened.phrase
    if form in ENCRYPTED:
        if passphrase is None:
            raise UsageError("no_passphrase", "This form is encrypted, and needs a passphrase of its own.")
        if len(passphrase) < MIN_PASSPHRASE_CHARACTERS:
            raise WalletError("passphrase_short", f"That wallet wants at least {MIN_PASSPHRASE_CHARACTERS} characters.")
        if form is Form.BROWSER:
            return formats.write_browser(formats.Phrase(opened.phrase), passphrase).decode()
        if opened.accounts[index].path == formats.DESKTOP_PATH:
            return formats.write_desktop(formats.Phrase(opened.phrase), passphrase).decode()
        with opened.key(index) as key:
            return formats.write_desktop(key, passphrase).decode()
    with opened.key(index) as key:
        return formats.write_cli(key).decode() if form is Form.CLI else formats.write_base58(key)


def write_secret(file: Path, text: str) -> None:
    """Write a secret to a new file that only its owner can read. A file that is there is never replaced.

    Raises:
        UsageError: ``file_exists``.
        SystemResourceError: it cannot be written.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError("file_exists", f"{file} is there already.", "Name a file that is not.") from None
    except OSError as error:
        raise SystemResourceError("file_unavailable", f"{file} cannot be written: {error.strerror}.") from error
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text if text.endswith("\n") else text + "\n")
            stream.flush()
            os.fsync(descriptor)
        private_file.sync_directory(file.parent)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise SystemResourceError("file_unavailable", f"{file} cannot be written: {error.strerror}.") from error
