"""The coverage report: the contract's fields, and the extensions only where they are announced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from node_parts import PLAN, A, Told, knows

from kvasir_console.config import NodeConfig
from kvasir_console.node import hardware
from kvasir_console.node.coverage import Coverage
from kvasir_console.node.direct import DirectEdges
from kvasir_console.node.holding import ExpertHolding, Holding, RingHolding
from kvasir_console.node.market import Assignment, GatewayInfo
from kvasir_console.node.placement.plan import Plan

EXPERTS = ExpertHolding(Assignment("moe", layer=3, begin=2, end=6, n_embd=576, n_layer=30, n_expert=8), "box", A)
WINDOW = RingHolding(PLAN, A, 64)


class Reports:
    """A node's reports to a gateway that answers each the same."""

    def __init__(self, directory: Path, *, wired: bool = False, **node: Any) -> None:
        self.gateway = Told(expert_coverage={"ok": True, "wired": wired})
        self.direct = DirectEdges(NodeConfig(**node), "https://gateway.example", directory / "node.data")
        credentials = self.gateway.credentials(directory)
        self.coverage = Coverage(self.gateway.market, credentials, self.direct, A, "box", "cpu")

    async def report(
        self, holding: Holding | None, info: GatewayInfo | None = None, stands_by: Plan | None = None
    ) -> tuple[bool, dict[str, Any]]:
        wired = await self.coverage.report(holding, info or knows(), stands_by)
        return wired, self.gateway.asked[-1][1]


async def test_a_report_says_who_holds_what(tmp_path: Path) -> None:
    _, report = await Reports(tmp_path).report(EXPERTS, knows(dispatch_wires=("v2", "v3")))
    machine = hardware.probe("cpu")
    assert (report["worker_id"], report["owner"]) == ("box", A)
    assert (report["os"], report["device_kind"], report["accelerator"]) == (machine.os, "server", "cpu")
    assert {name: report[name] for name in EXPERTS.coverage()} == EXPERTS.coverage()
    assert report["wires"]


async def test_wires_are_named_only_where_the_gateway_announces_them(tmp_path: Path) -> None:
    _, report = await Reports(tmp_path).report(EXPERTS)
    assert "wires" not in report
    assert report["segments"] == [[3, 2, 6]]


@pytest.mark.parametrize("wired", [True, False])
async def test_experts_are_dialled_for_when_the_gateway_waits_and_a_window_at_once(tmp_path: Path, wired: bool) -> None:
    reports = Reports(tmp_path, wired=wired)
    assert [(await reports.report(each))[0] for each in (EXPERTS, WINDOW, None)] == [wired, True, False]


async def test_who_holds_nothing_says_whether_it_stands_by(tmp_path: Path) -> None:
    reports = Reports(tmp_path)
    _, idle = await reports.report(None)
    assert (idle["model"], idle["segments"]) == ("none", [])
    assert "stands_by" not in idle
    _, ready = await reports.report(None, stands_by=PLAN)
    assert (ready["model"], ready["segments"], ready["stands_by"]) == ("m", [], True)


async def test_a_window_says_where_it_is_reached_if_both_sides_want_that(tmp_path: Path) -> None:
    willing, announced = Reports(tmp_path, direct=True, direct_listen="127.0.0.1:0"), knows(direct_edges=True)
    await willing.direct.start()
    try:
        _, report = await willing.report(WINDOW, announced)
        assert report["direct"] == willing.direct.announcement()
        assert report["direct_live"] is False
        assert "direct" not in (await willing.report(EXPERTS, announced))[1]
        assert "direct" not in (await willing.report(WINDOW))[1]
    finally:
        await willing.direct.close()
    assert "direct" not in (await Reports(tmp_path).report(WINDOW, announced))[1]
