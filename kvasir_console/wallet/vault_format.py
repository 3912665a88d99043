"""The vault's file, read and written: what stands in clear, what is sealed, and how older versions become newer ones.

    {"format": "kvasir-vault", "version": 2, "created": "2026-01-31T12:00:00Z",
     "kdf": {"name": "argon2id", "ops": 3, "mem_kib": 262144, "salt": base64 of 16 bytes},
     "aead": {"name": "xchacha20-poly1305", "nonce": base64 of 24 bytes},
     "accounts": [{"address": base58, "kind": "phrase" | "key" | "watch", "path": "m/44'/501'/0'/0'" or null}],
     "second_factor": whether secrets are released against a second factor only,
     "ciphertext": base64}

Sealed is canonical JSON: ``{"phrase": text or null, "keys": {address: base64 of a 32-byte seed}, "second_factor":
base64 or null, "limits": {"KVR": micro-KVR a day, "SOL": lamports a day}, "contacts": {name: address}}``.

Version 1 had phrase accounts only, no ``kind``, no ``second_factor``, and sealed ``{"kind": "phrase", "phrase":
text}``; it is read, and written as version 2 the next time something changes.

Everything here is pure. Costs are read from the file, never from a constant, and bounded before anything is derived.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvasir_console.errors import WalletError
from kvasir_console.wallet.keys import SEED_BYTES, is_address, parse_path

FORMAT = "kvasir-vault"
VERSION = 2
MAX_FILE_BYTES = 64 * 2**10
MAX_ACCOUNTS = 32

KEY_BYTES, SALT_BYTES, NONCE_BYTES, TAG_BYTES = 32, 16, 24, 16
MIB = 1024
"""In KiB."""
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


@dataclass(frozen=True, slots=True)
class KdfCost:
    """What one guess of the passphrase costs: passes over ``mem_kib`` KiB of memory, on one lane."""

    ops: int
    mem_kib: int


READ_MEM_KIB = (19 * MIB, 1024 * MIB)
"""What is accepted from a file: OWASP's least, and what a machine can be expected to have."""
READ_OPS = (2, 16)
READ_WORK_KIB = 2 * 1024 * MIB
"""Most passes times memory. A damaged file is known only when its key was derived, so this bounds that too: a second or
two, and under five on a busy machine. Nothing made here costs more."""


class AccountKind(StrEnum):
    """Where an account's key comes from."""

    PHRASE = "phrase"
    KEY = "key"
    """Imported as a raw key: the recovery phrase does not bring it back."""
    WATCH = "watch"
    """No key here: it is looked at only."""


@dataclass(frozen=True, slots=True)
class Account:
    """One account of the vault, as everybody may know it."""

    address: str
    path: str | None
    """Derivation path of a phrase account; ``None`` for ``solana-keygen``'s habit of using the seed itself."""
    kind: AccountKind = AccountKind.PHRASE


@dataclass(frozen=True, slots=True)
class Header:
    """What stands in clear, read and checked."""

    version: int
    created: str
    cost: KdfCost
    salt: bytes
    nonce: bytes
    accounts: tuple[Account, ...]
    second_factor: bool

    def to_json(self) -> dict[str, Any]:
        """The document without its ciphertext, in the shape of ``version``."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "created": self.created,
            "kdf": {
                "name": "argon2id",
                "ops": self.cost.ops,
                "mem_kib": self.cost.mem_kib,
                "salt": base64.b64encode(self.salt).decode(),
            },
            "aead": {"name": "xchacha20-poly1305", "nonce": base64.b64encode(self.nonce).decode()},
        }
        if self.version == 1:
            return document | {"accounts": [{"address": each.address, "path": each.path} for each in self.accounts]}
        accounts = [{"address": each.address, "kind": str(each.kind), "path": each.path} for each in self.accounts]
        return document | {"accounts": accounts, "second_factor": self.second_factor}

    def associated_data(self) -> bytes:
        return canonical(self.to_json())


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything a vault keeps, in clear. It never leaves the process that opened the vault."""

    accounts: tuple[Account, ...]
    phrase: str | None = field(default=None, repr=False)
    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """32-byte seeds of the ``key`` accounts, by address."""
    second_factor: bytes | None = field(default=None, repr=False)
    """The shared secret of the one-time codes, while enrolled."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Most that may be sent on one day, by token, in its smallest unit. A token without an entry has no limit."""
    contacts: Mapping[str, str] = field(default_factory=dict)
    """The address book: names and addresses, where no other program can exchange them."""

    def to_plaintext(self) -> bytes:
        factor = None if self.second_factor is None else base64.b64encode(self.second_factor).decode()
        keys = {address: base64.b64encode(seed).decode() for address, seed in self.keys.items()}
        plain = {"phrase": self.phrase, "keys": keys, "second_factor": factor}
        return canonical(plain | {"limits": dict(self.limits), "contacts": dict(self.contacts)})


def read_document(raw: bytes, file: Path) -> tuple[Header, bytes]:
    """Header and ciphertext of a vault's bytes; every field is checked.

    Raises:
        WalletError: ``vault_malformed``, ``vault_newer`` or ``vault_kdf``.
    """
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


def read_contents(header: Header, plaintext: bytes | bytearray) -> Contents:
    """What an opened vault holds, in the newest form. ``plaintext`` was authenticated.

    Raises:
        WalletError: ``vault_newer``: another kind of secret than this version knows.
    """
    try:
        return _CONTENTS[header.version](header, json.loads(plaintext))
    except (ValueError, KeyError, TypeError):
        raise WalletError(
            "vault_newer", "The vault holds a kind of secret this version does not know.", "Update kvasir-console."
        ) from None


def write_document(header: Header, ciphertext: bytes) -> bytes:
    document = header.to_json() | {"ciphertext": base64.b64encode(ciphertext).decode()}
    return json.dumps(document, indent=1, ensure_ascii=True).encode() + b"\n"


def canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _parse(document: dict[str, Any]) -> tuple[Header, bytes]:
    """Raises ``ValueError`` saying what is wrong, ``WalletError`` for costs."""
    version = document.get("version")
    if type(version) is not int or version not in _CONTENTS:
        raise ValueError("its version is unknown")
    newer = {"second_factor": bool} if version > 1 else {}
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
        **newer,
    )
    kdf, aead = document["kdf"], document["aead"]
    _fields(kdf, "kdf", name=str, ops=int, mem_kib=int, salt=str)
    _fields(aead, "aead", name=str, nonce=str)
    if (kdf["name"], aead["name"]) != ("argon2id", "xchacha20-poly1305"):
        raise ValueError("its kdf or aead is unknown")
    if not _CREATED.fullmatch(document["created"]):
        raise ValueError("its date of creation is malformed")
    cost = KdfCost(kdf["ops"], kdf["mem_kib"])
    _check_cost(cost)
    accounts = tuple(_account(entry, version) for entry in document["accounts"])
    if not 1 <= len(accounts) <= MAX_ACCOUNTS:
        raise ValueError(f"it names {len(accounts)} accounts")
    if version > 1 and len({each.address for each in accounts}) != len(accounts):
        raise ValueError("it names an account twice")
    ciphertext = _unbase64(document["ciphertext"], "ciphertext")
    if len(ciphertext) <= TAG_BYTES:
        raise ValueError("its ciphertext is too short")
    salt, nonce = _unbase64(kdf["salt"], "salt", SALT_BYTES), _unbase64(aead["nonce"], "nonce", NONCE_BYTES)
    factor = bool(document.get("second_factor", False))
    return Header(version, document["created"], cost, salt, nonce, accounts, factor), ciphertext


def _check_cost(cost: KdfCost) -> None:
    within = READ_OPS[0] <= cost.ops <= READ_OPS[1] and READ_MEM_KIB[0] <= cost.mem_kib <= READ_MEM_KIB[1]
    if not within or cost.ops * cost.mem_kib > READ_WORK_KIB:
        raise WalletError(
            "vault_kdf",
            f"The vault asks for {cost.ops} passes over {cost.mem_kib} KiB; that is too weak or absurd.",
            "The file was altered or made by another program. Nothing was derived from it.",
        )


def _account(entry: object, version: int) -> Account:
    newer = {"kind": str} if version > 1 else {}
    _fields(entry, "an account", address=str, path=(str, type(None)), **newer)
    assert isinstance(entry, dict)  # noqa: S101 - _fields has checked it
    try:
        kind = AccountKind(entry.get("kind", "phrase"))
    except ValueError:
        raise ValueError("an account is of an unknown kind") from None
    if not is_address(entry["address"]):
        raise ValueError("an account's address is malformed")
    if entry["path"] is not None:
        if kind is not AccountKind.PHRASE:
            raise ValueError("an account without a phrase has a derivation path")
        _check_path(entry["path"])
    return Account(entry["address"], entry["path"], kind)


def _check_path(path: str) -> None:
    try:
        parse_path(path)
    except WalletError:
        raise ValueError("an account's derivation path is malformed") from None


def _contents_v1(header: Header, content: Any) -> Contents:
    if content["kind"] != "phrase":
        raise ValueError("another kind of secret")
    accounts: dict[str, Account] = {}
    for each in header.accounts:
        accounts.setdefault(each.address, each)  # version 2 names an account once
    return Contents(tuple(accounts.values()), phrase=str(content["phrase"]))


def _contents_v2(header: Header, content: Any) -> Contents:
    text = (str, type(None))
    _fields(content, "what is sealed", phrase=text, keys=dict, second_factor=text, limits=dict, contacts=dict)
    factor = content["second_factor"]
    if (factor is not None) != header.second_factor:
        raise ValueError("the second factor is not what the header says")
    return Contents(
        header.accounts,
        phrase=content["phrase"],
        keys={address: _unbase64(seed, "key", SEED_BYTES) for address, seed in content["keys"].items()},
        second_factor=None if factor is None else _unbase64(factor, "second factor"),
        limits={str(name): int(limit) for name, limit in content["limits"].items()},
        contacts={str(name): str(address) for name, address in content["contacts"].items()},
    )


_CONTENTS: dict[int, Callable[[Header, Any], Contents]] = {1: _contents_v1, 2: _contents_v2}
"""How the contents of each version are read; a new version adds its own reader and raises ``VERSION``."""


def renewed(header: Header, contents: Contents, salt: bytes, nonce: bytes, cost: KdfCost | None = None) -> Header:
    """The header of the same vault in the newest version, for new contents."""
    return replace(
        header,
        version=VERSION,
        cost=cost or header.cost,
        salt=salt,
        nonce=nonce,
        accounts=contents.accounts,
        second_factor=contents.second_factor is not None,
    )


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
