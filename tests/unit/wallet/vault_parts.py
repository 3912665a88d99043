"""A vault that opens fast, and what its tests say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir_console.errors import KvasirError
from kvasir_console.wallet import keys, vault

CASE = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "wallet_derivation.json").read_text())[
    "phrases"
][2]
PHRASE, PASSPHRASE = CASE["mnemonic"], "correct horse battery"
CHEAP = vault.KdfCost(2, 19 * 1024)
OTHER = "BLeUXTx9thHGT7VJUtF9vHEmfMDgW1nnKZ9UVer2CoLX"


def refusal(file: Path, passphrase: str = PASSPHRASE) -> KvasirError:
    with pytest.raises(KvasirError) as caught:
        vault.open_vault(file, passphrase)
    assert PHRASE.split()[0] not in str(caught.value)
    assert passphrase not in str(caught.value)
    return caught.value


def left_beside(file: Path) -> set[str]:
    """Names in the vault's directory besides its own and its lock's."""
    return {each.name for each in file.parent.iterdir()} - {file.name, f".{file.name}.lock"}


def edit(file: Path, **changes: object) -> None:
    """Change fields; ``kdf__ops`` is ``ops`` in ``kdf``."""
    document = json.loads(file.read_text())
    for name, value in changes.items():
        *tables, last = name.split("__")
        table = document
        for each in tables:
            table = table[each]
        table[last] = value
    file.write_text(json.dumps(document))


def entry(address: str, kind: str = "phrase", path: str | None = keys.KVASIR_PATH) -> dict[str, str | None]:
    return {"address": address, "kind": kind, "path": path}
