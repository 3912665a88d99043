"""The vault: one self-describing JSON file that holds a recovery phrase, encrypted under a passphrase.

    {"format": "kvasir-vault", "version": 1, "created": "2026-01-31T12:00:00Z",
     "kdf": {"name": "argon2id", "ops": 3, "mem_kib": 262144, "salt": base64 of 16 bytes},
     "aead": {"name": "xchacha20-poly1305", "nonce": base64 of 24 bytes},
     "accounts": [{"address": base58, "path": "m/44'/501'/0'/0'" or null}],
     "ciphertext": base64}

The plaintext is canonical JSON, ``{"kind": "phrase", "phrase": ...}``. Everything but the ciphertext stands in clear,
so a locked console knows its addresses, and is the associated data of the encryption, so nobody can exchange an
address, a path or a cost without the vault refusing to open. Costs are read from the file, never from a constant, and
bounded before anything is derived from them.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
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
from kvasir_console.wallet.keys import KVASIR_PATH, Key, derive, is_address, parse_path
from kvasir_console.wallet.passphrase import encode_passphrase

FORMAT = "kvasir-vault"
VERSION = 1
MAX_FILE_BYTES = 64 * 2**10
MAX_ACCOUNTS = 32
MIN_PASSPHRASE_CHARACTERS = 8

_KEY_BYTES, _SALT_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 16, 24, 16
_MIB = 1024  # KiB
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


@dataclass(frozen=True, slots=True)
class KdfCost:
    """What one guess of the passphrase costs: passes over ``mem_kib`` KiB of memory, on one lane."""

    ops: int
    mem_kib: int


COSTS = {
    "interactive": KdfCost(2, 64 * _MIB),
    "moderate": KdfCost(3, 256 * _MIB),
    "sensitive": KdfCost(4, 1024 * _MIB),
}
"""libsodium's levels."""
FLOOR_COST = KdfCost(3, 64 * _MIB)
"""The least ``moderate`` comes down to on a machine without memory to spare (RFC 9106's second choice)."""
READ_MEM_KIB = (19 * _MIB, 2048 * _MIB)
"""What is accepted from a file: OWASP's least, and what a machine can be expected to have."""
READ_OPS = (2, 16)


@dataclass(frozen=True, slots=True)
class Account:
    """One key of the vault, as everybody may know it."""

    address: str
    path: str | None
    """Derivation path; ``None`` for ``solana-keygen``'s habit of using the seed itself."""


@dataclass(frozen=True, slots=True)
class _Header:
    """What stands in clear, read and checked."""

    created: str
    cost: KdfCost
    salt: bytes
    nonce: bytes
    accounts: tuple[Account, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "created": self.created,
            "kdf": {
                "name": "argon2id",
                "ops": self.cost.ops,
                "mem_kib": self.cost.mem_kib,
                "salt": base64.b64encode(self.salt).decode(),
            },
            "aead": {"name": "xchacha20-poly1305", "nonce": base64.b64encode(self.nonce).decode()},
            "accounts": [{"address": account.address, "path": account.path} for account in self.accounts],
        }

    def associated_data(self) -> bytes:
        return _canonical(self.to_json())


@dataclass(slots=True)
class OpenVault:
    """A vault's contents. Wipe it, best by ``with``, as soon as the key is out."""

    accounts: tuple[Account, ...]
    _plaintext: bytearray = field(repr=False)

    @property
    def phrase(self) -> str:
        """The recovery phrase."""
        return str(json.loads(self._plaintext)["phrase"])

    def key(self, index: int = 0) -> Key:
        """The signing key of ``accounts[index]``. Raises ``WalletError`` if it is not the one the header names."""
        account = self.accounts[index]
        key = Key(derive(bip39.seed(self.phrase), account.path))
        if key.address != account.address:
            key.wipe()
            raise WalletError("vault_key", "The vault's phrase does not give the address that the vault names.")
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


def choose_cost(level: str = "moderate", available_bytes: int | None = None) -> KdfCost:
    """The cost of a new vault.

    ``moderate`` takes at most half of the memory that is free, down to ``FLOOR_COST``; the other levels are taken as
    asked or refused.

    Args:
        level: a key of ``COSTS``.
        available_bytes: free memory; measured when not given.

    Raises:
        UsageError: no such level.
        SystemResourceError: ``memory_short``: the level does not fit.
    """
    if level not in COSTS:
        raise UsageError("kdf_level", f"{level!r} is not a cost level.", f"Use one of {', '.join(COSTS)}.")
    cost = COSTS[level]
    free_kib = (psutil.virtual_memory().available if available_bytes is None else available_bytes) // 1024
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
    if not 1 <= len(paths) <= MAX_ACCOUNTS:
        raise UsageError("vault_accounts", f"A vault names 1 to {MAX_ACCOUNTS} accounts, not {len(paths)}.")
    canonical = bip39.check(phrase)
    accounts = derive_accounts(canonical, paths)
    if file.exists() and not force:  # said before the slow part; the write below is what makes sure
        raise private_file.exists(file)
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    plaintext = _canonical({"kind": "phrase", "phrase": canonical})
    sealed = _seal(plaintext, passphrase, created, accounts, cost or choose_cost())
    private_file.write(file, sealed, replace=force, keep_old=True)
    return accounts


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
    return _open(file, passphrase)[1]


def change_passphrase(file: Path, old: str, new: str, *, cost: KdfCost | None = None) -> None:
    """Encrypt the vault anew, with fresh salt, nonce and cost. Interrupted, it leaves the old vault whole.

    Raises:
        WalletError: as ``open_vault``, and ``passphrase_short``.
    """
    _check_new_passphrase(new)
    header, opened = _open(file, old)
    with opened:
        sealed = _seal(bytes(opened._plaintext), new, header.created, header.accounts, cost or choose_cost())
    private_file.write(file, sealed, replace=True)


def public_accounts(file: Path) -> tuple[Account, ...]:
    """The accounts a vault names, without its passphrase. Only opening the vault proves them.

    Raises:
        WalletError: as ``open_vault``, but for the passphrase.
    """
    return _read(file)[0].accounts


def _seal(plaintext: bytes, passphrase: str, created: str, accounts: tuple[Account, ...], cost: KdfCost) -> bytes:
    header = _Header(created, cost, secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_NONCE_BYTES), accounts)
    key = _derive_key(passphrase, header)
    ciphertext = crypto_aead_xchacha20poly1305_ietf_encrypt(plaintext, header.associated_data(), header.nonce, key)
    document = header.to_json() | {"ciphertext": base64.b64encode(ciphertext).decode()}
    return json.dumps(document, indent=1, ensure_ascii=True).encode() + b"\n"


def _open(file: Path, passphrase: str) -> tuple[_Header, OpenVault]:
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
    opened = OpenVault(header.accounts, plaintext)
    content = json.loads(plaintext)
    if content.get("kind") != "phrase":
        opened.wipe()
        raise WalletError(
            "vault_newer", f"{file} holds a kind of secret this version does not know.", "Update kvasir-console."
        )
    return header, opened


def _derive_key(passphrase: str, header: _Header) -> bytes:
    secret = encode_passphrase(passphrase)
    try:
        return bytes(argon2id.kdf(_KEY_BYTES, secret, header.salt, header.cost.ops, header.cost.mem_kib * 1024))
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


def _memory_short(cost: KdfCost) -> SystemResourceError:
    return SystemResourceError(
        "memory_short",
        f"Deriving the vault's key takes {cost.mem_kib // _MIB} MiB of memory, and that much is not free.",
        "Stop other programs, or choose a lower cost (wallet.kdf) when the vault is made.",
    )


def _read(file: Path) -> tuple[_Header, bytes]:
    raw = private_file.read(file, MAX_FILE_BYTES)
    try:
        document = json.loads(raw, object_pairs_hook=_unique_keys)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("it does not say it is a Kvasir vault")
        version = document.get("version")
        if type(version) is int and version > VERSION:
            raise WalletError(
                "vault_newer",
                f"{file} is a vault of version {version}; this program reads up to version {VERSION}.",
                "Update kvasir-console.",
            )
        return _parse(document)
    except (ValueError, RecursionError) as error:
        detail = str(error) if type(error) is ValueError else "it is not JSON"
        raise WalletError(
            "vault_malformed",
            f"{file} is damaged or not a vault: {detail}.",
            "Restore a copy of it, or import the recovery phrase again.",
        ) from None


def _parse(document: dict[str, Any]) -> tuple[_Header, bytes]:
    """Check every field of a version 1 vault. Raises ``ValueError`` saying what is wrong, ``WalletError`` for costs."""
    _fields(
        document,
        "the file",
        format=str,
        version=int,
        created=str,
        kdf=dict,
        aead=dict,
        accounts=list,
        ciphertext=str,
    )
    kdf, aead = document["kdf"], document["aead"]
    _fields(kdf, "kdf", name=str, ops=int, mem_kib=int, salt=str)
    _fields(aead, "aead", name=str, nonce=str)
    if (document["version"], kdf["name"], aead["name"]) != (VERSION, "argon2id", "xchacha20-poly1305"):
        raise ValueError("its version, kdf or aead is unknown")
    if not _CREATED.fullmatch(document["created"]):
        raise ValueError("its date of creation is malformed")
    cost = KdfCost(kdf["ops"], kdf["mem_kib"])
    if not (READ_OPS[0] <= cost.ops <= READ_OPS[1] and READ_MEM_KIB[0] <= cost.mem_kib <= READ_MEM_KIB[1]):
        raise WalletError(
            "vault_kdf",
            f"The vault asks for {cost.ops} passes over {cost.mem_kib} KiB; that is too weak or absurd.",
            "The file was altered or made by another program. Nothing was derived from it.",
        )
    accounts = []
    for entry in document["accounts"]:
        _fields(entry, "an account", address=str, path=(str, type(None)))
        if not is_address(entry["address"]):
            raise ValueError("an account's address is malformed")
        if entry["path"] is not None:
            _check_path(entry["path"])
        accounts.append(Account(entry["address"], entry["path"]))
    if not 1 <= len(accounts) <= MAX_ACCOUNTS:
        raise ValueError(f"it names {len(accounts)} accounts")
    ciphertext = _unbase64(document["ciphertext"], "ciphertext")
    if len(ciphertext) <= _TAG_BYTES:
        raise ValueError("its ciphertext is too short")
    salt, nonce = _unbase64(kdf["salt"], "salt", _SALT_BYTES), _unbase64(aead["nonce"], "nonce", _NONCE_BYTES)
    return _Header(document["created"], cost, salt, nonce, tuple(accounts)), ciphertext


def _check_path(path: str) -> None:
    try:
        parse_path(path)
    except WalletError:
        raise ValueError("an account's derivation path is malformed") from None


def _fields(table: object, where: str, **types: type | tuple[type, ...]) -> None:
    """Exactly these fields, of exactly these types (a bool is no int)."""
    if not isinstance(table, dict) or set(table) != set(types):
        raise ValueError(f"{where} does not have the fields it should have")
    for name, wanted in types.items():
        if type(table[name]) not in (wanted if isinstance(wanted, tuple) else (wanted,)):
            raise ValueError(f"{where} has a field {name!r} of the wrong type")


def _unbase64(text: object, name: str, size: int | None = None) -> bytes:
    try:
        data = base64.b64decode(str(text), validate=True)
    except binascii.Error:
        raise ValueError(f"its {name} is not base64") from None
    if base64.b64encode(data).decode() != text:  # the last letter may hold bits that no byte has
        raise ValueError(f"its {name} is not canonical base64")
    if size is not None and len(data) != size:
        raise ValueError(f"its {name} has {len(data)} bytes, not {size}")
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a field stands in it twice")
    return table


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
