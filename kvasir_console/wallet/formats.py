"""Key files of other wallets, read as hostile input and written for export.

    cli       solana-keygen's file: a JSON array of 64 numbers, secret half and public half; in clear, so mode 0600
    desktop   the Kvasir desktop wallet's ``wallet.enc``: scrypt, AES-256-GCM, JSON with base64 fields
    browser   the Kvasir web wallet's envelope: PBKDF2-HMAC-SHA256 (200,000 rounds), AES-256-GCM
    text      what people paste: a recovery phrase, a base58 key of 64 bytes, or the array of numbers

The layouts are those of the public wallets (gateway contract, section 4). ``parse`` checks everything a file says
before anything is derived from it: costs within bounds, whole tags, exact sizes. Each refusal is a ``WalletError``
whose code is one of ``key_file_malformed``, ``_unsupported``, ``_kdf_parameters``, ``_permissions``,
``_wrong_passphrase_or_damaged`` (authentication failed; the two cannot be told apart) and ``_bad_secret`` (the file is
whole, what is in it is no usable key).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvasir_console.errors import SystemResourceError, WalletError
from kvasir_console.wallet import phrase as bip39
from kvasir_console.wallet.keys import KVASIR_PATH, SEED_BYTES, Key, decode_address
from kvasir_console.wallet.localnet import base58

MAX_FILE_BYTES = 64 * 2**10
KEY_BYTES = 64
"""A secret key as Solana writes it: the 32-byte ed25519 seed, then the public key."""

DESKTOP_PATH = KVASIR_PATH
"""Where the Kvasir wallets derive their one account."""

_SALT_BYTES, _IV_BYTES, _TAG_BYTES = 16, 12, 16
_SCRYPT = (16_384, 8, 1)
_MAX_SCRYPT_BYTES = 512 * 2**20
_MAX_SCRYPT_WORK = 2**23
"""N times r times p: some seconds of one core."""
_PBKDF2_ROUNDS = 200_000
_RAW = "raw:"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A recovery phrase in its canonical spelling."""

    words: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RawKey:
    """One key without a phrase behind it."""

    seed: bytes = field(repr=False)
    address: str


Secret = Phrase | RawKey


@dataclass(frozen=True, slots=True)
class Sealed:
    """An encrypted file that was read and checked, and is not opened yet."""

    kind: str
    salt: bytes
    iv: bytes
    ciphertext: bytes = field(repr=False)
    """With its 16-byte tag at the end."""
    scrypt: tuple[int, int, int] | None
    """N, r and p; ``None`` for PBKDF2."""

    def open(self, passphrase: str) -> Secret:
        """What is inside. Takes up to some seconds: call it in a thread.

        The passphrase is used as it was typed, in UTF-8: these wallets do not normalise it.

        Raises:
            WalletError: ``key_file_wrong_passphrase_or_damaged`` or ``key_file_bad_secret``.
        """
        try:
            plaintext = AESGCM(_derive(passphrase, self.salt, self.scrypt)).decrypt(self.iv, self.ciphertext, None)
        except InvalidTag:
            raise _refusal(
                "wrong_passphrase_or_damaged",
                "The passphrase does not open the file, or the file was altered.",
                "Try again, or take another copy of the file.",
            ) from None
        try:
            text = plaintext.decode()
        except UnicodeDecodeError:
            raise _bad_secret("what it holds is no text") from None
        if text.startswith(_RAW) and self.kind == "desktop":
            return _raw_key(_unbase58(text.removeprefix(_RAW), "bad_secret"))
        return _phrase(text)


def read(path: Path) -> Secret | Sealed:
    """Read a key file of any kind; which one it is shows in it.

    Raises:
        WalletError: as ``parse``, and ``key_file_permissions`` for a key in clear that others may read.
        SystemResourceError: it cannot be read.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _malformed("it is not a regular file")
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SystemResourceError("file_unavailable", f"{path} cannot be read: {error.strerror or error}.") from error
    content = parse(data)
    if not isinstance(content, Sealed) and (status.st_mode & 0o077 or status.st_uid not in (0, os.getuid())):
        raise _refusal(
            "permissions",
            f"Other users may read {path}, and it holds a key in clear.",
            f"Close it with: chmod 600 '{path}'. Whoever read it has the key: consider a new wallet.",
        )
    return content


def parse(data: bytes) -> Secret | Sealed:
    """The secret in a clear file, or a sealed one to be opened. Nothing is derived here.

    Raises:
        WalletError: the code says what is wrong; see the module.
    """
    if len(data) > MAX_FILE_BYTES:
        raise _malformed(f"it has more than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _malformed("it is not text") from None
    if not text.lstrip().startswith("{"):
        return parse_text(text)
    document = _json(text)
    if not isinstance(document, dict):
        raise _malformed("it is not JSON of a known form")
    if "kvasir" in document:
        return _desktop(document)
    if "v" in document or "ct" in document:
        return _browser(document)
    raise _malformed("it is not a key file of a known kind")


def parse_text(text: str) -> Secret:
    """A phrase, a base58 key or an array of 64 numbers, as somebody pasted it.

    Raises:
        WalletError: ``phrase_...`` for several words that are no phrase, else as ``parse``.
    """
    text = text.strip()
    if text.startswith("["):
        return _numbers(_json(text))
    if sum(word.isalpha() for word in text.split()) > 1:
        return Phrase(bip39.check(text))
    return _raw_key(_unbase58(text, "malformed"))


def write_cli(key: Key) -> bytes:
    """solana-keygen's file: 64 numbers on one line."""
    return json.dumps(list(_both_halves(key)), separators=(",", ":")).encode()


def write_base58(key: Key) -> str:
    """The key as other wallets' "private key" boxes take it: base58 of 64 bytes."""
    return base58.encode(_both_halves(key))


def write_desktop(secret: Phrase | Key, passphrase: str) -> bytes:
    """The desktop wallet's file, with the costs it writes itself."""
    plaintext = secret.words if isinstance(secret, Phrase) else _RAW + write_base58(secret)
    salt, iv = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_IV_BYTES)
    sealed = AESGCM(_derive(passphrase, salt, _SCRYPT)).encrypt(iv, plaintext.encode(), None)
    n, r, p = _SCRYPT
    document = {"kvasir": 1, "kdf": "scrypt", "N": n, "r": r, "p": p, "salt": _base64(salt), "iv": _base64(iv)}
    document |= {"ct": _base64(sealed[:-_TAG_BYTES]), "tag": _base64(sealed[-_TAG_BYTES:])}
    return json.dumps(document, separators=(",", ":")).encode()


def write_browser(secret: Phrase, passphrase: str) -> bytes:
    """The web wallet's envelope; it holds phrases only."""
    salt, iv = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_IV_BYTES)
    sealed = AESGCM(_derive(passphrase, salt, None)).encrypt(iv, secret.words.encode(), None)
    document = {"v": 1, "salt": _base64(salt), "iv": _base64(iv), "ct": _base64(sealed)}
    return json.dumps(document, separators=(",", ":")).encode()


def _desktop(document: Mapping[str, Any]) -> Sealed:
    if type(document["kvasir"]) is not int:
        raise _malformed("its version is not a number")
    if document["kvasir"] != 1:
        raise _refusal("unsupported", "The file is of another version of the desktop wallet.", "Update kvasir-console.")
    if not isinstance(document.get("kdf"), str):
        raise _malformed("it names no key derivation")
    if document["kdf"] != "scrypt":
        raise _refusal("unsupported", "The file's key derivation is an unknown one.", "Update kvasir-console.")
    costs = tuple(document.get(name) for name in ("N", "r", "p"))
    if any(type(cost) is not int for cost in costs):
        raise _malformed("a cost in it is not a number")
    n, r, p = (int(cost) for cost in costs if cost is not None)
    _check_scrypt(n, r, p)
    salt, iv = _bytes(document, "salt", _SALT_BYTES), _bytes(document, "iv", _IV_BYTES)
    ciphertext, tag = _bytes(document, "ct"), _bytes(document, "tag", _TAG_BYTES)
    return Sealed("desktop", salt, iv, ciphertext + tag, (n, r, p))


def _browser(document: Mapping[str, Any]) -> Sealed:
    if type(document.get("v")) is not int:
        raise _malformed("its version is not a number")
    if document["v"] != 1:
        raise _refusal("unsupported", "The file is of another version of the web wallet.", "Update kvasir-console.")
    salt, iv = _bytes(document, "salt", _SALT_BYTES), _bytes(document, "iv", _IV_BYTES)
    ciphertext = _bytes(document, "ct")
    if len(ciphertext) < _TAG_BYTES:
        raise _malformed("its ciphertext is shorter than a tag")
    return Sealed("browser", salt, iv, ciphertext, None)


def _check_scrypt(n: int, r: int, p: int) -> None:
    """RFC 7914's rules, and what a machine can be expected to spend. Zero is no default here, as it is elsewhere."""
    legal = n > 1 and n & (n - 1) == 0 and r > 0 and p > 0
    if not legal or 128 * n * r > _MAX_SCRYPT_BYTES or n * r * p > _MAX_SCRYPT_WORK:
        raise _refusal(
            "kdf_parameters",
            "The file's scrypt parameters are absurd.",
            "The file was altered or made by another program. Nothing was derived from it.",
        )


def _derive(passphrase: str, salt: bytes, scrypt: tuple[int, int, int] | None) -> bytes:
    try:
        password = passphrase.encode()
    except UnicodeEncodeError:  # its message would repeat the passphrase
        raise WalletError("passphrase_text", "The passphrase holds bytes that are not text.") from None
    if scrypt is None:
        return hashlib.pbkdf2_hmac("sha256", password, salt, _PBKDF2_ROUNDS, 32)
    n, r, p = scrypt
    try:
        return hashlib.scrypt(password, salt=salt, n=n, r=r, p=p, maxmem=256 * n * r + 2**20, dklen=32)
    except (MemoryError, ValueError):
        raise SystemResourceError(
            "memory_short", f"Opening the file takes {128 * n * r // 2**20} MiB of memory, and that much is not free."
        ) from None


def _numbers(document: object) -> RawKey:
    if not isinstance(document, list) or len(document) != KEY_BYTES:
        raise _malformed(f"a key file is an array of {KEY_BYTES} numbers")
    if any(type(number) is not int or not 0 <= number < 256 for number in document):
        raise _malformed("something in its array is not a byte")
    return _raw_key(bytes(document))


def _raw_key(both: bytes) -> RawKey:
    """Check that the public half belongs to the secret half: a damaged key would give a wallet nobody can use."""
    if len(both) != KEY_BYTES:
        raise _bad_secret(f"its key has {len(both)} bytes, not {KEY_BYTES}")
    with Key(bytearray(both[:SEED_BYTES])) as key:
        if decode_address(key.address) != both[SEED_BYTES:]:
            raise _bad_secret("the public half of the key does not belong to its secret half")
        return RawKey(both[:SEED_BYTES], key.address)


def _both_halves(key: Key) -> bytes:
    return bytes(key.keypair())


def _phrase(text: str) -> Phrase:
    try:
        return Phrase(bip39.check(text))
    except WalletError as error:
        raise _bad_secret(error.message[:1].lower() + error.message[1:].rstrip(".")) from None


def _unbase58(text: str, refusal: str) -> bytes:
    try:
        if not 0 < len(text) <= 2 * KEY_BYTES:
            raise ValueError
        return base58.decode(text)
    except ValueError:
        raise _refusal(refusal, "That is neither a recovery phrase nor a key in base58.") from None


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _malformed("it is not JSON") from None


def _bytes(document: Mapping[str, Any], name: str, size: int | None = None) -> bytes:
    value = document.get(name)
    if not isinstance(value, str):
        raise _malformed(f"its {name} is missing or no text")
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise _malformed(f"its {name} is not base64") from None
    if size is not None and len(data) != size:
        raise _malformed(f"its {name} has {len(data)} bytes, not {size}")
    return data


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _malformed(what: str) -> WalletError:
    return _refusal("malformed", f"That is no key file: {what}.", "Nothing was read from it.")


def _bad_secret(what: str) -> WalletError:
    return _refusal("bad_secret", f"The key cannot be used: {what}.", "Take another copy of it.")


def _refusal(what: str, message: str, hint: str = "") -> WalletError:
    return WalletError(f"key_file_{what}", message, hint)
