"""Solana's WebSocket subscriptions: being told when a transaction reaches a commitment. One object for a connection.

Source: Solana RPC documentation, "signatureSubscribe". A subscription ends with its one notification.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from solders.signature import Signature

from kvasir_console.wallet.localnet import rpc
from kvasir_console.wallet.localnet.ledger import Commitment, Ledger
from kvasir_console.wallet.localnet.rpc import INVALID_PARAMS, Params, RpcFault, with_context

MAX_SUBSCRIPTIONS = 256


@dataclass(slots=True)
class _Awaited:
    signature: Signature
    commitment: Commitment
    wants_receipt: bool
    """Told once more, before, when the transaction is first seen."""


class Subscriptions:
    """What one client waits for. Use it from the thread that owns the ledger."""

    def __init__(self) -> None:
        self._awaited: dict[int, _Awaited] = {}
        self._ids = itertools.count(1)
        self._methods: dict[str, rpc.Method] = {
            "signatureSubscribe": self._subscribe,
            "signatureUnsubscribe": self._unsubscribe,
        }

    @property
    def waiting(self) -> bool:
        return bool(self._awaited)

    def answer(self, ledger: Ledger, message: bytes) -> bytes | None:
        """The reply to one message of the client, as ``rpc.answer``."""
        return rpc.answer(ledger, self._methods, message)

    def due(self, ledger: Ledger) -> list[bytes]:
        """The notifications to send now."""
        notifications = []
        for number, awaited in list(self._awaited.items()):
            landed = ledger.landed(awaited.signature)
            if landed is None:
                continue
            newest = ledger.slot()
            if awaited.wants_receipt:
                awaited.wants_receipt = False
                notifications.append(_notification(number, newest, "receivedSignature"))
            if newest - landed.slot >= awaited.commitment:
                del self._awaited[number]
                notifications.append(_notification(number, newest - awaited.commitment, {"err": landed.err}))
        return notifications

    def _subscribe(self, _ledger: Ledger, params: Params) -> int:
        signature, config = params.signature(0), params.config(1)
        if len(self._awaited) >= MAX_SUBSCRIPTIONS:
            raise RpcFault(INVALID_PARAMS, f"A connection waits for at most {MAX_SUBSCRIPTIONS} signatures")
        number = next(self._ids)
        wants_receipt = config.flag("enableReceivedNotification")
        self._awaited[number] = _Awaited(signature, config.commitment(), wants_receipt)
        return number

    def _unsubscribe(self, _ledger: Ledger, params: Params) -> bool:
        if self._awaited.pop(params.integer(0, "subscription"), None) is None:
            raise RpcFault(INVALID_PARAMS, "Invalid subscription id.")
        return True


def _notification(number: int, slot: int, value: Any) -> bytes:
    params = {"result": with_context(slot, value), "subscription": number}
    message = {"jsonrpc": "2.0", "method": "signatureNotification", "params": params}
    return json.dumps(message, separators=(",", ":")).encode()
