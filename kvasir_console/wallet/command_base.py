"""What every wallet command has at hand: its arguments, the configuration, the vault, and perhaps a person."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.config import Config
from kvasir_console.errors import ExitCode, UsageError, WalletError
from kvasir_console.paths import Paths
from kvasir_console.wallet import passphrase_cache
from kvasir_console.wallet.passphrase import read_passphrase
from kvasir_console.wallet.terminal import Person
from kvasir_console.wallet.vault import Account, public_accounts

_GIVE_IT = "Give --passphrase-file FILE (mode 0600) or --passphrase-fd FD."


@dataclass(frozen=True, slots=True)
class Command:
    """One run of one command."""

    arguments: argparse.Namespace
    config: Config
    paths: Paths
    person: Person | None
    """Whoever sits at the controlling terminal."""

    @property
    def vault(self) -> Path:
        return self.paths.vault_file

    def accounts(self) -> tuple[Account, ...]:
        return public_accounts(self.vault)

    def passphrase(self) -> str:
        """The passphrase that opens the vault. Raises ``UsageError`` without any source."""
        address = self.accounts()[0].address  # a missing vault is said before a passphrase is asked for
        cache = (lambda: passphrase_cache.recall(address)) if self.config.wallet.keyring else None
        found = read_passphrase(file=self._file(), fd=self.arguments.passphrase_fd, cache=cache, prompt=None)
        if found is None and self.person is not None:
            found = self.person.ask_secret("Passphrase of the vault: ")
        return _given(found)

    def new_passphrase(self, what: str = "New passphrase of the vault (8 characters or more): ") -> str:
        """A passphrase for a new vault; typed, it is asked for twice."""
        found = read_passphrase(file=self._file(), fd=self.arguments.passphrase_fd, prompt=None, confirm=True)
        return _given(found) if found is not None else self.ask_twice(what)

    def ask_twice(self, what: str) -> str:
        """A passphrase typed twice. Raises ``UsageError`` with nobody there."""
        if self.person is None:
            raise _nobody()
        found = _given(self.person.ask_secret(what))
        if self.person.ask_secret("Again: ") != found:
            raise WalletError("passphrase_differs", "The two passphrases are not the same.", "Try again.")
        return found

    def code(self) -> str | None:
        """A one-time or back-up code, given or typed."""
        if self.arguments.code is not None:
            return str(self.arguments.code).strip()
        return None if self.person is None else self.person.ask("One-time code: ") or None

    def emit(self, data: Mapping[str, Any], lines: Iterable[str]) -> int:
        """Data on stdout: JSON if that was asked for, else lines for people."""
        if getattr(self.arguments, "json", False):
            print(json.dumps(data, indent=2))
        else:
            for line in lines:
                print(line)
        return ExitCode.OK

    def _file(self) -> Path | None:
        return Path(self.arguments.passphrase_file) if self.arguments.passphrase_file else None


def say(text: str) -> None:
    """Talk, which is no data: on stderr."""
    print(text, file=sys.stderr, flush=True)


def _given(passphrase: str | None) -> str:
    if not passphrase:
        raise _nobody()
    return passphrase


def _nobody() -> UsageError:
    return UsageError("no_passphrase", "This needs the wallet's passphrase, and nobody gave one.", _GIVE_IT)
