"""The unmodified client of the ``solana`` package, pointed at a ledger process; and what tests do with it."""

from __future__ import annotations

import asyncio
from typing import Any

from solana.rpc.async_api import AsyncClient
from solana.rpc.commitment import Processed
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.pubkey import Pubkey
from solders.signature import Signature
from solders.system_program import TransferParams, transfer
from solders.transaction import VersionedTransaction
from solders.transaction_status import TransactionConfirmationStatus

from kvasir_console.wallet.localnet.faucet import LAMPORTS_PER_SOL

from ledger_process import LedgerProcess

SOL = LAMPORTS_PER_SOL


def connect(process: LedgerProcess, commitment: Any = Processed) -> AsyncClient:
    return AsyncClient(process.url, commitment, timeout=60, extra_headers={"Authorization": process.auth})


async def funded(client: AsyncClient, lamports: int = 10 * SOL) -> Keypair:
    keypair = Keypair()
    await client.request_airdrop(keypair.pubkey(), lamports)
    return keypair


async def payment(client: AsyncClient, payer: Keypair, recipient: Pubkey, lamports: int) -> VersionedTransaction:
    blockhash = (await client.get_latest_blockhash()).value.blockhash
    instruction = transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=recipient, lamports=lamports))
    return VersionedTransaction(MessageV0.try_compile(payer.pubkey(), [instruction], [], blockhash), [payer])


async def reach(client: AsyncClient, signature: Signature, status: TransactionConfirmationStatus) -> Any:
    """Poll as a client does until ``signature`` has ``status``."""
    async with asyncio.timeout(120):
        while True:
            found = (await client.get_signature_statuses([signature])).value[0]
            if found is not None and int(found.confirmation_status) >= int(status):
                return found
            await asyncio.sleep(0.02)
