"""``kvasir-console wallet``: create, import, address, unlock, claim."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from pathlib import Path

from kvasir_console import config
from kvasir_console.errors import ExitCode, UsageError, WalletError
from kvasir_console.paths import Paths
from kvasir_console.wallet import commands
from kvasir_console.wallet.passphrase import read_passphrase


def run(arguments: argparse.Namespace) -> int:
    paths = Paths.from_environment()
    match arguments.wallet_command:
        case "create":
            return _create(paths.ensure(), arguments)
        case "import":
            return _import(paths.ensure(), arguments)
        case "address":
            address = commands.address(paths)
            print(json.dumps({"address": address}) if arguments.json else address)
    return ExitCode.OK


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


def _create(paths: Paths, arguments: argparse.Namespace) -> int:
    kdf = config.load(paths.config_file).wallet.kdf
    wallet = commands.create_wallet(paths, _passphrase(arguments), words=arguments.words, kdf=kdf)
    print(wallet.address)
    print("Write these words down, in order, on paper. They are shown once and are the only way back:", file=sys.stderr)
    words = wallet.phrase.split()
    for row in range(0, len(words), 4):
        print("  " + "  ".join(f"{row + n + 1:2}. {word:10}" for n, word in enumerate(words[row : row + 4])), file=sys.stderr)
    return ExitCode.OK


def _import(paths: Paths, arguments: argparse.Namespace) -> int:
    phrase = getpass.getpass("Words of the wallet: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not phrase.strip():
        raise WalletError("no_phrase", "No words were given.", "Type or pipe in the 12 or 24 words.")
    kdf = config.load(paths.config_file).wallet.kdf
    account = commands.import_phrase(paths, phrase, _passphrase(arguments), kdf=kdf)
    print(account.address)
    return ExitCode.OK


