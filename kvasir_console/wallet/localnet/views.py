"""JSON forms of accounts and transactions, as Solana's RPC writes them. Pure.

Source: Solana RPC documentation, "JSON structures"; Agave ``transaction-status`` and ``account-decoder``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from solders.account import Account
from solders.instruction import CompiledInstruction
from solders.message import Message, MessageV0
from solders.pubkey import Pubkey
from solders.token.state import Mint, TokenAccount, TokenAccountState
from solders.transaction import VersionedTransaction
from solders.transaction_metadata import FailedTransactionMetadata, TransactionMetadata
from spl.token.constants import TOKEN_2022_PROGRAM_ID, TOKEN_PROGRAM_ID

from kvasir_console.wallet.localnet import base58
from kvasir_console.wallet.localnet.amounts import token_amount
from kvasir_console.wallet.localnet.instructions import MEMO_PROGRAMS, Compiled, instruction_json

TOKEN_PROGRAMS = {TOKEN_PROGRAM_ID: "spl-token", TOKEN_2022_PROGRAM_ID: "spl-token-2022"}
TOKEN_ACCOUNT_BYTES = 165
MINT_BYTES = 82
_BASE58_ACCOUNT_BYTES = 128


class UnavailableEncodingError(ValueError):
    """An encoding that this ledger does not offer, or that does not fit the account."""


# -- tokens ------------------------------------------------------------------------------------------------------


def token_account(account: Account | None) -> TokenAccount | None:
    """The token account in an account's first 165 bytes, or ``None`` when it is none."""
    if account is None or account.owner not in TOKEN_PROGRAMS or len(account.data) < TOKEN_ACCOUNT_BYTES:
        return None
    try:
        token = TokenAccount.from_bytes(bytes(account.data[:TOKEN_ACCOUNT_BYTES]))
    except ValueError:
        return None
    return token if token.state != TokenAccountState.Uninitialized else None


def mint(account: Account | None) -> Mint | None:
    """The mint in an account of a token program, or ``None``; extensions behind its 82 bytes are not read."""
    if account is None or account.owner not in TOKEN_PROGRAMS or len(account.data) < MINT_BYTES:
        return None
    if len(account.data) == TOKEN_ACCOUNT_BYTES:
        return None
    try:
        found = Mint.from_bytes(bytes(account.data[:MINT_BYTES]))
    except ValueError:
        return None
    return found if found.is_initialized else None


# -- accounts ----------------------------------------------------------------------------------------------------


def account_json(
    account: Account,
    encoding: str,
    data_slice: tuple[int, int] | None = None,
    mint_account: Account | None = None,
) -> dict[str, Any]:
    """One account.

    Args:
        encoding: ``base58`` (at most 128 bytes), ``base64``, or ``jsonParsed``, which falls back to base64.
        data_slice: (offset, length) of the data to give; not for ``jsonParsed``.
        mint_account: the mint of a token account, for ``jsonParsed``.

    Raises:
        UnavailableEncodingError: another encoding, or too many bytes for base58.
    """
    data = bytes(account.data)
    parsed = _parsed_account(account, mint_account) if encoding == "jsonParsed" else None
    if data_slice is not None and parsed is None:
        data = data[data_slice[0] : data_slice[0] + data_slice[1]]
    return {
        "lamports": account.lamports,
        "owner": str(account.owner),
        "executable": account.executable,
        "rentEpoch": account.rent_epoch,
        "space": len(account.data),
        "data": parsed if parsed is not None else _encoded(data, "base64" if encoding == "jsonParsed" else encoding),
    }


def _encoded(data: bytes, encoding: str) -> list[str]:
    if encoding == "base64":
        return [base64.b64encode(data).decode(), "base64"]
    if encoding != "base58":
        raise UnavailableEncodingError(f"encoding {encoding!r} is not offered: base58, base64 or jsonParsed are")
    if len(data) > _BASE58_ACCOUNT_BYTES:
        raise UnavailableEncodingError("base58 is for at most 128 bytes of data: use base64, or a data slice")
    return [base58.encode(data), "base58"]


def _parsed_account(account: Account, mint_account: Account | None) -> dict[str, Any] | None:
    token, its_mint = token_account(account), mint(mint_account)
    if token is not None and its_mint is not None:
        kind, info = "account", _token_info(token, its_mint.decimals)
    elif (this := mint(account)) is not None:
        kind, info = "mint", _mint_info(this)
    else:
        return None
    return {
        "program": TOKEN_PROGRAMS[account.owner],
        "parsed": {"type": kind, "info": info},
        "space": len(account.data),
    }


def _token_info(token: TokenAccount, decimals: int) -> dict[str, Any]:
    info: dict[str, Any] = {
        "mint": str(token.mint),
        "owner": str(token.owner),
        "state": "frozen" if token.state == TokenAccountState.Frozen else "initialized",
        "isNative": token.is_native is not None,
        "tokenAmount": token_amount(token.amount, decimals),
    }
    if token.delegate is not None:
        info |= {
            "delegate": str(token.delegate),
            "delegatedAmount": token_amount(token.delegated_amount, decimals),
        }
    if token.is_native is not None:
        info["rentExemptReserve"] = token_amount(token.is_native, decimals)
    if token.close_authority is not None:
        info["closeAuthority"] = str(token.close_authority)
    return info


def _mint_info(this: Mint) -> dict[str, Any]:
    return {
        "mintAuthority": None if this.mint_authority is None else str(this.mint_authority),
        "supply": str(this.supply),
        "decimals": this.decimals,
        "isInitialized": this.is_initialized,
        "freezeAuthority": None if this.freeze_authority is None else str(this.freeze_authority),
    }


# -- transactions ------------------------------------------------------------------------------------------------


def error_json(failed: FailedTransactionMetadata) -> Any:
    """Solana's JSON form of a transaction error (``err().to_json()`` of the bindings is another one)."""
    return json.loads(failed.to_json())["err"]


def return_data_json(result: TransactionMetadata) -> dict[str, Any] | None:
    returned = result.return_data()
    data = bytes(returned.data)
    if not data:
        return None
    return {"programId": str(returned.program_id), "data": [base64.b64encode(data).decode(), "base64"]}


def inner_instructions_json(result: TransactionMetadata) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "instructions": [_instruction(each.instruction(), each.stack_height()) for each in inner],
        }
        for index, inner in enumerate(result.inner_instructions())
        if inner
    ]


def meta_json(
    keys: Sequence[Pubkey],
    before: Mapping[Pubkey, Account | None],
    after: Mapping[Pubkey, Account | None],
    mints: Mapping[Pubkey, Mint],
    result: TransactionMetadata,
    err: Any,
) -> dict[str, Any]:
    """``meta`` of a transaction that landed; lamports and token amounts before and after, by account index.

    Args:
        mints: the mint of every token account in ``before`` and ``after`` (a plain ``transfer`` does not name it).
    """
    return {
        "err": err,
        "status": {"Ok": None} if err is None else {"Err": err},
        "fee": result.fee(),
        "preBalances": [_lamports(before[key]) for key in keys],
        "postBalances": [_lamports(after[key]) for key in keys],
        "preTokenBalances": _token_balances(keys, before, mints),
        "postTokenBalances": _token_balances(keys, after, mints),
        "innerInstructions": inner_instructions_json(result),
        "logMessages": list(result.logs()),
        "computeUnitsConsumed": result.compute_units_consumed(),
        "loadedAddresses": {"writable": [], "readonly": []},
        "rewards": [],
    } | ({} if (returned := return_data_json(result)) is None else {"returnData": returned})


def _lamports(account: Account | None) -> int:
    return 0 if account is None else account.lamports


def _token_balances(
    keys: Sequence[Pubkey], accounts: Mapping[Pubkey, Account | None], mints: Mapping[Pubkey, Mint]
) -> list[dict[str, Any]]:
    balances = []
    for index, key in enumerate(keys):
        account = accounts[key]
        token = token_account(account)
        if account is None or token is None or token.mint not in mints:
            continue
        balances.append(
            {
                "accountIndex": index,
                "mint": str(token.mint),
                "owner": str(token.owner),
                "programId": str(account.owner),
                "uiTokenAmount": token_amount(token.amount, mints[token.mint].decimals),
            }
        )
    return balances


def memo_of(tx: VersionedTransaction) -> str | None:
    """Every memo as ``[bytes] text``, joined by ``; ``, the form of ``getSignaturesForAddress``."""
    keys = tx.message.account_keys
    memos = [
        f"[{len(data)}] {data.decode(errors='replace')}"
        for instruction in tx.message.instructions
        if keys[instruction.program_id_index] in MEMO_PROGRAMS
        for data in (bytes(instruction.data),)
    ]
    return "; ".join(memos) if memos else None


def transaction_json(tx: VersionedTransaction, encoding: str) -> Any:
    """``json``, ``jsonParsed``, ``base64`` or ``base58``.

    Raises:
        UnavailableEncodingError: another encoding.
    """
    if encoding == "base64":
        return [base64.b64encode(bytes(tx)).decode(), "base64"]
    if encoding == "base58":
        return [base58.encode(bytes(tx)), "base58"]
    if encoding not in ("json", "jsonParsed"):
        raise UnavailableEncodingError(f"encoding {encoding!r} is not offered: json, jsonParsed, base64 or base58 are")
    message = tx.message
    body: dict[str, Any] = {"recentBlockhash": str(message.recent_blockhash)}
    if encoding == "json":
        header = message.header
        body |= {
            "header": {
                "numRequiredSignatures": header.num_required_signatures,
                "numReadonlySignedAccounts": header.num_readonly_signed_accounts,
                "numReadonlyUnsignedAccounts": header.num_readonly_unsigned_accounts,
            },
            "accountKeys": [str(key) for key in message.account_keys],
            "instructions": [_instruction(each, 1) for each in message.instructions],
        }
        if isinstance(message, MessageV0):
            body["addressTableLookups"] = []
    else:
        body |= {
            "accountKeys": [
                {
                    "pubkey": str(key),
                    "signer": index < message.header.num_required_signatures,
                    "writable": is_writable(message, index),
                    "source": "transaction",
                }
                for index, key in enumerate(message.account_keys)
            ],
            "instructions": [
                instruction_json(
                    _compiled(
                        message.account_keys,
                        each.program_id_index,
                        bytes(each.accounts),
                        bytes(each.data),
                        stack_height=1,
                    )
                )
                for each in message.instructions
            ],
        }
    return {"signatures": [str(each) for each in tx.signatures], "message": body}


def is_writable(message: Message | MessageV0, index: int) -> bool:
    """Whether the header marks the key at ``index`` writable: read-only keys end each of its two runs."""
    header, count = message.header, len(message.account_keys)
    if index < header.num_required_signatures:
        return bool(index < header.num_required_signatures - header.num_readonly_signed_accounts)
    return bool(index < count - header.num_readonly_unsigned_accounts)


def _instruction(instruction: CompiledInstruction, stack_height: int) -> dict[str, Any]:
    return {
        "programIdIndex": instruction.program_id_index,
        "accounts": list(instruction.accounts),
        "data": base58.encode(bytes(instruction.data)),
        "stackHeight": stack_height,
    }


def parsed_meta(tx: VersionedTransaction, meta: Mapping[str, Any]) -> dict[str, Any]:
    """A stored ``meta`` with its inner instructions in the ``jsonParsed`` form."""
    keys = tx.message.account_keys
    inner = [
        {
            "index": group["index"],
            "instructions": [
                instruction_json(
                    _compiled(
                        keys,
                        each["programIdIndex"],
                        each["accounts"],
                        base58.decode(each["data"], base58.MAX_STORED_CHARACTERS),
                        each["stackHeight"],
                    )
                )
                for each in group["instructions"]
            ],
        }
        for group in meta["innerInstructions"]
    ]
    return {**meta, "innerInstructions": inner}


def _compiled(
    keys: Sequence[Pubkey], program: int, accounts: Sequence[int], data: bytes, stack_height: int
) -> Compiled:
    return Compiled(keys[program], tuple(str(keys[index]) for index in accounts), data, stack_height)
