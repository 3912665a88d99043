"""The ledger process over loopback, with the unmodified client of the ``solana`` package."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ledger_clients import SOL, connect, funded, payment, reach
from solana.exceptions import SolanaRpcException
from solana.rpc.async_api import AsyncClient
from solana.rpc.commitment import Confirmed, Finalized, Processed
from solana.rpc.core import RPCException
from solana.rpc.jsonrpc import JsonRpcRequest
from solana.rpc.models import DataSliceOpts, TokenAccountOpts, TxOpts
from solders.compute_budget import set_compute_unit_limit, set_compute_unit_price
from solders.hash import Hash
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.pubkey import Pubkey
from solders.rpc.errors import (
    BlockNotAvailableMessage,
    InvalidParamsMessage,
    MethodNotFoundMessage,
    MinContextSlotNotReachedMessage,
    RpcCustomErrorFieldless,
    SendTransactionPreflightFailureMessage,
    UnsupportedTransactionVersionMessage,
)
from solders.signature import Signature
from solders.system_program import TransferParams, transfer
from solders.token.state import Mint, TokenAccount
from solders.transaction import VersionedTransaction
from solders.transaction_status import TransactionConfirmationStatus, TransactionErrorFieldless
from spl.token.constants import TOKEN_PROGRAM_ID

from kvasir_console.wallet import token
from kvasir_console.wallet.localnet.methods import METHODS

from ledger_process import LedgerProcess


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    ledger = LedgerProcess(tmp_path_factory.mktemp("rpc")).start()
    yield ledger
    assert ledger.stop() == 0


@pytest.fixture
async def client(process: LedgerProcess) -> AsyncIterator[AsyncClient]:
    async with connect(process) as connected:
        yield connected


# -- who may talk to it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Bearer ümlaut"])
async def test_without_the_right_header_nothing_is_answered(process: LedgerProcess, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    async with httpx.AsyncClient(trust_env=False, timeout=120) as plain:
        body = {"jsonrpc": "2.0", "id": 1, "method": "getHealth"}
        reply = await plain.post(process.url, json=body, headers=headers)
    assert reply.status_code == 401
    assert "result" not in reply.json()


async def test_the_solana_client_reports_a_missing_header(process: LedgerProcess) -> None:
    async with AsyncClient(process.url) as stranger:
        with pytest.raises(SolanaRpcException):
            await stranger.request_airdrop(Keypair().pubkey(), SOL)


def test_the_token_is_kept_in_a_private_file_and_stays(process: LedgerProcess) -> None:
    assert process.auth_file.stat().st_mode & 0o777 == 0o600
    scheme, secret = process.auth.split(" ")
    assert scheme == "Bearer"
    assert len(base64.urlsafe_b64decode(secret + "=")) == 32


def test_an_auth_file_that_others_can_read_stops_the_process(tmp_path: Path) -> None:
    ledger = LedgerProcess(tmp_path)
    ledger.auth_file.write_text("Bearer open")
    ledger.auth_file.chmod(0o644)
    finished = subprocess.run(ledger.command(), capture_output=True, text=True, timeout=120)
    assert finished.returncode == 8
    assert "chmod 600" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_second_process_on_the_same_data_stops_with_the_reason(process: LedgerProcess) -> None:
    finished = subprocess.run(process.command(), capture_output=True, text=True, timeout=120)
    assert finished.returncode == 8
    assert "in use" in finished.stderr
    assert finished.stdout == ""


# -- the solana client, unmodified -------------------------------------------------------------------------------


async def test_the_cluster_methods(client: AsyncClient, process: LedgerProcess) -> None:
    assert await client.is_connected()
    assert str((await client.get_genesis_hash()).value) == process.genesis
    assert "kvasir-localnet" in (await client.get_version()).value.solana_core
    slot = (await client.get_slot(Processed)).value
    assert slot >= 1
    assert (await client.get_block_height(Processed)).value >= slot
    assert (await client.get_slot(Finalized)).value <= (await client.get_slot(Processed)).value
    epoch = (await client.get_epoch_info(Processed)).value
    assert epoch.absolute_slot == epoch.block_height >= slot
    assert (await client.get_minimum_balance_for_rent_exemption(0)).value == 890_880  # every cluster's
    assert (await client.get_minimum_balance_for_rent_exemption(165)).value == 2_039_280
    latest = await client.get_latest_blockhash()
    assert latest.value.last_valid_block_height == latest.context.slot + 150


async def test_a_payment_from_airdrop_to_finality(client: AsyncClient) -> None:
    payer, recipient = await funded(client), Keypair().pubkey()
    tx = await payment(client, payer, recipient, SOL)
    assert (await client.get_fee_for_message(tx.message)).value == 5000
    simulated = (await client.simulate_transaction(tx, sig_verify=True)).value
    assert simulated.err is None
    assert (await client.get_balance(recipient)).value == 0
    signature = (await client.send_transaction(tx)).value
    assert signature == tx.signatures[0]
    assert (await client.get_balance(recipient)).value == SOL
    assert (await client.get_balance(payer.pubkey())).value == 9 * SOL - 5000

    confirmed = await reach(client, signature, TransactionConfirmationStatus.Confirmed)
    assert confirmed.err is None
    details = (await client.get_transaction(signature, commitment=Confirmed, max_supported_transaction_version=0)).value
    assert details.slot == confirmed.slot
    assert details.transaction.meta.fee == 5000
    assert details.transaction.meta.post_balances[1] == SOL
    assert details.block_time > 1_700_000_000
    final = await reach(client, signature, TransactionConfirmationStatus.Finalized)
    assert final.confirmations is None
    listed = (await client.get_signatures_for_address(recipient, commitment=Finalized)).value
    assert [each.signature for each in listed] == [signature]
    for encoding in ("json", "jsonParsed", "base58", "base64"):
        found = await client.get_transaction(
            signature, encoding=encoding, commitment=Finalized, max_supported_transaction_version=0
        )
        assert found.value is not None
    confirmation = await client.confirm_transaction(signature, Finalized)
    assert confirmation.value[0].slot == final.slot


async def test_two_equal_airdrops_both_arrive_and_more_than_the_limit_does_not(client: AsyncClient) -> None:
    recipient = Keypair().pubkey()
    first = await client.request_airdrop(recipient, SOL)
    second = await client.request_airdrop(recipient, SOL)
    assert first.value != second.value
    assert (await client.get_balance(recipient)).value == 2 * SOL
    with pytest.raises(RPCException, match="faucet"):
        await client.request_airdrop(recipient, 11 * SOL)
    assert (await client.get_balance(recipient)).value == 2 * SOL


async def test_errors_arrive_as_the_types_of_a_public_cluster(client: AsyncClient) -> None:
    payer, recipient = await funded(client), Keypair().pubkey()
    too_much = await payment(client, payer, recipient, 1000 * SOL)
    with pytest.raises(RPCException) as refused:
        await client.send_transaction(too_much)
    (message,) = refused.value.args
    assert isinstance(message, SendTransactionPreflightFailureMessage)
    assert message.data.err.err.code == 1
    assert any("insufficient lamports" in line for line in message.data.logs)

    good = await payment(client, payer, recipient, SOL)
    forged = VersionedTransaction.populate(good.message, [Signature.new_unique()])
    with pytest.raises(RPCException) as refused:
        await client.send_transaction(forged)
    assert refused.value.args[0] == RpcCustomErrorFieldless.TransactionSignatureVerificationFailure

    await client.send_transaction(good)
    with pytest.raises(RPCException) as refused:
        await client.send_transaction(good)
    assert refused.value.args[0].data.err == TransactionErrorFieldless.AlreadyProcessed
    assert (await client.send_transaction(good, TxOpts(skip_preflight=True))).value == good.signatures[0]
    assert (await client.get_balance(recipient)).value == SOL

    await reach(client, good.signatures[0], TransactionConfirmationStatus.Confirmed)
    with pytest.raises(RPCException) as refused:
        await client.get_transaction(good.signatures[0], commitment=Confirmed)
    assert isinstance(refused.value.args[0], UnsupportedTransactionVersionMessage)
    with pytest.raises(RPCException) as refused:
        await client.get_transaction(good.signatures[0], commitment=Processed)
    assert isinstance(refused.value.args[0], InvalidParamsMessage)
    with pytest.raises(RPCException) as refused:
        await client.get_slot_leader()
    assert isinstance(refused.value.args[0], MethodNotFoundMessage)
    with pytest.raises(RPCException) as refused:
        await client.get_signatures_for_address(recipient, commitment=Confirmed, min_context_slot=10**12)
    assert isinstance(refused.value.args[0], MinContextSlotNotReachedMessage)


async def test_tokens_as_the_solana_client_sees_them(client: AsyncClient) -> None:
    owner, mint, friend = await funded(client), Keypair(), Keypair().pubkey()
    rent = (await client.get_minimum_balance_for_rent_exemption(token.MINT_BYTES)).value
    blockhash = (await client.get_latest_blockhash()).value.blockhash
    instructions = [
        *token.create_mint(owner.pubkey(), mint.pubkey(), rent, 1_000_000),
        token.create_token_account(owner.pubkey(), friend, mint.pubkey()),
        token.transfer_checked(owner.pubkey(), friend, mint.pubkey(), 250_000),
        token.memo(owner.pubkey(), "grüße"),
    ]
    message = MessageV0.try_compile(owner.pubkey(), instructions, [], blockhash)
    signature = (await client.send_transaction(VersionedTransaction(message, [owner, mint]))).value

    address = Pubkey.from_string(token.associated_token_address(str(friend), str(mint.pubkey())))
    amount = (await client.get_token_account_balance(address)).value
    assert (amount.amount, amount.decimals, amount.ui_amount_string) == ("250000", 6, "0.25")
    assert (await client.get_token_supply(mint.pubkey())).value.amount == "1000000"
    by_mint = await client.get_token_accounts_by_owner(friend, TokenAccountOpts(mint=mint.pubkey()))
    by_program = await client.get_token_accounts_by_owner(friend, TokenAccountOpts(program_id=TOKEN_PROGRAM_ID))
    for listed in (by_mint, by_program):
        (entry,) = listed.value
        assert entry.pubkey == address
        assert TokenAccount.from_bytes(entry.account.data).amount == 250_000
    (parsed,) = (
        await client.get_token_accounts_by_owner_json_parsed(friend, TokenAccountOpts(mint=mint.pubkey()))
    ).value
    assert parsed.account.data.parsed["info"]["tokenAmount"]["amount"] == "250000"
    as_mint = (await client.get_account_info_json_parsed(mint.pubkey())).value.data.parsed
    assert as_mint["type"] == "mint"
    assert as_mint["info"]["supply"] == "1000000"
    assert as_mint["info"]["mintAuthority"] == str(owner.pubkey())
    raw = (await client.get_account_info(mint.pubkey())).value
    assert Mint.from_bytes(raw.data).decimals == 6
    sliced = (await client.get_account_info(mint.pubkey(), data_slice=DataSliceOpts(offset=36, length=8))).value
    assert int.from_bytes(sliced.data, "little") == 1_000_000
    both = (await client.get_multiple_accounts([mint.pubkey(), Keypair().pubkey()])).value
    assert both[0] == raw
    assert both[1] is None

    await reach(client, signature, TransactionConfirmationStatus.Confirmed)
    found = await client.get_transaction(signature, commitment=Confirmed, max_supported_transaction_version=0)
    after = {
        (str(each.owner), each.ui_token_amount.amount) for each in found.value.transaction.meta.post_token_balances
    }
    assert after == {(str(owner.pubkey()), "750000"), (str(friend), "250000")}
    assert found.value.transaction.meta.pre_token_balances == []
    (line,) = (await client.get_signatures_for_address(friend, commitment=Confirmed)).value
    assert line.memo == f"[{len('grüße'.encode())}] grüße"


async def test_balances_follow_the_commitment(tmp_path: Path) -> None:
    process = LedgerProcess(tmp_path).start()
    try:
        async with connect(process) as client:
            while True:
                owner = Keypair()
                airdrop = (await client.request_airdrop(owner.pubkey(), 10 * SOL)).value
                seen = [
                    (await client.get_balance(owner.pubkey(), Processed)).value,
                    (await client.get_balance(owner.pubkey(), Finalized)).value,
                    (await client.get_account_info(owner.pubkey(), Finalized)).value,
                    *(await client.get_multiple_accounts([owner.pubkey()], Finalized)).value,
                ]
                status = (await client.get_signature_statuses([airdrop])).value[0]
                if status.confirmation_status != TransactionConfirmationStatus.Finalized:
                    break  # nor was it when those were read; a busy machine may have been too late for one
            assert seen == [10 * SOL, 0, None, None]
            await reach(client, airdrop, TransactionConfirmationStatus.Finalized)
            assert (await client.get_balance(owner.pubkey(), Finalized)).value == 10 * SOL
            (line,) = (await client.get_signatures_for_address(owner.pubkey(), commitment=Finalized)).value
            assert line.confirmation_status == TransactionConfirmationStatus.Finalized
    finally:
        process.stop()


async def test_blocks_as_the_solana_client_sees_them(client: AsyncClient, process: LedgerProcess) -> None:
    payer, recipient = await funded(client), Keypair().pubkey()
    tx = await payment(client, payer, recipient, SOL)
    signature = (await client.send_transaction(tx)).value
    slot = (await reach(client, signature, TransactionConfirmationStatus.Finalized)).slot
    async with connect(process, Confirmed) as reader:  # no block is given below that
        for encoding in ("json", "jsonParsed", "base64"):
            block = (await reader.get_block(slot, encoding=encoding, max_supported_transaction_version=0)).value
            assert (block.parent_slot, block.block_height) == (slot - 1, slot)
        found = [each for each in block.transactions if each.transaction.signatures == [signature]]
        assert [each.meta.fee for each in found] == [5000]
        assert block.block_time == (await reader.get_block_time(slot)).value
        before = (await reader.get_block(slot - 1, max_supported_transaction_version=0)).value
        assert before.blockhash == block.previous_blockhash
        assert abs(block.block_time - before.block_time) <= 1
        for question in (reader.get_block(10**9), reader.get_block_time(10**9)):
            with pytest.raises(RPCException) as refused:
                await question
            assert isinstance(refused.value.args[0], BlockNotAvailableMessage)
    assert (await client.get_first_available_block()).value == 0
    assert (await client.get_transaction_count(Processed)).value >= 2
    assert (await client.get_epoch_info(Processed)).value.transaction_count >= 2
    assert [each.prioritization_fee for each in (await client.get_recent_prioritization_fees()).value] == [0]


async def test_a_priority_fee_is_shown_and_paid(client: AsyncClient) -> None:
    payer, recipient = await funded(client), Keypair().pubkey()
    blockhash = (await client.get_latest_blockhash()).value.blockhash
    instructions = [
        set_compute_unit_limit(200_000),
        set_compute_unit_price(12_345),
        transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=recipient, lamports=SOL)),
    ]
    message = MessageV0.try_compile(payer.pubkey(), instructions, [], blockhash)
    fee = 5000 + 2469  # ceil(200,000 units x 12,345 / 10^6)
    assert (await client.get_fee_for_message(message)).value == fee
    await client.send_transaction(VersionedTransaction(message, [payer]))
    assert (await client.get_balance(payer.pubkey())).value == 9 * SOL - fee


async def test_every_method_is_answered_to_the_unmodified_client(client: AsyncClient, process: LedgerProcess) -> None:
    """Whatever is offered is called here by its own name in the client, with the answer read into the client's type."""
    payer, friend, mint = await funded(client), Keypair().pubkey(), Keypair()
    rent = (await client.get_minimum_balance_for_rent_exemption(token.MINT_BYTES)).value
    blockhash = (await client.get_latest_blockhash()).value.blockhash
    made = MessageV0.try_compile(
        payer.pubkey(), [*token.create_mint(payer.pubkey(), mint.pubkey(), rent, 5)], [], blockhash
    )
    signature = (await client.send_transaction(VersionedTransaction(made, [payer, mint]))).value
    slot = (await reach(client, signature, TransactionConfirmationStatus.Confirmed)).slot
    holding = Pubkey.from_string(token.associated_token_address(str(payer.pubkey()), str(mint.pubkey())))
    tx = await payment(client, payer, friend, SOL)
    of_mint = TokenAccountOpts(mint=mint.pubkey())
    reader = connect(process, Confirmed)
    calls = {
        "getAccountInfo": [client.get_account_info(holding), client.get_account_info_json_parsed(holding)],
        "getBalance": [client.get_balance(friend)],
        "getBlock": [reader.get_block(slot, max_supported_transaction_version=0)],
        "getBlockHeight": [client.get_block_height()],
        "getBlockTime": [client.get_block_time(slot)],
        "getEpochInfo": [client.get_epoch_info()],
        "getFeeForMessage": [client.get_fee_for_message(tx.message)],
        "getFirstAvailableBlock": [client.get_first_available_block()],
        "getGenesisHash": [client.get_genesis_hash()],
        "getHealth": [client.is_connected()],
        "getLatestBlockhash": [client.get_latest_blockhash()],
        "getMinimumBalanceForRentExemption": [client.get_minimum_balance_for_rent_exemption(165)],
        "getMultipleAccounts": [
            client.get_multiple_accounts([friend, holding]),
            client.get_multiple_accounts_json_parsed([mint.pubkey()]),
        ],
        "getRecentPrioritizationFees": [client.get_recent_prioritization_fees([friend])],
        "getSignatureStatuses": [client.get_signature_statuses([signature], search_transaction_history=True)],
        "getSignaturesForAddress": [client.get_signatures_for_address(holding, commitment=Confirmed)],
        "getSlot": [client.get_slot()],
        "getTokenAccountBalance": [client.get_token_account_balance(holding)],
        "getTokenAccountsByOwner": [
            client.get_token_accounts_by_owner(payer.pubkey(), of_mint),
            client.get_token_accounts_by_owner_json_parsed(payer.pubkey(), of_mint),
        ],
        "getTokenSupply": [client.get_token_supply(mint.pubkey())],
        "getTransaction": [
            client.get_transaction(signature, encoding, Confirmed, max_supported_transaction_version=0)
            for encoding in ("json", "jsonParsed", "base58", "base64")
        ],
        "getTransactionCount": [client.get_transaction_count()],
        "getVersion": [client.get_version()],
        "requestAirdrop": [client.request_airdrop(friend, SOL)],
        "simulateTransaction": [client.simulate_transaction(tx, sig_verify=True)],
        "sendTransaction": [client.send_transaction(tx)],
    }
    for name, requests in calls.items():
        for request in requests:
            answer = await request
            assert answer is True if name == "getHealth" else answer.value is not None
    await reader.close()
    # The client has no method of its own for this one.
    raw = JsonRpcRequest(id=1, method="isBlockhashValid", params=[str(blockhash), {"commitment": "processed"}])
    assert (await client.send_rpc_request(raw, dict[str, Any]))["value"] is True
    assert {*calls, "isBlockhashValid"} == set(METHODS)


async def test_a_trial_run_can_replace_the_blockhash_and_show_accounts(client: AsyncClient) -> None:
    payer, recipient = await funded(client), Keypair().pubkey()
    instruction = transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=recipient, lamports=SOL))
    message = MessageV0.try_compile(payer.pubkey(), [instruction], [], Hash.new_unique())
    tx = VersionedTransaction.populate(message, [Signature.default()])
    assert (await client.simulate_transaction(tx)).value.err == TransactionErrorFieldless.BlockhashNotFound
    result = (
        await client.simulate_transaction(tx, replace_recent_blockhash=True, accounts_addresses=[recipient])
    ).value
    assert result.err is None
    assert result.accounts[0].lamports == SOL
    with pytest.raises(RPCException) as refused:
        await client.simulate_transaction(tx, sig_verify=True)
    assert refused.value.args[0] == RpcCustomErrorFieldless.TransactionSignatureVerificationFailure
    assert (await client.get_balance(recipient)).value == 0
