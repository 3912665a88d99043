"""RPC methods about the cluster: its name, its time, its blockhashes. Source: Solana RPC documentation."""

from __future__ import annotations

from typing import Any

from solders.hash import Hash, ParseHashError

from kvasir_console import __version__
from kvasir_console.wallet.localnet.ledger import SLOTS_PER_EPOCH, Ledger
from kvasir_console.wallet.localnet.rpc import INVALID_PARAMS, Method, Params, RpcFault, pubkey, with_context
from kvasir_console.wallet.localnet.slots import BLOCKHASH_MAX_AGE

_MAX_RENT_BYTES = 10 * 2**20
_MAX_ADDRESSES = 128


def _get_health(_ledger: Ledger, _params: Params) -> str:
    return "ok"


def _get_version(_ledger: Ledger, _params: Params) -> dict[str, Any]:
    return {"solana-core": f"kvasir-localnet {__version__}", "feature-set": 0}


def _get_genesis_hash(ledger: Ledger, _params: Params) -> str:
    return ledger.genesis_hash


def _get_slot(ledger: Ledger, params: Params) -> int:
    return params.config(0).checked_slot(ledger)


def _get_epoch_info(ledger: Ledger, params: Params) -> dict[str, Any]:
    config = params.config(0)
    slot = config.checked_slot(ledger)
    return {
        "absoluteSlot": slot,
        "blockHeight": slot,
        "epoch": slot // SLOTS_PER_EPOCH,
        "slotIndex": slot % SLOTS_PER_EPOCH,
        "slotsInEpoch": SLOTS_PER_EPOCH,
        "transactionCount": ledger.transaction_count(config.commitment()),
    }


def _get_transaction_count(ledger: Ledger, params: Params) -> int:
    config = params.config(0)
    config.checked_slot(ledger)
    return ledger.transaction_count(config.commitment())


def _get_first_available_block(_ledger: Ledger, _params: Params) -> int:
    return 0  # nothing is ever forgotten


def _get_recent_prioritization_fees(ledger: Ledger, params: Params) -> list[dict[str, Any]]:
    """Nobody has to outbid anybody here: the least that got a transaction in was nothing."""
    if params.values:
        for each in params.strings(0, "addresses", _MAX_ADDRESSES):
            pubkey(each)
    return [{"slot": ledger.slot(), "prioritizationFee": 0}]


def _get_latest_blockhash(ledger: Ledger, params: Params) -> dict[str, Any]:
    config = params.config(0)
    config.checked_slot(ledger)
    blockhash, slot = ledger.latest_blockhash(config.commitment())
    return with_context(slot, {"blockhash": str(blockhash), "lastValidBlockHeight": slot + BLOCKHASH_MAX_AGE})


def _is_blockhash_valid(ledger: Ledger, params: Params) -> dict[str, Any]:
    text, config = params.text(0, "blockhash"), params.config(1)
    slot = config.checked_slot(ledger)
    try:
        blockhash = Hash.from_string(text)
    except ParseHashError as error:
        raise RpcFault(INVALID_PARAMS, "Invalid param: a blockhash is 32 bytes in base58") from error
    return with_context(slot, ledger.blockhash_slot(blockhash, config.commitment()) is not None)


def _get_minimum_balance_for_rent_exemption(ledger: Ledger, params: Params) -> int:
    return ledger.rent_exempt_lamports(params.integer(0, "data length", _MAX_RENT_BYTES))


METHODS: dict[str, Method] = {
    "getBlockHeight": _get_slot,
    "getEpochInfo": _get_epoch_info,
    "getFirstAvailableBlock": _get_first_available_block,
    "getGenesisHash": _get_genesis_hash,
    "getHealth": _get_health,
    "getLatestBlockhash": _get_latest_blockhash,
    "getMinimumBalanceForRentExemption": _get_minimum_balance_for_rent_exemption,
    "getRecentPrioritizationFees": _get_recent_prioritization_fees,
    "getSlot": _get_slot,
    "getTransactionCount": _get_transaction_count,
    "getVersion": _get_version,
    "isBlockhashValid": _is_blockhash_valid,
}
