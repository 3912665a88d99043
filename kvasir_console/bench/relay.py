"""``kvasir-console bench relay``: what the relay costs a remote layer, and how much it carries.

Four processes as in the network: trunk engine, gateway (front port with TLS, hub), node (uplink), worker engine. A
layer's round trip through the relay is compared with the same round trip over a socket between the two engines, in
alternation, while both engines compute. Every payload is compared with the digest of what was sent.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvasir_console.bench.lines import LineChild
from kvasir_console.bench.links import Links
from kvasir_console.bench.stats import Interval, median, paired_difference
from kvasir_console.errors import NetworkError
from kvasir_console.local.certificates import make_certificates

ADDED_MS_BAR = 1.0
MB_S_BAR = 300.0
_PARTS = "kvasir_console.bench.relay_parts"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_OPEN_S = 60.0


async def run(
    *,
    pairs: int = 9,
    rounds: int = 200,
    hidden: int = 2048,
    blocks: int = 24,
    rtt_ms: float = 0.0,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The report as JSON values.

    Args:
        rounds: round trips in one measurement.
        hidden: width of the hidden state; a layer sends one row of it as v2f16 does, and gets one back.
        blocks: of 8 MiB, in one measurement of the rate.
        rtt_ms: given by a delay proxy to the link between node and hub.

    Raises:
        NetworkError: the session does not open.
    """
    payload = 2 * hidden + 10 * 2 + 16
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-")))
        trunk, worker = await _network(stack, directory, rtt_ms, seed)
        say(f"four processes, TLS, one row of {hidden} a layer, link RTT {rtt_ms:g} ms")
        added: dict[bool, Interval] = {}
        samples: dict[str, list[float]] = {}
        for computing in (False, True):
            for end in (trunk, worker):
                await end.ask("compute", on=computing)
            direct: list[float] = []
            relay: list[float] = []
            for pair in range(pairs + 1):
                for path, times in (("direct", direct), ("relay", relay)):
                    answer = await trunk.ask("latency", path=path, rounds=rounds, bytes=payload)
                    if pair:  # the first is for warming up
                        times.append(answer["ms"])
            added[computing] = paired_difference(relay, direct, seed)
            samples = {"direct_ms": direct, "relay_ms": relay}  # in the end, of engines that compute
            say(f"added to a layer, engines {'computing' if computing else 'idle'}: {_text(added[computing])} ms")
        for end in (trunk, worker):
            await end.ask("compute", on=False)
        rates: dict[str, list[float]] = {"up": [], "down": []}
        for pair in range(pairs + 1):
            for way, found in rates.items():
                answer = await trunk.ask("stream", path="relay", way=way, blocks=blocks)
                if pair:
                    found.append(answer["mb_s"])
        rate = {way: median(found, seed) for way, found in rates.items()}
        for way, interval in rate.items():
            say(f"{way}: {_text(interval)} MB/s")
    busy, idle = added[True], added[False]
    return {
        "bench": "relay",
        "pairs": pairs,
        "rtt_ms": rtt_ms,
        "hidden": hidden,
        "seed": seed,
        "added_ms_per_layer_p50": busy.median,
        "added_ms_per_layer_p50_ci": [busy.low, busy.high],
        "added_ms_per_layer_idle_p50": idle.median,
        "added_ms_per_layer_idle_p50_ci": [idle.low, idle.high],
        "samples_added": samples,
        "up_mb_s": rate["up"].median,
        "up_mb_s_ci": [rate["up"].low, rate["up"].high],
        "down_mb_s": rate["down"].median,
        "down_mb_s_ci": [rate["down"].low, rate["down"].high],
        "bars": {
            "added_ms_per_layer_p50": busy.high - rtt_ms <= ADDED_MS_BAR,
            "up_mb_s": rate["up"].low >= MB_S_BAR,
            "down_mb_s": rate["down"].low >= MB_S_BAR,
        },
    }


def describe(report: dict[str, Any]) -> str:
    lines = [f"relay, {report['pairs']} pairs, link RTT {report['rtt_ms']:g} ms"]
    for field, label, unit in (
        ("added_ms_per_layer_p50", "added to a layer, both engines computing", "ms"),
        ("added_ms_per_layer_idle_p50", "added to a layer, engines idle", "ms"),
        ("up_mb_s", "node to gateway", "MB/s"),
        ("down_mb_s", "gateway to node", "MB/s"),
    ):
        low, high = report[f"{field}_ci"]
        bar = {True: "holds", False: "missed", None: ""}[report["bars"].get(field)]
        lines.append(f"{label:42}{report[field]:>9.2f} {unit:5} 95% of it {low:.2f} to {high:.2f}  {bar}".rstrip())
    return "\n".join(lines)


async def _network(stack: AsyncExitStack, directory: Path, rtt_ms: float, seed: int) -> tuple[LineChild, LineChild]:
    """Start the four processes and join them; the two engines."""
    certificates = make_certificates(directory)
    trunk_socket, worker_socket, direct = (str(directory / name) for name in ("trunk", "worker", "direct"))

    async def part(role: str, options: dict[str, Any]) -> LineChild:
        return await stack.enter_async_context(LineChild(_PARTS, role, json.dumps(options), **_ONE_THREAD))

    worker = await part("worker", {"data": worker_socket, "direct": direct, "seed": seed})
    await worker.ask("compute", on=False)  # it listens once it answers
    trunk = await part("trunk", {"data": trunk_socket, "direct": direct, "seed": seed})
    await trunk.ask("compute", on=False)
    hub = await part(
        "hub",
        {
            "engine_socket": trunk_socket,
            "certificate": str(certificates.chain),
            "key": str(certificates.key),
        },
    )
    port = int((await hub.ask("port"))["port"])
    if rtt_ms:
        links = await stack.enter_async_context(Links(seed))
        port = await links.open("node", port, rtt_ms=rtt_ms)
    gateway = f"https://127.0.0.1:{port}"
    node = await part(
        "node", {"gateway": gateway, "authority": str(certificates.authority), "engine_socket": worker_socket}
    )
    try:
        async with asyncio.timeout(_OPEN_S):
            await trunk.ask("join")
    except TimeoutError:
        why = (await node.ask("state"))["last_close"]
        raise NetworkError("bench_session", f"The relay session did not open: {why or 'no answer'}.") from None
    return trunk, worker


def _text(interval: Interval) -> str:
    return f"{interval.median:.3f} ({interval.low:.3f} to {interval.high:.3f})"
