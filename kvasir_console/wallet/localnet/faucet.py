"""Test SOL of the embedded ledger: an ordinary transfer from a key of the ledger's own, within limits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from solders.hash import Hash
from solders.keypair import Keypair
from solders.message import MessageV0
from solders.pubkey import Pubkey
from solders.system_program import TransferParams, transfer
from solders.transaction import VersionedTransaction
from spl.memo.constants import MEMO_PROGRAM_ID
from spl.memo.instructions import create_memo
from spl.memo.models import MemoParams

from kvasir_console.errors import LedgerError

LAMPORTS_PER_SOL = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FaucetLimits:
    """In lamports. The totals hold for the life of the ledger."""

    per_request: int = 10 * LAMPORTS_PER_SOL
    per_address: int = 100 * LAMPORTS_PER_SOL
    total: int = 100_000 * LAMPORTS_PER_SOL

    def check(self, lamports: int, given_to_address: int, given_in_all: int) -> None:
        """Raises ``LedgerError("faucet_limit")`` when a request would pass one of the limits."""
        for limit, would_be, what in (
            (self.per_request, lamports, "one request"),
            (self.per_address, given_to_address + lamports, "one address"),
            (self.total, given_in_all + lamports, "all addresses together"),
        ):
            if would_be > limit:
                raise LedgerError(
                    "faucet_limit",
                    f"The faucet gives at most {limit} lamports to {what}; this would make {would_be}.",
                    "Ask for less, or send SOL from a wallet that has some.",
                )


def airdrop_transaction(
    faucet: Keypair, recipient: Pubkey, lamports: int, blockhash: Hash, nonce: str
) -> VersionedTransaction:
    """A signed transfer. The nonce goes into a memo, so that two equal requests in one slot are two transactions."""
    message = MessageV0.try_compile(
        faucet.pubkey(),
        [
            transfer(TransferParams(from_pubkey=faucet.pubkey(), to_pubkey=recipient, lamports=lamports)),
            create_memo(
                MemoParams(program_id=MEMO_PROGRAM_ID, signer=faucet.pubkey(), message=f"airdrop {nonce}".encode())
            ),
        ],
        [],
        blockhash,
    )
    return VersionedTransaction(message, [faucet])
