"""What the tests of the signer's rules and of its process share."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from kvasir_console.errors import KvasirError
from kvasir_console.relay.wire import signed as texts
from kvasir_console.wallet import (
    intents,
)
from kvasir_console.wallet.signer_client import SignerStatus

DATA = Path(__file__).parents[2] / "data" / "conformance"
BRIDGE = next(
    case for case in json.loads((DATA / "signed_messages.json").read_text())["messages"] if case["name"] == "bridge_0"
)
PHRASE = json.loads((DATA / "wallet_derivation.json").read_text())["phrases"][0]["mnemonic"]
WALLET, HOST, PASSPHRASE = BRIDGE["signer"], "gate.example.net", "correct horse battery"
PARTICIPATION = intents.Participation(HOST, BRIDGE["text"], WALLET, BRIDGE["fields"]["nonce"])
LOCKED, UNLOCKED = SignerStatus(True, WALLET, HOST), SignerStatus(False, WALLET, HOST)


async def refusal(awaitable) -> KvasirError:
    with pytest.raises(KvasirError) as caught:
        await awaitable
    assert PASSPHRASE not in str(caught.value)
    return caught.value


def claim(issued: datetime, host: str = HOST) -> intents.ActionIntent:
    return intents.ActionIntent(
        host,
        texts.ActionKind.CLAIM,
        {"micro_kvr": 1_277_952},
        "c7926ef0444886b1f6d113b980986ed1",
        texts.rfc3339(issued),
        texts.rfc3339(issued + timedelta(minutes=5)),
    )
