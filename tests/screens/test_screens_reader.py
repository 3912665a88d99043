"""The reader: all nodes at once, a slow one holds nobody up, a lost one is lost since a moment and comes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from console_fakes import NOW_S, SERVING, UNREACHABLE, Clock, FakeSource

from kvasir_console.screens.reader import SILENT_S, Reader


async def test_all_sources_are_read_in_their_order() -> None:
    sources = [FakeSource(replace(SERVING, name=name)) for name in ("a", "b", "c")]
    views = await Reader(sources, Clock()).read()
    assert [view.name for view in views] == ["a", "b", "c"]
    assert not any(view.lost for view in views)


async def test_a_lost_node_keeps_its_last_snapshot_and_the_moment_and_comes_back() -> None:
    clock, source = Clock(), FakeSource()
    reader = Reader([source], clock)
    await reader.read()
    source.failure = UNREACHABLE
    clock.now_s += 10
    (lost,) = await reader.read()
    assert lost.lost_since_s == NOW_S + 10
    assert lost.snapshot == SERVING
    assert "No node answers there." in lost.error
    clock.now_s += 10
    (still,) = await reader.read()
    assert still.lost_since_s == NOW_S + 10
    source.failure = None
    (back,) = await reader.read()
    assert not back.lost
    assert back.error == ""


async def test_a_slow_node_is_asked_once_and_delays_nobody() -> None:
    clock, slow, quick = Clock(), FakeSource(title="slow"), FakeSource(title="quick")
    slow.gate = asyncio.Event()
    reader = Reader([slow, quick], clock, patience_s=0.01)
    first, second = await reader.read()
    assert first.snapshot is None
    assert not first.lost
    assert second.snapshot == SERVING
    await reader.read()
    assert (slow.reads, quick.reads) == (1, 2)
    clock.now_s += SILENT_S
    lost, _ = await reader.read()
    assert lost.lost_since_s == NOW_S
    assert "does not answer" in lost.error
    slow.gate.set()
    back, _ = await reader.read()
    assert back.snapshot == SERVING
    assert not back.lost


async def test_a_defect_of_a_source_is_shown_and_does_not_end_the_reading() -> None:
    broken, good = FakeSource(), FakeSource()
    broken.failure = RuntimeError("boom \x1b[2J")
    reader = Reader([broken, good], Clock())
    lost, fine = await reader.read()
    assert lost.lost
    assert "RuntimeError" in lost.error
    assert "boom" not in lost.error
    assert fine.snapshot == SERVING


async def test_close_ends_what_still_waits() -> None:
    source = FakeSource()
    source.gate = asyncio.Event()
    reader = Reader([source], Clock(), patience_s=0.01)
    await reader.read()
    before = len(asyncio.all_tasks())
    await reader.close()
    assert len(asyncio.all_tasks()) == before - 1
