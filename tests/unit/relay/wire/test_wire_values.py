"""Rows as bytes, against numpy's own half precision, torch's bfloat16 and the definition of the int8 scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvasir_console.relay.wire.values import Dtype, carries, decode_rows, encode_rows, values_bytes

ROWS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    elements=st.floats(-60000, 60000, width=32, allow_subnormal=True),
)


def through(dtype: Dtype, rows: np.ndarray) -> np.ndarray:
    data = b"".join(encode_rows(dtype, rows))
    assert len(data) == values_bytes(dtype, *rows.shape)
    return decode_rows(dtype, data, 0, *rows.shape)


@settings(deadline=None)
@given(ROWS)
def test_f32_is_exact_f16_is_numpys_and_bf16_is_torchs(rows: np.ndarray) -> None:
    assert through(Dtype.F32, rows).tobytes() == rows.astype("<f4").tobytes()
    assert np.array_equal(through(Dtype.F16, rows), rows.astype(np.float16).astype(np.float32))
    assert np.array_equal(through(Dtype.BF16, rows), torch.from_numpy(rows).bfloat16().float().numpy())


@settings(deadline=None)
@given(ROWS)
def test_int8_is_off_by_half_a_scale_at_most_and_keeps_zero_and_the_largest(rows: np.ndarray) -> None:
    got = through(Dtype.INT8, rows)
    largest = np.abs(rows).max(axis=1)
    normal = largest > 1e-34  # below, a 127th is subnormal and loses digits
    bound = largest / 254 * (1 + 1e-5)
    assert np.all(np.abs(got - rows)[normal] <= bound[normal, None])
    assert np.all(np.abs(got[~normal]) <= 1e-34)
    assert np.all(got[rows == 0] == 0)
    at = np.abs(rows).argmax(axis=1)
    lines = np.arange(len(rows))
    assert np.allclose(got[lines, at][normal], rows[lines, at][normal], rtol=1e-6)


@settings(deadline=None)
@given(ROWS, st.sampled_from(Dtype))
def test_a_row_means_the_same_in_any_company(rows: np.ndarray, dtype: Dtype) -> None:
    together = through(dtype, rows)
    for row, got in zip(rows, together, strict=True):
        assert through(dtype, row[None])[0].tobytes() == got.tobytes()


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 5)), elements=st.floats(width=32)),
    st.sampled_from(Dtype),
)
def test_what_a_dtype_carries_comes_out_finite(rows: np.ndarray, dtype: Dtype) -> None:
    if dtype is Dtype.F32:
        assert carries(dtype, rows)
    elif carries(dtype, rows):
        assert np.isfinite(through(dtype, rows)).all()
    else:
        with np.errstate(over="ignore"):
            narrowed = rows.astype(np.float16 if dtype is Dtype.F16 else np.float32)
        # f16 rounds up to 65520 down; everything else that is refused is near or beyond the end of the range.
        assert not np.isfinite(narrowed).all() or np.abs(rows).max() > 65504


@pytest.mark.parametrize("dtype", list(Dtype))
def test_an_offset_and_bytes_of_any_kind_are_read(dtype: Dtype) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
    data = b"".join(encode_rows(dtype, rows))
    for held in (bytearray(b"x" + data), memoryview(b"x" + data)):
        assert np.allclose(decode_rows(dtype, held, 1, 2, 3), rows, atol=0.02)


def test_the_layout_of_int8_is_scales_then_values() -> None:
    rows = np.array([[127, -127, 1], [0, 0, 0], [0.5, 1.0, -0.25]], np.float32)
    data = b"".join(encode_rows(Dtype.INT8, rows))
    assert np.array_equal(np.frombuffer(data, "<f4", 3), np.array([1, 0, 1 / 127], np.float32))
    assert np.frombuffer(data, "i1", 9, 12).tolist() == [127, -127, 1, 0, 0, 0, 64, 127, -32]
