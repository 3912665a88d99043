"""The budget of keys and values: reservations are exact, kept blocks give way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_console.engine.process.budget import (
    FREE_SHARE,
    KEPT_SHARE,
    KvBudget,
    budget_of,
    cgroup_free_bytes,
    free_bytes,
)
from kvasir_console.errors import EngineError, RequestError


@given(st.lists(st.integers(1, 50), max_size=30))
def test_reservations_never_exceed_the_budget_and_come_back(sizes):
    budget, held = KvBudget(100), []
    for size in sizes:
        if budget.fits(size):
            budget.reserve(size)
            held.append(size)
        else:
            with pytest.raises(EngineError):
                budget.reserve(size)
        assert budget.reserved_bytes == sum(held) <= 100
    for size in held:
        budget.release(size)
    assert budget.reserved_bytes == 0


def test_what_never_fits_is_refused_by_name():
    budget = KvBudget(100)
    budget.check(100)
    with pytest.raises(RequestError) as refusal:
        budget.check(101)
    assert refusal.value.code == "kv_budget_exceeded"
    assert "101" in refusal.value.message
    assert "100" in refusal.value.message


def test_kept_blocks_have_a_share_at_most_and_give_way_to_requests():
    budget = KvBudget(1000)
    budget.kept_bytes = int(1000 * KEPT_SHARE)
    assert budget.excess_bytes == 0
    budget.kept_bytes += 10
    assert budget.excess_bytes == 10
    assert budget.fits(1000)
    budget.reserve(900)
    assert budget.excess_bytes == budget.kept_bytes - 100


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(EngineError):
        KvBudget(0)


def test_the_default_leaves_memory_for_others(monkeypatch):
    monkeypatch.setattr("kvasir_console.engine.process.budget.free_bytes", lambda _: 1000)
    assert budget_of(0, "cpu").total_bytes == 1000 * FREE_SHARE
    assert [budget_of(0, "cpu", sharers).total_bytes for sharers in (2, 3)] == [250, 166]
    monkeypatch.setattr("kvasir_console.engine.process.budget.free_bytes", lambda _: 0)
    assert budget_of(0, "cpu").total_bytes == 1  # every request is refused, with that number


def test_the_owners_budget_is_taken_or_refused_at_load(monkeypatch):
    monkeypatch.setattr("kvasir_console.engine.process.budget.free_bytes", lambda _: 1000)
    assert budget_of(1000, "cpu", sharers=3).total_bytes == 1000
    with pytest.raises(EngineError) as refusal:
        budget_of(1001, "cpu")
    assert refusal.value.code == "kv_budget_too_large"
    assert "1001" in refusal.value.message
    assert "1000" in refusal.value.message


def test_free_memory_is_some_of_this_machines():
    import psutil

    assert 0 < free_bytes("cpu") < psutil.virtual_memory().total


def test_a_containers_limit_counts(tmp_path: Path):
    assert cgroup_free_bytes(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("123\n")
    assert cgroup_free_bytes(tmp_path) > 1 << 60
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_free_bytes(tmp_path) == 877
    (tmp_path / "memory.current").write_text("2000\n")
    assert cgroup_free_bytes(tmp_path) == 0


def test_the_older_kind_of_limit_counts_too(tmp_path: Path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("5000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000\n")
    assert cgroup_free_bytes(tmp_path) == 4000
