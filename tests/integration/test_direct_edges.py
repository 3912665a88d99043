"""A ring of real processes whose edges go past the relay: the same tokens, also when the direct paths are cut."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from ring_runs import all_of, kill_console, struck

from kvasir_console.bench.models import Recipe, write_model
from kvasir_console.bench.network import Layout, RingNetwork
from kvasir_console.bench.recovery import Batch, Plan, Run, requests

WINDOWS = ((0, 1), (1, 3), (3, 4))
TOKENS = 48


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "ring.gguf", Recipe())


async def test_edges_go_past_the_relay_and_back_and_no_token_changes(model: Path, tmp_path: Path) -> None:
    made = requests(Plan(requests=8, tokens=TOKENS))
    async with RingNetwork(Layout(model, WINDOWS, max_requests=8), print, tmp_path / "relayed") as net:
        relayed = Batch([Run(each) for each in made])
        await all_of(net, relayed, TOKENS)
        assert "direct" not in await net.edge_states()  # nobody asked for it
    layout = Layout(model, WINDOWS, max_requests=8, direct=True)
    async with RingNetwork(layout, print, tmp_path / "direct") as net:
        await net.wait_until(net.all_direct, "the edges do not go past the relay")
        batch = Batch([Run(each) for each in made])
        await all_of(net, batch, TOKENS)
        assert [run.tokens for run in batch.runs] == [run.tokens for run in relayed.runs]
        await net.wait_until(net.all_direct, "the edges do not stay past the relay")

        # The middle rank's engine dies with requests in flight: its edges end, and come back one way or the other.
        middle, last = net.stages[1:]

        def kill_engine() -> None:
            engine = net.engine_pid(middle.name)
            assert engine is not None
            os.kill(engine, signal.SIGKILL)

        batch = await struck(net, made, TOKENS, middle, kill_engine)
        assert [run.tokens for run in batch.runs] == [run.tokens for run in relayed.runs]

        # A neighbour that is stopped for good leaves no one waiting on a dead path.
        await net.wait_until(net.all_direct, "the edges do not go past the relay again")
        children: list[psutil.Process] = []

        def kill_for_good() -> None:
            children[:] = kill_console(net, last)

        batch = await struck(net, made, TOKENS, last, kill_for_good)
        assert [run.tokens for run in batch.runs] == [run.tokens for run in relayed.runs]
        psutil.wait_procs(children, timeout=60)
