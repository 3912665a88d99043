"""Four-bit types in groups: the same values as dequantised, put together from their parts."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kvasir_console.engine.quant import FORMATS
from kvasir_console.engine.quant.groups import FOUR_BIT, GROUP

from builders import Quant, stored


@pytest.mark.parametrize("ggml_type", FOUR_BIT, ids=lambda number: FORMATS[number].name)
def test_parts_make_the_values(ggml_type):
    rng = np.random.default_rng(ggml_type)
    raw = stored(rng.standard_normal((8, 512), dtype=np.float32), Quant(ggml_type), rng)
    wanted = gguf.quants.dequantize(raw, Quant(ggml_type)).reshape(-1, GROUP)
    blocks = torch.from_numpy(raw).view(-1, FORMATS[ggml_type].block_bytes)
    q, scale, offset = FOUR_BIT[ggml_type](blocks)
    assert q.dtype == torch.uint8
    assert int(q.max()) == 15
    q, scale, offset = q.view(-1, GROUP).double(), scale.reshape(-1, 1).double(), offset.reshape(-1, 1).double()
    got = (scale * (q - 8) + offset).numpy()
    # The offset of the middle, and the two steps of the dequantised value, are each rounded to f32.
    bound = 2.0**-23 * (16 * scale.abs() + offset.abs()).numpy()
    assert (np.abs(got - wanted) <= bound).all()
    if ggml_type == Quant.Q4_0:
        assert np.array_equal(got, wanted)
