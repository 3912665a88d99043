"""RPC methods about accounts and tokens. Source: Solana RPC documentation."""

from __future__ import annotations

from typing import Any

from solders.account import Account
from solders.pubkey import Pubkey

from kvasir_console.wallet.localnet import views
from kvasir_console.wallet.localnet.amounts import token_amount
from kvasir_console.wallet.localnet.ledger import Commitment, Ledger
from kvasir_console.wallet.localnet.rpc import INVALID_PARAMS, Config, Method, Params, RpcFault, pubkey, with_context

MAX_ACCOUNTS = 100


def _get_balance(ledger: Ledger, params: Params) -> dict[str, Any]:
    address, config = params.pubkey(0), params.config(1)
    slot = config.checked_slot(ledger)
    account = ledger.account(address, config.commitment())
    return with_context(slot, 0 if account is None else account.lamports)


def _get_account_info(ledger: Ledger, params: Params) -> dict[str, Any]:
    address, config = params.pubkey(0), params.config(1)
    slot = config.checked_slot(ledger)
    return with_context(slot, account_json(ledger, ledger.account(address, config.commitment()), config, "base58"))


def _get_multiple_accounts(ledger: Ledger, params: Params) -> dict[str, Any]:
    addresses = [pubkey(text) for text in params.strings(0, "addresses", MAX_ACCOUNTS)]
    config = params.config(1)
    slot = config.checked_slot(ledger)
    found = [ledger.account(each, config.commitment()) for each in addresses]
    return with_context(slot, [account_json(ledger, each, config, "base64") for each in found])


def _get_token_account_balance(ledger: Ledger, params: Params) -> dict[str, Any]:
    address, config = params.pubkey(0), params.config(1)
    slot = config.checked_slot(ledger)
    token = views.token_account(ledger.account(address, config.commitment()))
    if token is None:
        raise RpcFault(INVALID_PARAMS, "Invalid param: could not find account, or it is no token account")
    return with_context(slot, token_amount(token.amount, _mint(ledger, token.mint).decimals))


def _get_token_supply(ledger: Ledger, params: Params) -> dict[str, Any]:
    address, config = params.pubkey(0), params.config(1)
    slot = config.checked_slot(ledger)
    mint = _mint(ledger, address, config.commitment())
    return with_context(slot, token_amount(mint.supply, mint.decimals))


def _get_token_accounts_by_owner(ledger: Ledger, params: Params) -> dict[str, Any]:
    owner, wanted, config = params.pubkey(0), params.config(1), params.config(2)
    slot = config.checked_slot(ledger)
    programs, mint = _token_filter(ledger, wanted)
    found = []
    for program in programs:
        for address, account in ledger.program_accounts(program, config.commitment()):
            token = views.token_account(account)
            if token is not None and token.owner == owner and mint in (None, token.mint):
                found.append(
                    {"pubkey": str(address), "account": account_json(ledger, account, config, "base64")},
                )
    return with_context(slot, found)


def _token_filter(ledger: Ledger, wanted: Config) -> tuple[list[Pubkey], Pubkey | None]:
    if wanted.values.get("mint") is not None:
        mint = pubkey(wanted.text("mint", ""))
        _mint(ledger, mint)
        return list(views.TOKEN_PROGRAMS), mint
    program = pubkey(wanted.text("programId", ""))
    if program not in views.TOKEN_PROGRAMS:
        raise RpcFault(INVALID_PARAMS, "Invalid param: unrecognized Token program id")
    return [program], None


def _mint(ledger: Ledger, address: Pubkey, commitment: Commitment = Commitment.PROCESSED) -> Any:
    mint = views.mint(ledger.account(address, commitment))
    if mint is None:
        raise RpcFault(INVALID_PARAMS, "Invalid param: could not find mint")
    return mint


def account_json(ledger: Ledger, account: Account | None, config: Config, default: str) -> dict[str, Any] | None:
    if account is None:
        return None
    token = views.token_account(account)
    mint = None if token is None else ledger.account(token.mint)
    try:
        return views.account_json(account, config.text("encoding", default), config.data_slice(), mint)
    except views.UnavailableEncodingError as error:
        raise RpcFault(INVALID_PARAMS, f"Invalid param: {error}") from error


METHODS: dict[str, Method] = {
    "getAccountInfo": _get_account_info,
    "getBalance": _get_balance,
    "getMultipleAccounts": _get_multiple_accounts,
    "getTokenAccountBalance": _get_token_account_balance,
    "getTokenAccountsByOwner": _get_token_accounts_by_owner,
    "getTokenSupply": _get_token_supply,
}
