"""Render the dashboard's pictures for the documentation, from sample data that says so.

    python docs/img/render.py

writes ``dashboard-140x40.svg`` and ``dashboard-80x24.svg`` beside this file.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

from kvasir_console import __version__
from kvasir_console.node.phase import Phase, PhaseState
from kvasir_console.node.snapshot import (
    DownloadView,
    EarningsView,
    MachineView,
    NodeSnapshot,
    RelayView,
    SliceView,
    WorkView,
)
from kvasir_console.screens.app import ConsoleApp
from kvasir_console.screens.graph import Symbols

NOW_S = 1_790_000_000.0
SIZES = ((140, 40), (80, 24))
TITLE = "kvasir-console (sample data)"
_WALLETS = (
    "SampLe1expertA1111111111111111111111111111A",
    "SampLe2expertB1111111111111111111111111111B",
    "SampLe3ringStage0111111111111111111111111C",
    "SampLe4ringStage1111111111111111111111111D",
)


class SampleSource:
    """One snapshot, for ever."""

    def __init__(self, snapshot: NodeSnapshot) -> None:
        self.title = snapshot.name
        self._snapshot = snapshot

    async def snapshot(self) -> NodeSnapshot:
        return self._snapshot

    async def claim(self) -> str:
        return "This is a sample."

    async def unlock(self, passphrase: str) -> None:
        del passphrase


def samples() -> tuple[NodeSnapshot, ...]:
    """Two expert nodes and two ring stages, made up."""
    expert = NodeSnapshot(
        at_s=NOW_S,
        version=__version__,
        pid=41_201,
        engine_pid=41_207,
        name="sample-expert-a",
        worker_id="sample-expert-a-5c1f",
        wallet=_WALLETS[0],
        wallet_locked=False,
        gateway="https://127.0.0.1:8791",
        state=PhaseState(
            Phase.SERVING, NOW_S - 7_684, "Every relay session is open.", "Nothing to do: work is metered as it comes."
        ),
        held=SliceView("experts", "smollm2-8x135m", 12, 0, 4, 8, 11_278_080, "9f3ac0de" * 8),
        relays=(RelayView("expert-sample-expert-a-5c1f", "open", NOW_S - 7_640, 1.84, 48_923_112, 51_880_904),),
        work=WorkView(412, 28_431, 56_862, 0, 37.4, 0.0, _history(38.0)),
        earnings=EarningsView(
            micro_units=33_320_812,
            credited_micro_kvr=333_208,
            carried_micro_kvr="3/25",
            pending_micro_kvr=133_208,
            paid_micro_kvr=200_000,
            wallet_micro_kvr=200_000,
            minimum_claim_micro_kvr=1,
            claim_state="confirmed",
            last_signature="5h6xBEauJ3PK6SWCZ1PGjBvj8vDdWG3KpwATGy1ARAXFSDwt8GFXM7W5Ncn16wmqokgpiKRLuS83KUxyZyv2sUYv",
        ),
        machine=MachineView(61.0, 9_663_676_416, 16_777_216_000, 402_653_184, "cpu"),
        log=(
            "21:31:02 These lines are samples, made up for the documentation.",
            "21:31:02 authenticating: Asking https://127.0.0.1:8791 for a participation token.",
            "21:31:02 downloading: Fetching experts 0 to 3 of layer 12 of smollm2-8x135m.",
            "21:31:04 starting: The engine loads experts 0 to 3 of layer 12 of smollm2-8x135m.",
            "21:31:05 dialling: The gateway waits for this node's sessions.",
            "21:31:05 Relay session expert-sample-expert-a-5c1f: open.",
            "21:31:05 serving: Every relay session is open.",
            "22:04:40 Claimed 200000 micro-KVR.",
        ),
    )
    waiting = replace(
        expert,
        name="sample-expert-b",
        wallet=_WALLETS[1],
        wallet_locked=True,
        state=PhaseState(Phase.DIALLING, NOW_S - 95, "1011: nothing listens for this session at the relay yet", ""),
        held=SliceView("experts", "smollm2-8x135m", 12, 4, 8, 8, 11_278_080, "9f3ac0de" * 8),
        relays=(
            RelayView("expert-sample-expert-b", "waiting", NOW_S - 4, None, 0, 0, 7.0, "1011: nothing listens yet"),
        ),
        work=WorkView(),
        earnings=EarningsView(0, 0, "0/1", 0, 0, 0, 1),
    )
    first = replace(
        expert,
        name="sample-ring-0",
        wallet=_WALLETS[2],
        held=SliceView("layers", "smollm2-135m", None, 0, 15, 30, 58_720_256, "41c2b7aa" * 8),
        relays=tuple(RelayView(f"ring/{edge}", "open", NOW_S - 7_000, 0.9, 9_000_000, 9_100_000) for edge in "0P"),
        work=WorkView(31, 8_420, 0, 3_911, 12.6, 12.6, _history(13.0)),
        earnings=replace(expert.earnings, pending_micro_kvr=42_101),
    )
    last = replace(
        first,
        name="sample-ring-1",
        wallet=_WALLETS[3],
        held=SliceView("layers", "smollm2-135m", None, 15, 30, 30, 58_720_256, "41c2b7aa" * 8),
        state=PhaseState(Phase.DOWNLOADING, NOW_S - 12, "Fetching layers 15 to 29 of smollm2-135m."),
        relays=(),
        work=WorkView(),
        download=DownloadView("layers 15 to 29 of smollm2-135m", 31_457_280, 58_720_256),
        earnings=EarningsView(),
    )
    return expert, waiting, first, last


def _history(level: float) -> tuple[float, ...]:
    """Four minutes of a rate that comes and goes."""
    wave = (math.sin(second / 9) + math.sin(second / 23 + 1) for second in range(240))
    return tuple(round(max(0.0, level * (0.55 + 0.3 * value)), 2) if n > 20 else 0.0 for n, value in enumerate(wave))


async def render(folder: Path) -> None:
    for columns, rows in SIZES:
        sources = [SampleSource(snapshot) for snapshot in samples()]
        app = ConsoleApp(sources, clock=lambda: NOW_S, symbols=Symbols.BRAILLE, interval_s=3600)
        async with app.run_test(size=(columns, rows)) as pilot:
            await app.read_now()
            await pilot.pause()
            picture = app.export_screenshot(title=TITLE)
        (folder / f"dashboard-{columns}x{rows}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(render(Path(__file__).parent))
