"""One side of a comparison: a model in one configuration, loaded layer by layer so that every boundary can be seen.

A layer is a stage of its own. That changes no bit of a row (``Stage``), and it is the path a ring takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.shape import ModelShape
from kvasir_console.engine.choice import CHOICES, choose
from kvasir_console.engine.experts import local_experts
from kvasir_console.engine.forms import Forms
from kvasir_console.engine.kvcache import KV_TYPES, KVCache, Span
from kvasir_console.engine.linear import Linear
from kvasir_console.engine.stage import Stage
from kvasir_console.errors import UsageError

MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a side computes."""

    kernels: str = "auto"
    kv: str = "f32"
    threads: int = 1
    device: str = "cpu"

    @classmethod
    def parse(cls, text: str, *, threads: int) -> Configuration:
        """``KERNELS[:kv=TYPE][:threads=N][:device=D]``, with ``threads`` where it names none.

        Raises:
            UsageError: ``bad_configuration``, naming what is wrong.
        """
        kernels, *options = text.split(":")
        if kernels not in CHOICES:
            raise _bad(text, f"{kernels!r} are no kernels; there are {', '.join(CHOICES)}")
        given: dict[str, str] = {}
        for option in options:
            name, separator, value = option.partition("=")
            if name == "device" and not separator:
                raise _bad(text, "device needs a name")
            if not separator and "device" in given and name.isdigit():
                given["device"] += f":{name}"  # of an accelerator's number, as in cuda:1
            elif not separator or name in given or name not in {each.name for each in fields(cls)} - {"kernels"}:
                raise _bad(text, f"{option!r} is not one of kv=, threads= and device=, each once")
            else:
                given[name] = value
        if given.get("kv", "f32") not in KV_TYPES:
            raise _bad(text, f"{given['kv']!r} is no kind of KV cache; there are {', '.join(KV_TYPES)}")
        count = given.get("threads", str(threads))
        if not (count.isdecimal() and 1 <= int(count) <= MAX_THREADS):
            raise _bad(text, f"{count!r} is no number of threads")
        device = given.get("device", "cpu")
        _check_device(text, device)
        return cls(kernels, given.get("kv", "f32"), int(count), device)

    def __str__(self) -> str:
        return f"{self.kernels}:kv={self.kv}:threads={self.threads}:device={self.device}"


@dataclass(frozen=True, slots=True)
class Passage:
    """What rows became on their way through a model."""

    boundaries: tuple[Tensor, ...]
    """(T, D) on the CPU: what enters each layer, and last what leaves the last one."""
    chosen: dict[int, Tensor]
    """By MoE layer, the experts of each row, (T, K)."""


class Side:
    """A model, ready to compute; nothing else may compute between ``activate`` and its answers."""

    def __init__(self, configuration: Configuration, forms: Forms, stages: Sequence[Stage]) -> None:
        self.configuration = configuration
        self.shape: ModelShape = stages[0].shape
        self._forms = forms
        self._stages = tuple(stages)

    @classmethod
    def load(cls, configuration: Configuration, checkpoint: Checkpoint, cache: Path) -> Side:
        """``cache`` is the directory of compiled kernels. Raises ``ModelError`` and ``EngineError`` as a stage does."""
        torch.set_num_threads(configuration.threads)
        forms = choose(configuration.kernels, device=configuration.device, cache=cache, threads=configuration.threads)
        shape = ModelShape.of(checkpoint)
        stages = [
            Stage.load(checkpoint, layer, layer + 1, forms=forms, device=configuration.device, kv_type=configuration.kv)
            for layer in range(shape.n_layer)
        ]
        return cls(configuration, forms, stages)

    @property
    def kernels(self) -> str:
        """The family that was chosen."""
        return self._forms.name

    def activate(self) -> None:
        """Use this side's threads."""
        torch.set_num_threads(self.configuration.threads)
        if self._forms.library is not None:
            self._forms.library.set_threads(self.configuration.threads)

    def new_caches(self, capacity: int) -> list[KVCache]:
        """An empty cache for each layer."""
        return [stage.new_cache(capacity) for stage in self._stages]

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """(T, D)."""
        return self._stages[0].embed(torch.tensor(tokens))

    def forward(self, hidden: Tensor, caches: Sequence[KVCache], inputs: Sequence[Tensor] | None = None) -> Passage:
        """Pass rows (T, D) through all layers.

        Args:
            inputs: what each layer is given instead of what the one before it answered; an error then is its own.
        """
        boundaries, chosen = [hidden.cpu()], {}
        for layer, (stage, cache) in enumerate(zip(self._stages, caches, strict=True)):
            own = local_experts(stage.banks)

            def compute(layer: int, x: Tensor, ids: Tensor, weights: Tensor, own=own) -> Tensor:  # type: ignore[no-untyped-def]
                chosen[layer] = ids.cpu()
                return own(layer, x, ids, weights)  # type: ignore[no-any-return]

            given = hidden if inputs is None else inputs[layer]
            hidden = stage.forward(given, [Span(cache, cache.length, len(given))], compute if stage.banks else None)
            boundaries.append(hidden.cpu())
        return Passage(tuple(boundaries), chosen)

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, D) that left the last layer to (R, V) on the CPU."""
        last = self._stages[-1]
        return last.logits(hidden.to(self.configuration.device)).cpu()

    def matrices(self) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], Linear]]:
        """Every matrix that multiplies rows: its tensors' names, their heights, and the matrix itself.

        An expert's tensors are those of its layer; their names are told apart by its number.
        """
        for stage in self._stages:
            seen: dict[tuple[str, ...], int] = {}
            for holding in stage.holdings:
                if not isinstance(holding.held, Tensor) and isinstance(holding.held, Linear):
                    number = seen[holding.names] = seen.get(holding.names, -1) + 1
                    expert = f"[{number}]" if any("_exps." in name for name in holding.names) else ""
                    yield tuple(name + expert for name in holding.names), holding.heights, holding.held


def _check_device(text: str, name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _bad(text, f"{name!r} is no device") from error
    if device.type != "cpu" and not (
        torch.accelerator.is_available() and torch.accelerator.current_accelerator(check_available=True) is not None
    ):
        raise UsageError("no_such_device", f"There is no {name} on this machine.", "Use device=cpu.")


def _bad(text: str, reason: str) -> UsageError:
    return UsageError(
        "bad_configuration", f"{text!r:.80}: {reason}.", "Write it as KERNELS[:kv=TYPE][:threads=N][:device=D]."
    )
