"""A node's sessions: dialled for what it holds, ended together, and what they say of the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from node_parts import GATEWAY, PLAN, A, B, Told, knows

from kvasir_console.config import NetworkConfig, NodeConfig
from kvasir_console.node.direct import DirectEdges, DirectView
from kvasir_console.node.holding import ExpertHolding, RingHolding
from kvasir_console.node.hubpin import HubPin
from kvasir_console.node.market import Assignment, Market
from kvasir_console.node.phase import Phase
from kvasir_console.node.sessions import RelaySessions, relay_view, standing
from kvasir_console.node.snapshot import RelayView
from kvasir_console.node.statements import StatementBook
from kvasir_console.relay.closing import CloseCode, Closing, explain
from kvasir_console.relay.uplink import UplinkPhase, UplinkState

from engines import until

LOST = explain(CloseCode.ABNORMAL)


def state(session: str, phase: UplinkPhase, last_close: Closing | None = None) -> UplinkState:
    return UplinkState(session, "wss://h", phase, 0.0, 3.0, None, 1.5, 10, 20, 1, last_close)


# What they say of the node


def test_a_node_that_dialled_nothing_does_not_serve() -> None:
    assert standing([]) is None


def test_a_node_serves_once_every_session_is_open_or_carried_past_the_relay() -> None:
    open_, aside = state("a", UplinkPhase.OPEN), state("b", UplinkPhase.ASIDE)
    assert standing([open_, aside]) == (Phase.SERVING, "Every relay session is open.")


@pytest.mark.parametrize(("last_close", "why"), [(None, "Session b is being dialled."), (LOST, f"b: {LOST.text}")])
def test_the_first_session_that_is_not_open_is_named(last_close: Closing | None, why: str) -> None:
    states = [state("a", UplinkPhase.OPEN), state("b", UplinkPhase.WAITING, last_close), state("c", UplinkPhase.CLOSED)]
    assert standing(states) == (Phase.DIALLING, why)


def test_a_session_is_shown_as_what_carries_it() -> None:
    known = state("a", UplinkPhase.OPEN, LOST)
    assert relay_view(known, 100.0, None) == RelayView("a", "open", 97.0, 1.5, 10, 20, None, LOST.text)
    past = relay_view(known, 100.0, DirectView(since_s=7.0, bytes_up=100, bytes_down=200))
    assert past == RelayView("a", "direct", 93.0, None, 110, 220)


# All of them


class Dialled:
    """A node's sessions to a gateway that nobody listens at, and their changes."""

    def __init__(self, directory: Path) -> None:
        self.gateway = Told(edges={"edges": []})
        self.market = Market("http://127.0.0.1:1")
        self.changes: list[UplinkState] = []
        self.statements = StatementBook(self.market, A, directory / "statements.json", HubPin(directory / "hub-key"))
        self.direct = DirectEdges(NodeConfig(direct=True), GATEWAY, directory / "node.data")
        self.sessions = RelaySessions(
            self.market,
            self.gateway.credentials(directory),
            self.statements,
            self.direct,
            NetworkConfig(redial_min_s=60.0, redial_max_s=60.0),
            directory / "node.data",
            self.changes.append,
        )

    def waiting(self) -> dict[str, float | None]:
        """When each that waits is dialled again, in seconds."""
        return {each.session: each.retry_in_s for each in self.sessions.views(0.0) if each.state == "waiting"}


@pytest.fixture
async def dialled(tmp_path: Path) -> AsyncIterator[Dialled]:
    made = Dialled(tmp_path)
    yield made
    await made.sessions.drop()
    await made.market.close()


def window() -> RingHolding:
    return RingHolding(PLAN.moved(1, B, 5), A, 64)


async def test_a_windows_sessions_are_its_edges_and_are_dialled_again_soon(dialled: Dialled) -> None:
    assert not dialled.sessions.dialled
    dialled.sessions.dial(window(), knows())
    assert dialled.sessions.dialled
    await until(lambda: len(dialled.waiting()) == 3)
    assert set(dialled.waiting()) == {"r/0/P", "r/1/N", "r/entry/N"}
    assert all((pause_s or 0.0) <= 5.0 for pause_s in dialled.waiting().values())
    assert dialled.statements.view().worker == "ring-r-0"


async def test_a_workers_session_keeps_to_the_configured_pause(dialled: Dialled) -> None:
    holding = ExpertHolding(Assignment("moe", 3, 2, 6, 576, 30, 8), "box", A, info={"model_digest": "ab" * 32})
    dialled.sessions.dial(holding, knows())
    await until(lambda: dialled.waiting())
    (pause_s,) = dialled.waiting().values()
    assert pause_s is not None
    assert pause_s > 5.0
    assert dialled.statements.view().worker == "box"
    assert dialled.sessions.standing() == (Phase.DIALLING, f"expert-box: {dialled.changes[-1].last_close.text}")


async def test_a_stage_with_a_router_keeps_one_more_that_says_nothing_of_the_node(dialled: Dialled) -> None:
    holding = window()
    holding.info = {"moe_layers": [3]}
    dialled.sessions.dial(holding, knows())
    await until(lambda: len(dialled.waiting()) == 4)
    assert "r/experts-0/P" in dialled.waiting()
    assert {each.session for each in dialled.changes} == {"r/0/P", "r/1/N", "r/entry/N"}


async def test_they_end_together_and_may_be_dialled_anew(dialled: Dialled) -> None:
    holding = window()
    holding.info = {"moe_layers": [3]}
    for _ in range(2):
        dialled.sessions.dial(holding, knows())
        await until(lambda: len(dialled.waiting()) == 4)
        dialled.changes.clear()
        before = asyncio.all_tasks()
        await dialled.sessions.drop()
        assert {each.phase for each in dialled.changes} == {UplinkPhase.CLOSED}
        assert (dialled.sessions.dialled, dialled.sessions.views(0.0), dialled.sessions.standing()) == (False, (), None)
        assert sum(not task.done() for task in before) == 1


async def test_neighbours_are_asked_for_only_where_the_gateway_introduces_them(dialled: Dialled) -> None:
    holding = window()
    await dialled.sessions.introduce(holding, knows())
    assert dialled.gateway.asked == []
