"""Transfers on a real ledger with a real mint: amounts exact, recipients checked, accounts made when missing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from solders.hash import Hash
from solders.keypair import Keypair
from solders.token.state import Mint
from spl.token.constants import TOKEN_PROGRAM_ID

from kvasir_console.errors import KvasirError, LedgerError, UsageError, WalletError
from kvasir_console.wallet import token
from kvasir_console.wallet.chain import Chain, OutcomeState
from kvasir_console.wallet.chain_errors import PreflightError
from kvasir_console.wallet.localnet.bootstrap import bootstrap, mint_keypair
from kvasir_console.wallet.transfers import (
    KvrTransfer,
    SolTransfer,
    check_recipient,
    prepare_transfer,
    transfer_message,
)

from ledger_process import LedgerProcess

SUPPLY = 10**15
"""A thousand million KVR in micro-KVR, as the public token's."""
TREASURY = Keypair.from_seed(bytes(range(32)))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    ledger = LedgerProcess(tmp_path_factory.mktemp("transfers")).start()
    yield ledger
    ledger.stop()


@pytest.fixture
async def chain(process: LedgerProcess) -> AsyncIterator[Chain]:
    async with Chain(process.url, process.auth, poll_s=0.02) as connected:
        yield connected


@pytest.fixture
async def mint(chain: Chain) -> str:
    return await bootstrap(chain, TREASURY)


def payout(mint: str, recipient: str, micro_kvr: int, memo: str = "") -> KvrTransfer:
    return KvrTransfer(str(TREASURY.pubkey()), recipient, mint, micro_kvr, memo)


async def test_bootstrap_makes_the_mint_once(chain: Chain, mint: str) -> None:
    account = await chain.account(mint)
    assert account is not None
    state = Mint.from_bytes(bytes(account.data))
    assert (state.decimals, state.supply, state.mint_authority) == (6, SUPPLY, TREASURY.pubkey())
    before = await chain.history(mint)
    assert await bootstrap(chain, TREASURY) == mint == str(mint_keypair(TREASURY).pubkey())
    assert await chain.history(mint) == before
    assert await chain.balance_micro_kvr(str(TREASURY.pubkey()), mint) <= SUPPLY


async def test_bootstrap_refuses_a_mint_that_is_not_the_treasurys(chain: Chain, mint: str) -> None:
    """Whoever holds the derived key could put another mint at that address first."""
    victim, thief = Keypair(), Keypair()
    await chain.airdrop(str(thief.pubkey()), 10**9)
    rent = await chain.rent_exempt_lamports(token.MINT_BYTES)
    stolen = mint_keypair(victim)
    prepared = await chain.prepare(token.create_mint(thief.pubkey(), stolen.pubkey(), rent, 1), (thief, stolen))
    assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
    with pytest.raises(LedgerError) as error:
        await bootstrap(chain, victim)
    assert error.value.code == "mint_unexpected"


async def test_a_payout_to_a_new_wallet_makes_its_account_at_the_treasurys_cost(chain: Chain, mint: str) -> None:
    recipient, treasury = str(Keypair().pubkey()), str(TREASURY.pubkey())
    kvr, lamports = await chain.balance_micro_kvr(treasury, mint), await chain.balance_lamports(treasury)
    prepared = await prepare_transfer(chain, payout(mint, recipient, 8945, "kvasir claim 42"), TREASURY)
    assert await chain.balance_micro_kvr(recipient, mint) == 0
    assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
    assert await chain.balance_micro_kvr(recipient, mint) == 8945
    assert await chain.balance_lamports(recipient) == 0
    assert await chain.balance_micro_kvr(treasury, mint) == kvr - 8945
    assert await chain.balance_lamports(treasury) == lamports - 2_039_280 - 5000

    again = await prepare_transfer(chain, payout(mint, recipient, 1), TREASURY)
    assert (await chain.transact(again)).state is OutcomeState.CONFIRMED
    assert await chain.balance_micro_kvr(recipient, mint) == 8946
    assert await chain.balance_lamports(treasury) == lamports - 2_039_280 - 10_000

    view = await chain.transaction(prepared.signature)
    assert view is not None
    assert view.memos == ("kvasir claim 42",)
    assert view.received(token.associated_token_address(recipient, mint), mint) == 8945
    assert view.received_by_owner(recipient, mint) == 8945
    assert view.received_by_owner(treasury, mint) == -8945
    assert view.received_by_owner(recipient, token.DEVNET_MINT) == 0
    movements = await chain.kvr_history(recipient, mint)
    assert [(each.micro_kvr, each.memos) for each in movements] == [(1, ()), (8945, ("kvasir claim 42",))]


async def test_a_transfer_signed_twice_for_two_claims_is_two_transfers(chain: Chain, mint: str) -> None:
    recipient = str(Keypair().pubkey())
    first = await prepare_transfer(chain, payout(mint, recipient, 5, "claim 1"), TREASURY)
    second = await prepare_transfer(chain, payout(mint, recipient, 5, "claim 2"), TREASURY)
    for prepared in (first, second, first, second):
        assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
    assert await chain.balance_micro_kvr(recipient, mint) == 10


async def test_more_kvr_than_the_source_has_is_refused(chain: Chain, mint: str) -> None:
    source = Keypair()
    await chain.airdrop(str(source.pubkey()), 10**9)
    funding = await prepare_transfer(chain, payout(mint, str(source.pubkey()), 100), TREASURY)
    await chain.transact(funding)
    intent = KvrTransfer(str(source.pubkey()), str(Keypair().pubkey()), mint, 101)
    with pytest.raises(PreflightError, match="insufficient funds"):
        await chain.transact(await prepare_transfer(chain, intent, source))
    exact = await prepare_transfer(chain, replace(intent, micro_kvr=100), source)
    assert (await chain.transact(exact)).state is OutcomeState.CONFIRMED
    assert await chain.balance_micro_kvr(str(source.pubkey()), mint) == 0


async def test_sol_moves_too(chain: Chain, mint: str) -> None:
    recipient = str(Keypair().pubkey())
    intent = SolTransfer(str(TREASURY.pubkey()), recipient, 10**8, "lunch")
    assert (await chain.transact(await prepare_transfer(chain, intent, TREASURY))).state is OutcomeState.CONFIRMED
    assert await chain.balance_lamports(recipient) == 10**8


async def test_a_token_account_a_program_and_the_mint_are_no_recipients(chain: Chain, mint: str) -> None:
    token_account = Keypair()  # on the curve, as a wallet: only the chain can tell
    rent = await chain.rent_exempt_lamports(token.MINT_BYTES)
    instructions = token.create_mint(TREASURY.pubkey(), token_account.pubkey(), rent, 1)
    await chain.transact(await chain.prepare(instructions, (TREASURY, token_account)))
    vault = token.associated_token_address(str(TREASURY.pubkey()), mint)
    cases: list[tuple[str, type[KvasirError], str]] = [
        (str(token_account.pubkey()), LedgerError, "recipient_is_token_account"),
        (str(TOKEN_PROGRAM_ID), LedgerError, "recipient_is_program"),
        (vault, UsageError, "recipient_off_curve"),
        (mint, UsageError, "recipient_is_mint"),
        (str(TREASURY.pubkey()), UsageError, "recipient_is_source"),
        ("nobody", UsageError, "recipient_malformed"),
        (mint[:20], UsageError, "recipient_malformed"),
    ]
    for recipient, kind, code in cases:
        with pytest.raises(kind) as error:
            await prepare_transfer(chain, payout(mint, recipient, 1), TREASURY)
        assert error.value.code == code
    with pytest.raises(LedgerError):
        await check_recipient(chain, vault)


async def test_only_the_source_signs(chain: Chain, mint: str) -> None:
    with pytest.raises(WalletError):
        await prepare_transfer(chain, payout(mint, str(Keypair().pubkey()), 1), Keypair())


@pytest.mark.parametrize("micro_kvr", [0, -1, 2**64])
def test_amounts_that_cannot_be_are_refused_before_signing(micro_kvr: int) -> None:
    with pytest.raises(UsageError):
        transfer_message(payout(token.DEVNET_MINT, str(Keypair().pubkey()), micro_kvr), Hash.new_unique())


def test_an_intent_is_one_message() -> None:
    intent = payout(token.DEVNET_MINT, str(Keypair().pubkey()), 7, "same")
    blockhash = Hash.new_unique()
    assert transfer_message(intent, blockhash) == transfer_message(intent, blockhash)
    assert transfer_message(intent, blockhash) != transfer_message(replace(intent, micro_kvr=8), blockhash)
