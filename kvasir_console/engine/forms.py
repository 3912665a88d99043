"""Which form each matrix takes: the reference, what plain torch offers, or compiled kernels.

``REFERENCE`` holds f32 and is exact; it is what other forms are compared with, and all there is on an accelerator.
``EAGER`` needs nothing but torch. ``compiled`` needs a C++ compiler, and is checked against torch while it packs.
``choice`` decides between the last two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.linear import DenseLinear, HalfLinear, Int4Linear, Linear, Rows, UnsuitableError
from kvasir_console.engine.native import Library, NativeLinear
from kvasir_console.engine.native.linear import FORMATS
from kvasir_console.engine.quant import dequantize

log = logging.getLogger(__name__)

MAX_DEVIATION = 1e-5
"""Of a compiled product from the one in double precision, as a part of the sum of its terms' magnitudes."""


@dataclass(frozen=True, slots=True)
class Forms:
    """How matrices are held, and the compiled kernels for what lies between them, if there are any."""

    name: str
    linear: Callable[[Sequence[Rows], torch.device | str], Linear]
    """Packs rows with the same ``n_in``, one below the other, on a device."""
    library: Library | None = None


def eager(parts: Sequence[Rows], device: torch.device | str) -> Linear:
    """The form without a compiler: 4-bit types as they are stored, all others but f32 in half precision."""
    if torch.device(device).type != "cpu" or all(part.type == GGMLType.F32 for part in parts):
        return DenseLinear.pack(parts, device)
    if Int4Linear.suits(parts):
        return Int4Linear.pack(parts)
    if HalfLinear.available():
        try:
            return HalfLinear.pack(parts)
        except UnsuitableError as reason:
            log.info("a matrix stays in single precision: %s", reason)
    return DenseLinear.pack(parts)


REFERENCE = Forms("reference", DenseLinear.pack)
EAGER = Forms("eager", eager)


def compiled(library: Library, prefer: Callable[[NativeLinear, Sequence[Rows]], bool] | None = None) -> Forms:
    """Matrices packed for ``library``; of each type, the first is checked, and a type that fails stays with torch.

    Args:
        prefer: asked, for the first matrix of each type, whether the compiled form is to be used; ``None`` for yes.
    """
    verdicts: dict[int, bool] = {}

    def pack(parts: Sequence[Rows], device: torch.device | str) -> Linear:
        if torch.device(device).type != "cpu" or not all(verdicts.get(part.type, True) for part in parts):
            return eager(parts, device)
        held = [_packable(part) for part in parts]
        matrix = NativeLinear([(part.type, part.count) for part in held], held[0].n_in, library)
        for index, part in enumerate(held):
            for begin, raw in part.chunks():
                matrix.fill(index, begin, raw.view(-1))
        new = {part.type for part in parts if part.type not in verdicts}
        if not new:
            return matrix
        agrees = deviation(matrix, held) <= MAX_DEVIATION
        if not agrees:
            names = ", ".join(sorted(GGMLType(each).name for each in new))
            log.warning("the compiled kernels are wrong about %s here: torch computes it", names)
        keep = agrees and (prefer is None or prefer(matrix, parts))
        verdicts.update(dict.fromkeys(new, keep))
        return matrix if keep else eager(parts, device)

    return Forms("native", pack, library)


def deviation(linear: Linear, parts: Sequence[Rows]) -> float:
    """How far products are from those of the stored values in double precision; the first rows of each part are tried.

    Returns:
        The largest difference, divided by the sum of the magnitudes of the terms that were added.
    """
    x = torch.randn(3, linear.n_in, generator=torch.Generator().manual_seed(1))
    products, first, worst = linear(x).double(), 0, 0.0
    for part in parts:
        raw = part.read(0, min(part.count, 64))
        weight = dequantize(raw.view(-1), part.type).view(len(raw), part.n_in).double()
        exact, magnitude = x.double() @ weight.t(), x.double().abs() @ weight.t().abs()
        error = (products[:, first : first + len(raw)] - exact).abs()
        worst = max(worst, float((error / magnitude.clamp_min(torch.finfo(torch.float32).tiny)).max()))
        first += part.count
    return worst


def _packable(part: Rows) -> Rows:
    """``part``, or its values in half precision if the compiled kernels know nothing of its type."""
    if part.type in FORMATS:
        return part

    def read(begin: int, end: int) -> Tensor:
        raw = part.read(begin, end)
        values = dequantize(raw.view(-1), part.type).view(len(raw), part.n_in)
        return values.half().view(torch.uint8)

    return Rows(GGMLType.F16, part.count, part.n_in, read)
