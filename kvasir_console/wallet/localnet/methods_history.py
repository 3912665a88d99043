"""RPC methods about what has landed: statuses, transactions, blocks. Source: Solana RPC documentation."""

from __future__ import annotations

from typing import Any

from solders.message import MessageV0
from solders.signature import Signature
from solders.transaction import VersionedTransaction

from kvasir_console.wallet.localnet import views
from kvasir_console.wallet.localnet.ledger import Commitment, Ledger
from kvasir_console.wallet.localnet.rpc import (
    BLOCK_NOT_AVAILABLE,
    INVALID_PARAMS,
    UNSUPPORTED_VERSION,
    Config,
    Method,
    Params,
    RpcFault,
    signature,
    with_context,
)
from kvasir_console.wallet.localnet.store import LandedTransaction

MAX_STATUSES = 256
MAX_HISTORY = 1000


def _get_signature_statuses(ledger: Ledger, params: Params) -> dict[str, Any]:
    signatures = [signature(text) for text in params.strings(0, "signatures", MAX_STATUSES)]
    params.config(1).flag("searchTransactionHistory")
    newest = ledger.slot()
    found = [ledger.landed(each) for each in signatures]
    return with_context(newest, [None if each is None else _status_json(each, newest) for each in found])


def _status_json(landed: LandedTransaction, newest: int) -> dict[str, Any]:
    age = newest - landed.slot
    return {
        "slot": landed.slot,
        "confirmations": None if age >= Commitment.FINALIZED else age,
        "err": landed.err,
        "status": {"Ok": None} if landed.err is None else {"Err": landed.err},
        "confirmationStatus": _level(age),
    }


def _level(age: int) -> str:
    return max(level for level in Commitment if age >= level).name.lower()


def _get_transaction(ledger: Ledger, params: Params) -> dict[str, Any] | None:
    wanted, config = params.signature(0), _config_or_encoding(params, 1)
    commitment = _at_least_confirmed(config)
    landed = ledger.landed(wanted)
    if landed is None or landed.slot > ledger.slot(commitment):
        return None
    return {"slot": landed.slot, "blockTime": landed.block_time, **_transaction_json(landed, config)}


def _transaction_json(landed: LandedTransaction, config: Config) -> dict[str, Any]:
    """``transaction``, ``meta`` and, for a client that says which versions it reads, ``version``."""
    highest_version = config.integer("maxSupportedTransactionVersion", -1, 0, 255)
    encoding = config.text("encoding", "json")
    tx = VersionedTransaction.from_bytes(landed.raw)
    is_v0 = isinstance(tx.message, MessageV0)
    if is_v0 and highest_version < 0:
        raise RpcFault(
            UNSUPPORTED_VERSION,
            "Transaction version (0) is not supported by the requesting client. Please try the request again with "
            'the following configuration parameter: "maxSupportedTransactionVersion": 0',
            0,
        )
    try:
        body = views.transaction_json(tx, encoding)
    except views.UnavailableEncodingError as error:
        raise RpcFault(INVALID_PARAMS, f"Invalid param: {error}") from error
    meta = views.parsed_meta(tx, landed.meta) if encoding == "jsonParsed" else landed.meta
    reply = {"transaction": body, "meta": meta}
    return reply if highest_version < 0 else reply | {"version": 0 if is_v0 else "legacy"}


def _get_signatures_for_address(ledger: Ledger, params: Params) -> list[dict[str, Any]]:
    address, config = params.pubkey(0), params.config(1)
    commitment = _at_least_confirmed(config)
    config.checked_slot(ledger)
    found = ledger.history(
        address,
        commitment=commitment,
        limit=config.integer("limit", MAX_HISTORY, 1, MAX_HISTORY),
        before=config.optional_signature("before"),
        until=config.optional_signature("until"),
    )
    newest = ledger.slot()
    return [
        {
            "signature": str(Signature.from_bytes(each.signature)),
            "slot": each.slot,
            "err": each.err,
            "memo": each.memo,
            "blockTime": each.block_time,
            "confirmationStatus": _level(newest - each.slot),
        }
        for each in found
    ]


def _config_or_encoding(params: Params, index: int) -> Config:
    """Old clients give the encoding as plain text where the options stand."""
    if index < len(params.values) and isinstance(params.values[index], str):
        return Config({"encoding": params.values[index]})
    return params.config(index)


def _at_least_confirmed(config: Config) -> Commitment:
    commitment = config.commitment()
    if commitment < Commitment.CONFIRMED:
        raise RpcFault(INVALID_PARAMS, "Method does not support commitment below `confirmed`")
    return commitment


def _get_block_time(ledger: Ledger, params: Params) -> int:
    return ledger.block(_available(ledger, params.integer(0, "slot"), Commitment.CONFIRMED)).time


def _get_block(ledger: Ledger, params: Params) -> dict[str, Any]:
    wanted, config = params.integer(0, "slot"), _config_or_encoding(params, 1)
    slot = _available(ledger, wanted, _at_least_confirmed(config))
    details = config.text("transactionDetails", "full")
    if details not in ("full", "signatures", "none"):
        raise RpcFault(INVALID_PARAMS, "Invalid param: transactionDetails must be full, signatures or none")
    block = ledger.block(slot)
    reply: dict[str, Any] = {
        "blockhash": str(block.blockhash),
        "previousBlockhash": str(block.previous),
        "parentSlot": max(0, slot - 1),
        "blockHeight": slot,
        "blockTime": block.time,
    }
    if details == "full":
        reply["transactions"] = [_transaction_json(each, config) for each in block.landed]
    elif details == "signatures":
        reply["signatures"] = [str(Signature.from_bytes(each.signature)) for each in block.landed]
    return reply if config.values.get("rewards") is False else reply | {"rewards": []}


def _available(ledger: Ledger, slot: int, commitment: Commitment) -> int:
    if slot > ledger.slot(commitment):
        raise RpcFault(BLOCK_NOT_AVAILABLE, f"Block not available for slot {slot}")
    return slot


METHODS: dict[str, Method] = {
    "getBlock": _get_block,
    "getBlockTime": _get_block_time,
    "getSignatureStatuses": _get_signature_statuses,
    "getSignaturesForAddress": _get_signatures_for_address,
    "getTransaction": _get_transaction,
}
