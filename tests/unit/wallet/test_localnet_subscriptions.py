"""Subscriptions of the ledger process, with the WebSocket client of the ``solana`` package as it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from solana.rpc.async_api import AsyncClient
from solana.rpc.commitment import Confirmed, Finalized, Processed
from solana.rpc.jsonrpc import SolanaJsonRpcError
from solana.rpc.models import TxOpts
from solana.rpc.websocket_api import SolanaWsClient
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.rpc.responses import RpcSignatureResponse, SignatureNotification
from solders.signature import Signature
from solders.system_program import TransferParams, transfer
from solders.transaction import VersionedTransaction
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from kvasir_console.wallet.localnet.server import MAX_BODY_BYTES
from kvasir_console.wallet.localnet.subscriptions import MAX_SUBSCRIPTIONS

from ledger_process import LedgerProcess

SOL = 10**9
WAIT_S = 120.0


def uri(process: LedgerProcess) -> str:
    return process.url.replace("http://", "ws://")


def headers(process: LedgerProcess) -> dict[str, str]:
    return {"Authorization": process.auth}


@pytest.fixture
async def client(process: LedgerProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(process.url, commitment=Processed, timeout=60, extra_headers=headers(process)) as connected:
        yield connected


@pytest.fixture
async def listener(process: LedgerProcess) -> AsyncIterator[SolanaWsClient]:
    async with SolanaWsClient(uri(process), additional_headers=headers(process)) as connected:
        yield connected


async def signed(client: AsyncClient, lamports: int = SOL) -> VersionedTransaction:
    payer = Keypair()
    await client.request_airdrop(payer.pubkey(), 2 * SOL)
    instruction = transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=Keypair().pubkey(), lamports=lamports))
    blockhash = (await client.get_latest_blockhash()).value.blockhash
    return VersionedTransaction(MessageV0.try_compile(payer.pubkey(), [instruction], [], blockhash), [payer])


async def told(listener: SolanaWsClient) -> SignatureNotification:
    notification = await asyncio.wait_for(listener.recv(), WAIT_S)
    assert isinstance(notification, SignatureNotification)
    return notification


async def status(client: AsyncClient, signature: Signature) -> Any:
    return (await client.get_signature_statuses([signature])).value[0]


@pytest.mark.parametrize("commitment", [Processed, Confirmed, Finalized])
async def test_one_is_told_when_a_transaction_reaches_the_commitment(
    client: AsyncClient, listener: SolanaWsClient, commitment: Any
) -> None:
    tx = await signed(client)
    subscription = await listener.signature_subscribe(signature=tx.signatures[0], commitment=commitment)
    await client.send_transaction(tx)
    notification = await told(listener)
    reached = await status(client, tx.signatures[0])
    assert notification.subscription == subscription.subscription_id
    assert notification.result.value == RpcSignatureResponse(None)
    assert int(reached.confirmation_status) >= [Processed, Confirmed, Finalized].index(commitment)
    assert notification.result.context.slot >= reached.slot
    with pytest.raises(ValueError, match="no longer active"):  # it ended with its notification
        await listener.unsubscribe(subscription)


async def exchange(socket: Any, **call: Any) -> Any:
    await socket.send(json.dumps({"jsonrpc": "2.0", "id": 1, **call}))
    return json.loads(await asyncio.wait_for(socket.recv(), WAIT_S))


async def test_a_transaction_that_landed_before_is_told_at_once_and_a_failed_one_with_its_error(
    client: AsyncClient, process: LedgerProcess
) -> None:
    """With a bare WebSocket: solders 0.29 does not read the error of an instruction in a notification."""
    good, bad = await signed(client), await signed(client, 1000 * SOL)
    results = []
    async with ws_connect(uri(process), additional_headers=headers(process)) as socket:
        for tx in (good, bad):
            await client.send_transaction(tx, TxOpts(skip_preflight=True))
            params = [str(tx.signatures[0]), {"commitment": "processed"}]
            assert "result" in await exchange(socket, method="signatureSubscribe", params=params)
            notification = json.loads(await asyncio.wait_for(socket.recv(), WAIT_S))
            results.append(notification["params"]["result"]["value"])
    assert results == [{"err": None}, {"err": {"InstructionError": [0, {"Custom": 1}]}}]


async def test_a_receipt_comes_before_the_commitment(client: AsyncClient, process: LedgerProcess) -> None:
    """With a bare WebSocket: the solana client cannot read a receipt."""
    tx = await signed(client)
    async with ws_connect(uri(process), additional_headers=headers(process)) as socket:
        options = {"commitment": "confirmed", "enableReceivedNotification": True}
        reply = await exchange(socket, method="signatureSubscribe", params=[str(tx.signatures[0]), options])
        await client.send_transaction(tx)
        seen = [json.loads(await asyncio.wait_for(socket.recv(), WAIT_S)) for _ in range(2)]
    assert {each["method"] for each in seen} == {"signatureNotification"}
    assert {each["params"]["subscription"] for each in seen} == {reply["result"]}
    assert [each["params"]["result"]["value"] for each in seen] == ["receivedSignature", {"err": None}]


async def test_one_who_unsubscribed_is_told_nothing_more(client: AsyncClient, listener: SolanaWsClient) -> None:
    unwanted, wanted = await signed(client), await signed(client)
    subscription = await listener.signature_subscribe(signature=unwanted.signatures[0], commitment=Processed)
    await listener.unsubscribe(subscription)
    await client.send_transaction(unwanted)
    other = await listener.signature_subscribe(signature=wanted.signatures[0], commitment=Finalized)
    await client.send_transaction(wanted)
    assert (await told(listener)).subscription == other.subscription_id


async def test_two_connections_are_each_told_their_own(client: AsyncClient, process: LedgerProcess) -> None:
    transactions = [await signed(client) for _ in range(3)]

    async def wait_for(tx: VersionedTransaction) -> int:
        async with SolanaWsClient(uri(process), additional_headers=headers(process)) as listener:
            await listener.signature_subscribe(signature=tx.signatures[0], commitment=Confirmed)
            await client.send_transaction(tx)
            await told(listener)
            return len(listener._notifications)

    assert await asyncio.gather(*map(wait_for, transactions)) == [0, 0, 0]


async def test_what_is_not_offered_or_makes_no_sense_is_refused_and_the_connection_goes_on(
    client: AsyncClient, listener: SolanaWsClient, process: LedgerProcess
) -> None:
    with pytest.raises(SolanaJsonRpcError) as refused:
        await listener.slot_subscribe()
    assert refused.value.code == -32601
    tx = await signed(client)
    await listener.signature_subscribe(signature=tx.signatures[0], commitment=Processed)
    await client.send_transaction(tx)
    await told(listener)

    async with ws_connect(uri(process), additional_headers=headers(process)) as socket:
        for call, code in (
            ({"method": "signatureSubscribe", "params": ["no signature"]}, -32602),
            ({"method": "signatureSubscribe", "params": [str(tx.signatures[0]), {"commitment": "surely"}]}, -32602),
            ({"method": "signatureUnsubscribe", "params": [12345]}, -32602),
            ({"method": "sendTransaction", "params": ["AQ=="]}, -32601),
            ({"method": "getHealth"}, -32601),
        ):
            assert (await exchange(socket, **call))["error"]["code"] == code
        for raw in ("", "{", b"\xff", "[" * 1000):
            await socket.send(raw)
            assert json.loads(await socket.recv())["error"]["code"] == -32700


async def test_what_a_connection_can_wait_for_is_bounded(process: LedgerProcess) -> None:
    async with ws_connect(uri(process), additional_headers=headers(process)) as socket:
        for _ in range(MAX_SUBSCRIPTIONS):
            assert "result" in await exchange(socket, method="signatureSubscribe", params=[str(Signature.default())])
        refused = await exchange(socket, method="signatureSubscribe", params=[str(Signature.default())])
        assert str(MAX_SUBSCRIPTIONS) in refused["error"]["message"]


async def test_a_message_without_bound_ends_the_connection_only(client: AsyncClient, process: LedgerProcess) -> None:
    async with ws_connect(uri(process), additional_headers=headers(process)) as socket:
        await socket.send(" " * (MAX_BODY_BYTES + 1))
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), WAIT_S)
    assert await client.is_connected()


@pytest.mark.parametrize("header", [None, "", "Bearer wrong"])
async def test_without_the_right_header_no_connection_is_made(process: LedgerProcess, header: str | None) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with ws_connect(uri(process), additional_headers={} if header is None else {"Authorization": header}):
            pass
    assert refused.value.response.status_code == 401


async def test_the_ledger_stops_while_someone_listens(tmp_path_factory: pytest.TempPathFactory) -> None:
    ledger = LedgerProcess(tmp_path_factory.mktemp("stops"), slot_ms=20).start()
    async with SolanaWsClient(uri(ledger), additional_headers=headers(ledger)) as listener:
        await listener.signature_subscribe(signature=Signature.default(), commitment=Processed)
        stopping = asyncio.create_task(asyncio.to_thread(ledger.stop))
        with pytest.raises(ConnectionClosed):
            await told(listener)
        assert await stopping == 0
