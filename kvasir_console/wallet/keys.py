"""Ed25519 keys of a wallet: derivation (SLIP-0010), addresses, signing, and strict verification.

Derivation is twelve lines of HMAC, checked against the vectors of SLIP-0010. The Solana bindings offer it too, but
they abort on a malformed path with an exception outside ``Exception``, and harden an unhardened step in silence.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import struct
from types import TracebackType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.exceptions import CryptoError
from nacl.signing import VerifyKey
from solders.keypair import Keypair
from solders.pubkey import Pubkey

from kvasir_console.errors import WalletError

KVASIR_PATH = "m/44'/501'/0'/0'"
"""The path of every Kvasir wallet, and Phantom's."""

SEED_BYTES = 32
SIGNATURE_BYTES = 64
_MAX_DEPTH = 10
_HARDENED = 2**31
_STEP = re.compile(r"(0|[1-9][0-9]{0,9})'")
_BASE58 = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,44}")


def parse_path(path: str) -> tuple[int, ...]:
    """Child indices of ``m/44'/501'/0'/0'``, without the hardening bit. ``m`` alone is the master key.

    Raises:
        WalletError: ``derivation_path``; ed25519 has hardened children only (SLIP-0010), so ``'`` is needed on each.
    """
    head, *steps = path.split("/")
    matches = [_STEP.fullmatch(step) for step in steps]
    indices = tuple(int(match[1]) for match in matches if match)
    if head != "m" or len(indices) != len(steps) or len(steps) > _MAX_DEPTH or any(i >= _HARDENED for i in indices):
        raise WalletError(
            "derivation_path",
            f"{path!r} is not a derivation path for ed25519.",
            f"Write it like {KVASIR_PATH}: every step a number below 2147483648 and an apostrophe.",
        )
    return indices


def derive(seed: bytes, path: str | None) -> bytearray:
    """The 32-byte ed25519 seed at ``path`` below a BIP39 seed.

    Args:
        seed: 16 to 64 bytes.
        path: ``None`` takes the first 32 bytes as they are, which is what ``solana-keygen`` does by default.

    Raises:
        WalletError: ``derivation_path``.
    """
    if path is None:
        return bytearray(seed[:SEED_BYTES])
    node = hmac.digest(b"ed25519 seed", seed, hashlib.sha512)
    for index in parse_path(path):
        node = hmac.digest(node[32:], b"\0" + node[:32] + struct.pack(">I", _HARDENED | index), hashlib.sha512)
    return bytearray(node[:32])


class Key:
    """One signing key, readable until ``wipe``.

    The seed lives in one mutable buffer that ``wipe`` overwrites, and OpenSSL's copy is cleansed when it is freed. The
    interpreter may have copied either before; see the security notes for what that leaves.
    """

    __slots__ = ("_seed", "address")

    address: str
    """The public key in base58."""

    def __init__(self, seed: bytearray) -> None:
        """Take over ``seed`` (32 bytes); it is overwritten by ``wipe``."""
        if len(seed) != SEED_BYTES:
            raise WalletError("key_size", f"An ed25519 seed has {SEED_BYTES} bytes, not {len(seed)}.")
        self._seed = seed
        self.address = encode_address(self._private().public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature. Raises ``WalletError`` ``wallet_locked`` after ``wipe``."""
        return self._private().sign(message)

    def keypair(self) -> Keypair:
        """The key as the Solana bindings hold it, to sign transactions. Raises as ``sign``."""
        self._private()
        return Keypair.from_seed(bytes(self._seed))

    def wipe(self) -> None:
        for place in range(len(self._seed)):
            self._seed[place] = 0
        self._seed = bytearray()

    def _private(self) -> Ed25519PrivateKey:
        if not self._seed:
            raise WalletError("wallet_locked", "The key was wiped.", "Unlock the wallet again.")
        return Ed25519PrivateKey.from_private_bytes(self._seed)

    def __enter__(self) -> Key:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wipe()

    def __repr__(self) -> str:
        return f"Key({self.address})"

    def __reduce__(self) -> str:
        raise TypeError("a key is not pickled")


def encode_address(public_key: bytes) -> str:
    """Base58 of a 32-byte public key."""
    return str(Pubkey.from_bytes(public_key))


def decode_address(text: str) -> bytes:
    """The 32 bytes an address names. Raises ``WalletError`` ``address`` for anything but their exact base58 form."""
    if _BASE58.fullmatch(text):
        try:
            return bytes(Pubkey.from_string(text))
        except ValueError:
            pass
    raise WalletError("address", "That is not a Solana address.", "An address is 32 bytes in base58.")


def is_address(text: str) -> bool:
    """Whether ``text`` is exactly the base58 form of 32 bytes."""
    try:
        decode_address(text)
    except WalletError:
        return False
    return True


def verify(wallet: str, message: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is the wallet's over ``message``.

    Strict as libsodium is: a scalar at or above the group order (the malleable twin of a good signature), points of
    small order and encodings that are not canonical are refused. Wrong sizes and bad addresses are ``False`` too.
    """
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        VerifyKey(decode_address(wallet)).verify(message, signature)
    except (WalletError, CryptoError):
        return False
    return True


def decode_signature(text: str) -> bytes:
    """The 64 bytes of a signature in standard base64 with padding, of which each signature has one spelling.

    Raises:
        WalletError: ``signature_malformed``.
    """
    try:
        signature = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        signature = b""
    if len(signature) != SIGNATURE_BYTES or base64.b64encode(signature).decode() != text:
        raise WalletError("signature_malformed", "That is not an ed25519 signature in base64.")
    return signature
