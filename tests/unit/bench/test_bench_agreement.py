"""Counts of both sides, held against each other: one byte more or less on either side shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir_console.bench.agreement import Settled, held_against

NODES = (Settled("a", 10, 20, lost_up=3, name="expert-a"), Settled("b", 0, 0), Settled("c", 7, 8))


def test_equal_counts_are_alike_in_any_order_and_the_hub_may_know_others() -> None:
    found = held_against(NODES, [Settled("z", 1, 1), *reversed(NODES)])
    assert (found["sessions"], found["sessions_alike"]) == (3, 3)
    assert (found["bytes_up"], found["bytes_down"], found["lost_bytes_up"], found["disputed_bytes"]) == (17, 28, 3, 0)


@pytest.mark.parametrize("change", [{"up": 11}, {"up": 9}, {"down": 21}, {"down": 19}, {"connection": "other"}])
def test_one_byte_or_another_connection_is_not_alike(change: dict[str, object]) -> None:
    found = held_against(NODES, [replace(NODES[0], **change), *NODES[1:]])
    assert (found["sessions"], found["sessions_alike"]) == (3, 2)
    (unlike,) = found["unlike"]
    theirs = replace(NODES[0], **change)
    hub = None if theirs.connection == "other" else [theirs.up, theirs.down]
    assert unlike == {"session": "expert-a", "node": [10, 20], "hub": hub}


def test_what_a_node_disputes_is_told() -> None:
    assert held_against([replace(NODES[0], disputed=5)], NODES)["disputed_bytes"] == 5
