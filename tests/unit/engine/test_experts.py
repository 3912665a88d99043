"""Expert banks against the dispatch vectors and against float64 arithmetic over gguf-py's weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.experts import ExpertBank
from kvasir_console.engine.forms import REFERENCE, Forms
from kvasir_console.errors import ModelError, RequestError
from kvasir_console.relay.wire.dispatch import Request, RequestDecoder, reply_bytes

from builders import Quant, write_tiny_llama

DISPATCH = Path(__file__).parents[2] / "data" / "conformance" / "dispatch"
VECTORS = json.loads((DISPATCH / "cases.json").read_text())
HOSTILE = json.loads((DISPATCH / "hostile.json").read_text())
SHARDS = {shard["name"]: shard for shard in VECTORS["shards"]}
N_EMBD, N_FF, N_EXPERT = 64, 96, 6


def shard_bank(name: str) -> ExpertBank:
    shard = SHARDS[name]
    with Checkpoint.open(DISPATCH / shard["file"]) as checkpoint:
        return ExpertBank.load(checkpoint, shard["layer"], *shard["experts"])


def decoded(bank: ExpertBank, request_hex: str) -> Request:
    decoder = RequestDecoder(bank.n_embd, bank.end - bank.begin)
    decoder.feed(bytes.fromhex(request_hex))
    request = decoder.next()
    assert request is not None
    return request


def answer(bank: ExpertBank, request: Request) -> np.ndarray:
    rows = torch.from_numpy(np.array(request.rows, dtype=np.float32))
    row_idx, ids = (torch.from_numpy(np.array(values)) for values in (request.row_idx, request.ids))
    if request.weights is None:
        return bank.outputs(rows, row_idx, ids).numpy()
    return bank.weighted_sum(rows, row_idx, ids, torch.from_numpy(np.array(request.weights))).numpy()


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_answers_are_those_of_the_vectors(case):
    bank = shard_bank(case["shard"])
    kind = np.dtype({"f32": "<f4", "f16": "<f2"}[case["reply_type"]])
    wanted = np.frombuffer(bytes.fromhex(case["reply_hex"]), dtype=kind).reshape(case["reply_shape"])
    request = decoded(bank, case["request_hex"])
    got = answer(bank, request).astype(kind)
    assert got.nbytes == reply_bytes(request.wire, bank.n_embd, request.n_rows, request.n_pairs)
    assert np.abs(got.astype(np.float64) - wanted).max() <= case["max_abs_error"]


@pytest.mark.parametrize("case", HOSTILE["not_a_number"], ids=lambda case: case["name"])
def test_a_row_that_is_not_a_number_does_not_touch_its_neighbour(case):
    bank = shard_bank("small-f32")
    wanted = np.frombuffer(bytes.fromhex(case["reply_row_1_hex"]), dtype="<f4")
    got = answer(bank, decoded(bank, case["request_hex"]))[1]
    assert np.abs(got - wanted).max() <= case["max_abs_error"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "moe.gguf"
    kinds = (Quant.Q8_0, Quant.Q4_1, Quant.F16, Quant.F32)
    return write_tiny_llama(path, n_expert=N_EXPERT, n_expert_used=2, weight_type=kinds, seed=21)


def load(path: Path, begin: int = 0, end: int = N_EXPERT, forms: Forms = REFERENCE) -> ExpertBank:
    with Checkpoint.open(path) as checkpoint:
        return ExpertBank.load(checkpoint, 1, begin, end, forms=forms)


@pytest.fixture(scope="module")
def bank(model_path, forms) -> ExpertBank:
    return load(model_path, forms=forms)


def exact_output(path: Path, expert: int, row: np.ndarray) -> np.ndarray:
    """down(silu(gate x) * up x) in float64."""
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    gate, up, down = (
        dequantize(tensor.data, tensor.tensor_type)[expert].astype(np.float64)
        for tensor in (tensors[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    )
    opened = gate @ row
    return down @ (opened / (1 + np.exp(-opened)) * (up @ row))


def test_outputs_are_those_of_the_formula(model_path, bank, forms):
    rows = torch.randn(3, N_EMBD, generator=torch.Generator().manual_seed(1))
    row_idx, ids = torch.tensor([2, 0, 0, 1, 2]), torch.tensor([5, 0, 3, 3, 0])
    got = bank.outputs(rows, row_idx, ids).numpy()
    for pair, (row, expert) in enumerate(zip(row_idx.tolist(), ids.tolist(), strict=True)):
        wanted = exact_output(model_path, expert, rows[row].double().numpy())
        assert np.abs(got[pair] - wanted).max() < (3e-2 if forms.name == "eager" else 1e-5) * np.abs(wanted).max()
    assert bank.pairs.sum() >= len(ids)


def test_a_window_holds_its_experts_and_no_other_bytes(model_path):
    reader = {tensor.name: tensor for tensor in GGUFReader(model_path).tensors}
    window = load(model_path, 2, 5)
    assert (window.layer, window.begin, window.end) == (1, 2, 5)
    assert (window.n_embd, window.n_ff) == (N_EMBD, N_FF)
    assert window.tensor_bytes == 3 * 3 * N_EMBD * N_FF * 4
    held: dict[str, list[np.ndarray]] = {}
    for name, tensor in window.named_tensors():
        held.setdefault(name, []).append(tensor.numpy())
    assert len(held) == 3
    for name, experts in held.items():
        values = dequantize(reader[name].data, reader[name].tensor_type)[2:5]
        assert np.array_equal(np.stack(experts), values), name


def pairs_of(draw_rows: int):
    pair = st.tuples(st.integers(0, draw_rows - 1), st.integers(0, N_EXPERT - 1))
    return st.lists(pair, min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(pairs=pairs_of(9), split=st.integers(1, N_EXPERT - 1))
def test_a_group_has_the_same_bits_wherever_it_is_computed(model_path, bank, forms, pairs, split):
    rows = torch.randn(9, N_EMBD, generator=torch.Generator().manual_seed(2))
    row_idx, ids = (torch.tensor(values) for values in zip(*pairs, strict=True))
    whole = bank.outputs(rows, row_idx, ids)
    for begin, end in ((0, split), (split, N_EXPERT)):
        mine = (ids >= begin) & (ids < end)
        sent, index = torch.unique(row_idx[mine], return_inverse=True)
        part = load(model_path, begin, end, forms).outputs(rows[sent], index, ids[mine] - begin)
        assert torch.equal(part, whole[mine])


@settings(max_examples=60, deadline=None)
@given(pairs=pairs_of(5))
def test_weights_are_multiplied_then_added_in_the_order_of_the_pairs(bank, pairs):
    rows = torch.randn(5, N_EMBD, generator=torch.Generator().manual_seed(3))
    row_idx, ids = (torch.tensor(values) for values in zip(*pairs, strict=True))
    weights = torch.rand(len(pairs), generator=torch.Generator().manual_seed(4))
    outputs = bank.outputs(rows, row_idx, ids).numpy()
    wanted = np.zeros((5, N_EMBD), dtype=np.float32)
    for pair, row in enumerate(row_idx.tolist()):
        product = np.multiply(outputs[pair], weights[pair].numpy(), dtype=np.float32)
        wanted[row] = np.add(wanted[row], product, dtype=np.float32)
    got = bank.weighted_sum(rows, row_idx, ids, weights).numpy()
    assert got.tobytes() == wanted.tobytes()


def test_rows_without_pairs_are_zero(bank):
    rows = torch.randn(4, N_EMBD, generator=torch.Generator().manual_seed(5))
    none = torch.empty(0, dtype=torch.int64)
    assert bank.outputs(rows, none, none).shape == (0, N_EMBD)
    assert torch.equal(bank.weighted_sum(rows, none, none, torch.empty(0)), torch.zeros(4, N_EMBD))


@pytest.mark.parametrize(("row", "expert"), [(-1, 0), (4, 0), (0, -1), (0, N_EXPERT), (2**40, 0)])
def test_pairs_out_of_range_are_refused(bank, row, expert):
    rows = torch.zeros(4, N_EMBD)
    with pytest.raises(RequestError) as refusal:
        bank.outputs(rows, torch.tensor([0, row]), torch.tensor([0, expert]))
    assert refusal.value.code == "pair_out_of_range"


@pytest.mark.parametrize(("begin", "end"), [(0, N_EXPERT + 1), (3, 3), (-1, 2)])
def test_experts_that_are_not_there_are_refused(model_path, begin, end):
    with pytest.raises(ModelError):
        load(model_path, begin, end)


def test_the_vectors_are_the_shards_they_were_made_with():
    for shard in SHARDS.values():
        assert hashlib.sha256((DISPATCH / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]
