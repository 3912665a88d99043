"""When a window moves, to whom, and what the plan says then; against a model of the rules, by property."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey
from solders.pubkey import Pubkey

from kvasir_console.errors import NetworkError
from kvasir_console.node.placement.plan import MAX_REPLICAS, Plan, PlannedStage
from kvasir_console.node.placement.standby import Watch

A, B, C, D, E = (str(Pubkey.from_bytes(bytes(SigningKey(bytes([n] * 32)).verify_key))) for n in range(1, 6))
PLAN = Plan("r", "r", "ab" * 32, 3, 4, (PlannedStage(0, A, 0, 1, (D,)), PlannedStage(1, B, 1, 2, (D, E))))
PLAN = Plan("r", "r", "ab" * 32, 3, 4, (*PLAN.stages, PlannedStage(2, C, 2, 3)))
GRACE = 60.0


def watched(gone_at: float, now: float, connected: set[str], grace_s: float = GRACE) -> Watch:
    watch = Watch(grace_s)
    watch.look(PLAN, {A, B, C}, 0)
    watch.look(PLAN, connected, gone_at)
    watch.look(PLAN, connected, now)
    return watch


def test_nothing_moves_within_the_grace_and_the_first_that_is_ready_takes_over_after_it() -> None:
    assert watched(10, 70, {A, C}).decide(PLAN, {D, E}, 70) is None
    due = watched(10, 70.5, {A, C}).decide(PLAN, {D, E}, 70.5)
    assert due is not None
    assert (due.rank, due.old, due.new, due.gone_s) == (1, B, D, 60.5)
    passed_over = watched(10, 71, {A, C}).decide(PLAN, {E}, 71)
    assert passed_over is not None
    assert passed_over.new == E


def test_nothing_moves_without_a_grace_a_standby_or_one_that_is_ready() -> None:
    assert watched(0, 1e6, {A, C}, grace_s=0).decide(PLAN, {D, E}, 1e6) is None
    assert watched(0, 1e6, {A, B}).decide(PLAN, {D, E}, 1e6) is None  # nobody stands by for rank 2
    assert watched(0, 1e6, {A, C}).decide(PLAN, set(), 1e6) is None


def test_a_ring_that_is_being_set_up_waits_for_who_was_never_there() -> None:
    watch = Watch(GRACE, {A})
    watch.look(PLAN, {A, C}, 0)
    assert watch.decide(PLAN, {D, E}, 1e6) is None
    watch.look(PLAN, {A, B, C}, 1e6)
    assert watch.seen == {A, B, C}
    watch.look(PLAN, {A, C}, 1e6 + 1)
    assert watch.decide(PLAN, {D, E}, 1e6 + 100) is not None


def test_a_node_that_comes_back_begins_anew() -> None:
    watch = watched(10, 65, {A, C})
    watch.look(PLAN, {A, B, C}, 69)
    watch.look(PLAN, {A, C}, 70)
    assert watch.decide(PLAN, {D}, 129) is None
    assert watch.decide(PLAN, {D}, 130.5) is not None


def test_who_takes_over_has_the_whole_grace_and_then_the_next_has_its_turn() -> None:
    plan = PLAN.moved(1, D, 5)
    watch = watched(10, 75, {A, C})
    watch.expect(1, D)
    watch.look(plan, {A, C}, 76)
    assert watch.decide(plan, {E, B}, 136) is None
    due = watch.decide(plan, {E, B}, 137)
    assert due is not None
    assert (due.old, due.new) == (D, E)


def test_a_window_that_loads_for_longer_than_the_grace_is_served_in_the_end() -> None:
    """Each standby needs 200 s to load, and begins anew when the window comes back to it."""
    plan, watch, now, moves = PLAN, watched(-1, -1, {A, C}), 0.0, [0.0]
    for now in range(1000):
        there = plan.stages[1].wallet != B and now - moves[-1] >= 200
        watch.look(plan, {A, C} | ({plan.stages[1].wallet} if there else set()), now)
        due = watch.decide(plan, {D, E} - {plan.stages[1].wallet}, now)
        if due is not None:
            plan = plan.moved(due.rank, due.new, 0)
            watch.expect(due.rank, due.new)
            moves.append(now)
    assert there
    assert [round(after - before) for before, after in pairwise(moves)] == [60, 62, 122]
    # It was there, so from now on the grace is the first one again.
    watch.look(plan, {A, C}, 1000)
    assert watch.decide(plan, {D, E}, 1061) is not None


def test_a_wallet_that_serves_a_window_takes_no_other() -> None:
    plan = PLAN.moved(0, D, 5)
    watch = Watch(GRACE, {B})
    watch.look(plan, {D, C}, 0)
    due = watch.decide(plan, {D, E}, 100)
    assert due is not None
    assert (due.rank, due.new) == (1, E)


CONNECTED = st.lists(st.tuples(st.frozensets(st.sampled_from([A, B, C])), st.floats(0.5, 40)), max_size=20)


@given(CONNECTED, st.frozensets(st.sampled_from([D, E])))
def test_a_window_moves_if_and_only_if_its_node_was_gone_all_the_time(
    looks: list[tuple[frozenset[str], float]], ready: frozenset[str]
) -> None:
    watch, now, last = Watch(GRACE, {A, B, C}), 0.0, {A: 0.0, B: 0.0, C: 0.0}
    gone: set[str] = set()
    for connected, wait in looks:
        now += wait
        watch.look(PLAN, connected, now)
        last |= {wallet: now for wallet in (A, B, C) if wallet in connected or wallet not in gone}
        gone = {A, B, C} - connected
        due = watch.decide(PLAN, ready, now)
        late = [
            stage
            for stage in PLAN.stages
            if stage.wallet in gone and now - last[stage.wallet] > GRACE and ready.intersection(stage.replicas)
        ]
        assert (due is not None) == bool(late)
        if due is not None:
            longest = min(late, key=lambda stage: (last[stage.wallet], stage.rank))
            assert (due.rank, due.old) == (longest.rank, longest.wallet)
            assert due.new == next(each for each in longest.replicas if each in ready)


def test_a_plan_that_moved_names_the_new_wallet_and_keeps_the_old_one_last_in_line() -> None:
    plan = PLAN.moved(1, D, 9)
    assert plan.generation == 9
    assert plan.stages[1] == PlannedStage(1, D, 1, 2, (E, B))
    assert (plan.stages[0], plan.stages[2]) == (PLAN.stages[0], PLAN.stages[2])
    assert Plan.from_dict(plan.to_dict()) == plan
    assert [stage.rank for stage in plan.stands_by(B)] == [1]
    assert plan.stage_of(B) is None


@pytest.mark.parametrize(("rank", "wallet"), [(1, B), (3, D), (-1, D)])
def test_a_window_that_is_not_there_or_does_not_change_hands_is_refused(rank: int, wallet: str) -> None:
    with pytest.raises(ValueError, match="does not move"):
        PLAN.moved(rank, wallet, 9)


@pytest.mark.parametrize("replicas", [[A], [D, D], ["x"], [7], D, [D] * (MAX_REPLICAS + 1)])
def test_standbys_that_are_no_wallets_or_named_twice_make_no_plan(replicas: object) -> None:
    body = PLAN.to_dict()
    body["stages"][0]["replicas"] = replicas
    with pytest.raises(NetworkError) as caught:
        Plan.from_dict(body)
    assert caught.value.code == "plan_malformed"


def test_a_plan_without_standbys_is_written_as_it_always_was() -> None:
    assert PLAN.to_dict()["stages"][2] == {"rank": 2, "wallet": C, "layers": [2, 3]}
