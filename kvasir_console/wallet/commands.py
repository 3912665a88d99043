"""Making a wallet without anybody to ask: for the local network, and whoever embeds this package."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvasir_console.paths import Paths
from kvasir_console.wallet import phrase as bip39
from kvasir_console.wallet.vault import choose_cost, create_vault


@dataclass(frozen=True, slots=True)
class CreatedWallet:
    phrase: str = field(repr=False)
    """To be written down: shown once, and nowhere else."""
    address: str
    file: Path


def create_wallet(
    paths: Paths, passphrase: str, words: int = 24, kdf: str = "moderate", *, force: bool = False
) -> CreatedWallet:
    """Make a wallet from a fresh phrase of 12 or 24 words and keep it in the vault.

    Raises:
        UsageError: another number of words, or an unknown cost level ``kdf``.
        WalletError: ``vault_exists`` (unless ``force``), ``passphrase_short``.
        SystemResourceError: the vault cannot be written or its cost does not fit the memory.
    """
    phrase = bip39.generate(words)
    accounts = create_vault(paths.vault_file, phrase, passphrase, cost=choose_cost(kdf), force=force)
    return CreatedWallet(phrase, accounts[0].address, paths.vault_file)
