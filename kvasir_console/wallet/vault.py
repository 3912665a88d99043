"""The vault: one self-describing JSON file that holds a wallet's secrets, encrypted under a passphrase.

``vault_format`` describes the file. What stands in clear (addresses, paths, costs, whether a second factor is asked
for) is the associated data of the encryption, so nobody can exchange any of it without the vault refusing to open; a
locked console still knows its addresses. Every write replaces the whole file at once, under a lock.
"""

from __future__ import annotations

import secrets
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt,
    crypto_aead_xchacha20poly1305_ietf_encrypt,
)
from nacl.exceptions import CryptoError
from nacl.exceptions import RuntimeError as SodiumError
from nacl.pwhash import argon2id

from kvasir_console.errors import SystemResourceError, UsageError, WalletError
from kvasir_console.wallet import phrase as bip39
from kvasir_console.wallet import private_file
from kvasir_console.wallet.keys import KVASIR_PATH, Key, derive
from kvasir_console.wallet.memory import available_bytes
from kvasir_console.wallet.passphrase import encode_passphrase
from kvasir_console.wallet.vault_format import (
    KEY_BYTES,
    MAX_ACCOUNTS,
    MAX_FILE_BYTES,
    MIB,
    NONCE_BYTES,
    SALT_BYTES,
    VERSION,
    Account,
    AccountKind,
    Contents,
    Header,
    KdfCost,
    read_contents,
    read_document,
    renewed,
    write_document,
)

__all__ = [
    "COSTS",
    "FLOOR_COST",
    "MIN_PASSPHRASE_CHARACTERS",
    "Account",
    "AccountKind",
    "Change",
    "Contents",
    "KdfCost",
    "OpenVault",
    "change_passphrase",
    "choose_cost",
    "create",
    "create_vault",
    "derive_accounts",
    "open_vault",
    "public_accounts",
    "second_factor_enrolled",
    "update",
]

Change = Callable[[Contents], Contents]
"""What ``update`` does to a vault's contents. It may refuse by raising."""
MIN_PASSPHRASE_CHARACTERS = 8
COSTS = {
    "interactive": KdfCost(2, 64 * MIB),
    "moderate": KdfCost(3, 256 * MIB),
    "sensitive": KdfCost(2, 1024 * MIB),
}
"""The first two are libsodium's. Its ``sensitive`` makes four passes, more than is read from a file."""
FLOOR_COST = KdfCost(3, 64 * MIB)
"""The least ``moderate`` comes down to on a machine without memory to spare (RFC 9106's second choice)."""


@dataclass(slots=True)
class OpenVault:
    """A vault's contents. Wipe it, best by ``with``, as soon as the key is out."""

    accounts: tuple[Account, ...]
    _header: Header = field(repr=False)
    _plaintext: bytearray = field(repr=False)

    def contents(self) -> Contents:
        return read_contents(self._header, self._plaintext)

    @property
    def phrase(self) -> str:
        """The recovery phrase. Raises ``WalletError`` ``vault_no_phrase`` when there are other accounts only."""
        words = self.contents().phrase
        if words is None:
            raise WalletError(
                "vault_no_phrase", "This vault holds no recovery phrase.", "Export the key of an account instead."
            )
        return words

    @property
    def second_factor(self) -> bytes | None:
        """The shared secret of the one-time codes, while enrolled."""
        return self.contents().second_factor

    def key(self, index: int = 0) -> Key:
        """The signing key of ``accounts[index]``.

        Raises:
            WalletError: ``watch_only``, or ``vault_key`` if it is not the one the header names.
        """
        account = self.accounts[index]
        if account.kind is AccountKind.WATCH:
            raise WalletError(
                "watch_only",
                f"{account.address} is only watched: its key is not in this vault.",
                "Import its phrase or key to sign with it.",
            )
        if account.kind is AccountKind.KEY:
            key = Key(bytearray(self.contents().keys.get(account.address, bytes(KEY_BYTES))))
        else:
            key = Key(derive(bip39.seed(self.phrase), account.path))
        if key.address != account.address:
            key.wipe()
            raise WalletError("vault_key", "The vault's secrets do not give the address that the vault names.")
        return key

    def wipe(self) -> None:
        for place in range(len(self._plaintext)):
            self._plaintext[place] = 0

    def __enter__(self) -> OpenVault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wipe()


def choose_cost(level: str = "moderate", free_bytes: int | None = None) -> KdfCost:
    """The cost of a new vault.

    ``moderate`` takes at most half of the memory that is free, down to ``FLOOR_COST``; the other levels are taken as
    asked or refused.

    Args:
        level: a key of ``COSTS``.
        free_bytes: memory this process may take; measured, control groups included, when not given.

    Raises:
        UsageError: no such level.
        SystemResourceError: ``memory_short``: the level does not fit.
    """
    if level not in COSTS:
        raise UsageError("kdf_level", f"{level!r} is not a cost level.", f"Use one of {', '.join(COSTS)}.")
    cost = COSTS[level]
    free_kib = (available_bytes() if free_bytes is None else free_bytes) // 1024
    if level == "moderate":
        mem_kib = cost.mem_kib
        while mem_kib > free_kib // 2 and mem_kib > FLOOR_COST.mem_kib:
            mem_kib //= 2
        return KdfCost(cost.ops, mem_kib)
    if cost.mem_kib > free_kib:
        raise _memory_short(cost)
    return cost


def create_vault(
    file: Path,
    phrase: str,
    passphrase: str,
    *,
    paths: Sequence[str | None] = (KVASIR_PATH,),
    cost: KdfCost | None = None,
    force: bool = False,
) -> tuple[Account, ...]:
    """Encrypt ``phrase`` into a new vault. Takes as long as one unlock.

    Args:
        phrase: in any spelling; the canonical one is kept.
        paths: the accounts to name in the header, first the one to use.
        force: replace a vault that is there; the old file is kept beside it with the ending ``.bak``.

    Raises:
        WalletError: ``vault_exists``, a bad phrase, path or passphrase.
        SystemResourceError: the file cannot be written.
    """
    _check_new_passphrase(passphrase)
    _check_count(len(paths))
    canonical = bip39.check(phrase)
    contents = Contents(derive_accounts(canonical, paths), phrase=canonical)
    return create(file, contents, passphrase, cost=cost, force=force)


def create(
    file: Path, contents: Contents, passphrase: str, *, cost: KdfCost | None = None, force: bool = False
) -> tuple[Account, ...]:
    """Encrypt any contents into a new vault. Arguments and refusals are those of ``create_vault``."""
    _check_new_passphrase(passphrase)
    _check_contents(contents)
    if file.exists() and not force:  # said before the slow part; the write below is what makes sure
        raise private_file.exists(file)
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    header = Header(VERSION, created, cost or choose_cost(), b"", b"", (), second_factor=False)
    private_file.write(file, _seal(header, contents, passphrase), replace=force, keep_old=True)
    return contents.accounts


def derive_accounts(phrase: str, paths: Sequence[str | None]) -> tuple[Account, ...]:
    """The account at each path. Raises ``WalletError`` for a bad phrase or path."""
    seed = bip39.seed(phrase)
    accounts = []
    for path in paths:
        with Key(derive(seed, path)) as key:
            accounts.append(Account(key.address, path))
    return tuple(accounts)


def open_vault(file: Path, passphrase: str) -> OpenVault:
    """Decrypt a vault. Takes about a second and the memory its header names: call it in a thread.

    Raises:
        WalletError: ``vault_missing``, ``vault_mode``, ``vault_malformed``, ``vault_newer``, ``vault_kdf`` or
            ``wrong_passphrase``.
        SystemResourceError: ``memory_short``.
    """
    return _open(file, passphrase)


def update(file: Path, passphrase: str, change: Change) -> tuple[Account, ...]:
    """Open the vault, replace its contents by ``change(contents)`` and encrypt them anew, in the newest version.

    Nobody else changes the vault meanwhile; interrupted, it leaves the old one whole. A vault of an older version is
    kept beside the new one with the ending ``.bak``.

    Raises:
        WalletError: as ``open_vault``, and whatever ``change`` raises.
    """
    with private_file.exclusive(file):
        with open_vault(file, passphrase) as opened:
            contents = change(opened.contents())
            _check_contents(contents)
            header = opened._header
        sealed = _seal(header, contents, passphrase)
        private_file.write(file, sealed, replace=True, keep_old=header.version < VERSION)
    return contents.accounts


def change_passphrase(file: Path, old: str, new: str, *, cost: KdfCost | None = None) -> None:
    """Encrypt the vault anew, with fresh salt, nonce and cost. Interrupted, it leaves the old vault whole.

    Raises:
        WalletError: as ``open_vault``, and ``passphrase_short``.
    """
    _check_new_passphrase(new)
    with private_file.exclusive(file):
        with open_vault(file, old) as opened:
            sealed = _seal(opened._header, opened.contents(), new, cost or choose_cost())
        private_file.write(file, sealed, replace=True)


def public_accounts(file: Path) -> tuple[Account, ...]:
    """The accounts a vault names, without its passphrase. Only opening the vault proves them.

    Raises:
        WalletError: as ``open_vault``, but for the passphrase.
    """
    return _read(file)[0].accounts


def second_factor_enrolled(file: Path) -> bool:
    """Whether the vault says that it releases secrets against a second factor only. Raises as ``public_accounts``."""
    return _read(file)[0].second_factor


def _seal(header: Header, contents: Contents, passphrase: str, cost: KdfCost | None = None) -> bytes:
    fresh = renewed(header, contents, secrets.token_bytes(SALT_BYTES), secrets.token_bytes(NONCE_BYTES), cost)
    key = _derive_key(passphrase, fresh)
    plaintext = contents.to_plaintext()
    return write_document(
        fresh, crypto_aead_xchacha20poly1305_ietf_encrypt(plaintext, fresh.associated_data(), fresh.nonce, key)
    )


def _open(file: Path, passphrase: str) -> OpenVault:
    header, ciphertext = _read(file)
    key = _derive_key(passphrase, header)
    try:
        plaintext = bytearray(
            crypto_aead_xchacha20poly1305_ietf_decrypt(ciphertext, header.associated_data(), header.nonce, key)
        )
    except CryptoError:
        raise WalletError(
            "wrong_passphrase",
            f"The passphrase does not open {file}, or the file was altered.",
            "Try again. Without the passphrase only the recovery phrase helps: kvasir-console wallet import.",
        ) from None
    opened = OpenVault(header.accounts, header, plaintext)
    try:
        opened.accounts = opened.contents().accounts
    except WalletError:
        opened.wipe()
        raise
    return opened


def _read(file: Path) -> tuple[Header, bytes]:
    return read_document(private_file.read(file, MAX_FILE_BYTES), file)


def _derive_key(passphrase: str, header: Header) -> bytes:
    secret = encode_passphrase(passphrase)
    if header.cost.mem_kib * 1024 > available_bytes():  # the kernel would promise it, and end us on the way
        raise _memory_short(header.cost)
    try:
        return bytes(argon2id.kdf(KEY_BYTES, secret, header.salt, header.cost.ops, header.cost.mem_kib * 1024))
    except (SodiumError, MemoryError):
        raise _memory_short(header.cost) from None


def _check_new_passphrase(passphrase: str) -> None:
    if len(unicodedata.normalize("NFC", passphrase)) < MIN_PASSPHRASE_CHARACTERS:
        raise WalletError(
            "passphrase_short",
            f"A new passphrase needs at least {MIN_PASSPHRASE_CHARACTERS} characters.",
            "Several unrelated words are easy to keep and hard to guess.",
        )
    encode_passphrase(passphrase)


def _check_contents(contents: Contents) -> None:
    """What ``vault_format`` would refuse to read is not written."""
    _check_count(len(contents.accounts))
    if len({each.address for each in contents.accounts}) != len(contents.accounts):
        raise WalletError(
            "account_exists", "The vault names that account already.", "See kvasir-console wallet accounts."
        )


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_ACCOUNTS:
        raise UsageError("vault_accounts", f"A vault names 1 to {MAX_ACCOUNTS} accounts, not {count}.")


def _memory_short(cost: KdfCost) -> SystemResourceError:
    return SystemResourceError(
        "memory_short",
        f"Deriving the vault's key takes {cost.mem_kib // MIB} MiB of memory, and that much is not free.",
        "Stop other programs, or choose a lower cost (wallet.kdf) when the vault is made.",
    )
