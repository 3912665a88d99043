"""The client against a real ledger process, directly and through a proxy that loses and delays answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from chain_parts import POLL_S, SOL, new_address
from solders.keypair import Keypair
from solders.system_program import TransferParams, transfer

from kvasir_console.errors import ConfigError, LedgerError, NetworkError, UsageError, WalletError
from kvasir_console.wallet import token
from kvasir_console.wallet.chain import Chain, Outcome, OutcomeState, PreparedTransfer, check_rpc_url
from kvasir_console.wallet.chain_errors import PreflightError
from kvasir_console.wallet.token import DEVNET_MINT

from ledger_process import HANG_UP, LedgerProcess, RpcProxy


def connect(process: LedgerProcess, url: str = "", **options: Any) -> Chain:
    return Chain(url or process.url, process.auth, poll_s=POLL_S, **options)


@pytest.fixture
async def chain(process: LedgerProcess) -> AsyncIterator[Chain]:
    async with connect(process) as connected:
        yield connected


async def funded(chain: Chain) -> Keypair:
    keypair, recent = Keypair(), await chain.latest_blockhash()
    signature = await chain.airdrop(str(keypair.pubkey()), 10 * SOL)
    outcome = await chain.await_outcome(signature, recent.last_valid_block_height)
    assert outcome.state is OutcomeState.CONFIRMED
    return keypair


async def prepare_sol(chain: Chain, payer: Keypair, recipient: str, lamports: int) -> PreparedTransfer:
    to = Keypair().pubkey().from_string(recipient)
    instruction = transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=to, lamports=lamports))
    return await chain.prepare([instruction], [payer])


# -- reading -----------------------------------------------------------------------------------------------------


async def test_it_names_the_cluster(chain: Chain, process: LedgerProcess) -> None:
    assert await chain.genesis_hash() == process.genesis


async def test_a_wallet_that_never_had_anything_has_zero_of_everything(chain: Chain) -> None:
    owner = new_address()
    assert await chain.balance_lamports(owner) == 0
    assert await chain.balance_micro_kvr(owner, token.DEVNET_MINT) == 0
    assert await chain.account(owner) is None
    assert await chain.history(owner) == ()
    assert await chain.kvr_history(owner, token.DEVNET_MINT) == ()
    assert await chain.rent_exempt_lamports(165) == 2_039_280


async def test_what_is_no_address_is_refused_before_it_is_asked_for(chain: Chain) -> None:
    for text in ("", "0OIl", "z" * 44, "1" * 31, "ü"):
        with pytest.raises(WalletError):
            await chain.balance_lamports(text)
    with pytest.raises(UsageError):
        await chain.status("not a signature")


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("https://api.devnet.solana.com", True),
        ("http://127.0.0.1:8899", True),
        ("http://localhost:8899", True),
        ("http://api.devnet.solana.com", False),
        ("http://127.0.0.1.evil.example", False),
        ("ftp://127.0.0.1", False),
        ("127.0.0.1:8899", False),
        ("", False),
    ],
)
def test_plain_http_is_for_this_machine_only(url: str, good: bool) -> None:
    if good:
        check_rpc_url(url)
    else:
        with pytest.raises(ConfigError):
            check_rpc_url(url)


async def test_a_proxy_of_the_environment_never_sees_the_local_token(
    process: LedgerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with connect(process) as chain:
        assert await chain.genesis_hash() == process.genesis


@pytest.mark.parametrize("auth", [None, "Bearer wrong"])
async def test_a_wrong_token_says_which_file_to_check(process: LedgerProcess, auth: str | None) -> None:
    async with Chain(process.url, auth, poll_s=POLL_S) as stranger:
        questions: list[Awaitable[object]] = [
            stranger.genesis_hash(),
            stranger.await_outcome("1" * 64, 1),
        ]
        for question in questions:
            with pytest.raises(NetworkError) as error:
                await question
            assert error.value.code == "rpc_unauthorised"
            assert "rpc_auth_file" in error.value.hint


async def test_an_rpc_that_is_not_there_is_a_network_error() -> None:
    async with Chain("http://127.0.0.1:1", poll_s=POLL_S) as chain:
        with pytest.raises(NetworkError) as error:
            await chain.genesis_hash()
        assert error.value.code == "rpc_unreachable"
        with pytest.raises(NetworkError) as error:
            await chain.await_outcome("1" * 64, 100, timeout_s=0.1)
        assert error.value.code == "outcome_unknown"
        assert "do not send another" in error.value.hint


async def test_an_answer_that_is_no_solana_answer_is_a_network_error(process: LedgerProcess) -> None:
    async with (
        RpcProxy(process.url, lambda _method, _reply: {"hello": "world"}) as proxy,
        connect(process, proxy.url) as chain,
    ):
        with pytest.raises(NetworkError) as error:
            await chain.balance_lamports(new_address())
        assert error.value.code == "rpc_malformed"


@pytest.mark.parametrize("value", [None, {}, {"blockhash": None}, {"blockhash": None, "lastValidBlockHeight": 9}, 7])
async def test_a_blockhash_that_is_none_is_a_network_error(process: LedgerProcess, value: Any) -> None:
    def lies(method: str, reply: Any) -> Any:
        return {**reply, "result": {**reply["result"], "value": value}} if method == "getLatestBlockhash" else reply

    async with RpcProxy(process.url, lies) as proxy, connect(process, proxy.url) as chain:
        with pytest.raises(NetworkError) as error:
            await chain.prepare([], [Keypair()])
        assert error.value.code == "rpc_malformed"


@pytest.mark.parametrize("value", [[], [None, None], None, "x"])
async def test_statuses_that_are_missing_decide_nothing(process: LedgerProcess, value: Any) -> None:
    """Neither landed nor expired: asked again until the time is over."""

    def lies(method: str, reply: Any) -> Any:
        return {**reply, "result": {**reply["result"], "value": value}} if method == "getSignatureStatuses" else reply

    async with RpcProxy(process.url, lies) as proxy, connect(process, proxy.url) as chain:
        signature = str(Keypair().sign_message(b"x"))
        with pytest.raises(NetworkError) as error:
            await chain.status(signature)
        assert error.value.code == "rpc_malformed"
        with pytest.raises(NetworkError) as error:
            await chain.await_outcome(signature, 0, timeout_s=0.1)
        assert error.value.code == "outcome_unknown"


BALANCE = {"accountIndex": 99, "mint": DEVNET_MINT, "owner": DEVNET_MINT, "programId": DEVNET_MINT}
AMOUNT = {"amount": "9" * 5000, "decimals": 6, "uiAmount": None, "uiAmountString": "0"}


@pytest.mark.parametrize(
    "meta", [None, {"postTokenBalances": [{**BALANCE, "uiTokenAmount": AMOUNT}]}, {"preBalances": [-1]}, {"fee": 2**70}]
)
async def test_a_history_that_makes_no_sense_is_a_network_error(process: LedgerProcess, meta: Any) -> None:
    def lies(method: str, reply: Any) -> Any:
        if method == "getTransaction" and reply["result"] is not None:
            reply["result"]["meta"] = None if meta is None else {**reply["result"]["meta"], **meta}
        return reply

    async with RpcProxy(process.url, lies) as proxy, connect(process, proxy.url) as chain:
        payer, recipient = await funded(chain), new_address()
        prepared = await prepare_sol(chain, payer, recipient, SOL)
        await chain.transact(prepared)
        with pytest.raises(NetworkError) as error:
            await chain.movements(recipient, DEVNET_MINT)
        assert error.value.code == "rpc_malformed"


# -- sending -----------------------------------------------------------------------------------------------------


async def test_a_transfer_is_prepared_submitted_and_confirmed(chain: Chain) -> None:
    payer, recipient = await funded(chain), new_address()
    prepared = await prepare_sol(chain, payer, recipient, 3 * SOL)
    assert await chain.status(prepared.signature) is None
    assert await chain.balance_lamports(recipient) == 0
    assert (await chain.simulate(prepared.raw)).error is None
    outcome = await chain.transact(prepared)
    assert outcome.state is OutcomeState.CONFIRMED
    assert await chain.balance_lamports(recipient) == 3 * SOL
    assert await chain.balance_lamports(str(payer.pubkey())) == 7 * SOL - 5000
    view = await chain.transaction(prepared.signature)
    assert view is not None
    assert (view.slot, view.fee_lamports, view.error) == (outcome.slot, 5000, None)
    assert view.signers == (str(payer.pubkey()),)
    (line,) = await chain.history(recipient)
    assert (line.signature, line.slot) == (prepared.signature, outcome.slot)


async def test_submitting_again_and_again_pays_once(chain: Chain) -> None:
    payer, recipient = await funded(chain), new_address()
    prepared = await prepare_sol(chain, payer, recipient, SOL)
    for _ in range(3):
        await chain.submit(prepared)
    outcomes = {await chain.transact(prepared) for _ in range(3)}
    assert {outcome.state for outcome in outcomes} == {OutcomeState.CONFIRMED}
    assert await chain.balance_lamports(recipient) == SOL


async def test_a_reply_that_is_lost_is_looked_up_by_signature(process: LedgerProcess) -> None:
    """The RPC executes every submission and hangs up instead of answering."""

    def lose_replies(method: str, reply: Any) -> Any:
        return HANG_UP if method == "sendTransaction" else reply

    async with RpcProxy(process.url, lose_replies) as proxy, connect(process, proxy.url) as chain:
        payer, recipient = await funded(chain), new_address()
        prepared = await prepare_sol(chain, payer, recipient, SOL)
        with pytest.raises(NetworkError):
            await chain.submit(prepared)
        outcome = await chain.transact(prepared)
        assert outcome.state is OutcomeState.CONFIRMED
        assert proxy.calls.count("sendTransaction") >= 2
        assert await chain.balance_lamports(recipient) == SOL
        assert await chain.balance_lamports(str(payer.pubkey())) == 9 * SOL - 5000


async def test_questions_that_fail_are_asked_again(process: LedgerProcess) -> None:
    failures = {"getSignatureStatuses": 5, "getEpochInfo": 5}

    def flaky(method: str, reply: Any) -> Any:
        if failures.get(method, 0) > 0:
            failures[method] -= 1
            return HANG_UP
        return reply

    async with RpcProxy(process.url, flaky) as proxy, connect(process, proxy.url) as chain:
        payer, recipient = await funded(chain), new_address()
        outcome = await chain.transact(await prepare_sol(chain, payer, recipient, SOL))
        assert outcome.state is OutcomeState.CONFIRMED
        assert set(failures.values()) == {0}


async def test_a_transaction_the_rpc_dropped_is_sent_again_until_it_lands(process: LedgerProcess) -> None:
    """The first submission never reaches the ledger: the RPC claims to have taken it."""
    async with connect(process) as chain:
        payer, recipient = await funded(chain), new_address()
        prepared = await prepare_sol(chain, payer, recipient, SOL)
        seconds = iter(range(0, 10**6, 2))
        async with connect(process, monotonic_s=lambda: float(next(seconds))) as hasty:
            outcome = await hasty.await_outcome(
                prepared.signature, prepared.last_valid_block_height, raw=prepared.raw, timeout_s=10**6
            )
        assert outcome.state is OutcomeState.CONFIRMED
        assert await chain.balance_lamports(recipient) == SOL


async def test_a_refused_trial_run_says_why_and_leaves_no_trace(chain: Chain) -> None:
    payer, recipient = await funded(chain), new_address()
    prepared = await prepare_sol(chain, payer, recipient, 1000 * SOL)
    with pytest.raises(PreflightError) as error:
        await chain.transact(prepared)
    assert error.value.code == "transaction_refused"
    assert isinstance(error.value, LedgerError)
    assert "insufficient funds" in error.value.message
    assert error.value.hint == "Check the balance."
    assert await chain.status(prepared.signature) is None
    assert (await chain.simulate(prepared.raw)).error == "instruction 0 failed with code 1 (insufficient funds)"
    assert await chain.balance_lamports(str(payer.pubkey())) == 10 * SOL


async def test_a_wallet_without_sol_is_told_so(chain: Chain) -> None:
    prepared = await prepare_sol(chain, Keypair(), new_address(), SOL)
    with pytest.raises(PreflightError) as error:
        await chain.transact(prepared)
    assert "no SOL for the fee" in error.value.hint


async def test_a_transaction_that_landed_and_failed_is_failed(chain: Chain) -> None:
    payer, recipient = await funded(chain), new_address()
    prepared = await prepare_sol(chain, payer, recipient, 1000 * SOL)
    await chain._resend(prepared.raw)
    outcome = await chain.await_outcome(prepared.signature, prepared.last_valid_block_height)
    assert outcome.state is OutcomeState.FAILED
    assert "insufficient funds" in outcome.error
    assert await chain.balance_lamports(str(payer.pubkey())) == 10 * SOL - 5000


async def test_what_never_landed_expires_and_can_land_no_more(quick: LedgerProcess) -> None:
    async with connect(quick) as chain:
        payer, recipient = await funded(chain), new_address()
        prepared = await prepare_sol(chain, payer, recipient, SOL)
        outcome = await chain.await_outcome(prepared.signature, prepared.last_valid_block_height)
        assert outcome == Outcome(OutcomeState.EXPIRED)
        assert await chain.transact(prepared) == Outcome(OutcomeState.EXPIRED)
        assert await chain.balance_lamports(recipient) == 0


async def test_a_node_that_lags_behind_cannot_declare_a_payment_dead(process: LedgerProcess) -> None:
    """One node says the height has passed, another, not that far yet, does not know the signature."""
    lagging = 3

    def behind(method: str, reply: Any) -> Any:
        nonlocal lagging
        if method == "getEpochInfo":
            reply["result"].update(absoluteSlot=10**9, blockHeight=10**9)
        if method == "getSignatureStatuses" and lagging:
            lagging -= 1
            return {**reply, "result": {"context": {"slot": 5}, "value": [None]}}
        return reply

    async with RpcProxy(process.url, behind) as proxy, connect(process, proxy.url) as chain:
        payer, recipient = await funded(chain), new_address()
        outcome = await chain.transact(await prepare_sol(chain, payer, recipient, SOL))
        assert lagging == 0
        assert outcome.state is OutcomeState.CONFIRMED


async def test_finalized_means_waiting_for_32_slots(process: LedgerProcess) -> None:
    async with connect(process, commitment="finalized") as chain:
        payer, recipient = await funded(chain), new_address()
        prepared = await prepare_sol(chain, payer, recipient, SOL)
        outcome = await chain.transact(prepared)
        assert outcome.state is OutcomeState.CONFIRMED
        status = await chain.status(prepared.signature)
        assert status is not None
        assert status.commitment == "finalized"


async def test_a_payment_survives_a_killed_ledger(tmp_path: Path) -> None:
    process = LedgerProcess(tmp_path).start()
    async with connect(process) as chain:
        payer, recipient = await funded(chain), new_address()
        prepared = await prepare_sol(chain, payer, recipient, SOL)
        await chain.submit(prepared)
        process.kill()
        with pytest.raises(NetworkError):
            await chain.await_outcome(prepared.signature, prepared.last_valid_block_height, timeout_s=0.05)
    process.start()
    try:
        async with connect(process) as chain:
            outcome = await chain.transact(prepared)
            assert outcome.state is OutcomeState.CONFIRMED
            assert await chain.balance_lamports(recipient) == SOL
    finally:
        process.stop()
