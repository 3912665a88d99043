"""One-time codes (RFC 6238: HMAC-SHA1, six digits, thirty seconds) and back-up codes, each good for one use.

A code is accepted only for a step greater than the last accepted one, within one step of now, and that number is on
the disk before anything is granted: no code works twice, not after a restart and not after the clock went back. From
the fifth failure on every further one doubles a pause, which survives a restart too. Back-up codes are random, so they
are kept as plain SHA-256 (a slow hash protects guessable secrets, and 80 bits are not); both kinds share the pause.

The algorithm is twenty lines, checked against the RFCs' own tables; a library's ``verify`` keeps no last step.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvasir_console.errors import KvasirError, WalletError
from kvasir_console.wallet import private_file

DIGITS = 6
STEP_S = 30
WINDOW_STEPS = 1
SECRET_BYTES = 20
FREE_FAILURES = 5
"""Failures in a row before the first pause."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30, 3600
BACKUP_CODES = 10
BACKUP_CODE_BYTES = 10
"""80 bits."""
MAX_FILE_BYTES = 16 * 2**10

_CODE = re.compile(r"[0-9]{6}")
_HASH = re.compile(r"[0-9a-f]{64}")


# The algorithm


def hotp(secret: bytes, counter: int, digits: int = DIGITS) -> str:
    """The code of one counter (RFC 4226, section 5.3)."""
    mac = hmac.digest(secret, struct.pack(">Q", counter), hashlib.sha1)
    (number,) = struct.unpack_from(">I", mac, mac[-1] & 0xF)
    return str((number & 0x7FFFFFFF) % 10**digits).zfill(digits)


def matching_step(secret: bytes, code: str, now: float, after: int | None = None) -> int | None:
    """The step a code belongs to, within the window around ``now`` and greater than ``after``; every one is compared.

    Anything but six ASCII digits matches nothing.
    """
    if not _CODE.fullmatch(code):
        return None
    current = int(now) // STEP_S
    found = None
    for step in range(max(current - WINDOW_STEPS, 0), current + WINDOW_STEPS + 1):
        if hmac.compare_digest(hotp(secret, step), code) and (after is None or step > after):
            found = step
    return found


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def encode_secret(secret: bytes) -> str:
    """Base32 without padding, as authenticators take it."""
    return base64.b32encode(secret).decode().rstrip("=")


def decode_secret(text: str) -> bytes:
    """The bytes of a base32 secret in any spelling: capitals or not, with spaces, hyphens or padding.

    Raises:
        WalletError: ``second_factor_secret``.
    """
    letters = re.sub(r"[\s=-]", "", text).upper()
    try:
        return base64.b32decode(letters + "=" * (-len(letters) % 8))
    except (binascii.Error, ValueError):
        raise WalletError("second_factor_secret", "That is not a base32 secret.") from None


def otpauth_uri(issuer: str, account: str, secret: bytes) -> str:
    """The link an authenticator reads, byte for byte as a Kvasir gateway writes it."""
    label = quote(f"{issuer}:{account}", safe="")
    query = f"secret={encode_secret(secret)}&issuer={quote(issuer, safe='')}"
    return f"otpauth://totp/{label}?{query}&algorithm=SHA1&digits={DIGITS}&period={STEP_S}"


def short_uri(uri: str) -> str:
    """The link without what every authenticator takes for granted: its QR code fits a terminal of 24 lines."""
    return uri.removesuffix(f"&algorithm=SHA1&digits={DIGITS}&period={STEP_S}")


# Back-up codes


def new_backup_codes() -> tuple[str, ...]:
    """Ten codes of 80 bits, ``XXXX-XXXX-XXXX-XXXX`` in base32. Show them once."""
    texts = [base64.b32encode(secrets.token_bytes(BACKUP_CODE_BYTES)).decode() for _ in range(BACKUP_CODES)]
    return tuple("-".join(text[place : place + 4] for place in range(0, len(text), 4)) for text in texts)


def new_gateway_backup_codes() -> tuple[str, ...]:
    """Ten codes in the form of a gateway's administration: ``xxxxx-xxxxx`` in hexadecimal (contract, section 2)."""
    texts = [secrets.token_hex(5) for _ in range(BACKUP_CODES)]
    return tuple(f"{text[:5]}-{text[5:]}" for text in texts)


def normalise_backup_code(typed: str) -> str:
    return typed.strip().lower().replace("-", "")


def backup_code_hash(typed: str) -> str:
    """What is stored of a code: SHA-256, in hex, of the normalised text."""
    return hashlib.sha256(normalise_backup_code(typed).encode()).hexdigest()


def without_backup_code(stored: Sequence[str], typed: str) -> tuple[str, ...] | None:
    """The hashes that are left when ``typed`` is one of them and is spent; ``None`` when it is none."""
    try:
        wanted = backup_code_hash(typed)
    except UnicodeEncodeError:
        return None
    matches = [hmac.compare_digest(each, wanted) for each in stored]
    if not any(matches):
        return None
    spent = matches.index(True)
    return tuple(each for place, each in enumerate(stored) if place != spent)


# What is remembered between codes


@dataclass(frozen=True, slots=True)
class FactorState:
    """Everything that has to survive a restart."""

    last_step: int | None = None
    backup_hashes: tuple[str, ...] = ()
    failures: int = 0
    failed_at_s: int = 0
    """Unix seconds of the last failure."""

    def pause_s(self, now: float) -> float:
        """Seconds until the next try. A clock that went back waits the pause again, not until it has caught up."""
        if self.failures < FREE_FAILURES:
            return 0.0
        pause = min(FIRST_PAUSE_S << min(self.failures - FREE_FAILURES, 32), LONGEST_PAUSE_S)
        return max(min(self.failed_at_s + pause - now, pause), 0.0)

    def after_failure(self, now: float) -> FactorState:
        return replace(self, failures=self.failures + 1, failed_at_s=int(now))

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "last_step": self.last_step,
            "backup_hashes": list(self.backup_hashes),
            "failures": self.failures,
            "failed_at_s": self.failed_at_s,
        }


def judge(state: FactorState, secret: bytes, code: str, now: float) -> tuple[FactorState, bool]:
    """The state after ``code`` was tried, and whether it is granted. Pure; pauses are the caller's to keep."""
    step = matching_step(secret, code, now, state.last_step)
    if step is not None:
        return replace(state, last_step=step, failures=0, failed_at_s=0), True
    if not _CODE.fullmatch(code):
        left = without_backup_code(state.backup_hashes, code)
        if left is not None:
            return replace(state, backup_hashes=left, failures=0, failed_at_s=0), True
    return state.after_failure(now), False


def state_file(vault: Path) -> Path:
    return vault.with_name("second-factor.json")


class SecondFactor:
    """Checks codes against a secret, with the state kept in a private file."""

    def __init__(self, file: Path, secret: bytes, now: Callable[[], float] = time.time) -> None:
        self._file, self._secret, self._now = file, secret, now

    def check(self, code: str) -> None:
        """Returns if ``code`` is granted, once; the file says so before this does.

        Raises:
            WalletError: ``second_factor_refused``, ``second_factor_paused``, or ``second_factor_state``.
            SystemResourceError: the state cannot be written; nothing is granted then.
        """
        with private_file.exclusive(self._file):
            state, now = self._read(), self._now()
            pause_s = state.pause_s(now)
            if pause_s > 0:
                if now < state.failed_at_s:  # the clock went back: the pause runs from here
                    self._write(replace(state, failed_at_s=int(now)))
                raise WalletError(
                    "second_factor_paused",
                    "Too many wrong codes.",
                    f"Try again in {pause_s:.0f} seconds, with a fresh code.",
                )
            state, granted = judge(state, self._secret, code, now)
            self._write(state)
        if not granted:
            raise WalletError(
                "second_factor_refused",
                "That code is wrong, or was used already.",
                "Wait for the next one. If codes keep failing, compare this machine's clock with your phone's.",
            )

    def backup_codes_left(self) -> int:
        return len(self._read().backup_hashes)

    def enrol(self, code: str, backup_codes: Sequence[str]) -> None:
        """Begin a new state, if ``code`` shows that the authenticator has the secret.

        Raises:
            WalletError: ``second_factor_refused``.
        """
        hashes = tuple(backup_code_hash(each) for each in backup_codes)
        state, granted = judge(FactorState(), self._secret, code, self._now())
        if not granted:
            raise WalletError(
                "second_factor_refused",
                "That code does not fit the secret that was shown.",
                "Compare this machine's clock with your phone's, and begin again. Nothing was changed.",
            )
        self._write(replace(state, backup_hashes=hashes))

    def renew_backup_codes(self, backup_codes: Sequence[str]) -> None:
        """Replace all back-up codes; the old ones are void."""
        with private_file.exclusive(self._file):
            self._write(replace(self._read(), backup_hashes=tuple(backup_code_hash(each) for each in backup_codes)))

    def _read(self) -> FactorState:
        try:
            data = private_file.read(self._file, MAX_FILE_BYTES)
        except WalletError as error:
            if error.code != "vault_missing":
                raise
            raise _lost(self._file, "is not there") from None
        try:
            return parse_state(data)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _lost(self._file, "is damaged") from None

    def _write(self, state: FactorState) -> None:
        private_file.write(self._file, json.dumps(state.to_json()).encode(), replace=True)


def parse_state(data: bytes) -> FactorState:
    """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for anything ``to_json`` does not write."""
    document = json.loads(data)
    if not isinstance(document, dict) or document["version"] != 1:
        raise ValueError("another version")
    step, hashes = document["last_step"], document["backup_hashes"]
    numbers = (document["failures"], document["failed_at_s"], 0 if step is None else step)
    if any(type(number) is not int or not 0 <= number < 2**53 for number in numbers):
        raise ValueError("a number")
    if type(hashes) is not list or not all(isinstance(each, str) and _HASH.fullmatch(each) for each in hashes):
        raise ValueError("a hash")
    return FactorState(step, tuple(hashes), document["failures"], document["failed_at_s"])


def _lost(file: Path, how: str) -> KvasirError:
    return WalletError(
        "second_factor_state",
        f"{file} {how}: it says which codes were used already.",
        "Nothing is released without it. Put it back from a copy, or import the recovery phrase again.",
    )
