"""Several RPCs of one cluster: real ledgers behind proxies that fail, lag, or ask for a pause."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from solana.rpc.commitment import Commitment
from solders.keypair import Keypair
from solders.system_program import TransferParams, transfer

from kvasir_console.config import WalletConfig
from kvasir_console.errors import ConfigError, LedgerError, NetworkError
from kvasir_console.wallet.chain import Chain, OutcomeState, PreparedTransfer, open_chain
from kvasir_console.wallet.chain_cluster import ClusterPin
from kvasir_console.wallet.chain_endpoints import MAX_LAG_SLOTS, SURVEY_S, Endpoints
from kvasir_console.wallet.chain_errors import MAX_RETRY_AFTER_S, RateLimitedError
from kvasir_console.wallet.chain_outcome import Witness, decide
from kvasir_console.wallet.chain_types import SignatureStatus

from ledger_process import HANG_UP, LedgerProcess, Refusal, RpcProxy

SOL = 10**9
DEAD = "http://127.0.0.1:1"
POLL_S = 0.02


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    ledger = LedgerProcess(tmp_path_factory.mktemp("endpoints"), slot_ms=20).start()
    yield ledger
    ledger.stop()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    """Another cluster."""
    ledger = LedgerProcess(tmp_path_factory.mktemp("other"), slot_ms=20).start()
    yield ledger
    ledger.stop()


@pytest.fixture
async def public(process: LedgerProcess) -> AsyncIterator[RpcProxy]:
    """A second RPC of the same cluster, which asks for no header."""
    async with RpcProxy(process.url, auth=process.auth) as proxy:
        yield proxy


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


# -- one that does not answer ------------------------------------------------------------------------------------


async def test_the_next_rpc_is_asked_when_the_first_is_not_there(process: LedgerProcess, public: RpcProxy) -> None:
    async with Chain(DEAD, "Bearer of the first", fallbacks=(public.url,)) as chain:
        assert await chain.genesis_hash() == process.genesis
        assert await chain.balance_lamports(new_address()) == 0


async def test_the_header_is_for_the_first_rpc_only(process: LedgerProcess, public: RpcProxy) -> None:
    async with Chain(DEAD, process.auth, fallbacks=(public.url,)) as chain:
        await chain.genesis_hash()
    assert public.headers
    for sent in public.headers:
        assert "authorization" not in sent
        assert sent["user-agent"].startswith("kvasir-console/")


async def test_a_payment_goes_through_though_the_first_rpc_fails_at_every_other_request(
    process: LedgerProcess, public: RpcProxy
) -> None:
    prepared, recipient = await funded_payment(process)
    turns = iter(range(10**6))
    async with (
        RpcProxy(process.url, gate=lambda _method: HANG_UP if next(turns) % 2 else None) as first,
        Chain(first.url, process.auth, fallbacks=(public.url,), poll_s=POLL_S) as chain,
    ):
        assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
        assert await chain.balance_lamports(recipient) == SOL
        assert public.calls


def lose(lost: str) -> Callable[[str, Any], Any]:
    """The ledger carries it out and nobody hears of it."""
    return lambda method, reply: HANG_UP if method == lost else reply


async def test_an_accepted_send_whose_answer_is_lost_is_sent_elsewhere_too_and_lands_once(
    process: LedgerProcess, public: RpcProxy
) -> None:
    prepared, recipient = await funded_payment(process)
    async with (
        RpcProxy(process.url, rewrite=lose("sendTransaction")) as first,
        Chain(first.url, process.auth, fallbacks=(public.url,), poll_s=POLL_S) as chain,
    ):
        assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
        assert "sendTransaction" in first.calls
        assert "sendTransaction" in public.calls
        assert await chain.balance_lamports(recipient) == SOL


async def test_an_airdrop_is_asked_for_once(process: LedgerProcess, public: RpcProxy) -> None:
    """A second one would be another transaction."""
    recipient = new_address()
    async with (
        RpcProxy(process.url, rewrite=lose("requestAirdrop")) as first,
        Chain(first.url, process.auth, fallbacks=(public.url,), commitment="processed") as chain,
    ):
        with pytest.raises(NetworkError):
            await chain.airdrop(recipient, SOL)
        assert (first.calls + public.calls).count("requestAirdrop") == 1
        assert await chain.balance_lamports(recipient) == SOL


async def test_when_none_answers_it_is_the_first_ones_failure() -> None:
    async with Chain(DEAD, fallbacks=("http://127.0.0.1:2",)) as chain:
        with pytest.raises(NetworkError) as error:
            await chain.genesis_hash()
        assert error.value.code == "rpc_unreachable"


# -- one that wants a pause --------------------------------------------------------------------------------------


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


def limited(times: int, header: str = "", status: int = 429) -> Callable[[str], Refusal | None]:
    """The first ``times`` requests are asked to wait."""
    left = iter(range(times))
    refusal = Refusal(status, {"Retry-After": header} if header else {})
    return lambda _method: None if next(left, None) is None else refusal


def endpoints(clock: Monotonic, process: LedgerProcess, *urls: str) -> Endpoints:
    return Endpoints(
        urls,
        process.auth,
        commitment=Commitment("confirmed"),
        timeout_s=5.0,
        monotonic_s=clock,
        sleep=clock.sleep,
    )


async def slot_of(several: Endpoints) -> int:
    return int((await several.ask("its slot", lambda rpc: rpc.get_slot())).value)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_pause_that_is_asked_for_is_made(process: LedgerProcess, status: int) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(2, "7", status)) as proxy:
        several = endpoints(clock, process, proxy.url)
        assert await slot_of(several) >= 0
        assert clock.pauses == [7.0, 7.0]
        assert len(proxy.calls) == 3
        await several.close()


async def test_without_a_header_the_pauses_grow(process: LedgerProcess) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(4)) as proxy:
        several = endpoints(clock, process, proxy.url)
        await slot_of(several)
        assert clock.pauses == [1.0, 2.0, 4.0, 8.0]
        await several.close()


async def test_a_pause_can_be_given_as_a_date(process: LedgerProcess) -> None:
    clock = Monotonic()
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=10), usegmt=True)
    async with RpcProxy(process.url, gate=limited(1, date)) as proxy:
        several = endpoints(clock, process, proxy.url)
        await slot_of(several)
        assert 5 < clock.pauses[0] <= 10
        await several.close()


async def test_a_long_pause_is_told_and_kept_meanwhile(process: LedgerProcess) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(1, "120")) as proxy:
        several = endpoints(clock, process, proxy.url)
        for _ in range(2):
            with pytest.raises(RateLimitedError) as error:
                await slot_of(several)
            assert error.value.retry_after_s == 120
            assert "120 seconds" in error.value.hint
        assert len(proxy.calls) == 1  # the second question did not reach it
        clock.now_s += 121
        assert await slot_of(several) >= 0
        assert clock.pauses == []
        await several.close()


@pytest.mark.parametrize("header", ["-5", "soon", "1e9", "Mon, 99 Foo 2099 99:99:99 GMT"])
async def test_a_pause_that_makes_no_sense_is_a_short_one(process: LedgerProcess, header: str) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(1, header)) as proxy:
        several = endpoints(clock, process, proxy.url)
        await slot_of(several)
        assert clock.pauses == [1.0]
        await several.close()


async def test_a_pause_is_bounded(process: LedgerProcess) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(1, "9" * 400)) as proxy:
        several = endpoints(clock, process, proxy.url)
        with pytest.raises(RateLimitedError) as error:
            await slot_of(several)
        assert error.value.retry_after_s == MAX_RETRY_AFTER_S
        await several.close()


async def test_while_one_pauses_the_other_answers(process: LedgerProcess, public: RpcProxy) -> None:
    clock = Monotonic()
    async with RpcProxy(process.url, gate=limited(10**6, "30")) as first:
        several = endpoints(clock, process, first.url, public.url)
        for _ in range(5):
            await slot_of(several)
        assert clock.pauses == []
        assert len(first.calls) == 1
        await several.close()


# -- one that lags -----------------------------------------------------------------------------------------------


def slots_behind(lag: int) -> Callable[[str, Any], Any]:
    def rewrite(method: str, reply: Any) -> Any:
        return {**reply, "result": max(0, reply["result"] - lag)} if method == "getSlot" else reply

    return rewrite


@pytest.mark.parametrize(("lag", "asked"), [(MAX_LAG_SLOTS * 100, "second"), (MAX_LAG_SLOTS // 3, "first")])
async def test_one_that_is_far_behind_the_others_is_asked_last(tmp_path: Path, lag: int, asked: str) -> None:
    process = LedgerProcess(tmp_path, slot_ms=1).start()
    try:
        async with (
            RpcProxy(process.url, rewrite=slots_behind(lag)) as first,
            RpcProxy(process.url, auth=process.auth) as second,
        ):
            clock = Monotonic()
            several = endpoints(clock, process, first.url, second.url)
            async with Chain(process.url, process.auth) as direct:
                while (await direct.latest_blockhash()).slot < 2 * MAX_LAG_SLOTS:
                    pass
            await slot_of(several)
            first.calls.clear(), second.calls.clear()
            await several.ask("a blockhash", lambda rpc: rpc.get_latest_blockhash())
            assert (first.calls if asked == "first" else second.calls) == ["getLatestBlockhash"]
            # It has caught up by the next comparison.
            first.rewrite = slots_behind(0)
            clock.now_s += SURVEY_S
            await slot_of(several)
            first.calls.clear()
            await several.ask("a blockhash", lambda rpc: rpc.get_latest_blockhash())
            assert first.calls == ["getLatestBlockhash"]
            await several.close()
    finally:
        process.stop()


UNHEALTHY = {"code": -32005, "message": "Node is behind by 4242 slots", "data": {"numSlotsBehind": 4242}}


async def test_one_that_says_it_is_behind_is_passed_over(process: LedgerProcess, public: RpcProxy) -> None:
    def unhealthy(_method: str, reply: Any) -> Any:
        return {"jsonrpc": "2.0", "id": reply["id"], "error": UNHEALTHY}

    async with RpcProxy(process.url, rewrite=unhealthy) as first:
        async with Chain(first.url, process.auth) as alone:
            with pytest.raises(NetworkError) as error:
                await alone.balance_lamports(new_address())
            assert error.value.code == "rpc_stale"
        async with Chain(first.url, process.auth, fallbacks=(public.url,)) as chain:
            assert await chain.balance_lamports(new_address()) == 0


@pytest.mark.parametrize(("ahead_s", "fresh"), [(0, True), (60, True), (600, False), (-600, True)])
async def test_nothing_is_signed_over_a_chain_that_stands_still(
    process: LedgerProcess, ahead_s: int, fresh: bool
) -> None:
    async with Chain(process.url, process.auth, now_s=lambda: datetime.now(UTC).timestamp() + ahead_s) as chain:
        if fresh:
            await chain.check_fresh()
            return
        with pytest.raises(NetworkError) as error:
            await chain.check_fresh()
        assert error.value.code == "rpc_stale"
        assert "if this machine's clock is right" in error.value.message


async def test_an_rpc_that_has_forgotten_does_not_get_to_say_it_expired(tmp_path: Path) -> None:
    """It landed; a node that keeps only the newest blocks knows nothing of it any more."""
    process = LedgerProcess(tmp_path, slot_ms=5).start()

    def forgets(method: str, reply: Any) -> Any:
        if method == "getSignatureStatuses":
            return {**reply, "result": {**reply["result"], "value": [None]}}
        return {**reply, "result": 10**6} if method == "getFirstAvailableBlock" else reply

    try:
        prepared, recipient = await funded_payment(process)
        assert prepared.slot > 0
        async with Chain(process.url, process.auth, poll_s=POLL_S) as chain:
            assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
            while (await chain.latest_blockhash()).slot <= prepared.last_valid_block_height + 40:
                pass
        async with (
            RpcProxy(process.url, rewrite=forgets) as proxy,
            Chain(proxy.url, process.auth, poll_s=POLL_S) as chain,
        ):
            with pytest.raises(NetworkError) as error:
                await chain.outcome(prepared)
            assert error.value.code == "history_too_short"
            assert "do not send another" in error.value.hint
            assert await chain.balance_lamports(recipient) == SOL
    finally:
        process.stop()


async def landed(process: LedgerProcess) -> tuple[PreparedTransfer, str]:
    """A payment that landed, so long ago that it could land no more."""
    prepared, recipient = await funded_payment(process)
    async with Chain(process.url, process.auth, poll_s=POLL_S) as chain:
        assert (await chain.transact(prepared)).state is OutcomeState.CONFIRMED
        while (await chain.latest_blockhash()).slot <= prepared.last_valid_block_height + 40:
            pass
    return prepared, recipient


def denies(method: str, reply: Any) -> Any:
    """It knows nothing of any transaction, and its history reaches back to the beginning."""
    if method == "getSignatureStatuses":
        return {**reply, "result": {**reply["result"], "value": [None]}}
    return reply


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    ledger = LedgerProcess(tmp_path_factory.mktemp("quick"), slot_ms=5).start()
    yield ledger
    ledger.stop()


async def test_one_rpc_that_lies_does_not_declare_dead_what_another_has_seen_land(quick: LedgerProcess) -> None:
    """A second payment would be signed in its place."""
    prepared, _ = await landed(quick)
    async with (
        RpcProxy(quick.url, rewrite=denies) as liar,
        RpcProxy(quick.url, auth=quick.auth) as honest,
    ):
        async with Chain(liar.url, quick.auth, poll_s=POLL_S) as chain:
            assert (await chain.outcome(prepared)).state is OutcomeState.EXPIRED  # alone it is believed
        async with Chain(liar.url, quick.auth, fallbacks=(honest.url,), poll_s=POLL_S) as chain:
            assert (await chain.outcome(prepared)).state is OutcomeState.CONFIRMED
        async with Chain(liar.url, quick.auth, fallbacks=(DEAD,), poll_s=POLL_S) as chain:
            assert (await chain.outcome(prepared)).state is OutcomeState.EXPIRED


@pytest.mark.parametrize("several", [False, True])
async def test_an_rpc_that_names_too_low_a_height_does_not_declare_dead_what_can_still_land(
    process: LedgerProcess, several: bool
) -> None:
    """It would be signed again while the first could still be sent by whoever has it."""

    def hurries(method: str, reply: Any) -> Any:
        if method == "getLatestBlockhash":
            reply["result"]["value"]["lastValidBlockHeight"] = 1
        return reply

    async with (
        RpcProxy(process.url, rewrite=hurries) as liar,
        RpcProxy(process.url, auth=process.auth) as honest,
        Chain(liar.url, process.auth, fallbacks=(honest.url,) if several else (), poll_s=POLL_S) as chain,
    ):
        payer = Keypair()
        pay = transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=Keypair().pubkey(), lamports=SOL))
        prepared = await chain.prepare([pay], [payer])
        assert prepared.last_valid_block_height == 1
        with pytest.raises(NetworkError) as error:
            await chain.await_outcome(prepared.signature, 1, raw=prepared.raw, resend=False, timeout_s=0.3)
        assert error.value.code == "outcome_unknown"
        outcome = await chain.await_outcome(prepared.signature, 1, raw=prepared.raw, resend=False)
        assert outcome.state is OutcomeState.EXPIRED
        last = (await chain.latest_blockhash()).slot
        assert last >= prepared.slot + 150  # not before its blockhash was too old


async def test_it_expired_when_every_rpc_says_so(quick: LedgerProcess) -> None:
    prepared, _ = await funded_payment(quick)
    async with (
        RpcProxy(quick.url, auth=quick.auth) as second,
        Chain(quick.url, quick.auth, fallbacks=(second.url,), poll_s=POLL_S) as chain,
    ):
        outcome = await chain.await_outcome(prepared.signature, prepared.last_valid_block_height)
        assert outcome.state is OutcomeState.EXPIRED
        assert "getSignatureStatuses" in second.calls


LANDED = SignatureStatus(7, Commitment.CONFIRMED, None)
DEEP = SignatureStatus(7, Commitment.FINALIZED, "out of luck")


@pytest.mark.parametrize(
    ("witnesses", "state"),
    [
        ([Witness(None, False)], None),
        ([Witness(None, True)], OutcomeState.EXPIRED),
        ([Witness(LANDED, True)], OutcomeState.CONFIRMED),
        ([Witness(DEEP, True)], OutcomeState.FAILED),
        ([Witness(None, True), Witness(None, True)], OutcomeState.EXPIRED),
        ([Witness(None, True), Witness(None, False)], None),
        ([Witness(None, True), Witness(LANDED, True)], OutcomeState.CONFIRMED),
        ([Witness(None, True, 100, 50), Witness(None, True, 0, 50)], OutcomeState.EXPIRED),
        ([Witness(None, True, 100, 50), Witness(DEEP, True, 0, 50)], OutcomeState.FAILED),
        ([Witness(None, True, 100, 50), Witness(None, True, 51, 50)], "history_too_short"),
        ([Witness(SignatureStatus(7, Commitment.PROCESSED, None), True)], None),
    ],
)
def test_what_several_say_together(witnesses: list[Witness], state: object) -> None:
    if state != "history_too_short":
        found = decide(witnesses, Commitment.CONFIRMED)
        assert (None if found is None else found.state) is state
        return
    with pytest.raises(NetworkError) as error:
        decide(witnesses, Commitment.CONFIRMED)
    assert error.value.code == state


# -- one of another cluster --------------------------------------------------------------------------------------


async def test_a_fallback_of_another_cluster_is_never_asked_about_money(
    process: LedgerProcess, other: LedgerProcess
) -> None:
    async with RpcProxy(other.url, auth=other.auth) as stranger:
        async with Chain(process.url, process.auth, fallbacks=(stranger.url,)) as chain:
            await chain.balance_lamports(new_address())
        async with RpcProxy(process.url, gate=lambda _method: HANG_UP if dead else None) as first:
            dead = False
            async with Chain(first.url, process.auth, fallbacks=(stranger.url,)) as chain:
                await chain.balance_lamports(new_address())
                dead = True
                with pytest.raises(LedgerError) as error:
                    await chain.balance_lamports(new_address())
                assert error.value.code == "cluster_changed"
        assert set(stranger.calls) == {"getGenesisHash"}


async def test_an_outcome_is_not_asked_of_another_cluster(
    process: LedgerProcess, other: LedgerProcess, tmp_path: Path
) -> None:
    """There the height may have passed and the signature is unknown: it would be signed again."""
    prepared, _ = await funded_payment(process)
    wallet = new_address()
    pin = ClusterPin(tmp_path / "state" / "cluster.json", wallet)
    async with Chain(process.url, process.auth, pin=pin) as chain:
        await chain.balance_lamports(wallet)
    async with Chain(other.url, other.auth, pin=pin, poll_s=POLL_S) as chain:
        for question in (chain.outcome(prepared), chain.transact(prepared), chain.latest_blockhash()):
            with pytest.raises(LedgerError) as error:
                await question
            assert error.value.code == "cluster_changed"


# -- from the configuration --------------------------------------------------------------------------------------


async def test_the_configuration_names_them_all(process: LedgerProcess, public: RpcProxy) -> None:
    config = WalletConfig(
        rpc_url=DEAD,
        rpc_auth_file=str(process.auth_file),
        rpc_fallbacks=f"  http://127.0.0.1:2  {public.url} ",
        commitment="finalized",
    )
    async with open_chain(config) as chain:
        assert chain.commitment == "finalized"
        assert await chain.genesis_hash() == process.genesis


@pytest.mark.parametrize("fallbacks", ["http://api.devnet.solana.com", "https://a.example http://b.example", "x"])
def test_every_rpc_must_be_https_or_on_this_machine(fallbacks: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_chain(WalletConfig(rpc_fallbacks=fallbacks))
    assert error.value.code == "rpc_url_insecure"
