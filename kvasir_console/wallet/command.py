"""``kvasir-console wallet create``, ``import`` and ``address``: what is done on the vault's file."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from pathlib import Path

from kvasir_console.config import WalletConfig
from kvasir_console.errors import ExitCode, UsageError, WalletError
from kvasir_console.paths import Paths
from kvasir_console.wallet import commands, private_file
from kvasir_console.wallet.keys import KVASIR_PATH
from kvasir_console.wallet.passphrase import read_passphrase

NO_PATH = "none"


def run(arguments: argparse.Namespace, settings: WalletConfig) -> int:
    """Run one command. Raises ``KvasirError``."""
    paths = Paths.from_environment()
    match arguments.wallet_command:
        case "create":
            return _create(paths.ensure(), arguments, settings.kdf)
        case "import":
            return _import(paths.ensure(), arguments, settings.kdf)
        case "address":
            address = commands.address(paths)
            print(json.dumps({"address": address}) if arguments.json else address)
            return ExitCode.OK
    raise UsageError("unknown_command", f"There is no wallet command {arguments.wallet_command!r}.")


def _create(paths: Paths, arguments: argparse.Namespace, kdf: str) -> int:
    _check_free(paths.vault_file, force=arguments.force)
    passphrase = _passphrase(arguments)
    wallet = commands.create_wallet(paths, passphrase, words=arguments.words, kdf=kdf, force=arguments.force)
    print(wallet.address)
    print("Write these words down, in order, on paper. They are shown once and are the only way back:", file=sys.stderr)
    words = [f"{number:2}. {word:10}" for number, word in enumerate(wallet.phrase.split(), 1)]
    for row in range(0, len(words), 4):
        print("  " + "  ".join(words[row : row + 4]).rstrip(), file=sys.stderr)
    return ExitCode.OK


def _import(paths: Paths, arguments: argparse.Namespace, kdf: str) -> int:
    _check_free(paths.vault_file, force=arguments.force)
    at_terminal = sys.stdin.isatty()
    phrase = getpass.getpass("Words of the wallet: ") if at_terminal else sys.stdin.readline()
    if not phrase.strip():
        raise WalletError("no_phrase", "No words were given.", "Type or pipe in the 12 or 24 words.")
    path = _choose_path(phrase, arguments.path, ask=at_terminal)
    passphrase = _passphrase(arguments)
    account = commands.import_phrase(paths, phrase, passphrase, path=path, kdf=kdf, force=arguments.force)
    print(account.address)
    return ExitCode.OK


def _choose_path(phrase: str, wanted: str | None, *, ask: bool) -> str | None:
    """Show the address at each path wallets use, and say (or ask) which is kept."""
    offered = commands.CANDIDATE_PATHS
    path = KVASIR_PATH if wanted is None else None if wanted == NO_PATH else wanted
    if path not in offered:
        offered = (path, *offered)
    accounts = commands.candidate_accounts(phrase, offered)
    chosen = offered.index(path)
    print("These words lead to:", file=sys.stderr)
    for number, account in enumerate(accounts):
        mark = "*" if number == chosen else " "
        print(f"{mark} {number + 1}. {account.address:44}  {account.path or NO_PATH}", file=sys.stderr)
    if ask and wanted is None:
        print(f"Which one is yours? [{chosen + 1}] ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip() or str(chosen + 1)
        if not (answer.isdecimal() and 1 <= int(answer) <= len(offered)):
            raise UsageError("no_such_account", f"{answer!r} is none of the numbers.", "Nothing was kept; try again.")
        chosen = int(answer) - 1
    return offered[chosen]


def _check_free(vault: Path, *, force: bool) -> None:
    """Said before anything is typed in; the vault itself refuses again, in the same step as it writes."""
    if vault.exists() and not force:
        raise private_file.exists(vault)


def _passphrase(arguments: argparse.Namespace) -> str:
    passphrase = read_passphrase(
        file=Path(arguments.passphrase_file) if arguments.passphrase_file else None,
        fd=arguments.passphrase_fd,
        prompt="New passphrase of the vault (8 characters or more): ",
        confirm=True,
    )
    if passphrase is None:
        raise UsageError(
            "no_passphrase",
            "A wallet needs a passphrase, and there is no terminal to ask on.",
            "Give --passphrase-file FILE (mode 0600) or --passphrase-fd FD.",
        )
    return passphrase
