"""A key of the node's own that may take part for its wallet, so that the node earns while the wallet is locked.

It can prove participation, acknowledge statements and sign a stage's reports, and nothing else; the gateway knows it by
the wallet's signed delegation. It lies in a private file in clear: whoever reads it could take part in this wallet's
name until it ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from kvasir_console.errors import KvasirError
from kvasir_console.wallet import private_file
from kvasir_console.wallet.delegation import MAX_LIFETIME_S
from kvasir_console.wallet.keys import SEED_BYTES, Key

_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SessionKey:
    gateway: str
    wallet: str
    until_s: int
    """Unix seconds of its end."""
    seed: bytes = field(repr=False)

    @property
    def address(self) -> str:
        with Key(bytearray(self.seed)) as key:
            return key.address

    def sign(self, message: bytes) -> bytes:
        with Key(bytearray(self.seed)) as key:
            return key.sign(message)

    def fresh(self, now_s: float) -> bool:
        """Whether more than half of its time is left."""
        return self.until_s - now_s > MAX_LIFETIME_S / 2


def new_session_key(gateway: str, wallet: str, now_s: float) -> SessionKey:
    return SessionKey(gateway, wallet, int(now_s) + MAX_LIFETIME_S, secrets.token_bytes(SEED_BYTES))


def read_session_key(file: Path, gateway: str, wallet: str) -> SessionKey | None:
    """The kept key, unless it is another wallet's or gateway's, or not readable: then a new one is made."""
    with contextlib.suppress(KvasirError, ValueError, KeyError, TypeError, RecursionError):
        data = json.loads(private_file.read(file, _MAX_FILE_BYTES))
        seed, until_s = base64.b64decode(data["seed"], validate=True), data["until_s"]
        if (data["gateway"], data["wallet"]) == (gateway, wallet) and type(until_s) is int and len(seed) == SEED_BYTES:
            return SessionKey(gateway, wallet, until_s, seed)
    return None


def write_session_key(file: Path, key: SessionKey) -> None:
    content = {"gateway": key.gateway, "wallet": key.wallet, "until_s": key.until_s}
    content |= {"seed": base64.b64encode(key.seed).decode()}
    private_file.write(file, json.dumps(content).encode(), replace=True)
