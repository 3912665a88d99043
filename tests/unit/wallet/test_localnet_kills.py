"""The ledger process ends, by order or in the middle of work; nothing that was answered is lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ledger_clients import SOL, connect, payment
from solana.exceptions import SolanaRpcException
from solana.rpc.models import TxOpts
from solders.keypair import Keypair
from solders.transaction import VersionedTransaction

from ledger_process import LedgerProcess


async def test_a_kill_in_the_middle_of_a_burst_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    process = LedgerProcess(tmp_path).start()
    payers, recipient = [Keypair() for _ in range(4)], Keypair().pubkey()
    async with connect(process) as client:
        for payer in payers:
            await client.request_airdrop(payer.pubkey(), 10 * SOL)
    answered: list[VersionedTransaction] = []
    sent: list[VersionedTransaction] = []
    enough = asyncio.Event()

    async def burst(payer: Keypair) -> None:
        async with connect(process) as client:
            for number in range(1000):
                tx = await payment(client, payer, recipient, SOL // 1000 + number)
                sent.append(tx)
                await client.send_transaction(tx, TxOpts(skip_preflight=True))
                answered.append(tx)
                if len(answered) >= 60:
                    enough.set()

    bursts = [asyncio.create_task(burst(payer)) for payer in payers]
    await enough.wait()
    process.kill()
    ended = await asyncio.gather(*bursts, return_exceptions=True)
    assert all(isinstance(each, SolanaRpcException) for each in ended)

    genesis = process.genesis
    process.start()
    try:
        assert process.genesis == genesis
        async with connect(process) as client:
            landed = set()
            for start in range(0, len(sent), 256):
                chunk = [tx.signatures[0] for tx in sent[start : start + 256]]
                statuses = (await client.get_signature_statuses(chunk)).value
                landed |= {each for each, status in zip(chunk, statuses, strict=True) if status is not None}
            assert {tx.signatures[0] for tx in answered} <= landed
            received, spent = 0, dict.fromkeys((payer.pubkey() for payer in payers), 0)
            for tx in sent:
                if tx.signatures[0] in landed:
                    lamports = int.from_bytes(bytes(tx.message.instructions[0].data)[4:12], "little")
                    received += lamports
                    spent[tx.message.account_keys[0]] += lamports + 5000
            assert (await client.get_balance(recipient)).value == received
            for payer, lamports in spent.items():
                assert (await client.get_balance(payer)).value == 10 * SOL - lamports
            for tx in answered[:5]:
                await client.send_transaction(tx, TxOpts(skip_preflight=True))
            assert (await client.get_balance(recipient)).value == received
    finally:
        process.stop()


def test_sigterm_ends_it_in_order_and_the_port_is_free(tmp_path: Path) -> None:
    process = LedgerProcess(tmp_path).start()
    auth = process.auth
    assert process.stop() == os.EX_OK
    process.start()
    assert process.auth == auth
    assert process.stop() == os.EX_OK
