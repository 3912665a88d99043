"""Sending on a real ledger, through RPCs that lose answers, drop transactions, lie and forget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from solders.keypair import Keypair
from spl.token.constants import TOKEN_PROGRAM_ID

from kvasir_console.errors import LedgerError, NetworkError, UsageError, WalletError
from kvasir_console.wallet.chain import Chain, OutcomeState, PreparedTransfer, RecentBlockhash, sign
from kvasir_console.wallet.chain_errors import PreflightError
from kvasir_console.wallet.localnet.bootstrap import bootstrap
from kvasir_console.wallet.outbox import Outbox, SendState
from kvasir_console.wallet.sender import MAX_SIGNINGS, Sender
from kvasir_console.wallet.transfers import KvrTransfer, SolTransfer, Transfer, transfer_message

from ledger_process import HANG_UP, LedgerProcess, Refusal, RpcProxy

SOL = 10**9
TREASURY = Keypair.from_seed(bytes(range(32)))
SOURCE = str(TREASURY.pubkey())
POLL_S = 0.02


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    ledger = LedgerProcess(tmp_path_factory.mktemp("sender")).start()
    yield ledger
    ledger.stop()


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    """A ledger whose blockhashes expire in two seconds; what is sent there may have to be signed more than once."""
    ledger = LedgerProcess(tmp_path_factory.mktemp("hasty"), slot_ms=15).start()
    yield ledger
    ledger.stop()


def connect(process: LedgerProcess, url: str = "") -> Chain:
    return Chain(url or process.url, process.auth, poll_s=POLL_S)


@pytest.fixture
async def chain(process: LedgerProcess) -> AsyncIterator[Chain]:
    async with connect(process) as connected:
        yield connected


@pytest.fixture
async def mint(chain: Chain) -> str:
    return await bootstrap(chain, TREASURY)


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox.open(tmp_path / "state" / "outbox.sqlite") as opened:
        yield opened


class Pen:
    """Signs with the treasury's key and remembers what it signed, and when."""

    def __init__(self, key: Keypair = TREASURY) -> None:
        self.key = key
        self.signed: list[PreparedTransfer] = []
        self.heights: list[int] = []
        self.chain: Chain | None = None

    async def __call__(self, intent: Transfer, recent: RecentBlockhash) -> PreparedTransfer:
        if self.chain is not None:
            self.heights.append((await self.chain.latest_blockhash()).last_valid_block_height - 150)
        self.signed.append(sign(transfer_message(intent, recent.hash), (self.key,), recent))
        return self.signed[-1]


def payment(mint: str, micro_kvr: int = 700, memo: str = "") -> KvrTransfer:
    return KvrTransfer(SOURCE, str(Keypair().pubkey()), mint, micro_kvr, memo)


async def test_a_payment_is_made_once_however_often_it_is_asked_for(chain: Chain, mint: str, outbox: Outbox) -> None:
    intent, pen = payment(mint), Pen()
    sender = Sender(outbox, chain)
    sends = [await sender.send("order 1", intent, pen) for _ in range(3)]
    assert {send.state for send in sends} == {SendState.CONFIRMED}
    assert len(pen.signed) == 1
    assert await chain.balance_micro_kvr(intent.recipient, mint) == 700
    assert outbox.signatures("order 1") == ((pen.signed[0].signature, "confirmed"),)
    with pytest.raises(UsageError):
        await sender.send("order 1", replace(intent, micro_kvr=1), pen)


async def test_it_is_stored_before_it_is_sent(process: LedgerProcess, mint: str, outbox: Outbox) -> None:
    seen: list[SendState] = []

    def look(method: str) -> Refusal | None:
        if method == "sendTransaction":
            send = outbox.get("a")
            assert send is not None
            seen.append(send.state)
        return None

    async with RpcProxy(process.url, gate=look) as proxy, connect(process, proxy.url) as chain:
        await Sender(outbox, chain).send("a", payment(mint), Pen())
    assert seen == [SendState.SIGNED]


async def test_an_rpc_that_drops_its_answer_after_accepting_pays_once(
    process: LedgerProcess, mint: str, outbox: Outbox
) -> None:
    intent, pen = payment(mint), Pen()

    def lose(method: str, reply: Any) -> Any:
        return HANG_UP if method == "sendTransaction" else reply

    async with RpcProxy(process.url, rewrite=lose) as proxy, connect(process, proxy.url) as chain:
        send = await Sender(outbox, chain).send("a", intent, pen)
        assert send.state is SendState.CONFIRMED
        assert len(pen.signed) == 1
        assert await chain.balance_micro_kvr(intent.recipient, mint) == 700


async def test_timed_out_is_no_reason_to_send_again(process: LedgerProcess, mint: str, outbox: Outbox) -> None:
    """It landed, and then the RPC answers nothing any more: the next one who asks learns that it did."""
    intent, pen, blind = payment(mint), Pen(), True

    def hide(method: str, reply: Any) -> Any:
        return HANG_UP if blind and method in ("sendTransaction", "getSignatureStatuses") else reply

    async with RpcProxy(process.url, rewrite=hide) as proxy, connect(process, proxy.url) as chain:
        sender = Sender(outbox, chain)
        for _ in range(2):
            with pytest.raises(NetworkError) as error:
                await sender.send("a", intent, pen, timeout_s=0.2)
            assert error.value.code == "outcome_unknown"
            assert "do not send another" in error.value.hint
        with pytest.raises(LedgerError) as undecided:
            await sender.send("b", intent, pen)
        assert undecided.value.code == "send_undecided"
        assert [send.state for send in await sender.resume()] == [SendState.SENT]
        blind = False
        assert [send.state for send in await sender.resume(timeout_s=120)] == [SendState.CONFIRMED]
        assert await sender.resume() == ()
        assert (await sender.send("a", intent, pen)).state is SendState.CONFIRMED
        assert len(pen.signed) == 1
        assert await chain.balance_micro_kvr(intent.recipient, mint) == 700


async def test_what_expired_is_signed_anew_only_when_the_old_can_land_no_more(
    hasty: LedgerProcess, outbox: Outbox
) -> None:
    """The RPC claims to have taken the first transaction and keeps it; later it hands it in after all."""
    pen = Pen()

    def swallow(method: str) -> Refusal | None:
        return HANG_UP if method == "sendTransaction" and len(pen.signed) == 1 else None

    async with (
        connect(hasty) as chain,
        RpcProxy(hasty.url, gate=swallow) as proxy,
        connect(hasty, proxy.url) as lossy,
    ):
        mint = await bootstrap(chain, TREASURY)
        intent, pen.chain = payment(mint), chain
        send = await Sender(outbox, lossy).send("a", intent, pen)
        assert send.state is SendState.CONFIRMED
        *expired, last = pen.signed
        assert expired
        for old, height in zip(expired, pen.heights[1:], strict=True):
            assert height > old.last_valid_block_height
        ends = [(each.signature, "expired") for each in expired]
        assert outbox.signatures("a") == (*ends, (last.signature, "confirmed"))
        first = expired[0]
        await chain._resend(first.raw)
        with pytest.raises(NetworkError):  # it stays unknown for ever
            await chain.await_outcome(first.signature, 10**9, timeout_s=0.2)
        assert await chain.balance_micro_kvr(intent.recipient, mint) == 700


async def test_a_chain_that_takes_nothing_ends_in_expired_and_a_later_call_pays(
    hasty: LedgerProcess, outbox: Outbox
) -> None:
    pen, closed = Pen(), True

    def refuse(method: str) -> Refusal | None:
        return HANG_UP if closed and method == "sendTransaction" else None

    async with (
        connect(hasty) as chain,
        RpcProxy(hasty.url, gate=refuse) as proxy,
        connect(hasty, proxy.url) as lossy,
    ):
        mint = await bootstrap(chain, TREASURY)
        intent = payment(mint)
        sender = Sender(outbox, lossy)
        assert (await sender.send("a", intent, pen)).state is SendState.EXPIRED
        assert len(pen.signed) == MAX_SIGNINGS
        assert await sender.resume() == ()
        closed = False
        assert (await sender.send("a", intent, pen)).state is SendState.CONFIRMED
        assert await chain.balance_micro_kvr(intent.recipient, mint) == 700
    assert len(pen.signed) > MAX_SIGNINGS
    assert [end for _, end in outbox.signatures("a")] == ["expired"] * (len(pen.signed) - 1) + ["confirmed"]


async def test_what_an_earlier_rpc_called_expired_is_looked_up_before_it_is_signed_anew(
    chain: Chain, mint: str, outbox: Outbox
) -> None:
    intent, pen = payment(mint), Pen()
    sender = Sender(outbox, chain)
    sent = await sender.send("a", intent, pen)
    outbox._db.execute("UPDATE send SET state = 'expired'")  # as an RPC that lied would have had it
    again = await sender.send("a", intent, pen)
    assert again.state is SendState.CONFIRMED
    assert again.prepared == sent.prepared
    assert len(pen.signed) == 1
    assert await chain.balance_micro_kvr(intent.recipient, mint) == 700


async def test_a_refused_trial_run_is_kept_and_not_pressed_upon_the_chain(hasty: LedgerProcess, outbox: Outbox) -> None:
    poor, friend = Keypair(), str(Keypair().pubkey())
    intent, pen = SolTransfer(str(poor.pubkey()), friend, SOL), Pen(poor)
    async with connect(hasty) as chain, RpcProxy(hasty.url) as proxy, connect(hasty, proxy.url) as watched:
        sender = Sender(outbox, watched)
        with pytest.raises(PreflightError):
            await sender.send("a", intent, pen)
        kept = outbox.get("a")
        assert kept is not None
        assert (kept.state, bool(kept.error)) == (SendState.SIGNED, True)
        await chain.airdrop(str(poor.pubkey()), 5 * SOL)
        submitted = proxy.calls.count("sendTransaction")
        (ended,) = await sender.resume(timeout_s=120)
        assert ended.state is SendState.EXPIRED
        assert proxy.calls.count("sendTransaction") == submitted
        assert (await sender.send("a", intent, pen)).state is SendState.CONFIRMED
        assert await chain.balance_lamports(friend) == SOL


async def test_two_equal_payments_on_purpose_are_two_transactions(chain: Chain, mint: str, outbox: Outbox) -> None:
    """Over one blockhash they would be one and the same: the second waits for a newer one."""
    intent, pen = payment(mint), Pen()
    sender = Sender(outbox, chain)
    sends = await asyncio.gather(*(sender.send(name, intent, pen, twin=True) for name in "ab"))
    assert {send.state for send in sends} == {SendState.CONFIRMED}
    assert len({send.prepared.signature for send in sends}) == 2
    assert await chain.balance_micro_kvr(intent.recipient, mint) == 1400


async def test_of_two_processes_with_one_id_one_payment_goes_out(
    chain: Chain, process: LedgerProcess, mint: str, tmp_path: Path
) -> None:
    intent, pens = payment(mint), [Pen() for _ in range(4)]
    file = tmp_path / "shared" / "outbox.sqlite"

    async def one(pen: Pen) -> str:
        with Outbox.open(file) as mine:
            async with connect(process) as own:
                return (await Sender(mine, own).send("a", intent, pen)).prepared.signature

    signatures = await asyncio.gather(*map(one, pens))
    assert len(set(signatures)) == 1
    assert await chain.balance_micro_kvr(intent.recipient, mint) == 700


async def test_what_was_signed_must_be_what_was_asked_for(chain: Chain, mint: str, outbox: Outbox) -> None:
    intent = payment(mint)
    thief = replace(intent, recipient=str(Keypair().pubkey()))

    async def dishonest(_intent: Transfer, recent: RecentBlockhash) -> PreparedTransfer:
        return sign(transfer_message(thief, recent.hash), (TREASURY,), recent)

    with pytest.raises(WalletError) as error:
        await Sender(outbox, chain).send("a", intent, dishonest)
    assert error.value.code == "signed_another"
    assert outbox.sends() == ()


async def test_nothing_is_stored_when_signing_is_refused(chain: Chain, mint: str, outbox: Outbox) -> None:
    async def refuse(_intent: Transfer, _recent: RecentBlockhash) -> PreparedTransfer:
        raise WalletError("wallet_locked", "The wallet is locked.")

    with pytest.raises(WalletError):
        await Sender(outbox, chain).send("a", payment(mint), refuse)
    with pytest.raises(LedgerError):
        await Sender(outbox, chain).send("a", replace(payment(mint), recipient=str(TOKEN_PROGRAM_ID)), Pen())
    assert outbox.sends() == ()


async def test_a_send_is_not_looked_for_on_another_cluster(
    chain: Chain, mint: str, outbox: Outbox, tmp_path: Path
) -> None:
    """There it would look as if it had expired."""
    intent, pen = payment(mint), Pen()
    sent = await Sender(outbox, chain).send("a", intent, pen)
    outbox._db.execute("UPDATE send SET state = 'sent'")
    other = LedgerProcess(tmp_path / "other", slot_ms=1).start()
    try:
        async with connect(other) as elsewhere:
            async with asyncio.timeout(120):
                while (await elsewhere.latest_blockhash()).slot < sent.prepared.last_valid_block_height + 40:
                    pass
            sender = Sender(outbox, elsewhere)
            assert await sender.resume() == ()
            with pytest.raises(LedgerError) as error:
                await sender.send("a", intent, pen)
            assert error.value.code == "cluster_changed"
    finally:
        other.stop()
    assert (await Sender(outbox, chain).send("a", intent, pen)).state is SendState.CONFIRMED
    assert len(pen.signed) == 1


async def test_a_stale_chain_is_not_signed_for(process: LedgerProcess, mint: str, outbox: Outbox) -> None:
    async with Chain(process.url, process.auth, now_s=lambda: time.time() + 3600) as late:
        with pytest.raises(NetworkError) as error:
            await Sender(outbox, late).send("a", payment(mint), Pen())
        assert error.value.code == "rpc_stale"
    assert outbox.sends() == ()


async def test_a_preview_signs_and_stores_nothing(chain: Chain, mint: str, outbox: Outbox) -> None:
    sender = Sender(outbox, chain, priority_micro_lamports=1000)
    preview = await sender.preview(payment(mint))
    assert (preview.fee_lamports, preview.error) == (5200, None)
    assert preview.spent_lamports == 5200 + 2_039_280
    assert outbox.sends() == ()


async def test_a_failure_on_chain_is_final(process: LedgerProcess, chain: Chain, mint: str, outbox: Outbox) -> None:
    """The money went elsewhere between the trial run and the landing."""
    poor = Keypair()
    recent = await chain.latest_blockhash()
    await chain.await_outcome(await chain.airdrop(str(poor.pubkey()), 2 * SOL), recent.last_valid_block_height)
    intent, pen = SolTransfer(str(poor.pubkey()), str(Keypair().pubkey()), SOL + SOL // 2), Pen(poor)
    spent = False

    async def sign_late(wanted: Transfer, fresh: RecentBlockhash) -> PreparedTransfer:
        nonlocal spent
        prepared = await pen(wanted, fresh)
        if not spent:
            spent = True
            away = SolTransfer(str(poor.pubkey()), SOURCE, SOL)
            gone = sign(transfer_message(away, fresh.hash), (poor,), fresh)
            assert (await chain.transact(gone)).state is OutcomeState.CONFIRMED
            await chain._resend(prepared.raw)  # as an RPC does that passes on before it tries
        return prepared

    send = await Sender(outbox, chain).send("a", intent, sign_late)
    assert send.state is SendState.FAILED
    assert "insufficient" in send.error
    assert (await Sender(outbox, chain).send("a", intent, sign_late)).state is SendState.FAILED
    assert len(pen.signed) == 1
