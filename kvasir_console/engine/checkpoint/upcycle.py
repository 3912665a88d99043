"""A mixture of experts made from a dense model, so that there is a real-text MoE small enough for any machine.

After "Sparse Upcycling" (Komatsuzaki et al., arXiv 2212.05055): every feed-forward network becomes ``experts`` copies
of itself behind a router. Nothing is trained here. Each copy gets Gaussian noise of its own, so that experts differ and
a wrong one visibly moves the logits; the router is random. The weights of the chosen experts sum to one, so the
average over experts is the dense network again and the model still writes sensible text.

The result is a pure function of the source and the parameters, on any machine: random bits come from PCG64 and
``SeedSequence``, whose streams numpy guarantees (NEP 19), become Gaussian through a table, and everything after that is
element by element. Where a sum is needed, it is rounded far above the last bit, whose value depends on the machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvasir_console.engine.checkpoint import writer
from kvasir_console.engine.checkpoint.digest import model_digest, source_digest
from kvasir_console.engine.checkpoint.gguf import Checkpoint, GGMLType, TensorInfo
from kvasir_console.engine.checkpoint.shape import ModelShape, refuse
from kvasir_console.engine.checkpoint.writer import TensorPart, f32_entry, text_entry, u32_entry

Progress = Callable[[int, int, str], None]
"""``(done, total, what)``; done and total in bytes."""
F32Array = npt.NDArray[np.float32]

UPCYCLED_PREFIX = "kvasir.upcycled."
NOISE = 0.07
"""Deviation of an expert's noise as a share of the deviation of the weights.

With SmolLM2-135M, 7% costs 0.05 nats a token against the dense model and the text reads as before; taking each
token's wrong experts moves the output by 0.14 nats (KL divergence) and changes one greedy token in five. At 10% the
text begins to repeat itself, at 20% it is no longer sensible.
"""
ROUTER_SPREAD = 2.0
"""Length of the router's rows for inputs of length one; about twice the deviation of its logits."""
SEED = 20_260_101
_PARTS = ("ffn_gate", "ffn_up", "ffn_down")
_ROUTER = 3
_Q8_0_FILE_TYPE = 7
_METHOD = (
    "Each expert is the dense feed-forward network with Gaussian noise of its own; the router is random; untrained."
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an upcycled model is made with; it is written into its metadata."""

    experts: int
    top_k: int
    noise: float
    router_spread: float
    router_blind: tuple[int, ...]
    seed: int


def upcycle(
    source: Checkpoint,
    destination: Path,
    *,
    name: str,
    experts: int = 8,
    top_k: int = 2,
    noise: float = NOISE,
    router_spread: float = ROUTER_SPREAD,
    router_blind: tuple[int, ...] = (),
    seed: int = SEED,
    progress: Progress | None = None,
) -> None:
    """Write a mixture of experts made from the dense model ``source``.

    Expert tensors are Q8_0, routers F32; every other tensor is copied unchanged. Memory stays within a few matrices.

    Args:
        name: ``general.name`` of the result.
        noise: see ``NOISE``.
        router_spread: see ``ROUTER_SPREAD``; 0 sends every token to the same experts.
        router_blind: channels of the hidden state that the router does not read. A few channels carry nearly the same
            large value in every token ("Massive Activations", arXiv 2402.17762); a random router that reads them sends
            every token the same way.
        progress: called as each expert is written.

    Raises:
        ModelError: the source is not a dense llama model whose rows are whole Q8_0 blocks.
        SystemResourceError: the disk refused; nothing is left behind.
        ValueError: parameters that make no mixture.
    """
    if not (2 <= experts <= 256 and 1 <= top_k < experts and noise > 0 and router_spread >= 0 and 0 <= seed < 2**32):
        raise ValueError("an upcycled model needs 2 to 256 experts, of which top_k are fewer, and positive noise")
    shape = ModelShape.of(source)
    if any(not 0 <= channel < shape.n_embd for channel in router_blind):
        raise ValueError(f"the router has no channels {router_blind}, only {shape.n_embd}")
    if shape.architecture != "llama" or shape.n_expert:
        refuse(source, f"only a dense llama model can be upcycled, not this {shape.architecture}")
    if shape.n_embd % GGMLType.Q8_0.block_values or shape.n_ff % GGMLType.Q8_0.block_values:
        refuse(source, f"embedding_length {shape.n_embd} or feed_forward_length {shape.n_ff} is no multiple of 32")
    recipe = Recipe(experts, top_k, noise, router_spread, router_blind, seed)
    workers = min(os.cpu_count() or 1, 4)
    with ThreadPoolExecutor(workers, "upcycle") as pool:
        parts = list(_parts(source, shape, recipe, pool, workers))
        total = sum(part.n_bytes for part in parts)
        writer.write_gguf(destination, _metadata(source, recipe, name), list(_reported(parts, total, progress)))


def _metadata(source: Checkpoint, recipe: Recipe, name: str) -> list[writer.Buffer]:
    label = source.metadata.get("general.size_label")
    ours: dict[str, bytes] = {
        "general.name": text_entry("general.name", name),
        "general.alignment": u32_entry("general.alignment", writer.ALIGNMENT),
        "general.file_type": u32_entry("general.file_type", _Q8_0_FILE_TYPE),
        "llama.expert_count": u32_entry("llama.expert_count", recipe.experts),
        "llama.expert_used_count": u32_entry("llama.expert_used_count", recipe.top_k),
        f"{UPCYCLED_PREFIX}method": text_entry(f"{UPCYCLED_PREFIX}method", _METHOD),
        f"{UPCYCLED_PREFIX}model_digest": text_entry(f"{UPCYCLED_PREFIX}model_digest", model_digest(source).hex()),
        f"{UPCYCLED_PREFIX}source_digest": text_entry(f"{UPCYCLED_PREFIX}source_digest", source_digest(source)),
        f"{UPCYCLED_PREFIX}noise": f32_entry(f"{UPCYCLED_PREFIX}noise", recipe.noise),
        f"{UPCYCLED_PREFIX}router_spread": f32_entry(f"{UPCYCLED_PREFIX}router_spread", recipe.router_spread),
        f"{UPCYCLED_PREFIX}router_blind": text_entry(
            f"{UPCYCLED_PREFIX}router_blind", ",".join(map(str, recipe.router_blind))
        ),
        f"{UPCYCLED_PREFIX}seed": u32_entry(f"{UPCYCLED_PREFIX}seed", recipe.seed),
    }
    if isinstance(label, str):
        ours["general.size_label"] = text_entry("general.size_label", f"{recipe.experts}x{label}")
    kept = [ours.pop(key) if key in ours else source.metadata_bytes(key) for key in source.metadata]
    return [*kept, *ours.values()]


def _parts(
    source: Checkpoint, shape: ModelShape, recipe: Recipe, pool: ThreadPoolExecutor, workers: int
) -> Iterator[TensorPart]:
    """The tensors of the result, in the source's order, each router before the experts of its layer."""
    layers = {f"blk.{layer}.{part}.weight": (layer, part) for layer in range(shape.n_layer) for part in _PARTS}
    routed: set[int] = set()
    for name, tensor in source.tensors.items():
        if name not in layers:
            yield TensorPart(name, tensor.dims, tensor.type, tensor.n_bytes, _copy(source, tensor))
            continue
        layer, part = layers[name]
        if layer not in routed:
            routed.add(layer)
            yield _router_part(source, shape, recipe, layer)
        n_bytes = tensor.dims[0] * tensor.dims[1] // GGMLType.Q8_0.block_values * GGMLType.Q8_0.block_bytes
        yield TensorPart(
            f"blk.{layer}.{part}_exps.weight",
            (*tensor.dims, recipe.experts),
            GGMLType.Q8_0,
            n_bytes * recipe.experts,
            _experts(source, tensor, recipe, (layer, _PARTS.index(part)), pool, workers),
        )


def _copy(source: Checkpoint, tensor: TensorInfo) -> Callable[[], Iterator[memoryview]]:
    return lambda: iter((source.raw(tensor),))


def _router_part(source: Checkpoint, shape: ModelShape, recipe: Recipe, layer: int) -> TensorPart:
    dims = (shape.n_embd, recipe.experts)

    def contents() -> Iterator[bytes]:
        # The router reads RMS-normalised rows times the norm's weights, so a row is at most about as long as the
        # weights, and dividing by their length gives every layer logits of a like spread.
        gain = _values(source, source.tensors[f"blk.{layer}.ffn_norm.weight"]).astype(np.float64)
        gain[list(recipe.router_blind)] = 0
        length = _rounded(float(np.sqrt(np.sum(gain * gain))))
        rows = _gaussian((recipe.seed, layer, _ROUTER, 0), shape.n_embd * recipe.experts).reshape(recipe.experts, -1)
        rows *= np.float32(recipe.router_spread / length)
        rows[:, list(recipe.router_blind)] = 0
        yield rows.astype("<f4").tobytes()

    return TensorPart(f"blk.{layer}.ffn_gate_inp.weight", dims, GGMLType.F32, 4 * dims[0] * dims[1], contents)


def _experts(
    source: Checkpoint,
    tensor: TensorInfo,
    recipe: Recipe,
    place: tuple[int, int],
    pool: ThreadPoolExecutor,
    workers: int,
) -> Callable[[], Iterator[bytes]]:
    def contents() -> Iterator[bytes]:
        dense = _values(source, tensor)
        scale = np.float32(recipe.noise * _rounded(float(np.std(dense, dtype=np.float64))))

        def expert(number: int) -> bytes:
            noise = _gaussian((recipe.seed, *place, number), dense.size).reshape(dense.shape)
            noise *= scale
            noise += dense
            return _quantised(noise)

        for first in range(0, recipe.experts, workers):
            yield from pool.map(expert, range(first, min(first + workers, recipe.experts)))

    return contents


def _values(source: Checkpoint, tensor: TensorInfo) -> F32Array:
    """The tensor as f32, shape ``dims`` reversed."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = tensor.dims[::-1]
    raw = np.frombuffer(source.raw(tensor), np.uint8).reshape(*rows[:-1], -1)
    values: F32Array = dequantize(raw, GGMLQuantizationType(tensor.type)).reshape(rows).astype(np.float32, copy=False)
    return values


def _quantised(values: F32Array) -> bytes:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    blocks: npt.NDArray[np.uint8] = quantize(values, GGMLQuantizationType.Q8_0)
    return blocks.tobytes()


def _rounded(value: float) -> float:
    """``value`` to 11 significant bits: a sum's last bits depend on the machine's vector width."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2048), exponent - 11)


def _gaussian(key: tuple[int, ...], count: int) -> F32Array:
    """``count`` standard normal values, shape ``(count,)``, that depend on ``key`` only."""
    random_bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(-(-count // 4))
    values: F32Array = _quantiles()[random_bits.astype("<u8", copy=False).view("<u2")[:count]]
    return values


@lru_cache(1)
def _quantiles() -> F32Array:
    """The normal distribution's quantile at the middle of each of 65,536 equal shares, to 12 fractional bits."""
    normal = NormalDist()
    upper = np.array([normal.inv_cdf((65_536 + 2 * share + 1) / 131_072) for share in range(32_768)])
    upper = np.round(upper * 4096) / 4096
    return np.concatenate((-upper[::-1], upper)).astype(np.float32)


def _reported(parts: list[TensorPart], total: int, progress: Progress | None) -> Iterator[TensorPart]:
    if progress is None:
        yield from parts
        return
    done = 0

    def counted(part: TensorPart) -> Callable[[], Iterator[writer.Buffer]]:
        def contents() -> Iterator[writer.Buffer]:
            nonlocal done
            for chunk in part.contents():
                yield chunk
                done += len(chunk)
                progress(done, total, part.name)

        return contents

    for part in parts:
        yield TensorPart(part.name, part.dims, part.type, part.n_bytes, counted(part))
