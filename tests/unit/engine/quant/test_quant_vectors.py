"""Every ggml type against vectors of ``gguf.quants.dequantize``, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvasir_console.engine import quant

VECTORS = Path(__file__).parents[3] / "data" / "conformance" / "quant"
TYPES = json.loads((VECTORS / "index.json").read_text())["types"]


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("entry", TYPES, ids=lambda entry: entry["type"])
def test_blocks_have_the_bits_of_the_vectors(entry):
    data = json.loads((VECTORS / entry["file"]).read_text())
    assert data["blocks"]
    for block in data["blocks"]:
        expected = _bytes(block["f32_hex"]).view(torch.int32)
        got = quant.dequantize(_bytes(block["raw_hex"]), entry["ggml_type"])
        assert got.dtype == torch.float32
        assert torch.equal(_bits(got), expected), block["name"]


def test_the_table_holds_the_types_of_the_vectors_and_their_sizes():
    wanted = {e["ggml_type"]: (e["type"], e["values_per_block"], e["bytes_per_block"]) for e in TYPES}
    assert {k: (f.name, f.block_values, f.block_bytes) for k, f in quant.FORMATS.items()} == wanted
