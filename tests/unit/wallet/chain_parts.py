"""Addresses, payments and a clock for tests of the chain's client."""

from __future__ import annotations

from solana.rpc.commitment import Commitment
from solders.keypair import Keypair
from solders.system_program import TransferParams, transfer

from kvasir_console.wallet.chain import Chain, PreparedTransfer
from kvasir_console.wallet.chain_endpoints import Endpoints

from ledger_process import LedgerProcess

SOL = 10**9
DEAD = "http://127.0.0.1:1"
POLL_S = 0.02


def new_address() -> str:
    return str(Keypair().pubkey())


async def funded_payment(process: LedgerProcess) -> tuple[PreparedTransfer, str]:
    """A signed transfer of 1 SOL that was not sent, and its recipient."""
    async with Chain(process.url, process.auth, poll_s=POLL_S) as chain:
        payer, recipient, recent = Keypair(), Keypair().pubkey(), await chain.latest_blockhash()
        signature = await chain.airdrop(str(payer.pubkey()), 10 * SOL)
        await chain.await_outcome(signature, recent.last_valid_block_height)
        pay = transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=recipient, lamports=SOL))
        return await chain.prepare([pay], [payer]), str(recipient)


class Monotonic:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(round(seconds, 3))
        self.now_s += seconds


def endpoints(clock: Monotonic, process: LedgerProcess, *urls: str) -> Endpoints:
    return Endpoints(
        urls,
        process.auth,
        commitment=Commitment("confirmed"),
        timeout_s=60.0,
        monotonic_s=clock,
        sleep=clock.sleep,
    )


async def slot_of(several: Endpoints) -> int:
    return int((await several.ask("its slot", lambda rpc: rpc.get_slot())).value)
