"""Units and KVR against the published vectors, and the sums that must hold for any work."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.errors import LedgerError
from kvasir_console.wallet import settlement

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "settlement.json").read_text())
MULTIPLIERS = {name: Fraction(text) for name, text in VECTORS["rule"]["tiers"].items()}


def named(section: str):
    return pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in VECTORS[section]])


def test_the_constants_are_the_published_ones():
    rule = VECTORS["rule"]
    assert Fraction(rule["kvr_per_unit"]) == settlement.RATE
    assert settlement.expert_micro_units(rule["bytes_per_unit"]) == settlement.MICRO
    assert settlement.ring_micro_units(rule["token_rows_per_unit"]) == settlement.MICRO
    assert Fraction(rule["gateway_bonus"]) == settlement.GATEWAY_BONUS
    assert rule["minimum_claim_micro_kvr"] == settlement.MINIMUM_CLAIM_MICRO_KVR
    tiers = {tier.name: tier.multiplier for _, tier in settlement.TIERS}
    assert tiers | {settlement.UNRATED.name: settlement.UNRATED.multiplier} == MULTIPLIERS


@pytest.mark.parametrize("case", VECTORS["tiers"], ids=lambda case: str(case["tokens_per_second"]))
def test_speed_to_tier(case):
    tier = settlement.tier(case["tokens_per_second"])
    assert (tier.name, tier.multiplier) == (case["tier"], Fraction(case["multiplier"]))


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), float("-inf"), -1.0])
def test_what_cannot_be_a_speed_is_unrated(speed):
    assert settlement.tier(speed) is settlement.UNRATED


@named("amounts")
def test_amounts(case):
    units = settlement.expert_micro_units(case["bytes"])
    credit = settlement.credit(units, Fraction(case["tier_multiplier"]), Fraction(case["bonus"]))
    assert units == case["micro_units"]
    assert settlement.micro_text(units) == case["units"]
    assert credit == settlement.Credit(case["micro_kvr"], Fraction(case["carried_micro_kvr"]))
    assert credit.micro_kvr + credit.carried == Fraction(case["exact_kvr"]) * 10**6


@named("carry")
def test_remainders_are_carried(case):
    total, carried = 0, Fraction(0)
    for step in case["steps"]:
        credit = settlement.credit(step["bytes"], MULTIPLIERS[step["tier"]], carried=carried)
        assert credit == settlement.Credit(step["credit_micro_kvr"], Fraction(step["carried_micro_kvr"]))
        total, carried = total + credit.micro_kvr, credit.carried
    assert (total, carried) == (case["total_micro_kvr"], Fraction(case["carried_micro_kvr"]))


@named("counter_polls")
def test_counters_read_from_outside(case):
    baseline = credited = polls = 0
    for event in case["events"]:
        if event["event"] != "poll":  # what restarts is not told; the baseline is all that is stored
            continue
        step = settlement.counter_delta(baseline, event["micro_units"])
        baseline, credited, polls = step.baseline, credited + step.credit_micro_units, polls + 1
        assert step == settlement.CounterStep(event["credit_micro_units"], event["baseline_after"])
        assert credited == event["credited_total"]
    assert polls


@pytest.mark.parametrize("reading", [True, 1.5, "12", [1]])
def test_a_reading_that_is_no_count_changes_nothing(reading):
    assert settlement.counter_delta(7, reading) == settlement.CounterStep(0, 7)


@named("relay_flushes")
def test_relay_flushes_pay_the_growth_of_the_larger_direction(case):
    baseline = 0
    for flush in case["flushes"]:
        work = settlement.relay_work_bytes(flush["ws2tcp"], flush["tcp2ws"])
        step = settlement.counter_delta(baseline, settlement.expert_micro_units(work))
        assert (work, step.credit_micro_units) == (flush["work_bytes"], flush["credit_micro_units"])
        baseline = step.baseline


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in VECTORS["ring_shares"]["cases"]])
def test_ring_shares(case):
    windows = tuple(tuple(window) for window in case["windows"])
    split, shares = settlement.RingSplit(windows).add(case["token_rows"])
    assert split.n_layers == case["n_layers"]
    assert split.total_micro_units == sum(shares) == case["total_micro_units"]
    for share, exact in zip(shares, case["exact_micro_units"], strict=True):
        assert abs(share - Fraction(exact)) < 1
    assert list(shares) == case["micro_units"]["boundary"]


@named("ring_sequences")
def test_ring_sequences_split_the_running_total(case):
    edges = [sum(case["layers"][:rank]) for rank in range(len(case["layers"]) + 1)]
    split = settlement.RingSplit(tuple(pairwise(edges)))
    for step in case["steps"]:
        split, shares = split.add(step["token_rows"])
        assert list(shares) == step["credit_micro_units"]
        assert list(split.earned_micro_units) == step["sum_micro_units"]


@pytest.mark.parametrize(
    "windows",
    [(), ((1, 4),), ((0, 4), (5, 8)), ((0, 4), (3, 8)), ((0, 0),), ((0, 4), (4, 4)), ((4, 8), (0, 4)), ((0, -1),)],
)
def test_windows_with_a_gap_or_an_overlap_are_refused(windows):
    with pytest.raises(LedgerError) as refusal:
        settlement.RingSplit(windows)
    assert refusal.value.code == "ring_windows"


@pytest.mark.parametrize("case", VECTORS["claims"], ids=lambda case: str(case["pending_micro_kvr"]))
def test_the_minimum_claim(case):
    minimum = VECTORS["rule"]["minimum_claim_micro_kvr"]
    assert settlement.claimable(case["pending_micro_kvr"], minimum) is case["claimable"]


def test_a_minimum_of_one_never_pays_out_nothing():
    assert settlement.claimable(1, 1)
    assert not settlement.claimable(0, 0)


@pytest.mark.parametrize("case", VECTORS["counter_text"], ids=lambda case: case["text"])
def test_numbers_of_a_reply_are_decimals(case):
    assert settlement.counter_micro_units(case["text"]) == case["micro_units"]


@pytest.mark.parametrize(
    "text", ["", "-1", "NaN", "Infinity", "1e999", "1e999999999999", "0x10", " 1", "1_000", "01", "٣", "1" * 65, "1,5"]
)
def test_what_is_no_counter_is_refused(text):
    with pytest.raises(LedgerError) as refusal:
        settlement.counter_micro_units(text)
    assert refusal.value.code == "counter_malformed"


def test_paid_bytes_are_the_half_precision_size():
    # 3 rows of 8 half-precision values, 5 pairs of row, expert and weight (4 + 4 + 2 bytes).
    assert settlement.paid_bytes(n_embd=8, rows=3, pairs=5) == 3 * 8 * 2 + 5 * (4 + 4 + 2)


@pytest.mark.parametrize(
    "negative",
    [
        lambda: settlement.credit(-1),
        lambda: settlement.credit(1, carried=Fraction(-1, 2)),
        lambda: settlement.credit(1, -1, -1),
        lambda: settlement.paid_bytes(8, -1, 0),
        lambda: settlement.RingSplit(((0, 4),)).add(-1),
        lambda: settlement.relay_work_bytes(-1, 0),
    ],
)
def test_nothing_is_credited_for_negative_work(negative):
    with pytest.raises(ValueError):
        negative()


fractions = st.fractions(min_value=0, max_value=10, max_denominator=10_000)


@given(st.lists(st.tuples(st.integers(0, 10**18), fractions, fractions), max_size=20))
def test_credited_and_carried_are_always_the_exact_sum(works):
    credited, carried, exact = 0, Fraction(0), Fraction(0)
    for micro_units, multiplier, bonus in works:
        credit = settlement.credit(micro_units, multiplier, bonus, carried=carried)
        credited, carried = credited + credit.micro_kvr, credit.carried
        exact += micro_units * multiplier * bonus / 100
        assert 0 <= carried < 1
        assert credited + carried == exact


@given(st.integers(0, 10**18), st.lists(st.integers(0, 10**6), max_size=8), fractions)
def test_cutting_work_up_changes_nothing(start, cuts, multiplier):
    pieces, rest = [], start
    for cut in cuts:
        pieces.append(min(cut, rest))
        rest -= pieces[-1]
    total, carried = 0, Fraction(0)
    for piece in [*pieces, rest]:
        step = settlement.credit(piece, multiplier, carried=carried)
        total, carried = total + step.micro_kvr, step.carried
    assert settlement.Credit(total, carried) == settlement.credit(start, multiplier)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.lists(st.integers(0, 10**7), max_size=20))
def test_ring_stages_stay_within_a_millionth_of_their_share(layers, requests):
    edges = [sum(layers[:rank]) for rank in range(len(layers) + 1)]
    split = settlement.RingSplit(tuple(pairwise(edges)))
    sums = [0] * len(layers)
    for rows in requests:
        split, shares = split.add(rows)
        assert min(shares) >= 0
        sums = [old + new for old, new in zip(sums, shares, strict=True)]
    total = sum(requests) * 1000
    assert sum(sums) == total
    assert all(abs(got - Fraction(total * k, sum(layers))) < 1 for got, k in zip(sums, layers, strict=True))


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 30), min_size=1, max_size=5),
            st.lists(st.integers(0, 10**6), max_size=5),
            st.sampled_from(sorted(MULTIPLIERS)),
            st.sampled_from([Fraction(1), settlement.GATEWAY_BONUS]),
        ),
        max_size=6,
    )
)
def test_a_ring_that_is_cut_anew_and_changes_tiers_is_paid_the_formula(placements):
    """Stages come and go, their shares, tiers and bonuses change: credited and carried stay the exact sum."""
    credited, carried, exact, rows_in_all, units_in_all = 0, Fraction(0), Fraction(0), 0, 0
    for layers, requests, name, bonus in placements:
        edges = [sum(layers[:rank]) for rank in range(len(layers) + 1)]
        split = settlement.RingSplit(tuple(pairwise(edges)))
        for rows in requests:
            split, shares = split.add(rows)
            rows_in_all, units_in_all = rows_in_all + rows, units_in_all + sum(shares)
            for share in shares:
                step = settlement.credit(share, MULTIPLIERS[name], bonus, carried=carried)
                credited, carried = credited + step.micro_kvr, step.carried
                exact += share * MULTIPLIERS[name] * bonus * settlement.RATE
                assert credited + carried == exact
                assert 0 <= carried < 1
    assert units_in_all == 1000 * rows_in_all


@given(st.integers(-(10**18), 10**18))
def test_amounts_are_written_without_loss(micro):
    assert Fraction(settlement.micro_text(micro)) * 10**6 == micro
