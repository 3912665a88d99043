"""A window's whole node is killed and stays dead: a node that stands by takes it over, and no token changes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from ring_runs import all_of, kill_console, stats_of, struck

from kvasir_console.bench.models import Recipe, write_model
from kvasir_console.bench.network import Layout, RingNetwork
from kvasir_console.bench.recovery import Batch, Plan, Run, requests
from kvasir_console.node.phase import Phase

WINDOWS = ((0, 1), (1, 3), (3, 4))
TOKENS = 48
GRACE_S = 8.0
"""More than a busy machine is likely to hold up a node that lives."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "ring.gguf", Recipe())


async def snapshot_says(net: RingNetwork, member: int, phase: Phase, why: str) -> bool:
    seen = await net.members[member].snapshot()
    return seen is not None and seen.state.phase is phase and why in seen.state.why


async def rings_command(net: RingNetwork, *arguments: str) -> str:
    """What ``kvasir-console rings`` prints on the operator's machine."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvasir_console", "rings", *arguments),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | net.operator.environment,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


async def test_a_standby_takes_over_from_a_node_that_stays_dead(model: Path, tmp_path: Path) -> None:
    layout = Layout(model, WINDOWS, standbys=1, standby_grace_s=GRACE_S, max_requests=8)
    made = requests(Plan(requests=8, tokens=TOKENS))
    async with RingNetwork(layout, print, tmp_path / "net") as net:
        standby, dead = net.standbys[0], net.stages[1]
        says = partial(snapshot_says, net)
        volunteers = partial(says, 3, Phase.VOLUNTEERING, "Stands by for layers 0 to 0, layers 1 to 2")
        await net.wait_until(volunteers, "nobody stands by")
        calm = Batch([Run(each) for each in made])
        await all_of(net, calm, TOKENS)

        processes: list[psutil.Process] = []

        def kill_for_good() -> None:
            net.kept[dead.name].keep.clear()
            processes[:] = kill_console(net, dead)

        batch = await struck(net, made, TOKENS, dead, kill_for_good)
        assert [run.tokens for run in batch.runs] == [run.tokens for run in calm.runs]
        psutil.wait_procs(processes, timeout=60)

        (ring,) = await net.rings()
        assert ring["generation"] == 2
        moved = ring["stages"][1]
        assert (moved["wallet"], moved["layers"], moved["connected"]) == (standby.address, [1, 3], True)
        assert moved["replicas"] == [{"wallet": dead.address, "ready": False}]
        (move,) = (await net.client.get("/api/rings"))["moves"]
        assert (move["rank"], move["old"], move["new"]) == (1, dead.address, standby.address)
        await net.wait_until(partial(says, 3, Phase.SERVING, ""), "the standby does not serve")
        stats = await stats_of(net, standby)
        assert (stats["ring"]["epoch"], stats["ring"]["rank"]) == (2, 1)
        assert stats["ring"]["recomputed_rows"] > 0  # it was filled with what the dead one had computed

        # The old node comes back, of an epoch that is over: the plan names another, and it stands by.
        net.kept[dead.name].keep.set()
        await net.wait_until(
            partial(says, 1, Phase.VOLUNTEERING, "Stands by for layers 1 to 2"), "it does not stand by"
        )
        again = Batch([Run(each) for each in made])
        await all_of(net, again, TOKENS)
        assert [run.tokens for run in again.runs] == [run.tokens for run in calm.runs]
        assert (await net.rings())[0]["generation"] == 2

        # The operator gives it its window back, whoever is there.
        told = await rings_command(net, "--move", "1", "--to", dead.address, "--yes", "--json")
        assert json.loads(told)["rings"][0]["stages"][1]["wallet"] == dead.address
        await net.wait_until(partial(says, 1, Phase.SERVING, ""), "it does not serve again")
        last = Batch([Run(each) for each in made])
        await all_of(net, last, TOKENS)
        assert [run.tokens for run in last.runs] == [run.tokens for run in calm.runs]
        shown = await rings_command(net)
        assert f"layers 1 to 2  {dead.address}  connected" in shown
        assert "generation 3: the operator asked for it" in shown
