"""A source at the seam, and snapshots made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvasir_console.errors import KvasirError, NetworkError
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

NOW_S = 1_700_000_000.0
WALLET = "7EcDhSYGxXyscszYEp35KHN8vvw3svAuLKTzXwCFLtV2"
HOSTILE = (
    "\x1b[2J\x1b]52;c;cHduZWQ=\x07[bold red]x[/] [/nope] \u202eevil\u200b \U0001f468\u200d\U0001f469 名前 \r\n\x9b31m"
)

EMPTY = NodeSnapshot(
    at_s=NOW_S,
    version="1.2.3",
    pid=1,
    engine_pid=None,
    name="empty",
    worker_id="",
    wallet=WALLET,
    wallet_locked=True,
    gateway="https://gate.example",
    state=PhaseState(Phase.LOCKED, NOW_S - 5, "The wallet is locked.", "Unlock the wallet."),
)
"""Everything that may be unknown is."""

SERVING = NodeSnapshot(
    at_s=NOW_S,
    version="1.2.3",
    pid=100,
    engine_pid=101,
    name="alpha",
    worker_id="alpha-7f3a",
    wallet=WALLET,
    wallet_locked=False,
    gateway="https://gate.example:8443",
    state=PhaseState(Phase.SERVING, NOW_S - 3_725, "Every relay session is open.", "Nothing to do."),
    held=SliceView("experts", "tiny-moe", 3, 0, 2, 8, 3_145_728, "ab" * 32),
    relays=(RelayView("expert-alpha-7f3a", "open", NOW_S - 60, 12.34, 2_097_152, 4_194_304),),
    work=WorkView(7, 1_234, 2_468, 0, 23.5, 0.0, (0.0, 10.0, 20.0, 30.0)),
    earnings=EarningsView(
        micro_units=123_456_789,
        credited_micro_kvr=3_141_592,
        carried_micro_kvr="1/3",
        pending_micro_kvr=2_141_592,
        paid_micro_kvr=1_000_000,
        wallet_micro_kvr=1_000_001,
        minimum_claim_micro_kvr=1_000_000,
        claim_state="confirmed",
        last_signature="5h6xBEauJ3PK6SWCZ1PGjBvj8vDdWG3KpwATGy1ARAXFSDwt8GFXM7W5Ncn16wmqokgpiKRLuS83KUxyZyv2sUYv",
    ),
    machine=MachineView(42.0, 4 * 2**30, 16 * 2**30, 256 * 2**20, "cpu"),
    log=("12:00:00 serving: Every relay session is open.",),
)

HOSTILE_SNAPSHOT = replace(
    SERVING,
    version=HOSTILE,
    name=HOSTILE,
    worker_id=HOSTILE * 5,
    wallet=HOSTILE,
    gateway="https://" + HOSTILE,
    state=PhaseState(Phase.DIALLING, NOW_S - 1, HOSTILE * 4, HOSTILE * 4),
    held=SliceView("experts", HOSTILE, None, 5, 5, 0, None, HOSTILE),
    relays=tuple(
        RelayView(HOSTILE * 2, state, 0.0, 1e9, 10**15, 10**15, 99.0, HOSTILE) for state in ("waiting", HOSTILE)
    ),
    work=WorkView(10**15, 10**15, 10**15, 10**15, 1e12, 1e12, (1e12,) * 240),
    earnings=EarningsView(10**18, 10**18, HOSTILE, 10**18, 10**18, 10**18, 10**18, HOSTILE, HOSTILE),
    download=DownloadView(HOSTILE, 10**15, None),
    machine=MachineView(1e6, 10**15, 10**12, 10**15, HOSTILE),
    log=(HOSTILE, HOSTILE * 20),
)


def in_phase(phase: Phase, snapshot: NodeSnapshot = SERVING, *, why: str = "", **changes: Any) -> NodeSnapshot:
    return replace(snapshot, state=PhaseState(phase, NOW_S - 10, why, ""), **changes)


class FakeSource:
    """A node whose snapshot, failures and answers a test sets."""

    def __init__(self, snapshot: NodeSnapshot = SERVING, title: str = "fake") -> None:
        self.title = title
        self.current = snapshot
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None
        """If set, a snapshot waits for it."""
        self.claims = 0
        self.claim_failure: KvasirError | None = None
        self.unlocks: list[str] = []
        self.passphrase = "right"
        self.reads = 0

    async def snapshot(self) -> NodeSnapshot:
        self.reads += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return self.current

    async def claim(self) -> str:
        self.claims += 1
        if self.claim_failure is not None:
            raise self.claim_failure
        return "2.141592 KVR claimed; the claim is reserved."

    async def unlock(self, passphrase: str) -> None:
        from kvasir_console.errors import WalletError

        self.unlocks.append(passphrase)
        if passphrase != self.passphrase:
            raise WalletError("wrong_passphrase", "The passphrase is wrong.", "Try again.")
        self.current = replace(self.current, wallet_locked=False)


UNREACHABLE = NetworkError("no_node_there", "No node answers there.", "Start one.")


class Clock:
    def __init__(self, now_s: float = NOW_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def console(sources: Sequence[FakeSource], **options: Any) -> ConsoleApp:
    """A console that reads once at the start and then only when a test says so."""
    options.setdefault("clock", Clock())
    options.setdefault("symbols", Symbols.BRAILLE)
    return ConsoleApp(sources, interval_s=86_400, **options)


async def refreshed(app: ConsoleApp, pilot: Any) -> None:
    await app.read_now()
    await pilot.pause()


def screen_text(app: ConsoleApp) -> str:
    """What stands on the terminal, row by row, modal screens included."""
    update = app.screen._compositor.render_update(full=True, screen_stack=app._background_screens)
    rows = []
    for row in update.strips:  # type: ignore[union-attr]
        rows.append("".join(strip.text for strip in row if strip is not None))
    return "\n".join(rows)
