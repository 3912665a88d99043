"""Logits to the next token, so that a replay chooses the same one.

In this order:

1. penalties, on the logits of tokens that stand among the last ``penalty_last_n`` of the sequence, prompt included:
   a positive logit is divided by ``repetition_penalty``, another multiplied by it (Keskar et al. 2019); then
   ``frequency_penalty`` times the token's count there and once ``presence_penalty`` are taken off. llama.cpp's
   samplers mean the same by these names;
2. at temperature 0 the largest logit wins, the lowest id among equals. Otherwise
3. temperature: softmax of logits / temperature, in f64;
4. top-k: the k most likely tokens;
5. top-p: of those, the fewest whose probabilities (of what is left) reach p (Holtzman et al. 2020);
6. min-p: of those, the ones at least min-p times as likely as the first (Nguyen et al. 2024);
7. one of them by its probability: the inverse of the cumulative distribution in order of id.

The random number of a position comes from the counter-based generator Philox4x64-10 (Salmon et al. 2011) with
(seed, position) as its key: it depends on nothing that was drawn before, so a rank that takes over in the middle of a
sequence goes on as the first would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvasir_console.errors import EngineError, RequestError

__all__ = [
    "MAX_REPETITION_PENALTY",
    "MAX_TEMPERATURE",
    "SamplingParams",
    "candidates",
    "log_probabilities",
    "sample",
    "uniform",
]

MAX_TEMPERATURE = 10.0
MAX_REPETITION_PENALTY = 10.0
_NUCLEUS_FIRST = 256
"""Top-p first sorts this many tokens, and more only if they do not reach p."""


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
    repetition_penalty: float = 1.0
    """0.01 to 10; 1 changes nothing, more makes repetition less likely."""
    presence_penalty: float = 0.0
    """-2 to 2."""
    frequency_penalty: float = 0.0
    """-2 to 2."""
    penalty_last_n: int = 64
    """How many of the last tokens the three penalties look at; 0 for none, -1 for all."""

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _whole("top_k", self.top_k, 0, 1 << 31)
        _whole("seed", self.seed, 0, 1 << 64)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, MAX_REPETITION_PENALTY)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("penalty_last_n", self.penalty_last_n, -1, 1 << 31)

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        changes = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return changes and self.penalty_last_n != 0


def sample(logits: Tensor, params: SamplingParams, position: int, history: Sequence[int] = ()) -> int:
    """The token that follows.

    Args:
        logits: (V,), any float type and device; minus infinity forbids a token.
        params: how to choose.
        position: index of the chosen token in its sequence, prompt included: the counter of the random number.
        history: the tokens before it, prompt included; only penalties look at them.

    Raises:
        EngineError: ``bad_logits`` for NaN, plus infinity, or no token that may be chosen.
    """
    if params.temperature == 0 and not params.penalizes:
        return _greedy(logits)
    scores = _penalized(_scores(logits), params, history)
    if params.temperature == 0:
        return int(np.argmax(scores))
    ids, probabilities = _candidates(scores, params)
    cumulative = np.cumsum(probabilities)
    at = int(np.searchsorted(cumulative, uniform(params.seed, position) * cumulative[-1], side="right"))
    # rounding may reach the very end of the distribution; its last possible token is meant
    return int(ids[min(at, int(np.flatnonzero(probabilities)[-1]))])


def candidates(
    logits: Tensor, params: SamplingParams, history: Sequence[int] = ()
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens ``sample`` may choose at a temperature above 0, in order of id, and their probabilities."""
    ids, probabilities = _candidates(_penalized(_scores(logits), params, history), params)
    return ids, probabilities / probabilities.sum()


def log_probabilities(logits: Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Natural logarithms of the model's own probabilities: softmax of the logits, before penalties and temperature.

    Returns:
        ``token``'s, and those of the ``top`` most likely tokens, the most likely first, the lower id first among
        equals.
    """
    scores = _scores(logits)
    largest = float(scores.max())
    total = largest + math.log(float(np.exp(scores - largest).sum()))
    best = _largest(scores, min(top, scores.size))
    return float(scores[token]) - total, [(int(at), float(scores[at]) - total) for at in best]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 bits for one position of one sequence."""
    words = np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
    return float(int(words.random_raw()) >> 11) * 2.0**-53


def _greedy(logits: Tensor) -> int:
    """The lowest id of the largest logit. One pass: a NaN is numpy's largest, so it is found too."""
    values = _values(logits)
    at = int(np.argmax(values)) if values.size else 0
    _check(float(values[at]) if values.size else -math.inf, values.size)
    return at


def _scores(logits: Tensor) -> npt.NDArray[np.float64]:
    # numpy widens on this thread alone; torch would call up its others for it, which costs more than it saves
    scores: npt.NDArray[np.float64] = _values(logits).astype(np.float64, copy=False)
    _check(float(scores.max(initial=-math.inf)), scores.size)
    return scores


def _values(logits: Tensor) -> npt.NDArray[Any]:
    values = logits.detach().cpu()
    array: npt.NDArray[Any] = (values if values.dtype in (torch.float32, torch.float64) else values.float()).numpy()
    return array


def _check(largest: float, size: int) -> None:
    if not math.isfinite(largest):  # also when any is NaN
        raise EngineError(
            "bad_logits",
            f"the largest of {size} logits is {largest}: the model computed no distribution.",
            "The model file or the machine is faulty; verify the file's digest.",
        )


def _penalized(
    scores: npt.NDArray[np.float64], params: SamplingParams, history: Sequence[int]
) -> npt.NDArray[np.float64]:
    if not params.penalizes or not history:
        return scores
    window = history if params.penalty_last_n < 0 else history[-params.penalty_last_n :]
    ids, counts = np.unique(np.asarray(window, dtype=np.int64), return_counts=True)
    seen = scores[ids]
    seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    scores = scores.copy()  # it may be the caller's memory
    scores[ids] = seen - counts * params.frequency_penalty - params.presence_penalty
    return scores


def _candidates(
    scores: npt.NDArray[np.float64], params: SamplingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids in ascending order and their weights, which sum to the mass that the filters left."""
    ids = np.arange(scores.size)
    if 0 < params.top_k < scores.size:
        ids = np.sort(_largest(scores, params.top_k))
    with np.errstate(over="ignore"):  # a temperature near zero sends all but the largest to minus infinity
        weights = np.exp((scores[ids] - scores.max()) / params.temperature)
    weights /= weights.sum()
    if params.top_p < 1:
        kept = np.sort(_nucleus(weights, params.top_p))
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        likely = weights >= params.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def _nucleus(weights: npt.NDArray[np.float64], p: float) -> npt.NDArray[np.int64]:
    """Places of the fewest weights that reach ``p``, the largest first: only as many are sorted as it takes."""
    count = _NUCLEUS_FIRST
    while True:
        order = _largest(weights, min(count, weights.size))
        keep = int(np.searchsorted(np.cumsum(weights[order]), p)) + 1
        if keep <= order.size or order.size == weights.size:
            return order[:keep]
        count *= 8


def _largest(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Places of the ``count`` largest scores, in descending order, the lower place first among equals."""
    places = np.arange(scores.size)
    if count < scores.size:
        threshold = np.partition(scores, scores.size - count)[scores.size - count] if count else math.inf
        places = np.flatnonzero(scores >= threshold)
    ordered: npt.NDArray[np.int64] = places[np.argsort(-scores[places], kind="stable")][:count]
    return ordered


def _in_range(name: str, value: object, least: float, largest: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= largest:  # type: ignore[operator]
        raise RequestError("bad_sampling", f"{name} is {value!r:.40}.", f"Send a number from {least:g} to {largest:g}.")


def _whole(name: str, value: object, least: int, limit: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < limit:
        raise RequestError(
            "bad_sampling", f"{name} is {value!r:.40}.", f"Send a whole number from {least} to {limit - 1}."
        )
