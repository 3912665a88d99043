"""Whether hub and nodes count the same bytes, to the byte, after whatever happened to their connections.

Both settle a connection when its node dials again (``relay/counting.py``). So every link is cut once more, and then
what each node's book says of its settled connections is held against what the hub's database says of them; a session
is found in both by the name of the connection that runs now.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_console.bench.network import RingNetwork

SETTLE_S = 180.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Settled:
    """One session's bytes over all connections that are over."""

    connection: str
    """The one that runs now."""
    up: int
    down: int
    lost_up: int = 0
    disputed: int = 0
    name: str = ""
    """Of the session, for whoever looks why two counts differ."""


def held_against(nodes: Iterable[Settled], hub: Iterable[Settled]) -> dict[str, Any]:
    """How many sessions of the nodes the hub counts alike, and how many bytes those are. ``unlike`` are the others."""
    stated = {each.connection: each for each in hub}
    mine = list(nodes)
    alike: list[Settled] = []
    unlike: list[dict[str, Any]] = []
    for each in mine:
        found = stated.get(each.connection)
        if found is not None and (found.up, found.down) == (each.up, each.down):
            alike.append(each)
        else:
            theirs = None if found is None else [found.up, found.down]
            unlike.append({"session": each.name, "node": [each.up, each.down], "hub": theirs})
    return {
        "sessions": len(mine),
        "sessions_alike": len(alike),
        "unlike": unlike,
        "bytes_up": sum(each.up for each in alike),
        "bytes_down": sum(each.down for each in alike),
        "lost_bytes_up": sum(each.lost_up for each in mine),
        "disputed_bytes": sum(each.disputed for each in mine),
    }


async def agreement(net: RingNetwork) -> dict[str, Any]:
    """Cut every link, and compare once all have dialled again: ``held_against``, and what became of the statements.

    ``statements`` counts chains that nodes verified up to now, ``refused`` says why one was not taken or acknowledged.
    """
    for member in net.members:
        await net.links.cut(member.name)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    while True:
        found = await asyncio.to_thread(_look, net)
        snapshots = [snapshot for member in net.members if (snapshot := await member.snapshot()) is not None]
        views = [snapshot.statements for snapshot in snapshots]
        found |= {
            "statements": sum(1 for view in views if view.sequence is not None),
            "acknowledged": sum(1 for view in views if view.sequence is not None and view.acknowledged > 0),
            "refused": sorted({view.refused for view in views if view.refused}),
        }
        members = len(net.members)
        whole = found["sessions_alike"] == found["sessions"] > 0 and found["acknowledged"] == members
        if whole or loop.time() > deadline:
            return {"members": members, **found}
        await asyncio.sleep(_LOOK_S)


def _look(net: RingNetwork) -> dict[str, Any]:
    books = [book for member in net.members for book in member.paths.state.glob("statements-*.json")]
    nodes = [settled for book in books for settled in _of_node(book)]
    return held_against(nodes, _of_hub(net.operator.paths.data / "gateway.sqlite"))


def _of_node(book: Path) -> list[Settled]:
    """Sessions in a node's book that have a connection now."""
    workers: Iterable[Mapping[str, Any]] = json.loads(book.read_text())["workers"].values()
    return [
        Settled(count["connection"], count["up"], count["down"], count["lost_up"], count["disputed"], name)
        for worker in workers
        for name, count in worker["sessions"].items()
        if count["connection"]
    ]


def _of_hub(database: Path) -> list[Settled]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10.0)) as connection:
        states = [json.loads(row[0]) for row in connection.execute("SELECT state FROM relay_counts")]
    return [Settled(state["connection"], state["up"], state["down"]) for state in states]
