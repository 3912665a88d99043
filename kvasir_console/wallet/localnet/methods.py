"""The RPC methods that exist, by name. A name that is not in ``METHODS`` does not.

Source: Solana RPC documentation, "HTTP methods".
"""

from __future__ import annotations

from typing import Any

from solders.account import Account
from solders.hash import Hash, ParseHashError
from solders.message import MessageV0, from_bytes_versioned
from solders.pubkey import Pubkey
from solders.signature import Signature
from solders.transaction import VersionedTransaction

from kvasir_console import __version__
from kvasir_console.wallet.localnet import views
from kvasir_console.wallet.localnet.ledger import SLOTS_PER_EPOCH, Commitment, Ledger, RejectedError, Simulation
from kvasir_console.wallet.localnet.rpc import (
    INVALID_PARAMS,
    PREFLIGHT_FAILURE,
    SIGNATURE_FAILURE,
    UNSUPPORTED_VERSION,
    Config,
    Method,
    Params,
    RpcFault,
    bounded_strings,
    pubkey,
    signature,
    transaction_bytes,
)
from kvasir_console.wallet.localnet.slots import BLOCKHASH_MAX_AGE
from kvasir_console.wallet.localnet.store import LandedTransaction

MAX_ACCOUNTS = 100
MAX_STATUSES = 256
MAX_HISTORY = 1000
_MAX_RENT_BYTES = 10 * 2**20
_MAX_ENCODED = 2048


def _context(slot: int, value: Any) -> dict[str, Any]:
    return {"context": {"slot": slot}, "value": value}


# -- the cluster -------------------------------------------------------------------------------------------------


def _get_health(_ledger: Ledger, _params: Params) -> str:
    return "ok"


def _get_version(_ledger: Ledger, _params: Params) -> dict[str, Any]:
    return {"solana-core": f"kvasir-localnet {__version__}", "feature-set": 0}


def _get_genesis_hash(ledger: Ledger, _params: Params) -> str:
    return ledger.genesis_hash


def _get_slot(ledger: Ledger, params: Params) -> int:
    return params.config(0).checked_slot(ledger)


def _get_epoch_info(ledger: Ledger, params: Params) -> dict[str, Any]:
    slot = params.config(0).checked_slot(ledger)
    return {
        "absoluteSlot": slot,
        "blockHeight": slot,
        "epoch": slot // SLOTS_PER_EPOCH,
        "slotIndex": slot % SLOTS_PER_EPOCH,
        "slotsInEpoch": SLOTS_PER_EPOCH,
        "transactionCount": None,
    }


def _get_latest_blockhash(ledger: Ledger, params: Params) -> dict[str, Any]:
    config = params.config(0)
    config.checked_slot(ledger)
    blockhash, slot = ledger.latest_blockhash(config.commitment())
    return _context(slot, {"blockhash": str(blockhash), "lastValidBlockHeight": slot + BLOCKHASH_MAX_AGE})


def _is_blockhash_valid(ledger: Ledger, params: Params) -> dict[str, Any]:
    text, config = params.text(0, "blockhash"), params.config(1)
    slot = config.checked_slot(ledger)
    try:
        blockhash = Hash.from_string(text)
    except ParseHashError as error:
        raise RpcFault(INVALID_PARAMS, "Invalid param: a blockhash is 32 bytes in base58") from error
    return _context(slot, ledger.blockhash_slot(blockhash, config.commitment()) is not None)


def _get_minimum_balance_for_rent_exemption(ledger: Ledger, params: Params) -> int:
    return ledger.rent_exempt_lamports(params.integer(0, "data length", _MAX_RENT_BYTES))


# -- accounts ----------------------------------------------------------------------------------------------------


def _get_balance(ledger: Ledger, params: Params) -> dict[str, Any]:
    address, slot = params.pubkey(0), params.config(1).checked_slot(ledger)
    account = ledger.account(address)
    return _context(slot, 0 if account is None else account.lamports)


def _get_account_info(ledger: Ledger, params: Params) -> dict[str, Any]:
    address, config = params.pubkey(0), params.config(1)
    slot = config.checked_slot(ledger)
    return _context(slot, _account_json(ledger, ledger.account(address), config, "base58"))


def _get_multiple_accounts(ledger: Ledger, params: Params) -> dict[str, Any]:
    addresses = [pubkey(text) for text in params.strings(0, "addresses", MAX_ACCOUNTS)]
    config = params.config(1)
    slot = config.checked_slot(ledger)
    return _context(slot, [_account_json(ledger, ledger.account(each), config, "base64") for each in addresses])


def _get_token_account_balance(ledger: Ledger, params: Params) -> dict[str, Any]:
    address, slot = params.pubkey(0), params.config(1).checked_slot(ledger)
    token = views.token_account(ledger.account(address))
    if token is None:
        raise RpcFault(INVALID_PARAMS, "Invalid param: could not find account, or it is no token account")
    return _context(slot, views.token_amount(token.amount, _mint(ledger, token.mint).decimals))


def _get_token_supply(ledger: Ledger, params: Params) -> dict[str, Any]:
    address, slot = params.pubkey(0), params.config(1).checked_slot(ledger)
    mint = _mint(ledger, address)
    return _context(slot, views.token_amount(mint.supply, mint.decimals))


def _get_token_accounts_by_owner(ledger: Ledger, params: Params) -> dict[str, Any]:
    owner, wanted, config = params.pubkey(0), params.config(1), params.config(2)
    slot = config.checked_slot(ledger)
    programs, mint = _token_filter(ledger, wanted)
    found = []
    for program in programs:
        for address, account in ledger.program_accounts(program):
            token = views.token_account(account)
            if token is not None and token.owner == owner and mint in (None, token.mint):
                found.append(
                    {"pubkey": str(address), "account": _account_json(ledger, account, config, "base64")},
                )
    return _context(slot, found)


def _token_filter(ledger: Ledger, wanted: Config) -> tuple[list[Pubkey], Pubkey | None]:
    if wanted.values.get("mint") is not None:
        mint = pubkey(wanted.text("mint", ""))
        _mint(ledger, mint)
        return list(views.TOKEN_PROGRAMS), mint
    program = pubkey(wanted.text("programId", ""))
    if program not in views.TOKEN_PROGRAMS:
        raise RpcFault(INVALID_PARAMS, "Invalid param: unrecognized Token program id")
    return [program], None


def _mint(ledger: Ledger, address: Pubkey) -> Any:
    mint = views.mint(ledger.account(address))
    if mint is None:
        raise RpcFault(INVALID_PARAMS, "Invalid param: could not find mint")
    return mint


def _account_json(ledger: Ledger, account: Account | None, config: Config, default: str) -> dict[str, Any] | None:
    if account is None:
        return None
    token = views.token_account(account)
    mint = None if token is None else ledger.account(token.mint)
    try:
        return views.account_json(account, config.text("encoding", default), config.data_slice(), mint)
    except views.UnavailableEncodingError as error:
        raise RpcFault(INVALID_PARAMS, f"Invalid param: {error}") from error


# -- transactions ------------------------------------------------------------------------------------------------


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
            _account_json(ledger, simulation.accounts.get(each, ledger.account(each)), wanted, "base64")
            for each in addresses
        ]
    if config.flag("innerInstructions"):
        result["innerInstructions"] = simulation.inner_instructions
    if replace:
        blockhash, blockhash_slot = ledger.latest_blockhash(config.commitment())
        last_valid = blockhash_slot + BLOCKHASH_MAX_AGE
        result["replacementBlockhash"] = {"blockhash": str(blockhash), "lastValidBlockHeight": last_valid}
    return _context(slot, result)


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
    return _context(slot, None if simulation.err == "BlockhashNotFound" else simulation.fee)


def _get_signature_statuses(ledger: Ledger, params: Params) -> dict[str, Any]:
    signatures = [signature(text) for text in params.strings(0, "signatures", MAX_STATUSES)]
    params.config(1).flag("searchTransactionHistory")
    newest = ledger.slot()
    found = [ledger.landed(each) for each in signatures]
    return _context(newest, [None if each is None else _status_json(each, newest) for each in found])


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
    highest_version = config.integer("maxSupportedTransactionVersion", -1, 0, 255)
    landed = ledger.landed(wanted)
    if landed is None or landed.slot > ledger.slot(commitment):
        return None
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
        body = views.transaction_json(tx, config.text("encoding", "json"))
    except views.UnavailableEncodingError as error:
        raise RpcFault(INVALID_PARAMS, f"Invalid param: {error}") from error
    reply = {"slot": landed.slot, "blockTime": landed.block_time, "transaction": body, "meta": landed.meta}
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
    "getAccountInfo": _get_account_info,
    "getBalance": _get_balance,
    "getBlockHeight": _get_slot,
    "getEpochInfo": _get_epoch_info,
    "getFeeForMessage": _get_fee_for_message,
    "getGenesisHash": _get_genesis_hash,
    "getHealth": _get_health,
    "getLatestBlockhash": _get_latest_blockhash,
    "getMinimumBalanceForRentExemption": _get_minimum_balance_for_rent_exemption,
    "getMultipleAccounts": _get_multiple_accounts,
    "getSignatureStatuses": _get_signature_statuses,
    "getSignaturesForAddress": _get_signatures_for_address,
    "getSlot": _get_slot,
    "getTokenAccountBalance": _get_token_account_balance,
    "getTokenAccountsByOwner": _get_token_accounts_by_owner,
    "getTokenSupply": _get_token_supply,
    "getTransaction": _get_transaction,
    "getVersion": _get_version,
    "isBlockhashValid": _is_blockhash_valid,
    "requestAirdrop": _request_airdrop,
    "sendTransaction": _send_transaction,
    "simulateTransaction": _simulate_transaction,
}
