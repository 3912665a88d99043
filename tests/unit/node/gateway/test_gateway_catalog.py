"""Slices: kept while they are used, and never of another checkpoint."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_parts import DENSE, MOE
from gguf_draft import parsed, split, write_parts

from kvasir_console.config import ServedModel
from kvasir_console.errors import UsageError
from kvasir_console.node.gateway.catalog import Slices, read_catalog


def test_the_catalogue_reads_what_the_checkpoints_say(models: tuple[ServedModel, ...]) -> None:
    catalog = read_catalog(models)
    assert list(catalog) == [MOE, DENSE]
    offered = catalog[MOE].offered
    assert offered is not None
    assert (offered.model, offered.n_expert, offered.moe_layers, offered.n_embd) == (MOE, 80, (0, 1, 2), 64)
    assert catalog[DENSE].offered is None
    ringed = read_catalog((replace(models[0], placement="ring"),))
    assert ringed[MOE].offered == offered  # a ring's stages route their layers' experts as a trunk does


async def test_the_least_recently_served_slice_goes_first(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    catalog = read_catalog(models)
    first = await Slices(tmp_path, catalog).expert_shard(catalog[MOE], 0, 0, 8)
    slices = Slices(tmp_path, catalog, cache_bytes=int(2.5 * first.stat().st_size))
    second = await slices.expert_shard(catalog[MOE], 1, 0, 8)
    for age_s, file in ((20, first), (10, second)):
        times = file.stat()
        os.utime(file, ns=(times.st_atime_ns - age_s * 10**9, times.st_mtime_ns))
    modified = first.stat().st_mtime_ns
    assert await slices.expert_shard(catalog[MOE], 0, 0, 8) == first  # used again: now the younger one
    assert first.stat().st_mtime_ns == modified  # a download under way keeps its ETag
    third = await slices.expert_shard(catalog[MOE], 2, 0, 8)
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)


async def test_a_slice_larger_than_the_cache_is_still_served(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    catalog = read_catalog(models)
    slices = Slices(tmp_path, catalog, cache_bytes=1)
    assert (await slices.expert_shard(catalog[MOE], 0, 0, 2)).exists()


async def test_another_checkpoint_under_the_same_name_is_cut_anew(
    tmp_path: Path, models: tuple[ServedModel, ...]
) -> None:
    copy = tmp_path / "model.gguf"
    shutil.copy(models[0].path, copy)
    model = replace(models[0], path=str(copy))
    old = read_catalog((model,))
    before = await Slices(tmp_path / "cache", old).expert_shard(old[MOE], 0, 0, 2)
    data = bytearray(copy.read_bytes())
    middle = len(data) // 2  # neither its header nor either end of its data
    data[middle] ^= 1
    copy.write_bytes(data)
    new = read_catalog((model,))
    assert new[MOE].digest == old[MOE].digest
    after = await Slices(tmp_path / "cache", new).expert_shard(new[MOE], 0, 0, 2)
    assert after != before


async def test_another_part_of_a_split_checkpoint_is_cut_anew(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    draft = parsed(Path(models[0].path).read_bytes())
    parts = write_parts(split(draft, [1, len(draft.tensors) - 1]), tmp_path)
    model = replace(models[0], path=str(parts[0]))
    old = read_catalog((model,))
    assert old[MOE].digest == read_catalog(models)[MOE].digest
    before = await Slices(tmp_path / "cache", old).expert_shard(old[MOE], 0, 0, 2)
    data = bytearray(parts[1].read_bytes())
    data[len(data) // 2] ^= 1
    parts[1].write_bytes(data)
    new = read_catalog((model,))
    after = await Slices(tmp_path / "cache", new).expert_shard(new[MOE], 0, 0, 2)
    assert after != before


async def test_a_model_goes_by_its_last_path_component(tmp_path: Path, models: tuple[ServedModel, ...]) -> None:
    slices = Slices(tmp_path, read_catalog(models))
    assert slices.model(f"some/where/{MOE}").id == MOE
    with pytest.raises(UsageError) as caught:
        slices.model("../..")
    assert caught.value.code == "unknown_model"
