"""When a payment is dead: RPCs that forget, lie, or know better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chain_parts import DEAD, POLL_S, SOL, funded_payment
from solana.rpc.commitment import Commitment
from solders.keypair import Keypair
from solders.system_program import TransferParams, transfer

from kvasir_console.errors import NetworkError
from kvasir_console.wallet.chain import Chain, OutcomeState, PreparedTransfer
from kvasir_console.wallet.chain_outcome import Witness, decide
from kvasir_console.wallet.chain_types import SignatureStatus

from ledger_process import LedgerProcess, RpcProxy


async def test_an_rpc_that_has_forgotten_does_not_get_to_say_it_expired(tmp_path: Path) -> None:
    """It landed; a node that keeps only the newest blocks knows nothing of it any more."""
    process = LedgerProcess(tmp_path, slot_ms=10).start()

    def forgets(method: str, reply: Any) -> Any:
        if method == "getSignatureStatuses":
            return {**reply, "result": {**reply["result"], "value": [None]}}
        return {**reply, "result": 10**6} if method == "getFirstAvailableBlock" else reply

    try:
        prepared, recipient = await landed(process)
        assert prepared.slot > 0
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
    """A payment that landed, so long ago that it could land no more.

    Of a ledger whose blockhashes live for a second; one that a busy machine was too slow for is followed by another.
    """
    async with Chain(process.url, process.auth, poll_s=POLL_S) as chain:
        while True:
            prepared, recipient = await funded_payment(process)
            if (await chain.transact(prepared)).state is OutcomeState.CONFIRMED:
                break
        while (await chain.latest_blockhash()).slot <= prepared.last_valid_block_height + 40:
            pass
    return prepared, recipient


def denies(method: str, reply: Any) -> Any:
    """It knows nothing of any transaction, and its history reaches back to the beginning."""
    if method == "getSignatureStatuses":
        return {**reply, "result": {**reply["result"], "value": [None]}}
    return reply


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
    quick: LedgerProcess, several: bool
) -> None:
    """It would be signed again while the first could still be sent by whoever has it."""

    def hurries(method: str, reply: Any) -> Any:
        if method == "getLatestBlockhash":
            reply["result"]["value"]["lastValidBlockHeight"] = 1
        return reply

    async with (
        RpcProxy(quick.url, rewrite=hurries) as liar,
        RpcProxy(quick.url, auth=quick.auth) as honest,
        Chain(liar.url, quick.auth, fallbacks=(honest.url,) if several else (), poll_s=POLL_S) as chain,
    ):
        payer = Keypair()
        pay = transfer(TransferParams(from_pubkey=payer.pubkey(), to_pubkey=Keypair().pubkey(), lamports=SOL))
        prepared = await chain.prepare([pay], [payer])
        assert prepared.last_valid_block_height == 1
        question = {"raw": prepared.raw, "resend": False}
        try:
            outcome = await chain.await_outcome(prepared.signature, 1, **question, timeout_s=0.3)
        except NetworkError as error:  # unless this machine was so slow that it is too old by now
            assert error.code == "outcome_unknown"  # noqa: PT017 - it need not be raised
            outcome = await chain.await_outcome(prepared.signature, 1, **question)
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
