"""Logits to the next token, so that a replay chooses the same one.

At temperature 0 the largest logit wins, the lowest id among equals. Otherwise, in this order:

1. temperature: softmax of logits / temperature, in f64;
2. top-k: the k most likely tokens;
3. top-p: of those, the fewest whose probabilities (of what is left) reach p (Holtzman et al. 2020);
4. min-p: of those, the ones at least min-p times as likely as the first (Nguyen et al. 2024);
5. one of them by its probability: the inverse of the cumulative distribution in order of id.

The random number of a position comes from the counter-based generator Philox4x64-10 (Salmon et al. 2011) with
(seed, position) as its key: it depends on nothing that was drawn before, so a rank that takes over in the middle of a
sequence goes on as the first would have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvasir_console.errors import EngineError, RequestError

__all__ = ["MAX_TEMPERATURE", "SamplingParams", "candidates", "sample", "uniform"]

MAX_TEMPERATURE = 10.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose; the defaults are greedy.

    Raises:
        RequestError: ``bad_sampling``, naming the parameter that is out of range.
    """

    temperature: float = 0.0
    """0 (greedy) to 10."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    """0 to 1; 1 keeps every token, 0 only the first."""
    min_p: float = 0.0
    """0 to 1; 0 keeps every token."""
    seed: int = 0
    """0 to 2^64 - 1."""

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, MAX_TEMPERATURE)
        _in_range("top_p", self.top_p, 1.0)
        _in_range("min_p", self.min_p, 1.0)
        _whole("top_k", self.top_k, 1 << 31)
        _whole("seed", self.seed, 1 << 64)


def sample(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token that follows.

    Args:
        logits: (V,), any float type and device; minus infinity forbids a token.
        params: how to choose.
        position: index of the chosen token in its sequence, prompt included: the counter of the random number.

    Raises:
        EngineError: ``bad_logits`` for NaN, plus infinity, or no token that may be chosen.
    """
    scores = _scores(logits)
    if params.temperature == 0:
        return int(np.argmax(scores))
    ids, probabilities = _candidates(scores, params)
    cumulative = np.cumsum(probabilities)
    at = int(np.searchsorted(cumulative, uniform(params.seed, position) * cumulative[-1], side="right"))
    # rounding may reach the very end of the distribution; its last possible token is meant
    return int(ids[min(at, int(np.flatnonzero(probabilities)[-1]))])


def candidates(logits: Tensor, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens ``sample`` may choose at a temperature above 0, in order of id, and their probabilities."""
    ids, probabilities = _candidates(_scores(logits), params)
    return ids, probabilities / probabilities.sum()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 bits for one position of one sequence."""
    words = np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
    return float(int(words.random_raw()) >> 11) * 2.0**-53


def _scores(logits: Tensor) -> npt.NDArray[np.float64]:
    scores: npt.NDArray[np.float64] = logits.detach().double().cpu().numpy()
    largest = scores.max(initial=-math.inf)
    if not math.isfinite(largest):  # also when any is NaN
        raise EngineError(
            "bad_logits",
            f"the largest of {scores.size} logits is {largest}: the model computed no distribution.",
            "The model file or the machine is faulty; verify the file's digest.",
        )
    return scores


def _candidates(
    scores: npt.NDArray[np.float64], params: SamplingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids in ascending order and their weights, which sum to the mass that the filters left."""
    ids = np.arange(scores.size)
    if 0 < params.top_k < scores.size:
        threshold = np.partition(scores, -params.top_k)[-params.top_k]
        ids = np.flatnonzero(scores >= threshold)
        ids = np.sort(_most_likely_first(ids, scores)[: params.top_k])
    with np.errstate(over="ignore"):  # a temperature near zero sends all but the largest to minus infinity
        weights = np.exp((scores[ids] - scores.max()) / params.temperature)
    weights /= weights.sum()
    if params.top_p < 1:
        order = _most_likely_first(np.arange(ids.size), weights)
        keep = int(np.searchsorted(np.cumsum(weights[order]), params.top_p)) + 1
        kept = np.sort(order[:keep])
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        likely = weights >= params.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def _most_likely_first(ids: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """``ids`` (ascending) by descending score, the lower id first among equals."""
    ordered: npt.NDArray[np.int64] = ids[np.argsort(-scores[ids], kind="stable")]
    return ordered


def _in_range(name: str, value: object, largest: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= largest:  # type: ignore[operator]
        raise RequestError("bad_sampling", f"{name} is {value!r:.40}.", f"Send a number from 0 to {largest:g}.")


def _whole(name: str, value: object, limit: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise RequestError("bad_sampling", f"{name} is {value!r:.40}.", f"Send a whole number from 0 to {limit - 1}.")
