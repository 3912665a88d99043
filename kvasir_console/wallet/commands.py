"""What ``kvasir-console wallet ...`` does, without the parsing of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvasir_console.paths import Paths
from kvasir_console.wallet import phrase as bip39
from kvasir_console.wallet.keys import KVASIR_PATH
from kvasir_console.wallet.vault import Account, choose_cost, create_vault, derive_accounts, public_accounts

CANDIDATE_PATHS: tuple[str | None, ...] = (
    KVASIR_PATH,
    "m/44'/501'/0'",
    "m/44'/501'/1'/0'",
    "m/44'/501'/2'/0'",
    None,
)
"""Where the wallets people come from keep their first accounts; ``None`` is ``solana-keygen`` without a path."""


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


def candidate_accounts(phrase: str, paths: Sequence[str | None] = CANDIDATE_PATHS) -> tuple[Account, ...]:
    """The address each path gives, to be shown before anything is kept: wallets differ in the path they use.

    Raises:
        WalletError: the phrase or a path is refused.
    """
    return derive_accounts(phrase, paths)


def import_phrase(
    paths: Paths,
    phrase: str,
    passphrase: str,
    *,
    path: str | None = KVASIR_PATH,
    kdf: str = "moderate",
    force: bool = False,
) -> Account:
    """Keep an existing phrase in the vault, with the account at ``path``. Raises as ``create_wallet``."""
    return create_vault(paths.vault_file, phrase, passphrase, paths=(path,), cost=choose_cost(kdf), force=force)[0]


def accounts(paths: Paths) -> tuple[Account, ...]:
    """The accounts of this installation's vault, without its passphrase. Raises ``WalletError`` ``vault_missing``."""
    return public_accounts(paths.vault_file)


def address(paths: Paths) -> str:
    """The address this node earns to. Raises as ``accounts``."""
    return accounts(paths)[0].address
