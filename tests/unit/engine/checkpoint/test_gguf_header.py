from __future__ import annotations

import gguf
import pytest
from checkpoint_models import peer_metadata, peer_tensors, write_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_console.engine.checkpoint import header
from kvasir_console.engine.checkpoint.ggml_types import GGMLType
from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.header import parse_header, shown
from kvasir_console.engine.checkpoint.writer import (
    TensorPart,
    bool_entry,
    f32_entry,
    text_entry,
    u32_entry,
    write_gguf,
)
from kvasir_console.errors import ModelError


def test_every_type_has_the_number_and_block_size_that_gguf_py_gives() -> None:
    peer = {kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {kind.name: (kind.value, kind.block_values, kind.block_bytes) for kind in GGMLType} == peer


def test_a_file_of_gguf_py_reads_as_gguf_py_reads_it(tmp_path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", experts=4, tied=False)
    with Checkpoint.open(path) as checkpoint:
        found = {t.name: (t.dims, t.type.name, bytes(checkpoint.raw(t))) for t in checkpoint.tensors.values()}
        assert found == peer_tensors(path)
        assert dict(checkpoint.metadata) == peer_metadata(path)


names = st.text("abcdefghijklmnopqrstuvwxyz0123456789_.", min_size=1, max_size=40)
entries = st.dictionaries(
    names.map(lambda name: f"test.{name}"),
    st.one_of(
        st.booleans(),
        st.integers(0, 2**32 - 1),
        st.floats(width=32, allow_nan=False),
        st.text(max_size=200),
    ),
    max_size=8,
)
shapes = st.sampled_from([(32,), (64, 3), (256, 2, 2), (32, 1, 3, 2)])
directories = st.dictionaries(names, st.tuples(shapes, st.sampled_from([GGMLType.F32, GGMLType.Q8_0])), max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=entries, directory=directories)
def test_what_is_written_reads_back_here_and_in_gguf_py(tmp_path, metadata, directory) -> None:
    encoders = {bool: bool_entry, int: u32_entry, float: f32_entry, str: text_entry}
    path = tmp_path / "any.gguf"
    parts, contents = [], {}
    for number, (name, (dims, kind)) in enumerate(directory.items(), 1):
        values = 1
        for size in dims:
            values *= size
        contents[name] = bytes([number]) * (values // kind.block_values * kind.block_bytes)
        halves = contents[name][:5], contents[name][5:]
        parts.append(TensorPart(name, dims, kind, len(contents[name]), lambda halves=halves: halves))
    write_gguf(path, [encoders[type(value)](key, value) for key, value in metadata.items()], parts)
    with Checkpoint.open(path) as checkpoint:
        assert dict(checkpoint.metadata) == metadata
        assert {t.name: bytes(checkpoint.raw(t)) for t in checkpoint.tensors.values()} == contents
        assert {t.name: (t.dims, t.type) for t in checkpoint.tensors.values()} == directory
    assert {name: raw for name, (_, _, raw) in peer_tensors(path).items()} == contents
    assert peer_metadata(path) == metadata


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused_with_a_clean_message(whole_file, data) -> None:
    damaged = bytearray(whole_file)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 3000))
        damaged[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        read, message = parse_header(memoryview(bytes(damaged)), "damaged.gguf"), ""
    except ModelError as error:
        read, message = None, str(error)
    assert message.isprintable()
    for tensor in read.tensors.values() if read else ():
        assert read.data_start <= tensor.offset <= tensor.offset + tensor.n_bytes <= len(damaged)


@pytest.fixture
def whole_file(tmp_path) -> bytes:
    path = tmp_path / "whole.gguf"
    return path.read_bytes() if path.exists() else write_llama(path, experts=2).read_bytes()


def test_array_items_of_the_whole_file_are_bounded_together(monkeypatch, whole_file) -> None:
    monkeypatch.setattr(header, "MAX_ARRAY_ITEMS", 39)
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens.*more than 39 array items"):
        parse_header(memoryview(whole_file), "many.gguf")


def test_a_header_larger_than_the_limit_is_refused_although_the_file_holds_it(monkeypatch, whole_file) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ModelError, match="MiB of header"):
        parse_header(memoryview(whole_file), "large.gguf")


def test_a_message_shows_no_control_characters_and_no_endless_names() -> None:
    assert shown("a\x1b[2J\u202eb\n") == "a\\x1b[2J\\u202eb\\n"
    assert shown("x" * 500) == "x" * 80 + "…"
