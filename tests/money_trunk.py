"""The source of work, as a process that tests kill: what a gateway's engine and request store count as done.

Each start is a new run of the engine, whose counters begin at zero; what a run had read into the meter before it was
killed stays there.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import time
from typing import Any

from kvasir_console.errors import KvasirError
from kvasir_console.node.gateway.census import Census
from kvasir_console.node.gateway.metering import Meter
from kvasir_console.node.gateway.store import RequestRecord, Store
from kvasir_console.node.placement.plan import Plan, PlannedStage
from kvasir_console.relay.wire.signed import canonical_json

from money_node import wallet_key

PAUSE_S = 0.15
LAYERS = 30
PLAN_CUTS = (0, 7, 30)
"""Layers where the ring of two stages is cut: shares that are no whole numbers."""


def plan_text() -> str:
    stages = tuple(
        PlannedStage(rank, str(wallet_key(rank).pubkey()), PLAN_CUTS[rank], PLAN_CUTS[rank + 1]) for rank in range(2)
    )
    return canonical_json(Plan("ring", "dense", "0" * 64, LAYERS, 1, stages).to_dict())


async def run(settings: dict[str, Any]) -> None:
    store = Store.open(settings["database"])
    meter = Meter(store, Census(1))
    run_id, work = secrets.token_hex(8), random.Random()
    sessions = []
    for number in range(settings["n"]):
        wallet = str(wallet_key(number).pubkey())
        meter.admitted(f"s{number}", wallet, f"worker-{number}", "moe", {"os": "linux"})
        sessions.append({"session": f"s{number}", "wallet": wallet, "layer": 0, "begin": 0, "end": 1})
    counters = [{"paid_bytes": 0, "requests": 0, "rows": 0, "pairs": 0} for _ in sessions]
    while True:
        for counter in counters:
            counter["paid_bytes"] += work.randrange(100_000)
            counter["requests"] += 1
        try:
            await meter.read_engine(
                run_id, [{**session, **counter} for session, counter in zip(sessions, counters, strict=True)]
            )
            request_id = secrets.token_hex(8)
            await asyncio.to_thread(store.begin_request, request_id, "dense", int(time.time()))
            record = RequestRecord(
                request_id, 5, 5, "stop", (), "ring", 1, plan_text(), token_rows=1 + work.randrange(40)
            )
            await asyncio.to_thread(store.finish_request, record, int(time.time()))
        except KvasirError as error:
            print(error, file=sys.stderr)
        await asyncio.sleep(PAUSE_S)
