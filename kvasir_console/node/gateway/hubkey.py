"""The hub's signing key on the operator's disk, and how it is exchanged for another.

The key is 32 bytes in ``hub-key`` (0600). A rotation is written in three steps, and a crash after any of them is
finished, or has not begun, at the next start: the new key to ``hub-key.next``, the old key's signature over it to
``hub-key-rotations.json``, then the new file takes the old one's name.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nacl.signing import SigningKey

from kvasir_console.errors import KvasirError, SystemResourceError
from kvasir_console.relay.wire.statement import MAX_ROTATIONS, Rotation
from kvasir_console.wallet import private_file
from kvasir_console.wallet.keys import encode_address

KEY_FILE = "hub-key"
_NEXT_FILE = "hub-key.next"
_ROTATIONS_FILE = "hub-key-rotations.json"
_MAX_FILE_BYTES = 256 * 1024


def rotate(directory: Path, now: int) -> Rotation:
    """Give the hub of ``directory`` a new key; the gateway must not be running.

    Raises:
        SystemResourceError: there is no key yet, or a file cannot be read or written.
    """
    finish_rotation(directory)
    file = directory / KEY_FILE
    try:
        old = SigningKey(private_file.read(file, 32))
    except (KvasirError, ValueError) as error:
        raise SystemResourceError(
            "hub_key_unavailable", f"There is no hub key in {file}.", "The gateway makes one when it starts."
        ) from error
    seed = secrets.token_bytes(32)
    bare = Rotation(_address(old), _address(SigningKey(seed)), now)
    rotation = replace(bare, signature=bytes(old.sign(bare.text().encode()).signature))
    private_file.write(directory / _NEXT_FILE, seed, replace=True)
    _write_rotations(directory, [*read_rotations(directory), rotation][-MAX_ROTATIONS:])
    finish_rotation(directory)
    return rotation


def finish_rotation(directory: Path) -> None:
    """Complete a rotation that was signed for and not carried out; drop one that was not signed for."""
    upcoming = directory / _NEXT_FILE
    if not upcoming.exists():
        return
    rotations = read_rotations(directory)
    try:
        announced = _address(SigningKey(private_file.read(upcoming, 32)))
        if rotations and rotations[-1].new == announced:
            upcoming.replace(directory / KEY_FILE)
        else:
            upcoming.unlink()
    except (KvasirError, ValueError, OSError) as error:
        raise SystemResourceError(
            "hub_key_unavailable", f"{upcoming} cannot be used.", "Check its permissions."
        ) from error


def read_rotations(directory: Path) -> tuple[Rotation, ...]:
    """Raises ``SystemResourceError`` for a file that cannot be read."""
    file = directory / _ROTATIONS_FILE
    if not file.exists():
        return ()
    try:
        entries = json.loads(private_file.read(file, _MAX_FILE_BYTES))
        return tuple(Rotation.parse(each["text"], base64.b64decode(each["signature"])) for each in entries)
    except (KvasirError, ValueError, KeyError, TypeError) as error:
        raise SystemResourceError(
            "hub_key_unavailable",
            f"{file} does not hold the hub key's rotations.",
            "Restore it from a backup: nodes that know an older key need it.",
        ) from error


def _write_rotations(directory: Path, rotations: Sequence[Rotation]) -> None:
    entries = [{"text": each.text(), "signature": base64.b64encode(each.signature).decode()} for each in rotations]
    private_file.write(directory / _ROTATIONS_FILE, json.dumps(entries).encode(), replace=True)


def _address(key: SigningKey) -> str:
    return encode_address(bytes(key.verify_key))
