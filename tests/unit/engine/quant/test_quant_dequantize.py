"""What holds for every type: many chunks, any alignment, cut blocks, unknown types, untouched input."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kvasir_console.engine import quant
from kvasir_console.errors import ModelError

TYPES = sorted(quant.FORMATS)


def _name(ggml_type: int) -> str:
    return quant.FORMATS[ggml_type].name


def _random_blocks(ggml_type: int, n_blocks: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    # 0x7B is the exponent of the largest finite halves; a cap keeps every f16 field away from infinity and NaN
    limit = 256 if _name(ggml_type) in ("MXFP4", "NVFP4") else 0x7B
    return rng.integers(0, limit, n_blocks * quant.FORMATS[ggml_type].block_bytes, dtype=np.uint8)


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
def test_more_than_one_chunk_agrees_with_the_gguf_package(ggml_type):
    block_values = quant.FORMATS[ggml_type].block_values
    n_blocks = quant.CHUNK_VALUES // block_values + 7
    raw = _random_blocks(ggml_type, n_blocks, seed=ggml_type)
    with np.errstate(over="ignore"):  # the largest MXFP4 exponent overflows, there as here
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(ggml_type)).reshape(-1)
    got = quant.dequantize(torch.from_numpy(raw), ggml_type)
    assert got.shape == (n_blocks * block_values,)
    assert np.array_equal(got.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_blocks_may_begin_at_any_byte(ggml_type, offset):
    raw = torch.from_numpy(_random_blocks(ggml_type, 9, seed=1))
    moved = torch.zeros(raw.numel() + offset, dtype=torch.uint8)
    moved[offset:] = raw
    assert torch.equal(
        quant.dequantize(moved[offset:], ggml_type).view(torch.int32),
        quant.dequantize(raw, ggml_type).view(torch.int32),
    )


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
def test_the_input_is_neither_changed_nor_shared(ggml_type):
    raw = torch.from_numpy(_random_blocks(ggml_type, 4, seed=2))
    before = raw.clone()
    quant.dequantize(raw, ggml_type).fill_(1.0)
    assert torch.equal(raw, before)


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
def test_no_blocks_give_no_values(ggml_type):
    assert quant.dequantize(torch.empty(0, dtype=torch.uint8), ggml_type).shape == (0,)


@pytest.mark.parametrize("ggml_type", [t for t in TYPES if quant.FORMATS[t].block_bytes > 1], ids=_name)
def test_part_of_a_block_is_refused(ggml_type):
    raw = torch.zeros(quant.FORMATS[ggml_type].block_bytes * 2 - 1, dtype=torch.uint8)
    with pytest.raises(ModelError) as caught:
        quant.dequantize(raw, ggml_type)
    assert caught.value.code == "partial_block"
    assert _name(ggml_type) in caught.value.message


@pytest.mark.parametrize(("ggml_type", "named"), [(15, "15 (Q8_K)"), (24, "24 (I8)"), (4, "4"), (9999, "9999")])
def test_a_type_without_a_reader_is_refused_by_name(ggml_type, named):
    with pytest.raises(ModelError) as caught:
        quant.dequantize(torch.zeros(1024, dtype=torch.uint8), ggml_type)
    assert caught.value.code == "unsupported_quant"
    assert f"type {named} " in caught.value.message
    assert "Q4_K" in caught.value.hint
