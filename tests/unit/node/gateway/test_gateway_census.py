"""The expert market: fair counts of replicas, promises that are kept, and names that belong to somebody."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from gateway_parts import ALICE, BOB, CAROL
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import LedgerError, NetworkError
from kvasir_console.node.gateway.census import (
    MAX_PROMISES_PER_WALLET,
    MAX_WORKERS,
    MAX_WORKERS_PER_WALLET,
    PROMISE_S,
    STALE_S,
    Assignment,
    Census,
    OfferedModel,
    count_segments,
)
from kvasir_console.node.gateway.coverage import Window, parse_report

MODEL = OfferedModel("moe", n_layer=3, n_embd=64, n_expert=8, moe_layers=(1, 2), digest=bytes(32))
T0 = 1000.0
A, B, C = ALICE.address, BOB.address, CAROL.address


def census(target: int = 2, *models: OfferedModel) -> Census:
    made = Census(target)
    made.offer(models or (MODEL,))
    return made


def report(worker_id: str = "w", segments: list[Any] | None = None, **fields: Any) -> Any:
    return parse_report({"worker_id": worker_id, "model": "moe", "segments": segments or [], **fields})


def assigned(market: Census, wallet: str, now: float = T0, **fields: Any) -> Window:
    found = market.volunteer(wallet, now, **fields)
    assert isinstance(found, Assignment), found
    return found.window


def replicas(market: Census, layer: int, now: float = T0) -> list[tuple[int, int, int]]:
    return [(run.begin, run.end, run.replicas) for run in market.segments(now)["moe", layer]]


# -- counting --------------------------------------------------------------------------------------------------------


@given(
    n_expert=st.integers(1, 40),
    windows=st.lists(st.tuples(st.integers(0, 45), st.integers(1, 45)), max_size=12),
    target=st.integers(1, 4),
)
def test_segments_are_the_exact_count_of_every_expert(n_expert: int, windows: Any, target: int) -> None:
    held = [Window("m", 0, begin, begin + width) for begin, width in windows]
    segments = count_segments(n_expert, held, target)
    assert [segment.begin for segment in segments] == [0, *(segment.end for segment in segments[:-1])]
    assert segments[-1].end == n_expert
    for expert in range(n_expert):
        naive = sum(window.begin <= expert < window.end for window in held)
        (segment,) = [each for each in segments if each.begin <= expert < each.end]
        assert segment.replicas == naive
        assert segment.scarcity == round(max(0, (target - naive) / target), 3)
    assert all(one.replicas != other.replicas for one, other in itertools.pairwise(segments))


def test_scarcity_has_three_decimals() -> None:
    (segment,) = count_segments(4, [Window("m", 0, 0, 4)], 3)
    assert segment.scarcity == 0.667


# -- volunteering ----------------------------------------------------------------------------------------------------


def test_the_first_volunteer_gets_the_first_layers_run_from_its_start() -> None:
    market = census()
    assert assigned(market, A, max_experts=3) == Window("moe", 1, 0, 3)


def test_what_nobody_holds_comes_before_what_one_holds() -> None:
    market = census()
    windows = [assigned(market, wallet, max_experts=8) for wallet in (A, B, C)]
    assert windows == [Window("moe", 1, 0, 8), Window("moe", 2, 0, 8), Window("moe", 1, 0, 8)]


def test_the_widest_run_wins_among_equally_scarce_ones() -> None:
    market = census(1)
    assigned(market, A, max_experts=5)  # layer 1: [5, 8) is left; layer 2: all
    assert assigned(market, B, max_experts=8) == Window("moe", 2, 0, 8)
    assert assigned(market, C, max_experts=8) == Window("moe", 1, 5, 8)
    assert market.volunteer(A, T0) == "Every expert has the replicas it needs."


def test_a_wallet_gets_what_it_does_not_hold_yet_first() -> None:
    market = census(2)
    first = assigned(market, A, max_experts=8)
    second = assigned(market, A, max_experts=8)
    third = assigned(market, A, max_experts=8)
    assert {first, second} == {Window("moe", 1, 0, 8), Window("moe", 2, 0, 8)}
    assert third in (first, second)  # nothing else is left, and two replicas are wanted


def test_no_window_is_wider_than_a_shard() -> None:
    market = census(1, OfferedModel("wide", 1, 64, 200, (0,), bytes(32)))
    windows = [assigned(market, wallet, max_experts=limit) for wallet, limit in ((A, 0), (B, 100), (C, 64))]
    assert [(window.begin, window.end) for window in windows] == [(0, 64), (64, 128), (128, 192)]


def test_an_unknown_model_gets_no_assignment() -> None:
    market = census()
    assert "gpt" in str(market.volunteer(A, T0, model="gpt"))
    assert assigned(market, A, model="moe").model == "moe"


def test_promises_of_a_wallet_are_capped_and_lapse() -> None:
    market = census(100)
    for _ in range(MAX_PROMISES_PER_WALLET):
        assigned(market, A, max_experts=1)
    assert "promised" in str(market.volunteer(A, T0))
    assigned(market, B)  # another wallet is not affected
    assigned(market, A, T0 + PROMISE_S + 1)


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 8)), max_size=30), st.integers(1, 3))
def test_volunteers_never_push_an_expert_beyond_its_target(asks: list[tuple[str, int]], target: int) -> None:
    market = census(target)
    for wallet, max_experts in asks:
        found = market.volunteer(wallet, T0, max_experts=max_experts)
        if isinstance(found, Assignment):
            assert 0 < found.window.end - found.window.begin <= (max_experts or 8)
            assert found.window.layer in MODEL.moe_layers
            assert found.segment.scarcity > 0
    for runs in market.segments(T0).values():
        assert all(run.replicas <= target for run in runs)


# -- replicas --------------------------------------------------------------------------------------------------------


def test_a_report_that_answers_a_promise_is_one_replica_not_two() -> None:
    market = census()
    window = assigned(market, A, max_experts=4)
    assert replicas(market, 1) == [(0, 4, 1), (4, 8, 0)]
    market.report(A, report(segments=[[window.layer, window.begin, window.end]]), T0)
    assert replicas(market, 1) == [(0, 4, 1), (4, 8, 0)]
    market.report(A, report(segments=[[window.layer, window.begin, window.end]]), T0 + 60)  # the heartbeat
    assert replicas(market, 1, T0 + 60 + STALE_S) == [(0, 4, 1), (4, 8, 0)]
    assert replicas(market, 1, T0 + 61 + STALE_S) == [(0, 8, 0)]


def test_a_node_may_take_less_than_it_was_promised() -> None:
    market = census()
    assigned(market, A, max_experts=4)
    market.report(A, report(segments=[[1, 0, 2]]), T0)
    assert replicas(market, 1) == [(0, 2, 1), (2, 8, 0)]


@pytest.mark.parametrize(
    ("wallet", "segment"),
    [(B, [1, 0, 4]), (A, [1, 0, 5]), (A, [2, 0, 4])],
    ids=["another wallet's promise", "wider than promised", "another layer"],
)
def test_a_claim_that_nobody_asked_for_is_no_replica(wallet: str, segment: list[int]) -> None:
    market = census()
    assigned(market, A, max_experts=4)
    market.report(wallet, report("x", segments=[segment]), T0)
    assert replicas(market, 1) == [(0, 4, 1), (4, 8, 0)]  # the promise still counts, the claim does not
    assert replicas(market, 2) == [(0, 8, 0)]


def test_an_unasked_window_is_a_replica_once_it_has_served() -> None:
    market = census()
    worker = market.report(A, report(segments=[[1, 0, 4]]), T0)
    assert market.wired(worker)
    market.served(worker.session, B, 1, 0, 4)  # another wallet's work
    market.served("expert-other", A, 1, 0, 4)
    market.served(worker.session, A, 1, 0, 8)  # not what it reports
    assert replicas(market, 1) == [(0, 8, 0)]
    market.served(worker.session, A, 1, 0, 4)
    assert replicas(market, 1) == [(0, 4, 1), (4, 8, 0)]


def test_one_promise_is_answered_by_one_worker() -> None:
    market = census(3)
    assigned(market, A, max_experts=8)
    for worker_id in ("w1", "w2"):
        market.report(A, report(worker_id, segments=[[1, 0, 8]]), T0)
    assert replicas(market, 1) == [(0, 8, 1)]


def test_a_window_that_is_dropped_from_the_report_is_gone() -> None:
    market = census()
    assigned(market, A, max_experts=4)
    market.report(A, report(segments=[[1, 0, 4]]), T0)
    market.report(A, report(segments=[]), T0)
    assert replicas(market, 1) == [(0, 8, 0)]
    market.report(A, report(segments=[[1, 0, 4]]), T0)
    assert replicas(market, 1) == [(0, 8, 0)]  # the promise was used up


@pytest.mark.parametrize(
    ("segments", "fields", "wired"),
    [
        ([[1, 0, 8]], {}, True),
        ([], {}, False),
        ([[0, 0, 8]], {}, False),
        ([[1, 0, 9]], {}, False),
        ([[1, 0, 8]], {"model": "other"}, False),
    ],
    ids=["served", "nothing held", "a dense layer", "past the last expert", "another model"],
)
def test_a_session_is_wired_if_the_trunk_dispatches_there(segments: Any, fields: Any, wired: bool) -> None:
    market = census()
    assert market.wired(market.report(A, report(segments=segments, **fields), T0)) is wired


# -- who owns what ---------------------------------------------------------------------------------------------------


def test_the_same_worker_id_of_two_wallets_are_two_workers() -> None:
    market = census()
    market.report(A, report("w", url="relay:expert-a"), T0)
    market.report(B, report("w", url="relay:expert-b"), T0)
    assert [(worker.wallet, worker.session) for worker in market.workers(T0)] == sorted(
        [(A, "expert-a"), (B, "expert-b")]
    )
    assert [worker.wallet for worker in market.workers(T0, B)] == [B]


def test_a_session_name_belongs_to_who_registered_it_while_that_lives() -> None:
    market = census()
    market.report(A, report("w"), T0)
    for wallet, worker_id in ((B, "w"), (A, "v")):
        with pytest.raises(LedgerError) as caught:
            market.report(wallet, report(worker_id, url="relay:expert-w"), T0)
        assert caught.value.code == "relay_session_taken"
    assert market.session("expert-w", T0).wallet == A
    later = T0 + STALE_S + 1
    market.report(B, report("w"), later)
    assert market.session("expert-w", later).wallet == B


def test_a_worker_that_renames_its_session_frees_the_old_name() -> None:
    market = census()
    market.report(A, report("w", url="relay:one"), T0)
    market.report(A, report("w", url="relay:two"), T0)
    assert market.session("one", T0) is None
    market.report(B, report("b", url="relay:one"), T0)
    assert market.session("two", T0).wallet == A


def test_stale_workers_are_handed_out_once_unless_they_came_back() -> None:
    market = census()
    market.report(A, report("a"), T0)
    market.report(B, report("b"), T0)
    assert market.take_stale(T0 + STALE_S) == ()
    late = T0 + STALE_S + 1
    market.workers(late)  # whoever looks first
    market.report(B, report("b"), late)
    assert [worker.worker_id for worker in market.take_stale(late)] == ["a"]
    assert market.take_stale(late) == ()


def test_the_census_is_bounded() -> None:
    market = census()
    for index in range(MAX_WORKERS_PER_WALLET):
        market.report(A, report(f"w{index}"), T0)
    with pytest.raises(NetworkError) as caught:
        market.report(A, report("one more"), T0)
    assert caught.value.code == "census_full"
    market.report(A, report("w0"), T0)  # the known ones go on
    for index in range(MAX_WORKERS - MAX_WORKERS_PER_WALLET):
        market.report(f"wallet-{index}", report(f"x{index}"), T0)
    with pytest.raises(NetworkError):
        market.report(B, report("late"), T0)
