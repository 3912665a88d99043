"""Packed matrices against the weights that the gguf package reads, multiplied in double precision."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from native_blocks import random_rows, weights, with_every_bit

from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.native.library import Library
from kvasir_console.engine.native.linear import FORMATS, NativeLinear, block_rows
from kvasir_console.errors import EngineError, ModelError

TYPES = [GGMLType(number) for number in FORMATS]
EXACT = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def _name(ggml_type: GGMLType) -> str:
    return ggml_type.name


def _matrix(library: Library, ggml_type: GGMLType, n_out: int, n_in: int) -> tuple[NativeLinear, torch.Tensor]:
    raw = random_rows(ggml_type, n_out, n_in)
    return NativeLinear.pack([(raw, int(ggml_type), n_out)], n_in, library), weights(raw, ggml_type)


def _rows(count: int, n_in: int) -> torch.Tensor:
    return torch.randn(count, n_in, generator=torch.Generator().manual_seed(count))


def _error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The greatest error, relative to the sum of the terms' magnitudes: what rounding is proportional to."""
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    return float(((got.double() - exact).abs() / magnitude).max())


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
@pytest.mark.parametrize("n_out", [1, 16, 37, 100])
def test_packed_weights_are_the_files_weights_to_the_bit(library, ggml_type, n_out):
    n_in = 77 if ggml_type in EXACT else 512
    matrix, weight = _matrix(library, ggml_type, n_out, n_in)
    assert torch.equal(matrix.rows(torch.arange(n_out)), weight)
    assert torch.equal(matrix.rows(torch.tensor([n_out - 1, 0, n_out - 1])), weight[[n_out - 1, 0, n_out - 1]])


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 33])
def test_products_are_exact_within_rounding(library, ggml_type, rows):
    n_in = 511 if ggml_type in EXACT else 512
    matrix, weight = _matrix(library, ggml_type, 83, n_in)
    x = _rows(rows, n_in)
    got = matrix(x)
    assert got.shape == (rows, 83)
    # 512 terms in f32 could at worst be off by 512 half units, 3e-5; summed in groups they stay far below.
    assert _error(got, x, weight) < 1e-6


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(library, ggml_type):
    matrix, _ = _matrix(library, ggml_type, 150, 256)
    x = _rows(260, 256)  # more than the kernels take at once
    whole = matrix(x)
    try:
        for threads in (1, 2, 3):
            library.set_threads(threads)
            assert torch.equal(matrix(x), whole)
            for count in range(1, 71) if threads == 2 else (1, 2, 9, 70):
                assert torch.equal(matrix(x[:count]), whole[:count])
                assert torch.equal(matrix(x[-count:]), whole[-count:])
    finally:
        library.set_threads(2)


def test_rows_a_multiple_of_four_kibibytes_apart_have_the_same_bits_too(library):
    matrix, weight = _matrix(library, GGMLType.Q4_K, 32, 1024)
    x = _rows(20, 1024)
    whole = matrix(x)
    assert _error(whole, x, weight) < 1e-6
    assert all(torch.equal(matrix(x[:count]), whole[:count]) for count in range(1, 20))


def test_several_tensors_of_different_types_make_one_matrix(library):
    parts = [(GGMLType.Q4_1, 40), (GGMLType.Q8_0, 16), (GGMLType.F32, 5), (GGMLType.Q6_K, 70)]
    raws = [random_rows(kind, n_out, 256, seed=index) for index, (kind, n_out) in enumerate(parts)]
    matrix = NativeLinear.pack(
        [(raw, int(kind), n_out) for raw, (kind, n_out) in zip(raws, parts, strict=True)], 256, library
    )
    x = _rows(11, 256)
    alone = [
        NativeLinear.pack([(raw, int(kind), n_out)], 256, library)(x)
        for raw, (kind, n_out) in zip(raws, parts, strict=True)
    ]
    assert (matrix.n_in, matrix.n_out, matrix.kind) == (256, 131, "native")
    assert torch.equal(matrix(x), torch.cat(alone, dim=1))
    stacked = torch.cat([weights(raw, kind) for raw, (kind, _) in zip(raws, parts, strict=True)])
    assert torch.equal(matrix.rows(torch.arange(131)), stacked)


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
def test_packed_bytes_are_at_most_a_tenth_more_than_the_files(library, ggml_type):
    matrix, _ = _matrix(library, ggml_type, 160, 2048)
    assert matrix.n_bytes <= 1.1 * random_rows(ggml_type, 160, 2048).numel()
    assert sum(tensor.nbytes for tensor in matrix.tensors()) == matrix.n_bytes


def test_a_matrix_is_filled_a_few_panels_at_a_time(library):
    raw = random_rows(GGMLType.Q5_K, 70, 256)
    whole = NativeLinear.pack([(raw, int(GGMLType.Q5_K), 70)], 256, library)
    matrix = NativeLinear([(int(GGMLType.Q5_K), 70)], 256, library)
    for first, end in ((48, 70), (0, 16), (16, 48)):
        matrix.fill(0, first, raw[first:end].contiguous())
    x = _rows(3, 256)
    assert torch.equal(matrix(x), whole(x))


def test_rows_may_lie_apart_and_the_result_may_be_given(library):
    matrix, _ = _matrix(library, GGMLType.Q4_0, 48, 64)
    x = _rows(9, 200)
    out = torch.full((9, 100), 7.0)
    result = matrix(x[:, 30:94], out[:, 20:68])
    expected = matrix(x[:, 30:94].contiguous())
    assert torch.equal(result, expected)
    assert torch.equal(out[:, 20:68], expected)
    assert bool((out[:, :20] == 7).all() and (out[:, 68:] == 7).all())


def test_no_rows_give_no_rows(library):
    matrix, _ = _matrix(library, GGMLType.Q4_0, 48, 64)
    assert matrix(torch.empty(0, 64)).shape == (0, 48)
    assert matrix.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 64)


def test_a_value_that_is_no_number_stays_in_its_row(library):
    matrix, _ = _matrix(library, GGMLType.Q4_1, 40, 64)
    x = _rows(12, 64)
    clean = matrix(x)
    x[5, 3] = torch.nan
    got = matrix(x)
    assert bool(got[5].isnan().all())
    others = [row for row in range(12) if row != 5]
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(library, ggml_type, value):
    matrix, _ = _matrix(library, ggml_type, 40, 512)
    x = _rows(9, 512)
    clean = matrix(x)
    x[4, 300] = value
    for got in (matrix(x), matrix(x[4:5]), matrix(x[3:5])):
        bad = got[{9: 4, 1: 0, 2: 1}[len(got)]]
        # An infinity times a weight of zero is no number; times another it is infinite, or no number either.
        assert not bool(bad.isfinite().any())
    kept = [row for row in range(9) if row != 4]
    assert torch.equal(matrix(x)[kept], clean[kept])


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("scale", [0.0, 1e-41, 1e-36, 1e-20, 1e20, 3e33])
def test_rows_of_any_magnitude_are_multiplied(library, ggml_type, rows, scale):
    matrix, weight = _matrix(library, ggml_type, 20, 256)
    x = _rows(rows, 256) * scale
    got, exact = matrix(x).double(), x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    # 1e-38: what lies below the normal numbers of f32, for each of 256 terms.
    assert bool(((got - exact).abs() <= 1e-6 * magnitude + 256 * 1e-38 * weight.abs().max()).all())
    if scale == 0:
        assert bool((got == 0).all())


@pytest.mark.parametrize("ggml_type", [kind for kind in TYPES if kind not in EXACT], ids=_name)
@pytest.mark.parametrize("fill", [0x00, 0xFF])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_there_can_be_are_no_larger_than_integers(library, ggml_type, fill, sign):
    """Every input just below a power of two, every bit of the quants clear or set: the extremes of the codes."""
    raw = with_every_bit(ggml_type, 32, 512, fill)
    matrix, weight = NativeLinear.pack([(raw, int(ggml_type), 32)], 512, library), weights(raw, ggml_type)
    x = torch.full((5, 512), sign * (2 - 2**-22))
    whole, magnitude = matrix(x), x.double().abs() @ weight.double().abs().T
    # Of the largest: all quants are alike here, so a scale and an offset may all but cancel in one output.
    assert float((whole.double() - x.double() @ weight.double().T).abs().max()) <= 1e-6 * float(magnitude.max())
    assert torch.equal(matrix(x[:1]), whole[:1])


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
def test_beside_a_large_value_a_row_is_rounded_to_a_part_of_that_value_at_most(library, ggml_type):
    matrix, weight = _matrix(library, ggml_type, 33, 512)
    x = _rows(7, 512)
    x[:, 5::64] *= 3000
    whole = matrix(x)
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    largest = x.double().abs().view(7, 16, 32).amax(dim=2)
    beside = largest @ weight.double().abs().view(33, 16, 32).sum(dim=2).T
    assert bool(((whole.double() - exact).abs() <= 2**-22 * beside + 1e-6 * magnitude).all())
    assert torch.equal(matrix(x[2:3]), whole[2:3])


@pytest.mark.parametrize("ggml_type", TYPES, ids=_name)
def test_a_stored_table_gives_its_rows(library, ggml_type):
    n_in = 77 if ggml_type in EXACT else 512
    raw = random_rows(ggml_type, 9, n_in)
    ids = torch.tensor([8, 0, 3, 8])
    assert torch.equal(block_rows(raw.view(9, -1), ggml_type, ids, library), weights(raw, ggml_type)[ids])
    assert block_rows(raw.view(9, -1), ggml_type, ids[:0], library).shape == (0, n_in)
    for wrong in ([9], [-1]):
        with pytest.raises(EngineError):
            block_rows(raw.view(9, -1), ggml_type, torch.tensor(wrong), library)


def test_python_threads_take_turns(library):
    matrix, _ = _matrix(library, GGMLType.Q4_K, 512, 1024)
    inputs = [_rows(count, 1024) for count in (1, 3, 20, 64)]
    expected = [matrix(x) for x in inputs]
    wrong: list[int] = []

    def compute(index: int) -> None:
        for _ in range(25):
            if not torch.equal(matrix(inputs[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=compute, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_computes_with_threads_of_its_own(library):
    matrix, _ = _matrix(library, GGMLType.Q4_0, 512, 256)
    x = _rows(4, 256)
    expected = matrix(x)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if torch.equal(matrix(x), expected) and library.threads == 2 else 1
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(matrix(x), expected)


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.zeros(2, 63), None),
        (torch.zeros(64), None),
        (torch.zeros(2, 64, dtype=torch.float64), None),
        (torch.zeros(64, 2).t(), None),
        (torch.zeros(2, 64), torch.zeros(2, 47)),
        (torch.zeros(2, 64), torch.zeros(3, 48)),
        (torch.zeros(2, 64), torch.zeros(48, 2).t()),
    ],
)
def test_tensors_that_do_not_fit_are_refused(library, x, out):
    matrix, _ = _matrix(library, GGMLType.Q4_0, 48, 64)
    with pytest.raises(EngineError) as refused:
        matrix(x, out)
    assert refused.value.code == "wrong_rows"


@pytest.mark.parametrize("ids", [[48], [-1], [0, 47, 48]])
def test_weights_of_outputs_that_are_not_there_are_refused(library, ids):
    matrix, _ = _matrix(library, GGMLType.Q4_0, 48, 64)
    with pytest.raises(EngineError):
        matrix.rows(torch.tensor(ids))


@pytest.mark.parametrize(("first", "rows"), [(8, 16), (0, 17), (16, 40), (-16, 16), (48, 16)])
def test_outputs_that_do_not_fill_panels_are_refused(library, first, rows):
    matrix = NativeLinear([(int(GGMLType.Q4_0), 48)], 64, library)
    with pytest.raises(EngineError):
        matrix.fill(0, first, random_rows(GGMLType.Q4_0, rows, 64))


def test_half_a_row_is_refused(library):
    matrix = NativeLinear([(int(GGMLType.Q4_0), 48)], 64, library)
    with pytest.raises(EngineError):
        matrix.fill(0, 0, torch.zeros(16 * 36 + 18, dtype=torch.uint8))


def test_types_and_widths_without_a_packed_form_are_refused(library):
    with pytest.raises(ModelError) as unknown:
        NativeLinear([(int(GGMLType.IQ2_XXS), 16)], 256, library)
    with pytest.raises(ModelError) as partial:
        NativeLinear([(int(GGMLType.Q4_K), 16)], 128, library)
    assert (unknown.value.code, partial.value.code) == ("unsupported_quant", "partial_block")
