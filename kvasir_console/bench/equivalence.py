"""``kvasir-console bench equivalence``: how far two configurations of one model are apart, from products to tokens.

From the inside out, B against A (take the exact one as A):

* operations: each matrix of the model times the same random rows, gathered by the type it is stored in;
* layers: hidden states at each boundary. *Drift* is what has come together from the first layer on; a layer's *own*
  error is what it makes of A's input;
* routing: the share of rows for which a MoE layer chooses the same experts;
* logits: KL divergence and cosine of next-token distributions, and how often the first choice is the same;
* greedy tokens: where the two texts part.

Differences are relative: ``l2`` and ``rms`` to the length of A's values, ``max`` to the largest of them. Where bits are
equal, all of them are exactly 0.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvasir_console.bench.engine import TEXTS
from kvasir_console.bench.side import Configuration, Passage, Side
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.linear import Linear
from kvasir_console.engine.tokens import Tokenizer
from kvasir_console.errors import UsageError

Say = Callable[[str], None]
PROMPT_ROWS = 64
"""A text is cut after so many tokens."""
OPERATION_ROWS = 4


def run(
    model: Path, a: Configuration, b: Configuration, *, cache: Path, tokens: int, prompts: int, say: Say,
    b_model: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The report.

    Args:
        cache: directory of compiled kernels.
        tokens: greedy tokens that follow each prompt.
        prompts: how many of ``engine.TEXTS``.
        b_model: the file that B reads, if not ``model``: the same network otherwise quantised.

    Raises:
        UsageError: ``different_models``.
        ModelError, EngineError: a side cannot be loaded.
    """
    with torch.inference_mode(), Checkpoint.open(model) as first, Checkpoint.open(b_model or model) as second:
        say(f"Loading {first.path.name} as {a}")
        one = Side.load(a, first, cache)
        say(f"Loading {second.path.name} as {b}")
        other = Side.load(b, second, cache)
        sizes = [(s.shape.n_layer, s.shape.n_embd, s.shape.n_vocab, s.shape.moe_layers) for s in (one, other)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                "different_models",
                f"{second.path.name} is not the network of {first.path.name}.",
                "Give the same model otherwise quantised.",
            )
        tokenizer = Tokenizer.from_metadata(first.metadata)
        texts = [tokenizer.encode(text)[:PROMPT_ROWS] for text in TEXTS[:prompts]]
        room = first.metadata[f"{first.architecture}.context_length"]
        texts = [text[: max(1, room - tokens)] for text in texts]
        say("Products")
        report: dict[str, Any] = {
            "model": first.path.name,
            "a": asdict(a) | {"chosen": one.kernels},
            "b": asdict(b) | {"chosen": other.kernels, "model": second.path.name},
            "operations": operations(one, other, _types(first), _types(second)),
        }
        report |= _along_texts(one, other, texts, say)
        say(f"{tokens} greedy tokens after each text")
        report["greedy"] = [divergence(greedy(one, text, tokens), greedy(other, text, tokens)) for text in texts]
        report["identical"] = identical(report)
    return report


def operations(one: Side, other: Side, types: dict[str, str], other_types: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By ggml type (of A and, where it differs, of B): how far products of the same rows are apart."""
    theirs = {names: linear for names, _, linear in other.matrices()}
    shared = [(names, heights, mine) for names, heights, mine in one.matrices() if names in theirs]
    pairs = [(mine, theirs[names]) for names, _, mine in shared]
    one.activate()
    ours = [_product(one, mine) for mine, _ in pairs]
    other.activate()
    products = zip(ours, [_product(other, their) for _, their in pairs], strict=True)
    found: dict[str, dict[str, Any]] = {}
    for (names, heights, _), (mine, their), (a, b) in zip(shared, pairs, products, strict=True):
        for name, x, y in zip(names, torch.split(a, list(heights), 1), torch.split(b, list(heights), 1), strict=True):
            stored = name.partition("[")[0]
            kinds = dict.fromkeys((types[stored], other_types[stored]))
            rms, largest = relative(x, y)
            entry = found.setdefault(
                " / ".join(kinds),
                {"matrices": 0, "a_forms": [], "b_forms": [], "rms": 0.0, "max": 0.0, "worst": name},
            )
            entry["matrices"] += 1
            entry["a_forms"] = sorted({*entry["a_forms"], mine.kind})
            entry["b_forms"] = sorted({*entry["b_forms"], their.kind})
            if _worse(rms, entry["rms"]):
                entry["rms"], entry["worst"] = rms, name
            entry["max"] = _worst_of([entry["max"], largest])
    return found


def _along_texts(one: Side, other: Side, texts: Sequence[Sequence[int]], say: Say) -> dict[str, Any]:
    """What the texts show on their way through both sides: ``layers``, ``embedding``, ``routing``, ``logits``."""
    n_layer = one.shape.n_layer
    drift: list[list[tuple[float, float]]] = [[] for _ in range(n_layer + 1)]
    own: list[list[tuple[float, float]]] = [[] for _ in range(n_layer)]
    same: dict[int, list[bool]] = defaultdict(list)
    distributions = Distributions()
    for number, text in enumerate(texts):
        say(f"Text {number + 1} of {len(texts)}")
        a = _passage(one, text)
        b = _passage(other, text)
        forced = _passage(other, text, a.boundaries)
        for at in range(n_layer + 1):
            drift[at].append(relative(a.boundaries[at], b.boundaries[at]))
        for layer in range(n_layer):
            own[layer].append(relative(a.boundaries[layer + 1], forced.boundaries[layer + 1]))
        for layer, ids in a.chosen.items():
            same[layer] += (ids.sort(1).values == b.chosen[layer].sort(1).values).all(1).tolist()
        one.activate()
        exact = one.logits(a.boundaries[-1])
        other.activate()
        distributions.add(exact, other.logits(b.boundaries[-1]))
    layers = [
        {
            "layer": layer,
            "l2": _worst(drift[layer + 1], 0),
            "max": _worst(drift[layer + 1], 1),
            "own_l2": _worst(own[layer], 0),
            "own_max": _worst(own[layer], 1),
        }
        | ({"routing": statistics.mean(same[layer])} if layer in same else {})
        for layer in range(n_layer)
    ]
    every = [agrees for each in same.values() for agrees in each]
    return {
        "embedding": {"l2": _worst(drift[0], 0), "max": _worst(drift[0], 1)},
        "layers": layers,
        "routing": {"agreement": statistics.mean(every), "rows": len(every)} if every else None,
        "logits": distributions.summary(),
    }


def _passage(side: Side, text: Sequence[int], inputs: Sequence[Tensor] | None = None) -> Passage:
    side.activate()
    return side.forward(side.embed(text), side.new_caches(len(text)), inputs)


class Distributions:
    """Next-token distributions of both sides, compared place by place."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.cosine: list[float] = []
        self.first: list[bool] = []

    def add(self, a: Tensor, b: Tensor) -> None:
        """Logits (T, V) of both."""
        for x, y in zip(a.double(), b.double(), strict=True):
            p, q = x.log_softmax(0), y.log_softmax(0)
            self.kl.append(float((p.exp() * (p - q)).sum()))
            # Exactly 1 for equal bits, which the quotient of a product and two lengths is not.
            self.cosine.append(1 - float((x / x.norm() - y / y.norm()).square().sum()) / 2)
            self.first.append(int(x.argmax()) == int(y.argmax()))

    def summary(self) -> dict[str, Any]:
        return {
            "places": len(self.kl),
            "kl_mean": statistics.fmean(self.kl),
            "kl_max": _worst_of(self.kl),
            "cosine_mean": statistics.fmean(self.cosine),
            "cosine_min": -_worst_of([-each for each in self.cosine]),
            "top1_agreement": statistics.mean(self.first),
        }


def greedy(side: Side, text: Sequence[int], count: int) -> list[int]:
    """The ``count`` most probable tokens after ``text``, one after the other, the lowest id among equals."""
    side.activate()
    caches, following = side.new_caches(len(text) + count), []
    rows: Sequence[int] = text
    for _ in range(count):
        hidden = side.forward(side.embed(rows), caches).boundaries[-1]
        following.append(int(side.logits(hidden[-1:])[0].argmax()))
        rows = following[-1:]
    return following


def divergence(a: Sequence[int], b: Sequence[int]) -> dict[str, Any]:
    """Where two texts part: the first place with another token, counted from 0, and the tokens there."""
    for place, (mine, theirs) in enumerate(zip(a, b, strict=True)):
        if mine != theirs:
            return {"tokens": len(a), "first_divergence": place, "a": mine, "b": theirs}
    return {"tokens": len(a), "first_divergence": None}


def relative(a: Tensor, b: Tensor) -> tuple[float, float]:
    """How far ``b`` is from ``a``: length of the difference by that of ``a``, largest difference by the largest value.

    0 for equal values; NaN where values are no numbers, infinite where ``a`` is zero and ``b`` is not.
    """
    a, b = a.double(), b.double()
    difference = a - b
    return _share(difference.norm(), a.norm()), _share(difference.abs().amax(), a.abs().amax())


def identical(report: dict[str, Any]) -> bool:
    """Whether nothing was found different."""
    figures = [each[name] for each in report["operations"].values() for name in ("rms", "max")]
    figures += [layer[name] for layer in report["layers"] for name in ("l2", "max", "own_l2", "own_max")]
    figures += [*report["embedding"].values(), report["logits"]["kl_max"]]
    agreements = [report["logits"]["top1_agreement"], report["logits"]["cosine_min"]]
    agreements += [report["routing"]["agreement"]] if report["routing"] else []
    return (
        all(figure == 0 for figure in figures)
        and all(agreement == 1 for agreement in agreements)
        and all(each["first_divergence"] is None for each in report["greedy"])
    )


def describe(report: dict[str, Any]) -> str:
    """The report for a person."""
    sides = [
        f"{side.upper()}  {each['kernels']} ({each['chosen']}), kv {each['kv']}, {each['threads']} threads, "
        f"{each['device']}"
        for side, each in (("a", report["a"]), ("b", report["b"]))
    ]
    lines = [report["model"], *sides, "", f"{'products':14}{'count':>7}{'rms':>11}{'max':>11}   forms"]
    for kind, each in report["operations"].items():
        forms = f"{'+'.join(each['a_forms'])} / {'+'.join(each['b_forms'])}"
        lines.append(f"{kind:14}{each['matrices']:>7}{each['rms']:>11.2e}{each['max']:>11.2e}   {forms}")
    routed = report["routing"] is not None
    lines += [
        "",
        f"{'layer':>5}{'drift l2':>11}{'max':>11}{'own l2':>11}{'max':>11}" + ("   routing" if routed else ""),
    ]
    embedding = report["embedding"]
    lines.append(f"embed{embedding['l2']:>11.2e}{embedding['max']:>11.2e}")
    for each in report["layers"]:
        row = "".join(f"{each[name]:>11.2e}" for name in ("l2", "max", "own_l2", "own_max"))
        lines.append(f"{each['layer']:>5}{row}" + (f"{each['routing']:>10.2%}" if "routing" in each else ""))
    logits = report["logits"]
    lines += [
        "",
        f"logits at {logits['places']} places: KL mean {logits['kl_mean']:.2e}, max {logits['kl_max']:.2e}; "
        f"1 - cosine mean {1 - logits['cosine_mean']:.2e}, max {1 - logits['cosine_min']:.2e}; "
        f"first choice the same {logits['top1_agreement']:.2%}",
    ]
    if routed:
        lines.append(f"the same experts {report['routing']['agreement']:.2%} of {report['routing']['rows']} rows")
    parted = [each["first_divergence"] for each in report["greedy"]]
    told = ", ".join("never" if place is None else str(place) for place in parted)
    count = report["greedy"][0]["tokens"] if report["greedy"] else 0
    lines.append(f"greedy texts of {count} tokens part at: {told}")
    lines.append("not a bit differs" if report["identical"] else "they differ")
    return "\n".join(lines)


def _product(side: Side, matrix: Linear) -> Tensor:
    """The matrix times rows that its width decides, on the CPU."""
    rows = torch.randn(OPERATION_ROWS, matrix.n_in, generator=torch.Generator().manual_seed(matrix.n_in))
    return matrix(rows.to(side.configuration.device)).cpu()


def _types(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: tensor.type.name for name, tensor in checkpoint.tensors.items()}


def _share(part: Tensor, whole: Tensor) -> float:
    if float(part) == 0:
        return 0.0
    return float(part / whole)


def _worst(pairs: Sequence[tuple[float, float]], which: int) -> float:
    return _worst_of([pair[which] for pair in pairs])


def _worse(value: float, than: float) -> bool:
    return value > than or (math.isnan(value) and not math.isnan(than))


def _worst_of(values: Sequence[float]) -> float:
    """The largest; what is no number is worse than any."""
    return next((value for value in values if math.isnan(value)), max(values))
