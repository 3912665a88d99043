"""Free memory as control groups limit it, on directories laid out as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvasir_console.wallet.memory import available_bytes

MIB = 2**20


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 8 GiB free."""

    class Free:
        available = 8192 * MIB

    monkeypatch.setattr(psutil, "virtual_memory", Free)


def group(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def membership(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "membership"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_without_control_groups_the_machine_decides(tmp_path):
    assert available_bytes(tmp_path, tmp_path / "nothing") == 8192 * MIB
    assert available_bytes(tmp_path / "none", membership(tmp_path, "0::/")) == 8192 * MIB


def test_the_groups_limit_less_its_use_is_what_is_left(tmp_path):
    root = tmp_path / "cgroup"
    group(root / "a" / "b", memory__max=512 * MIB, memory__current=300 * MIB)
    assert available_bytes(root, membership(tmp_path, "0::/a/b")) == 212 * MIB


def test_file_cache_can_be_taken_back(tmp_path):
    root = tmp_path / "cgroup"
    group(
        root / "a",
        memory__max=512 * MIB,
        memory__current=500 * MIB,
        memory__stat=f"anon 5\ninactive_file {100 * MIB}\nactive_file 7",
    )
    assert available_bytes(root, membership(tmp_path, "0::/a")) == 112 * MIB


def test_a_group_above_may_be_the_narrower_one(tmp_path):
    root = tmp_path / "cgroup"
    group(root / "a", memory__max=256 * MIB, memory__current=0)
    group(root / "a" / "b", memory__max=1024 * MIB, memory__current=0)
    group(root / "a" / "b" / "c", memory__max="max", memory__current=0)
    assert available_bytes(root, membership(tmp_path, "0::/a/b/c")) == 256 * MIB


def test_a_container_sees_its_own_group_at_the_root(tmp_path):
    root = tmp_path / "cgroup"
    group(root, memory__max=128 * MIB, memory__current=28 * MIB)
    assert available_bytes(root, membership(tmp_path, "0::/")) == 100 * MIB
    assert available_bytes(root, membership(tmp_path, "0::/../outside")) == 100 * MIB


def test_over_the_limit_nothing_is_left(tmp_path):
    root = tmp_path / "cgroup"
    group(root, memory__max=128 * MIB, memory__current=200 * MIB)
    assert available_bytes(root, membership(tmp_path, "0::/")) == 0


def test_the_first_version_of_control_groups(tmp_path):
    root = tmp_path / "cgroup"
    group(
        root / "memory" / "job",
        memory__limit_in_bytes=400 * MIB,
        memory__usage_in_bytes=200 * MIB,
        memory__stat=f"total_inactive_file {50 * MIB}",
    )
    lines = ("12:pids:/job", "7:cpu,memory:/job", "0::/")
    assert available_bytes(root, membership(tmp_path, *lines)) == 250 * MIB


@pytest.mark.parametrize("content", ["", "\n\n", ":::", "0::", "no colon", "\u0661:memory:/x"])
def test_a_strange_membership_limits_nothing(tmp_path, content):
    assert available_bytes(tmp_path / "cgroup", membership(tmp_path, content)) == 8192 * MIB
