"""Paying claims: at most once each, whatever dies when, whatever the chain does."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from gateway_parts import ALICE, BOB, NOW, Clock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_console.errors import LedgerError, NetworkError, UsageError, WalletError
from kvasir_console.node.gateway import payout
from kvasir_console.node.gateway.ledger import Claim, ClaimState, Ledger, Reading
from kvasir_console.node.gateway.payout import Payer, StorePin, serve
from kvasir_console.node.gateway.store import Store
from kvasir_console.wallet.chain import Outcome, OutcomeState, PreparedTransfer


def told(*words: str) -> argparse.Namespace:
    return payout.parser().parse_args([*words, "--rpc", "http://127.0.0.1:9", "--mint", "m", "--treasury", "t"])


def test_a_databases_password_comes_from_a_private_file_only(tmp_path: Path) -> None:
    url = "postgresql://kvasir:hunter2@db/kvasir"
    with pytest.raises(UsageError) as refused:
        payout.database_url(told("--database", url))
    assert refused.value.code == "password_exposed"
    assert "hunter2" not in str(refused.value)
    assert payout.database_url(told("--database", "sqlite:///x.sqlite")) == "sqlite:///x.sqlite"
    file = tmp_path / "database"
    file.write_text(url + "\n")
    file.chmod(0o644)
    with pytest.raises(WalletError) as open_to_others:
        payout.database_url(told("--database-file", str(file)))
    assert open_to_others.value.code == "database_file"
    file.chmod(0o600)
    assert payout.database_url(told("--database-file", str(file))) == url


class Died(BaseException):
    """The process is gone at this point."""


LIFETIME = 150


def nothing(_step: str) -> None:
    """All is well at this step."""


@dataclass
class FakeChain:
    """A chain with blockhashes that expire: a transaction lands once, or never after its last valid height.

    ``before`` is called with the name of each step, so that a test can let the process die or the network fail there.
    """

    height: int = 1000
    paid: dict[str, int] = field(default_factory=dict)
    """Claim id to micro-KVR that really moved."""
    landed: dict[str, Outcome] = field(default_factory=dict)
    made: dict[str, tuple[str, int]] = field(default_factory=dict)
    submits: list[str] = field(default_factory=list)
    drop: bool = False
    """Submitted transactions vanish on their way."""
    refuse: LedgerError | None = None
    """What the RPC's trial run answers."""
    fail: str = ""
    """Transactions land with this error."""
    before: Callable[[str], None] = nothing
    after: Callable[[str], None] = nothing

    async def prepare(self, claim: Claim) -> PreparedTransfer:
        self.before("prepare")
        signature = f"sig-{len(self.made)}"
        self.made[signature] = (claim.claim_id, claim.micro_kvr)
        self.after("prepare")
        return PreparedTransfer(signature.encode(), signature, self.height + LIFETIME)

    async def submit(self, prepared: PreparedTransfer) -> None:
        self.before("submit")
        assert prepared.raw == prepared.signature.encode()
        self.submits.append(prepared.signature)
        if self.refuse is not None and prepared.signature not in self.landed:
            raise self.refuse
        if not self.drop and prepared.signature not in self.landed and self.height <= prepared.last_valid_block_height:
            self._land(prepared.signature)
        self.after("submit")

    async def outcome(self, prepared: PreparedTransfer, timeout_s: float) -> Outcome | None:
        self.before("outcome")
        if (found := self.landed.get(prepared.signature)) is not None:
            return found
        return Outcome(OutcomeState.EXPIRED) if self.height > prepared.last_valid_block_height else None

    def _land(self, signature: str) -> None:
        claim_id, micro_kvr = self.made[signature]
        if self.fail:
            self.landed[signature] = Outcome(OutcomeState.FAILED, 1, self.fail)
            return
        self.landed[signature] = Outcome(OutcomeState.CONFIRMED, 1)
        self.paid[claim_id] = self.paid.get(claim_id, 0) + micro_kvr


@pytest.fixture
def ledger(url: str):
    store = Store.open(url)
    yield Ledger(store)
    store.close()


def reserve(ledger: Ledger, micro_kvr: int = 500, wallet: str = ALICE.address, run_id: str = "r") -> Claim:
    ledger.credit(Reading(wallet, "w", "expert", run_id, micro_kvr * 100), int(NOW))
    return ledger.reserve(wallet, 1, int(NOW))


def payer(ledger: Ledger, chain: FakeChain) -> Payer:
    return Payer(ledger, chain, clock=Clock())


def state(ledger: Ledger, claim: Claim) -> ClaimState:
    found = ledger.claim(claim.claim_id)
    assert found is not None
    return found.state


async def test_reserved_claims_are_paid(ledger: Ledger) -> None:
    claims = [reserve(ledger), reserve(ledger, 70, BOB.address)]
    chain = FakeChain()
    assert await payer(ledger, chain).pay_all() == 0
    assert chain.paid == {claims[0].claim_id: 500, claims[1].claim_id: 70}
    assert [state(ledger, claim) for claim in claims] == [ClaimState.CONFIRMED] * 2
    assert await payer(ledger, chain).pay_all() == 0
    assert len(chain.made) == 2


async def test_a_transaction_is_stored_before_it_is_sent(ledger: Ledger) -> None:
    claim = reserve(ledger)
    seen: list[tuple[ClaimState, str | None]] = []

    def look(step: str) -> None:
        if step == "submit":
            stored = ledger.claim(claim.claim_id)
            assert stored is not None
            seen.append((stored.state, stored.signature))

    await payer(ledger, FakeChain(before=look)).pay_all()
    assert seen == [(ClaimState.SIGNED, "sig-0")]


@pytest.mark.parametrize(
    ("where", "step"),
    [("before", "prepare"), ("after", "prepare"), ("before", "submit"), ("after", "submit"), ("before", "outcome")],
)
async def test_a_process_that_dies_anywhere_is_followed_by_one_payment(ledger: Ledger, where: str, step: str) -> None:
    """``before submit`` is the moment between store and send."""
    claim, chain = reserve(ledger), FakeChain()

    def die(at: str) -> None:
        if at == step:
            raise Died

    setattr(chain, where, die)
    with pytest.raises(Died):
        await payer(ledger, chain).pay_all()
    chain.before = chain.after = nothing
    assert await payer(ledger, chain).pay_all() == 0
    assert chain.paid == {claim.claim_id: 500}
    assert state(ledger, claim) is ClaimState.CONFIRMED
    # What was signed and stored is what was sent: no second transaction was made for it.
    stored = step in ("submit", "outcome")
    assert len(chain.made) == (1 if stored or where == "before" else 2)
    assert len(ledger.attempts(claim.claim_id)) == 1


async def test_only_what_can_no_longer_land_is_replaced(ledger: Ledger) -> None:
    claim, chain = reserve(ledger), FakeChain(drop=True)
    assert await payer(ledger, chain).pay_all() == 1
    assert state(ledger, claim) is ClaimState.SENT
    chain.height += LIFETIME  # the last height at which it may land
    assert await payer(ledger, chain).pay_all() == 1
    assert len(chain.made) == 1
    chain.height += 1
    assert await payer(ledger, chain).pay_all() == 1
    assert state(ledger, claim) is ClaimState.EXPIRED
    chain.drop = False
    assert await payer(ledger, chain).pay_all() == 0
    assert chain.paid == {claim.claim_id: 500}
    assert ledger.attempts(claim.claim_id) == (("sig-0", "expired"), ("sig-1", "confirmed"))


async def test_what_one_rpc_called_expired_is_looked_up_again_before_it_is_replaced(ledger: Ledger) -> None:
    """The first RPC had forgotten, or lied; the second knows that the money has moved."""
    claim, chain = reserve(ledger), FakeChain()
    assert await payer(ledger, chain).pay_all() == 0
    with ledger._store.write() as connection:
        connection.execute(sa.text("UPDATE claims SET state = 'expired'"))
    assert await payer(ledger, chain).pay_all() == 0
    assert state(ledger, claim) is ClaimState.CONFIRMED
    assert chain.paid == {claim.claim_id: 500}
    assert len(chain.made) == 1
    assert ledger.audit() == ()


async def test_nothing_is_replaced_while_the_second_look_finds_nobody(ledger: Ledger) -> None:
    claim, chain = reserve(ledger), FakeChain(drop=True)
    await payer(ledger, chain).pay_all()
    chain.height += LIFETIME + 1
    await payer(ledger, chain).pay_all()
    assert state(ledger, claim) is ClaimState.EXPIRED

    class Silent(FakeChain):
        async def outcome(self, prepared: PreparedTransfer, timeout_s: float) -> Outcome | None:
            return None

    silent = Silent(made=chain.made, height=chain.height)
    assert await payer(ledger, silent).pay_all() == 1
    assert len(chain.made) == 1
    assert state(ledger, claim) is ClaimState.EXPIRED


async def test_the_slot_a_transaction_was_signed_in_is_kept_with_it(ledger: Ledger) -> None:
    claim, seen = reserve(ledger), []

    class Slotted(FakeChain):
        async def prepare(self, claim: Claim) -> PreparedTransfer:
            return replace(await super().prepare(claim), slot=4242)

        async def outcome(self, prepared: PreparedTransfer, timeout_s: float) -> Outcome | None:
            seen.append(prepared.slot)
            return await super().outcome(prepared, timeout_s)

    await payer(ledger, Slotted()).pay_all()
    stored = ledger.claim(claim.claim_id)
    assert stored is not None
    assert (stored.slot, seen) == (4242, [4242])


def test_a_database_is_paid_out_on_one_cluster(ledger: Ledger) -> None:
    pin = StorePin(ledger._store)
    pin.check("G" * 44, "https://one.example/key")
    pin.check("G" * 44, "https://two.example")
    with pytest.raises(LedgerError) as error:
        pin.check("H" * 44, "https://three.example/secret-key")
    assert error.value.code == "cluster_changed"
    assert "three.example" in error.value.message
    assert "secret-key" not in str(error.value)


async def test_one_that_failed_on_chain_gives_the_money_back_once(ledger: Ledger) -> None:
    claim, chain = reserve(ledger), FakeChain(fail="the treasury has too little KVR")
    assert await payer(ledger, chain).pay_all() == 0
    failed = ledger.claim(claim.claim_id)
    assert failed is not None
    assert (failed.state, failed.error) == (ClaimState.FAILED, "the treasury has too little KVR")
    assert ledger.accounts()[0].pending_micro_kvr == 500
    chain.fail = ""
    again = ledger.reserve(ALICE.address, 1, int(NOW))
    assert await payer(ledger, chain).pay_all() == 0
    assert chain.paid == {again.claim_id: 500}


async def test_a_refused_trial_run_is_noted_and_tried_again(ledger: Ledger) -> None:
    claim = reserve(ledger)
    chain = FakeChain(refuse=LedgerError("transaction_refused", "The treasury has no SOL for the fee."))
    for _ in range(2):
        assert await payer(ledger, chain).pay_all() == 1
        waiting = ledger.claim(claim.claim_id)
        assert waiting is not None
        assert (waiting.state, waiting.error) == (ClaimState.SIGNED, "The treasury has no SOL for the fee.")
    assert len(chain.made) == 1
    chain.refuse = None
    assert await payer(ledger, chain).pay_all() == 0
    assert chain.paid == {claim.claim_id: 500}


async def test_a_refused_trial_run_of_what_has_landed_is_no_failure(ledger: Ledger) -> None:
    """The reply was lost, the process died; sending again is refused because the money has moved."""
    claim, chain = reserve(ledger), FakeChain()

    def die(step: str) -> None:
        if step == "submit":
            raise Died

    chain.after = die
    with pytest.raises(Died):
        await payer(ledger, chain).pay_all()
    assert chain.paid == {claim.claim_id: 500}

    class Refusing(FakeChain):
        async def submit(self, prepared: PreparedTransfer) -> None:
            raise LedgerError("transaction_refused", "The treasury has too little KVR now.")

    later = Refusing(paid=chain.paid, landed=chain.landed, made=chain.made)
    assert await payer(ledger, later).pay_all() == 0
    assert state(ledger, claim) is ClaimState.CONFIRMED


async def test_a_network_that_is_away_changes_nothing(ledger: Ledger) -> None:
    claim = reserve(ledger)

    def away(step: str) -> None:
        raise NetworkError("rpc_unreachable", "The RPC does not answer.")

    chain = FakeChain(before=away)
    assert await payer(ledger, chain).pay_all() == 1
    assert state(ledger, claim) is ClaimState.RESERVED
    chain.before = nothing
    assert await payer(ledger, chain).pay_all() == 0
    assert chain.paid == {claim.claim_id: 500}


async def test_two_payout_processes_pay_once(ledger: Ledger) -> None:
    claims = [reserve(ledger, 100 + n, run_id=f"r{n}") for n in range(6)]
    chain = FakeChain()
    await asyncio.gather(*(payer(ledger, chain).pay_all() for _ in range(3)))
    for claim in claims:
        assert chain.paid[claim.claim_id] == claim.micro_kvr
        assert state(ledger, claim) is ClaimState.CONFIRMED
        assert len(ledger.attempts(claim.claim_id)) == 1
    # Whatever the losers had signed was never sent.
    assert {chain.made[signature][0] for signature in chain.submits} == {claim.claim_id for claim in claims}
    assert len(set(chain.submits)) == len(claims)


async def test_the_process_stops_after_the_pass_it_began(ledger: Ledger) -> None:
    claim, stop = reserve(ledger), asyncio.Event()

    def stopping(step: str) -> None:
        if step == "submit":
            stop.set()

    chain = FakeChain(before=stopping)
    await asyncio.wait_for(serve(payer(ledger, chain), stop, poll_s=60.0), 120)
    assert state(ledger, claim) is ClaimState.CONFIRMED


STEPS = st.sampled_from(["prepare", "submit", "outcome"])
EVENT = st.one_of(
    st.tuples(st.just("die before"), STEPS),
    st.tuples(st.just("die after"), st.sampled_from(["prepare", "submit"])),
    st.tuples(st.just("network"), STEPS),
    st.tuples(st.just("drop"), st.booleans()),
    st.tuples(st.just("refuse"), st.booleans()),
    st.tuples(st.just("fail"), st.booleans()),
    st.tuples(st.just("wait"), st.integers(1, 200)),
    st.tuples(st.just("claim"), st.integers(1, 1000)),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENT, max_size=20))
async def test_through_any_history_money_is_paid_once_or_still_owed(
    tmp_path_factory: Any, events: list[tuple[str, Any]]
) -> None:
    store = Store.open(f"sqlite:///{tmp_path_factory.mktemp('payout') / 'g.sqlite'}")
    ledger, chain, earned = Ledger(store), FakeChain(), 0

    def at(wanted: str, error: BaseException) -> Callable[[str], None]:
        def act(step: str) -> None:
            if step == wanted:
                raise error

        return act

    for kind, value in [*events, ("end", None)]:
        chain.before = chain.after = nothing
        if kind == "die before":
            chain.before = at(value, Died())
        elif kind == "die after":
            chain.after = at(value, Died())
        elif kind == "network":
            chain.before = at(value, NetworkError("rpc_unreachable", "away"))
        elif kind == "drop":
            chain.drop = value
        elif kind == "refuse":
            chain.refuse = LedgerError("transaction_refused", "no") if value else None
        elif kind == "fail":
            chain.fail = "failed" if value else ""
        elif kind == "wait":
            chain.height += value
        elif kind == "claim":
            earned += value
            ledger.credit(Reading(ALICE.address, "w", "expert", "r", earned * 100), int(NOW))
            ledger.reserve(ALICE.address, 1, int(NOW))
        else:  # at last everything works, and whatever was under way comes to its end
            chain.drop, chain.refuse, chain.fail = False, None, ""
            for _ in range(4):
                await payer(ledger, chain).pay_all()
                chain.height += LIFETIME + 1
        with contextlib.suppress(Died):
            await payer(ledger, chain).pay_all()
        confirmed = {c.claim_id: c.micro_kvr for c in ledger.claims() if c.state is ClaimState.CONFIRMED}
        owed = sum(c.micro_kvr for c in ledger.open_claims()) + sum(a.pending_micro_kvr for a in ledger.accounts())
        assert set(confirmed) <= set(chain.paid)
        assert all(chain.paid[claim_id] == ledger.claim(claim_id).micro_kvr for claim_id in chain.paid)
        assert sum(confirmed.values()) + owed == earned
    assert ledger.open_claims() == ()
    assert sum(chain.paid.values()) + sum(account.pending_micro_kvr for account in ledger.accounts()) == earned
    store.close()
