"""RPC methods that run a transaction, for real or on trial. Source: Solana RPC documentation."""

from __future__ import annotations

from typing import Any

from solders.message import from_bytes_versioned
from solders.signature import Signature
from solders.transaction import VersionedTransaction

from kvasir_console.wallet.localnet.ledger import Ledger, RejectedError, Simulation
from kvasir_console.wallet.localnet.methods_accounts import account_json
from kvasir_console.wallet.localnet.rpc import (
    INVALID_PARAMS,
    PREFLIGHT_FAILURE,
    SIGNATURE_FAILURE,
    Config,
    Method,
    Params,
    RpcFault,
    bounded_strings,
    pubkey,
    transaction_bytes,
    with_context,
)
from kvasir_console.wallet.localnet.slots import BLOCKHASH_MAX_AGE

_MAX_ENCODED = 2048


def _send_transaction(ledger: Ledger, params: Params) -> str:
    config = params.config(1)
    tx = _transaction(params, config.text("encoding", "base58"))
    preflight = None if config.flag("skipPreflight") else config.commitment("preflightCommitment")
    try:
        return str(ledger.submit(tx, preflight=preflight))
    except RejectedError as rejected:
        raise _rejection(rejected) from rejected


def _simulate_transaction(ledger: Ledger, params: Params) -> dict[str, Any]:
    config = params.config(1)
    tx = _transaction(params, config.text("encoding", "base58"))
    verify, replace = config.flag("sigVerify"), config.flag("replaceRecentBlockhash")
    if verify and replace:
        raise RpcFault(INVALID_PARAMS, "Invalid param: sigVerify may not be used with replaceRecentBlockhash")
    slot = config.checked_slot(ledger)
    wanted = Config(values if isinstance(values := config.values.get("accounts"), dict) else {})
    addresses = [pubkey(text) for text in bounded_strings(wanted.values.get("addresses", []), "addresses", 64)]
    try:
        simulation = ledger.simulate(tx, verify=verify, any_blockhash=replace, at=config.commitment())
    except RejectedError as rejected:
        raise _rejection(rejected) from rejected
    result = _simulation_json(simulation)
    if addresses:
        result["accounts"] = [
            account_json(ledger, simulation.accounts.get(each, ledger.account(each)), wanted, "base64")
            for each in addresses
        ]
    if config.flag("innerInstructions"):
        result["innerInstructions"] = simulation.inner_instructions
    if replace:
        blockhash, blockhash_slot = ledger.latest_blockhash(config.commitment())
        last_valid = blockhash_slot + BLOCKHASH_MAX_AGE
        result["replacementBlockhash"] = {"blockhash": str(blockhash), "lastValidBlockHeight": last_valid}
    return with_context(slot, result)


def _get_fee_for_message(ledger: Ledger, params: Params) -> dict[str, Any]:
    raw, config = transaction_bytes(params.text(0, "message", _MAX_ENCODED), "base64"), params.config(1)
    slot = config.checked_slot(ledger)
    try:
        message = from_bytes_versioned(raw)
        unsigned = [Signature.default()] * message.header.num_required_signatures
        tx = VersionedTransaction.populate(message, unsigned)
        simulation = ledger.simulate(tx, verify=False, any_blockhash=False, at=config.commitment())
    except (ValueError, RejectedError) as error:
        raise RpcFault(INVALID_PARAMS, "Invalid param: that is not a message of a transaction") from error
    return with_context(slot, None if simulation.err == "BlockhashNotFound" else simulation.fee)


def _request_airdrop(ledger: Ledger, params: Params) -> str:
    address, lamports = params.pubkey(0), params.integer(1, "lamports")
    params.config(2).commitment()
    try:
        return str(ledger.airdrop(address, lamports))
    except RejectedError as rejected:
        raise _rejection(rejected) from rejected


def _transaction(params: Params, encoding: str) -> VersionedTransaction:
    raw = transaction_bytes(params.text(0, "transaction", _MAX_ENCODED), encoding)
    try:
        tx = VersionedTransaction.from_bytes(raw)
    except ValueError as error:
        raise RpcFault(INVALID_PARAMS, "Invalid param: that is not a transaction") from error
    if bytes(tx) != raw:
        raise RpcFault(INVALID_PARAMS, "Invalid param: bytes that belong to no transaction")
    return tx


def _rejection(rejected: RejectedError) -> RpcFault:
    if rejected.err == "SignatureFailure":
        return RpcFault(SIGNATURE_FAILURE, "Transaction signature verification failure")
    if rejected.err == "SanitizeFailure":
        return RpcFault(
            INVALID_PARAMS, "invalid transaction: Transaction failed to sanitize accounts offsets correctly"
        )
    simulation = Simulation(rejected.err, rejected.logs, rejected.units, 0, None, [], {})
    return RpcFault(
        PREFLIGHT_FAILURE, f"Transaction simulation failed: {_describe(rejected.err)}", _simulation_json(simulation)
    )


def _describe(err: Any) -> str:
    """A transaction error in words, in Solana's own for those that clients look for."""
    known = {
        "AlreadyProcessed": "This transaction has already been processed",
        "BlockhashNotFound": "Blockhash not found",
        "AccountNotFound": "Attempt to debit an account but found no record of a prior credit.",
        "InsufficientFundsForFee": "Insufficient funds for fee",
        "AddressLookupTableNotFound": "Transaction loads an address table account that doesn't exist",
    }
    if isinstance(err, str):
        return known.get(err, err)
    if isinstance(err, dict) and "InstructionError" in err:
        index, reason = err["InstructionError"]
        if isinstance(reason, dict) and "Custom" in reason:
            reason = f"custom program error: {reason['Custom']:#x}"
        return f"Error processing Instruction {index}: {reason}"
    if isinstance(err, dict) and "InsufficientFundsForRent" in err:
        return f"Transaction results in an account ({err['InsufficientFundsForRent']['account_index']}) below rent"
    return str(err)


def _simulation_json(simulation: Simulation) -> dict[str, Any]:
    return {
        "err": simulation.err,
        "logs": list(simulation.logs),
        "accounts": None,
        "unitsConsumed": simulation.units,
        "returnData": simulation.return_data,
        "innerInstructions": None,
    }


METHODS: dict[str, Method] = {
    "getFeeForMessage": _get_fee_for_message,
    "requestAirdrop": _request_airdrop,
    "sendTransaction": _send_transaction,
    "simulateTransaction": _simulate_transaction,
}
