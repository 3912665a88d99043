"""Sampling: which tokens may come, how often they do, and that a replay repeats itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.sampling import SamplingParams, candidates, log_probabilities, sample, uniform
from kvasir_console.errors import EngineError, RequestError

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 2.0, 0.0, -3.0, 1.0])
CHI_SQUARE_999 = {1: 10.828, 2: 13.816, 3: 16.266, 7: 24.322}
"""The 99.9% points of the distribution, by degrees of freedom (any table of it)."""

finite_logits = st.lists(
    st.floats(-30, 30, width=32) | st.sampled_from([-math.inf, 0.0, 1.0, 1.0]), min_size=1, max_size=40
).filter(lambda values: max(values) > -math.inf)
temperatures = st.floats(0.05, 5)


def softmax(values, temperature: float) -> np.ndarray:
    scaled = np.array([math.exp((v - max(values)) / temperature) for v in values])
    return scaled / scaled.sum()


# -- the random number -------------------------------------------------------------------------------------------------


def philox4x64(counter: list[int], key: list[int], rounds: int = 10) -> list[int]:
    """Philox4x64 as Salmon et al. (2011) give it, for comparison."""
    mask = (1 << 64) - 1
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 1 << 64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 1 << 64)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_the_reference_has_the_published_answer():
    # the known answer for a counter and a key of zeros that accompanies Random123
    assert philox4x64([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63))
def test_the_number_of_a_position_is_philox_keyed_by_seed_and_position(seed, position):
    first = philox4x64([1, 0, 0, 0], [seed, position])[0]
    assert uniform(seed, position) == (first >> 11) / 2**53


# -- greedy ------------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    assert sample(LOGITS, SamplingParams(), 0) == 1
    assert sample(torch.zeros(1000), SamplingParams(), 3) == 0


@settings(deadline=None)
@given(finite_logits, st.integers(0, 1000), st.integers(0, 2**64 - 1))
def test_greedy_needs_neither_seed_nor_position(values, position, seed):
    chosen = sample(torch.tensor(values), SamplingParams(seed=seed), position)
    assert chosen == values.index(max(values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_type_will_do(dtype):
    assert sample(LOGITS.to(dtype), SamplingParams(), 0) == 1
    assert sample(LOGITS.to(dtype), SamplingParams(temperature=1, top_k=1), 0) == 1


# -- which tokens may come ---------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(finite_logits, temperatures)
def test_without_filters_the_distribution_is_softmax(values, temperature):
    ids, probabilities = candidates(torch.tensor(values, dtype=torch.float64), SamplingParams(temperature))
    assert list(ids) == list(range(len(values)))
    assert np.allclose(probabilities, softmax(values, temperature), atol=1e-12)


@settings(deadline=None)
@given(finite_logits, temperatures, st.integers(1, 50))
def test_top_k_keeps_the_k_most_likely_with_the_lowest_ids(values, temperature, k):
    ids, _ = candidates(torch.tensor(values), SamplingParams(temperature, top_k=k))
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert list(ids) == sorted(ranked[:k])


@settings(deadline=None)
@given(finite_logits, temperatures, st.floats(0, 1, exclude_max=True))
def test_top_p_keeps_the_fewest_tokens_that_reach_p(values, temperature, p):
    ids, _ = candidates(torch.tensor(values, dtype=torch.float64), SamplingParams(temperature, top_p=p))
    every = softmax(values, temperature)
    kept = sum(every[i] for i in ids)
    least = min(every[i] for i in ids)
    assert kept >= p - 1e-12
    assert len(ids) == 1 or kept - least < p + 1e-12
    assert all(every[i] <= least + 1e-12 for i in range(len(values)) if i not in set(ids))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(0.3, 5), st.floats(0.5, 1, exclude_max=True))
def test_top_p_over_a_large_vocabulary_is_what_sorting_all_of_it_gives(seed, temperature, p):
    values = np.round(np.random.default_rng(seed).standard_normal(5000) * 2, 2)  # rounded: many are equal
    ids, _ = candidates(torch.tensor(values), SamplingParams(temperature, top_p=p))
    weights = np.exp((values - values.max()) / temperature)
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    keep = int(np.searchsorted(np.cumsum(weights[order]), p)) + 1
    assert list(ids) == sorted(order[:keep])


@settings(deadline=None)
@given(finite_logits, temperatures, st.floats(0.001, 1))
def test_min_p_keeps_what_is_likely_enough_beside_the_first(values, temperature, p):
    ids, _ = candidates(torch.tensor(values, dtype=torch.float64), SamplingParams(temperature, min_p=p))
    every = softmax(values, temperature)
    limit = p * every.max()
    kept = set(ids)
    for i, probability in enumerate(every):
        if abs(probability - limit) > 1e-12:
            assert (i in kept) == (probability > limit)


def test_filters_apply_in_the_documented_order():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64))
    # top-k first: of 0.4 and 0.3 the first has 4/7 of what is left, which reaches 0.55 alone
    ids, probabilities = candidates(logits, SamplingParams(1.0, top_k=2, top_p=0.55))
    assert (list(ids), list(probabilities)) == ([0], [1.0])
    assert list(candidates(logits, SamplingParams(1.0, top_p=0.55))[0]) == [0, 1]
    # temperature before top-p: at 0.25 the first has 0.4^4 of 0.0354 = 72%
    assert list(candidates(logits, SamplingParams(0.25, top_p=0.7))[0]) == [0]
    # min-p after both
    assert list(candidates(logits, SamplingParams(1.0, top_k=3, top_p=0.95, min_p=0.6))[0]) == [0, 1]


@settings(deadline=None)
@given(
    finite_logits,
    temperatures,
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10**9),
)
def test_only_a_candidate_is_ever_chosen_and_a_replay_chooses_it_again(values, t, k, p, m, seed, position):
    params = SamplingParams(t, k, p, m, seed)
    logits = torch.tensor(values)
    chosen = sample(logits, params, position)
    ids, probabilities = candidates(logits, params)
    assert chosen in ids[probabilities > 0]
    assert values[chosen] > -math.inf
    assert sample(logits, params, position) == chosen


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature):
    assert sample(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(temperature), 7) == 1


# -- penalties ---------------------------------------------------------------------------------------------------------


def penalized(values: list[float], params: SamplingParams, history: list[int]) -> list[float]:
    """By the definition, token by token."""
    values = list(values)
    window = history if params.penalty_last_n == -1 else history[max(0, len(history) - params.penalty_last_n) :]
    for token in set(window if params.penalty_last_n else []):
        value = values[token]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        values[token] = value - window.count(token) * params.frequency_penalty - params.presence_penalty
    return values


@settings(deadline=None)
@given(
    finite_logits,
    st.floats(0.1, 5),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.sampled_from([-1, 0, 1, 3, 64]),
    st.data(),
)
def test_penalties_come_first_and_by_the_definition(values, repeat, presence, frequency, last_n, data):
    values = torch.tensor(values, dtype=torch.float64).tolist()
    history = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=70))
    params = SamplingParams(1.0, 0, 1.0, 0.0, 3, repeat, presence, frequency, last_n)
    wanted = torch.tensor(penalized(values, params, history), dtype=torch.float64)
    plain = SamplingParams(1.0, seed=3)
    logits = torch.tensor(values, dtype=torch.float64)
    assert np.allclose(candidates(logits, params, history)[1], candidates(wanted, plain)[1], atol=1e-12)
    greedy = SamplingParams(0.0, 0, 1.0, 0.0, 3, repeat, presence, frequency, last_n)
    assert wanted[sample(logits, greedy, 0, history)] == wanted.max()
    assert logits.tolist() == values  # the caller's logits are as they were


def test_a_penalty_above_one_makes_a_token_less_likely_whatever_its_sign():
    for value in (2.0, -2.0):
        logits = torch.tensor([value, value])
        _, probabilities = candidates(logits, SamplingParams(1.0, repetition_penalty=1.5), [0])
        assert probabilities[0] < probabilities[1]


# -- log probabilities -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(finite_logits, st.integers(0, 50), st.data())
def test_log_probabilities_are_those_of_softmax(values, top, data):
    token = data.draw(st.integers(0, len(values) - 1))
    values = torch.tensor(values, dtype=torch.float32).double().tolist()
    logprob, best = log_probabilities(torch.tensor(values, dtype=torch.float64), token, top)
    with np.errstate(divide="ignore"):
        every = np.log(softmax(values, 1.0))
    near = [value for value in every if value > -600]
    assert logprob == pytest.approx(every[token], abs=1e-9) or every[token] not in near
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))[:top]
    assert [token for token, _ in best] == ranked


# -- how often they come -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(1.0, seed=1), range(8)),
        (SamplingParams(2.5, seed=2), range(8)),
        (SamplingParams(0.8, top_k=4, seed=3), (1, 3, 4, 7)),
        (SamplingParams(1.0, top_p=0.6, seed=4), (1, 3, 4)),
        (SamplingParams(1.0, min_p=0.9, seed=5), (1, 4)),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(params, support):
    draws = 20_000
    every = softmax(LOGITS.tolist(), params.temperature)
    counts = np.bincount([sample(LOGITS, params, position) for position in range(draws)], minlength=8)
    assert set(np.flatnonzero(counts)) == set(support)
    expected = np.array([every[i] for i in support]) / sum(every[i] for i in support) * draws
    chi_square = float((((counts[list(support)] - expected) ** 2) / expected).sum())
    assert chi_square < CHI_SQUARE_999[len(support) - 1]


def test_seeds_and_positions_are_independent():
    numbers = np.array([[uniform(seed, position) for position in range(64)] for seed in range(64)])
    assert len(np.unique(numbers)) == numbers.size
    assert abs(numbers.mean() - 0.5) < 4 * math.sqrt(1 / 12 / numbers.size)
    neighbours = np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(numbers.size)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 10.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_k", 1 << 31),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("min_p", "0"),
        ("seed", -1),
        ("seed", 1 << 64),
        ("seed", 0.5),
        ("seed", "x" * 1000),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "0"),
        ("penalty_last_n", -2),
        ("penalty_last_n", 0.5),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.code == "bad_sampling"
    assert caught.value.message.startswith(f"{field} is ")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf], []])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution_are_an_error(values, temperature):
    with pytest.raises(EngineError) as caught:
        sample(torch.tensor(values), SamplingParams(temperature), 0)
    assert caught.value.code == "bad_logits"
