"""What a node says of its machine, within the contract's words."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvasir_console.node import hardware


def test_the_report_uses_the_contracts_words():
    machine = hardware.probe()
    assert machine.os in ("macos", "ios", "android", "windows", "linux", "unknown")
    assert (machine.accelerator, machine.backend, machine.device_kind) == ("cpu", "cpu", "server")
    assert (hardware.probe("cuda").accelerator, hardware.probe("cuda").backend) == ("gpu", "cuda")
    assert 1 <= machine.cores <= (os.cpu_count() or 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_what_the_kernel_says():
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    machine = hardware.probe()
    assert machine.memory_bytes == total
    assert 0 < machine.memory_free_bytes <= total


def test_the_budget_is_the_owners_or_half_of_what_is_free():
    machine = hardware.Hardware("linux", "server", "cpu", "cpu", 4, 16 * 2**30, 10 * 2**30)
    assert hardware.budget_bytes(machine, 0) == 5 * 2**30
    assert hardware.budget_bytes(machine, 3) == 3 * 2**20


def test_what_a_screen_shows_is_this_machine_and_its_engine():
    view = hardware.view("cuda", 123)
    assert view.memory_total_bytes == hardware.probe().memory_bytes
    assert 0 < view.memory_used_bytes < view.memory_total_bytes
    assert 0.0 <= view.cpu_percent <= 100.0
    assert (view.engine_rss_bytes, view.accelerator) == (123, "cuda")
    assert hardware.view("cpu", None).engine_rss_bytes is None
