"""Several RPCs of one cluster: real ledgers behind proxies that fail, lag, or ask for a pause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from chain_parts import DEAD, POLL_S, SOL, Monotonic, endpoints, funded_payment, new_address, slot_of

from kvasir_console.config import WalletConfig
from kvasir_console.errors import ConfigError, LedgerError, NetworkError
from kvasir_console.wallet.chain import Chain, OutcomeState, open_chain
from kvasir_console.wallet.chain_cluster import ClusterPin
from kvasir_console.wallet.chain_endpoints import MAX_LAG_SLOTS, SURVEY_S

from ledger_process import HANG_UP, LedgerProcess, RpcProxy


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerProcess]:
    """Another cluster."""
    ledger = LedgerProcess(tmp_path_factory.mktemp("other"), slot_ms=20).start()
    yield ledger
    ledger.stop()


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


# -- one that lags -----------------------------------------------------------------------------------------------


def slots_behind(lag: int) -> Callable[[str, Any], Any]:
    """Of a chain that stands still meanwhile: how fast the two are asked plays no part."""

    def rewrite(method: str, reply: Any) -> Any:
        return {**reply, "result": 10**9 - lag} if method == "getSlot" else reply

    return rewrite


@pytest.mark.parametrize(("lag", "asked"), [(MAX_LAG_SLOTS * 100, "second"), (MAX_LAG_SLOTS // 3, "first")])
async def test_one_that_is_far_behind_the_others_is_asked_last(process: LedgerProcess, lag: int, asked: str) -> None:
    async with (
        RpcProxy(process.url, rewrite=slots_behind(lag)) as first,
        RpcProxy(process.url, rewrite=slots_behind(0), auth=process.auth) as second,
    ):
        clock = Monotonic()
        several = endpoints(clock, process, first.url, second.url)
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
