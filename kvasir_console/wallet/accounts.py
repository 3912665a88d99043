"""What can be done to the accounts of a vault: pure functions from contents to contents, for ``vault.update``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvasir_console.errors import UsageError, WalletError
from kvasir_console.wallet.formats import Phrase, RawKey, Secret
from kvasir_console.wallet.keys import KVASIR_PATH, decode_address
from kvasir_console.wallet.vault import derive_accounts
from kvasir_console.wallet.vault_format import MAX_ACCOUNTS, Account, AccountKind, Contents

CANDIDATE_PATHS: tuple[str | None, ...] = (
    KVASIR_PATH,
    "m/44'/501'/0'",
    "m/44'/501'/1'/0'",
    "m/44'/501'/2'/0'",
    "m/44'/501'/1'",
    "m/44'/501'/2'",
    "m/44'/501'",
    None,
)
"""Where the wallets people come from keep their first accounts: Phantom and Kvasir, Ledger's styles, and ``None``,
``solana-keygen`` without a path."""


def of_secret(secret: Secret, path: str | None = KVASIR_PATH) -> Contents:
    """The contents of a new vault. Raises ``WalletError`` for a bad path."""
    if isinstance(secret, Phrase):
        return Contents(derive_accounts(secret.words, (path,)), phrase=secret.words)
    return add_key(Contents(()), secret)


def watching(address: str) -> Contents:
    """The contents of a vault that only looks at an address. Raises ``WalletError`` ``address``."""
    return add_watched(Contents(()), address)


def next_path(accounts: Sequence[Account]) -> str:
    """The first of the usual paths that no account has."""
    taken = {each.path for each in accounts if each.kind is AccountKind.PHRASE}
    return next(path for index in range(MAX_ACCOUNTS + 1) if (path := f"m/44'/501'/{index}'/0'") not in taken)


def add_derived(contents: Contents, path: str | None) -> Contents:
    """One more account of the vault's phrase.

    Raises:
        WalletError: ``vault_no_phrase``, ``account_exists`` or a bad path.
    """
    if contents.phrase is None:
        raise WalletError("vault_no_phrase", "This vault holds no recovery phrase to derive accounts from.")
    return _with(contents, derive_accounts(contents.phrase, (path,))[0])


def add_phrase(contents: Contents, phrase: Phrase, path: str | None) -> Contents:
    """An account of a phrase, in a vault that has none or this very one.

    Raises:
        WalletError: ``vault_other_phrase``; others as ``add_derived``.
    """
    if contents.phrase not in (None, phrase.words):
        raise WalletError(
            "vault_other_phrase",
            "The vault holds another recovery phrase, and it can hold one.",
            "Use another KVASIR_HOME for it, or --force to replace the wallet.",
        )
    return add_derived(replace(contents, phrase=phrase.words), path)


def add_key(contents: Contents, key: RawKey) -> Contents:
    """An account with a key of its own; a watched one becomes it. Raises ``WalletError`` ``account_exists``."""
    with_account = _with(contents, Account(key.address, None, AccountKind.KEY))
    return replace(with_account, keys={**contents.keys, key.address: key.seed})


def add_watched(contents: Contents, address: str) -> Contents:
    """An address to look at. Raises ``WalletError`` ``address`` or ``account_exists``."""
    decode_address(address)
    return _with(contents, Account(address, None, AccountKind.WATCH))


def use(contents: Contents, which: str) -> Contents:
    """Make one account the first: the one that signs, and that a node earns to."""
    chosen = find(contents.accounts, which)
    return replace(contents, accounts=(chosen, *(each for each in contents.accounts if each != chosen)))


def remove(contents: Contents, which: str) -> Contents:
    """Take an account out. The key of a ``key`` account is gone with it.

    Raises:
        UsageError: ``last_account`` or ``no_such_account``.
    """
    gone = find(contents.accounts, which)
    if len(contents.accounts) == 1:
        raise UsageError("last_account", "A vault keeps at least one account.", "Use another one instead.")
    keys = {address: seed for address, seed in contents.keys.items() if address != gone.address}
    return replace(contents, accounts=tuple(each for each in contents.accounts if each != gone), keys=keys)


def find(accounts: Sequence[Account], which: str) -> Account:
    """The account with this address, or at this place counted from 1. Raises ``UsageError`` ``no_such_account``."""
    for place, account in enumerate(accounts, 1):
        if which in (str(place), account.address):
            return account
    raise UsageError(
        "no_such_account", f"{which[:44]!r} is no account of this wallet.", "See kvasir-console wallet accounts."
    )


def _with(contents: Contents, account: Account) -> Contents:
    """Refuse a second entry; but a watched address whose key arrives is no longer only watched."""
    accounts = contents.accounts
    if account.kind is not AccountKind.WATCH:
        accounts = tuple(each for each in accounts if (each.address, each.kind) != (account.address, AccountKind.WATCH))
    if account.address in {each.address for each in accounts}:
        raise WalletError(
            "account_exists",
            f"{account.address} is an account of this wallet already.",
            "See kvasir-console wallet accounts.",
        )
    return replace(contents, accounts=(*accounts, account))
