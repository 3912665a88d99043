"""Transfers on a real ledger with a real mint: amounts exact, recipients checked, accounts made when missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from solders.compute_budget import ID as COMPUTE_BUDGET_ID
from solders.hash import Hash
from solders.keypair import Keypair
from solders.message import MessageV0, to_bytes_versioned
from solders.token.state import Mint
from spl.token.constants import TOKEN_PROGRAM_ID

from kvasir_console.errors import KvasirError, LedgerError, UsageError, WalletError
from kvasir_console.wallet import token
from kvasir_console.wallet.chain import Chain, OutcomeState, assemble, sign
from kvasir_console.wallet.chain_errors import PreflightError
from kvasir_console.wallet.localnet.bootstrap import bootstrap, mint_keypair
from kvasir_console.wallet.transfers import (
    COMPUTE_UNITS,
    MAX_PRIORITY_MICRO_LAMPORTS,
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


async def message_of(chain: Chain, intent: KvrTransfer | SolTransfer, priority: int = 0) -> MessageV0:
    return transfer_message(intent, (await chain.latest_blockhash()).hash, priority)


async def test_a_preview_tells_what_sending_then_costs(chain: Chain, mint: str) -> None:
    """Fee, rent of the account that is opened, and amount: the balance then falls by just that."""
    treasury, friend = str(TREASURY.pubkey()), str(Keypair().pubkey())
    cases = [
        (payout(mint, friend, 5, "first"), 0, 5000, 5000 + 2_039_280),
        (payout(mint, friend, 5, "second"), 0, 5000, 5000),
        (payout(mint, friend, 5, "in a hurry"), 12_345, 5000 + 2469, 5000 + 2469),
        (SolTransfer(treasury, friend, 10**7), 0, 5000, 5000 + 10**7),
    ]
    for intent, priority, fee, spent in cases:
        message = await message_of(chain, intent, priority)
        preview = await chain.preview(message)
        assert (preview.fee_lamports, preview.spent_lamports, preview.error) == (fee, spent, None)
        before = await chain.balance_lamports(treasury)
        recent = await chain.latest_blockhash()
        prepared = sign(transfer_message(intent, recent.hash, priority), (TREASURY,), recent)
        assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
        assert before - await chain.balance_lamports(treasury) == spent


async def test_a_preview_tells_what_would_fail(chain: Chain, mint: str) -> None:
    stranger = str(Keypair().pubkey())
    preview = await chain.preview(await message_of(chain, payout(mint, stranger, 10**18)))
    assert (preview.spent_lamports, preview.fee_lamports) == (None, 5000)
    assert preview.error is not None
    assert "insufficient funds" in preview.error
    broke = await chain.preview(await message_of(chain, KvrTransfer(stranger, str(TREASURY.pubkey()), mint, 1)))
    assert broke.error == "AccountNotFound"
    assert await chain.history(stranger) == ()


async def test_a_preview_of_an_old_message_is_refused(chain: Chain, mint: str) -> None:
    message = transfer_message(payout(mint, str(Keypair().pubkey()), 1), Hash.new_unique())
    with pytest.raises(LedgerError) as error:
        await chain.preview(message)
    assert error.value.code == "blockhash_expired"


@pytest.mark.parametrize("priority", [1, 999, 12_345, MAX_PRIORITY_MICRO_LAMPORTS])
def test_a_priority_fee_is_what_is_offered_for_the_units_asked_for(priority: int) -> None:
    message = transfer_message(payout(token.DEVNET_MINT, str(Keypair().pubkey()), 1), Hash.new_unique(), priority)
    budget = [each for each in message.instructions if message.account_keys[each.program_id_index] == COMPUTE_BUDGET_ID]
    assert [bytes(each.data) for each in budget] == [
        b"\2" + (200_000).to_bytes(4, "little"),
        b"\3" + priority.to_bytes(8, "little"),
    ]


@pytest.mark.parametrize("priority", [-1, MAX_PRIORITY_MICRO_LAMPORTS + 1])
def test_a_priority_that_would_cost_too_much_is_refused(priority: int) -> None:
    assert MAX_PRIORITY_MICRO_LAMPORTS * COMPUTE_UNITS // 10**6 == 10**7  # 0.01 SOL
    with pytest.raises(UsageError):
        transfer_message(payout(token.DEVNET_MINT, str(Keypair().pubkey()), 1), Hash.new_unique(), priority)


async def test_the_largest_transfer_fits_into_the_units_asked_for(chain: Chain, mint: str) -> None:
    """It opens an account and carries the longest memo."""
    intent = payout(mint, str(Keypair().pubkey()), 1, "m" * token.MAX_MEMO_BYTES)
    preview = await chain.preview(await message_of(chain, intent, 1))
    assert preview.error is None
    assert preview.units < COMPUTE_UNITS // 2


async def test_a_signature_made_elsewhere_is_put_to_the_message_if_it_is_one(chain: Chain, mint: str) -> None:
    recent, recipient = await chain.latest_blockhash(), str(Keypair().pubkey())
    message = transfer_message(payout(mint, recipient, 77), recent.hash)
    signature = bytes(TREASURY.sign_message(to_bytes_versioned(message)))
    prepared = assemble(message, signature, recent)
    assert prepared == sign(message, (TREASURY,), recent)
    assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
    assert await chain.balance_micro_kvr(recipient, mint) == 77
    other = bytes(Keypair().sign_message(to_bytes_versioned(message)))
    for bad in (other, signature[:63], b"", bytes(64)):
        with pytest.raises(WalletError) as error:
            assemble(message, bad, recent)
        assert error.value.code == "signature_mismatch"
    with pytest.raises(UsageError):
        assemble(message, signature, replace(recent, hash=Hash.new_unique()))


async def test_movements_name_amounts_and_the_other_side(chain: Chain, mint: str) -> None:
    treasury, friend, third = str(TREASURY.pubkey()), Keypair(), str(Keypair().pubkey())
    name = str(friend.pubkey())
    sent = [
        (SolTransfer(treasury, name, 10**8, "for fees"), TREASURY),
        (payout(mint, name, 900, "wages"), TREASURY),
        (KvrTransfer(name, third, mint, 250, "rent"), friend),
        (SolTransfer(name, third, 10**6), friend),
    ]
    for intent, key in sent:
        outcome = await chain.transact(await prepare_transfer(chain, intent, key))
        assert outcome.state is OutcomeState.CONFIRMED
    recent = await chain.latest_blockhash()
    failing = sign(transfer_message(KvrTransfer(name, third, mint, 10**9), recent.hash), (friend,), recent)
    await chain._resend(failing.raw)
    assert (await chain.outcome(failing)).state is OutcomeState.FAILED

    lines = await chain.movements(name, mint)
    seen = [(each.micro_kvr, each.lamports, each.fee_lamports, each.counterparties, each.memos) for each in lines]
    assert seen == [
        (0, 0, 5000, (), ()),
        (0, -(10**6), 5000, (third,), ()),
        (-250, -2_039_280, 5000, (third,), ("rent",)),
        (900, 0, 0, (treasury,), ("wages",)),
        (0, 10**8, 0, (treasury,), ("for fees",)),
    ]
    assert [each.error is None for each in lines] == [False, True, True, True, True]
    assert sum(each.micro_kvr for each in lines) == await chain.balance_micro_kvr(name, mint)
    spent = sum(each.lamports - each.fee_lamports for each in lines)
    assert spent == await chain.balance_lamports(name)
    assert [each.counterparties for each in await chain.kvr_history(name, mint)] == [(), (third,), (treasury,)]
    assert [each.signature for each in await chain.movements(name, mint, limit=2)] == [
        each.signature for each in lines[:2]
    ]


@pytest.mark.parametrize("micro_kvr", [0, -1, 2**64])
def test_amounts_that_cannot_be_are_refused_before_signing(micro_kvr: int) -> None:
    with pytest.raises(UsageError):
        transfer_message(payout(token.DEVNET_MINT, str(Keypair().pubkey()), micro_kvr), Hash.new_unique())


def test_an_intent_is_one_message() -> None:
    intent = payout(token.DEVNET_MINT, str(Keypair().pubkey()), 7, "same")
    blockhash = Hash.new_unique()
    assert transfer_message(intent, blockhash) == transfer_message(intent, blockhash)
    assert transfer_message(intent, blockhash) != transfer_message(replace(intent, micro_kvr=8), blockhash)
