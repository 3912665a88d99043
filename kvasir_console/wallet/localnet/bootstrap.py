"""A new local network's money: SOL for the treasury, the KVR mint, and its whole supply in the treasury's account.

A client of the ledger process, not part of it. It can be run again at any time: what is done already is left alone.
"""

from __future__ import annotations

import hmac

from solders.account import Account
from solders.keypair import Keypair

from kvasir_console.errors import LedgerError
from kvasir_console.wallet import token
from kvasir_console.wallet.chain import Chain, OutcomeState
from kvasir_console.wallet.chain_errors import PreflightError
from kvasir_console.wallet.localnet import views
from kvasir_console.wallet.localnet.faucet import LAMPORTS_PER_SOL

TREASURY_MIN_LAMPORTS = LAMPORTS_PER_SOL
TREASURY_AIRDROP_LAMPORTS = 10 * LAMPORTS_PER_SOL
_TRIES = 5


def mint_keypair(treasury: Keypair) -> Keypair:
    """The mint's key, derived from the treasury's: every run, after any crash, means the same mint."""
    return Keypair.from_seed(hmac.digest(treasury.secret(), b"kvasir local KVR mint", "sha256"))


async def bootstrap(chain: Chain, treasury: Keypair) -> str:
    """Fund the treasury and create the mint, unless that is done, and return the mint's address.

    Mint, treasury account and supply come from one transaction: the mint exists with all of it or not at all.

    Raises:
        LedgerError: the faucet or the ledger refuses, or the mint is not the one expected.
        NetworkError: the ledger does not answer.
    """
    owner, mint = str(treasury.pubkey()), mint_keypair(treasury)
    await _fund(chain, owner)
    refusal: PreflightError | None = None
    for _ in range(_TRIES):
        account = await chain.account(str(mint.pubkey()))
        if account is not None:
            _check_mint(account, treasury)
            return str(mint.pubkey())
        rent = await chain.rent_exempt_lamports(token.MINT_BYTES)
        instructions = token.create_mint(treasury.pubkey(), mint.pubkey(), rent, token.INITIAL_SUPPLY_MICRO_KVR)
        try:
            await chain.transact(await chain.prepare(instructions, (treasury, mint)))
        except PreflightError as error:  # an earlier run's transaction may have landed since we looked: look again
            refusal = error
    raise LedgerError(
        "bootstrap_failed", "The KVR mint of the local network could not be created.", "Start it again."
    ) from refusal


def _check_mint(account: Account, treasury: Keypair) -> None:
    mint = views.mint(account)
    if mint is not None and mint.decimals == token.DECIMALS and mint.mint_authority == treasury.pubkey():
        return
    raise LedgerError(
        "mint_unexpected",
        "The account at the address of the local KVR mint is not the treasury's mint.",
        "Move the ledger's data directory away to start a new local network.",
    )


async def _fund(chain: Chain, owner: str) -> None:
    if await chain.balance_lamports(owner) >= TREASURY_MIN_LAMPORTS:
        return
    recent = await chain.latest_blockhash()
    signature = await chain.airdrop(owner, TREASURY_AIRDROP_LAMPORTS)
    outcome = await chain.await_outcome(signature, recent.last_valid_block_height)
    if outcome.state is not OutcomeState.CONFIRMED:
        raise LedgerError("airdrop_failed", f"The airdrop to the treasury {outcome.state}.", "Start it again.")
